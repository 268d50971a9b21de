"""The packed sequences of the forward that runs now, for all that computes in it: masks, attention and modules with states.

    packs = running_packs(1, 24)          # of a call with 24 tokens in a batch of 1; None without packed sequences
    packs.cu_seqlens                      # where they begin

A caller tells transformers of packed sequences by arguments of a model's forward. Some classes do not hand these arguments
down to their attention, and others make their masks without them, so that sequences would see each other without a word.
`packed_forwards.py` notes here what the caller told, before the forward. `mask_forward` writes it into each mask, and
`check_layer` refuses a call of attention that has not been told.

Left out: which arguments tell it, and models that cannot follow it (packed_forwards.py).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fa_serve.spec import UnsupportedModelError


@dataclass(eq=False)
class Packs:
    """The packed sequences of a forward.

    cu_seqlens: (n + 1,) int32: where each begins, and the end; None if only positions tell it
    restarts:   whether position_ids come back to the first one, and nothing else tells the sequences
    of_states:  (n + 1,) int32, for modules with states; None if these take the tokens for one sequence
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
    """A forward of a model, or of a part of one, that has begun.

    outer: the forward of the model that the part belongs to, if there is one
    shape: (batch, tokens) of its input_ids or inputs_embeds; None for a part that takes others, such as images
    """

    model: nn.Module
    outer: Forward | None
    shape: tuple[int, ...] | None
    packs: Packs | None = None


class _Running(threading.local):
    # no ContextVar, which torch.compile cannot trace
    forward: Forward | None = None


running = _Running()


def running_packs(batch: int, tokens: int) -> Packs | None:
    """The packed sequences of the forward that runs now, if it is one of such a batch."""
    forward = running.forward
    if forward is None or forward.packs is None or forward.shape != (batch, tokens):
        return None
    return forward.packs


def packs_of_states() -> Tensor | None:
    """Where packed sequences begin, for a module with states; None without packed sequences."""
    forward = running.forward
    return None if forward is None or forward.packs is None else forward.packs.of_states


def refuse_untold_positions(asking: object) -> None:
    """Raise UnsupportedModelError because a model, or a mask of its config, does not know of positions that start again."""
    raise UnsupportedModelError(
        f"position_ids that start again mean packed sequences, but the masks that transformers makes here for "
        f"{type(asking).__name__} do not tell these apart: pass use_cache=False, and where that is not enough also "
        "cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k, as "
        "DataCollatorWithFlattening(return_flash_attn_kwargs=True) does. If all tokens are one sequence, pass an "
        "attention_mask of ones"
    )


def check_layer(module: nn.Module, query: Tensor, mask: Any, told: bool, chooses_blocks: bool = False) -> None:
    """Raise UnsupportedModelError if the forward has packed sequences, and a call of attention in it does not know of them.

    mask: the call's; told: whether the call's own words or its mask say where packed sequences begin
    chooses_blocks: whether queries choose blocks of keys, which are counted from the start of the row
    """
    forward = running.forward
    if forward is None or forward.packs is None:
        return  # the usual case, in each layer of each token of `generate`
    packs = running_packs(query.shape[0], query.shape[2])
    if packs is not None and chooses_blocks and (packs.cu_seqlens is not None or packs.restarts):
        raise UnsupportedModelError(
            f"{type(module).__name__} lets its queries choose blocks of keys, which hold keys of several packed sequences: "
            "pass one sequence in each row, with padding and an attention_mask"
        )
    if packs is None or told or (packs.in_masks and isinstance(mask, Tensor)):
        return
    if (packs.cu_seqlens is None and not packs.restarts) or getattr(module, "is_cross_attention", False):
        return
    raise UnsupportedModelError(
        f"packed sequences must be told to every layer, but {type(module).__name__} gets neither cu_seq_lens_q nor a mask "
        "that tells them apart from its model: pass use_cache=False and no attention_mask, or one sequence in each row, with "
        "padding and an attention_mask"
    )
