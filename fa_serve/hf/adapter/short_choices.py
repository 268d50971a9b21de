"""Modules whose queries choose keys in sequences longer than a limit, and all keys in shorter ones (MiniMax M3, GLM 5 Next).

    limit = patch_short_choices(model)     # tokens of a sequence up to which queries choose all keys; None without such modules
                                          # raises UnsupportedModelError for a module that leaves out keys of shorter sequences

Such a module scores blocks or pools of keys and keeps the best ones. The engine cannot make this choice on a paged cache, but
in sequences of up to `limit` tokens there is nothing to choose: the model attends to all keys. So while a batch rides along,
the module returns no choice and keeps no keys, and the engine takes no longer sequences. Without a batch, as in `generate`, the
module's own code runs.

Left out: indexers of single keys, which choose from a paged cache (indexers.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from fa_serve.hf.adapter.attention import riding_batch
from fa_serve.hf.adapter.releases import cache_argument
from fa_serve.spec import UnsupportedModelError

_NOTE = "_fa_serve_short_choices"
_TOKENS = 24


class Silent:
    """Replaces a method of one module: returns `said(arguments)` while a batch rides along, and otherwise calls the method."""

    def __init__(self, module: nn.Module, method: str, said: Callable[..., Any]) -> None:
        self.module = module
        self.method = method
        self.said = said

    def __reduce__(self) -> tuple[Any, ...]:
        return Silent, (self.module, self.method, self.said)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if riding_batch() is not None:
            return self.said(*args, **kwargs)
        return getattr(type(self.module), self.method)(self.module, *args, **kwargs)


def no_blocks(*args: Any, **kwargs: Any) -> None:
    """Return None as the chosen blocks of keys, which attention takes to mean all blocks."""


def no_keys(*, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """Return indices of no keys, (batch, seqlen, 0), which attention takes to mean all keys."""
    return torch.empty(*hidden_states.shape[:2], 0, dtype=torch.int32, device=hidden_states.device)


def empty_mask(*, query_states: Tensor, **kwargs: Any) -> Tensor:
    """An empty mask, as `paged_output` passes it."""
    return torch.empty((1, 1, 0, 0), dtype=torch.bool, device=query_states.device)


@dataclass(frozen=True, slots=True)
class _Kind:
    """One way in which modules choose keys.

    calls: the method of a cache that the module's own forward calls; has: an attribute of the module that identifies the kind
    limit: up to how many tokens of a sequence all keys are chosen
    said:  see `Silent`; mask_of: the method by which the parent's attention turns the choice into a mask, or ""
    chosen: which keys each of `_TOKENS` random tokens chooses by the module's own code, (tokens, tokens) bool
    """

    calls: str
    has: str
    limit: Callable[[Any], int]
    said: Callable[..., Any]
    chosen: Callable[[Any], Tensor]
    mask_of: str = ""


def _random(module: nn.Module, width: int) -> Tensor:
    weight = next(module.parameters())
    return torch.randn(1, _TOKENS, width, generator=torch.Generator().manual_seed(0)).to(weight)


def _keys_in_blocks(module: Any) -> Tensor:
    hidden = _random(module, module.q_proj.in_features)
    angles = _random(module, module.head_dim)
    places = torch.arange(_TOKENS, device=hidden.device)
    blocks = module(hidden, (angles.cos(), angles.sin()), None, places[None])
    return cast(Tensor, (blocks[0, ..., None] == places // module.block_size).any(-2).all(0))


def _keys_in_pools(module: Any) -> Tensor:
    hidden = _random(module, module.wk.in_features)
    seen = torch.ones(1, _TOKENS, dtype=torch.bool, device=hidden.device)
    found = module(
        hidden_states=hidden,
        q_resid=_random(module, module.wq_b.in_features),
        attention_mask=seen,
        **{cache_argument(module.forward): None},
    )
    return cast(Tensor, (found[0, ..., None] == torch.arange(_TOKENS, device=hidden.device)).any(-2))


_KINDS = (
    _Kind("update_index", "topk_blocks", lambda x: int(x.topk_blocks * x.block_size), no_blocks, _keys_in_blocks),
    _Kind(
        "update_indexer",
        "index_kpool",
        lambda x: int(x.index_topk),
        no_keys,
        _keys_in_pools,
        mask_of="build_attention_mask_from_topk",
    ),
)


def find_short_choices(model: nn.Module) -> Iterator[tuple[nn.Module, _Kind]]:
    """The modules that choose keys in one of the ways of `_KINDS`, each with its way."""
    for module in model.modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        names = set() if code is None else set(code.co_names)
        for kind in _KINDS:
            if kind.calls in names and hasattr(module, kind.has):
                yield module, kind


@torch.no_grad()
def patch_short_choices(model: PreTrainedModel) -> int | None:
    """Let the modules that choose keys make no choice while a batch rides along.

    Returns the number of tokens of a sequence up to which this is right, or None for a model without such modules.
    """
    found = list(find_short_choices(model))
    for module, kind in found:
        if "forward" in vars(module):
            continue
        if module_device(module).type != "meta":
            _require_all_keys(module, kind)
        module.forward = Silent(module, "forward", kind.said)
        for parent in model.modules():
            if kind.mask_of and module in parent.children():
                setattr(parent, kind.mask_of, Silent(parent, kind.mask_of, empty_mask))
    limit = min((kind.limit(module) for module, kind in found), default=None)
    model.__dict__[_NOTE] = limit
    return limit


def module_device(module: nn.Module) -> torch.device:
    """The device of a module's weights."""
    return next(module.parameters()).device


def length_limit(model: PreTrainedModel) -> int | None:
    """What `patch_short_choices` has returned for a model; None for a model that it has not been called for."""
    return cast("int | None", model.__dict__.get(_NOTE))


def _require_all_keys(module: Any, kind: _Kind) -> None:
    tokens = min(_TOKENS, kind.limit(module))
    seen = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool).tril()
    if (seen & ~kind.chosen(module).cpu())[:tokens].any():
        raise UnsupportedModelError(f"{type(module).__name__} leaves out keys of sequences of {tokens} tokens")
