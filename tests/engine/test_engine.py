"""The engine on tiny models: the tokens are those of model.generate whatever happens to the batch."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
import torch
from tiny_models import CONFIGS, VOCAB, greedy, make_model, random_prompts

from fa_serve.engine import Engine, EngineConfig, QueueFullError, SamplingParams, model_runner
from fa_serve.hf import paged

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="plain"),
        pytest.param({"max_num_batched_tokens": 11}, id="chunked"),
        pytest.param({"num_pages": 16, "max_model_len": 64}, id="preempted"),
        pytest.param({"num_pages": 19, "max_model_len": 50, "max_num_batched_tokens": 7, "page_size": 3}, id="all"),
    ],
)
def test_greedy_tokens_are_those_of_generate(make_engine, family, settings) -> None:
    reference = make_model(family)
    asked = random_prompts(10)
    engine = make_engine(family, **settings)
    completions = engine.generate(asked, GREEDY)
    assert [c.token_ids for c in completions] == [greedy(reference, prompt, 12) for prompt in asked]
    assert {c.finish_reason for c in completions} == {"length"}
    if "num_pages" in settings:
        assert engine.stats().num_preemptions > 0
    engine.check_integrity()
    assert engine.stats().num_pages_used == 0


def test_a_prefix_cache_hit_changes_nothing(make_engine) -> None:
    engine = make_engine()
    prompt = random_prompts(1)[0][:5] * 4
    first, again = (engine.generate([prompt], GREEDY)[0] for _ in range(2))
    # 20 tokens are 5 pages of 4; the last is computed in any case
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 16)
    longer = [*prompt, *first.token_ids, 7, 8]
    hit = engine.generate([longer], GREEDY)[0]
    assert hit.num_cached_tokens == 28, "the pages of an answer are kept too"
    assert first.token_ids == again.token_ids == greedy(make_model(), prompt, 12)
    assert hit.token_ids == greedy(make_model(), longer, 12)
    stats = engine.stats()
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_output_tokens) == (20 + 20 + 34, 16 + 28, 36)


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
    # 22 + 18 tokens, none of which has a past, then the other 12 of the second prompt together with the third
    assert calls == ["attention_varlen"] * layers + ["attention_paged"] * layers
    assert [c.token_ids for c in completions] == [greedy(reference, prompt, 1) for prompt in asked]
    calls.clear()
    again = engine.generate([asked[0] + [61, 62]], GREEDY)[0]
    assert (again.num_cached_tokens, set(calls)) == (20, {"attention_paged"}), "what was attended to has been stored as well"
    assert again.token_ids == greedy(reference, asked[0] + [61, 62], 12)


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


@pytest.mark.parametrize("depth", [0, 1])
def test_pages_behind_every_window_are_given_back(make_engine, monkeypatch, depth) -> None:
    monkeypatch.setattr("fa_serve.engine.scheduler.WINDOW_TILE", 8)
    asked = random_prompts(5, 90, seed=1)
    tokens = [greedy(make_model("mistral"), prompt, 100) for prompt in asked]
    params = SamplingParams(max_tokens=100, temperature=0.0)
    engine = make_engine("mistral", max_num_batched_tokens=16)
    engine._depth = depth
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
    # 9 keys in the window, 8 more in its tile, one that is written, in pages of 4
    assert most <= 5 * 6
    # a preempted sequence starts from its first page again; a part of its pages may still be cached
    small = make_engine("mistral", num_pages=40, max_model_len=160, max_num_batched_tokens=64)
    small._depth = depth
    assert [c.token_ids for c in small.generate(asked, SamplingParams(max_tokens=60, temperature=0.0))] == [
        t[:60] for t in tokens
    ]
    assert make_engine("gemma2")._scheduler.window is None, "every other layer looks at everything"


def test_a_float8_cache_is_near_and_small(make_engine) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=0)
    plain = EngineConfig(device="cpu", dtype="float32", num_pages=64)
    exact = Engine(plain)
    rough = Engine(replace(plain, kv_cache_dtype="fp8"))
    caches = [engine._runner.kv_caches[0][0] for engine in (exact, rough)]
    assert (caches[1].dtype, caches[0].element_size()) == (torch.float8_e4m3fn, 4 * caches[1].element_size())
    asked = ["What is 17 + 25?", "def add(a, b):\n    return", "import "]
    for left, right in zip(exact.generate(asked, params), rough.generate(asked, params), strict=True):
        # the first token's attention has not been through the cache
        assert left.token_ids[0] == right.token_ids[0]
        assert right.logprobs[0].logprob == pytest.approx(left.logprobs[0].logprob, abs=1e-3)
        same = [a == b for a, b in zip(left.token_ids, right.token_ids, strict=True)]
        until = same.index(False) if False in same else len(same)
        for a, b in zip(left.logprobs[:until], right.logprobs[:until], strict=True):
            assert b.logprob == pytest.approx(a.logprob, abs=0.25)
    again = rough.generate(asked, params)
    assert [c.error for c in again] == [None] * 3
    with pytest.raises(ValueError, match="kv_cache_dtype must be auto or fp8, got 'int4'"):
        EngineConfig(kv_cache_dtype="int4")


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


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        pytest.param([1] * 20, "shorter than max_model_len = 20 tokens.*got 20", id="long"),
        pytest.param("the quick brown fox " * 20, "shorter than max_model_len = 20", id="long text"),
        pytest.param([], "at least one token", id="empty"),
        pytest.param("", "at least one token", id="empty text"),
        pytest.param([VOCAB], f"from 0 to {VOCAB - 1}", id="large"),
        pytest.param([-1], "from 0 to", id="negative"),
        pytest.param([2**70], "from 0 to", id="huge"),
        pytest.param([1.5], "from 0 to .*float", id="no integer"),
    ],
)
def test_a_bad_prompt_is_refused(make_engine, prompt, message) -> None:
    engine = make_engine(max_model_len=20)
    with pytest.raises(ValueError, match=message):
        engine.add_request("bad", prompt)
    assert not engine.has_unfinished()


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(make_engine, tokenizer) -> None:
    engine = make_engine(max_model_len=20)
    longest = max(map(len, tokenizer.get_vocab()))
    with pytest.raises(ValueError, match=f"shorter than max_model_len = 20 tokens, and so than {20 * longest} characters"):
        engine.add_request("bad", "x" * (20 * longest + 1))


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan")])
def test_a_timeout_is_positive(make_engine, timeout) -> None:
    with pytest.raises(ValueError, match="timeout must be positive"):
        make_engine().add_request("bad", [1], timeout=timeout)


def test_a_folder_that_is_not_there_is_named(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"model must be a hub name or an existing folder, got .*nowhere"):
        Engine(EngineConfig(model=str(tmp_path / "nowhere"), device="cpu"))


def test_one_text_is_not_a_list_of_prompts(make_engine) -> None:
    with pytest.raises(ValueError, match="prompts must be a list"):
        make_engine().generate("the quick")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("seed", 2**63),
        ("stop", ("",)),
        ("stop", "text"),
        ("stop_token_ids", (-1,)),
        ("max_tokens", True),
        ("top_k", 1.0),
        ("temperature", "1"),
        ("temperature", True),
        ("n", 0),
        ("best_of", 0),
        ("stop", (1,)),
        ("stop_token_ids", (1.0,)),
        ("stop_token_ids", 3),
        ("logit_bias", {"1": 2.0}),
        ("logit_bias", {1: "2"}),
        ("structured", "{}"),
        ("seed", 1.0),
        ("prompt_logprobs", 21),
        ("logprobs", 1.0),
        ("allowed_token_ids", "12"),
    ],
)
def test_bad_sampling_parameters_name_the_field(field, value) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


def test_settings_that_cannot_work_are_refused_with_numbers(make_engine) -> None:
    with pytest.raises(ValueError, match=r"max_model_len must be at most 64.*16 pages of 4 tokens.*got 65"):
        make_engine(num_pages=16, max_model_len=65)
    with pytest.raises(ValueError, match=r"at most 256.*max_position_embeddings, got 257"):
        make_engine(max_model_len=257)
    assert make_engine(num_pages=16).max_model_len == 64
    assert make_engine(num_pages=None, max_num_seqs=2).config.num_pages == 2 * 256 // 4
    for field, value in (
        ("page_size", 0),
        ("page_size", True),
        ("page_size", None),
        ("num_pages", 1.0),
        ("max_num_seqs", "8"),
        ("dtype", "int8"),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", "1"),
        ("max_waiting", -1),
        ("max_waiting", 1.5),
        ("seed", 0.5),
    ):
        with pytest.raises(ValueError, match=field):
            EngineConfig(**{field: value})


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


def test_a_failed_step_fails_its_requests_and_no_others(make_engine, monkeypatch, caplog) -> None:
    engine = make_engine(max_num_seqs=2)
    expected = greedy(make_model(), [9, 9], 12)
    for name, prompt in (("a", [1]), ("b", [2]), ("c", [9, 9])):
        engine.add_request(name, prompt, GREEDY)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr("fa_serve.engine.model_runner.paged_forward", lambda *_: (_ for _ in ()).throw(KeyError("broken")))
        outputs = engine.step()
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("a", "error"), ("b", "error")]
    assert "KeyError: 'broken'" in outputs[0].error
    assert "2 requests end with an error" in caplog.text
    engine.check_integrity()
    tokens = [token for _ in range(12) for output in engine.step() for token in output.token_ids]
    assert tokens == expected
    # what the failed step should have written is not taken from the prefix cache
    assert engine.generate([[1]], GREEDY)[0].token_ids == greedy(make_model(), [1], 12)


@pytest.mark.parametrize("where", ["schedule", "commit"])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_failed_scheduler_ends_all_requests_and_starts_afresh(make_engine, monkeypatch, caplog, where, depth) -> None:
    engine = make_engine(max_num_seqs=2)
    engine._depth = depth
    for name in "abc":
        engine.add_request(name, [1, 2, 3, 4, 5], GREEDY)
    engine.step()
    monkeypatch.setattr(engine._scheduler, where, lambda *_: {}["lost"])
    outputs = engine.step()
    assert [(o.request_id, o.finish_reason) for o in outputs] == [(name, "error") for name in "abc"]
    assert "the scheduler failed: KeyError: 'lost'" in outputs[0].error
    assert "all requests end with an error" in caplog.text
    assert not engine.has_unfinished()
    completion = engine.generate([[1, 2, 3, 4, 5]], GREEDY)[0]
    assert (completion.token_ids, completion.num_cached_tokens) == (greedy(make_model(), [1, 2, 3, 4, 5], 12), 0)
    engine.check_integrity()


def test_out_of_memory_makes_steps_smaller_and_loses_nothing(make_engine, monkeypatch, caplog) -> None:
    engine = make_engine(max_num_batched_tokens=64)
    asked = random_prompts(6)
    real = engine._runner.launch

    def launch(batch):
        if batch.num_tokens > 20:
            raise torch.OutOfMemoryError("too large")
        return real(batch)

    monkeypatch.setattr(engine._runner, "launch", launch)
    completions = engine.generate(asked, GREEDY)
    reference = make_model()
    assert [c.token_ids for c in completions] == [greedy(reference, prompt, 12) for prompt in asked]
    assert "out of memory in a step of 64 tokens" in caplog.text
    engine.check_integrity()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("penalty", [0.0, 1.5])
def test_out_of_memory_after_a_token_was_sampled_changes_nothing(make_engine, monkeypatch, depth, penalty) -> None:
    """The device remembers the last token and counts of all: neither may be what is lost."""
    engine = make_engine()
    engine._depth = depth
    params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=0, frequency_penalty=penalty)
    expected = [answer.token_ids for answer in engine.generate([[5, 6, 7], [8, 9]], params)]
    real = model_runner.log_probabilities
    calls = count()

    def failing(*arguments):
        if next(calls) == 4:
            raise torch.OutOfMemoryError("no room")
        return real(*arguments)

    monkeypatch.setattr(model_runner, "log_probabilities", failing)
    assert [answer.token_ids for answer in engine.generate([[5, 6, 7], [8, 9]], params)] == expected
    assert next(calls) > 5
    engine.check_integrity()


def test_pages_that_are_not_finite_are_not_shared_for_good(make_engine) -> None:
    engine = make_engine(max_num_batched_tokens=16)
    prompt = list(range(10, 50))
    embed = engine._runner.model.get_input_embeddings()
    engine.add_request("gone", prompt, GREEDY)
    hook = embed.register_forward_hook(lambda *given: given[-1] * float("nan"))
    engine.step()
    hook.remove()
    engine.abort("gone")  # before it has sampled, so that nobody has seen that its first pages are bad
    assert engine.generate([prompt], GREEDY)[0].finish_reason == "error"
    again = engine.generate([prompt], GREEDY)[0]
    assert again.token_ids == greedy(make_model(), prompt, 12)
    # who leaves no token by what it asks for drops nobody's pages
    none = SamplingParams(max_tokens=4, temperature=0.0, bad_token_ids=tuple(range(VOCAB)))
    assert engine.generate([prompt], none)[0].finish_reason == "error"
    assert engine.generate([prompt], GREEDY)[0].num_cached_tokens >= 32


@pytest.mark.parametrize("depth", [0, 1])
def test_logits_that_are_not_numbers_fail_one_request(make_engine, depth) -> None:
    model = make_model()
    poison = VOCAB - 1
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = float("nan")
    engine = make_engine(model=model)
    engine._depth = depth  # 1: the next step is launched before the host sees that the logits are bad
    good, bad = engine.generate([[1, 2], [1, poison]], GREEDY)
    assert (bad.finish_reason, bad.token_ids) == ("error", [])
    assert "not finite" in bad.error
    assert good.token_ids == greedy(make_model(), [1, 2], 12)
    engine.check_integrity()


def test_priority_goes_first_and_waiting_makes_up_for_it(make_engine, monkeypatch) -> None:
    engine = make_engine(max_num_seqs=1)
    now = [0.0]
    monkeypatch.setattr("fa_serve.engine.engine.time.monotonic", lambda: now[0])
    for name, priority, at in (("low", 1, 0.0), ("normal", 0, 1.0), ("late", 0, 11.0)):
        now[0] = at
        engine.add_request(name, [1], SamplingParams(max_tokens=1), priority=priority)
    assert [output.request_id for _ in range(3) for output in engine.step()] == ["normal", "low", "late"]


def test_a_request_ends_when_its_time_is_up(make_engine, monkeypatch) -> None:
    engine = make_engine(max_num_seqs=1)
    now = [100.0]
    monkeypatch.setattr("fa_serve.engine.engine.time.monotonic", lambda: now[0])
    for name, timeout in (("running", 5.0), ("waiting", 2.5), ("unhurried", None), ("quick", 3.0)):
        engine.add_request(name, [1], GREEDY, timeout=timeout)
    engine.abort("quick")
    engine.step()
    now[0] += 4.0
    ended = [output for output in engine.step() if output.finished]
    assert [(o.request_id, o.finish_reason, o.error) for o in ended] == [
        ("waiting", "error", "the request was not finished within its timeout")
    ]
    now[0] += 4.0
    assert [(o.request_id, o.num_output_tokens) for o in engine.step() if o.finished] == [("running", 2)]
    engine.check_integrity()
    tokens = [token for _ in range(20) for output in engine.step() for token in output.token_ids]
    assert len(tokens) == 11, "the first of its 12 came with the step that ended the running one"


def test_no_more_than_max_waiting_requests_wait(make_engine) -> None:
    engine = make_engine(max_num_seqs=2, max_waiting=1)
    for name in "abc":
        engine.add_request(name, [1], GREEDY)
    with pytest.raises(QueueFullError, match="1 requests wait already"):
        engine.add_request("d", [1], GREEDY)
    engine.abort("b")
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
