"""flash-attn's names and signatures on the kernels of fa_serve: the same calls, and nothing to compile.

    from fa_serve.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
    from fa_serve.flash_attn.bert_padding import pad_input, unpad_input
    from fa_serve.flash_attn.interface import flash_attn_func             # FlashAttention-3's signature
    from fa_serve.flash_attn.cute import flash_attn_func                  # FlashAttention-4's signature

    import fa_serve.flash_attn                                            # for code that cannot be changed
    fa_serve.flash_attn.install()
    import flash_attn                                                     # this package

    flash_attn_interface.py   FlashAttention-2's seven functions
    interface.py              FlashAttention-3's functions
    cute.py                   FlashAttention-4's functions
    cached_attention.py       appending, rotation and attention over a KV cache, for all of them
    packed_attention.py       attention over packed sequences, for FlashAttention-3 and -4
    used_rows.py              packed sequences of which only the first rows are used (`seqused_q`, `seqused_k`)
    rotary.py                 apply_rotary_emb
    bert_padding.py           pad_input, unpad_input, index_first_axis
    arguments.py              what all signatures share: refusals, windows, ALiBi slopes
    stand_in.py               install()

Tensors have flash-attn's layouts, and results have its shapes. An argument that the kernels cannot honour raises ParameterError
with the argument's name. Gradients are those of `fa_serve.attention` and `fa_serve.attention_varlen`.

Left out: dropout, `qv`, float8 queries, `attention_chunk` in calls that are not causal or have a window on the left, functions
inside a kernel (`score_mod`, `mask_mod`), and everything of flash-attn that is not attention, such as its layers, losses and
models.
"""

from fa_serve.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from fa_serve.flash_attn.stand_in import VERSION, install

__version__ = VERSION

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
]
