"""The functions of `fa_serve.api` as operators of PyTorch, for graphs: `torch.ops.fa_serve.attention` and its siblings.

    compiled = torch.compile(lambda q, k, v: fa_serve.attention(q, k, v, causal=True), fullgraph=True)

A tracer must not follow the Python code that checks arguments, selects a backend and launches a kernel: that code would break
the graph, and a kernel that is launched without PyTorch would not be recorded. While `is_traced` is true, the functions of
`fa_serve.api` therefore call an operator, which is one opaque node of the graph and runs what an eager call runs. Eager calls
use no operator.

    attention, attention_varlen, attention_paged                -> (out, lse), both contiguous; lse is (0,) if not asked for
    attention_out, attention_varlen_out, attention_paged_out    write `out`, and return lse
    attention_block_sparse, attention_block_sparse_out          the same two for calls of any layout with a block_mask
    store_kv                                                    writes both caches

An operator takes the tensors of its call, then its numbers, then the options in the order of `CallOptions`; the schemas below
are the reference. The fake kernels know shapes and dtypes only, so a bad argument is reported when the graph runs.

With dynamic shapes, inductor (torch 2.13) loses the offset of a view that any operator writes to: give `store_kv` two separate
tensors as caches, or fix the shapes.

`attention_gradients` is the backward pass of `attention` and `attention_varlen`, registered with autograd. It reads lse, so a
call that needs gradients always computes lse. Left out: gradients of `alibi_slopes`, of the operators that write `out`, of
calls with a block_mask, and through the paged cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from fa_serve.backends.calls import AttentionTensors, BackwardTensors, CallOptions, StoreTensors
from fa_serve.block_lists import BlockLists
from fa_serve.dispatch import (
    Result,
    needs_grad,
    run_backward,
    run_block_sparse,
    run_dense,
    run_paged,
    run_store,
    run_varlen,
)
from fa_serve.spec import ParameterError, Precision, UnsupportedError

_is_jit_tracing = torch._C._is_tracing
_are_transforms_active = torch._C._are_functorch_transforms_active
# "fa_serve". A copy of the package under another name (see deploy/kernel_package.py) registers its operators under that name
_NAMESPACE = __name__.partition(".")[0]
_SCHEMA_TYPES = {bool: "bool", int: "SymInt", float: "float", float | None: "float?", str: "str", Precision: "str"}


def _schema_of_options() -> str:
    """The options in a schema, in the order of `CallOptions`. A graph has no tuples: the window is two numbers."""
    kinds = {name: _SCHEMA_TYPES.get(kind) for name, kind in get_type_hints(CallOptions).items()}
    return ", ".join(
        "SymInt window_left, SymInt window_right" if name == "window_size" else f"{kind} {name}" for name, kind in kinds.items()
    )


_OPTIONS = _schema_of_options()
_NUM_OPTIONS = len(_OPTIONS.split(","))
_WINDOW = CallOptions._fields.index("window_size")
_DENSE = f"Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? alibi_slopes, Tensor? mask, {_OPTIONS}"
_VARLEN = (
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? alibi_slopes, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    f"SymInt max_seqlen_q, SymInt max_seqlen_k, {_OPTIONS}"
)
_PAGED = (
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor? sinks, Tensor? alibi_slopes, Tensor cu_seqlens_q, Tensor seqused_k, "
    "Tensor block_table, Tensor? k_descale, Tensor? v_descale, SymInt max_seqlen_q, SymInt? max_seqlen_k, SymInt num_splits, "
    f"{_OPTIONS}"
)
_BLOCK_SPARSE = (
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? alibi_slopes, Tensor? mask, Tensor? cu_seqlens_q, Tensor? keys, "
    "Tensor? block_table, Tensor? k_descale, Tensor? v_descale, Tensor kv_num_blocks, Tensor kv_indices, "
    "Tensor? full_kv_num_blocks, Tensor? full_kv_indices, Tensor? partial_bits, SymInt block_q, SymInt block_k, "
    f"SymInt? max_seqlen_q, SymInt? max_seqlen_k, SymInt num_splits, {_OPTIONS}"
)
_GRADIENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? mask, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor out, "
    "Tensor lse, Tensor dout, Tensor? dlse, bool needs_dsinks, bool needs_dmask, Tensor? alibi_slopes, SymInt max_seqlen_q, "
    f"SymInt max_seqlen_k, {_OPTIONS}"
)
_STORE = (
    "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, Tensor? k_descale, Tensor? v_descale, "
    "str backend) -> ()"
)


def is_eager() -> bool:
    """Whether nothing records or transforms the caller's operations. Calls ask this first, because it takes less time than
    finding out in which way they are recorded."""
    if is_dynamo_compiling() or torch.compiler._is_compiling_flag:
        return False
    return not (_is_jit_tracing() or _are_transforms_active() or forward_ad._current_level >= 0)


def is_traced(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the caller's operations are recorded, so that a call has to be an operator that PyTorch knows.

    torch.jit does not record kernels that are launched without PyTorch. On a CPU, PyTorch's own operators compute attention.
    torch.jit records these operators themselves, so the trace runs without fa_serve.
    """
    # `torch.compiler.is_compiling` costs four times as much. Dynamo knows the result of the first function, and stops there.
    if is_dynamo_compiling() or torch.compiler._is_compiling_flag:
        return True
    return bool(_is_jit_tracing() and q.is_cuda)


def attention(tensors: AttentionTensors, options: CallOptions) -> Result:
    """`dispatch.run_dense` as one node of a graph."""
    return _call(_dense_op, _dense_out_op, tensors, (tensors.mask,), options)


def attention_varlen(tensors: AttentionTensors, max_seqlen_q: int, max_seqlen_k: int, options: CallOptions) -> Result:
    """`dispatch.run_varlen` as one node of a graph."""
    lengths = (tensors.cu_seqlens_q, tensors.keys, max_seqlen_q, max_seqlen_k)
    return _call(_varlen_op, _varlen_out_op, tensors, lengths, options)


def attention_paged(
    tensors: AttentionTensors, max_seqlen_q: int, max_seqlen_k: int | None, num_splits: int, options: CallOptions
) -> Result:
    """`dispatch.run_paged` as one node of a graph."""
    numbers = (max_seqlen_q, max_seqlen_k, num_splits)
    pages = (tensors.cu_seqlens_q, tensors.keys, tensors.block_table, tensors.k_descale, tensors.v_descale)
    return _call(_paged_op, _paged_out_op, tensors, (*pages, *numbers), options)


def attention_block_sparse(
    tensors: AttentionTensors, max_seqlen_q: int | None, max_seqlen_k: int | None, num_splits: int, options: CallOptions
) -> Result:
    """`dispatch.run_block_sparse` as one node of a graph."""
    blocks = tensors.blocks
    assert blocks is not None
    lists = (*blocks.tensors, *blocks.block_size)
    pages = (tensors.block_table, tensors.k_descale, tensors.v_descale)
    given = (tensors.mask, tensors.cu_seqlens_q, tensors.keys, *pages, *lists, max_seqlen_q, max_seqlen_k, num_splits)
    return _call(_block_sparse_op, _block_sparse_out_op, tensors, given, options)


def store_kv(tensors: StoreTensors, backend: str) -> None:
    """`dispatch.run_store` as one node of a graph."""
    _store_op(*tensors, backend)


def _flat(options: CallOptions) -> tuple[Any, ...]:
    """Options as an operator takes them: without a tuple."""
    return (*options[:_WINDOW], *options.window_size, *options[_WINDOW + 1 :])


def _packed(flat: Sequence[Any]) -> CallOptions:
    return CallOptions._make((*flat[:_WINDOW], (flat[_WINDOW], flat[_WINDOW + 1]), *flat[_WINDOW + 2 :]))


def _call(functional: Any, writing: Any, tensors: AttentionTensors, middle: tuple[Any, ...], options: CallOptions) -> Result:
    """`middle`: the arguments of the operator between its common tensors and its options."""
    with_gradients = needs_grad(tensors)
    kept = options._replace(return_lse=options.return_lse or with_gradients)
    given = (tensors.q, tensors.k, tensors.v, tensors.sinks, tensors.alibi_slopes, *middle, *_flat(kept))
    out = tensors.out
    if out is None:
        result, lse = functional(*given)
    elif with_gradients:
        result, lse = functional(*given)
        result = out.copy_(result)
    else:
        result = out
        lse = writing(out, *given)
    return result, lse if options.return_lse else None


def _run_dense(out: Tensor | None, *given: Any) -> Result:
    q, k, v, sinks, alibi_slopes, mask, *options = given
    tensors = AttentionTensors(q, k, v, sinks, mask, out=out, alibi_slopes=alibi_slopes)
    return run_dense(tensors, _packed(options))


def _run_varlen(out: Tensor | None, *given: Any) -> Result:
    q, k, v, sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options = given
    tensors = AttentionTensors(q, k, v, sinks, None, cu_seqlens_q, cu_seqlens_k, out=out, alibi_slopes=alibi_slopes)
    return run_varlen(tensors, max_seqlen_q, max_seqlen_k, _packed(options))


def _run_paged(out: Tensor | None, *given: Any) -> Result:
    q, k_cache, v_cache, sinks, alibi_slopes, cu_seqlens_q, seqused_k, block_table, k_descale, v_descale, *rest = given
    paged = (cu_seqlens_q, seqused_k, block_table, k_descale, v_descale)
    tensors = AttentionTensors(q, k_cache, v_cache, sinks, None, *paged, out, None, alibi_slopes)
    max_seqlen_q, max_seqlen_k, num_splits, *options = rest
    return run_paged(tensors, max_seqlen_q, max_seqlen_k, num_splits, _packed(options))


def _run_block_sparse(out: Tensor | None, *given: Any) -> Result:
    q, k, v, sinks, alibi_slopes = given[:5]
    mask, cu_seqlens_q, keys, block_table, k_descale, v_descale = given[5:11]
    num, indices, full_num, full_indices, bits, block_q, block_k = given[11:18]
    max_seqlen_q, max_seqlen_k, num_splits, *options = given[18:]
    blocks = BlockLists(num, indices, full_num, full_indices, (block_q, block_k), bits)
    lengths = (cu_seqlens_q, keys, block_table)
    tensors = AttentionTensors(q, k, v, sinks, mask, *lengths, k_descale, v_descale, out, None, alibi_slopes, blocks)
    return run_block_sparse(tensors, max_seqlen_q, max_seqlen_k, num_splits, _packed(options))


def _run_store(*given: Any) -> None:
    run_store(StoreTensors(*given[:-1]), given[-1])


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _or_empty(lse: Tensor | None, q: Tensor) -> Tensor:
    """lse, or an empty tensor for None: an operator must return the same number of tensors at each call."""
    return q.new_empty(0, dtype=_lse_dtype(q)) if lse is None else lse.contiguous()


def _operators(name: str, arguments: str, run: Callable[..., Result]) -> tuple[Any, Any]:
    """-> an operator that allocates `out`, and an operator that writes into a given `out`."""

    def functional(*given: Any) -> tuple[Tensor, Tensor]:
        result, lse = run(None, *given)
        return result.contiguous(), _or_empty(lse, given[0])

    def writing(out: Tensor, *given: Any) -> Tensor:
        _, lse = run(out, *given)
        return _or_empty(lse, given[0])

    def fake_lse(*given: Any) -> Tensor:
        q: Tensor = given[0]
        options = _packed(given[-_NUM_OPTIONS:])
        shape = (*q.shape[:-3], q.shape[-2], q.shape[-3]) if options.return_lse else (0,)
        return q.new_empty(shape, dtype=_lse_dtype(q))

    def fake(*given: Any) -> tuple[Tensor, Tensor]:
        q, _, v = given[:3]
        return q.new_empty(*q.shape[:-1], v.shape[-1]), fake_lse(*given)

    functional_op = torch.library.custom_op(
        f"{_NAMESPACE}::{name}", functional, mutates_args=(), schema=f"({arguments}) -> (Tensor out, Tensor lse)"
    )
    functional_op.register_fake(fake)
    writing_op = torch.library.custom_op(
        f"{_NAMESPACE}::{name}_out", writing, mutates_args=("out",), schema=f"(Tensor(a!) out, {arguments}) -> Tensor"
    )
    writing_op.register_fake(lambda out, *given: fake_lse(*given))
    return functional_op, writing_op


def _compute_gradients(*given: Any) -> list[Tensor]:
    tensors = BackwardTensors(*given[:14])
    max_seqlen_q, max_seqlen_k, *options = given[14:]
    found = run_backward(tensors, max_seqlen_q, max_seqlen_k, _packed(options))
    return [x.contiguous() for x in found if x is not None]


def _fake_gradients(*given: Any) -> list[Tensor]:
    tensors = BackwardTensors(*given[:14])
    wanted = [tensors.q, tensors.k, tensors.v]
    wanted += [tensors.sinks] if tensors.needs_dsinks and tensors.sinks is not None else []
    wanted += [tensors.mask] if tensors.needs_dmask and tensors.mask is not None else []
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in wanted]


def _keep_for_dense(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, alibi_slopes, mask, *options = inputs
    _keep(ctx, (q, k, v, sinks, mask, None, None, *output, alibi_slopes), (q.shape[1], k.shape[1], *options))


def _keep_for_varlen(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k, *rest = inputs
    _keep(ctx, (q, k, v, sinks, None, cu_seqlens_q, cu_seqlens_k, *output, alibi_slopes), tuple(rest))


def _keep(ctx: Any, tensors: tuple[Tensor | None, ...], numbers: tuple[Any, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    ctx.numbers = numbers


def _dense_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    dq, dk, dv, dsinks, dmask = _differentiate(ctx, dout, dlse, ctx.needs_input_grad[5])
    return (dq, dk, dv, dsinks, None, dmask, *[None] * _NUM_OPTIONS)


def _varlen_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    dq, dk, dv, dsinks, _ = _differentiate(ctx, dout, dlse, False)
    return (dq, dk, dv, dsinks, *[None] * (5 + _NUM_OPTIONS))


def _refuse_gradients(ctx: Any, *grads: Tensor | None) -> Any:
    raise UnsupportedError(
        "a call with a block_mask has no gradient in a compiled graph: call it without torch.compile, so that sdpa computes "
        "the gradients, or under torch.no_grad()"
    )


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, needs_dmask: bool) -> list[Tensor | None]:
    """The gradients of q, k, v, sinks and mask."""
    *given, out, lse, alibi_slopes = ctx.saved_tensors
    if ctx.needs_input_grad[4]:
        raise UnsupportedError("alibi_slopes have no gradient in a compiled graph: detach them, or call without torch.compile")
    if not _packed(ctx.numbers[-_NUM_OPTIONS:]).return_lse:
        raise ParameterError("return_lse", "be True if gradients are needed", False)
    needs_dsinks = ctx.needs_input_grad[3]
    dout = torch.zeros_like(out) if dout is None else dout
    found = _gradients_op(*given, out, lse, dout, dlse, needs_dsinks, needs_dmask, alibi_slopes, *ctx.numbers)
    dq, dk, dv, *rest = found
    dsinks = rest.pop(0) if needs_dsinks else None
    return [dq, dk, dv, dsinks, rest.pop() if needs_dmask else None]


_dense_op, _dense_out_op = _operators("attention", _DENSE, _run_dense)
_varlen_op, _varlen_out_op = _operators("attention_varlen", _VARLEN, _run_varlen)
_gradients_op = torch.library.custom_op(
    f"{_NAMESPACE}::attention_gradients", _compute_gradients, mutates_args=(), schema=f"({_GRADIENTS}) -> Tensor[]"
)
_gradients_op.register_fake(_fake_gradients)
_dense_op.register_autograd(_dense_backward, setup_context=_keep_for_dense)
_varlen_op.register_autograd(_varlen_backward, setup_context=_keep_for_varlen)
_paged_op, _paged_out_op = _operators("attention_paged", _PAGED, _run_paged)
_block_sparse_op, _block_sparse_out_op = _operators("attention_block_sparse", _BLOCK_SPARSE, _run_block_sparse)
_block_sparse_op.register_autograd(_refuse_gradients)
_store_op = torch.library.custom_op(f"{_NAMESPACE}::store_kv", _run_store, mutates_args=("k_cache", "v_cache"), schema=_STORE)
_store_op.register_fake(lambda *given: None)
