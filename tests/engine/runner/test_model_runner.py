"""Steps on the device: what is sent, which attention runs, and what happens when a step cannot be computed."""

from __future__ import annotations

import pytest
import torch
from tiny_models import CONFIGS, VOCAB, greedy, make_model

from fa_serve.engine import SamplingParams
from fa_serve.engine.runner import model_runner
from fa_serve.engine.start import loading
from fa_serve.hf.adapter import paged

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


def test_only_new_pages_are_sent(make_engine, replays, monkeypatch) -> None:
    sent: list[int] = []
    send = model_runner.send
    monkeypatch.setattr(
        model_runner, "send", lambda arrays, *rest: sent.append(len(arrays.get("table_index", ()))) or send(arrays, *rest)
    )
    engine = make_engine()
    engine._runner.make_graphs()
    prompt = [3, 4, 5, 6, 7]
    tokens = engine.generate([prompt], SamplingParams(max_tokens=9, temperature=0.0))[0].token_ids
    assert tokens == greedy(make_model(), prompt, 9)
    # two pages of 4 hold the prompt and three tokens more
    assert sent == [2, 0, 0, 0, 1, 0, 0, 0, 1]


def test_pages_of_a_step_that_was_not_sent_come_with_the_next(make_engine, monkeypatch) -> None:
    engine = make_engine()
    send = model_runner.send
    calls = []

    def fail_once(arrays, *rest):
        calls.append(1)
        if len(calls) == 5:  # the step that needs a new page
            raise torch.OutOfMemoryError("no room for the block")
        return send(arrays, *rest)

    monkeypatch.setattr(model_runner, "send", fail_once)
    asked = [[3, 4, 5, 6, 7], [8, 9, 10, 11, 12]]
    completions = engine.generate(asked, SamplingParams(max_tokens=9, temperature=0.0))
    assert len(calls) > 9
    assert [c.token_ids for c in completions] == [greedy(make_model(), prompt, 9) for prompt in asked]


@pytest.mark.parametrize("family", CONFIGS)
def test_prompts_without_a_past_are_attended_to_as_they_come(make_engine, monkeypatch, family) -> None:
    calls: list[str] = []
    for name in ("attention_varlen", "attention_paged"):
        real = getattr(paged, name)
        monkeypatch.setattr(paged, name, lambda *args, _n=name, _f=real, **kwargs: calls.append(_n) or _f(*args, **kwargs))
    reference = make_model(family)
    engine = make_engine(family, max_num_batched_tokens=40)
    layers = len(engine._runner.layers)
    asked = [list(range(2, 24)), list(range(30, 60)), [7]]
    once = SamplingParams(max_tokens=1, temperature=0.0)
    calls.clear()
    completions = engine.generate(asked, once)
    # 22 + 18 tokens of sequences without keys in the cache, then the other 12 of the second prompt and the third prompt
    assert calls == ["attention_varlen"] * layers + ["attention_paged"] * layers
    assert [c.token_ids for c in completions] == [greedy(reference, prompt, 1) for prompt in asked]
    calls.clear()
    again = engine.generate([asked[0] + [61, 62]], GREEDY)[0]
    assert (again.num_cached_tokens, set(calls)) == (20, {"attention_paged"}), "what was attended to has been stored as well"
    assert again.token_ids == greedy(reference, asked[0] + [61, 62], 12)


def test_attention_gets_the_precision_of_the_settings(make_engine, monkeypatch) -> None:
    """A CPU has no float8 products, so the calls are written down and computed without."""
    calls: list[tuple[str, str]] = []
    checked: list[str] = []
    for name in ("attention_varlen", "attention_paged"):
        real = getattr(paged, name)
        monkeypatch.setattr(
            paged, name, lambda *args, _n=name, _f=real, **kw: calls.append((_n, kw.pop("precision"))) or _f(*args, **kw)
        )
    monkeypatch.setattr(loading, "check_attention_precision", lambda *given: checked.append(given[-1]))
    engine = make_engine(max_num_batched_tokens=40, attention_precision="fp8")
    prompt = list(range(2, 60))
    calls.clear()
    completion = engine.generate([prompt], GREEDY)[0]
    assert checked == ["fp8"]
    assert set(calls) == {("attention_varlen", "fp8"), ("attention_paged", "fp8")}
    assert completion.token_ids == greedy(make_model(), prompt, 12)


def test_pages_that_are_not_finite_are_not_shared_for_good(make_engine) -> None:
    engine = make_engine(max_num_batched_tokens=16)
    prompt = list(range(10, 50))
    embed = engine._runner.model.get_input_embeddings()
    engine.add_request("gone", prompt, GREEDY)
    hook = embed.register_forward_hook(lambda *given: given[-1] * float("nan"))
    engine.step()
    hook.remove()
    engine.abort("gone")  # before it has sampled, so no finite logits have confirmed its first pages
    again = engine.generate([prompt], GREEDY)[0]
    assert (again.token_ids, again.num_cached_tokens) == (greedy(make_model(), prompt, 12), 0)
    # a request whose own parameters exclude every token invalidates no shared pages
    none = SamplingParams(max_tokens=4, temperature=0.0, bad_token_ids=tuple(range(VOCAB)))
    assert engine.generate([prompt], none)[0].error.code == "no_token_left"
    assert engine.generate([prompt], GREEDY)[0].num_cached_tokens >= 32


@pytest.mark.parametrize("depth", [0, 1])
def test_logits_that_are_not_numbers_fail_one_request(make_engine, depth) -> None:
    model = make_model()
    poison = VOCAB - 1
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = float("nan")
    engine = make_engine(model=model)
    engine._steps.depth = depth  # 1: the next step is launched before the host sees that the logits are bad
    good, bad = engine.generate([[1, 2], [1, poison]], GREEDY)
    assert (bad.finish_reason, bad.token_ids) == ("error", [])
    assert bad.error.code == "not_finite"
    assert good.token_ids == greedy(make_model(), [1, 2], 12)
    engine.check_integrity()
