"""Calls of a rollout engine that end early, by an interrupt or because the engine sleeps."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import greedy, make_model

from fa_serve.engine import EngineAsleepError, RolloutEngine, SamplingParams

SIZES: dict[str, Any] = {"device": "cpu", "num_pages": 64, "page_size": 4, "max_num_seqs": 8, "seed": 0}
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
PROMPT = [*range(5, 25)]


def test_a_call_that_is_cut_off_leaves_nothing_behind() -> None:
    """The caller does not know the numbers of its groups, so later calls would compute them for nobody. Others are kept."""
    model = make_model()
    engine = RolloutEngine(model, **SIZES)
    indices = engine.submit([PROMPT], params=GREEDY)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    engine.sleep()
    with pytest.raises(EngineAsleepError):
        engine.generate([PROMPT, PROMPT[:9]], n=2, params=GREEDY)
    engine.wake_up()
    hook = model.lm_head.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([PROMPT, PROMPT[:9]], n=2, params=GREEDY)
    hook.remove()
    assert [group.index for group in engine.partial()] == indices
    [group] = engine.finished()
    assert group.rollouts[0].token_ids == greedy(model, PROMPT, 6)
    engine.check_integrity()


def test_a_batch_whose_queueing_is_interrupted_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = RolloutEngine(make_model(), **SIZES)
    add = engine._engine.add_request

    def interrupted(name: str, prompt: list[int], params: SamplingParams) -> list[int]:
        if len(prompt) < 10:
            raise KeyboardInterrupt
        return add(name, prompt, params)

    monkeypatch.setattr(engine._engine, "add_request", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.submit([PROMPT, PROMPT[:9]], params=GREEDY)
    assert engine.partial() == []
    assert not engine._engine.has_unfinished()


def test_tokens_of_an_interrupted_step_have_the_version_that_computed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step returns them, which may be one with other weights."""
    engine = RolloutEngine(make_model(), **SIZES)
    engine.submit([PROMPT], params=GREEDY)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine._engine._ranks, "end_step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            list(engine.finished())
    engine.update()
    [group] = engine.finished()
    [rollout] = group.rollouts
    assert rollout.weight_versions == [0] + [1] * 5
    assert rollout.token_ids == greedy(make_model(), PROMPT, 6)
