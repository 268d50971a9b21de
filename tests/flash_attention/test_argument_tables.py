"""The tables of docs/moving/flash-attn.md name every argument of every function, and say what becomes of it.

To generate the tables again: FA_SERVE_WRITE_DOCS=1 pytest tests/flash_attention/test_argument_tables.py
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from documentation import check_generated

import fa_serve.flash_attn as fa2
from fa_serve.flash_attn import cute
from fa_serve.flash_attn import interface as fa3

PAGE = Path(__file__).parents[2] / "docs" / "moving" / "flash-attn.md"
PREFIX = "flash_attn_"
FUNCTIONS: dict[str, list[Callable[..., Any]]] = {
    "FlashAttention-2": [getattr(fa2, name) for name in fa2.__all__ if name.startswith(PREFIX)],
    "FlashAttention-3": [
        fa3.flash_attn_func,
        fa3.flash_attn_qkvpacked_func,
        fa3.flash_attn_varlen_func,
        fa3.flash_attn_with_kvcache,
    ],
    "FlashAttention-4": [cute.flash_attn_func, cute.flash_attn_varlen_func],
}
YES = "supported"
NO_EFFECT = "accepted, no effect"
REFUSED = "refused unless None"
CACHE_ONLY = "supported with a KV cache, else refused"

NOTES: dict[str, tuple[str, str]] = {
    "q": (YES, "float16, bfloat16, and also float32; any head_dim"),
    "k": (YES, "with a KV cache: the new keys, which are appended"),
    "v": (YES, "as `k`; its head_dim may differ"),
    "qkv": (YES, "read in place"),
    "kv": (YES, "read in place"),
    "k_cache": (YES, "contiguous or paged; float8_e4m3fn with descales"),
    "v_cache": (YES, "as `k_cache`"),
    "cu_seqlens": (YES, "int32"),
    "cu_seqlens_q": (YES, "int32"),
    "cu_seqlens_k": (YES, "int32"),
    "cu_seqlens_k_new": (YES, "int32"),
    "max_seqlen": (YES, "an upper bound"),
    "max_seqlen_q": (YES, "an upper bound"),
    "max_seqlen_k": (YES, "an upper bound"),
    "seqused_q": (YES, "rows that are not used are 0"),
    "seqused_k": (YES, "copies k and v if they are packed or have gradients"),
    "softmax_scale": (YES, "must be positive"),
    "causal": (YES, "aligned to the bottom right"),
    "window_size": (YES, "of FlashAttention-4: a window without the position of its query is refused"),
    "softcap": (YES, ""),
    "alibi_slopes": (
        YES,
        "(num_heads,) or (batch, num_heads), float32. In causal calls the lse of FlashAttention-2 is larger by "
        "`slope * (i + seqlen_k - seqlen_q)`, because it adds `slope * j` to the scores",
    ),
    "dropout_p": ("refused unless 0", ""),
    "deterministic": (YES, "gradients that repeat in every bit; the forward pass always does"),
    "return_attn_probs": (YES, "returns the lse; probabilities are an empty tensor"),
    "return_softmax_lse": (YES, ""),
    "block_table": (YES, "any page size"),
    "page_table": (YES, "any page size"),
    "rotary_cos": (YES, "PyTorch rotates, in a few launches"),
    "rotary_sin": (YES, "as `rotary_cos`"),
    "rotary_interleaved": (YES, ""),
    "rotary_seqlens": (YES, ""),
    "cache_seqlens": (YES, "an int, a tensor, or None for a full cache"),
    "cache_batch_idx": (YES, "also with pages"),
    "cache_leftpad": (YES, "also with pages; reads keys one by one"),
    "num_splits": (YES, "with a KV cache; dense and packed calls do not split the keys"),
    "qv": (REFUSED, ""),
    "q_descale": (REFUSED, "no float8 queries"),
    "k_descale": (CACHE_ONLY, "one number per head of keys, for a float8 cache"),
    "v_descale": (CACHE_ONLY, "as `k_descale`"),
    "attention_chunk": ("supported for causal calls without a window, else refused", ""),
    "num_heads_q": (YES, "for qkv of four dimensions"),
    "pack_gqa": (NO_EFFECT, "the kernels choose"),
    "sm_margin": (NO_EFFECT, "the kernels choose"),
    "scheduler_metadata": (NO_EFFECT, "`get_scheduler_metadata` returns None"),
    "learnable_sink": (YES, "(num_heads,)"),
    "return_lse": (YES, "also with gradients"),
    "min_seqlen_k": (NO_EFFECT, "the kernels choose"),
    "seqlen_k_per_split": (NO_EFFECT, "the kernels choose"),
    "disable_scheduler_metadata": (NO_EFFECT, ""),
    "gather_kv_indices": (REFUSED, "the kernels do not gather individual keys"),
    "score_mod": (REFUSED, "kernels are compiled before the call"),
    "score_mod_bwd": (REFUSED, "as `score_mod`"),
    "mask_mod": (REFUSED, "as `score_mod`; a mask or a block mask goes to `fa_serve.attention`"),
    "aux_tensors": (REFUSED, "of `score_mod` and `mask_mod`"),
    "aux_scalars": (REFUSED, "as `aux_tensors`"),
    "block_sparse_tensors": (REFUSED, "go with a `mask_mod`; `fa_serve.attention` takes `block_mask`"),
    "block_sparse_tensors_bwd": (REFUSED, "as `block_sparse_tensors`"),
    "gather_bwd_recompute_p": ("refused unless False", "as `gather_kv_indices`"),
    "gather_bwd_token_chunk": (REFUSED, "as `gather_kv_indices`"),
}


def parameters(functions: list[Callable[..., Any]]) -> dict[str, list[str]]:
    """The functions that take each argument, in the order of their signatures."""
    found: dict[str, list[str]] = {}
    for function in functions:
        for name in inspect.signature(function).parameters:
            found.setdefault(name, []).append(function.__name__.removeprefix(PREFIX))
    return found


def table(functions: list[Callable[..., Any]]) -> Iterator[str]:
    yield "| argument | functions | fa_serve | note |"
    yield "|---|---|---|---|"
    for name, users in parameters(functions).items():
        where = "all" if len(users) == len(functions) else ", ".join(f"`{user}`" for user in users)
        support, note = NOTES[name]
        yield f"| `{name}` | {where} | {support} | {note} |"


def test_the_documented_arguments_are_the_arguments() -> None:
    for title, functions in FUNCTIONS.items():
        check_generated(PAGE, f"arguments of {title}", "\n".join(table(functions)))


def test_every_note_is_used() -> None:
    used = {name for functions in FUNCTIONS.values() for name in parameters(functions)}
    assert used == set(NOTES)


def test_the_interfaces_agree_where_they_have_the_same_argument() -> None:
    """A default that differs would be a surprise. `num_splits` of dense calls is 1 in flash-attn too. FlashAttention-4 needs no
    lengths, and writes an unlimited window as None."""
    may_differ = {"k", "v", "num_splits", "window_size"}
    may_differ |= {f"{name}_{x}" for name in ("max_seqlen", "cu_seqlens") for x in "qk"}
    defaults: dict[str, set[str]] = {}
    for functions in FUNCTIONS.values():
        for function in functions:
            for name, parameter in inspect.signature(function).parameters.items():
                if name not in may_differ:
                    defaults.setdefault(name, set()).add(repr(parameter.default))
    assert {name: values for name, values in defaults.items() if len(values) > 1} == {}
