"""TRL's trainer asks for rollouts: an object of its shape, and the trainer itself where trl is installed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import make_model, make_tokenizer

import fa_serve
from fa_serve.engine import RolloutEngine, StructuredOutput
from fa_serve.engine.rollout.trl import TrlGeneration, use_rollouts
from fa_serve.spec import ParameterError

SIZES: dict[str, Any] = {"device": "cpu", "num_pages": 64, "page_size": 4, "max_num_seqs": 8, "seed": 0}


def trainer(generation_kwargs: dict[str, Any] | None = None, regex: str | None = None, **changes: Any) -> SimpleNamespace:
    settings = {"temperature": 0.9, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    return SimpleNamespace(
        use_vllm=False,
        max_completion_length=5,
        args=SimpleNamespace(generation_kwargs=generation_kwargs, vllm_structured_outputs_regex=regex),
        accelerator=SimpleNamespace(backward=lambda loss, **_: loss.backward()),
        **settings | changes,
    )


def test_answers_come_in_the_order_and_the_form_of_the_prompts() -> None:
    asks = trainer(top_k=-1)
    engine = RolloutEngine(make_model(), **SIZES)
    use_rollouts(asks, engine)
    assert asks.use_vllm
    prompts = [[5, 6, 7], [5, 6, 7], [9, 8], [9, 8]]
    ids, answers, logprobs, tokens = asks.vllm_generation.generate(prompts, None, 2)
    assert ids == prompts
    assert [len(answer) for answer in answers] == [5] * 4
    assert answers[0] != answers[1], "the answers of a group are different draws"
    assert [[token[0] for token in each] for each in tokens] == answers
    assert all(logprob[0] < 0 for each in logprobs for logprob in each)
    asks.vllm_generation.sync_weights()
    assert engine.weight_version == 1


def test_the_trainers_log_probabilities_are_those_of_the_rollout() -> None:
    """The method that TRL calls, with prompts to the right of their padding."""
    model = make_model().train()
    asks = trainer(temperature=0.7)
    engine = RolloutEngine(model, **SIZES, deterministic=True)
    use_rollouts(asks, engine, fa_serve.exact(model, page_size=4))
    prompts = [[5, 6, 7], [9, 8]]
    _, answers, logprobs, _ = asks.vllm_generation.generate(prompts, None, 1)
    ids = torch.tensor([[5, 6, 7, *answers[0]], [0, 9, 8, *answers[1]]])
    mask = torch.ones_like(ids)
    mask[1, 0] = 0
    found, entropies, _ = asks._get_per_token_logps_and_entropies(model, ids, mask, 5, batch_size=1, compute_entropy=True)
    assert torch.equal(found, torch.tensor(logprobs)[..., 0])
    assert found.requires_grad
    assert entropies.shape == (2, 5)
    assert (entropies > 0).all()
    with pytest.raises(ParameterError, match="inputs must be tokens only"):
        asks._get_per_token_logps_and_entropies(model, ids, mask, 5, pixel_values=ids)


def test_checkpointed_layers_are_computed_again_in_the_context() -> None:
    """The trainer's default, whose backward pass comes after the loss has been returned."""
    model = make_model().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    asks = trainer()
    use_rollouts(asks, RolloutEngine(model, **SIZES, deterministic=True), fa_serve.exact(model, page_size=4))
    ids = torch.randint(3, 300, (2, 9))
    found, _, _ = asks._get_per_token_logps_and_entropies(model, ids, torch.ones_like(ids), 5)
    asks.accelerator.backward(found.sum())
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_further_settings_of_the_trainer_count() -> None:
    asks = trainer(generation_kwargs={"max_tokens": 2, "logit_bias": {7: 100.0}}, temperature=0.0)
    use_rollouts(asks, RolloutEngine(make_model(), **SIZES))
    assert asks.vllm_generation.generate([[5, 6]], None, 1)[1] == [[7, 7]]
    params = TrlGeneration(trainer(regex="[ab]+"), RolloutEngine(make_model(), **SIZES)).params()
    assert params.structured == StructuredOutput(regex="[ab]+")
    asks = trainer(generation_kwargs={"beam_width": 2})
    with pytest.raises(
        ParameterError, match=r"generation_kwargs must hold only names of SamplingParams fields, got .*beam_width"
    ):
        use_rollouts(asks, RolloutEngine(make_model(), **SIZES))
    assert not asks.use_vllm


def test_what_is_not_built_is_refused() -> None:
    engine = RolloutEngine(make_model(), **SIZES)
    with pytest.raises(ParameterError, match="use_vllm must be False"):
        use_rollouts(SimpleNamespace(use_vllm=True), engine)
    model = make_model("qwen3-moe")
    asks = trainer(aux_loss_enabled=True, router_aux_loss_coef=0.001)
    with pytest.raises(ParameterError, match="router_aux_loss_coef must be 0"):
        use_rollouts(asks, RolloutEngine(model, **SIZES, deterministic=True), fa_serve.exact(model, page_size=4))
    with pytest.raises(ParameterError, match="images must be None"):
        TrlGeneration(trainer(), engine).generate([[5]], [object()], 1)


def test_trl_trains_with_ratios_of_exactly_1(tmp_path: Any) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    model = make_model("qwen3")
    seen: list[float] = []

    class WatchedTrainer(trl.GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
            with torch.no_grad():
                ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
                mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
                found, _, _ = self._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].shape[1])
            distances = (found - inputs["sampling_per_token_logps"])[inputs["completion_mask"].bool()]
            seen.append(float(distances.abs().max()))
            return super()._compute_loss(model, inputs)

    args = trl.GRPOConfig(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=5,
        learning_rate=0.01,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        disable_tqdm=True,
    )
    prompts = datasets.table.InMemoryTable.from_pydict({"prompt": ["the fox", "a dog"]})
    trains = WatchedTrainer(
        model,
        reward_funcs=lambda completions, **_: [float(sum(map(str.islower, text))) for text in completions],
        args=args,
        # with a fingerprint, because datasets cannot hash the table with every pyarrow
        train_dataset=datasets.Dataset(prompts, fingerprint="prompts"),
        processing_class=make_tokenizer(),
    )
    engine = RolloutEngine(trains.model, make_tokenizer(), **SIZES, deterministic=True)
    use_rollouts(trains, engine, fa_serve.exact(trains.model, page_size=4))
    trains.train()
    assert seen == [0.0] * 3
    assert engine.weight_version >= 3
