"""The engine on tiny models: the tokens are those of model.generate whatever happens to the batch."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from sampled_cases import each_nth
from tiny_models import CONFIGS, greedy, make_model, random_prompts

from fa_serve.engine import Engine, EngineConfig, EngineDeadError, QueueFullError, SamplingParams
from fa_serve.engine.scheduler.step_cost import ImageSeconds
from fa_serve.spec import ParameterError

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


SETTINGS = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 11},
    "preempted": {"num_pages": 16, "max_model_len": 64},
    "all": {"num_pages": 19, "max_model_len": 50, "max_num_batched_tokens": 7, "page_size": 3},
}


@cache
def greedy_tokens(family: str) -> list[list[int]]:
    model = make_model(family)
    return [greedy(model, prompt, 12) for prompt in random_prompts(10)]


@pytest.mark.parametrize(
    ("family", "case"),
    # "all" chunks and preempts; either alone is the same code for each family
    [*product(CONFIGS, each_nth(2, ("all", "plain"))), ("llama", "chunked"), ("mistral", "preempted")],
)
def test_greedy_tokens_are_those_of_generate(make_engine, family, case) -> None:
    settings = SETTINGS[case]
    engine = make_engine(family, **settings)
    completions = engine.generate(random_prompts(10), GREEDY)
    assert [c.token_ids for c in completions] == greedy_tokens(family)
    assert {c.finish_reason for c in completions} == {"length"}
    if "num_pages" in settings:
        assert engine.stats().num_preemptions > 0
    engine.check_integrity()
    assert engine.stats().num_pages_used == 0


def test_a_prefix_cache_hit_changes_nothing(make_engine) -> None:
    engine = make_engine()
    prompt = random_prompts(1)[0][:5] * 4
    first, again = (engine.generate([prompt], GREEDY)[0] for _ in range(2))
    # 20 tokens are 5 pages of 4; the last token is always computed, and so its page
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 16)
    longer = [*prompt, *first.token_ids, 7, 8]
    hit = engine.generate([longer], GREEDY)[0]
    assert hit.num_cached_tokens == 28, "the pages of an answer are kept too"
    assert first.token_ids == again.token_ids == greedy(make_model(), prompt, 12)
    assert hit.token_ids == greedy(make_model(), longer, 12)
    stats = engine.stats()
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_output_tokens) == (20 + 20 + 34, 16 + 28, 36)


def test_requests_with_one_beginning_share_it_in_one_step(make_engine) -> None:
    engine = make_engine()
    head = list(range(2, 22))
    asked = [[*head, last] for last in (30, 31, 32, 30)]
    completions = engine.generate(asked, GREEDY)
    assert [c.num_cached_tokens for c in completions] == [0, 20, 20, 20]
    reference = make_model()
    assert [c.token_ids for c in completions] == [greedy(reference, prompt, 12) for prompt in asked]


def test_prefix_caching_can_be_turned_off(make_engine) -> None:
    engine = make_engine(prefix_caching=False)
    completions = engine.generate([[1] * 20] * 2, GREEDY) + engine.generate([[1] * 20], GREEDY)
    assert [c.num_cached_tokens for c in completions] == [0, 0, 0]
    assert len({tuple(c.token_ids) for c in completions}) == 1


def test_a_seed_gives_the_same_answer_alone_and_in_any_batch(make_engine) -> None:
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=7)
    prompt, *others = random_prompts(8)
    alone = make_engine().generate([prompt], params)[0].token_ids
    for settings in ({}, {"max_num_batched_tokens": 9}, {"num_pages": 16, "max_model_len": 64}):
        engine = make_engine(**settings)
        mixed = engine.generate([*others, prompt], [GREEDY, SamplingParams(max_tokens=20, top_p=0.8)] + [GREEDY] * 5 + [params])
        assert mixed[-1].token_ids == alone
    assert make_engine().generate([prompt], SamplingParams(max_tokens=16, seed=8))[0].token_ids != alone


def test_requests_without_a_seed_differ_and_follow_the_engine_seed(make_engine) -> None:
    params = SamplingParams(max_tokens=16)
    one, same, other = (make_engine(seed=seed).generate([[5, 6]] * 2, params) for seed in (1, 1, 2))
    assert one[0].token_ids != one[1].token_ids
    assert [c.token_ids for c in one] == [c.token_ids for c in same]
    assert [c.token_ids for c in one] != [c.token_ids for c in other]


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1])
def test_pages_behind_every_window_are_given_back(make_engine, monkeypatch, depth) -> None:
    monkeypatch.setattr("fa_serve.engine.start.loading.MAX_KEYS_PER_TILE", 8)
    asked = random_prompts(5, 90, seed=1)
    tokens = [greedy(make_model("mistral"), prompt, 100) for prompt in asked]
    params = SamplingParams(max_tokens=100, temperature=0.0)
    engine = make_engine("mistral", max_num_batched_tokens=16)
    engine._steps.depth = depth
    for i, prompt in enumerate(asked):
        engine.add_request(str(i), prompt, params)
    most = 0
    got = {str(i): [] for i in range(5)}
    while engine.has_unfinished():
        for output in engine.step():
            got[output.request_id] += output.token_ids
        engine.check_integrity()
        if not engine.stats().num_waiting and all(got.values()):
            most = max(most, engine.stats().num_pages_used)
    assert list(got.values()) == tokens
    # 9 keys in the window, 8 more in the tile where it begins, and one that is written, in pages of 4
    assert most <= 5 * 6
    # a preempted sequence starts from its first page again; a part of its pages may still be cached
    small = make_engine("mistral", num_pages=40, max_model_len=160, max_num_batched_tokens=64)
    small._steps.depth = depth
    assert [c.token_ids for c in small.generate(asked, SamplingParams(max_tokens=60, temperature=0.0))] == [
        t[:60] for t in tokens
    ]
    assert make_engine("gemma2")._scheduler.window is None, "every other layer attends to all keys"


def test_end_tokens_end_an_answer(make_engine) -> None:
    prompt = [3, 4, 5]
    expected = greedy(make_model(), prompt, 12)
    index = next(i for i, token in enumerate(expected) if token not in expected[:i] and i > 2)
    model = make_model()
    model.generation_config.eos_token_id = [expected[index], 1]
    engine = make_engine(model=model)
    by_eos, ignored = engine.generate([prompt] * 2, [GREEDY, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)])
    by_id = make_engine().generate([prompt], SamplingParams(max_tokens=12, temperature=0, stop_token_ids=(expected[index],)))[0]
    for completion in (by_eos, by_id):
        assert (completion.token_ids, completion.finish_reason) == (expected[: index + 1], "stop")
        assert completion.text == by_eos.text
    assert (ignored.token_ids, ignored.finish_reason) == (expected, "length")


def test_text_is_what_the_tokenizer_writes_after_the_prompt(make_engine, tokenizer) -> None:
    engine = make_engine()
    prompt = tokenizer.encode("the quick")
    completion = engine.generate(["the quick"], SamplingParams(max_tokens=40, seed=3))[0]
    assert completion.prompt_token_ids == prompt
    whole = tokenizer.decode(prompt + completion.token_ids, skip_special_tokens=True)
    assert whole.rstrip("\ufffd") == ("the quick" + completion.text).rstrip("\ufffd")


def test_special_tokens_are_text_where_they_are_wanted(make_engine, tokenizer) -> None:
    special = tokenizer.all_special_ids[0]
    wanted = SamplingParams(max_tokens=2, allowed_token_ids=(special,), ignore_eos=True, skip_special_tokens=False)
    shown, hidden = make_engine().generate(["the quick"] * 2, [wanted, replace(wanted, skip_special_tokens=True)])
    assert (shown.text, hidden.text) == (2 * tokenizer.convert_ids_to_tokens(special), "")


def test_an_answer_without_text_has_the_same_tokens(make_engine) -> None:
    params = SamplingParams(max_tokens=8, seed=3)
    shown, hidden = make_engine().generate(["the quick"] * 2, [params, replace(params, detokenize=False)])
    assert shown.text != ""
    assert hidden.text == ""
    assert hidden.token_ids == shown.token_ids


def test_a_stop_string_ends_the_answer_before_itself(make_engine, tokenizer) -> None:
    params = SamplingParams(max_tokens=40, seed=3)
    text = make_engine().generate(["the quick"], params)[0].text
    middle = len(text) // 2
    stop = text[middle : middle + 5]
    engine = make_engine()
    stopped = engine.generate(["the quick"], SamplingParams(max_tokens=40, seed=3, stop=("never", stop)))[0]
    assert stopped.text == text[: text.index(stop)]
    assert stopped.finish_reason == "stop"
    assert len(stopped.token_ids) < 40
    engine.check_integrity()
    assert engine.stats().num_pages_used == 0


def test_an_answer_is_cut_at_the_length_of_the_model(make_engine) -> None:
    engine = make_engine(max_model_len=20)
    for max_tokens in (None, 1000):
        completion = engine.generate([[1] * 15], SamplingParams(max_tokens=max_tokens, temperature=0.0))[0]
        assert (len(completion.token_ids), completion.finish_reason) == (5, "length")


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan")])
def test_a_timeout_is_positive(make_engine, timeout) -> None:
    with pytest.raises(ValueError, match="timeout must be positive"):
        make_engine().add_request("bad", [1], timeout=timeout)


def test_one_text_is_not_a_list_of_prompts(make_engine) -> None:
    with pytest.raises(ValueError, match="prompts must be a list"):
        make_engine().generate("the quick")


def test_abort_frees_pages_at_once(make_engine) -> None:
    engine = make_engine(max_num_seqs=2)
    for name in ("running", "other", "waiting"):
        engine.add_request(name, [1, 2, 3], GREEDY)
    engine.step()
    held = engine.stats().num_pages_used
    (output,) = engine.abort("running")
    assert (output.finished, output.finish_reason, output.num_output_tokens) == (True, "abort", 1)
    assert engine.stats().num_pages_used < held
    assert [output.finish_reason for output in engine.abort("waiting")] == ["abort"]
    assert engine.abort("running") == []
    engine.check_integrity()
    outputs = [output for _ in range(20) for output in engine.step()]
    assert {output.request_id for output in outputs} == {"other"}
    assert outputs[-1].finished
    assert not engine.has_unfinished()


@pytest.mark.parametrize("n", [1, 2])
def test_nothing_comes_after_the_end_of_a_request_that_is_aborted_while_the_engine_sleeps(make_engine, n: int) -> None:
    """`sleep` ends the step in flight, whose tokens the next `step` returns, unless the request has ended before it."""
    engine = make_engine(max_num_seqs=4)
    engine._steps.depth = 1
    engine.add_request("aborted", [1, 2, 3], replace(GREEDY, n=n))
    engine.add_request("other", [4, 5, 6], GREEDY)
    outputs = [output for _ in range(3) for output in engine.step()]
    engine.sleep(0)
    outputs += engine.abort("aborted")
    own = [output for output in outputs if output.request_id == "aborted"]
    assert sum(len(output.token_ids) for output in own) == 3 * n, "those of the step in flight as well"
    assert [output.finish_reason for output in own[-n:]] == ["abort"] * n
    engine.wake_up()
    later = [output for _ in range(20) for output in engine.step()]
    assert {output.request_id for output in later} == {"other"}
    tokens = [token for output in (*outputs, *later) if output.request_id == "other" for token in output.token_ids]
    assert tokens == engine.generate([[4, 5, 6]], GREEDY)[0].token_ids


def test_a_closed_engine_has_freed_its_cache_and_says_that_it_is_closed(make_engine) -> None:
    engine = make_engine("llama")
    engine.generate(random_prompts(2, 20), SamplingParams(max_tokens=4))
    kept = [weakref.ref(cache) for caches in engine._runner.kv_caches.values() for cache in caches]
    assert all(cache() is not None for cache in kept)
    engine.close()
    assert [cache() for cache in kept] == [None] * len(kept)
    with pytest.raises(EngineDeadError, match="the engine was closed"):
        engine.generate(random_prompts(1, 20), SamplingParams(max_tokens=4))


def test_a_priority_has_bounds(make_engine) -> None:
    engine = make_engine()
    for priority in (-1001, 1001, -(2**31)):
        with pytest.raises(ParameterError, match="priority must be between -1000 and 1000") as error:
            engine.add_request("a", [1], priority=priority)
        assert error.value.field == "priority"


def test_requests_of_one_salt_share_a_prefix_and_others_do_not(make_engine) -> None:
    engine = make_engine()
    cached = []
    for number, salt in enumerate((None, "a", None, "a", "b")):
        engine.add_request(str(number), list(range(20)), GREEDY, cache_salt=salt)
        cached += [output.num_cached_tokens for _ in range(13) for output in engine.step() if output.finished]
    assert cached == [0, 0, 16, 16, 0]


def test_no_more_than_max_waiting_requests_wait(make_engine) -> None:
    engine = make_engine(max_num_seqs=2, max_waiting=1)
    for name in "abc":
        engine.add_request(name, [1], GREEDY)
    with pytest.raises(QueueFullError, match="room for 0 of 1 sequences"):
        engine.add_request("d", [1], GREEDY)
    engine.abort("b")
    with pytest.raises(QueueFullError, match="room for 1 of 2 sequences"):
        engine.add_request("d", [1], replace(GREEDY, n=2))
    engine.add_request("d", [1], GREEDY)


def test_generate_takes_more_prompts_than_the_queue(make_engine, capsys) -> None:
    engine = make_engine(max_num_seqs=2, max_waiting=1)
    asked = random_prompts(9)
    completions = engine.generate(asked, GREEDY, progress=True)
    reference = make_model()
    assert [c.token_ids for c in completions] == [greedy(reference, prompt, 12) for prompt in asked]
    assert "9/9" in capsys.readouterr().err
    with pytest.raises(ValueError, match="at least one token"):
        engine.generate([[1]] * 8 + [[]], GREEDY)
    assert engine.stats().num_output_tokens == 9 * 12, "nothing is computed when a prompt is bad"


def test_loading_from_a_folder(model_folder) -> None:
    engine = Engine(EngineConfig(model=model_folder, device="cpu", num_pages=32))
    assert (engine.config.dtype, engine.config.device, engine.config.max_model_len) == ("float32", "cpu", 256)
    assert engine.config.model_name == model_folder.name
    prompt = engine.tokenizer.encode("the fox")
    assert engine.generate(["the fox"], GREEDY)[0].token_ids == greedy(make_model(), prompt, 12)


def test_without_a_tokenizer_there_are_only_tokens() -> None:
    engine = Engine(EngineConfig(device="cpu", num_pages=32), model=make_model())
    completion = engine.generate([[1, 2]], GREEDY)[0]
    assert (completion.text, completion.token_ids) == ("", greedy(make_model(), [1, 2], 12))
    with pytest.raises(ValueError, match="must be token ids"):
        engine.generate(["text"])
    with pytest.raises(ValueError, match="stop must be empty"):
        engine.generate([[1]], SamplingParams(stop=("x",)))
    assert not engine.has_unfinished()


@pytest.mark.parametrize("depth", [0, 1])
def test_steps_are_measured_from_the_result_before(make_engine, monkeypatch, depth) -> None:
    """A step begins on the device when the one before it has ended, or when it is launched."""
    now = [100.0]
    monkeypatch.setattr("fa_serve.engine.engine.time.monotonic", lambda: now[0])
    engine = make_engine(target_itl=1000, max_num_batched_tokens=16)
    engine._steps.depth = depth
    share = engine._scheduler.prompt_share
    measured: list[tuple[int, int, float]] = []

    def record(size, seconds, images=None):
        assert images in (None, ImageSeconds())
        measured.append((size.rows, size.prompt_tokens, seconds))

    monkeypatch.setattr(share, "record", record)
    launch = engine._runner.launch

    def slow(batch):
        now[0] += 0.5
        return launch(batch)

    monkeypatch.setattr(engine._runner, "launch", slow)
    engine.add_request("a", list(range(20)), SamplingParams(max_tokens=3))
    while engine.has_unfinished():
        engine.step()
    first = 0.5 * (1 + depth)
    assert measured == [(0, 16, first), (0, 4, 0.5), (1, 0, 0.5), (1, 0, 0.5 if not depth else 0.0)]
    now[0] += 60.0
    engine.add_request("b", [1], SamplingParams(max_tokens=1))
    engine.step()
    engine.step()
    assert measured[-1] == (1, 0, 0.5), "an idle minute is no part of a step"
