"""The gradients of an exact forward: of attention, and of fused layers whose operators do not give all gradients.

    out = heads_with_gradients(attention, qkv, step, call, lse)               # between the projections of a fused layer
    out = AttentionWithGradients.apply(q, k, v, sinks, call, compute)         # in a layer that runs its own code
    parameters = parameters_computed_again(layer)                             # the one place that decides
    out = layer_computed_again(again, hidden_states, parameters)              # if there are any parameters

The forward computes the engine's attention, on a paged cache and in the order of the fixed tree. The backward pass is that of
packed attention, from the output and lse that the forward keeps. Products, norms and activations of a fused layer have the
backward passes of `fa_serve.ops.gradients`. So a layer keeps about as much as its own code keeps, and its backward pass repeats
no product. A layer with a parameter that is an argument of none of its operators would lose the gradient of this parameter:
such a layer is computed again by its own code, with gradients, as gradient checkpointing does.

Left out: when these functions are called, and the batch (exact_forward.py), and experts (ops/moe/gradients.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fa_serve.backends.calls import BackwardTensors, CallOptions, Gradients
from fa_serve.dispatch import run_backward
from fa_serve.hf.adapter.paged import PagedBatch
from fa_serve.hf.live_model import parameters_in
from fa_serve.hf.surgery.fuse.layer import FusedLayer, HeadsAttention, LayerStep
from fa_serve.ops import Norm
from fa_serve.ops.gradients import OnceDifferentiable
from fa_serve.ops.modes import without_row_order
from fa_serve.ops.select import select_ops


class TrainedCall(NamedTuple):
    """A call of attention in a training forward.

    batch:   the sequences; each of them is a prompt
    options: arguments of `PagedBatch.attention`: `left`, `attention_chunk`, `softmax_scale` and `softcap`
    deterministic: whether gradients repeat in every bit
    """

    batch: PagedBatch
    options: Mapping[str, Any]
    deterministic: bool

    def gradients(self, tensors: Sequence[Tensor], dout: Tensor, needs_dsinks: bool) -> Gradients:
        """The gradients of this call. tensors: q, k, v and sinks, then out and lse of the forward"""
        q, k, v, sinks, out, lse = tensors
        ends = self.batch.cu_seqlens_q
        given = BackwardTensors(q, k, v, sinks, None, ends, ends, out, lse, dout.contiguous(), needs_dsinks=needs_dsinks)
        options = CallOptions(
            causal=True,
            softmax_scale=self.options["softmax_scale"],
            window_size=(self.options["left"], 0),
            softcap=self.options["softcap"],
            attention_chunk=self.options["attention_chunk"],
            deterministic=self.deterministic,
        )
        with without_row_order():  # its kernels repeat bitwise without the mode, which does not know PyTorch's form
            return run_backward(given, self.batch.max_seqlen_q, self.batch.max_seqlen_q, options)


def empty_lse(q: Tensor, num_heads: int) -> Tensor:
    """An empty tensor for the lse of queries of q's dtype, (num_heads, total). q: (total, ...)"""
    return q.new_empty(num_heads, len(q), dtype=torch.promote_types(q.dtype, torch.float32))


class AttentionWithGradients(OnceDifferentiable):
    """Attention that a layer's own code calls: q, k, v (total, heads, dim), sinks, the call, and `compute`, which maps the four
    tensors to (out, lse)."""

    @classmethod
    def compute(
        cls, ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: TrainedCall, compute: Any
    ) -> Tensor:
        out, lse = compute(*[None if x is None else x.detach() for x in (q, k, v, sinks)])
        ctx.call = call
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return cast(Tensor, out)

    @classmethod
    def gradients(cls, ctx: Any, saved: Sequence[Any], *grads: Tensor) -> tuple[Any, ...]:
        found = ctx.call.gradients(saved, grads[0], ctx.needs_input_grad[3])
        return (found.q, found.k, found.v, found.sinks, None, None)


def heads_with_gradients(attention: HeadsAttention, qkv: Tensor, step: LayerStep, call: TrainedCall, lse: Tensor) -> Tensor:
    """`HeadsAttention.attend`, with gradients.

    qkv: (total, rows of the projection), which is overwritten unless there are norms, because their gradients need it
    lse: receives the lse of `step.attend`
    Returns (total, num_heads, head_dim).
    """
    norms = [None if norm is None else norm.weight for norm in (attention.q_norm, attention.k_norm)]
    given = (attention, step, call, lse, qkv, *norms, call.options["sinks"])
    return cast(Tensor, _HeadsWithGradients.apply(*given))  # type: ignore[no-untyped-call]


class _HeadsWithGradients(OnceDifferentiable):
    @classmethod
    def compute(
        cls,
        ctx: Any,
        attention: HeadsAttention,
        step: LayerStep,
        call: TrainedCall,
        lse: Tensor,
        qkv: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        sinks: Tensor | None,
    ) -> Tensor:
        has_norms = attention.q_norm is not None
        rows = qkv.clone() if has_norms else qkv.detach()
        out = attention.attend(rows, step)
        # the step is not kept, because it holds lse too: a checkpoint frees only tensors that are saved for the backward pass
        ctx.attention = attention
        ctx.call = call
        ctx.angles = (None, None) if attention.tables is None else attention.angles(step)
        ctx.num_kv_heads = step.k_cache.shape[2]
        ctx.save_for_backward(qkv if has_norms else None, rows, out, lse, q_weight, k_weight, sinks)
        return out

    @classmethod
    def gradients(cls, ctx: Any, saved: Sequence[Any], *grads: Tensor) -> tuple[Any, ...]:
        attention: HeadsAttention = ctx.attention
        num_kv_heads = ctx.num_kv_heads
        qkv, rows, out, lse, _, _, sinks = saved
        *_, needs_q_norm, needs_k_norm, needs_sinks = ctx.needs_input_grad
        heads = attention.heads(rows, num_kv_heads)
        found: Gradients = ctx.call.gradients((*heads, sinks, out, lse), grads[0], needs_sinks)
        if attention.gated:
            dqkv = torch.zeros_like(rows)
            for part, gradient in zip(attention.heads(dqkv, num_kv_heads), found[:3], strict=True):
                part.copy_(gradient)
        else:
            dqkv = torch.cat(found[:3], dim=1).flatten(1)
        backend = select_ops(dqkv.device)
        norms: tuple[Norm | None, Norm | None] = (None, None)
        if attention.norms_heads:
            norms = (attention.q_norm, attention.k_norm)
        needs_norms = needs_q_norm or needs_k_norm
        cos, sin = ctx.angles
        dweights = backend.rotary_backward(
            dqkv, qkv, attention.num_heads, num_kv_heads, attention.head_dim, cos, sin, *norms, needs_norms
        )
        if attention.q_norm is not None and attention.k_norm is not None and not attention.norms_heads:
            parts = zip(attention.columns(dqkv, num_kv_heads), attention.columns(qkv, num_kv_heads), strict=True)
            of_norms = []
            for (dx, x), norm in zip(parts, (attention.q_norm, attention.k_norm), strict=True):
                dnorm, dweight = backend.rms_norm_backward(dx, x, norm, needs_norms)
                dx.copy_(dnorm)
                of_norms.append(dweight)
            dweights = (of_norms[0], of_norms[1])
        return (None, None, None, None, dqkv, *dweights, found.sinks)


def parameters_computed_again(layer: FusedLayer) -> list[Tensor]:
    """The parameters of a layer that must be computed again for its gradients; empty if its operators give all gradients.

    They do if each parameter of the layer is an argument of an operator, or belongs to a module that runs its own code.
    """
    module = layer.module
    own = parameters_in(module)
    attention = layer.attention
    if not isinstance(attention, HeadsAttention):
        return own
    products = [attention.qkv, layer.o, layer.gate_up, layer.down]
    norms = [layer.before_attention, layer.after_attention, layer.before_mlp, layer.after_mlp]
    given = [layer.options["sinks"]]
    given += [None if norm is None else norm.weight for norm in (*norms, attention.q_norm, attention.k_norm)]
    for product in products:
        given += [x for part in (() if product is None else product.modules) for x in part.parameters(recurse=False)]
    if layer.gate_up is None:
        given += parameters_in(layer.mlp)
    reached = {id(x) for x in given}
    return own if any(id(x) not in reached for x in own) else []


class LayerAgain(NamedTuple):
    """A fused layer that is computed again in the backward pass.

    compute:  maps hidden states to the layer's output, without gradients
    repeat:   does the same by the layer's own code, with gradients
    settings: the context in which the layer's own code runs
    """

    compute: Any
    repeat: Any
    settings: Any


def layer_computed_again(layer: LayerAgain, hidden: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """The output of a fused layer for hidden states (batch, tokens, hidden), with gradients of these and of `parameters`."""
    trained = [x for x in parameters if x.requires_grad]
    return cast(Tensor, _LayerAgain.apply(layer, hidden, *trained))  # type: ignore[no-untyped-call]


class _LayerAgain(OnceDifferentiable):
    @classmethod
    def compute(cls, ctx: Any, layer: LayerAgain, hidden: Tensor, *trained: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, *trained)
        ctx.layer = layer
        return cast(Tensor, layer.compute(hidden.detach()))

    @classmethod
    def gradients(cls, ctx: Any, saved: Sequence[Any], *grads: Tensor) -> tuple[Any, ...]:
        layer: LayerAgain = ctx.layer
        hidden, *trained = saved
        x = hidden.detach().requires_grad_()
        with layer.settings(), torch.enable_grad():  # the backward pass may run outside of the context
            out = layer.repeat(x)
            found = torch.autograd.grad(out, [x, *trained], grads[0], allow_unused=True)
        return (None, *found)
