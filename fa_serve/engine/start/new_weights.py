"""Sources of new weights for a running engine, as `Engine.update_weights` takes them: (name, tensor), one at a time.

    engine.update_weights(from_folder(model, "/checkpoints/step-100"))
    engine.update_weights(from_shared_memory(model, "trainer-weights", tensors))
    engine.update_weights(from_group(model, group, announced))

A folder holds a checkpoint as `save_pretrained` writes it. Shared memory is a segment of this machine, as Python's
`SharedMemory` makes it. It holds the numbers of all tensors, and a list says where each tensor is. In a group of
torch.distributed, a trainer broadcasts the tensors that it has announced. Nothing is unpickled. Left out: memory on the GPU of
another process (CUDA IPC), and how the group is made (fa_serve.engine.rollout.weight_group).
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from fa_serve.engine.rollout.weight_group import WeightGroup
from fa_serve.engine.runner.residence import check_weight, known_weights
from fa_serve.hf.adapter.composites import auto_class
from fa_serve.hf.weights.float_files import PLAIN
from fa_serve.spec import ParameterError

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
"""The dtypes of weights that come through shared memory or a group."""
SEGMENTS = Path("/dev/shm")
"""Where Linux keeps segments of shared memory."""


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """Where a tensor is in shared memory.

    name:   the parameter's name; dtype: one of DTYPES; offset: first byte of the tensor, which is contiguous
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * int(DTYPES[self.dtype].itemsize)


@dataclass(frozen=True, slots=True)
class AnnouncedTensor:
    """A tensor that a trainer will broadcast. name: the parameter's name; dtype: the parameter's, one of DTYPES"""

    name: str
    dtype: str
    shape: tuple[int, ...]


def from_folder(model: PreTrainedModel, folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """The weights of a checkpoint under the names that the model has for them.

    If the files have all weights under the names of the model, they are read one tensor at a time. Otherwise transformers,
    which knows how names and shapes are converted, loads them as a second model in host memory.

    Raises ParameterError, before it yields the first weight, for a folder without safetensors or with broken ones, for weights
    that the model does not have, and for a checkpoint that transformers cannot load or that lacks weights.
    """
    files = _files_of(Path(folder))
    saved = model.state_dict().keys()  # parameters, and buffers that checkpoints contain, such as biases of routers
    known = {name: x for name, x in known_weights(model).items() if name in saved}
    shapes: dict[str, list[int]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no dict
                    part = opened.get_slice(name)
                    shapes[name] = part.get_shape()
                    if name in known and known[name].is_floating_point() and part.get_dtype() not in PLAIN:
                        rule = f"have floats of 16 or more bits for {name}, because the engine takes no quantised weights"
                        raise ParameterError("weight_dir", rule, part.get_dtype())
        except (OSError, SafetensorError) as error:
            raise ParameterError(
                "weight_dir", f"hold intact safetensors files, but {file.name} is broken", str(error)
            ) from error
    given = {id(known[name]) for name in shapes.keys() & known.keys()}  # a checkpoint has one of the names of tied weights
    lacking = [name for name, x in known.items() if id(x) not in given]
    if shapes.keys() <= known.keys():
        _refuse_missing([name for name in lacking if isinstance(known[name], nn.Parameter)], folder)
    if shapes.keys() <= known.keys() and not lacking:
        for name, shape in shapes.items():
            check_weight(model, known, name, shape)
        for file in files:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no dict
                    yield name, opened.get_tensor(name)
        return
    loaded = _loaded(model, folder)
    yield from loaded.named_parameters()
    yield from ((name, buffer) for name, buffer in loaded.named_buffers() if name in known)


def _files_of(folder: Path) -> list[Path]:
    """The safetensors files that transformers would read; all safetensors files of the folder if they have other names."""
    whole = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ParameterError("weight_dir", "be a folder on this machine with safetensors files", str(folder))
        return files
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # not JSON, or not of this form
        rule = f"have a {index.name} whose weight_map names the file of each weight"
        raise ParameterError("weight_dir", rule, f"{type(error).__name__}: {str(error)[:128]}") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ParameterError("weight_dir", f"hold every file that {index.name} names, but {missing[0]} is missing", str(folder))
    return [folder / name for name in names]


def _loaded(model: PreTrainedModel, folder: str | Path) -> Any:
    """The checkpoint as a model in host memory, with its towers if it has any. Raises ParameterError for a checkpoint of
    another model, and for one that lacks weights, because transformers fills these with random numbers."""
    try:
        auto = auto_class(AutoConfig.from_pretrained(str(folder)))
        loaded, told = auto.from_pretrained(str(folder), dtype=model.dtype, output_loading_info=True, use_kernels=False)
    except (OSError, RuntimeError, ValueError) as error:
        raise ParameterError("weight_dir", "hold a checkpoint that transformers can load", str(error)) from error
    known = known_weights(model)
    for name, parameter in loaded.named_parameters():
        check_weight(model, known, name, parameter.shape)
    _refuse_missing(sorted(told["missing_keys"]), folder)
    return loaded


def _refuse_missing(names: Sequence[str], folder: str | Path) -> None:
    """Raise ParameterError if there are any names of weights that the folder lacks."""
    if names:
        raise ParameterError("weight_dir", f"hold every weight of the model, but {names[0]} is missing", str(folder))


def from_shared_memory(model: PreTrainedModel, segment: str, tensors: Sequence[SharedTensor]) -> Iterator[tuple[str, Tensor]]:
    """The weights in a segment of shared memory. The segment still belongs to its creator.

    Raises ParameterError, before it yields the first weight, for a segment that does not exist, for an unknown dtype, for a
    tensor that is not within the segment, and for a name or a shape that the model does not have.
    """
    known = known_weights(model)
    file = SEGMENTS / segment
    # not with `SharedMemory`, whose resource tracker would remove the segment at the end of this process
    if file.parent != SEGMENTS or not file.is_file():
        raise ParameterError("shared_memory", f"be the name of a shared memory segment on this machine, in {SEGMENTS}", segment)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        for each in tensors:
            if each.dtype not in DTYPES:
                raise ParameterError("dtype", f"be {', '.join(DTYPES)}", each.dtype)
            if min((*each.shape, each.offset)) < 0 or each.offset + each.num_bytes > len(memory):
                rule = f"have {each.name} within the {len(memory)} bytes of the segment"
                raise ParameterError("shared_memory", rule, f"{each.num_bytes} bytes from {each.offset} on")
            check_weight(model, known, each.name, each.shape)
        for each in tensors:
            # a copy, because a view would keep the segment open
            taken = bytearray(memory[each.offset : each.offset + each.num_bytes])
            dtype = DTYPES[each.dtype]
            numbers = torch.frombuffer(taken, dtype=dtype) if taken else torch.empty(0, dtype=dtype)
            yield each.name, numbers.view(each.shape)


def check_announced(model: PreTrainedModel, tensors: Sequence[AnnouncedTensor]) -> None:
    """Raise ParameterError for a name, a shape or a dtype that the model does not have.

    A tensor of another dtype would be rounded without anybody noticing, after more bytes than necessary had been sent.
    """
    known = known_weights(model)
    for each in tensors:
        check_weight(model, known, each.name, each.shape)
        if DTYPES.get(each.dtype) is not known[each.name].dtype:
            has = str(known[each.name].dtype).removeprefix("torch.")
            raise ParameterError("weights", f"have the dtype {has} for {each.name}: convert it in the trainer", each.dtype)


class DryRunEnded(Exception):
    """Raised by `from_group` instead of receiving, so that an update ends before it has an effect."""


def from_group(
    model: PreTrainedModel, group: WeightGroup, tensors: Sequence[AnnouncedTensor], *, dry_run: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """The weights that a trainer broadcasts, in the order in which it has announced them.

    Raises ParameterError as `check_announced` does, before anything is received, and WeightTransferError when the trainer has
    left the group or is late. A dry run raises DryRunEnded where a real run would begin to receive.
    """
    check_announced(model, tensors)
    if dry_run:
        raise DryRunEnded
    for each in tensors:
        received = torch.empty(each.shape, dtype=DTYPES[each.dtype], device=group.device)
        group.broadcast(received)
        yield each.name, received
