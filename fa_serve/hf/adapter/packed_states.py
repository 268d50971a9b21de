"""Where packed sequences begin, for modules that keep states: transformers tells it to attention, and to few mixers.

    watch_packing(model)             # once for each model that is made with fa_serve

A hook before the forward of a model with such modules looks for packed sequences in the arguments by which transformers and its
attention know them: `cu_seq_lens_q`, `seq_idx`, or positions that restart. A `SeatedMixer` is told where they begin, so that no
state leaks from one sequence into the next. A module that is not seated would leak it, so packed sequences are refused then.

Left out: padding, which mixers set to zero themselves, and the engine's steps, whose `StateBatch` knows the sequences.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import find_packed_sequence_indices

from fa_serve.hf.adapter.state_modules import SeatedMixer, find_state_modules
from fa_serve.spec import UnsupportedModelError

_WATCHED = "_fa_serve_watches_packing"
_MIXERS = "_fa_serve_mixers"


def watch_packing(model: PreTrainedModel) -> None:
    """Look for packed sequences before each forward of this model. Its modules need not be there yet."""
    if _WATCHED not in model.__dict__:
        model.__dict__[_WATCHED] = True
        model.register_forward_pre_hook(_tell, with_kwargs=True)
        model.register_forward_hook(_forget, always_call=True)


def _tell(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if "fa_serve_batch" in kwargs:
        return  # a step of the engine
    given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    given |= given.pop("kwargs", {})
    cu_seqlens = _starts(model, given)
    for module in _mixers(model):
        seated = vars(module).get("forward")
        if isinstance(seated, SeatedMixer):
            seated.cu_seqlens = cu_seqlens
        elif cu_seqlens is not None:
            raise UnsupportedModelError(
                f"packed sequences in {type(model).__name__} need fa_serve.patch(model) after its weights are loaded, because "
                f"{type(module).__name__} would carry the state of one sequence into the next"
            )


def _forget(model: nn.Module, *unused: Any) -> None:
    for module in _mixers(model):
        seated = vars(module).get("forward")
        if isinstance(seated, SeatedMixer):
            seated.cu_seqlens = None


def _mixers(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that keep states, which are looked for once."""
    if _MIXERS not in model.__dict__:
        model.__dict__[_MIXERS] = find_state_modules(model)
    found: list[nn.Module] = model.__dict__[_MIXERS]
    return found


def _starts(model: Any, given: dict[str, Any]) -> Tensor | None:
    """The first token of each packed sequence and the number of tokens, (n + 1,) int32; None without packed sequences."""
    if given.get("cu_seq_lens_q") is not None:
        cu_seqlens: Tensor = given["cu_seq_lens_q"]
        return cu_seqlens.to(torch.int32)
    numbers = given.get("seq_idx")
    if numbers is None:
        positions = given.get("position_ids")
        use_cache = given.get("use_cache")
        caches = getattr(model.config, "use_cache", False) if use_cache is None else use_cache
        # as transformers does, which takes the tokens for one sequence if there is a cache or a mask
        if positions is None or given.get("attention_mask") is not None or caches or torch.compiler.is_compiling():
            return None
        numbers = find_packed_sequence_indices(positions if positions.dim() == 2 else positions[0])
    if numbers is None:
        return None
    if len(numbers) > 1:
        raise UnsupportedModelError(
            f"packed sequences need a batch of 1 that holds them end to end, got a batch of {len(numbers)} from "
            f"{type(model).__name__}"
        )
    begins = torch.diff(numbers[0], prepend=numbers[0, :1] - 1) != 0
    end = torch.tensor([numbers.shape[1]], device=numbers.device)
    return torch.cat([begins.nonzero()[:, 0], end]).to(torch.int32)
