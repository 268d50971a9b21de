"""fa_serve: fast attention for Hugging Face transformers, and the server that stands on it.

Importing the package registers `attn_implementation="fa_serve"` with transformers. The functions below work on plain
tensors; `fa_serve.engine` holds the continuous-batching engine and `fa_serve.server` the HTTP service.
"""

from fa_serve.api import attention, attention_paged, attention_varlen, store_kv
from fa_serve.spec import AttentionSpec, FaServeError, UnsupportedError, UnsupportedModelError

try:
    from fa_serve.hf import patch, register
except ImportError as error:  # the functions on tensors do without transformers
    _reason = str(error)

    def patch(model):  # type: ignore
        raise ImportError(_reason)
else:
    register()

__version__ = "0.1.0"

__all__ = [
    "AttentionSpec",
    "FaServeError",
    "UnsupportedError",
    "UnsupportedModelError",
    "attention",
    "attention_paged",
    "attention_varlen",
    "patch",
    "store_kv",
]
