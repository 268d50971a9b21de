"""The backward pass of a backend that PyTorch differentiates: the forward pass once more, with gradients.

`fa_serve.api` needs none of it, because autograd follows such a backend by itself. A custom operator is opaque to autograd and
has to compute its gradients from tensors alone; the op "backward" of these backends does it here.
"""

from __future__ import annotations

from functools import partial

import torch

from fa_serve.backends.plan import AttentionTensors, BackwardTensors, Gradients, Run


def plan_recomputed(attend: Run) -> Run:
    """`attend` maps `AttentionTensors` to (out, lse), differentiably -> a plan that maps `BackwardTensors` to `Gradients`."""
    return partial(_differentiate, attend)


def _differentiate(attend: Run, t: BackwardTensors) -> Gradients:
    needed = (True, True, True, t.needs_dsinks, t.needs_dmask)
    given = [x if x is None else x.detach() for x in t[:5]]
    leaves = [x.requires_grad_() for x, need in zip(given, needed, strict=True) if x is not None and need]
    q, k, v, sinks, mask = given
    assert q is not None
    assert k is not None
    assert v is not None
    with torch.enable_grad():
        out, lse = attend(AttentionTensors(q, k, v, sinks, mask, t.cu_seqlens_q, t.cu_seqlens_k))
    results = [out]
    gradients = [t.dout]
    if t.dlse is not None:
        results.append(lse)
        gradients.append(t.dlse)
    dq, dk, dv, *rest = torch.autograd.grad(results, leaves, gradients, allow_unused=True, materialize_grads=True)
    dsinks = rest.pop(0) if t.needs_dsinks else None
    return Gradients(dq, dk, dv, dsinks, rest.pop() if t.needs_dmask else None)
