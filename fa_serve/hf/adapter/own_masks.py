"""Models that make masks in their own method, as fairseq's code did (Kosmos-2): in the engine's forward they make none.

    patch_mask_makers(model)       # raises UnsupportedModelError for a method whose masks do more than apply causality

The method turns a padding mask of two dimensions into numbers that are added to the scores. A batch that rides along determines
itself which keys each token sees, so `MaskMaker` passes on the empty mask of `paged_output`. Without a batch, as in
`generate`, the model's own method runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fa_serve.hf.adapter.attention import riding_batch
from fa_serve.spec import UnsupportedModelError

_METHOD = "_prepare_decoder_attention_mask"
_TOKENS = 5


class MaskMaker:
    """Replaces the method of one module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __reduce__(self) -> tuple[Any, ...]:
        """Copying the module makes a MaskMaker for the copy."""
        return MaskMaker, (self.module,)

    def __call__(self, attention_mask: Tensor | None, *args: Any, **kwargs: Any) -> Tensor | None:
        if riding_batch() is not None:
            return attention_mask
        mask: Tensor | None = getattr(type(self.module), _METHOD)(self.module, attention_mask, *args, **kwargs)
        return mask


def patch_mask_makers(model: nn.Module) -> bool:
    """Give every module with such a method a `MaskMaker`. Returns whether there are any.

    Raises UnsupportedModelError for a method whose mask, without padding, does more than apply causality.
    """
    found = [module for module in model.modules() if hasattr(type(module), _METHOD)]
    for module in found:
        if _METHOD not in vars(module):
            _require_causality(module)
            setattr(module, _METHOD, MaskMaker(module))
    return bool(found)


def _require_causality(module: nn.Module) -> None:
    embeds = torch.zeros(1, _TOKENS, 1)
    mask = getattr(module, _METHOD)(torch.ones(1, _TOKENS, dtype=torch.int64), embeds.shape[:2], embeds, 0)
    expected = torch.ones(1, 1, _TOKENS, _TOKENS, dtype=torch.bool).tril()
    if mask.shape != expected.shape or not torch.equal(mask > -1.0, expected) or mask[expected].any():
        raise UnsupportedModelError(f"{type(module).__name__} makes masks that do more than apply causality")
