"""The adapter to transformers: attn_implementation="fa_serve", and the paged forward of the engine.

    import fa_serve
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fa_serve")

transformers asks an implementation for two functions. The mask function (`masks.py`) turns "causal, window 128, this padding"
into whatever the attention function wants to see; the attention function (`attention.py`) gets q, k, v, that mask and the
model's own options. Between ours a mask is either `Implicit`, a pattern that a kernel knows by itself, so that it can skip what
nobody sees; or, for chunks, image blocks and masks of the user's own, a tensor of four dimensions, honoured as it is.

`register.py` is where both are made known; `models.py` says which models may come, and refuses the others when they are
loaded; `paged.py` is the engine's way in, and `continuous.py` that of transformers' own continuous batching.

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

register()
