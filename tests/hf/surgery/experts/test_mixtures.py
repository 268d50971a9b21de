"""Experts computed by fa_serve: as the models' own code computes them, or refused with a reason."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_families import BY_NAME, Family, assert_same, tokens
from moe_families import MIXTURES
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from fa_serve import ops
from fa_serve.hf.surgery.experts import mixtures as experts
from fa_serve.hf.surgery.experts.mixtures import expert_modules, experts_forward, take_experts
from fa_serve.spec import UnsupportedModelError

by_mixture = pytest.mark.parametrize("family", MIXTURES, ids=lambda family: family.name)


def switched(family: Family) -> PreTrainedModel:
    model = family.build()
    model.set_experts_implementation("fa_serve")
    return model


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each call of our operator."""
    found: list[int] = []
    call = experts.call_operator
    monkeypatch.setattr(experts, "call_operator", lambda x, *rest: found.append(len(x)) or call(x, *rest))
    return found


@by_mixture
@torch.no_grad()
def test_a_forward_and_generate_are_those_of_the_model(family: Family, calls: list[int]) -> None:
    eager = family.build()
    ours = switched(family)
    ids = tokens(2, 12)
    assert_same(ours(ids).logits, eager(ids).logits)
    assert calls == [24] * len(expert_modules(ours))
    options = {"do_sample": False, "min_new_tokens": 6, "max_new_tokens": 6}
    assert torch.equal(ours.generate(ids, **options), eager.generate(ids, **options))
    assert calls[-1] == 2, "every token of generate is computed by our experts"


@by_mixture
@torch.no_grad()
def test_experts_are_taken_where_that_changes_nothing(family: Family, calls: list[int]) -> None:
    eager = family.build()
    ours = family.build()
    assert take_experts(ours) == len(expert_modules(ours)) > 0
    ids = tokens(2, 12)
    assert_same(ours(ids).logits, eager(ids).logits)
    assert calls == [24] * len(expert_modules(ours))


def test_a_model_without_experts_has_none_to_take() -> None:
    assert take_experts(BY_NAME["llama"].build()) == 0


def test_a_module_that_computes_something_else_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward = Qwen3MoeExperts.forward

    def other(self: Any, *args: Any) -> Tensor:
        return 1.01 * forward.__wrapped__(self, *args)

    other.__wrapped__ = other
    monkeypatch.setattr(Qwen3MoeExperts, "forward", other)
    model = BY_NAME["qwen3-moe"].build()
    assert take_experts(model) == 0
    assert model.config._experts_implementation == "eager"
    assert (
        "experts are computed by transformers (eager), not by fa_serve: the output of Qwen3MoeExperts would change"
        in caplog.text
    )


def test_a_single_token_is_proven_too(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = ops.experts
    monkeypatch.setattr(ops, "experts", lambda x, *rest: compute(x, *rest) * (1.01 if len(x) == 1 else 1.0))
    assert take_experts(BY_NAME["mixtral"].build()) == 0


def test_each_kind_of_module_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers differ in one of their settings."""
    proven: list[Any] = []
    agree = experts.experts_agree
    monkeypatch.setattr(experts, "experts_agree", lambda module: proven.append(module) or agree(module))
    model = BY_NAME["gpt-oss"].build()
    first, second = expert_modules(model)
    take_experts(model)
    assert proven == [first]
    second.limit = 3.0
    proven.clear()
    take_experts(model)
    assert set(proven) == {first, second}
    assert [experts.gate_of(m).limit for m in (first, second)] == [7.0, 3.0]


def test_pytorch_takes_no_experts_of_another_device(caplog: pytest.LogCaptureFixture) -> None:
    """It reads back which experts are met, which a CUDA graph cannot."""
    model = BY_NAME["mixtral"].build().to("meta")
    assert ops.select_ops(torch.device("meta")).name == "torch"
    assert take_experts(model) == 0
    assert caplog.text == "", "nothing was tried"


# gates


def interleaved(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    return gate_up[..., ::2], gate_up[..., 1::2]


def concatenated(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    return gate_up.chunk(2, dim=-1)


def read_gate(apply: Callable[[Tensor, Tensor], Tensor], *, is_concatenated: bool) -> ops.Gate:
    module: Any = copy.copy(expert_modules(BY_NAME["gpt-oss"].build())[0])
    module.is_concatenated = is_concatenated
    split = concatenated if is_concatenated else interleaved
    module._apply_gate = lambda gate_up: apply(*split(gate_up))
    return experts._read_gate(module)


silu = torch.nn.functional.silu
GATES = {
    "silu": (lambda g, u: silu(g) * u, ops.Gate("silu")),
    "gelu": (lambda g, u: torch.nn.functional.gelu(g) * u, ops.Gate("gelu")),
    "gelu-tanh": (lambda g, u: torch.nn.functional.gelu(g, approximate="tanh") * u, ops.Gate("gelu_tanh")),
    "clamped": (lambda g, u: silu(g.clamp(max=10)) * u.clamp(-10, 10), ops.Gate("silu", limit=10.0)),
    "slope": (lambda g, u: g * torch.sigmoid(0.5 * g) * (u + 0.25), ops.Gate("silu", slope=0.5, offset=0.25)),
}
OTHERS = {
    "relu": lambda g, u: torch.relu(g) * u,
    "tanh": lambda g, u: torch.tanh(g) * u,
    "quick-gelu-of-up": lambda g, u: silu(u) * g,
    "clamped-after": lambda g, u: silu(g).clamp(max=5) * u.clamp(-5, 5),
    "clamped-below-too": lambda g, u: silu(g.clamp(-7, 7)) * u.clamp(-7, 7),
    "limits-differ": lambda g, u: silu(g.clamp(max=7)) * u.clamp(-6, 6),
    "zero": lambda g, u: 0.0 * g * u,
    "not-finite": lambda g, u: g / 0.0 * u,
}


@pytest.mark.parametrize("is_concatenated", [True, False], ids=["concatenated", "interleaved"])
@pytest.mark.parametrize(("apply", "expected"), GATES.values(), ids=GATES)
def test_a_gate_is_read_from_its_values(apply: Any, expected: ops.Gate, is_concatenated: bool) -> None:
    assert read_gate(apply, is_concatenated=is_concatenated) == expected._replace(interleaved=not is_concatenated)


@pytest.mark.parametrize("apply", OTHERS.values(), ids=OTHERS)
def test_other_gates_are_refused(apply: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="GptOssExperts gates its experts in a way that fa_serve does not compute"):
        read_gate(apply, is_concatenated=True)


def test_the_gate_of_gpt_oss() -> None:
    expected = ops.Gate("silu", interleaved=True, slope=1.702, limit=7.0, offset=1.0)
    assert {experts.gate_of(m) for m in expert_modules(BY_NAME["gpt-oss"].build())} == {expected}
    assert GptOssExperts.forward.__wrapped__, "transformers' decorator keeps the module's own code"
    assert math.isinf(experts.gate_of(expert_modules(BY_NAME["mixtral"].build())[0]).limit)


# what is refused, and what others compute


def test_experts_without_a_gate_are_refused() -> None:
    config = NemotronHConfig(n_routed_experts=2, hidden_size=8, moe_intermediate_size=8, moe_latent_size=None)
    module = NemotronHExperts(config)
    with pytest.raises(UnsupportedModelError, match="NemotronHExperts has experts without a gate"):
        experts_forward(module, torch.ones(1, 8), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))


def test_weights_that_are_not_floats_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    model = BY_NAME["mixtral"].build()
    module = expert_modules(model)[0]
    module.down_proj = torch.nn.Parameter(module.down_proj.to(torch.float8_e4m3fn), requires_grad=False)
    assert take_experts(model) == 0
    assert "must be floats of 3 dimensions, got torch.float8_e4m3fn" in caplog.text


def test_gradients_are_those_of_the_model(calls: list[int]) -> None:
    ids = tokens(2, 7)
    found = []
    for model in (BY_NAME["qwen3-moe"].build(), switched(BY_NAME["qwen3-moe"])):
        model(ids, labels=ids).loss.backward()
        found.append(expert_modules(model)[0].gate_up_proj.grad)
    assert_same(found[1], found[0])
    assert calls == [], "grouped_mm computes what is differentiated"


def test_experts_of_another_process_add_nothing() -> None:
    """Expert parallelism in transformers gives them the number num_experts."""
    module = expert_modules(BY_NAME["mixtral"].build())[0]
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    index = torch.tensor([[0, 1], [2, 4], [4, 4]])
    scores = torch.rand(3, 2, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        y = experts_forward(module, x, index, scores)
        expected = experts_forward(module, x, torch.tensor([[0, 1], [2, 0], [0, 0]]), scores * (index < 4))
    assert_same(y, expected)
    assert not y[2].any()


def test_the_dtype_is_that_of_the_hidden_states() -> None:
    """Under autocast hidden states may be float32 where the weights are bfloat16."""
    module = expert_modules(BY_NAME["mixtral"].build().bfloat16())[0]
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    index = torch.tensor([[0, 1], [2, 3], [1, 3]])
    with torch.no_grad():
        y = experts_forward(module, x, index, torch.ones(3, 2))
        assert y.dtype == torch.float32
        assert torch.equal(y, experts_forward(module, x.bfloat16(), index, torch.ones(3, 2)).float())


# graphs


@pytest.mark.slow
@torch.no_grad()
def test_experts_are_one_node_of_a_graph() -> None:
    one_layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    eager = BY_NAME["gpt-oss"].build(**one_layer)
    ours = BY_NAME["gpt-oss"].build(**one_layer)
    ours.set_experts_implementation("fa_serve")
    nodes: list[str] = []

    def compile_graph(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nodes.extend(str(node.target) for node in graph.graph.nodes if str(node.target).startswith("fa_serve"))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)  # inductor takes the graph of aot_eager

    torch.compiler.reset()
    ids = tokens(2, 9)
    actual = torch.compile(ours, fullgraph=True, backend=compile_graph)(ids, use_cache=False).logits
    assert_same(actual, eager(ids).logits)
    assert nodes == ["fa_serve.experts"]


@torch.no_grad()
def test_the_operator_obeys_the_rules_of_pytorch() -> None:
    module = expert_modules(BY_NAME["gpt-oss"].build())[0]
    weights = experts.weights_of(module, experts.gate_of(module))
    arrays = (torch.randn(3, 64), torch.tensor([[0, 1], [2, 3], [1, 3]]), torch.rand(3, 2))
    flat = [(w, None, None, 0, 0, bias) for w, bias in ((weights[0], weights[1]), (weights[2], weights[3]))]
    arguments = (*arrays, *flat[0], *flat[1], *weights.gate)
    torch.library.opcheck(
        torch.ops.fa_serve.experts.default, tuple(x.detach() if isinstance(x, Tensor) else x for x in arguments)
    )
