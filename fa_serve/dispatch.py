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
    check_qkv,
    check_sinks,
    check_store,
)
from fa_serve.autograd import are_differentiated, attention_gradients, is_wrapped, plan_differentiable
from fa_serve.backends import Backend, select_backend
from fa_serve.backends.calls import (
    AttentionOptions,
    AttentionTensors,
    BackwardTensors,
    CallOptions,
    Gradients,
    StoreTensors,
    complete_options,
    effective_chunk,
    growing_facts,
)
from fa_serve.backends.chunks import decodes_chunks
from fa_serve.backends.float8_copies import MAX_COPY_BYTES, copied_bytes
from fa_serve.backends.mixed import find_decoder, plan_mixed
from fa_serve.block_lists import expand_once
from fa_serve.launching.plans import PLANS, Run, facts
from fa_serve.spec import FEW_QUERIES, TREE_SPLITS, AttentionSpec, Layout, Op, arch_of
from fa_serve.value_checks import (
    check_block_values,
    check_paged_values,
    check_store_values,
    check_varlen_values,
    with_value_checks,
)

MAX_TOKENS_OF_A_PAGE = 1 << 30
MAX_TOKENS_OF_A_CACHE = 0x7FFF0000
"""The limits that the coordinates of the copy engine set, see `backends.hopper.descriptors.ragged_view`."""
Result = tuple[Tensor, Tensor | None]
"""out, and lse if it was asked for."""


def run_dense(tensors: AttentionTensors, options: CallOptions) -> Result:
    """Compute a call of `fa_serve.attention`."""
    q = tensors.q
    k = tensors.k
    v = tensors.v
    sinks = tensors.sinks
    mask = tensors.mask
    # One query per sequence, and a cache that grows from step to step: the calls of many steps share a plan.
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


def run_varlen(tensors: AttentionTensors, max_seqlen_q: int, max_seqlen_k: int, options: CallOptions) -> Result:
    """Compute a call of `fa_serve.attention_varlen`."""
    lengths = (tensors.cu_seqlens_q, tensors.keys)
    seen = facts(tensors.q, tensors.k, tensors.v, tensors.sinks, *lengths, tensors.out, tensors.alibi_slopes)
    key = ("varlen", seen, max_seqlen_q, max_seqlen_k, options)
    run = PLANS.get(key)
    if run is None:
        plan = decide_varlen(tensors, max_seqlen_q, max_seqlen_k, options).plan(tensors)
        checked = with_value_checks(plan, tensors.q, lambda given: check_varlen_values(given, max_seqlen_q, max_seqlen_k))
        run = PLANS.add(key, checked)
    result: Result = run(tensors)
    return result


def run_paged(
    tensors: AttentionTensors, max_seqlen_q: int, max_seqlen_k: int | None, num_splits: int, options: CallOptions
) -> Result:
    """Compute a call of `fa_serve.attention_paged`."""
    first_k = tensors.k.data_ptr()
    first_v = tensors.v.data_ptr()
    where = (not (first_k | first_v) & 15, first_k == first_v)
    seen = facts(*tensors)  # type: ignore[arg-type]  # `blocks` is None here
    key = ("paged", seen, max_seqlen_q, max_seqlen_k, num_splits, where, options)
    run = PLANS.get(key)
    if run is None:
        run = PLANS.add(key, _plan_paged(tensors, max_seqlen_q, max_seqlen_k, num_splits, options))
    result: Result = run(tensors)
    return result


def run_block_sparse(
    tensors: AttentionTensors, max_seqlen_q: int | None, max_seqlen_k: int | None, num_splits: int, options: CallOptions
) -> Result:
    """Compute a call of any layout whose tensors have `blocks`. For a dense call, both lengths are None."""
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
            plan = _plan_expanded(tensors, options) if needs_grad(tensors) else decide_dense(tensors, options).plan(tensors)
            run = with_value_checks(plan, tensors.q, lambda given: check_block_values(given.blocks))
        run = PLANS.add(key, run)
    result: Result = run(tensors)
    return result


def _plan_expanded(tensors: AttentionTensors, options: CallOptions) -> Run:
    """Plan a dense call that needs gradients: its lists become a mask, for which backends compute gradients."""
    check_qkv("dense", tensors.q, tensors.k, tensors.v)
    check_block_lists(tensors.blocks, tensors.q, tensors.k, tensors.q.shape[0], tensors.q.shape[1])
    if tensors.mask is not None:
        check_no_block_mask(tensors.blocks)

    def run(given: AttentionTensors) -> Result:
        assert given.blocks is not None
        mask = expand_once(given.blocks, given.q.shape[1], given.k.shape[1], given.q.shape[2])
        return run_dense(given._replace(mask=mask, blocks=None), options)

    return run


def run_store(tensors: StoreTensors, backend: str) -> None:
    """Compute a call of `fa_serve.store_kv`."""
    key = ("store", facts(*tensors), backend)
    run = PLANS.get(key)
    if run is None:
        run = PLANS.add(key, with_value_checks(_plan_store(tensors, backend), tensors.k, check_store_values))
    run(tensors)


def run_backward(tensors: BackwardTensors, max_seqlen_q: int, max_seqlen_k: int, given: CallOptions) -> Gradients:
    """Compute the gradients of a checked call of `fa_serve.attention` or, with cu_seqlens, of `fa_serve.attention_varlen`."""
    options = complete_options(given, tensors.q, max_seqlen_q, max_seqlen_k)
    chunk = effective_chunk(given.attention_chunk, options.window_size, max_seqlen_k)
    options = replace(options, return_lse=True, attention_chunk=chunk, precision="bf16")
    layout: Layout = "dense" if tensors.cu_seqlens_q is None else "varlen"
    shapes = AttentionTensors(tensors.q, tensors.k, tensors.v, tensors.sinks, tensors.mask, alibi_slopes=tensors.alibi_slopes)
    return attention_gradients(_spec(layout, "backward", shapes, options), tensors, options)


class Decision(NamedTuple):
    """What is decided about a dense or packed call before it is planned."""

    backend: Backend
    spec: AttentionSpec
    options: AttentionOptions

    def plan(self, tensors: AttentionTensors) -> Run:
        if self.spec.needs_grad and not self.backend.differentiable:
            return plan_differentiable(self.backend, self.spec, tensors, self.options)
        return self.backend.plan(self.spec, tensors, self.options)


def decide_dense(tensors: AttentionTensors, given: CallOptions) -> Decision:
    """Check a call of `fa_serve.attention` and select its backend."""
    q = tensors.q
    k = tensors.k
    v = tensors.v
    mask = tensors.mask
    check_qkv("dense", q, k, v)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k must have q's batch size {q.shape[0]}, got {k.shape[0]}")
    check_sinks(tensors.sinks, q)
    options = complete_options(given, q, q.shape[1], k.shape[1])
    if given.attention_chunk != 0:  # a plan for a growing cache serves all numbers of keys that have the same bit length
        chunk = effective_chunk(given.attention_chunk, options.window_size, (1 << k.shape[1].bit_length()) - 1)
        options = replace(options, attention_chunk=chunk)
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
    options = replace(options, deterministic=given.deterministic and with_gradients)
    sizes = None if mask is None else (q.shape[0], q.shape[1], k.shape[1])
    spec = _spec("dense", op, tensors, options, sizes)
    if given.backend == "auto" and over_keys and decodes_chunks(spec, q.shape[0], q.shape[1], k.shape[1], _multiprocessors(q)):
        spec = replace(spec, op="decode")
    return Decision(select_backend(spec, given.backend), spec, replace(options, precision=spec.precision))


def decide_varlen(tensors: AttentionTensors, max_seqlen_q: int, max_seqlen_k: int, given: CallOptions) -> Decision:
    """Check a call of `fa_serve.attention_varlen` and select its backend."""
    q = tensors.q
    k = tensors.k
    v = tensors.v
    assert tensors.cu_seqlens_q is not None
    assert tensors.keys is not None
    check_qkv("varlen", q, k, v)
    check_sinks(tensors.sinks, q)
    options = complete_options(given, q, max_seqlen_q, max_seqlen_k)
    check_index("cu_seqlens_q", tensors.cu_seqlens_q, q, None)
    check_index("cu_seqlens_k", tensors.keys, q, tensors.cu_seqlens_q.shape[0])
    check_lengths(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    chunk = effective_chunk(given.attention_chunk, options.window_size, max_seqlen_k)
    check_alibi(tensors.alibi_slopes, q, tensors.cu_seqlens_q.shape[0] - 1)
    check_block_lists(tensors.blocks, q, k, tensors.cu_seqlens_q.shape[0] - 1, max_seqlen_q)
    check_out(tensors.out, q, v)
    repeats = given.deterministic and needs_grad(tensors)
    options = replace(options, deterministic=repeats, attention_chunk=chunk)
    spec = _spec("varlen", "attention", tensors, options)
    return Decision(select_backend(spec, given.backend), spec, options)


def _plan_paged(
    tensors: AttentionTensors, max_seqlen_q: int, max_seqlen_k: int | None, num_splits: int, given: CallOptions
) -> Run:
    plan = _decide_paged(tensors, max_seqlen_q, max_seqlen_k, num_splits, given)
    left = given.window_size[0]
    chunk = given.attention_chunk
    return with_value_checks(plan, tensors.q, lambda found: check_paged_values(found, max_seqlen_q, max_seqlen_k, left, chunk))


def _decide_paged(
    tensors: AttentionTensors, max_seqlen_q: int, max_seqlen_k: int | None, num_splits: int, given: CallOptions
) -> Run:
    """Check a call of `fa_serve.attention_paged`, and plan it for a backend."""
    q = tensors.q
    k_cache = tensors.k
    v_cache = tensors.v
    backend = given.backend
    assert tensors.cu_seqlens_q is not None
    assert tensors.keys is not None
    assert tensors.block_table is not None
    check_qkv("paged", q, k_cache, v_cache)
    check_sinks(tensors.sinks, q)
    check_index("cu_seqlens_q", tensors.cu_seqlens_q, q, None)
    batch = tensors.cu_seqlens_q.shape[0] - 1
    check_index("seqused_k", tensors.keys, q, batch)
    check_block_table(tensors.block_table, q, batch)
    capacity = tensors.block_table.shape[1] * k_cache.shape[1]
    length = capacity if max_seqlen_k is None else max_seqlen_k
    check_lengths(max_seqlen_q=max_seqlen_q, max_seqlen_k=length)
    if length > capacity:
        raise ValueError(f"max_seqlen_k must be at most max_pages * page_size = {capacity}, got {length}")
    options = replace(complete_options(given, q, max_seqlen_q, length, num_splits), deterministic=False)
    fitting_chunk = effective_chunk(given.attention_chunk, options.window_size, length)
    if not num_splits:  # with num_splits, nothing may depend on the longest sequence of the batch
        options = replace(options, attention_chunk=fitting_chunk)
    if not isinstance(num_splits, int) or num_splits < TREE_SPLITS:
        raise ValueError(
            f"num_splits must be 0 (heuristic), {TREE_SPLITS} (fixed groups of keys) or a positive int, got {num_splits!r}"
        )
    check_cache(k_cache, v_cache)
    check_descale(k_cache, tensors.k_descale, tensors.v_descale)
    check_alibi(tensors.alibi_slopes, q, batch)
    check_block_lists(tensors.blocks, q, k_cache, batch, max_seqlen_q)
    check_out(tensors.out, q, v_cache)
    unequal = q.shape[0] < batch * max_seqlen_q
    if num_splits == TREE_SPLITS:
        options = replace(options, precision="bf16")  # the tree always computes in q's dtype, whatever the caller asks for
        # all kernels of the tree compute the same bits, so the lengths may decide which one runs
        spec = _spec("paged", "tree", tensors, options, (batch, max_seqlen_q, length))
        chosen = select_backend(spec, backend)
        decoder = find_decoder(replace(spec, sizes=None), backend) if unequal else None
        if decoder is not None and decoder is not chosen:
            return plan_mixed(decoder, chosen, spec, tensors, options)
        return chosen.plan(spec, tensors, options)
    if copied_bytes(k_cache, v_cache, batch, length, options.precision) > MAX_COPY_BYTES:
        options = replace(options, precision="bf16")
    widens = k_cache.dtype != q.dtype and options.precision == "bf16"
    decodes = max_seqlen_q <= FEW_QUERIES or num_splits > 0 or widens
    # Groups of sequences that attend to a shared prefix (hf/adapter/common_prefix.py): only the device knows how many groups
    # have queries. Their number does not tell the host how much of the GPU they fill, so the decoding kernel balances them.
    grouped = decodes and unequal and options.window_size[1] < 0
    sizes = None if num_splits or grouped else (batch, max_seqlen_q, length)
    spec = _spec("paged", "decode" if decodes else "attention", tensors, options, sizes)
    chosen = select_backend(spec, backend)
    if backend == "auto" and not unequal:
        splits_keys = chosen.name == "hopper"
        if decodes_chunks(spec, batch, max_seqlen_q, length, _multiprocessors(q), splits_keys=splits_keys):
            spec = replace(spec, op="decode")
            chosen = select_backend(spec, backend)
    options = replace(options, precision=spec.precision)
    if not decodes and unequal and tensors.blocks is None:
        # Some sequences have fewer queries than the longest one, and may be decoding.
        decode_spec = _spec("paged", "decode", tensors, options)
        decoder = find_decoder(decode_spec, backend)
        if decoder is not None:
            return plan_mixed(decoder, chosen, spec, tensors, options)
    return chosen.plan(spec, tensors, options)


def _multiprocessors(q: Tensor) -> int:
    return torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 0


def _plan_store(tensors: StoreTensors, backend: str) -> Run:
    k = tensors.k
    v = tensors.v
    k_cache = tensors.k_cache
    check_store(k, v, k_cache, tensors.v_cache, tensors.slot_mapping)
    check_cache(k_cache, tensors.v_cache)
    check_descale(k_cache, tensors.k_descale, tensors.v_descale)
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
    options: AttentionOptions,
    sizes: tuple[int, int, int] | None = None,
) -> AttentionSpec:
    q = tensors.q
    k = tensors.k
    v = tensors.v
    mask = tensors.mask
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
        sinks=tensors.sinks is not None,
        alibi=tensors.alibi_slopes is not None,
        block_mask=tensors.blocks is not None,
        mask=None if mask is None else "bool" if mask.dtype == torch.bool else "float",
        page_size=k.shape[1] if paged else 0,
        needs_grad=needs_grad(tensors),
        op=op,
        whole_rows=not paged or (_has_whole_rows(k) and _has_whole_rows(v)),
        values_in_keys=paged and _has_values_in_keys(k, v),
        precision=options.precision if op == "attention" else "bf16",
        sizes=sizes,
        **options.in_spec,
    )


def needs_grad(tensors: AttentionTensors) -> bool:
    """Whether autograd will ask for gradients of this call."""
    differentiable = [
        x for x in (tensors.q, tensors.k, tensors.v, tensors.sinks, tensors.mask, tensors.alibi_slopes) if x is not None
    ]
    if torch.is_grad_enabled() and any(x.requires_grad for x in differentiable):
        return True
    # a tensor that vmap batches does not show whether a transform below vmap differentiates the tensor inside
    return are_differentiated() and any(is_wrapped(x) for x in differentiable)


def _has_whole_rows(cache: Tensor) -> bool:
    """Whether tokens and heads are multiples of 16 bytes apart, and pages a whole number of tokens.

    The copy engine numbers the tokens of all pages in 32 bits, and the tokens of one page in 30.
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
