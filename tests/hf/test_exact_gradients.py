"""The backward pass of an exact forward: the gradients of the plain model, no product twice, and no more is kept than there."""

from __future__ import annotations

from dataclasses import replace
from functools import partial, wraps
from typing import Any

import pytest
import torch
from padded_rollouts import Batch
from sampled_cases import each_nth
from tiny_models import SIZES as MODEL_SIZES
from tiny_models import make_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Olmo2Config
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

import fa_serve
from fa_serve.hf import exact_forward
from fa_serve.hf.exact_forward import _Rows
from fa_serve.hf.exact_gradients import (
    TrainedCall,
    empty_lse,
    heads_with_gradients,
    parameters_computed_again,
)
from fa_serve.hf.live_model import parameters_in
from fa_serve.hf.surgery.fuse.layer import FusedLayer, HeadsAttention, LayerStep
from fa_serve.hf.surgery.fuse.parts import FusedProduct
from fa_serve.ops.deterministic import DeterministicMode
from fa_serve.spec import UnsupportedError, UnsupportedModelError

FAMILIES = ["llama", "qwen3", "qwen3-moe", "qwen2-moe", "gemma3", "olmo2"]
IDS = torch.arange(5, 29).view(2, 12)


def make(family: str) -> Any:
    """olmo2 has norms of all queries and of all keys together."""
    if family != "olmo2":
        return make_model(family)
    torch.manual_seed(0)
    sizes = {name: value for name, value in MODEL_SIZES.items() if name != "head_dim"}
    config = Olmo2Config(**sizes | {"num_key_value_heads": 4})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


def loss(model: nn.Module) -> Tensor:
    logits = model(input_ids=IDS, use_cache=False).logits
    return -fa_serve.token_logprobs(logits[:, :-1], IDS[:, 1:]).sum()


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def flops_of_products(model: nn.Module) -> int:
    """The operations of a forward of IDS, without attention: each token by each matrix, and by those of its experts."""
    config = model.config
    total = 0
    for name, parameter in model.named_parameters():
        if parameter.dim() == 3:
            total += parameter.numel() // config.num_experts * config.num_experts_per_tok
        elif parameter.dim() == 2 and "embed" not in name:
            total += parameter.numel()
    return 2 * IDS.numel() * total


class Products(TorchDispatchMode):
    """Counts the operations of matrix products. Those of attention have a dimension of heads, and are none of these."""

    flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            x, y = args[-2:]
            self.flops += 2 * x.shape[0] * x.shape[1] * y.shape[1]
        return func(*args, **(kwargs or {}))


def backward_flops(total: Tensor) -> int:
    with Products() as counter:
        total.backward()
    return counter.flops


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_in_float64_are_those_of_the_plain_model_and_need_no_product_again(family: str) -> None:
    """Each product has two in the backward pass."""
    model = make(family).double()
    loss(model).backward()
    expected = trained(model)
    model.zero_grad()
    context = fa_serve.exact(model, page_size=4)
    with context:
        assert all(isinstance(layer.forward, FusedLayer) for layer in model.model.layers)
        assert not any(parameters_computed_again(layer.forward) for layer in model.model.layers)
        total = loss(model)
    assert backward_flops(total) == 2 * flops_of_products(model)
    found = trained(model)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        # norms of transformers and log-probabilities are computed in float32
        assert (found[name] - gradient).norm() < 1e-5 * gradient.norm(), name


def test_a_layer_that_is_computed_again_has_a_third_product(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("qwen3-moe")
    monkeypatch.setattr(exact_forward, "parameters_computed_again", lambda layer: parameters_in(layer.module))
    with fa_serve.exact(model, page_size=4):
        planted = loss(model)
    assert backward_flops(planted) > 2.5 * flops_of_products(model)


def test_frozen_parameters_have_no_gradient_and_cost_none() -> None:
    """Of each layer, one part of a merged projection and a norm are trained."""
    model = make("qwen3")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("k_proj" in name or "q_norm" in name)
    context = fa_serve.exact(model, page_size=4)
    with context:
        total = loss(model)
    flops = backward_flops(total)
    found = trained(model)
    assert len(found) == 4
    tokens = 2 * IDS.numel()
    first, second = model.model.layers
    passed = sum(x.numel() for x in parameters_in(second) if x.dim() == 2)
    # the first layer passes gradients on from its output to the product of q, k and v, which has none for its input
    passed += sum(
        module.weight.numel() for module in (first.self_attn.o_proj, *first.mlp.children()) if hasattr(module, "weight")
    )
    keys = 2 * first.self_attn.k_proj.weight.numel()
    assert flops == tokens * (passed + keys + model.lm_head.weight.numel())
    model.zero_grad()
    loss(model).backward()
    for name, gradient in trained(model).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-4)


def kept_bytes(model: nn.Module) -> int:
    """What a forward keeps for its backward pass, beside parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, tuple[int, Tensor]] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        total = loss(model)
    assert total.requires_grad
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_no_more_is_kept_than_by_a_plain_forward(family: str) -> None:
    model = make(family).to(torch.bfloat16)
    plain = kept_bytes(model)
    with fa_serve.exact(model, page_size=4):
        assert kept_bytes(model) < 0.8 * plain


def test_a_layer_with_a_parameter_of_no_operator_is_computed_again() -> None:
    """Here one that its own code does not read either. Bits and gradients are the same."""
    model = make("qwen3")
    batch = Batch(model)
    with fa_serve.exact(model, page_size=4):
        loss(model).backward()
    expected = trained(model)
    model.zero_grad()
    model.model.layers[0].self_attn.unknown = nn.Parameter(torch.zeros(3))
    context = fa_serve.exact(model, page_size=4)
    with context:
        first, second = (layer.forward for layer in model.model.layers)
        assert parameters_computed_again(first)
        assert not parameters_computed_again(second)
        assert torch.equal(batch.compute(model), batch.logprobs)
        total = loss(model)
    total.backward()
    for name, gradient in expected.items():
        torch.testing.assert_close(dict(model.named_parameters())[name].grad, gradient, rtol=1e-3, atol=1e-4)


def set_place(monkeypatch: pytest.MonkeyPatch, model: nn.Module, place: str) -> None:
    """Let the model's layers checkpoint themselves in this method: in transformers 5.17 it is `__call__`, in 5.24 `forward`."""
    if place == "call" or "__call__" not in vars(GradientCheckpointingLayer):
        return
    kind: Any = type(model.model.layers[0])
    own = kind.forward

    @wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled() and type(self).forward is forward:
            return self._gradient_checkpointing_func(partial(own, self, **kwargs), *args)
        return own(self, *args, **kwargs)

    monkeypatch.delattr(GradientCheckpointingLayer, "__call__")
    monkeypatch.setattr(kind, "forward", forward)


def checkpoint_layers(model: Any, reentrant: bool) -> None:
    """Switch gradient checkpointing on, which has another name in newer releases."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()


PLACES = pytest.mark.parametrize(
    "place", ["call", "forward"] if "__call__" in vars(GradientCheckpointingLayer) else ["forward"]
)
"""The place of this release, and that of newer releases."""
KINDS = pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])


@KINDS
@PLACES
@pytest.mark.parametrize("family", each_nth(2, ["qwen3-moe", "qwen3", "gemma3"]))
def test_a_checkpoint_changes_no_bit_of_a_gradient(
    family: str, place: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes a layer again within the backward pass, where the mode must replace what is forward and nothing else."""
    model = make(family).train()
    set_place(monkeypatch, model, place)
    batch = Batch(model)
    context = fa_serve.exact(model, page_size=4)
    with context:
        batch.compute(model).sum().backward()
    expected = trained(model)
    model.zero_grad()
    checkpoint_layers(model, reentrant)
    with context:
        batch.compute(model).sum().backward()
    found = trained(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


@KINDS
@PLACES
@pytest.mark.parametrize("fusion", [False, True], ids=["own", "fused"])
def test_a_checkpoint_is_not_computed_again_outside_of_the_context(
    fusion: bool, place: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make("llama").train()
    set_place(monkeypatch, model, place)
    checkpoint_layers(model, reentrant)
    own = [layer._gradient_checkpointing_func for layer in model.model.layers]
    with fa_serve.exact(model, page_size=4, fusion=fusion):
        total = loss(model)
    with pytest.raises(UnsupportedModelError, match=r"call backward\(\) inside of the context"):
        total.backward()
    assert [layer._gradient_checkpointing_func for layer in model.model.layers] == own
    with fa_serve.exact(model, page_size=4, fusion=fusion):
        total = loss(model)
    with fa_serve.exact(model, page_size=4, fusion=fusion):
        total.backward()
    loss(model).backward()


@KINDS
@PLACES
@pytest.mark.parametrize("known", [True, False], ids=["recorded", "again"])
def test_each_fused_layer_is_checkpointed_once(
    known: bool, place: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a layer whose own code computes it in the backward pass, because it has a parameter that no operator takes."""
    model = make("qwen3").train()
    set_place(monkeypatch, model, place)
    if not known:
        for layer in model.model.layers:
            layer.self_attn.unknown = nn.Parameter(torch.zeros(3))
    context = fa_serve.exact(model, page_size=4)
    with context:
        kept = kept_bytes(model)
        loss(model).backward()
    expected = trained(model)
    model.zero_grad()
    checkpoint_layers(model, reentrant)
    calls: list[nn.Module] = []

    def count(layer: nn.Module, checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(layer)
        return checkpoint(*args, **kwargs)

    for layer in model.model.layers:
        layer._gradient_checkpointing_func = partial(count, layer, layer._gradient_checkpointing_func)
    with context:
        loss(model).backward()
    assert calls == list(model.model.layers)
    found = trained(model)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    with context:
        # a layer that is computed again by its own code keeps its input alone also without a checkpoint
        assert kept_bytes(model) < (0.9 * kept if known else 1.1 * kept)


def test_a_graph_may_be_kept_and_second_derivatives_are_refused() -> None:
    model = make("llama")
    with fa_serve.exact(model, page_size=4):
        total = loss(model)
    total.backward(retain_graph=True)
    first = trained(model)
    total.backward(retain_graph=True)
    for name, gradient in trained(model).items():
        torch.testing.assert_close(gradient, 2 * first[name])
    with pytest.raises(UnsupportedError, match="create_graph=True, or compute second derivatives with the plain model"):
        torch.autograd.grad(total, [model.model.embed_tokens.weight], create_graph=True)


@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
def test_gates_behind_queries_have_the_gradients_of_gates(norms: bool) -> None:
    num_heads = 4
    num_kv_heads = 2
    dim = 16
    draw = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_()

    x = numbers(7, 12)
    weight = numbers((2 * num_heads + 2 * num_kv_heads) * dim, 12)
    weights = [numbers(dim), numbers(dim)]
    both = [fa_serve.ops.Norm(each, 1e-6) if norms else None for each in weights]
    attention = HeadsAttention(num_heads, dim, *both, FusedProduct(weight, None), None, gated=True)
    batch = _Rows.of(torch.zeros(1, 7, dtype=torch.int64), None, torch.tensor([[0, 1, 2, 0, 1, 2, 3]])).paged(4)
    options = {"left": -1, "attention_chunk": 0, "softmax_scale": None, "softcap": 0.0, "sinks": None}
    caches = [torch.zeros(2, 4, num_kv_heads, dim, dtype=torch.float64) for _ in "kv"]
    lse = empty_lse(x, num_heads)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return replace(batch, kv_caches={0: (caches[0], caches[1])}, lse=lse).attention(0, q, k, v, **options)

    call = TrainedCall(batch, options, False)

    def record(attention: HeadsAttention, qkv: Tensor, step: LayerStep) -> Tensor:
        return heads_with_gradients(attention, qkv, step, call, lse)

    step = LayerStep(x, x, caches[0], caches[1], batch.slot_mapping, attend, False, {}, record)
    tensors = [x, weight, *(weights if norms else [])]
    with DeterministicMode():
        out = attention.compute(x, None, step)
    rows = (x @ weight.t()).view(7, -1, dim)
    q = rows[:, 0 : 2 * num_heads : 2]
    gate = rows[:, 1 : 2 * num_heads : 2]
    k, v = rows[:, 2 * num_heads :].chunk(2, dim=1)
    if norms:
        q, k = (torch.nn.functional.rms_norm(each, (dim,), own, 1e-6) for each, own in zip((q, k), weights, strict=True))
    k, v = (each.repeat_interleave(2, 1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
    sequence = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    seen = (sequence == sequence[:, None]) & torch.ones(7, 7, dtype=torch.bool).tril()
    expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v) * gate.sigmoid()
    torch.testing.assert_close(out, expected.flatten(1))
    dy = torch.linspace(-1.0, 1.0, out.numel(), dtype=out.dtype).view_as(out)
    found = torch.autograd.grad(out, tensors, dy)
    torch.testing.assert_close(found, torch.autograd.grad(expected.flatten(1), tensors, dy))
