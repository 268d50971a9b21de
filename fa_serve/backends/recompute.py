"""The backward pass of a backend that PyTorch differentiates: the forward pass once more, with gradients.

Eager calls do not need this module, because autograd differentiates such a backend by itself. But a custom operator is opaque
to autograd and has to compute its gradients only from tensors. For this, the op "backward" of these backends runs the forward
pass again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from fa_serve.backends.calls import AttentionTensors, BackwardTensors, Gradients
from fa_serve.launching.plans import Run


def plan_recomputed(attend: Run) -> Run:
    """Make a plan that maps `BackwardTensors` to `Gradients` from `attend`, which maps `AttentionTensors` to (out, lse) by
    operations that PyTorch can differentiate."""
    return partial(_differentiate, attend)


@contextmanager
def _recording() -> Iterator[None]:
    """Let autograd record, even inside a custom operator, whose body PyTorch runs with autograd's dispatch keys excluded."""
    key = torch._C.DispatchKey
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for autograd in (key.AutogradFunctionality, key.AutogradOther, key.AutogradCPU, key.AutogradCUDA):
        excluded = excluded.remove(autograd)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def _differentiate(attend: Run, t: BackwardTensors) -> Gradients:
    needed = (True, True, True, t.needs_dsinks, t.needs_dmask)
    detached = [x if x is None else x.detach() for x in t[:5]]
    leaves = [x.requires_grad_() for x, need in zip(detached, needed, strict=True) if x is not None and need]
    q, k, v, sinks, mask = detached
    assert q is not None
    assert k is not None
    assert v is not None
    with _recording():
        given = AttentionTensors(q, k, v, sinks, mask, t.cu_seqlens_q, t.cu_seqlens_k, alibi_slopes=t.alibi_slopes)
        out, lse = attend(given)
    results = [out]
    gradients = [t.dout]
    if t.dlse is not None:
        results.append(lse)
        gradients.append(t.dlse)
    dq, dk, dv, *rest = torch.autograd.grad(results, leaves, gradients, allow_unused=True, materialize_grads=True)
    dsinks = rest.pop(0) if t.needs_dsinks else None
    return Gradients(dq, dk, dv, dsinks, rest.pop() if t.needs_dmask else None)
