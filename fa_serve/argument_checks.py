"""Checks of the tensor arguments of `fa_serve.api`: shapes, dtypes, devices and ranges, and what each message says.

Every function raises ValueError or TypeError with the name of the argument, the rule and the value that was given. Plans
remember that calls of one kind have passed, so these functions run once for each kind of call. `check_types` runs only when a
call has failed, because a value of a wrong type always makes the call fail. This module leaves out the options
(`backends.calls`), what a backend can serve (its `supports`), and the values in index tensors (`value_checks`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from numbers import Real
from typing import Any, get_type_hints

import torch
from torch import Tensor

from fa_serve.backends.calls import CallOptions
from fa_serve.block_lists import BLOCK_SIZES, WORD, BlockLists
from fa_serve.spec import Layout, ParameterError, Precision, dtype_name

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ARGUMENT_ERRORS = (TypeError, AttributeError, ValueError)
"""The errors that a call raises if an argument has a wrong type."""
_TENSORS = frozenset(
    ["q", "k", "v", "k_cache", "v_cache", "cu_seqlens_q", "cu_seqlens_k", "block_table", "seqused_k", "slot_mapping"]
)
_OPTIONAL = ("a torch.Tensor or None", Tensor | None)
_LENGTH = ("a non-negative int on the host", Hashable)  # `check_lengths` checks every value that has a hash
_BY_KIND: dict[Any, tuple[str, Any]] = {
    int: ("an int", Hashable),
    float: ("a number", Real | Tensor),
    float | None: ("a number or None", Real | Tensor | None),
    str: ("a string", str),
    Precision: ("a string", str),
}
"""What an option must be, by the type of its field in `CallOptions`."""
_NUMBERS = (_BY_KIND[float][0], _BY_KIND[float | None][0])
_TYPES: dict[str, tuple[str, Any]] = {
    **dict.fromkeys(["sinks", "alibi_slopes", "mask", "out", "k_descale", "v_descale"], _OPTIONAL),
    **dict.fromkeys(["max_seqlen_q", "max_seqlen_k"], _LENGTH),
    "num_splits": _BY_KIND[int],
    **{name: _BY_KIND[kind] for name, kind in get_type_hints(CallOptions).items() if kind in _BY_KIND},
    "causal": ("a bool", int),
    "window_size": (
        "(left, right), two ints, where -1 means unlimited: (n - 1, 0) is a window of n keys that ends at the query's own key",
        tuple | list | Tensor,
    ),
}
"""By the name of an argument: what it must be, in words and as a type."""
_HEADS_FIRST = (
    ": fa_serve takes (..., seqlen, num_heads, head_dim), and these shapes would fit if the heads came first, as they do for "
    "torch's scaled_dot_product_attention. Pass {}"
)


def check_types(arguments: Mapping[str, Any]) -> None:
    """Raise TypeError for the first argument of a public function whose type is wrong. Other names are ignored."""
    for name, value in arguments.items():
        rule, allowed = ("a torch.Tensor", Tensor) if name in _TENSORS else _TYPES.get(name, ("", object))
        if not isinstance(value, allowed):
            raise TypeError(f"{name} must be {rule}, got {_shown_type(value)}")
        if rule in _NUMBERS and isinstance(value, Tensor) and value.numel() != 1:
            raise TypeError(f"{name} must be {rule}, or a tensor with one element, got {_shown(value)}")
    lists = arguments.get("block_mask")
    if isinstance(lists, tuple | list) and not all(isinstance(x, Tensor | None) for x in lists[:4]):
        given = [_shown_type(x) for x in lists[:4] if not isinstance(x, Tensor | None)]
        raise TypeError(f"block_mask must have torch.Tensors or None for its lists, got {given[0]}")


def check_qkv(layout: Layout, q: Tensor, k: Tensor, v: Tensor) -> None:
    """q, k and v have the ranks of the layout and agree in device, dtype, heads and head_dim."""
    q_rank, k_rank = {"dense": (4, 4), "varlen": (3, 3), "paged": (3, 4)}[layout]
    k_name, v_name = ("k_cache", "v_cache") if layout == "paged" else ("k", "v")
    for name, x, rank in (("q", q, q_rank), (k_name, k, k_rank), (v_name, v, k_rank)):
        if x.dim() != rank:
            raise ValueError(f"{name} must have {rank} dimensions, got {_shown(x)}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")
    if q.dtype not in _FLOATS:
        raise TypeError(f"q must be float16, bfloat16, float32 or float64, got {q.dtype}")
    if k.dtype != q.dtype and not (layout == "paged" and k.dtype == torch.float8_e4m3fn):
        raise TypeError(f"{k_name} must have q's dtype {q.dtype}, got {k.dtype}")
    if v.dtype != k.dtype:
        raise TypeError(f"{v_name} must have {k_name}'s dtype {k.dtype}, got {v.dtype}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"{v_name} must match {k_name} in all but the last dimension, got {tuple(v.shape)}, {tuple(k.shape)}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"{k_name} must have q's head_dim {q.shape[-1]}, got {k.shape[-1]}")
    if q.shape[-2] == 0 or k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        heads = q.shape[-2 if layout == "paged" else -3]
        transposed = "k_cache.transpose(1, 2)" if layout == "paged" else f"q.transpose({q_rank - 3}, {q_rank - 2})"
        hint = _HEADS_FIRST.format(f"{transposed}, and the others likewise") if _divides(heads, k.shape[-3]) else ""
        raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {q.shape[-2]} and {k.shape[-2]}{hint}")
    if q.shape[-1] == 0 or v.shape[-1] == 0:
        raise ValueError(f"head_dim must be positive, got {q.shape[-1]} and head_dim_v {v.shape[-1]}")


def check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    """Sinks are one per query head, on q's device."""
    if sinks is not None and (sinks.shape != (q.shape[-2],) or sinks.device != q.device):
        raise ValueError(
            f"sinks must be ({q.shape[-2]},) on {q.device}, one per query head, got {_shown(sinks)} on {sinks.device}"
        )


def check_alibi(alibi_slopes: Tensor | None, q: Tensor, batch: int) -> None:
    """ALiBi's slopes are float32, one per query head or per sequence and query head, on q's device."""
    heads = q.shape[-2]
    if alibi_slopes is None:
        return
    if alibi_slopes.dtype != torch.float32 or alibi_slopes.shape not in ((heads,), (batch, heads)):
        raise ParameterError("alibi_slopes", f"be float32 ({heads},) or ({batch}, {heads})", _shown(alibi_slopes))
    if alibi_slopes.device != q.device:
        raise ParameterError("alibi_slopes", f"be on q's device {q.device}", alibi_slopes.device)


def check_mask(mask: Tensor, q: Tensor, k: Tensor) -> None:
    """A mask of a dense call has four dimensions, each 1 or that of the scores, and is bool or floating point."""
    full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if mask.dim() != 4 or any(m not in (1, n) for m, n in zip(mask.shape, full, strict=True)):
        rule = f"have four dimensions, each 1 or that of (batch, num_heads, seqlen_q, seqlen_k) = {full}"
        hint = ": pass mask[None, None]" if mask.shape == full[2:] else ""
        raise ValueError(f"mask must {rule}, got {_shown(mask)}{hint}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            "mask must be bool, where True lets a query see a key, or floating point, which is added to the scores, "
            f"got {mask.dtype}: pass mask.bool() if its numbers are 1 and 0"
        )
    if mask.device != q.device:
        raise ValueError(f"mask must be on q's device {q.device}, got {mask.device}")


def check_no_block_mask(blocks: BlockLists | None) -> None:
    """A call has a mask of elements or lists of blocks, not both."""
    if blocks is not None:
        raise ParameterError("mask", "be None with block_mask: give the mask of partial blocks as its partial_bits", "a mask")


def check_block_lists(blocks: BlockLists | None, q: Tensor, k: Tensor, batch: int, max_seqlen_q: int) -> None:
    """Lists of key blocks agree with one another and with the call in shapes, dtypes and devices. Their values are not read."""
    if blocks is None:
        return
    size = blocks.block_size
    if len(size) != 2 or any(n not in BLOCK_SIZES for n in size):
        raise ParameterError("block_mask", "have blocks of 64 or 128 queries and 64 or 128 keys", size)
    if (blocks.full_kv_num_blocks is None) != (blocks.full_kv_indices is None):
        raise ParameterError("block_mask", "have both full_kv_num_blocks and full_kv_indices, or neither", "one of them")
    if blocks.kv_num_blocks is None or blocks.kv_indices is None:
        raise ParameterError("block_mask", "have kv_num_blocks and kv_indices", None)
    num = blocks.kv_num_blocks
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "partial_bits")
    for name, rank, x in zip(names, (3, 4, 3, 4, 6), blocks.tensors, strict=True):
        if x is None:
            continue
        if x.dtype != torch.int32 or x.device != q.device or x.dim() != rank or x.shape[:3] != num.shape:
            rule = f"have {name} as int32 with {rank} dimensions on {q.device}, whose first 3 sizes are those of kv_num_blocks"
            raise ParameterError("block_mask", rule, f"{_shown(x)} on {x.device}")
    batches = sorted({1, batch})
    heads = sorted({1, k.shape[-2], q.shape[-2]})
    least = -(-max_seqlen_q // size[0])
    if num.shape[0] not in batches or num.shape[1] not in heads or num.shape[2] < least:
        sizes = f"a number of sequences in {batches}, a number of heads in {heads}, and at least {least} blocks"
        raise ParameterError("block_mask", f"have lists for {sizes} of {size[0]} queries", tuple(num.shape))
    bits = blocks.partial_bits
    if bits is not None and bits.shape[4:] != (size[0], size[1] // WORD):
        rule = f"have partial_bits whose last sizes are {(size[0], size[1] // WORD)}"
        raise ParameterError("block_mask", rule, tuple(bits.shape))


def check_index(name: str, x: Tensor, q: Tensor, length: int | None) -> None:
    """An index tensor is int32 of one dimension on q's device, with `length` entries (None: at least one)."""
    if x.dim() != 1 or x.dtype != torch.int32 or x.device != q.device:
        raise ValueError(f"{name} must be int32 with one dimension on {q.device}, got {_shown(x)} on {x.device}")
    if x.shape[0] == 0 if length is None else x.shape[0] != length:
        raise ValueError(f"{name} must have {'at least 1' if length is None else length} entries, got {x.shape[0]}")


def check_lengths(**lengths: int) -> None:
    """Upper bounds of lengths are integers on the host."""
    for name, value in lengths.items():
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} must be a non-negative int on the host, got {value!r}")


def check_block_table(block_table: Tensor, q: Tensor, batch: int) -> None:
    """The block table is int32 (batch, max_pages) on q's device."""
    if block_table.dim() != 2 or block_table.dtype != torch.int32 or block_table.device != q.device:
        raise ValueError(
            f"block_table must be int32 (batch, max_pages) on {q.device}, got {_shown(block_table)} on {block_table.device}"
        )
    if block_table.shape[0] != batch:
        raise ValueError(f"block_table must have {batch} rows, one per sequence, got {block_table.shape[0]}")


def check_cache(k_cache: Tensor, v_cache: Tensor) -> None:
    """The last dimension of both caches is contiguous."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.stride()[3] != 1:
            raise ValueError(f"{name} must have a contiguous last dimension, got strides {cache.stride()}")


def check_descale(k_cache: Tensor, k_descale: Tensor | None, v_descale: Tensor | None) -> None:
    """A float8 cache has float32 (num_kv_heads,) descales, and any other cache has none."""
    if k_cache.dtype != torch.float8_e4m3fn:
        if k_descale is not None or v_descale is not None:
            name = "v_descale" if k_descale is None else "k_descale"
            raise ValueError(f"{name} must be None for a cache of {k_cache.dtype}, which is not quantised")
        return
    for name, x in (("k_descale", k_descale), ("v_descale", v_descale)):
        if x is None or x.shape != (k_cache.shape[2],) or x.dtype != torch.float32 or x.device != k_cache.device:
            given = None if x is None else f"{_shown(x)} on {x.device}"
            raise ValueError(
                f"{name} must be float32 ({k_cache.shape[2]},) on {k_cache.device} for a float8_e4m3fn cache, got {given}"
            )


def check_out(out: Tensor | None, q: Tensor, v: Tensor) -> None:
    """`out` has q's shape with v's head_dim, q's dtype and q's device."""
    if out is None:
        return
    shape = (*q.shape[:-1], v.shape[-1])
    if out.shape != shape or out.dtype != q.dtype or out.device != q.device:
        raise ValueError(f"out must be {dtype_name(q.dtype)} {shape} on {q.device}, got {_shown(out)} on {out.device}")
    _check_written("out", out)


def check_store(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """The tensors of `store_kv` agree in tokens, pages, heads, dims, dtypes and devices."""
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if x.dim() != 3 or cache.dim() != 4 or x.shape[1:] != cache.shape[2:]:
            fits = x.dim() == 3 and cache.dim() == 4 and x.shape[1] == cache.shape[1] and x.shape[2] == cache.shape[3]
            hint = _HEADS_FIRST.format(f"{name}_cache.transpose(1, 2)") if fits else ""
            raise ValueError(
                f"{name} must be (total, num_kv_heads, dim) and {name}_cache (num_pages, page_size, num_kv_heads, dim) "
                f"with the same heads and dim, got {tuple(x.shape)} and {tuple(cache.shape)}{hint}"
            )
    if k.shape[:2] != v.shape[:2] or k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            f"k and v must agree in tokens, pages and heads, got {tuple(k.shape)} and {tuple(v.shape)}, "
            f"and caches {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    if slot_mapping.dtype != torch.int64 or slot_mapping.shape != k.shape[:1] or slot_mapping.device != k.device:
        raise ValueError(
            f"slot_mapping must be int64 ({k.shape[0]},) on {k.device}, got {_shown(slot_mapping)} on {slot_mapping.device}"
        )
    if not k.device == v.device == k_cache.device == v_cache.device:
        raise ValueError(
            f"v, k_cache and v_cache must be on k's device {k.device}, got {v.device}, {k_cache.device} and {v_cache.device}"
        )
    if k_cache.dtype not in (k.dtype, torch.float8_e4m3fn):
        raise TypeError(f"k_cache must have k's dtype {k.dtype} or float8_e4m3fn, got {k_cache.dtype}")
    if v.dtype != k.dtype or v_cache.dtype != k_cache.dtype:
        raise TypeError(
            f"v and v_cache must have the dtypes of k and k_cache, {k.dtype} and {k_cache.dtype}, "
            f"got {v.dtype} and {v_cache.dtype}"
        )
    _check_written("k_cache", k_cache)
    _check_written("v_cache", v_cache)


def _check_written(name: str, x: Tensor) -> None:
    """A tensor that a call writes has memory for each of its elements, so that no two results go to the same address."""
    if any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)):
        rule = f"{name} must have separate memory for each element, because the call writes to it"
        raise ValueError(f"{rule}, got {_shown(x)} with strides {x.stride()}: do not expand it, or pass its clone()")


def _shown(x: Tensor) -> str:
    return f"{dtype_name(x.dtype)} {tuple(x.shape)}"


def _divides(num_heads: int, num_kv_heads: int) -> bool:
    return num_kv_heads > 0 and num_heads > 0 and num_heads % num_kv_heads == 0


def _shown_type(value: Any) -> str:
    """A value of a wrong type as messages show it, and how to make a tensor of it if that is possible."""
    if value is None or isinstance(value, str | int | float):
        return repr(value)
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    converts = isinstance(value, list | tuple) or name == "numpy.ndarray"
    return f"a {name} (torch.as_tensor converts it to a tensor)" if converts else f"a {name}"
