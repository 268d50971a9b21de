"""Changes of the weights that a rollout engine notices without a call of `update`, and those that its caller must vouch for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_models import greedy, make_model
from torch import Tensor, nn

from fa_serve.engine import EngineAsleepError, RolloutEngine, SamplingParams

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
        with pytest.raises(EngineAsleepError, match="5 parameters are missing since .* an update that failed"):
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
