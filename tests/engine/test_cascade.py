"""Engines whose steps read shared pages once give the tokens of other engines."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import make_model

from fa_serve.engine import Engine, SamplingParams
from fa_serve.engine.runner import attention_kinds
from fa_serve.engine.start.warm_up import EmptyStep
from fa_serve.hf.adapter.common_prefix import CommonPrefixes

SYSTEM = [3 + number % 40 for number in range(21)]
PROMPTS = [[*SYSTEM, 50 + number, 51] for number in range(5)] + [[7, 8, 9], [9] * 11]


@pytest.fixture
def group_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Groups pay from the first key on. The list has the number of groups of each call of attention that has any."""
    monkeypatch.setattr(attention_kinds, "LEAST_GROUP_BYTES", 1)
    calls: list[int] = []
    attend = CommonPrefixes.attend

    def noted(self: CommonPrefixes, *args: Any, **options: Any) -> Any:
        calls.append(int((self.cu_seqlens_q.diff() > 0).sum()))
        return attend(self, *args, **options)

    monkeypatch.setattr(CommonPrefixes, "attend", noted)
    return calls


def answers(engine: Engine) -> list[list[int]]:
    """n answers to one prompt, and prompts that begin alike; the second time, pages come from the prefix cache."""
    greedy = [SamplingParams(max_tokens=6 + 2 * number, temperature=0.0) for number in range(len(PROMPTS))]
    drawn = SamplingParams(n=3, max_tokens=6, seed=1)
    outputs = [*engine.generate(PROMPTS, greedy), *engine.generate(PROMPTS, greedy), *engine.generate([PROMPTS[0]], drawn)]
    engine.check_integrity()
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_tokens_are_those_without_groups(make_engine, replays, group_calls, family: str, graphs: bool) -> None:
    """Gemma 2 has layers with a window, which read each sequence, and soft-capped scores."""
    found = []
    for cascade in (False, True):
        engine = make_engine(model=make_model(family), cascade_attention=cascade)
        if graphs:
            engine._runner.make_graphs()
        found.append(answers(engine))
        assert bool(group_calls) == cascade
    assert found[0] == found[1]
    assert max(group_calls) > 0
    if graphs:
        assert any(shape.groups for shape in engine._runner._graphs._replays)


@pytest.mark.parametrize("settings", [{"deterministic": True}, {"cascade_attention": False}])
def test_settings_without_groups(make_engine, group_calls, settings: dict[str, Any]) -> None:
    answers(make_engine(**{"cascade_attention": True} | settings))
    assert not group_calls


def test_a_model_whose_layers_have_windows_alone_has_no_groups(make_engine, group_calls) -> None:
    answers(make_engine("mistral", cascade_attention=True))
    assert not group_calls


def test_drafts_are_verified_as_before(make_engine, group_calls) -> None:
    plain = answers(make_engine())
    assert answers(make_engine(speculative="ngram", cascade_attention=True)) == plain


def test_the_warm_up_meets_the_kernels_of_groups(make_engine, group_calls) -> None:
    """A step without a graph may have groups, so empty steps of one token for each sequence compute them as well."""
    for cascade in (False, True):
        runner = make_engine(cascade_attention=cascade)._runner
        for batch, queries in ((5, 1), (2, 3)):
            runner.run_warm_up(EmptyStep(batch, queries, 8))
        assert len(group_calls) == cascade * len(runner.layers)
