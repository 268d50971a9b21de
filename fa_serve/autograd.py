"""Gradients of attention: a node of autograd that runs a backend's forward kernels, and the op "backward" for the gradients.

    run = plan_differentiable(backend, spec, tensors, options)
    out, lse = run(tensors)           # out.backward() computes the gradients of q, k, v, and of sinks and a float mask

`dispatch` plans a call this way if it needs gradients and its backend is not differentiable by itself. The forward pass
keeps out and lse; nothing as large as the scores is kept or formed. `attention_gradients` is the backward pass as a function of
tensors, which PyTorch's custom operators need (see `operators`). `transforms` uses `differentiable_call` for calls under
`torch.func.grad` and its siblings; it has a rule for `vmap`. Left out: the paged cache, whose backends refuse gradients, and
second derivatives and derivatives in forward mode, which are refused with an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from fa_serve.backends import Backend, select_backend
from fa_serve.backends.calls import AttentionOptions, AttentionTensors, BackwardTensors, Gradients
from fa_serve.block_lists import BlockLists
from fa_serve.launching.plans import PLANS, Run, facts
from fa_serve.spec import AttentionSpec, UnsupportedError

SECOND_DERIVATIVE = (
    "the gradients of fa_serve's kernels cannot be differentiated again: call backward() or torch.autograd.grad() without "
    "create_graph=True, or choose backend='reference', which is slow, but which PyTorch can differentiate any number of times"
)
FORWARD_MODE = (
    "fa_serve's kernels, and most operators of PyTorch's attention, have gradients in reverse mode only, but torch.func.jvp or "
    "forward-mode AD was requested: use torch.func.grad, vjp or jacrev, or choose backend='reference', which is slow"
)
BATCHED_GRADIENTS = (
    "the gradients of fa_serve's kernels take one gradient of the output at a time, but is_grads_batched=True or "
    "vectorize=True passed a batch of them: use torch.func.vjp with torch.func.vmap, or torch.func.jacrev, which they support"
)
NO_GRADIENT = (
    "fa_serve's kernels have no gradients through a paged cache or with a block_mask: make the call under torch.no_grad(), "
    "call fa_serve.attention or fa_serve.attention_varlen with the keys themselves, or choose backend='sdpa' for a block_mask"
)


is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor belongs to a transform of `torch.func`."""
_DIFFERENTIATING = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)


def are_differentiated() -> bool:
    """Whether a transform of `torch.func` that differentiates is active."""
    if not torch._C._are_functorch_transforms_active():
        return False
    return any(level.key() in _DIFFERENTIATING for level in torch._C._functorch.get_interpreter_stack() or ())


class Call(NamedTuple):
    """A call of attention as autograd sees it, without its tensors.

    run:     maps `AttentionTensors` to (out, lse)
    spec:    spec of its backward pass, with the op "backward"; None if kernels have no backward pass for it
    options: options of its backward pass
    folds:   whether the samples of a vmap may be computed in one call, as further sequences of the dense batch
    block_size: block size of the lists of a block-sparse call
    """

    run: Callable[[AttentionTensors], tuple[Tensor, Tensor | None]]
    spec: AttentionSpec | None
    options: AttentionOptions | None
    folds: bool = False
    block_size: tuple[int, int] | None = None


def plan_differentiable(backend: Backend, spec: AttentionSpec, tensors: AttentionTensors, options: AttentionOptions) -> Run:
    """Plan a call that needs gradients for a backend whose kernels autograd cannot follow.

    Raises UnsupportedError if no backend can compute the gradients.
    """
    backward = replace(spec, op="backward", needs_grad=False)
    select_backend(backward)
    kept = replace(options, return_lse=True)
    forward = backend.plan(replace(spec, needs_grad=False), tensors._replace(out=None), kept)
    return partial(_run, Call(forward, backward, options))


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


def _run(call: Call, tensors: AttentionTensors) -> tuple[Tensor, Tensor | None]:
    assert call.options is not None
    out, lse = _Attention.apply(  # type: ignore[no-untyped-call]
        call,
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
    return out, lse if call.options.return_lse else None


def differentiable_call(call: Call, tensors: AttentionTensors) -> tuple[Tensor, Tensor]:
    """Run a call whose tensors a transform of `torch.func` has wrapped, or that carry tangents.

    `call.run` gets the unwrapped tensors, of one or more samples. It may be called again with other shapes.
    """
    lists: tuple[Tensor | None, ...] = ()
    if tensors.blocks is not None:
        lists = tensors.blocks.tensors
        call = call._replace(block_size=tensors.blocks.block_size)
    found: tuple[Tensor, Tensor] = _Attention.apply(call, *tensors[:10], tensors.alibi_slopes, *lists)  # type: ignore[no-untyped-call]
    return found


def _unpacked(call: Call, given: tuple[Any, ...]) -> AttentionTensors:
    """The tensors given to `_Attention`: the first seven for a planned call, all of them for a call under a transform."""
    tensors = AttentionTensors(*given[:7])
    if len(given) > 7:
        block_table, k_descale, v_descale, alibi_slopes, *lists = given[7:]
        pages = {"block_table": block_table, "k_descale": k_descale, "v_descale": v_descale}
        tensors = tensors._replace(**pages, alibi_slopes=alibi_slopes)
        if call.block_size is not None:
            num, indices, full_num, full_indices, bits = lists
            tensors = tensors._replace(blocks=BlockLists(num, indices, full_num, full_indices, call.block_size, bits))
    return tensors


def _refuse_forward_mode(ctx: Any, *tangents: Any) -> NoReturn:
    raise UnsupportedError(FORWARD_MODE)


def _sample(given: tuple[Any, ...], in_dims: tuple[int | None, ...], index: int) -> list[Any]:
    """The tensors of one sample of a batch that `vmap` has made."""
    return [x if dim is None else x.select(dim, index) for x, dim in zip(given, in_dims, strict=True)]


def _each_sample(function: Any, call: Any, size: int, given: tuple[Any, ...], in_dims: tuple[int | None, ...]) -> Any:
    """The rule for `vmap` that is right for every call: one sample after the other."""
    results = [function.apply(call, *_sample(given, in_dims, index)) for index in range(size)]
    stacked = tuple([torch.stack(parts) for parts in zip(*results, strict=True)])
    return stacked, (0,) * len(stacked)


def _folded(x: Any, dim: int | None, size: int) -> Any:
    """Samples (batch, ...) as one batch (size * batch, ...)."""
    if x is None:
        return None
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


class _Attention(torch.autograd.Function):
    """One call in the graph of autograd: a `Call`, then q, k, v, sinks, mask, cu_seqlens_q and keys. Under a transform, the
    other tensors of `differentiable_call` follow."""

    @staticmethod
    def forward(call: Call, *given: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = call.run(_unpacked(call, given))
        assert lse is not None
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        call, *given = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given[:7], *output, *given[10:11])
        ctx.call = call
        ctx.others = len(given) - 7

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        call = ctx.call
        if call.spec is None:
            raise UnsupportedError(NO_GRADIENT)
        saved = ctx.saved_tensors
        q, k, v, sinks, mask, cu_seqlens_q, cu_seqlens_k, out, lse = saved[:9]
        needs_dsinks, needs_dmask = ctx.needs_input_grad[4:6]
        if dout is None:
            dout = torch.zeros_like(out)
        alibi_slopes = saved[9] if len(saved) > 9 else None
        tensors = BackwardTensors(q, k, v, sinks, mask, cu_seqlens_q, cu_seqlens_k, out, lse, dout, dlse)
        tensors = tensors._replace(needs_dsinks=needs_dsinks, needs_dmask=needs_dmask, alibi_slopes=alibi_slopes)
        if any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in (dout, dlse)):
            raise UnsupportedError(BATCHED_GRADIENTS)
        if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            gradients = _differentiated_gradients(call, tensors)
        else:
            gradients = attention_gradients(call.spec, tensors, call.options)
        return (None, *gradients, *[None] * (2 + ctx.others))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], call: Call, *given: Any) -> Any:
        dims = in_dims[1:]
        batched = {i for i, dim in enumerate(dims) if dim is not None}
        if not call.folds or batched - {0, 1, 2, 4} or given[0].numel() == 0:
            return _each_sample(_Attention, call, info.batch_size, given, dims)
        # q, k, v and the mask have one more dimension of sequences
        size = info.batch_size
        q, k, v = (_folded(x, dim, size) for x, dim in zip(given[:3], dims[:3], strict=True))
        mask = _folded_mask(given[4], dims[4], size, len(q) // size)
        out, lse = _Attention.apply(call, q, k, v, given[3], mask, *given[5:])  # type: ignore[no-untyped-call]
        return (out.unflatten(0, (size, -1)), lse.unflatten(0, (size, -1))), (0, 0)

    jvp = staticmethod(_refuse_forward_mode)


def _folded_mask(mask: Any, dim: int | None, size: int, sequences: int) -> Any:
    """The mask of a folded batch: unchanged if all sequences of all samples share it, otherwise one mask for each of them."""
    if mask is None or (dim is None and mask.shape[0] == 1):
        return mask
    mask = mask.expand(size, *mask.shape) if dim is None else mask.movedim(dim, 0)
    return mask.expand(size, sequences, *mask.shape[2:]).flatten(0, 1)


def _differentiated_gradients(call: Call, tensors: BackwardTensors) -> Gradients:
    """`attention_gradients` as one node, for when autograd or a transform may differentiate the gradients."""
    wanted = (tensors.needs_dsinks, tensors.needs_dmask)
    found = _AttentionGradients.apply((call, wanted), *tensors[:11], tensors.alibi_slopes)  # type: ignore[no-untyped-call]
    dq, dk, dv, *rest = found
    dsinks = rest.pop(0) if tensors.needs_dsinks else None
    return Gradients(dq, dk, dv, dsinks, rest.pop() if tensors.needs_dmask else None)


class _AttentionGradients(torch.autograd.Function):
    """The backward pass of one call as a node that refuses to be differentiated. Its results are the requested gradients."""

    @staticmethod
    def forward(asked: tuple[Call, tuple[bool, bool]], *given: Any) -> tuple[Tensor, ...]:
        call, wanted = asked
        assert call.spec is not None
        assert call.options is not None
        needs_dsinks, needs_dmask = wanted
        tensors = BackwardTensors(*given[:11])
        tensors = tensors._replace(needs_dsinks=needs_dsinks, needs_dmask=needs_dmask, alibi_slopes=given[11])
        found = attention_gradients(call.spec, tensors, call.options)
        return tuple([x for x in found if x is not None])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise UnsupportedError(SECOND_DERIVATIVE)

    @staticmethod
    def vmap(info: Any, in_dims: Any, asked: tuple[Call, tuple[bool, bool]], *given: Any) -> Any:
        call, wanted = asked
        dims = in_dims[1:]
        size = info.batch_size
        if not call.folds or any(wanted) or any(dims[i] is not None for i in (3, 5, 6, 11)) or given[0].numel() == 0:
            return _each_sample(_AttentionGradients, asked, size, given, dims)
        folded = [_folded(x, dim, size) for x, dim in zip(given[:11], dims[:11], strict=True)]
        folded[3] = given[3]
        folded[4] = _folded_mask(given[4], dims[4], size, len(folded[0]) // size)
        found = _AttentionGradients.apply(asked, *folded, given[11])  # type: ignore[no-untyped-call]
        return tuple([x.unflatten(0, (size, -1)) for x in found]), (0,) * len(found)

    jvp = staticmethod(_refuse_forward_mode)
