"""Steps of few tokens whose fused layers are computed by one persistent kernel (ops/decode_step).

    stack_layers(model, layers)      # after the layers have been fused; those that stay as they are, the log names

The kernel computes layers of the Llama kind in 16 bits: norms before both parts, plain causal attention, a gated unit, and no
biases but those of q, k and v. The call of the first layer computes all layers, and the calls of the others return what they
are given. Three things are proven before:

- the model hands what a layer returns to the next one as it is, and all layers the same rotary embedding;
- a float32 copy of a layer has the same output and the same cache by the kernel as by `FusedLayer`, which is proven against the
  layer's own code (fusion.py), for one token, several sequences and several queries of a sequence;
- all layers differ in nothing but the values of their weights.

A step with adapters, a chosen backend, a float8 cache, shared prefixes, images or other attention is computed layer by layer.
So is one whose hidden states are read between layers, or in which a sequence reads pages that another one fills: in the kernel
nothing orders these accesses. What the engine knows of this is `PagedBatch.by_layers`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fa_serve import spec
from fa_serve.hf.adapter.paged import PagedBatch
from fa_serve.hf.surgery.fuse.layer import FusedLayer, HeadsAttention, LayerStep, tables_of
from fa_serve.hf.surgery.fuse.parts import FusedProduct
from fa_serve.hf.surgery.proof import AttentionRecorder, LayerInputs, NotReplacedError, observe_inputs, results_agree
from fa_serve.ops import Norm
from fa_serve.ops.decode_step.layout import MOST_STEP_TOKENS
from fa_serve.ops.decode_step.stacked import StackLayer, StackOptions, StackStep, UnsupportedStackError

if TYPE_CHECKING:
    from fa_serve.ops.decode_step.run import DecodeStack

log = logging.getLogger("fa_serve.hf")

STACKS_LAYERS = False
"""The switch: whether steps of few tokens take the persistent kernel. It is off because no GPU has run it yet; see
tests/gpu/test_decode_step_gpu.py and benchmarks/tuning/tune_decode_step.py."""
LEAST_ARCH = 90
"""The kernel is compiled for Hopper and newer GPUs."""
_PROOFS = (((1,), (21,)), ((1, 1, 1), (1, 40, 17)), ((2, 3), (19, 3)))
"""Queries and keys of each sequence in the steps of the proof."""
_PROOF_PAGE = 16


@dataclass(slots=True)
class LayerStack:
    """All layers of a model, in their order, and what computes them.

    computed: the id of the batch that the kernel has computed last; 0 if the layers compute the step themselves
    said:     why steps did not take the kernel, each reason once
    """

    layers: tuple[FusedLayer, ...]
    kernel: DecodeStack
    computed: int = 0
    said: set[str] = field(default_factory=set)

    def compute(self, layer: FusedLayer, x: Tensor, batch: PagedBatch, step: LayerStep) -> Tensor | None:
        """See `ComputesStack`. The call of the first layer decides for the whole step."""
        if layer.index != self.layers[0].index:
            return x if self.computed == id(batch) else None
        self.computed = 0
        if len(x) > MOST_STEP_TOKENS:
            return None
        whole = StackStep(
            step.cos,
            step.sin,
            [batch.kv_caches[cast(int, each.index)] for each in self.layers],
            batch.slot_mapping,
            batch.block_table,
            batch.seqused_k,
            batch.cu_seqlens_q,
            batch.max_seqlen_q,
        )
        reason = self._refusal(layer, batch) or self.kernel.refusal(whole)
        if reason is not None:
            if reason not in self.said:
                self.said.add(reason)
                log.info("a step of few tokens is computed layer by layer: %s", reason)
            return None
        out = self.kernel.compute(x, whole)
        self.computed = id(batch)
        return out

    def _refusal(self, layer: FusedLayer, batch: PagedBatch) -> str | None:
        """What a step asks for that the kernel does not compute, or None."""
        if batch.by_layers:
            return "it has images, or a sequence reads pages that another one fills"
        if batch.backend != "auto":
            return f"the backend {batch.backend} has been chosen"
        if batch.num_splits:
            return "its sums have a fixed order"
        if batch.blocks or batch.common is not None:
            return "tokens attend both ways, or sequences share pages that are read once"
        if batch.descales is not None:
            return "the cache is float8"
        if any(each.module._forward_hooks or each.module._forward_pre_hooks for each in self.layers):
            return "hidden states are read between layers"
        # products of a model share the step that says which token has an adapter
        site = cast(FusedProduct, layer.gate_up).site
        return None if site is None or site.batch is None else "tokens have adapters"


def stack_of(model: PreTrainedModel) -> LayerStack | None:
    """What may compute all layers of this model at once, or None."""
    forwards = (vars(module).get("forward") for module in model.modules())
    stacks = (each.stack for each in forwards if isinstance(each, FusedLayer))
    return next((each for each in stacks if isinstance(each, LayerStack)), None)


@torch.no_grad()
def stack_layers(model: PreTrainedModel, modules: Sequence[nn.Module]) -> bool:
    """Give fused layers a stack, where that changes nothing. Returns whether it has.

    modules: the decoder layers whose forward is a FusedLayer
    """
    if not STACKS_LAYERS or not modules or not _runs_on(model.device):
        return False
    try:
        ordered, kernel = _proven(model, modules)
    except (NotReplacedError, UnsupportedStackError) as error:
        log.info("layers are not computed by one kernel: %s", error)
        return False
    except Exception as error:  # a launch that the driver refuses, or a kernel that does not compile
        log.warning("layers are not computed by one kernel, because its proof failed: %s", error)
        return False
    fused = [cast(FusedLayer, module.forward) for module in ordered]
    stack = LayerStack(tuple(fused), kernel)
    for module, layer in zip(ordered, fused, strict=True):
        module.forward = replace(layer, stack=stack)
    log.info("steps of up to %d tokens compute %d layers in one kernel", MOST_STEP_TOKENS, len(fused))
    return True


def _runs_on(device: torch.device) -> bool:
    """Whether the kernel runs there: on an NVIDIA GPU for which it has been compiled, or in Triton's interpreter."""
    try:
        from fa_serve.ops.decode_step.run import is_interpreted
    except ImportError:  # Triton is not installed
        return False
    return spec.arch_of(device) >= LEAST_ARCH or (device.type == "cpu" and is_interpreted())


def _proven(model: PreTrainedModel, modules: Sequence[nn.Module]) -> tuple[list[nn.Module], DecodeStack]:
    """The layers in their order, and the kernel that has been proven to compute them. Raises as `stack_layers` catches."""
    from fa_serve.ops.decode_step.run import DecodeStack  # it imports Triton, which may not be installed

    inputs = observe_inputs(model, modules, AttentionRecorder(), computing=False)
    ordered = _in_order(modules, inputs)
    fused = [cast(FusedLayer, module.forward) for module in ordered]
    if len(fused) != model.config.get_text_config().num_hidden_layers:
        raise NotReplacedError("some of its layers are not fused")
    cos, sin = (table[0].float() for table in tables_of(inputs[ordered[0]].kwargs["position_embeddings"]))
    options = _options_of(fused[0], cos.shape[1])
    if any(_options_of(layer, cos.shape[1]) != options for layer in fused):
        raise NotReplacedError("its layers differ in what they ask of attention")
    wide = _in_float32(fused[0])
    _prove_layer(wide, DecodeStack([_weights_of(wide)], options), cos, sin)
    return ordered, DecodeStack([_weights_of(layer) for layer in fused], options)


def _in_order(modules: Sequence[nn.Module], inputs: dict[nn.Module, LayerInputs]) -> list[nn.Module]:
    """The layers in the order of their calls.

    Raises NotReplacedError unless each is given what the one before returned, which here is what that one was given.
    """
    ordered = list(inputs)
    if len(ordered) != len(modules):
        raise NotReplacedError("some of its layers are not called")
    first = inputs[ordered[0]]
    tables = first.kwargs.get("position_embeddings")
    if tables is None:
        raise NotReplacedError("its layers are called without position_embeddings")
    for layer in ordered[1:]:
        given = inputs[layer]
        if not torch.equal(given.hidden, first.hidden):
            raise NotReplacedError("it changes what a layer returns before the next one")
        others = given.kwargs.get("position_embeddings")
        if others is None or not all(torch.equal(a, b) for a, b in zip(tables_of(tables), tables_of(others), strict=True)):
            raise NotReplacedError("its layers have different rotary embeddings")
    return ordered


def _options_of(layer: FusedLayer, table_width: int) -> StackOptions:
    """What a layer does beside its products. table_width: columns of cos. Raises NotReplacedError for what no kernel does."""
    attention = layer.attention
    if not isinstance(attention, HeadsAttention) or attention.gated:
        raise NotReplacedError("its attention has latent keys, states or gates")
    asked = layer.options
    if asked["left"] >= 0 or asked["attention_chunk"] or asked["softcap"] or asked["sinks"] is not None:
        raise NotReplacedError("its attention has windows, chunks, a softcap or sinks")
    rotary_dim = 0 if attention.tables is None else table_width * (1 if attention.tables == "twice" else 2)
    return StackOptions(
        attention.num_heads,
        attention.head_dim,
        rotary_dim,
        layer.activation,
        layer.multiplier,
        asked["softmax_scale"] or attention.head_dim**-0.5,
    )


def _weights_of(layer: FusedLayer) -> StackLayer:
    attention = layer.attention
    assert isinstance(attention, HeadsAttention)
    if layer.before_attention is None or layer.before_mlp is None or layer.after_attention or layer.after_mlp:
        raise NotReplacedError("its norms do not stand before both parts alone")
    qkv = _matrix(attention.qkv)
    o, gate_up, down = (_matrix(product) for product in (layer.o, layer.gate_up, layer.down))
    if any(cast(FusedProduct, product).bias is not None for product in (layer.o, layer.gate_up, layer.down)):
        raise NotReplacedError("a projection other than that of q, k and v has a bias")
    return StackLayer(
        qkv,
        attention.qkv.bias,
        o,
        gate_up,
        down,
        layer.before_attention,
        layer.before_mlp,
        attention.q_norm,
        attention.k_norm,
    )


def _matrix(product: FusedProduct | None) -> Tensor:
    if product is None or not isinstance(product.weight, Tensor) or product.all_reduce is not None:
        raise NotReplacedError("a projection is missing, quantised or divided between ranks")
    return product.weight.detach()


def _prove_layer(wide: FusedLayer, kernel: DecodeStack, cos: Tensor, sin: Tensor) -> None:
    """Compare a layer by the kernel with the same layer by its own products and attention. wide: a float32 copy of a layer"""
    for number, (q_lens, kv_lens) in enumerate(_PROOFS):
        generator = torch.Generator().manual_seed(number)
        batches = [_proof_batch(wide, q_lens, kv_lens, generator.manual_seed(number)) for _ in range(2)]
        total = sum(q_lens)
        x = torch.randn(total, kernel.shape.hidden, generator=generator).to(cos.device)
        index = cast(int, wide.index)
        steps = [wide.step(batch, index, cos[:total], sin[:total]) for batch in batches]
        expected = wide.compute(x.clone(), steps[0])
        actual = LayerStack((wide,), kernel).compute(wide, x.clone(), batches[1], steps[1])
        caches = zip(batches[1].kv_caches[index], batches[0].kv_caches[index], strict=True)
        if actual is None or not results_agree(actual, expected):
            raise NotReplacedError("its output would change")
        if not all(results_agree(*pair) for pair in caches):
            raise NotReplacedError("its cached keys or values would change")


def _in_float32(layer: FusedLayer) -> FusedLayer:
    """A copy of a layer whose weights are float32."""

    def product(given: FusedProduct | None) -> FusedProduct | None:
        if given is None:
            return None
        return FusedProduct(_matrix(given).float(), None if given.bias is None else given.bias.float())

    def norm(given: Norm | None) -> Norm | None:
        return None if given is None else given._replace(weight=given.weight.float())

    attention = layer.attention
    assert isinstance(attention, HeadsAttention)
    qkv = product(attention.qkv)
    assert qkv is not None
    heads = replace(attention, qkv=qkv, q_norm=norm(attention.q_norm), k_norm=norm(attention.k_norm))
    return replace(
        layer,
        attention=heads,
        o=product(layer.o),
        gate_up=product(layer.gate_up),
        down=product(layer.down),
        before_attention=norm(layer.before_attention),
        before_mlp=norm(layer.before_mlp),
    )


def _proof_batch(layer: FusedLayer, q_lens: Sequence[int], kv_lens: Sequence[int], generator: torch.Generator) -> PagedBatch:
    """A step of these sequences with float32 caches of random numbers, equal for equal generators."""
    attention = layer.attention
    assert isinstance(attention, HeadsAttention)
    device = cast(Tensor, attention.qkv.weight).device
    pages = -(-max(kv_lens) // _PROOF_PAGE)
    table = torch.randperm(pages * len(q_lens), generator=generator).to(torch.int32).view(len(q_lens), pages)
    shape = (table.numel(), _PROOF_PAGE, attention.num_kv_heads, attention.head_dim)
    caches = [torch.randn(shape, generator=generator).to(device) for _ in range(2)]
    slots = [
        int(table[row, place // _PROOF_PAGE]) * _PROOF_PAGE + place % _PROOF_PAGE
        for row, (queries, keys) in enumerate(zip(q_lens, kv_lens, strict=True))
        for place in range(keys - queries, keys)
    ]
    ends = torch.tensor([0, *q_lens], dtype=torch.int32).cumsum(0).to(torch.int32)
    return PagedBatch(
        kv_caches={cast(int, layer.index): (caches[0], caches[1])},
        slot_mapping=torch.tensor(slots, device=device),
        block_table=table.to(device),
        seqused_k=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        cu_seqlens_q=ends.to(device),
        max_seqlen_q=max(q_lens),
        max_seqlen_k=max(kv_lens),
    )
