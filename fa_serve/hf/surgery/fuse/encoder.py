"""A layer of an encoder, computed by few kernels: one product for q, k and v, and one kernel for a sum and the norm after it.

    fused = fuse_encoder(model, forward)     # the number of fused layers; the others run their own code, and the log says why

A layer has two parts, attention and an MLP, which may be gated. Layer norms come after each part (BERT, RoBERTa, Nomic) or
before it (ModernBERT). Each kind of layer is computed by its own code and in its fused form in float32 on the same input. It is
fused if queries, keys, values and the output agree (surgery/proof.py). The options of its attention, such as a window, are read
from its own call.

A fused layer computes sequences that are packed end to end (`cu_seq_lens_q`). Other calls run its own code. Left out: layers of
decoders (fusion.py), and the embedding, the last norm and the head.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fa_serve import api, ops
from fa_serve.hf.adapter.attention import riding
from fa_serve.hf.adapter.translate import AttendsBatch, LayerCall
from fa_serve.hf.surgery.fuse.parts import FusedProduct, activation_named, merge_products, product_of
from fa_serve.hf.surgery.proof import (
    AttentionRecorder,
    LayerInputs,
    NotReplacedError,
    check_untouched,
    float32_copy,
    kind_of,
    replace_forwards,
    results_agree,
)

log = logging.getLogger("fa_serve.hf")

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v (total, heads, head_dim) -> (total, heads, head_dim)"""


class EncoderParts(NamedTuple):
    """The parts of a layer, found by the names of its modules.

    qkv, o, up, down: projections; `up` of a gated unit has the rows of the gate, followed by the rows that are gated
    activation:       one of ops.ACTIVATIONS; in an MLP without a gate it may be another function
    gated:            whether the MLP is a gated unit
    before_attention, before_mlp: norms before the two parts
    after_attention, after_mlp:   norms of the sums that follow the two parts
    """

    qkv: FusedProduct
    o: FusedProduct
    up: FusedProduct
    down: FusedProduct
    activation: Callable[[Tensor], Tensor] | str
    gated: bool
    before_attention: ops.LayerNorm | None = None
    after_attention: ops.LayerNorm | None = None
    before_mlp: ops.LayerNorm | None = None
    after_mlp: ops.LayerNorm | None = None


@dataclass(frozen=True, slots=True)
class FusedEncoderLayer:
    """Replaces the `forward` of a layer of an encoder.

    original: the layer's own forward
    options:  the options of the layer's attention: arguments of `attention_varlen`
    rotates:  whether queries and keys have a rotary embedding that pairs the first half of a head with the second half
    """

    original: Callable[..., Any]
    parts: EncoderParts
    num_heads: int
    head_dim: int
    rotates: bool
    options: dict[str, Any]

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        cu_seqlens = kwargs.get("cu_seq_lens_q")
        if cu_seqlens is None or kwargs.get("fa_serve_batch") is not None or torch.is_grad_enabled():
            return self.original(hidden_states, *args, **kwargs)
        longest = kwargs["max_length_q"]
        options = self.options
        left, right = options["window_size"]
        if max(left, right) >= 0:  # kernels are faster without a window
            window = (-1 if left >= longest - 1 else left, -1 if right >= longest - 1 else right)
            options = options | {"window_size": window}
        attend = partial(
            api.attention_varlen,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            **options,
        )
        angles = kwargs.get("position_embeddings") if self.rotates else None
        return self.compute(hidden_states[0], angles, cast(Attend, attend))[None]

    def compute(self, x: Tensor, angles: tuple[Tensor, Tensor] | None, attend: Attend) -> Tensor:
        """The layer's output. x: (total, hidden); angles: cos and sin, (1, total, head_dim) each"""
        parts = self.parts
        h = x if parts.before_attention is None else ops.layer_norm(x, parts.before_attention)
        qkv = ops.linear(h, parts.qkv.weight, parts.qkv.bias)
        if angles is not None:
            self._rotate(qkv, *angles)
        q, k, v = qkv.view(len(x), 3, self.num_heads, self.head_dim).unbind(1)
        x, h = self._add(x, attend(q, k, v).flatten(1), parts.o, parts.after_attention, parts.before_mlp)
        h = ops.linear(h, parts.up.weight, parts.up.bias)
        return self._add(x, self._activate(h), parts.down, parts.after_mlp, None)[0]

    def _activate(self, h: Tensor) -> Tensor:
        activation = self.parts.activation
        if not isinstance(activation, str):
            return activation(h)
        return ops.act_and_mul(h, activation) if self.parts.gated else ops.act(h, activation)

    @staticmethod
    def _add(
        x: Tensor, h: Tensor, product: FusedProduct, after: ops.LayerNorm | None, before: ops.LayerNorm | None
    ) -> tuple[Tensor, Tensor]:
        """Project h and add it to x -> the new x, and the input of the next part."""
        if after is not None:
            x = ops.layer_norm(ops.linear(h, product.weight, product.bias), after, residual=x)
            return x, x if before is None else ops.layer_norm(x, before)
        if before is not None:
            return x, ops.layer_norm(ops.linear(h, product.weight, product.bias), before, residual=x, keep_sum=True)
        x = ops.linear(h, product.weight, product.bias, residual=x)
        return x, x

    def _rotate(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate queries and keys in place. All of them are queries to the kernel, which stores nothing then."""
        num_heads = 2 * self.num_heads
        nowhere = qkv.new_empty(1, 1, 0, self.head_dim)
        slots = torch.full((len(qkv),), -1, dtype=torch.int64, device=qkv.device)
        half = cos.shape[-1] // 2
        cos = cos[0, :, :half]
        sin = sin[0, :, :half]
        both = qkv[:, : num_heads * self.head_dim]
        ops.rotary_store_kv(both, nowhere, nowhere, slots, num_heads=num_heads, cos=cos, sin=sin)


@torch.no_grad()
def fuse_encoder(model: PreTrainedModel, forward: Callable[[AttendsBatch], object]) -> int:
    """Give layers of an encoder the forward of `FusedEncoderLayer` if that changes nothing. Returns how many layers got it.

    forward: computes a few packed sequences with the given batch, which computes the attention (`fa_serve_batch`)
    """
    found = [module for module in model.modules() if any(_is_built_by(find, module) for find in _FINDERS)]
    if not found:
        return 0
    recorder = AttentionRecorder()
    inputs: dict[nn.Module, LayerInputs] = {}

    def observe(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        others = {name: value for name, value in kwargs.items() if name not in ("hidden_states", "fa_serve_batch")}
        inputs[layer] = LayerInputs(hidden.clone(), args[1:], others)

    with ExitStack() as stack:
        for layer in found:
            stack.callback(layer.register_forward_pre_hook(observe, with_kwargs=True).remove)
        stack.enter_context(riding(recorder))
        forward(recorder)
    owners = {part: layer for layer in found for part in layer.modules()}
    calls = {owners[module]: call for module, call in recorder.calls.items() if module in owners}

    def prove(layer: nn.Module) -> Callable[[nn.Module], FusedEncoderLayer]:
        if layer not in calls or layer not in inputs:
            raise NotReplacedError("the layer computes no attention")
        rotates = _prove(layer, inputs[layer])
        return lambda other: build_encoder_layer(other, calls[other], rotates)

    def refuse(layer: nn.Module, reason: str) -> None:
        log.info("%s layers are not fused: %s", type(layer).__name__, reason)

    def kind(layer: nn.Module) -> str:
        return kind_of(layer, _options_of(calls[layer]) if layer in calls else None)

    fused = replace_forwards(found, prove, refuse, kind=kind)
    log.info("%d of %d layers of the encoder are fused", fused, len(found))
    return fused


def unfuse_encoder(model: nn.Module) -> None:
    """Give fused layers their own forward again."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), FusedEncoderLayer):
            del module.forward


def build_encoder_layer(layer: nn.Module, call: LayerCall, rotates: bool) -> FusedEncoderLayer:
    """Build the fused form of a layer, which merges its weights. call: the layer's call of attention

    Raises NotReplacedError for a layer that lacks a part.
    """
    if not call.query.shape == call.key.shape == call.value.shape:
        raise NotReplacedError("its queries, keys and values have different shapes")
    chosen = call.indices is not None or call.block_indices is not None
    if call.sinks is not None or call.position_bias is not None or chosen:
        raise NotReplacedError("its attention has sinks, a bias on the scores, or chosen keys")
    find = next(find for find in _FINDERS if _is_built_by(find, layer))
    _, num_heads, _, head_dim = call.query.shape
    own = partial(type(layer).forward, layer)
    parts = find(layer)
    if parts.qkv.weight.shape[0] != 3 * num_heads * head_dim:
        raise NotReplacedError("its projection of queries, keys and values has an unexpected number of rows")
    return FusedEncoderLayer(own, parts, num_heads, head_dim, rotates, _options_of(call))


def _prove(layer: nn.Module, inputs: LayerInputs) -> bool:
    """Compare a float32 copy of the layer with its fused form. Returns whether it rotates queries and keys."""
    check_untouched(layer)
    original = float32_copy(layer)
    wide = inputs.in_float32()
    recorder = AttentionRecorder()
    output = wide.run(original, recorder)
    if not isinstance(output, Tensor) or len(recorder.calls) != 1:
        raise NotReplacedError("it does not call attention exactly once, or it returns more than one tensor")
    [call] = recorder.calls.values()
    expected = [x[0].transpose(0, 1) for x in (call.query, call.key, call.value)]
    angles = wide.kwargs.get("position_embeddings")
    for rotates in (False, True) if isinstance(angles, tuple) else (False,):
        fused = build_encoder_layer(original, call, rotates)
        seen: list[Tensor] = []

        def attend(q: Tensor, k: Tensor, v: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.extend((q.clone(), k.clone(), v.clone()))
            return v

        actual = fused.compute(wide.hidden[0].clone(), angles if rotates else None, attend)
        pairs = zip([*seen, actual], [*expected, output[0]], strict=True)
        if all(results_agree(ours, theirs) for ours, theirs in pairs):
            return rotates
    raise NotReplacedError("its queries, keys, values or output would change")


def _options_of(call: LayerCall) -> dict[str, Any]:
    """The options of a layer's attention, without its tensors: arguments of `attention_varlen`."""
    return {
        "window_size": call.visible_window,
        "attention_chunk": call.visible_chunk,
        "softmax_scale": call.softmax_scale,
        "softcap": call.softcap,
    }


def _layer_norm_of(module: Any) -> ops.LayerNorm:
    if type(module) is not nn.LayerNorm or len(module.normalized_shape) != 1 or "forward" in vars(module):
        raise NotReplacedError(f"a norm must be a plain nn.LayerNorm, got {type(module).__name__}")
    return ops.LayerNorm(module.weight, module.bias, module.eps)


def _plain_activation(function: Callable[[Tensor], Tensor], device: torch.device) -> Callable[[Tensor], Tensor] | str:
    """The name of an activation that has a kernel, else the function itself."""
    try:
        return activation_named(function, device)
    except NotReplacedError:
        return function


def _bert_parts(layer: Any) -> EncoderParts:
    own = layer.attention.self
    end = layer.attention.output
    return EncoderParts(
        merge_products(own, "query", "key", "value"),
        product_of(end.dense),
        product_of(layer.intermediate.dense),
        product_of(layer.output.dense),
        _plain_activation(layer.intermediate.intermediate_act_fn, layer.output.dense.weight.device),
        gated=False,
        after_attention=_layer_norm_of(end.LayerNorm),
        after_mlp=_layer_norm_of(layer.output.LayerNorm),
    )


def _modernbert_parts(layer: Any) -> EncoderParts:
    first = layer.attn_norm
    return EncoderParts(
        product_of(layer.attn.Wqkv),
        product_of(layer.attn.Wo),
        product_of(layer.mlp.Wi),
        product_of(layer.mlp.Wo),
        activation_named(layer.mlp.act, layer.mlp.Wo.weight.device),
        gated=True,
        before_attention=None if isinstance(first, nn.Identity) else _layer_norm_of(first),
        before_mlp=_layer_norm_of(layer.mlp_norm),
    )


def _nomic_parts(layer: Any) -> EncoderParts:
    mlp = layer.mlp
    return EncoderParts(
        merge_products(layer.self_attn, "q_proj", "k_proj", "v_proj"),
        product_of(layer.self_attn.o_proj),
        merge_products(mlp, "gate_proj", "up_proj"),
        product_of(mlp.down_proj),
        activation_named(mlp.act_fn, mlp.down_proj.weight.device),
        gated=True,
        after_attention=_layer_norm_of(layer.post_attention_layernorm),
        after_mlp=_layer_norm_of(layer.post_mlp_layernorm),
    )


_NAMES: dict[Callable[[Any], EncoderParts], tuple[str, ...]] = {
    _bert_parts: ("attention.self.query", "attention.output.LayerNorm", "intermediate.dense", "output.LayerNorm"),
    _modernbert_parts: ("attn.Wqkv", "attn.Wo", "attn_norm", "mlp_norm", "mlp.Wi", "mlp.act"),
    _nomic_parts: ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.act_fn", "post_mlp_layernorm"),
}
"""The functions that find the parts of a layer, and the names of modules by which each recognises its layers."""
_FINDERS = tuple(_NAMES)


def _is_built_by(find: Callable[[Any], EncoderParts], layer: nn.Module) -> bool:
    for name in _NAMES[find]:
        place: Any = layer
        for part in name.split("."):
            place = getattr(place, part, None)
        if not isinstance(place, nn.Module):
            return False
    return True
