"""The `__init__` of the package that Hugging Face's `kernels` loads (see kernel_package.py): fa_serve's attention functions.

    attention, attention_varlen, attention_paged, store_kv     the functions of fa_serve
    flash_attn_func, flash_attn_varlen_func, ...               FlashAttention-2's functions
    flash_attn, flash_attn.interface                           the module of these functions; FlashAttention-3's functions

Left out: the adapters to transformers, diffusers and vLLM, the engine and the server, which the package fa-serve has.
"""

from fa_serve import flash_attn
from fa_serve.api import attention, attention_paged, attention_varlen, store_kv
from fa_serve.block_lists import BlockLists
from fa_serve.flash_attn import (
    bert_padding,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    interface,
)
from fa_serve.spec import AttentionSpec, FaServeError, ParameterError, UnsupportedError

__all__ = [
    "AttentionSpec",
    "BlockLists",
    "FaServeError",
    "ParameterError",
    "UnsupportedError",
    "attention",
    "attention_paged",
    "attention_varlen",
    "bert_padding",
    "flash_attn",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "interface",
    "store_kv",
]
