"""The training forward has the log-probabilities of the rollout, in every bit, and the gradients of the plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from every_type import tiny_model
from hf_families import cached
from hybrids import BY_NAME
from padded_rollouts import SIZES, Batch
from sampled_cases import each_nth
from tiny_models import make_model
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

import fa_serve
from fa_serve import ops
from fa_serve.engine import RolloutEngine, SamplingParams
from fa_serve.hf import PagedBatch, exact_forward
from fa_serve.hf.adapter.attention import riding_batch
from fa_serve.hf.exact_gradients import AttentionWithGradients, TrainedCall
from fa_serve.hf.surgery.fuse.fusion import fuse_layers
from fa_serve.hf.surgery.fuse.layer import FusedLayer
from fa_serve.hf.surgery.fuse.router import FusedRouter
from fa_serve.hf.surgery.fuse.unit import FusedUnit
from fa_serve.ops.deterministic import DeterministicMode
from fa_serve.spec import ParameterError, UnsupportedModelError


def gradients(model: nn.Module, logprobs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (-logprobs.sum()).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", each_nth(2, ["llama", "qwen3", "qwen3-moe", "qwen2-moe", "gemma3"]))
def test_log_probabilities_are_those_of_the_rollout_in_every_bit(family: str, dtype: torch.dtype) -> None:
    model = make_model(family).to(dtype).train()
    batch = Batch(model)
    with fa_serve.exact(model, page_size=4):
        logprobs = batch.compute(model)
    assert logprobs.requires_grad
    assert (logprobs - batch.logprobs).abs().max() == 0
    plain = batch.compute(model, position_ids=batch.positions)
    assert (plain - batch.logprobs).abs().max() > 0, "the same bits without the context would prove nothing"
    found = gradients(model, logprobs)
    expected = gradients(model, plain)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (found[name] - gradient).norm() / gradient.norm()
        assert error < (1e-4 if dtype == torch.float32 else 0.2), name


def test_softcapped_attention_has_the_same_bits() -> None:
    """On a CPU its products are operators of PyTorch, which autograd divides into others before a mode sees them."""
    model = make_model("gemma2")
    batch = Batch(model)
    with fa_serve.exact(model, page_size=4):
        logprobs = batch.compute(model)
    assert torch.equal(logprobs, batch.logprobs)
    found = gradients(model, logprobs)
    expected = gradients(model, batch.compute(model, position_ids=batch.positions))
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() < 1e-4 * gradient.norm(), name


def test_routers_and_shared_experts_are_those_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen2-moe").to(torch.bfloat16)
    context = fa_serve.exact(model, page_size=4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    batch = Batch(model)
    with context:
        fused = [type(vars(module).get("forward")) for module in model.modules()]
        assert (fused.count(FusedRouter), fused.count(FusedUnit)) == (2, 2)
        assert torch.equal(batch.compute(model), batch.logprobs)
    monkeypatch.setattr(exact_forward, "fuse_model", fuse_layers)
    with fa_serve.exact(model, page_size=4):
        assert not torch.equal(batch.compute(model), batch.logprobs)


def test_the_bias_of_a_router_gets_its_gradient() -> None:
    """The logits of GPT-OSS's router have one. A detached view of it has the same bits and no gradient."""
    model = make_model("gpt-oss").train()
    batch = Batch(model)
    with fa_serve.exact(model, page_size=4):
        assert isinstance(vars(model.model.layers[0].mlp.router)["forward"], FusedRouter)
        logprobs = batch.compute(model)
    assert torch.equal(logprobs, batch.logprobs)
    found = gradients(model, logprobs)
    expected = gradients(model, batch.compute(model, position_ids=batch.positions))
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() < 1e-4 * gradient.norm(), name


def test_temperature_and_log_softmax_have_the_same_bits() -> None:
    model = make_model("qwen3").to(torch.bfloat16)
    batch = Batch(model, temperature=0.7)
    with fa_serve.exact(model, page_size=4):
        assert torch.equal(batch.compute(model, temperature=0.7), batch.logprobs)
    plain = Batch(model)
    with fa_serve.exact(model, page_size=4):
        logits = model(input_ids=plain.ids, attention_mask=plain.mask).logits[:, plain.longest - 1 : -1]
        own = logits.float().log_softmax(-1).gather(-1, plain.ids[:, plain.longest :, None])[..., 0]
    assert torch.equal(own.masked_fill(~plain.kept, 0.0), plain.logprobs)


def test_rows_packed_end_to_end_have_the_same_bits() -> None:
    model = make_model()
    batch = Batch(model)
    rows = [ids[mask.bool()] for ids, mask in zip(batch.ids, batch.mask, strict=True)]
    packed = torch.cat(rows)[None]
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    with fa_serve.exact(model, page_size=4):
        packed_logits = model(input_ids=packed, position_ids=positions).logits[0]
        padded = model(input_ids=batch.ids, attention_mask=batch.mask).logits
    assert torch.equal(packed_logits, padded[batch.mask.bool()])


def halves(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A product whose sum is split in two."""
    middle = x.shape[-1] // 2
    first = torch.nn.functional.linear(x[..., :middle], weight[:, :middle])
    return first + torch.nn.functional.linear(x[..., middle:], weight[:, middle:], bias)


def whole_prompts(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: TrainedCall, compute: Any) -> Tensor:
    """Attention by another kernel, which takes the queries of a sequence together."""
    ends = call.batch.cu_seqlens_q
    longest = call.batch.max_seqlen_q
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return fa_serve.attention_varlen(q, k, v, causal=True, softmax_scale=call.options["softmax_scale"], **lengths)


def in_float64(self: PagedBatch, index: int, q: Tensor, *_: Tensor, left: int, softmax_scale: float, **options: Any) -> Tensor:
    """Attention of each sequence in float64, rounded once."""
    found = []
    with _disable_current_modes():
        for query, pages, length in zip(
            q.double().split(self.cu_seqlens_q.diff().tolist()), self.block_table, self.seqused_k.tolist(), strict=True
        ):
            k, v = (cache[pages].flatten(0, 1)[:length].double() for cache in self.kv_caches[index])
            k, v = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", query, k) * softmax_scale
            hidden = torch.ones(len(query), length, dtype=torch.bool).triu(length - len(query) + 1)
            found.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
        return torch.cat(found).to(q.dtype)


@pytest.mark.parametrize("fusion", [True, False], ids=["fused", "unfused"])
def test_without_each_piece_bits_differ(fusion: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted kernel of attention, a planted split of the sum in a product, and positions that count padding."""
    model = make_model("qwen3")
    batch = Batch(model, fusion=fusion)
    attention = (PagedBatch, "attention", in_float64) if fusion else (AttentionWithGradients, "apply", whole_prompts)
    for planted in (attention, (ops, "invariant_linear", halves)):
        with monkeypatch.context() as patch:
            patch.setattr(*planted)
            with fa_serve.exact(model, page_size=4, fusion=fusion):
                assert not torch.equal(batch.compute(model), batch.logprobs), planted
    with fa_serve.exact(model, page_size=4, fusion=fusion):
        counted = batch.compute(model, position_ids=torch.arange(batch.ids.shape[1])[None])
        assert not torch.equal(counted, batch.logprobs)
        assert torch.equal(batch.compute(model), batch.logprobs)


def test_fused_layers_are_those_of_the_engine() -> None:
    """Layers are fused within the context, and what is not fused has other bits."""
    model = make_model("qwen3").to(torch.bfloat16)
    batch = Batch(model)
    with fa_serve.exact(model, page_size=4):
        assert all(isinstance(layer.forward, FusedLayer) for layer in model.model.layers)
    assert not any("forward" in vars(module) for module in model.modules())
    with fa_serve.exact(model, page_size=4, fusion=False):
        assert not torch.equal(batch.compute(model), batch.logprobs)


def test_an_engine_and_the_context_share_merged_weights_and_see_other_memory() -> None:
    """Neither takes the weights of the other away, an optimizer's step reaches both, and a stale view would be noticed."""
    model = make_model("qwen3")
    first = fa_serve.exact(model, page_size=4)
    engine = RolloutEngine(model, **SIZES, deterministic=True)
    second = fa_serve.exact(model, page_size=4)
    params = SamplingParams(max_tokens=4, seed=1)

    def differences() -> list[float]:
        engine.update()
        [group] = engine.generate([[5, 6, 7, 8]], params=params)
        [rollout] = group.rollouts
        ids = torch.tensor([[5, 6, 7, 8, *rollout.token_ids]])
        found = []
        for context in (first, second):
            with context:
                logprobs = fa_serve.token_logprobs(model(input_ids=ids).logits[:, 3:-1], ids[:, 4:])
            found.append((logprobs - torch.tensor(rollout.logprobs)).abs().max().item())
        return found

    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    assert differences() == [0.0, 0.0]
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    assert differences() == [0.0, 0.0]
    for parameter in model.parameters():
        parameter.data = parameter.data.neg()
    assert differences() == [0.0, 0.0]
    ids = torch.ones(1, 3, dtype=torch.int64)
    with first:
        for parameter in model.parameters():
            parameter.data = parameter.data.neg()
        with pytest.raises(UnsupportedModelError, match="have moved to other memory: enter the exact context again"):
            model(input_ids=ids)


def test_a_context_around_one_that_found_other_memory_refuses_to_go_on() -> None:
    """The inner one merges the new weights; what the outer one installs again was made of the old ones."""
    model = make_model("qwen3").train()
    ids = torch.arange(5, 29).view(2, 12)
    exact = fa_serve.exact(model, page_size=4)
    with exact:
        for parameter in model.parameters():
            parameter.data = 1.5 * parameter.data
        with exact:
            inner = model(input_ids=ids).logits
        with pytest.raises(UnsupportedModelError, match="have moved to other memory: enter the exact context again"):
            model(input_ids=ids)
    with exact:
        assert torch.equal(model(input_ids=ids).logits, inner)


def test_a_layer_costs_the_host_few_operators_beside_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operator in the context goes through Python. Without padding nothing is gathered, and what layers share is made
    once: a layer copies its input, which its kernels overwrite, and has views."""
    counts: list[list[Any]] = []
    dispatch = DeterministicMode.__torch_dispatch__

    def count(self: DeterministicMode, func: Any, *args: Any) -> Any:
        counts[-1].append(func)
        return dispatch(self, func, *args)

    for num_layers in (1, 2):
        model = make_model("qwen3")
        model.model.layers = model.model.layers[:num_layers]
        model.config.num_hidden_layers = num_layers
        context = fa_serve.exact(model, page_size=4)
        with monkeypatch.context() as patch:
            patch.setattr(FusedLayer, "compute", lambda _, x, step: x)
            patch.setattr(DeterministicMode, "__torch_dispatch__", count)
            counts.append([])
            with context:
                model(input_ids=torch.arange(24).view(2, 12))
    few, many = map(len, counts)
    assert 0 < many - few <= 6
    gathers = [sum("index" in str(func) for func in each) for each in counts]
    assert gathers[0] == gathers[1]


def test_a_batch_without_padding_has_the_bits_and_gradients_of_a_padded_one() -> None:
    model = make_model("qwen3")
    ids = torch.arange(5, 29).view(2, 12)
    padded = torch.cat([torch.zeros_like(ids[:, :3]), ids], dim=1)
    mask = (torch.arange(15) >= 3).long().expand(2, -1)
    context = fa_serve.exact(model, page_size=4)
    with context:
        whole = fa_serve.token_logprobs(model(input_ids=ids).logits[:, :-1], ids[:, 1:])
        expected = gradients(model, whole)
        logits = model(input_ids=padded, attention_mask=mask).logits[:, 3:-1]
        other = fa_serve.token_logprobs(logits, ids[:, 1:])
        found = gradients(model, other)
    assert torch.equal(whole, other)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=name)


def test_a_checkpointed_forward_is_repeated_with_the_same_bits() -> None:
    model = make_model().train()
    batch = Batch(model)
    context = fa_serve.exact(model, page_size=4)
    with context:
        expected = gradients(model, batch.compute(model))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with context:
        logprobs = batch.compute(model)
        found = gradients(model, logprobs)
    assert torch.equal(logprobs, batch.logprobs)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    x = torch.randn(5, 8, requires_grad=True)
    weight = torch.randn(6, 8)
    seen: list[Tensor] = []

    def product(x: Tensor) -> Tensor:
        seen.append(torch.nn.functional.linear(x, weight))
        return seen[-1].exp()

    with context:
        checkpoint(product, x, use_reentrant=False).sum().backward()
    assert len(seen) == 2
    assert torch.equal(*seen)


def test_gradients_repeat_in_every_bit_if_asked_for() -> None:
    model = make_model("qwen3-moe")
    batch = Batch(model)
    with fa_serve.exact(model, page_size=4, deterministic_backward=True):
        first = gradients(model, batch.compute(model))
        second = gradients(model, batch.compute(model))
    with fa_serve.exact(model, page_size=4):
        plain = gradients(model, batch.compute(model))
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.testing.assert_close(first, plain, rtol=1e-3, atol=1e-5)
    assert not all(torch.equal(first[name], plain[name]) for name in first), "its products are those of the mode"


def _fail_within(context: Any) -> None:
    with context:
        raise RuntimeError("on purpose")


def test_the_model_is_given_back_as_it_was() -> None:
    model = make_model("qwen3-moe").train()
    settings = (model.config._attn_implementation, model.config._experts_implementation)
    context = fa_serve.exact(model)
    assert (model.config._attn_implementation, model.config._experts_implementation) == settings
    with context, context:
        assert model.config._experts_implementation == "fa_serve_exact"
        assert model.training
    with pytest.raises(RuntimeError, match="on purpose"):
        _fail_within(context)
    assert (model.config._attn_implementation, model.config._experts_implementation) == settings
    assert not model._forward_pre_hooks


def test_what_a_training_forward_does_not_have_is_refused() -> None:
    model = make_model()
    ids = torch.ones(1, 5, dtype=torch.int64)
    with fa_serve.exact(model):
        with pytest.raises(ParameterError, match="a row with a gap"):
            model(ids, attention_mask=torch.tensor([[1, 0, 1, 1, 1]]))
        with pytest.raises(ParameterError, match=r"attention_mask must have the shape \(batch, tokens\)"):
            model(ids, attention_mask=torch.ones(1, 1, 5, 5))
        with pytest.raises(ParameterError, match=r"(past_key_values|cache) must be None"):
            model(ids, **cached(model, object()))
        for tokens in (ids[:0], ids[:, :0]):
            with pytest.raises(
                ParameterError, match=r"input_ids must have at least one token that is no padding, got .*\(\d, \d\)"
            ):
                model(tokens)
        with pytest.raises(ParameterError, match="input_ids must have at least one token that is no padding"):
            model(ids, attention_mask=torch.zeros_like(ids))
        for given in ({}, {"input_ids": ids[0]}):
            with pytest.raises(ParameterError, match=r"input_ids must be given with the shape \(batch, tokens\)"):
                model(**given)
    with pytest.raises(UnsupportedModelError, match="a model of transformers is needed"):
        fa_serve.exact(nn.Linear(2, 2))
    with pytest.raises(UnsupportedModelError, match="Qwen3NextForCausalLM keeps states, so it has no exact forward"):
        fa_serve.exact(BY_NAME["qwen3-next"].build())
    with pytest.raises(UnsupportedModelError, match="DeepseekV32ForCausalLM chooses keys, so it has no exact forward"):
        fa_serve.exact(tiny_model("deepseek_v32"))


def test_rollouts_within_the_context_are_those_outside() -> None:
    model = make_model()
    engine = RolloutEngine(model, **SIZES, deterministic=True)
    params = SamplingParams(max_tokens=4, seed=1)
    [outside] = engine.generate([[5, 6, 7]], params=params)
    with fa_serve.exact(model, page_size=4):
        [inside] = engine.generate([[5, 6, 7]], params=params)
    assert inside.rollouts == outside.rollouts


def test_adapters_of_peft_are_trained_with_the_bits_of_their_rollouts() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(make_model(), config)
    batch = Batch(wrapped)
    with fa_serve.exact(wrapped, page_size=4):
        logprobs = batch.compute(wrapped)
    assert torch.equal(logprobs, batch.logprobs)
    logprobs.sum().backward()
    trained = {name for name, parameter in wrapped.named_parameters() if parameter.grad is not None}
    assert trained
    assert all("lora_" in name for name in trained)


def test_the_last_tokens_of_a_model_with_a_frozen_head() -> None:
    model = make_model()
    model.lm_head.weight.requires_grad_(False)
    ids = torch.randint(3, 300, (3, 9))
    with fa_serve.exact(model, page_size=4):
        whole = model(input_ids=ids).logits
        last = model(input_ids=ids, logits_to_keep=4).logits
    assert torch.equal(last, whole[:, -4:])


def test_greedy_answers_have_the_log_probabilities_of_temperature_1() -> None:
    model = make_model()
    engine = RolloutEngine(model, **SIZES, deterministic=True)
    [group] = engine.generate([[5, 6, 7]], params=SamplingParams(max_tokens=4, temperature=0.0))
    [rollout] = group.rollouts
    ids = torch.tensor([[5, 6, 7, *rollout.token_ids]])
    with fa_serve.exact(model, page_size=4):
        logits = model(input_ids=ids).logits[:, 2:-1]
        found = fa_serve.token_logprobs(logits, ids[:, 3:], temperature=0.0)
    assert torch.equal(found[0], torch.tensor(rollout.logprobs))


def test_autocast_around_the_context_changes_no_bit() -> None:
    """The rollout has the parameters' dtype."""
    model = make_model().train()
    batch = Batch(model)
    context = fa_serve.exact(model, page_size=4)
    with torch.autocast("cpu", torch.bfloat16), context:
        logprobs = batch.compute(model)
        logprobs.sum().backward()
    assert torch.equal(logprobs, batch.logprobs)
    with context, torch.autocast("cpu", torch.bfloat16), pytest.raises(ParameterError, match="autocast must be entered around"):
        batch.compute(model)


def test_dropout_is_refused_where_it_would_drop_something() -> None:
    model = make_model()
    model.model.layers[1].self_attn.attention_dropout = 0.1
    ids = torch.ones(1, 5, dtype=torch.int64)
    with fa_serve.exact(model):
        model.eval()(input_ids=ids)
        with pytest.raises(ParameterError, match=r"dropout must be 0 in model.layers.1.self_attn, .*eval\(\).* got 0.1"):
            model.train()(input_ids=ids)
    model.model.layers[1].self_attn.attention_dropout = 0.0
    for name in ("dropout", "residual_dropout"):  # of layers that call the function, as those of OPT and Seed-OSS do
        setattr(model.model.layers[1], name, 0.25)
        with fa_serve.exact(model), pytest.raises(ParameterError, match=r"dropout must be 0 in model.layers.1, .* got 0.25"):
            model.train()(input_ids=ids)
        setattr(model.model.layers[1], name, 0.0)
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(make_model(), peft.LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.5))
    with fa_serve.exact(wrapped), pytest.raises(ParameterError, match=r"dropout must be 0 in .*lora_dropout.*, got 0.5"):
        wrapped.train()(input_ids=ids)


@pytest.mark.parametrize("kind", ["stablelm", "nemotron", "kosmos-2.5"])
def test_models_that_hand_no_arguments_down_or_count_positions_otherwise(kind: str) -> None:
    """StableLM and Nemotron pass no further arguments on to their layers; Kosmos counts from the padding's id on."""
    torch.manual_seed(0)
    model = tiny_model(kind)
    prompt = [*range(5, 14)]
    engine = RolloutEngine(model, **SIZES, deterministic=True)
    [group] = engine.generate([prompt], params=SamplingParams(max_tokens=5, seed=1, ignore_eos=True))
    [rollout] = group.rollouts
    ids = torch.tensor([prompt + rollout.token_ids])
    with fa_serve.exact(model, page_size=4):
        with pytest.raises(IndexError):
            model(input_ids=ids + 1000)
        assert riding_batch() is None, "after a forward that has failed too"
        logits = model(input_ids=ids).logits
        assert riding_batch() is None
    found = fa_serve.token_logprobs(logits[:, 8:-1], ids[:, 9:])
    assert torch.equal(found[0], torch.tensor(rollout.logprobs))
    torch.testing.assert_close(logits, model(input_ids=ids, use_cache=False).logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("shape", [(2, 1), (2, 4), (5,)])
def test_tokens_of_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    """(2, 1) and (5,) would broadcast to numbers of other tokens."""
    with pytest.raises(ParameterError, match=r"without the vocabulary dimension, \(2, 5\), got \(\d"):
        fa_serve.token_logprobs(torch.zeros(2, 5, 7), torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("temperature", [-1.0, float("nan")])
def test_a_temperature_that_no_rollout_has_is_refused(temperature: float) -> None:
    """It is not greedy: the log-probabilities would be those of another distribution, without an error."""
    with pytest.raises(ParameterError, match="temperature must be at least 0, got"):
        fa_serve.token_logprobs(torch.zeros(2, 5, 7), torch.zeros((2, 5), dtype=torch.int64), temperature)


def test_a_page_without_tokens_is_refused() -> None:
    with pytest.raises(ParameterError, match="page_size must be a positive integer, got 0"):
        fa_serve.exact(make_model(), page_size=0)
