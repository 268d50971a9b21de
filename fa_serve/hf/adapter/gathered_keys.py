"""Models whose own code needs the keys of all earlier tokens: in the engine's forward they get the keys of all sequences.

    if gathers_keys(model):                         # found once per model and noted on it
        cache = GatheredKeys(position_ids, batch)   # in place of the model's cache
        model(..., past_key_values=cache, attention_mask=cache.mask(model.dtype))

- A model may compute its attention itself (BLIP, GIT): it gives new keys and values to its cache, gets all keys and values back
  from the cache, and adds a mask to the scores. Here the mask says which of the gathered keys each token sees.
- A layer may compute a bias for the scores from the places of all keys, for which it asks its cache (Inkling). The batch that
  rides along then adds the bias.

So the model's code runs as it is and multiplies all tokens of the step with all keys of all its sequences. That is slow, but
right for any mask, bias and code.

Left out: whether the logits equal those of the model without the engine, which probe.py proves.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from fa_serve.hf.adapter.models import read_source
from fa_serve.hf.adapter.releases import CACHE_NAMES
from fa_serve.hf.adapter.state_modules import find_state_modules
from fa_serve.hf.adapter.step_cache import StepCache
from fa_serve.spec import UnsupportedModelError

_NOTES = ("_fa_serve_own_attention", "_fa_serve_bias_of_places")


@runtime_checkable
class GathersKeys(Protocol):
    """A batch that stores keys and values, and returns those of all sequences to the model's code."""

    def gather(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store this step's keys and values (1, heads, total, dim) -> keys and values of all sequences (1, heads, n, dim).

        Rows past the number of tokens of the step are copies and are not stored.
        """
        ...

    def visible(self) -> Tensor:
        """Which of these n keys each token of the step sees, (total, n) bool."""
        ...

    def places(self) -> Tensor | None:
        """The places of these keys in their sequences, (n,) int64; None if the only keys are those of the step's tokens."""
        ...


class GatheredKeys(StepCache):
    """The cache that such a model gets. position_ids: (total,) int64. Raises UnsupportedModelError if batch gathers no keys"""

    def __init__(self, position_ids: Tensor, batch: Any) -> None:
        super().__init__(position_ids, getattr(batch, "states", None))
        if not isinstance(batch, GathersKeys):
            raise UnsupportedModelError(f"{type(batch).__name__} cannot serve a model whose code needs the keys of all tokens")
        self._batch = batch

    def mask(self, dtype: torch.dtype) -> Tensor:
        """The mask that is added to the scores, (1, 1, total, n): 0 where a token sees a key, else the dtype's minimum."""
        seen = self._batch.visible().to(self.position_ids.device)
        missing = len(self.position_ids) - len(seen)
        seen = torch.cat([seen, seen[-1:].expand(missing, -1)])
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)[None, None]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, Tensor]:
        """The number of keys, and what must be added to the index of each key to get its place in its sequence."""
        places = self._batch.places()
        if places is None:
            return query_length, self.get_seq_length()
        return len(places), places - torch.arange(len(places), device=places.device)

    def get_query_offset(self, layer_idx: int) -> Tensor:
        """What must be added to the index of each token of the step to get its place in its sequence."""
        return self.get_seq_length(layer_idx)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._batch.gather(layer_idx, key, value)


def computes_attention(model: PreTrainedModel) -> bool:
    """Whether the code of a model computes its attention itself, from keys and values that its cache returns."""
    if _NOTES[0] not in model.__dict__:
        model.__dict__[_NOTES[0]] = (
            read_source(type(model)).chooses_by_name
            and not find_state_modules(model)
            and any(_attends_itself(module) for module in model.modules())
        )
    return bool(model.__dict__[_NOTES[0]])


def gathers_keys(model: PreTrainedModel) -> bool:
    """Whether a model needs `GatheredKeys`: it computes its attention itself, or its layers compute a bias from places."""
    if _NOTES[1] not in model.__dict__:
        model.__dict__[_NOTES[1]] = computes_attention(model) or any(map(adds_bias_of_places, model.modules()))
    return bool(model.__dict__[_NOTES[1]])


def adds_bias_of_places(module: nn.Module) -> bool:
    """Whether a module's own forward asks its cache for the places of its keys and its queries."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and {"get_mask_sizes", "get_query_offset", "update"} <= set(code.co_names)


def _attends_itself(module: nn.Module) -> bool:
    """Whether a module's own forward adds to a cache and has a softmax, and calls no attention interface."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None:
        return False
    names = {name.lower() for name in code.co_names}
    return names >= {"update", "softmax"} and not {*CACHE_NAMES}.isdisjoint(code.co_varnames) and "get_interface" not in names
