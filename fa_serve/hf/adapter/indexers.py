"""Modules by which a query chooses keys (DeepSeek-V3.2, arXiv:2512.02556, section 2.1), and how they choose from a paged cache.

    for module in find_indexers(model):
        module.forward = PatchedIndexer(module, IndexerRotation("halves"))

An indexer computes some small queries, a key and weights for each token. It caches the key, scores the keys of all earlier
tokens, and returns the places of the best keys, which its model passes to attention as `indices`. Indexers are not recognised
by class name, but because their own code calls `update_indexer` of the cache. A `PatchedIndexer` computes queries, key and
weights with the module's own parts, and the batch that rides along chooses keys by them. Then `indices` are slots of the paged
cache, and a model may pass them on to later layers, whose pages are the same (GLM). Without a batch, as in `generate`, the
module's own code runs.

The keys of the indexer of layer i are cached as layer `indexer_layer(i)`, in the same pages as the keys of its attention.

Left out: whether the result equals that of the module's own code, which surgery/indexers.py proves.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from fa_serve.hf.adapter.attention import riding_batch
from fa_serve.hf.adapter.short_choices import find_short_choices
from fa_serve.ops import Pairing
from fa_serve.spec import UnsupportedModelError

_PARTS = (
    "wq_b",
    "wk",
    "k_norm",
    "weights_proj",
    "softmax_scale",
    "n_heads",
    "head_dim",
    "qk_rope_head_dim",
    "index_topk",
    "layer_idx",
)


_ARGUMENTS = ("hidden_states", "q_resid", "position_embeddings", "attention_mask")


class IndexCall(NamedTuple):
    """The values by which an indexer chooses keys.

    query:   (total, heads, dim), with rotary embedding
    key:     (total, dim), of the same tokens
    weights: (total, heads) float32: the weight of each head's product in the score, with the scale of the products in it
    topk:    the largest number of keys that a query chooses
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    weights: Tensor
    topk: int


@runtime_checkable
class ChoosesKeys(Protocol):
    """A batch that chooses keys in place of indexers."""

    def choose(self, call: IndexCall) -> Tensor:
        """The keys that each query attends to, (1, total, n) integers, which `attend` of the same batch gets as `indices`."""
        ...


def find_indexers(model: nn.Module) -> list[nn.Module]:
    """The modules whose own forward caches an indexer's key, in the order of the model, without those of `short_choices.py`."""
    pools = {module for module, _ in find_short_choices(model)}
    return [module for module in model.modules() if module not in pools and "update_indexer" in _names_of(module)]


def indexer_layer(layer_idx: int) -> int:
    """The key under which caches hold the keys of a layer's indexer: a negative number, which no layer has."""
    return ~layer_idx


def require_parts(module: nn.Module) -> None:
    """Raise UnsupportedModelError for an indexer whose parts or arguments are not those that `PatchedIndexer` works with."""
    missing = [name for name in _PARTS if not hasattr(module, name)]
    if missing:
        raise UnsupportedModelError(
            f"{type(module).__name__} chooses keys with code that fa_serve cannot replace: it has no {missing[0]}"
        )
    _, *given = inspect.signature(inspect.unwrap(type(module).forward)).parameters.values()
    named = [each.name for each in given if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    if any(name != known for name, known in zip(named, _ARGUMENTS, strict=False)):
        raise UnsupportedModelError(
            f"{type(module).__name__} chooses keys with code that fa_serve cannot replace: its forward takes {', '.join(named)}"
        )


def _names_of(module: nn.Module) -> set[str]:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return set() if code is None else set(code.co_names)


class IndexerRotation(NamedTuple):
    """The rotary embedding of an indexer. at_end: whether the last numbers of a head are rotated, and not its first"""

    pairing: Pairing
    at_end: bool = False


class PatchedIndexer:
    """The forward of an indexer that lets the batch that rides along choose the keys."""

    def __init__(self, module: nn.Module, rotation: IndexerRotation) -> None:
        self.module = module
        self.rotation = rotation

    def __reduce__(self) -> tuple[Any, ...]:
        return PatchedIndexer, (self.module, self.rotation)

    def __call__(
        self,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        batch = riding_batch()
        if batch is None:
            own: Any = type(self.module).forward
            return cast(Tensor, own(self.module, hidden_states, q_resid, position_embeddings, attention_mask, *args, **kwargs))
        if not isinstance(batch, ChoosesKeys):
            raise UnsupportedModelError(
                f"{type(self.module).__name__} lets its queries choose keys, which {type(batch).__name__} cannot do"
            )
        return batch.choose(self.call_of(hidden_states, q_resid, position_embeddings))

    def call_of(self, hidden_states: Tensor, q_resid: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> IndexCall:
        """The values by which the module chooses keys for these tokens.

        hidden_states: (1, total, hidden); q_resid: (1, total, q_lora_rank); position_embeddings: cos and sin, (1, total, rope)
        """
        module: Any = self.module
        q = module.wq_b(q_resid)[0].view(-1, module.n_heads, module.head_dim)
        # some models keep the norm in float32
        k = module.k_norm(module.wk(hidden_states).to(module.k_norm.weight.dtype)).to(hidden_states.dtype)[0]
        cos, sin = (x[0, :, : module.qk_rope_head_dim // 2] for x in position_embeddings)
        weights = module.weights_proj(hidden_states.to(module.weights_proj.weight.dtype))[0].float()
        scale = float(module.n_heads) ** -0.5 * float(module.softmax_scale)
        query = self._rotated(q, cos[:, None], sin[:, None])
        return IndexCall(module, query, self._rotated(k, cos, sin), weights * scale, int(module.index_topk))

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x -> the rotated numbers, then the others. The first numbers of all pairs come before the second numbers.

        This order may differ from the module's, but it is the same for queries and keys, so their products do not change.
        """
        rope = 2 * cos.shape[-1]
        turned, rest = (x[..., -rope:], x[..., :-rope]) if self.rotation.at_end else (x[..., :rope], x[..., rope:])
        first, second = turned.chunk(2, dim=-1) if self.rotation.pairing == "halves" else (turned[..., 0::2], turned[..., 1::2])
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
