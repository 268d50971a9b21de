"""Gradients of attention: the kernels of a backend's forward pass with the op "backward" behind them.

    run = plan_differentiable(backend, spec, tensors, options)
    out, lse = run(tensors)           # out.backward() computes the gradients of q, k, v, and of sinks and a float mask

`dispatch` plans a call this way if it needs gradients and its backend is not differentiable by itself. The forward pass
keeps out and lse; nothing as large as the scores is kept or formed. `attention_gradients` is the backward pass of tensors
alone, which PyTorch's custom operators need (see `operators`). Left out: the paged cache, whose backends refuse gradients, and
second derivatives.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fa_serve.backends import Backend, select_backend
from fa_serve.backends.calls import AttentionOptions, AttentionTensors, BackwardTensors, Gradients
from fa_serve.launching.plans import PLANS, Run, facts
from fa_serve.spec import AttentionSpec, UnsupportedError

SECOND_DERIVATIVE = (
    "the gradients of fa_serve's kernels cannot be differentiated again: call backward() or torch.autograd.grad() without "
    "create_graph=True, or choose backend='sdpa', whose gradients PyTorch differentiates"
)


def plan_differentiable(backend: Backend, spec: AttentionSpec, tensors: AttentionTensors, options: AttentionOptions) -> Run:
    """Plan a call that needs gradients for a backend whose kernels autograd cannot follow.

    Raises UnsupportedError if no backend can compute the gradients.
    """
    backward = replace(spec, op="backward", needs_grad=False)
    select_backend(backward)
    kept = replace(options, return_lse=True)
    forward = backend.plan(replace(spec, needs_grad=False), tensors._replace(out=None), kept)
    return partial(_run, forward, backward, options)


def attention_gradients(spec: AttentionSpec, tensors: BackwardTensors, options: AttentionOptions) -> Gradients:
    """The gradients of one dense or packed call, by the fastest backend that supports the spec, whose op is "backward"."""
    if spec.deterministic or torch.are_deterministic_algorithms_enabled():
        spec = replace(spec, deterministic=True)
        options = replace(options, deterministic=True)
    wanted = (tensors.needs_dsinks, tensors.needs_dmask, spec.deterministic)
    key = ("backward", facts(*tensors[:11], tensors.alibi_slopes), wanted, options)
    run = PLANS.get(key)
    if run is None:
        run = PLANS.add(key, select_backend(spec).plan(spec, tensors, options))
    gradients: Gradients = run(tensors)
    return gradients


def _run(
    forward: Run, backward: AttentionSpec, options: AttentionOptions, tensors: AttentionTensors
) -> tuple[Tensor, Tensor | None]:
    out, lse = _Attention.apply(  # type: ignore[no-untyped-call]
        forward,
        backward,
        options,
        tensors.q,
        tensors.k,
        tensors.v,
        tensors.sinks,
        tensors.mask,
        tensors.cu_seqlens_q,
        tensors.keys,
    )
    if tensors.out is not None:
        out = tensors.out.copy_(out)
    return out, lse if options.return_lse else None


class _Attention(torch.autograd.Function):
    """One call in the graph of autograd."""

    @staticmethod
    def forward(
        ctx: Any, forward: Run, backward: AttentionSpec, options: AttentionOptions, *given: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        q, k, v, sinks, mask, cu_seqlens_q, cu_seqlens_k = given
        assert q is not None
        assert k is not None
        assert v is not None
        out: Tensor
        lse: Tensor
        out, lse = forward(AttentionTensors(q, k, v, sinks, mask, cu_seqlens_q, cu_seqlens_k))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given, out, lse)
        ctx.asked = (backward, options)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedError(SECOND_DERIVATIVE)
        q, k, v, sinks, mask, cu_seqlens_q, cu_seqlens_k, out, lse = ctx.saved_tensors
        spec, options = ctx.asked
        needs_dsinks, needs_dmask = ctx.needs_input_grad[6:8]
        if dout is None:
            dout = torch.zeros_like(out)
        given = (q, k, v, sinks, mask, cu_seqlens_q, cu_seqlens_k)
        tensors = BackwardTensors(*given, out, lse, dout, dlse, needs_dsinks, needs_dmask)
        return (None, None, None, *attention_gradients(spec, tensors, options), None, None)
