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

`register.py` is where both are made known; `models.py` says which models may come, and refuses the others when they are
loaded; `paged.py` is the engine's way in.

Left out: attention dropout, attention weights as an output, and caches that do not hold keys and values.
"""

try:
    import transformers
    from packaging.version import Version

    if Version(transformers.__version__).release < (5, 17):
        raise ImportError(f"found {transformers.__version__}")
except ImportError as error:
    raise ImportError(f"fa_serve's adapter needs transformers >= 5.17 (pip install 'transformers>=5.17'): {error}") from error

from fa_serve.hf.attention import attention_forward
from fa_serve.hf.masks import mask_forward
from fa_serve.hf.models import NAME
from fa_serve.hf.paged import PagedBatch, attention_layers, check_model, paged_forward
from fa_serve.hf.register import patch, register

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
