"""The memory of the KV cache and of states: how large a page and a state are, how many fit, and the tensors.

Every tensor is a view (page, token, head, dim), which is what `fa_serve.api` takes. On a GPU the memory is laid out as (page,
head, token, dim), so that a decoding kernel reads one contiguous range per head. On a CPU it is laid out as the view says, so
that consecutive pages need no copy to be read together. Left out: which sequence holds which page (pages.py) and state
(states.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fa_serve.engine.cache.states import MIN_STATES
from fa_serve.hf import LayerCall, OneSequence, StateKey, paged_forward, take_layer_idx
from fa_serve.ops import StateSpec, StateTensors, tail_rows
from fa_serve.spec import AttentionSpec, ParameterError

HEADROOM = 224.0
"""The float8 number that the largest value seen is stored as: half of what float8_e4m3fn can hold."""
CPU_SHARE = 0.25
"""The cache's share of the host memory that is available after the model has been loaded."""
STATE_TOKENS = 2048
"""Tokens of the KV cache for each state, where the engine decides how many states there are."""


def bytes_per_page(layers: Iterable[AttentionSpec], page_size: int) -> int:
    """Bytes of the keys and values of one page in all layers."""
    return sum(page_size * x.cached_bytes for x in layers)


def allocate(
    layers: Mapping[int, AttentionSpec], num_pages: int, page_size: int, device: torch.device
) -> dict[int, tuple[Tensor, Tensor]]:
    """(k_cache, v_cache) by layer: views (num_pages, page_size, num_kv_heads, head_dim or head_dim_v).

    Where values are the first numbers of the keys, v_cache is that part of k_cache.
    """

    def pages(layer: AttentionSpec, dim: int) -> Tensor:
        # Never zeroed: what has not been written is never read, and a CPU allocates memory only where it is touched.
        if device.type == "cpu":
            return torch.empty(num_pages, page_size, layer.num_kv_heads, dim, dtype=layer.kv_dtype)
        return torch.empty(num_pages, layer.num_kv_heads, page_size, dim, dtype=layer.kv_dtype, device=device).transpose(1, 2)

    caches = {}
    for index, layer in layers.items():
        keys = pages(layer, layer.head_dim)
        caches[index] = (keys, keys[..., : layer.head_dim_v] if layer.values_in_keys else pages(layer, layer.head_dim_v))
    return caches


@dataclass(frozen=True, slots=True)
class StateMemory:
    """The memory that the states of a model take.

    specs:        what each call of a recurrence keeps of a sequence; empty for a model without states
    page_size:    tokens between two states of a sequence
    max_num_seqs: number of slots, each of which has a tail: the tokens since the last state
    """

    specs: Mapping[StateKey, StateSpec]
    page_size: int
    max_num_seqs: int

    def __bool__(self) -> bool:
        return bool(self.specs)

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one state of one sequence in all layers."""
        return sum(spec.bytes_per_state for spec in self.specs.values())

    @property
    def bytes_of_tails(self) -> int:
        """Bytes of the tails of all slots in all layers."""
        return self.max_num_seqs * tail_rows(self.page_size) * sum(spec.bytes_per_row for spec in self.specs.values())

    def allocate(self, num_states: int, device: torch.device) -> dict[StateKey, StateTensors]:
        """The tensors of `num_states` states. They are not filled: what has not been written is never read."""
        return {key: spec.allocate(num_states, self.max_num_seqs, self.page_size, device) for key, spec in self.specs.items()}

    @property
    def least_states(self) -> int:
        """How many states there are at least: one for each running sequence, up to 32 of them, and some to write."""
        return max(MIN_STATES, min(self.max_num_seqs, 32) * 6 // 5 + 1)

    @property
    def least_bytes(self) -> int:
        """Bytes of `least_states` states and of the tails."""
        return self.bytes_of_tails + self.least_states * self.bytes_per_state

    def enough_states(self, num_pages: int) -> int:
        """More states than this hardly help. It counts states for running sequences, two for each of some sequences that have
        ended, and one for every STATE_TOKENS tokens that `num_pages` pages hold."""
        return self.least_states + 4 * self.max_num_seqs + num_pages * self.page_size // STATE_TOKENS

    def shares(self, room: int, bytes_per_page: int) -> tuple[int, int]:
        """(pages, states) that `room` bytes are divided into, after the tails.

        There is a state for every STATE_TOKENS tokens of the KV cache, and `least_states` in any case. If pages take no memory,
        because no layer has attention, the number of states decides how many pages there are.
        """
        room -= self.bytes_of_tails
        pages_per_state = max(STATE_TOKENS // self.page_size, 1)
        states = max(room // (self.bytes_per_state + pages_per_state * bytes_per_page), self.least_states)
        if not bytes_per_page:
            return states * pages_per_state, states
        return (room - states * self.bytes_per_state) // bytes_per_page, states


def fit_on_host(memory: StateMemory, bytes_per_page: int, enough_pages: int, num_ranks: int) -> tuple[int, int]:
    """How many pages and states a share of the host's memory holds; no more pages than `enough_pages`, and one at least."""
    room = int(available_memory() * CPU_SHARE / num_ranks)
    if not memory:
        return min(enough_pages, max(room // bytes_per_page, 1)), 0
    pages, states = memory.shares(room, bytes_per_page)
    return min(enough_pages, max(pages, 1)), min(states, memory.enough_states(enough_pages))


def check_num_states(num_states: int, memory: StateMemory, device: torch.device) -> None:
    """Raise ParameterError, with the arithmetic, if the weights leave no memory on the device for so many states."""
    if not memory:
        raise ParameterError("num_states", "be None for a model that keeps no states", num_states)
    room, where = _room_beside_weights(device)
    size = memory.bytes_per_state
    if num_states * size + memory.bytes_of_tails > room:
        rule = (
            f"be at most {max(room - memory.bytes_of_tails, 0) // size}: a state takes {size / 2**20:.4g} MiB in all layers, "
            f"{num_states} states take {num_states * size / 2**30:.4g} GiB, the tails of {memory.max_num_seqs} sequences take "
            f"{memory.bytes_of_tails / 2**30:.4g} GiB, and {room / 2**30:.4g} GiB {where} are available"
        )
        raise ParameterError("num_states", rule, num_states)


def check_num_pages(num_pages: int, size: int, page_size: int, num_layers: int, device: torch.device) -> None:
    """Raise ParameterError, with the arithmetic, if the weights leave no memory on the device for so many pages.

    size: bytes of a page of `page_size` tokens in all layers
    """
    room, where = _room_beside_weights(device)
    if num_pages * size > room:
        asked = num_pages * size / 2**30
        rule = (
            f"be at most {room // size}: a page of {page_size} tokens takes {size / 2**10:.4g} KiB in {num_layers} layers, "
            f"{num_pages} pages take {asked:.4g} GiB, and {room / 2**30:.4g} GiB {where} are available"
        )
        raise ParameterError("num_pages", rule, num_pages)


def _room_beside_weights(device: torch.device) -> tuple[int, str]:
    """Bytes that are available on a device after the model has been loaded, and the words that say which memory it is."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0], "of the GPU's memory"
    return reclaimable_memory(), "of memory"


class _Ranges(OneSequence):
    """Attends to one sequence, and notes each head's largest key and value, or the largest number of the latent keys.

    layers: what each layer caches
    """

    def __init__(self, layers: Mapping[int, AttentionSpec]) -> None:
        super().__init__()
        self.layers = layers
        self.largest: dict[int, tuple[Tensor, Tensor]] = {}
        self.outputs: dict[nn.Module, Tensor] = {}

    def note(self, module: nn.Module, args: object, output: Tensor) -> None:
        """A hook of the modules that make latent vectors and rotated keys. A rotation scales a number by 2^0.5 at most."""
        self.outputs[module] = output

    def attend(self, call: LayerCall) -> Tensor:
        index = take_layer_idx(call.module, self.states)
        if self.layers[index].values_in_keys:
            attention = cast(Any, call.module)
            parts = self.outputs[attention.kv_a_layernorm], self.outputs[attention.kv_a_proj_with_mqa]
            numbers = torch.cat([parts[0].flatten(), parts[1][..., parts[0].shape[-1] :].flatten()])
            largest = numbers.float().abs().amax()[None]
            self.largest[index] = largest, largest
        else:
            self.largest[index] = call.key[0].float().abs().amax(dim=(1, 2)), call.value[0].float().abs().amax(dim=(1, 2))
        return super().attend(call)


@torch.inference_mode()
def descales(
    model: PreTrainedModel, vocab: int, layers: Mapping[int, AttentionSpec], num_tokens: int = 256
) -> dict[int, tuple[Tensor, Tensor]]:
    """(k_descale, v_descale) by layer: what stored float8 keys and values are multiplied by, (num_kv_heads,) float32 each.

    One forward over random tokens decides: the largest absolute value that it meets is stored as HEADROOM, which is half of
    what float8_e4m3fn holds. Values of more than twice that size are saturated. Latent keys have one number for both, because
    their values are a part of them.

    layers: what each layer caches
    """
    ids = torch.randint(vocab, (num_tokens,), generator=torch.Generator().manual_seed(0)).to(model.device)
    ranges = _Ranges(layers)
    names = (".kv_a_layernorm", ".kv_a_proj_with_mqa")
    hooks = [m.register_forward_hook(ranges.note) for name, m in model.named_modules() if name.endswith(names)]
    paged_forward(model, ids, torch.arange(num_tokens, device=model.device), ranges, ids[:1] * 0)
    for hook in hooks:
        hook.remove()
    scaled = {index: tuple(x.clamp(min=1e-6) / HEADROOM for x in pair) for index, pair in ranges.largest.items()}
    return cast(dict[int, tuple[Tensor, Tensor]], scaled)


def rescale(
    known: Mapping[int, tuple[Tensor, Tensor]], model: PreTrainedModel, vocab: int, layers: Mapping[int, AttentionSpec]
) -> None:
    """Write the scales for new weights into the tensors that `descales` returned, because CUDA graphs read these tensors."""
    found = descales(model, vocab, layers)
    for index, pair in known.items():
        for old, new in zip(pair, found[index], strict=True):
            old.copy_(new)


def device_room(device: torch.device, share: float, needed: int, least: int) -> int:
    """Bytes of a GPU's memory for the KV cache, at least `least`. Raises ParameterError if there is less.

    share:  share of the whole memory, for this process and the other programs that use the GPU now
    needed: bytes that this process needs in addition to the cache
    """
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    room = int(total * share) - others - needed
    if room < least:
        rule = (
            f"leave room for a KV cache in {total / 2**30:.1f} GiB: weights and the largest step take "
            f"{needed / 2**30:.1f} GiB, other programs {others / 2**30:.1f} GiB"
        )
        raise ParameterError("gpu_memory_utilization", rule, share)
    return room


def available_memory() -> int:
    """Bytes of host memory that are available now: the machine's, or the container's if that is less."""
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        available = 4 << 30  # macOS does not report it; CPU_SHARE of this fits on any machine
    return min(available, _container_room(with_file_caches=False))


def reclaimable_memory() -> int:
    """Bytes of host memory that this process could get at most: what is available now, and caches of files.

    More than this fails or is killed, so it bounds what the operator may ask for. `available_memory` decides what the engine
    takes by default.
    """
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) << 10
    return min(available, _container_room(with_file_caches=True))


def _container_room(with_file_caches: bool) -> int:
    """Bytes that the container may still use, and those of its file caches that the kernel can take back."""
    group = Path("/sys/fs/cgroup")
    files = [group / "memory.max", group / "memory.current", group / "memory.stat"]
    if not all(file.exists() for file in files) or files[0].read_text().strip() == "max":
        return sys.maxsize
    room = int(files[0].read_text()) - int(files[1].read_text())
    if with_file_caches:
        statistics = dict(line.split() for line in files[2].read_text().splitlines())
        room += int(statistics.get("inactive_file", 0))
    return room
