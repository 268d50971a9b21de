"""An engine over a live model: it sees each step of the optimizer, and gives the model back as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from counted_opcodes import count_opcodes
from tiny_models import greedy, make_model, random_prompts
from torch import nn

from fa_serve.engine import Engine, EngineAsleepError, EngineConfig, RolloutEngine, RolloutError, SamplingParams
from fa_serve.hf.surgery.fuse.layer import FusedLayer
from fa_serve.spec import ParameterError, UnsupportedModelError

SIZES: dict[str, Any] = {"device": "cpu", "num_pages": 64, "page_size": 4, "max_num_seqs": 8, "seed": 0}
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
PROMPT = [*range(5, 25)]


def change(model: nn.Module, scale: float = 0.3, through_data: bool = False) -> None:
    """A step in place, far enough to change greedy tokens."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            changed = parameter.data if through_data else parameter
            changed.add_(torch.randn(parameter.shape, generator=generator) * scale)


def tokens_of(engine: RolloutEngine, prompt: list[int] = PROMPT) -> list[int]:
    return engine.generate([prompt], params=GREEDY)[0].rollouts[0].token_ids


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3-moe"])
def test_an_optimizers_step_in_place_reaches_merged_weights_and_empties_the_prefix_cache(family: str) -> None:
    model = make_model(family)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)  # before the engine, as trainers make it
    engine = RolloutEngine(model, **SIZES)
    before = tokens_of(engine)
    assert before == greedy(model, PROMPT, 6)
    loss = model(input_ids=torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss
    loss.backward()
    optimizer.step()
    change(model)
    assert engine.update() == 1
    assert tokens_of(engine) == greedy(model, PROMPT, 6) != before
    assert engine.stats().num_cached_tokens == 0, "keys of the weights before must not be found"
    assert not any(parameter.is_inference() for parameter in model.parameters())


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.3, foreach=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.3, fused=True),
    ],
    ids=["SGD", "foreach", "fused"],
)
def test_a_forgotten_update_is_made_before_the_next_prompts(make_optimizer: Any) -> None:
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    engine = RolloutEngine(model, **SIZES)
    before = tokens_of(engine)
    model(input_ids=torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
    optimizer.step()
    assert tokens_of(engine) == greedy(model, PROMPT, 6) != before
    assert engine.weight_version == 1
    assert engine.update() == 2
    tokens_of(engine)
    assert engine.weight_version == 2, "an update that was not forgotten is not made again"
    other = make_optimizer(nn.Linear(2, 2).parameters())
    other.step()
    tokens_of(engine)
    assert engine.weight_version == 2, "another model's optimizer"


def test_without_an_update_the_prefix_cache_keeps_what_the_weights_before_computed() -> None:
    """The guard of the tests above: `update` is what drops the pages. Torch does not tell of a change of `data`."""
    model = make_model()
    engine = RolloutEngine(model, **SIZES)
    tokens_of(engine)
    change(model, through_data=True)
    stale = tokens_of(engine)
    engine.update()
    assert stale != tokens_of(engine)


def test_the_parameters_stay_the_objects_that_an_optimizer_has_and_become_views() -> None:
    model = make_model()
    known = dict(model.named_parameters())
    model(input_ids=torch.tensor([PROMPT])).logits.sum().backward()
    gradient = known["model.layers.0.self_attn.k_proj.weight"].grad
    engine = RolloutEngine(model, **SIZES)
    tokens_of(engine)
    assert all(parameter is known[name] for name, parameter in model.named_parameters())
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.weight.untyped_storage().data_ptr() == attention.k_proj.weight.untyped_storage().data_ptr()
    assert attention.k_proj.weight.grad is gradient


def test_between_calls_the_model_is_the_trainers() -> None:
    model = make_model("qwen3-moe")
    model.train()
    model.model.layers[1].eval()
    settings = (model.config._attn_implementation, model.config._experts_implementation)
    modes = [module.training for module in model.modules()]
    engine = RolloutEngine(model, **SIZES)
    seen = []
    model.model.layers[0].mlp.register_forward_hook(
        lambda *_: seen.append((model.training, isinstance(model.model.layers[0].forward, FusedLayer)))
    )
    for _ in engine.stream([PROMPT, PROMPT[3:]], params=GREEDY):
        assert (model.config._attn_implementation, model.config._experts_implementation) == settings == ("eager", "batched_mm")
        assert [module.training for module in model.modules()] == modes
        assert not any("forward" in vars(module) for module in model.modules())
    assert set(seen) == {(False, True)}, "a step runs fused layers, without dropout"


def test_a_parameter_with_other_memory_is_merged_again() -> None:
    """A stale view: the merged weights would keep the numbers of the memory that the parameter had."""
    model = make_model()
    engine = RolloutEngine(model, **SIZES)
    before = tokens_of(engine)
    change(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    engine.update()
    assert tokens_of(engine) == greedy(model, PROMPT, 6) != before


def test_an_update_takes_as_many_operations_whatever_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of parameters are not looked up either, because nothing is copied."""
    model = make_model()
    engine = RolloutEngine(model, **SIZES)
    names = []
    monkeypatch.setattr(model, "named_buffers", lambda **_: names.append("looked up") or iter(()))
    engine.update()
    counts = []
    for num_prompts in (0, 1, 8):
        engine.generate([[number, *PROMPT] for number in range(num_prompts)], params=GREEDY)
        engine.check_integrity()
        counts.append(count_opcodes(engine.update))
    assert counts[0] == counts[1] == counts[2]
    assert not names


def test_update_copies_weights_by_name() -> None:
    model = make_model()
    other = make_model()
    change(other)
    engine = RolloutEngine(model, **SIZES)
    tokens_of(engine)
    assert engine.update((name, p.double()) for name, p in other.named_parameters()) == 1
    assert tokens_of(engine) == greedy(other, PROMPT, 6)
    for weights, rule in (
        ([("lm_head.bias", torch.zeros(320))], "names of parameters of LlamaForCausalLM, got 'lm_head.bias'"),
        (other.state_dict(), r"pairs of a name and a tensor, such as model.named_parameters\(\)"),
        (other.lm_head.weight, "pairs of a name and a tensor, .* got 'Parameter'"),
        (None, "pairs of a name and a tensor, .* got 'NoneType'"),
        (["lm_head.weight"], "pairs of a name and a tensor, .* got 'lm_head.weight'"),
        ([("lm_head.weight", [1, 2])], r"pairs of a name and a tensor, .* got \('lm_head.weight', \[1, 2\]\)"),
        ([("lm_head.weight", torch.zeros(320, 32, dtype=torch.int64))], "floats for lm_head.weight, got torch.int64"),
        ([("lm_head.weight", torch.zeros(3, 32))], r"shape \(320, 32\) for lm_head.weight, got \(3, 32\)"),
    ):
        with pytest.raises(ParameterError, match=rule):
            engine.update(weights)


def test_groups_come_as_they_finish_with_log_probabilities_and_versions() -> None:
    model = make_model()
    engine = RolloutEngine(model, **SIZES)
    params = [SamplingParams(max_tokens=12, seed=1, logprobs=2, ignore_eos=True), SamplingParams(max_tokens=3, seed=2)]
    first, second = engine.stream([PROMPT, PROMPT[:7]], n=3, params=params)
    assert [group.index for group in (first, second)] == [1, 0], "the group with fewer tokens comes first"
    assert first.prompt_token_ids == PROMPT[:7]
    assert len({tuple(rollout.token_ids) for rollout in second.rollouts}) == 3
    for rollout in second.rollouts:
        assert len(rollout.logprobs) == len(rollout.top_logprobs) == 12
        assert all(len(top) == 2 for top in rollout.top_logprobs)
        assert rollout.weight_versions == [0] * 12
        assert rollout.finish_reason == "length"
        logits = model(input_ids=torch.tensor([PROMPT + rollout.token_ids])).logits[0, len(PROMPT) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, atol=1e-4, rtol=1e-4)
    assert first.rollouts[0].top_logprobs is None


def test_as_many_answers_as_the_params_say_unless_n_is_given() -> None:
    engine = RolloutEngine(make_model(), **SIZES)
    params = SamplingParams(max_tokens=2, n=3, seed=0)
    assert len(engine.generate([PROMPT], params=params)[0].rollouts) == 3
    assert len(engine.generate([PROMPT], n=2, params=params)[0].rollouts) == 2
    assert len(engine.generate([PROMPT], params=SamplingParams(max_tokens=2))[0].rollouts) == 1


def test_processed_log_probabilities_are_those_of_the_distribution_that_tokens_are_drawn_from() -> None:
    model = make_model()
    params = SamplingParams(max_tokens=10, temperature=0.7, top_k=5, top_p=0.9, seed=3, logprobs=5)
    [group] = RolloutEngine(model, **SIZES).generate([PROMPT], params=params)
    [rollout] = group.rollouts
    logits = model(input_ids=torch.tensor([PROMPT + rollout.token_ids])).logits[0, len(PROMPT) - 1 : -1] / 0.7
    for row, token, logprob in zip(logits.detach(), rollout.token_ids, rollout.logprobs, strict=True):
        values, ids = row.topk(5)
        weights = values.softmax(-1)
        kept = (weights.cumsum(-1) - weights) < 0.9
        expected = dict(zip(ids[kept].tolist(), values[kept].log_softmax(-1).tolist(), strict=True))
        assert logprob == pytest.approx(expected[token], abs=1e-4)
    raw = RolloutEngine(model, **SIZES, logprobs_mode="raw_logprobs").generate([PROMPT], params=params)[0].rollouts[0]
    assert raw.token_ids == rollout.token_ids
    assert raw.logprobs != pytest.approx(rollout.logprobs, abs=1e-3)


def test_partial_rollouts_keep_their_pages_and_go_on() -> None:
    prompts = random_prompts(4, longest=12)
    params = [SamplingParams(max_tokens=length, seed=5, ignore_eos=True) for length in (3, 20, 20, 20)]
    whole = RolloutEngine(make_model(), **SIZES).generate(prompts, n=1, params=params)
    engine = RolloutEngine(make_model(), **SIZES)
    indices = engine.submit(prompts, n=1, params=params)
    for group in engine.finished():
        assert group.index == indices[0]
        break
    partial = engine.partial()
    assert [group.index for group in partial] == indices[1:]
    assert all(3 <= len(group.rollouts[0].token_ids) < 20 and not group.finished for group in partial)
    held = engine.stats().num_pages_used
    assert held > 0, "they keep their pages"
    steps = engine.stats().num_steps
    rest = list(engine.finished())
    assert [group.rollouts[0].token_ids for group in rest] == [group.rollouts[0].token_ids for group in whole[1:]]
    assert engine.stats().num_steps - steps <= 17, "nothing was computed again"
    engine.check_integrity()


@pytest.mark.parametrize("keep_pages", [False, True])
def test_an_update_between_parts_of_a_rollout(keep_pages: bool) -> None:
    """With other weights, an answer goes on from its tokens; or from its keys, which other weights have computed."""
    model = make_model()
    engine = RolloutEngine(model, **SIZES)
    long = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    short = SamplingParams(max_tokens=4, temperature=0.0)
    engine.submit([PROMPT, PROMPT[:9]], params=[long, short])
    next(iter(engine.finished()))
    [partial] = engine.partial()
    begun = list(partial.rollouts[0].token_ids)
    change(model)
    engine.update(keep_pages=keep_pages)
    assert engine.stats().num_running == keep_pages
    [group] = engine.finished()
    [rollout] = group.rollouts
    assert rollout.token_ids[: len(begun)] == begun
    assert rollout.weight_versions == [0] * len(begun) + [1] * (16 - len(begun))
    expected = greedy(model, PROMPT + begun, 16 - len(begun))
    assert (rollout.token_ids[len(begun) :] == expected) == (not keep_pages)
    # a later request shares nothing with keys of the weights before
    assert tokens_of(engine, PROMPT + begun) == expected[:6]
    engine.check_integrity()


def test_a_forgotten_update_is_made_before_unfinished_answers_go_on() -> None:
    """No prompt comes with which it would be found out. The tokens that follow are of the new weights, and say so."""
    model = make_model()
    engine = RolloutEngine(model, **SIZES)
    long = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    engine.submit([PROMPT, PROMPT[:9]], params=[long, SamplingParams(max_tokens=4, temperature=0.0)])
    next(iter(engine.finished()))
    [partial] = engine.partial()
    begun = list(partial.rollouts[0].token_ids)
    change(model)
    [group] = engine.finished()
    [rollout] = group.rollouts
    assert rollout.weight_versions == [0] * len(begun) + [1] * (16 - len(begun))
    assert rollout.token_ids == begun + greedy(model, PROMPT + begun, 16 - len(begun))
    assert engine.weight_version == 1
    engine.check_integrity()


@pytest.mark.parametrize("call", ["update", "generate", "finished"])
def test_another_dtype_is_refused_until_the_model_is_moved_back(call: str) -> None:
    model = make_model()
    engine = RolloutEngine(model, **SIZES)
    tokens_of(engine)
    [index] = engine.submit([PROMPT], params=GREEDY)
    model.to(torch.bfloat16)
    calls = {"update": engine.update, "generate": lambda: tokens_of(engine), "finished": lambda: list(engine.finished())}
    told = r"embed_tokens.weight was torch.float32 on cpu and is now torch.bfloat16 on cpu: make a new RolloutEngine, or move"
    with pytest.raises(UnsupportedModelError, match=told):
        calls[call]()
    assert [group.index for group in engine.partial()] == [index], "nothing was queued or computed"
    assert tokens_of(RolloutEngine(model, **SIZES)) == tokens_of(RolloutEngine(make_model().to(torch.bfloat16), **SIZES))
    model.to(torch.float32)
    engine.update()
    expected = greedy(model, PROMPT, 6)
    assert [group.rollouts[0].token_ids for group in engine.finished()] == [expected]
    assert tokens_of(engine) == expected


def test_parameters_that_come_later_are_no_other_dtype() -> None:
    model = make_model()
    engine = RolloutEngine(model, **SIZES)
    model.extra = nn.Linear(2, 2, dtype=torch.bfloat16)
    assert engine.update() == 1
    assert tokens_of(engine) == greedy(model, PROMPT, 6)
    model.extra.to(torch.float16)
    with pytest.raises(UnsupportedModelError, match=r"extra.weight was torch.bfloat16 on cpu and is now torch.float16 on cpu"):
        engine.update()


def test_an_answer_that_ends_with_an_error_is_no_empty_rollout() -> None:
    """The logits of a model that has diverged are NaN."""
    model = make_model()
    engine = RolloutEngine(model, **SIZES)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    told = "answer 0 to prompt 0 has ended after 0 tokens with an error: the model's logits are not finite"
    with pytest.raises(RolloutError, match=told) as caught:
        engine.generate([PROMPT, PROMPT[:9]], n=2, params=GREEDY)
    assert caught.value.error.code == "not_finite"
    assert caught.value.group.prompt_token_ids == PROMPT
    assert engine.partial() == []
    assert list(engine.finished()) == [], "nothing of the call is left"
    engine.check_integrity()


def test_the_other_groups_come_after_one_with_an_error() -> None:
    engine = RolloutEngine(make_model(), **SIZES)
    none = SamplingParams(max_tokens=3, bad_token_ids=tuple(range(320)))
    indices = engine.submit([PROMPT, PROMPT[:9]], params=[none, GREEDY])
    with pytest.raises(RolloutError) as caught:
        list(engine.finished())
    assert caught.value.group.index == indices[0]
    assert [group.index for group in engine.finished()] == indices[1:]


def test_aborted_groups_are_finished_with_what_they_have() -> None:
    engine = RolloutEngine(make_model(), **SIZES)
    indices = engine.submit([PROMPT, PROMPT[:9]], n=2, params=SamplingParams(max_tokens=30, ignore_eos=True, seed=0))
    engine.abort(indices[:1])
    assert engine.partial()[0].index == indices[1]
    [first] = engine.finished(indices[:1])
    assert [rollout.finish_reason for rollout in first.rollouts] == ["abort", "abort"]
    engine.abort()
    assert [group.index for group in engine.finished()] == indices[1:]
    assert engine.stats().num_pages_used == 0


def test_sleep_frees_the_cache_and_unfinished_answers_go_on_after_it() -> None:
    prompts = random_prompts(3, longest=12)
    params = [SamplingParams(max_tokens=length, seed=5, ignore_eos=True) for length in (2, 12, 12)]
    whole = RolloutEngine(make_model(), **SIZES).generate(prompts, params=params)
    model = make_model()
    engine = RolloutEngine(model, **SIZES)
    engine.submit(prompts, params=params)
    next(iter(engine.finished()))
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    engine.sleep(level=2)
    assert engine._engine._runner.kv_caches == {}
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses, "the weights are the trainer's"
    with pytest.raises(EngineAsleepError, match="wake_up"):
        next(iter(engine.finished()))
    engine.wake_up()
    assert [g.rollouts[0].token_ids for g in engine.finished()] == [g.rollouts[0].token_ids for g in whole[1:]]
    engine.check_integrity()


def test_an_engine_that_owns_its_weights_gives_them_away(model_folder: Any) -> None:
    engine = Engine(EngineConfig(model=model_folder, max_model_len=64, **SIZES))
    expected = engine.generate([PROMPT], GREEDY)[0].token_ids
    weights = {name: parameter.detach().clone() for name, parameter in engine._runner.model.named_parameters()}
    engine.sleep(level=1)
    engine.wake_up()
    assert engine.generate([PROMPT], GREEDY)[0].token_ids == expected
    engine.sleep(level=2)
    assert sum(parameter.numel() for parameter in engine._runner.model.parameters()) == 0
    with pytest.raises(EngineAsleepError, match=r'wake_up\(\["weights"\]\)'):
        engine.update_weights(weights.items())
    engine.wake_up(["weights"])
    with pytest.raises(EngineAsleepError):
        engine.generate([PROMPT], GREEDY)
    engine.wake_up(["kv_cache"])
    with pytest.raises(EngineAsleepError, match="21 parameters are missing"):
        engine.generate([PROMPT], GREEDY)
    assert engine.update_weights(weights.items()) == 1
    assert engine.generate([PROMPT], GREEDY)[0].token_ids == expected
    assert isinstance(engine._runner.model.model.layers[0].forward, FusedLayer)
    with pytest.raises(ParameterError, match="tags must hold only weights, kv_cache"):
        engine.wake_up(["scheduler"])
    long = [5, 6, 7] * 20
    engine.generate([long], GREEDY)
    with pytest.raises(ParameterError, match="level must be 0, 1 or 2"):
        engine.sleep(level=3)
    assert engine.generate([long], GREEDY)[0].num_cached_tokens, "a refused sleep leaves the prefix cache as it is"


def test_a_peft_model_is_run_with_its_adapters() -> None:
    peft = pytest.importorskip("peft")
    model = make_model()
    before = greedy(model, PROMPT, 6)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.5, generator=torch.Generator().manual_seed(0))
    engine = RolloutEngine(wrapped, **SIZES)
    tokens = tokens_of(engine)
    inner = wrapped.base_model.model
    assert tokens == greedy(inner, PROMPT, 6) != before
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-1.0)
    engine.update()
    assert tokens_of(engine) == greedy(inner, PROMPT, 6) != tokens


def test_training_goes_on_after_rollouts() -> None:
    model = make_model("qwen3-moe").train()
    model.set_experts_implementation("eager")
    engine = RolloutEngine(model, **SIZES)
    tokens_of(engine)
    model(input_ids=torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
    assert all(parameter.grad is not None for parameter in model.model.layers[0].self_attn.parameters())


def test_a_checkpoint_of_a_live_model_holds_every_weight(tmp_path: Any) -> None:
    model = make_model()
    RolloutEngine(model, **SIZES)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(p, again.get_parameter(name)) for name, p in model.named_parameters())


class Divided(nn.Parameter):
    """A parameter of which this process has a part, as a DTensor."""

    def full_tensor(self) -> torch.Tensor:
        return self.data


def test_what_cannot_be_run_in_place_is_refused() -> None:
    divided = make_model()
    divided.lm_head.weight = Divided(divided.lm_head.weight.data)
    with pytest.raises(UnsupportedModelError, match=r"lm_head.weight is divided by DTensor .*update\(weights\)"):
        RolloutEngine(divided, **SIZES)
    quantised = make_model()
    quantised.lm_head.weight = nn.Parameter(torch.zeros(320, 32, dtype=torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight is torch\.int8"):
        RolloutEngine(quantised, **SIZES)
    partly = make_model()
    partly.lm_head.to("meta")
    with pytest.raises(UnsupportedModelError, match="on one device, with memory, got cpu, meta"):
        RolloutEngine(partly, **SIZES)
    with pytest.raises(UnsupportedModelError, match="a model of transformers is needed, or a wrapper around one, got Linear"):
        RolloutEngine(nn.Linear(2, 2), **SIZES)
    with pytest.raises(UnsupportedModelError, match=r"a loaded model of transformers is needed, .* got str"):
        RolloutEngine("Qwen/Qwen3-0.6B", **SIZES)
    with pytest.raises(ParameterError, match="quantization must be None for a live model"):
        RolloutEngine(make_model(), **SIZES, quantization="fp8")
    with pytest.raises(ParameterError, match="best_of must be None"):
        RolloutEngine(make_model(), **SIZES).generate([PROMPT], params=SamplingParams(best_of=3))


def test_a_batch_that_cannot_be_queued_leaves_nothing_behind() -> None:
    engine = RolloutEngine(make_model(), **SIZES)
    with pytest.raises(ParameterError, match="token ids from 0 to 319, got 400"):
        engine.generate([PROMPT, [400]], params=GREEDY)
    assert engine.partial() == []
    assert list(engine.finished()) == []


def test_weights_that_do_not_sleep_may_change_while_the_cache_does() -> None:
    model = make_model()
    engine = RolloutEngine(model, **SIZES)
    engine.generate([PROMPT], params=GREEDY)
    engine.sleep()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    assert engine.update() == 1
    engine.wake_up()
    [group] = engine.generate([PROMPT], params=GREEDY)
    [other] = RolloutEngine(model, **SIZES).generate([PROMPT], params=GREEDY)
    assert group.rollouts[0].token_ids == other.rollouts[0].token_ids
