"""Changes of the weights that a rollout engine notices without a call of `update`, and those that its caller must vouch for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_models import greedy, make_model
from torch import Tensor, nn

from fa_serve.engine import EngineAsleepError, RolloutEngine, SamplingParams
from fa_serve.spec import UnsupportedModelError

SIZES: dict[str, Any] = {"device": "cpu", "num_pages": 64, "page_size": 4, "max_num_seqs": 8, "seed": 0}
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
PROMPT = [*range(5, 25)]


def tokens_of(engine: RolloutEngine) -> list[int]:
    return engine.generate([PROMPT], params=GREEDY)[0].rollouts[0].token_ids


def other_model() -> nn.Module:
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
    return model


def test_after_a_failed_update_nothing_is_computed_with_a_mixture_of_weights() -> None:
    """The parameters that were copied have changed in place. That is not the change of a trainer that forgot to say so."""
    model = make_model()
    engine = RolloutEngine(model, **SIZES)
    tokens_of(engine)
    other = other_model()

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from [*other.named_parameters()][:5]
        raise OSError("the connection was lost")

    with pytest.raises(OSError, match="the connection was lost"):
        engine.update(broken())
    for _ in range(2):
        with pytest.raises(EngineAsleepError, match=r"5 parameters are missing since .* an update that failed"):
            tokens_of(engine)
    engine.update(other.named_parameters())
    assert tokens_of(engine) == greedy(other, PROMPT, 6)
    with pytest.raises(OSError, match="the connection was lost"):
        engine.update(broken())
    engine.update()  # the caller says that the parameters are right
    assert tokens_of(engine) == greedy(model, PROMPT, 6)


def test_a_change_during_sleep_is_noticed_after_it() -> None:
    model = make_model()
    engine = RolloutEngine(model, **SIZES)
    before = tokens_of(engine)
    engine.sleep()
    model.load_state_dict(other_model().state_dict())
    [index] = engine.submit([PROMPT], params=GREEDY)
    engine.wake_up()
    [group] = engine.finished([index])
    assert group.rollouts[0].token_ids == greedy(model, PROMPT, 6) != before
    assert group.rollouts[0].weight_versions == [1] * 6


@pytest.mark.parametrize("size", [300, 400])
def test_another_vocabulary_is_refused_until_it_is_resized_back(size: int) -> None:
    """A prompt might hold a token without an embedding, or could not hold the new tokens."""
    model = make_model()
    engine = RolloutEngine(model, **SIZES)
    tokens_of(engine)
    model.resize_token_embeddings(size)
    told = f"it was 320 and is now {size}: make a new RolloutEngine, or resize the embeddings back"
    for call in (engine.update, lambda: tokens_of(engine)):
        with pytest.raises(UnsupportedModelError, match=told):
            call()
    assert tokens_of(RolloutEngine(model, **SIZES)) == greedy(model, PROMPT, 6)
    model.resize_token_embeddings(320)
    engine.update()
    assert tokens_of(engine) == greedy(model, PROMPT, 6)


def with_adapters() -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(make_model(), config)
    wrapped.add_adapter("other", config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.5)
    return wrapped


def scale(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "scale_layer"):
            module.scale_layer(3.0)


@pytest.mark.parametrize(
    "switch",
    [
        lambda model: model.set_adapter("other"),
        lambda model: model.base_model.disable_adapter_layers(),
        lambda model: model.merge_adapter(["other"]),
        scale,
    ],
    ids=["chosen", "disabled", "merged", "scaled"],
)
def test_another_adapter_has_other_keys_and_values(switch: Any) -> None:
    """No parameter changes, except when an adapter is merged, and torch does not notice that change of `data`."""
    model = with_adapters()
    engine = RolloutEngine(model, **SIZES)
    before = tokens_of(engine)
    switch(model)
    assert tokens_of(engine) == greedy(model.base_model.model, PROMPT, 6) != before
    assert engine.weight_version == 1
    tokens_of(engine)
    assert engine.weight_version == 1, "only a switch is one"
