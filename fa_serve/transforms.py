"""The functions of `fa_serve.api` under the transforms of `torch.func`, and for tensors that carry tangents.

    per_sample = torch.func.vmap(torch.func.grad(loss))(q, k, v)     # loss calls fa_serve.attention

PyTorch's transforms wrap tensors, and a wrapper has no memory that a kernel could read. So a call with wrapped tensors selects
its backend by what the wrappers show. If PyTorch's operators compute the call (`sdpa`, `reference`), transforms follow these
operators. If kernels do, the call is one node of autograd (`autograd.differentiable_call`), which gets the unwrapped tensors
and has a rule for `vmap`: samples of dense calls are computed together, samples of packed and paged calls one after the other.

Kernels support only first derivatives, in reverse mode: `jvp` and second derivatives are refused with an error. PyTorch's fused
operators do not support more, but only their forward mode is refused here, because nothing tells in advance that gradients will
be differentiated.

Left out: transforms inside of `torch.compile`, where a call is an operator (`operators`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fa_serve.autograd import FORWARD_MODE, Call, differentiable_call, is_wrapped
from fa_serve.backends.calls import AttentionTensors, CallOptions, StoreTensors
from fa_serve.dispatch import (
    Decision,
    Result,
    decide_dense,
    decide_varlen,
    needs_grad,
    run_block_sparse,
    run_dense,
    run_paged,
    run_varlen,
)
from fa_serve.launching.plans import Run
from fa_serve.spec import UnsupportedError

_are_transforms_active = torch._C._are_functorch_transforms_active


def is_transformed(tensors: AttentionTensors | StoreTensors) -> bool:
    """Whether a transform has wrapped one of the tensors, or one of them has a tangent."""
    if not _are_transforms_active() and forward_ad._current_level < 0:
        return False
    lists = tensors.blocks.tensors if isinstance(tensors, AttentionTensors) and tensors.blocks is not None else ()
    given = [x for x in (*tensors, *lists) if isinstance(x, Tensor)]
    if _are_transforms_active() and any(is_wrapped(x) for x in given):
        return True
    return forward_ad._current_level >= 0 and any(_has_tangent(x) for x in given)


def _has_tangent(x: Tensor) -> bool:
    return forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]


def attention(tensors: AttentionTensors, options: CallOptions) -> Result:
    """`dispatch.run_dense` of wrapped tensors."""
    kept = options._replace(return_lse=True)  # the node of autograd keeps lse
    return _run(tensors, options, decide_dense(tensors, options), lambda plain: run_dense(plain, kept), folds=True)


def attention_varlen(tensors: AttentionTensors, max_seqlen_q: int, max_seqlen_k: int, options: CallOptions) -> Result:
    """`dispatch.run_varlen` of wrapped tensors."""
    kept = options._replace(return_lse=True)  # the node of autograd keeps lse
    decision = decide_varlen(tensors, max_seqlen_q, max_seqlen_k, options)
    return _run(tensors, options, decision, lambda plain: run_varlen(plain, max_seqlen_q, max_seqlen_k, kept))


def attention_paged(
    tensors: AttentionTensors, max_seqlen_q: int, max_seqlen_k: int | None, num_splits: int, options: CallOptions
) -> Result:
    """`dispatch.run_paged` of wrapped tensors. No backend has gradients through pages: `run_paged` raises the error."""
    kept = options._replace(return_lse=True)  # the node of autograd keeps lse
    if needs_grad(tensors):
        return run_paged(tensors, max_seqlen_q, max_seqlen_k, num_splits, options)
    return _run(tensors, options, None, lambda plain: run_paged(plain, max_seqlen_q, max_seqlen_k, num_splits, kept))


def attention_block_sparse(
    tensors: AttentionTensors, max_seqlen_q: int | None, max_seqlen_k: int | None, num_splits: int, options: CallOptions
) -> Result:
    """`dispatch.run_block_sparse` of wrapped tensors."""
    kept = options._replace(return_lse=True)  # the node of autograd keeps lse
    decision = None
    if tensors.cu_seqlens_q is None:
        decision = decide_dense(tensors, options)
    elif tensors.block_table is None:
        assert max_seqlen_q is not None
        assert max_seqlen_k is not None
        decision = decide_varlen(tensors, max_seqlen_q, max_seqlen_k, options)
    elif needs_grad(tensors):
        return run_block_sparse(tensors, max_seqlen_q, max_seqlen_k, num_splits, options)
    return _run(tensors, options, decision, lambda plain: run_block_sparse(plain, max_seqlen_q, max_seqlen_k, num_splits, kept))


def store_kv(tensors: StoreTensors, backend: str) -> None:
    """Refuse the call: a transform cannot follow writes to a cache."""
    raise UnsupportedError(
        "store_kv writes its caches in place, which torch.func's transforms and forward-mode AD cannot follow, but one of its "
        "tensors belongs to such a transform: call it outside of the transformed function"
    )


def _run(
    tensors: AttentionTensors, options: CallOptions, decision: Decision | None, run: Run, *, folds: bool = False
) -> Result:
    """decision: None if no backend has gradients for the call; run: runs it with plain tensors; folds: as in `autograd.Call`"""
    if decision is not None and decision.backend.differentiable:
        try:
            result: Result = decision.backend.plan(decision.spec, tensors, decision.options)(tensors)
        except NotImplementedError as error:  # which PyTorch raises for one of its operators
            if forward_ad._current_level < 0 or isinstance(error, UnsupportedError):
                raise
            raise UnsupportedError(FORWARD_MODE) from error
        return result
    call = Call(run, None, None)
    if decision is not None and tensors.blocks is None:
        # it is not known here whether tensors inside a batch of vmap need gradients
        call = Call(run, replace(decision.spec, op="backward", needs_grad=False), decision.options, folds)
    out, lse = differentiable_call(call, tensors._replace(out=None))
    if tensors.out is not None:
        out = tensors.out.copy_(out)
    return out, lse if options.return_lse else None
