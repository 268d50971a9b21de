"""From the tensors and options of one call to the backend that computes it, through the table of plans.

    out, lse = run_dense(AttentionTensors(q, k, v), options)

`fa_serve.api` has the public functions, which pack their arguments; `fa_serve.operators` has the same functions as operators of
PyTorch, for graphs. Both end here. Calls that look alike are decided once: their arguments are checked, a backend is selected,
and its plan is kept (see `launching.plans`). This module leaves out what the checks are (`argument_checks`, `value_checks`) and
what a plan does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_serve.argument_checks import (
    SoftmaxOptions,
    check_alibi,
    check_block_lists,
    check_block_table,
    check_cache,
    check_descale,
    check_index,
    check_lengths,
    check_mask,
    check_no_block_mask,
    check_out,
    check_precision,
    check_qkv,
    check_store,
    effective_chunk,
    softmax_options,
)
from fa_serve.autograd import are_differentiated, attention_gradients, is_wrapped, plan_differentiable
from fa_serve.backends import Backend, select_backend
from fa_serve.backends.calls import AttentionOptions, AttentionTensors, BackwardTensors, Gradients, StoreTensors, growing_facts
from fa_serve.backends.chunks import decodes_chunks
from fa_serve.backends.float8_copies import MAX_COPY_BYTES, copied_bytes
from fa_serve.backends.mixed import find_decoder, plan_mixed
from fa_serve.launching.plans import PLANS, Run, facts
from fa_serve.spec import FEW_QUERIES, AttentionSpec, Layout, Op, Precision, arch_of
from fa_serve.value_checks import (
    check_block_values,
    check_paged_values,
    check_store_values,
    check_varlen_values,
    with_value_checks,
)

Options = tuple[bool, float | None, tuple[int, ...], float, int, Precision, bool, bool, str]
"""causal, softmax_scale, window_size, softcap, attention_chunk, precision, deterministic, return_lse and backend, as given."""
MAX_TOKENS_OF_A_PAGE = 1 << 30
MAX_TOKENS_OF_A_CACHE = 0x7FFF0000
"""What the coordinates of the copy engine allow, see `backends.hopper.descriptors.ragged_view`."""
Result = tuple[Tensor, Tensor | None]
"""out, and lse if it was asked for."""


def run_dense(tensors: AttentionTensors, options: Options) -> Result:
    """Compute a call of `fa_serve.attention`."""
    q, k, v, sinks, mask = tensors[:5]
    # One query per sequence behind a cache that grows: the calls of all steps look alike.
    growing = growing_facts(q, k, v, mask) if q.dim() == 4 and q.shape[1] == 1 and tensors.out is None else None
    key: tuple[Any, ...]
    if growing is None:
        key = ("dense", facts(q, k, v, sinks, mask, tensors.out, tensors.alibi_slopes), options)
    else:
        key = ("growing", growing, facts(sinks, tensors.alibi_slopes), options)
    run = PLANS.get(key)
    if run is None:
        run = PLANS.add(key, decide_dense(tensors, options).plan(tensors))
    result: Result = run(tensors)
    return result


def run_varlen(tensors: AttentionTensors, max_seqlen_q: int, max_seqlen_k: int, options: Options) -> Result:
    """Compute a call of `fa_serve.attention_varlen`."""
    q, k, v, sinks, _, cu_seqlens_q, cu_seqlens_k = tensors[:7]
    seen = facts(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, tensors.out, tensors.alibi_slopes)
    key = ("varlen", seen, max_seqlen_q, max_seqlen_k, options)
    run = PLANS.get(key)
    if run is None:
        plan = decide_varlen(tensors, max_seqlen_q, max_seqlen_k, options).plan(tensors)
        checked = with_value_checks(plan, q, lambda given: check_varlen_values(given, max_seqlen_q, max_seqlen_k))
        run = PLANS.add(key, checked)
    result: Result = run(tensors)
    return result


def run_paged(
    tensors: AttentionTensors, max_seqlen_q: int, max_seqlen_k: int | None, num_splits: int, options: Options
) -> Result:
    """Compute a call of `fa_serve.attention_paged`."""
    first_k = tensors[1].data_ptr()
    first_v = tensors[2].data_ptr()
    where = (not (first_k | first_v) & 15, first_k == first_v)
    seen = facts(*tensors)  # type: ignore[arg-type]  # `blocks` is None here
    key = ("paged", seen, max_seqlen_q, max_seqlen_k, num_splits, where, options)
    run = PLANS.get(key)
    if run is None:
        run = PLANS.add(key, _plan_paged(tensors, max_seqlen_q, max_seqlen_k, num_splits, options))
    result: Result = run(tensors)
    return result


def run_block_sparse(
    tensors: AttentionTensors, max_seqlen_q: int | None, max_seqlen_k: int | None, num_splits: int, options: Options
) -> Result:
    """Compute a call of any layout whose tensors have `blocks`. The lengths of a dense call are those of its tensors."""
    blocks = tensors.blocks
    assert blocks is not None
    is_aligned = not (tensors.k.data_ptr() | tensors.v.data_ptr()) & 15
    seen = (facts(*tensors[:-1]), facts(*blocks.tensors), blocks.block_size)
    key = ("block_sparse", seen, max_seqlen_q, max_seqlen_k, num_splits, is_aligned, options)
    run = PLANS.get(key)
    if run is None:
        if tensors.block_table is not None:
            assert max_seqlen_q is not None
            run = _plan_paged(tensors, max_seqlen_q, max_seqlen_k, num_splits, options)
        elif tensors.cu_seqlens_q is not None:
            assert max_seqlen_q is not None
            assert max_seqlen_k is not None
            plan = decide_varlen(tensors, max_seqlen_q, max_seqlen_k, options).plan(tensors)
            lengths = (max_seqlen_q, max_seqlen_k)
            run = with_value_checks(plan, tensors.q, lambda given: check_varlen_values(given, *lengths))
        else:
            plan = decide_dense(tensors, options).plan(tensors)
            run = with_value_checks(plan, tensors.q, lambda given: check_block_values(given.blocks))
        run = PLANS.add(key, run)
    result: Result = run(tensors)
    return result


def run_store(tensors: StoreTensors, backend: str) -> None:
    """Compute a call of `fa_serve.store_kv`."""
    key = ("store", facts(*tensors), backend)
    run = PLANS.get(key)
    if run is None:
        run = PLANS.add(key, with_value_checks(_plan_store(tensors, backend), tensors.k, check_store_values))
    run(tensors)


def run_backward(tensors: BackwardTensors, max_seqlen_q: int, max_seqlen_k: int, given: Options) -> Gradients:
    """The gradients of a call of `fa_serve.attention` or, with cu_seqlens, `fa_serve.attention_varlen`, which was checked."""
    causal, scale, window_size, softcap, chunk, _, deterministic, _, _ = given
    options = softmax_options(tensors.q, causal, scale, window_size, softcap, tensors.sinks)
    chunk = effective_chunk(chunk, options.window_size, max_seqlen_k)
    layout: Layout = "dense" if tensors.cu_seqlens_q is None else "varlen"
    shapes = AttentionTensors(*tensors[:5], alibi_slopes=tensors.alibi_slopes)
    spec = _spec(layout, "backward", shapes, options, chunk, deterministic=deterministic)
    complete = AttentionOptions(*options, max_seqlen_q, max_seqlen_k, True, attention_chunk=chunk)
    return attention_gradients(spec, tensors, complete)


class Decision(NamedTuple):
    """What is decided about a dense or packed call before it is planned."""

    backend: Backend
    spec: AttentionSpec
    options: AttentionOptions

    def plan(self, tensors: AttentionTensors) -> Run:
        if self.spec.needs_grad and not self.backend.differentiable:
            return plan_differentiable(self.backend, self.spec, tensors, self.options)
        return self.backend.plan(self.spec, tensors, self.options)


def decide_dense(tensors: AttentionTensors, given: Options) -> Decision:
    """Check a call of `fa_serve.attention` and select its backend."""
    q, k, v, sinks, mask = tensors[:5]
    causal, scale, window_size, softcap, chunk, precision, deterministic, return_lse, backend = given
    check_qkv("dense", q, k, v)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k must have q's batch size {q.shape[0]}, got {k.shape[0]}")
    options = softmax_options(q, causal, scale, window_size, softcap, sinks)
    if chunk != 0:  # a plan for a cache that grows serves every number of keys with this bit length
        chunk = effective_chunk(chunk, options.window_size, (1 << k.shape[1].bit_length()) - 1)
    if mask is not None:
        check_mask(mask, q, k)
        check_no_block_mask(tensors.blocks)
    check_alibi(tensors.alibi_slopes, q, q.shape[0])
    check_block_lists(tensors.blocks, q, k, q.shape[0], q.shape[1])
    check_out(tensors.out, q, v)
    over_keys = mask is None or (mask.dtype == torch.bool and mask.shape[1:3] == (1, 1))
    with_gradients = needs_grad(tensors)
    few = 0 < q.shape[1] <= FEW_QUERIES < k.shape[1] and not with_gradients
    op: Op = "decode" if few and over_keys else "attention"
    spec = _spec("dense", op, tensors, options, chunk, precision, deterministic=deterministic and with_gradients)
    if backend == "auto" and over_keys and decodes_chunks(spec, q.shape[0], q.shape[1], k.shape[1], _multiprocessors(q)):
        spec = replace(spec, op="decode")
    complete = AttentionOptions(
        *options,
        q.shape[1],
        k.shape[1],
        return_lse,
        deterministic=spec.deterministic,
        attention_chunk=chunk,
        precision=spec.precision,
    )
    return Decision(select_backend(spec, backend), spec, complete)


def decide_varlen(tensors: AttentionTensors, max_seqlen_q: int, max_seqlen_k: int, given: Options) -> Decision:
    """Check a call of `fa_serve.attention_varlen` and select its backend."""
    q, k, v, sinks = tensors[:4]
    causal, scale, window_size, softcap, chunk, precision, deterministic, return_lse, backend = given
    assert tensors.cu_seqlens_q is not None
    assert tensors.keys is not None
    check_qkv("varlen", q, k, v)
    options = softmax_options(q, causal, scale, window_size, softcap, sinks)
    check_index("cu_seqlens_q", tensors.cu_seqlens_q, q, None)
    check_index("cu_seqlens_k", tensors.keys, q, tensors.cu_seqlens_q.shape[0])
    check_lengths(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    chunk = effective_chunk(chunk, options.window_size, max_seqlen_k)
    check_alibi(tensors.alibi_slopes, q, tensors.cu_seqlens_q.shape[0] - 1)
    check_block_lists(tensors.blocks, q, k, tensors.cu_seqlens_q.shape[0] - 1, max_seqlen_q)
    check_out(tensors.out, q, v)
    repeats = deterministic and needs_grad(tensors)
    spec = _spec("varlen", "attention", tensors, options, chunk, precision, deterministic=repeats)
    complete = AttentionOptions(
        *options,
        max_seqlen_q,
        max_seqlen_k,
        return_lse,
        deterministic=spec.deterministic,
        attention_chunk=chunk,
        precision=spec.precision,
    )
    return Decision(select_backend(spec, backend), spec, complete)


def _plan_paged(tensors: AttentionTensors, max_seqlen_q: int, max_seqlen_k: int | None, num_splits: int, given: Options) -> Run:
    plan = _decide_paged(tensors, max_seqlen_q, max_seqlen_k, num_splits, given)
    left = given[2][0]
    chunk = given[4]
    return with_value_checks(plan, tensors.q, lambda found: check_paged_values(found, max_seqlen_q, max_seqlen_k, left, chunk))


def _decide_paged(
    tensors: AttentionTensors, max_seqlen_q: int, max_seqlen_k: int | None, num_splits: int, given: Options
) -> Run:
    """Check a call of `fa_serve.attention_paged`, and plan it for a backend."""
    q, k_cache, v_cache, sinks = tensors[:4]
    causal, scale, window_size, softcap, chunk, precision, _, return_lse, backend = given
    assert tensors.cu_seqlens_q is not None
    assert tensors.keys is not None
    assert tensors.block_table is not None
    check_qkv("paged", q, k_cache, v_cache)
    options = softmax_options(q, causal, scale, window_size, softcap, sinks)
    check_index("cu_seqlens_q", tensors.cu_seqlens_q, q, None)
    batch = tensors.cu_seqlens_q.shape[0] - 1
    check_index("seqused_k", tensors.keys, q, batch)
    check_block_table(tensors.block_table, q, batch)
    capacity = tensors.block_table.shape[1] * k_cache.shape[1]
    length = capacity if max_seqlen_k is None else max_seqlen_k
    check_lengths(max_seqlen_q=max_seqlen_q, max_seqlen_k=length)
    if length > capacity:
        raise ValueError(f"max_seqlen_k must be at most max_pages * page_size = {capacity}, got {length}")
    # with num_splits, nothing depends on the longest sequence of the batch
    fitting_chunk = effective_chunk(chunk, options.window_size, length)
    if not num_splits:
        chunk = fitting_chunk
    if not isinstance(num_splits, int) or num_splits < 0:
        raise ValueError(f"num_splits must be 0 (heuristic) or a positive int, got {num_splits!r}")
    check_cache(k_cache, v_cache)
    check_descale(k_cache, tensors.k_descale, tensors.v_descale)
    check_alibi(tensors.alibi_slopes, q, batch)
    check_block_lists(tensors.blocks, q, k_cache, batch, max_seqlen_q)
    check_out(tensors.out, q, v_cache)
    check_precision(precision)
    if copied_bytes(k_cache, v_cache, batch, length, precision) > MAX_COPY_BYTES:
        precision = "bf16"
    decodes = max_seqlen_q <= FEW_QUERIES or num_splits > 0 or (k_cache.dtype != q.dtype and precision == "bf16")
    sizes = None if num_splits else (batch, max_seqlen_q, length)
    spec = _spec("paged", "decode" if decodes else "attention", tensors, options, chunk, precision, sizes)
    unequal = q.shape[0] < batch * max_seqlen_q
    chosen = select_backend(spec, backend)
    if backend == "auto" and not unequal:
        divides = chosen.name == "hopper"
        if decodes_chunks(spec, batch, max_seqlen_q, length, _multiprocessors(q), divides=divides):
            spec = replace(spec, op="decode")
            chosen = select_backend(spec, backend)
    complete = AttentionOptions(
        *options, max_seqlen_q, length, return_lse, num_splits, attention_chunk=chunk, precision=spec.precision
    )
    if not decodes and unequal and tensors.blocks is None:
        # Some sequences have fewer queries than the longest one, and may be decoding.
        decode_spec = _spec("paged", "decode", tensors, options, chunk)
        decoder = find_decoder(decode_spec, backend)
        if decoder is not None:
            return plan_mixed(decoder, chosen, spec, tensors, complete)
    return chosen.plan(spec, tensors, complete)


def _multiprocessors(q: Tensor) -> int:
    return torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 0


def _plan_store(tensors: StoreTensors, backend: str) -> Run:
    k, v, k_cache, v_cache, slot_mapping, k_descale, v_descale = tensors
    check_store(k, v, k_cache, v_cache, slot_mapping)
    check_cache(k_cache, v_cache)
    check_descale(k_cache, k_descale, v_descale)
    spec = AttentionSpec(
        layout="paged",
        device=k.device.type,
        arch=arch_of(k.device),
        dtype=k.dtype,
        kv_dtype=k_cache.dtype,
        head_dim=k.shape[2],
        head_dim_v=v.shape[2],
        num_heads=k.shape[1],
        num_kv_heads=k.shape[1],
        page_size=k_cache.shape[1],
        op="store_kv",
    )
    return select_backend(spec, backend).plan(spec, tensors, None)


def _spec(
    layout: Layout,
    op: Op,
    tensors: AttentionTensors,
    options: SoftmaxOptions,
    chunk: int,
    precision: Precision = "bf16",
    sizes: tuple[int, int, int] | None = None,
    *,
    deterministic: bool = False,
) -> AttentionSpec:
    check_precision(precision)
    q, k, v, sinks, mask = tensors[:5]
    paged = layout == "paged"
    return AttentionSpec(
        layout=layout,
        device=q.device.type,
        arch=arch_of(q.device),
        dtype=q.dtype,
        kv_dtype=k.dtype,
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1],
        num_heads=q.shape[-2],
        num_kv_heads=k.shape[-2],
        window_size=options.window_size,
        softcap=options.softcap != 0.0,
        sinks=sinks is not None,
        alibi=tensors.alibi_slopes is not None,
        attention_chunk=chunk > 0,
        block_mask=tensors.blocks is not None,
        mask=None if mask is None else "bool" if mask.dtype == torch.bool else "float",
        page_size=k.shape[1] if paged else 0,
        needs_grad=needs_grad(tensors),
        op=op,
        whole_rows=not paged or (_has_whole_rows(k) and _has_whole_rows(v)),
        values_in_keys=paged and _has_values_in_keys(k, v),
        precision=precision if op == "attention" else "bf16",
        sizes=sizes,
        deterministic=deterministic,
    )


def needs_grad(tensors: AttentionTensors) -> bool:
    """Whether autograd will ask for gradients of this call."""
    differentiable = [x for x in (*tensors[:5], tensors.alibi_slopes) if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in differentiable):
        return True
    # a batch of vmap does not show whether a transform below differentiates what is in it
    return are_differentiated() and any(is_wrapped(x) for x in differentiable)


def _has_whole_rows(cache: Tensor) -> bool:
    """Whether tokens and heads are multiples of 16 bytes apart, and a page is a whole number of tokens.

    The copy engine numbers the tokens of all pages in 32 bits, and those of a page in 30.
    """
    page, token, head, _ = cache.stride()
    if token <= 0 or page % token or ((token | head) * cache.element_size() | cache.data_ptr()) & 15:
        return False
    pages, page_size, _, _ = cache.shape
    return page_size <= MAX_TOKENS_OF_A_PAGE and (pages - 1) * (page // token) + page_size < MAX_TOKENS_OF_A_CACHE


def _has_values_in_keys(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether v_cache is k_cache[..., :head_dim_v], a part of it."""
    same = k_cache.data_ptr() == v_cache.data_ptr() and k_cache.stride() == v_cache.stride()
    return same and v_cache.shape[-1] < k_cache.shape[-1]
