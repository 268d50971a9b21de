"""The packed sequences of the running forward, for everything that computes in it: masks, attention and modules with states.

    packs = running_packs(1, 24)          # for a call with 24 tokens in a batch of 1; None without packed sequences
    packs.cu_seqlens                      # where they begin

A caller tells transformers about packed sequences by arguments of a model's forward. Some classes do not hand these arguments
down to their attention, and others make their masks without them. Then sequences would silently see each other. So
`packed_forwards.py` notes here, before the forward, what the caller told. `mask_forward` writes it into each mask, and
`check_layer` refuses an attention call that knows nothing of the packed sequences.

Left out: which arguments tell about packed sequences, and which models cannot follow them (packed_forwards.py).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.import_utils import is_cuda_stream_capturing, is_torchdynamo_compiling, is_tracing

from fa_serve.spec import UnsupportedModelError


@dataclass(eq=False)
class Packs:
    """The packed sequences of a forward.

    cu_seqlens: (n + 1,) int32: where each sequence begins, and the end; None if only position_ids tell the sequences apart
    restarts:   whether position_ids return to the first position, and nothing else tells the sequences apart
    of_states:  (n + 1,) int32: `cu_seqlens` for modules with states; None if these treat the tokens as one sequence
    in_masks:   whether masks of this forward tell the sequences apart
    """

    cu_seqlens: Tensor | None = None
    restarts: bool = False
    of_states: Tensor | None = None
    in_masks: bool = False

    def numbers(self, total: int) -> Tensor:
        """(1, total) int64: the number of the sequence of each token."""
        assert self.cu_seqlens is not None
        places = torch.arange(total, device=self.cu_seqlens.device, dtype=torch.int32)
        return torch.searchsorted(self.cu_seqlens[1:], places, right=True)[None]

    def positions(self, total: int) -> Tensor:
        """(1, total) int64: the place of each token in its sequence."""
        assert self.cu_seqlens is not None
        starts = self.cu_seqlens.long()
        return torch.arange(total, device=starts.device) - starts[self.numbers(total).clamp(max=len(starts) - 2)]


@dataclass(eq=False)
class Forward:
    """A running forward of a model or of a part of a model.

    outer: the running forward of the model that the part belongs to, or None
    shape: (batch, tokens) of its input_ids or inputs_embeds; None for a part with other inputs, such as images
    """

    model: nn.Module
    outer: Forward | None
    shape: tuple[int, ...] | None
    packs: Packs | None = None


class _Running(threading.local):
    # not a ContextVar, because torch.compile cannot trace one
    forward: Forward | None

    def __init__(self) -> None:
        # In each thread, before the first forward. torch.compile guards on whether an instance has an attribute, and a forward
        # that it traces while there is only one of the class sets that of the instance: its own guard fails then.
        self.forward = None


running = _Running()


def is_captured() -> bool:
    """Whether this forward's launches are recorded in a CUDA graph. Then the host cannot read values on the device, but it runs
    the model's code as always, and can read closures and sizes."""
    if is_torchdynamo_compiling() or torch._C._is_tracing():
        return False  # asked first, because torch.compile cannot trace the question whether a stream is captured
    return bool(is_cuda_stream_capturing())


def hides_values(tensor: Tensor | None) -> bool:
    """Whether the host cannot read a tensor, because the forward is traced or recorded in a CUDA graph, or because `torch.vmap`
    maps over the tensor."""
    if is_tracing(tensor):
        return True
    while tensor is not None and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        if torch._C._functorch.is_batchedtensor(tensor):
            return True
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return False


def running_packs(batch: int, tokens: int) -> Packs | None:
    """The packed sequences of the running forward, or None if it has none or other sizes than these."""
    forward = running.forward
    if forward is None or forward.packs is None or forward.shape != (batch, tokens):
        return None
    return forward.packs


def packs_of_states() -> Tensor | None:
    """Where packed sequences begin, for a module with states; None without packed sequences."""
    forward = running.forward
    return None if forward is None or forward.packs is None else forward.packs.of_states


def refuse_untold_positions(asking: object) -> None:
    """Raise UnsupportedModelError because position_ids start again, and masks or states do not follow them.

    asking: the model, or the config of the model whose mask is made
    """
    raise UnsupportedModelError(
        f"position_ids that start again mean packed sequences, but the masks that transformers makes here for "
        f"{type(asking).__name__} do not tell these sequences apart: pass use_cache=False, and if that is not enough also "
        "cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k, as "
        "DataCollatorWithFlattening(return_flash_attn_kwargs=True) does. If all tokens are one sequence, pass an "
        "attention_mask of ones"
    )


def check_layer(module: nn.Module, query: Tensor, mask: Any, told: bool, chooses_blocks: bool = False) -> None:
    """Raise UnsupportedModelError if the forward has packed sequences and an attention call in it does not know of them.

    mask: the mask of the call; told: whether the call's own arguments or its mask say where packed sequences begin
    chooses_blocks: whether queries choose blocks of keys, which are counted from the start of the row
    """
    forward = running.forward
    if forward is None or forward.packs is None:
        return  # the usual case, so it comes first: `generate` gets here in each layer of each token
    packs = running_packs(query.shape[0], query.shape[2])
    if packs is not None and chooses_blocks and (packs.cu_seqlens is not None or packs.restarts):
        raise UnsupportedModelError(
            f"{type(module).__name__} lets its queries choose blocks of keys, which may hold keys of several packed sequences: "
            "pass one sequence in each row, with padding and an attention_mask"
        )
    if packs is None or told or (packs.in_masks and isinstance(mask, Tensor)):
        return
    if (packs.cu_seqlens is None and not packs.restarts) or getattr(module, "is_cross_attention", False):
        return
    raise UnsupportedModelError(
        f"every layer must know where packed sequences begin, but {type(module).__name__} gets from its model neither "
        "cu_seq_lens_q nor a mask that tells the sequences apart: pass use_cache=False and no attention_mask, or one sequence "
        "in each row, with padding and an attention_mask"
    )
