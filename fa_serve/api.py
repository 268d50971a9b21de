"""The public functions: attention, attention_varlen, attention_paged, store_kv. They pack their arguments and dispatch.

    out = fa_serve.attention(q, k, v, causal=True)
    out = fa_serve.attention_varlen(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=512, max_seqlen_k=512)
    fa_serve.store_kv(k, v, k_cache, v_cache, slot_mapping)
    out = fa_serve.attention_paged(q, k_cache, v_cache, block_table=pages, seqused_k=lengths, cu_seqlens_q=cu, ...)

Conventions shared by all:

- Causality and windows are aligned to the bottom-right corner: the last query sees up to the last key. Query i sees key j
  when i + offset - left <= j <= i + offset + right, offset = seqlen_k - seqlen_q.
- `window_size=(left, right)`, -1 unlimited; `causal=True` means right = 0.
- `softmax_scale` defaults to head_dim ** -0.5. `softcap` s (0.0 off) turns a scaled score x into s * tanh(x / s).
- `attention_chunk` c (0 off) cuts the keys of each sequence into chunks of c, the first of which begins at key 0. The query at
  position p = i + offset sees the keys of its chunk only, p // c * c <= j <= p (Llama 4). The call must be causal, without a
  window.
- `alibi_slopes`, float32, (num_heads,) or (batch, num_heads): adds -slope * |i + offset - j| to the scaled score, after softcap
  (ALiBi, Press et al. 2022, arXiv:2108.12409).
- `block_mask` makes the call block-sparse: each block of queries attends to the key blocks of a list, and a kernel reads no
  other keys. It is a `fa_serve.BlockLists`, a `BlockMask` of FlexAttention, its four tensors for blocks of 128, or a
  mask_mod(b, h, q_idx, kv_idx). `causal` and `window_size` hide further keys of the listed blocks. A mask_mod is evaluated at
  the first call, and again when something that it reads has changed (see `index_functions`). The host waits for the result.
- `precision`: "bf16" computes in q's dtype, "qk8" rounds q and k to float8 before q k^T, and "fp8" rounds the probabilities and
  v as well (see `backends.triton.float8_inputs`). Float8 needs an NVIDIA GPU of compute capability 8.9 or newer, a head size of
  64, 128 or (only "qk8") 256, and a call without gradients, block_mask, mask and attention_chunk. A call with up to FEW_QUERIES
  queries and more keys than that is limited by memory, not by products, so it keeps q's dtype, and so do the sequences of a
  paged batch that decode. A paged call also keeps it if copies of its keys would take more than MAX_COPY_BYTES (see
  `backends.float8_copies`). The reference computes exactly at every precision.
- `deterministic=True`: equal calls have gradients that are equal in every bit, as under
  `torch.use_deterministic_algorithms(True)`. The Hopper kernels add to the gradient of q in no fixed order, so with this option
  the portable kernels compute the gradients. The forward pass is always deterministic.
- If all numbers in a row of a float `mask` are below -2.4e38, such as -inf or finfo(bfloat16).min, the kernels hide all keys
  from this row. PyTorch's operators and the reference hide all keys only if all numbers are -inf: for a row of the lowest
  finite numbers they return the mean of the values, as eager attention does.
- `sinks` (num_heads,): one more logit per head in the denominator of the softmax, without a value.
- `lse`: float32 (float64 for float64 input), the natural logarithm of the softmax denominator including the sink. A row that
  sees no key returns 0, and its lse is -inf (with sinks, its lse is the sink).
- Packed rows from cu_seqlens_q[-1] on belong to no sequence. With every backend their out is 0, their lse is -inf (even with
  sinks) and their gradients are 0; the gradients of keys from cu_seqlens_k[-1] on are 0, too. Their contents do not matter.
- The host never reads index tensors on a GPU (`cu_seqlens_*`, `seqused_k`, `block_table`, ...) unless FA_SERVE_CHECK=1 asks for
  it; the caller guarantees their values. On a CPU they are checked (see `value_checks`). `max_seqlen_*` are host integers and
  upper bounds.
- Calls that look alike are checked once. A plan keeps the chosen backend and its tiles for them (see `launching.plans`).
- While a caller is compiled, exported or traced, a call is recorded as one operator of PyTorch (see `operators`).

Algorithm: FlashAttention-2 (Dao 2023, arXiv:2307.08691), FlashAttention-3 on Hopper (Shah et al. 2024, arXiv:2407.08608),
the paged cache of vLLM (Kwon et al. 2023, arXiv:2309.06180). This module leaves out the checks (`argument_checks`), the
choice of a backend (`dispatch`), and everything that a backend decides (strides, tiles, architecture).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

from torch import Tensor

from fa_serve import operators, transforms
from fa_serve.argument_checks import ARGUMENT_ERRORS, check_types
from fa_serve.backends import MAX_KEYS_PER_TILE as MAX_KEYS_PER_TILE
from fa_serve.backends.calls import AttentionTensors, CallOptions, StoreTensors
from fa_serve.backends.float8_copies import MAX_COPY_BYTES as MAX_COPY_BYTES
from fa_serve.block_lists import CallSizes, as_block_lists
from fa_serve.dispatch import Result, run_block_sparse, run_dense, run_paged, run_store, run_varlen
from fa_serve.operators import is_eager, is_traced
from fa_serve.score_mods import translate_score_mod
from fa_serve.spec import ParameterError, Precision
from fa_serve.transforms import is_transformed


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    attention_chunk: int = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    mask: Tensor | None = ...,
    block_mask: Any = ...,
    score_mod: Callable[..., Any] | None = ...,
    precision: Precision = ...,
    deterministic: bool = ...,
    return_lse: Literal[False] = ...,
    out: Tensor | None = ...,
    backend: str = ...,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    attention_chunk: int = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    mask: Tensor | None = ...,
    block_mask: Any = ...,
    score_mod: Callable[..., Any] | None = ...,
    precision: Precision = ...,
    deterministic: bool = ...,
    return_lse: Literal[True],
    out: Tensor | None = ...,
    backend: str = ...,
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    attention_chunk: int = 0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    block_mask: Any = None,
    score_mod: Callable[..., Any] | None = None,
    precision: Precision = "bf16",
    deterministic: bool = False,
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a dense batch.

    q:    (batch, seqlen_q, num_heads, head_dim), float16, bfloat16 or float32; float64 in `sdpa` and the reference
    k:    (batch, seqlen_k, num_kv_heads, head_dim); num_heads is a multiple of num_kv_heads (GQA, MQA)
    v:    (batch, seqlen_k, num_kv_heads, head_dim_v)
    mask: four dimensions, each 1 or that of (batch, num_heads, seqlen_q, seqlen_k); bool keeps where True, numbers of any
          floating dtype are added to the scores after softcap. It applies in addition to `causal` and `window_size` (see
          above for rows of very low numbers)
    causal: the last query sees up to the last key, each query before it one key fewer
    softmax_scale: factor of the scores; None is head_dim ** -0.5
    window_size: how many keys (before, after) its own position a query sees; -1 is no limit
    softcap: replaces each score by softcap * tanh(score / softcap); 0.0 is off
    attention_chunk: cuts the keys into chunks of this length; a causal query sees only its own chunk (Llama 4); 0 is off
    alibi_slopes: (num_heads,) or (batch, num_heads), float32; -slope * distance is added to the scores
    sinks: (num_heads,); one more logit in the denominator of each head, without a value
    block_mask: key blocks of each query block (see above); it cannot be combined with `mask`
    score_mod: FlexAttention's score_mod(score, b, h, q_idx, kv_idx), if the options above can express it; it cannot be combined
               with `mask`, `softcap` and `alibi_slopes` (see `score_mods`)
    precision: "bf16", or products in float8: "qk8", "fp8" (see above)
    deterministic: equal calls have gradients that are equal in every bit
    return_lse: return (out, lse)
    backend: "auto", or the name of the only backend that may serve the call
    out:  (batch, seqlen_q, num_heads, head_dim_v), written in place and returned
    Returns out, or (out, lse) with lse (batch, num_heads, seqlen_q). Raises ValueError or TypeError that names the argument,
    and UnsupportedError with every reason when no backend can serve the call.
    """
    try:
        options = CallOptions(
            causal,
            None if softmax_scale is None else float(softmax_scale),
            tuple(window_size),
            float(softcap),
            attention_chunk,
            precision,
            deterministic,
            return_lse,
            backend,
        )
        sinks = None if sinks is None else sinks.contiguous()
        alibi_slopes = None if alibi_slopes is None else alibi_slopes.contiguous()
        tensors = AttentionTensors(q, k, v, sinks, mask, None, None, None, None, None, out, None, alibi_slopes)
        if score_mod is not None:
            tensors, block_mask, options = _with_score_mod(tensors, block_mask, score_mod, options)
        if block_mask is None:
            run = _node(tensors, "attention") or run_dense
            result, lse = run(tensors, options)
        else:
            result, lse = _run_block_sparse(tensors, block_mask, None, None, 0, options)
        return result if lse is None else (result, lse)
    except ARGUMENT_ERRORS:
        check_types(locals())
        raise


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    attention_chunk: int = 0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    block_mask: Any = None,
    precision: Precision = "bf16",
    deterministic: bool = False,
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over sequences packed end to end, without padding.

    q:            (total_q, num_heads, head_dim); k: (total_k, num_kv_heads, head_dim); v: (total_k, num_kv_heads, head_dim_v)
    cu_seqlens_q: (batch + 1,), int32, on q's device: sequence b is rows cu_seqlens_q[b] to cu_seqlens_q[b + 1]; empty allowed
    cu_seqlens_k: the same for the rows of k and v
    max_seqlen_*: upper bounds of the lengths, host integers
    causal: the last query sees up to the last key, each query before it one key fewer
    softmax_scale: factor of the scores; None is head_dim ** -0.5
    window_size: how many keys (before, after) its own position a query sees; -1 is no limit
    softcap: replaces each score by softcap * tanh(score / softcap); 0.0 is off
    attention_chunk: cuts the keys into chunks of this length; a causal query sees only its own chunk (Llama 4); 0 is off
    alibi_slopes: (num_heads,) or (batch, num_heads), float32; -slope * distance is added to the scores
    sinks: (num_heads,); one more logit in the denominator of each head, without a value
    block_mask:   see above; blocks are counted from the beginning of each sequence
    precision: "bf16", or products in float8: "qk8", "fp8" (see above)
    deterministic: equal calls have gradients that are equal in every bit
    return_lse: return (out, lse)
    backend: "auto", or the name of the only backend that may serve the call
    out:          (total_q, num_heads, head_dim_v), written in place and returned
    Returns out (total_q, num_heads, head_dim_v), or (out, lse) with lse (num_heads, total_q). Raises as `attention` does.
    """
    try:
        options = CallOptions(
            causal,
            None if softmax_scale is None else float(softmax_scale),
            tuple(window_size),
            float(softcap),
            attention_chunk,
            precision,
            deterministic,
            return_lse,
            backend,
        )
        sinks = None if sinks is None else sinks.contiguous()
        alibi_slopes = None if alibi_slopes is None else alibi_slopes.contiguous()
        cu_seqlens_q = cu_seqlens_q.contiguous()
        cu_seqlens_k = cu_seqlens_k.contiguous()
        tensors = AttentionTensors(q, k, v, sinks, None, cu_seqlens_q, cu_seqlens_k, None, None, None, out, None, alibi_slopes)
        if block_mask is None:
            run = _node(tensors, "attention_varlen") or run_varlen
            result, lse = run(tensors, max_seqlen_q, max_seqlen_k, options)
        else:
            result, lse = _run_block_sparse(tensors, block_mask, max_seqlen_q, max_seqlen_k, 0, options)
        return result if lse is None else (result, lse)
    except ARGUMENT_ERRORS:
        check_types(locals())
        raise


def attention_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    block_table: Tensor,
    seqused_k: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    attention_chunk: int = 0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    block_mask: Any = None,
    precision: Precision = "bf16",
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of packed queries over a paged KV cache: prompts, chunks of prompts and single tokens in one call.

    q:            (total_q, num_heads, head_dim), packed by cu_seqlens_q (batch + 1,), int32
    k_cache:      (num_pages, page_size, num_kv_heads, head_dim); v_cache: the same with head_dim_v. Any strides, as long as
                  the last dimension is contiguous; q's dtype, or float8_e4m3fn with k_descale and v_descale. With the view
                  v_cache = k_cache[..., :head_dim_v], as in latent attention (MLA), a kernel reads each key once
    block_table:  (batch, max_pages), int32: the pages of each sequence in order; entries past seqused_k are never read
    seqused_k:    (batch,), int32: keys in the cache, including the keys of this call's queries
    max_seqlen_*: upper bounds of the lengths, host integers; max_seqlen_k defaults to max_pages * page_size
    k_descale:    (num_kv_heads,), float32: the factor of stored keys (float8 caches only); v_descale: the same for values
    num_splits:   0: a heuristic chooses; 1: no split; n > 1: up to n parts of each sequence's keys; -1: groups of keys at fixed
                  positions, folded in order, so that the bits of a query's output depend only on its keys
    block_mask:   see above; blocks count from a sequence's first query in this call and its first key, whatever the page size
    causal:       as in `attention`, but True by default
    softmax_scale, window_size, softcap, attention_chunk, alibi_slopes, sinks, precision, return_lse, backend: as in `attention`
    out:          (total_q, num_heads, head_dim_v), written in place and returned
    Returns out, or (out, lse) with lse (num_heads, total_q). Raises as `attention` does. Only the reference has gradients here.
    """
    try:
        options = CallOptions(
            causal,
            None if softmax_scale is None else float(softmax_scale),
            tuple(window_size),
            float(softcap),
            attention_chunk,
            precision,
            False,  # deterministic: there are no gradients through a cache
            return_lse,
            backend,
        )
        sinks = None if sinks is None else sinks.contiguous()
        alibi_slopes = None if alibi_slopes is None else alibi_slopes.contiguous()
        if k_descale is not None and v_descale is not None:
            k_descale = k_descale.contiguous()
            v_descale = v_descale.contiguous()
        if block_table.stride()[-1:] != (1,):
            block_table = block_table.contiguous()
        lengths = (cu_seqlens_q.contiguous(), seqused_k.contiguous(), block_table)
        tensors = AttentionTensors(q, k_cache, v_cache, sinks, None, *lengths, k_descale, v_descale, out, None, alibi_slopes)
        if block_mask is None:
            run = _node(tensors, "attention_paged") or run_paged
            result, lse = run(tensors, max_seqlen_q, max_seqlen_k, num_splits, options)
        else:
            result, lse = _run_block_sparse(tensors, block_mask, max_seqlen_q, max_seqlen_k, num_splits, options)
        return result if lse is None else (result, lse)
    except ARGUMENT_ERRORS:
        check_types(locals())
        raise


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Write new keys and values into a paged cache, in place.

    k:            (total, num_kv_heads, head_dim); v: (total, num_kv_heads, head_dim_v)
    k_cache:      (num_pages, page_size, num_kv_heads, head_dim); v_cache has the same layout. A float8_e4m3fn
                  cache stores k / k_descale, saturated at +-448
    slot_mapping: (total,), int64: page * page_size + position in the page; -1 skips the token
    k_descale, v_descale: (num_kv_heads,), float32; only for float8 caches
    backend:      "auto", or the name of a backend

    The caches may be two parts of one tensor, such as cache[..., :512] and cache[..., 512:]. Raises as `attention` does.
    """
    try:
        tensors = StoreTensors(
            k, v, k_cache, v_cache, slot_mapping.contiguous(), _contiguous(k_descale), _contiguous(v_descale)
        )
        run = _node(tensors, "store_kv") or run_store
        run(tensors, backend)
    except ARGUMENT_ERRORS:
        check_types(locals())
        raise


def _run_block_sparse(
    tensors: AttentionTensors,
    block_mask: Any,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    num_splits: int,
    options: CallOptions,
) -> Result:
    """A call of any layout with a `block_mask`. The lengths of a dense call are None."""
    sizes = _sizes_of(tensors, max_seqlen_q, max_seqlen_k)
    tensors = tensors._replace(blocks=as_block_lists(block_mask, sizes, traced=is_traced(*tensors[:3])))
    run = _node(tensors, "attention_block_sparse") or run_block_sparse
    return run(tensors, max_seqlen_q, max_seqlen_k, num_splits, options)


def _with_score_mod(
    tensors: AttentionTensors, block_mask: Any, score_mod: Callable[..., Any], options: CallOptions
) -> tuple[AttentionTensors, Any, CallOptions]:
    """Translate a score_mod -> tensors, block_mask (None if the mask includes it) and options of an equal dense call."""
    given = {"mask": tensors.mask, "alibi_slopes": tensors.alibi_slopes, "softcap": options.softcap or None}
    for name, value in given.items():
        if value is not None:
            raise ParameterError(name, "not be passed together with score_mod, which already determines it", value)
    traced = is_traced(*tensors[:3])
    if traced:
        rule = "be None while the call is compiled or traced: pass the equivalent softcap, alibi_slopes or mask"
        raise ParameterError("score_mod", rule, score_mod)
    sizes = _sizes_of(tensors, None, None)
    lists = None if block_mask is None else as_block_lists(block_mask, sizes, traced=traced)
    causal = options.causal or options.window_size[1] == 0
    found = translate_score_mod(score_mod, sizes, causal=causal, lists=lists)
    scale = tensors.q.shape[-1] ** -0.5 if options.softmax_scale is None else options.softmax_scale
    options = options._replace(softmax_scale=scale * found.factor, softcap=found.softcap)
    tensors = tensors._replace(mask=found.mask, alibi_slopes=found.alibi_slopes)
    return tensors, lists if found.mask is None else None, options


def _sizes_of(tensors: AttentionTensors, max_seqlen_q: int | None, max_seqlen_k: int | None) -> CallSizes:
    """The sizes for which a mask_mod is evaluated. Dense calls pass no lengths, and paged calls may pass no max_seqlen_k."""
    q = tensors.q
    k = tensors.k
    if tensors.cu_seqlens_q is None or max_seqlen_q is None:
        return CallSizes(q.shape[0], q.shape[-2], q.shape[1], k.shape[1], q.device)
    if max_seqlen_k is None and tensors.block_table is not None:
        max_seqlen_k = tensors.block_table.shape[1] * k.shape[1]
    return CallSizes(tensors.cu_seqlens_q.shape[0] - 1, q.shape[-2], max_seqlen_q, max_seqlen_k or 0, q.device)


def _node(tensors: AttentionTensors | StoreTensors, name: str) -> Any:
    """The function that runs a call as one node, if PyTorch records or transforms it; None for an eager call."""
    if is_eager():
        return None
    if is_traced(*tensors[:3]):
        return getattr(operators, name)
    return getattr(transforms, name) if is_transformed(tensors) else None


def _contiguous(x: Any) -> Any:
    """The same numbers in the layout that kernels read; None stays None."""
    return x if x is None else x.contiguous()
