"""Gives indexers the forward of `PatchedIndexer`, where that is proven to choose the same keys.

    patch_indexers(model)             # raises UnsupportedModelError for a module that would choose other keys

In the proof, the own code of a float32 copy of a module ranks all visible keys for each of a few random tokens. In the order of
this ranking, the scores of the patched form must never increase. All forms of rotary embedding are tried until one fits.

Left out: which modules are indexers, and the values by which they choose (adapter/indexers.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fa_serve.hf.adapter.indexers import IndexCall, IndexerRotation, PatchedIndexer, find_indexers, require_parts
from fa_serve.hf.surgery.proof import TOLERANCE, NotReplacedError, check_untouched, float32_copy, replace_forwards
from fa_serve.ops import Pairing
from fa_serve.spec import UnsupportedModelError

_TOKENS = 40
_ROTATIONS = tuple(IndexerRotation(pairing, at_end) for at_end in (False, True) for pairing in get_args(Pairing))


@torch.no_grad()
def patch_indexers(model: PreTrainedModel) -> None:
    """Give all indexers of a model the forward of `PatchedIndexer`. Indexers that already have it keep it.

    Raises UnsupportedModelError, with the module and the reason, if one of them cannot be patched.
    """
    found = [module for module in find_indexers(model) if not isinstance(vars(module).get("forward"), PatchedIndexer)]
    refused: list[str] = []

    def refuse(module: nn.Module, reason: str) -> None:
        refused.append(f"{type(module).__name__}: {reason}")

    if replace_forwards(found, _prove, refuse) < len(found):
        unpatch_indexers(model)
        raise UnsupportedModelError(f"{type(model).__name__} chooses keys in a way that is not known ({'; '.join(refused)})")


def unpatch_indexers(model: nn.Module) -> None:
    """Give indexers their own forward again."""
    for module in find_indexers(model):
        if isinstance(vars(module).get("forward"), PatchedIndexer):
            del module.forward


def _prove(module: nn.Module) -> Callable[[nn.Module], PatchedIndexer]:
    """Find the form of a module's rotary embedding. Raises NotReplacedError if no form chooses the same keys as the module."""
    check_untouched(module)
    require_parts(module)
    original: Any = float32_copy(module)
    original.index_topk = _TOKENS
    device = original.wk.weight.device
    generator = torch.Generator().manual_seed(0)

    def random(width: int) -> Tensor:
        return torch.randn(1, _TOKENS, width, generator=generator).to(device)

    hidden = random(original.wk.in_features)
    q_resid = random(original.wq_b.in_features)
    angles = random(original.qk_rope_head_dim // 2) * 3.0
    both = torch.cat([angles, angles], dim=-1)
    embeddings = (both.cos(), both.sin())
    causal = torch.ones(1, _TOKENS, _TOKENS, dtype=torch.bool, device=device).tril()
    ranking = original(hidden, q_resid, embeddings, causal, None)
    for rotation in _ROTATIONS:
        call = PatchedIndexer(original, rotation).call_of(hidden, q_resid, embeddings)
        if call.topk == _TOKENS and _ranks_alike(call, ranking[0].long()):
            return lambda other, rotation=rotation: PatchedIndexer(other, rotation)  # type: ignore[misc]
    raise NotReplacedError("its choice of keys would change")


def _ranks_alike(call: IndexCall, ranking: Tensor) -> bool:
    """Whether scores never increase along a ranking (tokens, tokens), in which row t begins with the t + 1 visible keys."""
    products = torch.relu(torch.einsum("thd,sd->ths", call.query, call.key))
    scores = torch.einsum("th,ths->ts", call.weights, products)
    ordered = scores.gather(1, ranking)
    visible = torch.arange(_TOKENS, device=scores.device)
    allowed = visible[None, 1:] <= visible[:, None]
    growth = (ordered[:, 1:] - ordered[:, :-1])[allowed]
    return bool(growth.max() <= TOLERANCE * scores.abs().max())
