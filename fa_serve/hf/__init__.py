"""The adapter to transformers: attn_implementation="fa_serve", and the paged forward of the engine.

    import fa_serve
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fa_serve")

transformers asks an implementation for two functions. The mask function (`masks.py`) turns "causal, window 128, this padding"
into whatever the attention function wants to see; the attention function (`attention.py`) gets q, k, v, that mask and the
model's own options. Between ours a mask means

    None                          causal if the module is, windowed if the module passes a window; every key counts
    bool (batch, n)               the same with padding; only the first n keys count (a static cache hands out all its room)
    bool (0, n)                   the same without padding
    int32 (n + 1,)                the same within each of n sequences packed end to end, given by their starts
    bool or float, 4-dimensional  the whole truth: neither causality nor a window comes on top

The first four are patterns that a kernel knows by itself, so that it can skip what nobody sees. Everything else (chunks, image
blocks, masks of the user's own) is spelled out in four dimensions and honoured as such.

`models.py` says which models may come, and refuses the others when they are loaded. `paged.py` is the engine's way in.

Left out: attention dropout, attention weights as an output, and caches that do not hold keys and values.
"""

from __future__ import annotations

import functools
from typing import Any

try:
    import transformers

    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 17):
        raise ImportError(f"found {transformers.__version__}")
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface, PreTrainedModel
except ImportError as error:
    raise ImportError(f"fa_serve's adapter needs transformers >= 5.17 (pip install 'transformers>=5.17'): {error}") from error

from fa_serve.hf.attention import attention_forward
from fa_serve.hf.masks import mask_forward
from fa_serve.hf.models import NAME, admit, check_class
from fa_serve.hf.paged import PagedBatch, attention_layers, check_model, paged_forward

__all__ = [
    "NAME",
    "PagedBatch",
    "attention_forward",
    "attention_layers",
    "check_model",
    "mask_forward",
    "paged_forward",
    "patch",
    "register",
]


def patch(model: PreTrainedModel) -> PreTrainedModel:
    """Switch a loaded model to fa_serve, in place, and return it.

    Raises UnsupportedModelError, and changes nothing, if a part of the model cannot be served. To serve some parts only, call
    `model.set_attn_implementation({"text_config": "fa_serve"})`.
    """
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    for part in parts:
        check_class(type(part))
    model.set_attn_implementation(NAME)
    # transformers leaves out parts that have a copy of the whole model's config, such as the two stacks of T5
    for part in parts:
        if part.config._attn_implementation != NAME:
            admit(part)
            part.config._attn_implementation = NAME
    return model


def register() -> None:
    """Make `attn_implementation="fa_serve"` known to transformers; called by `import fa_serve`, harmless when repeated."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask_forward)
    original: Any = PreTrainedModel.get_correct_attn_implementation
    if getattr(original, "asks_fa_serve", False):
        return

    # transformers asks this of every model and submodel that it makes or switches; a name it knows it would accept for all
    @functools.wraps(original)
    def get_correct_attn_implementation(self: PreTrainedModel, requested: str | None, *args: Any, **kwargs: Any) -> Any:
        if requested == NAME:
            admit(self)
        return original(self, requested, *args, **kwargs)

    get_correct_attn_implementation.__dict__["asks_fa_serve"] = True
    setattr(PreTrainedModel, original.__name__, get_correct_attn_implementation)
