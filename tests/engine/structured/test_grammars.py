"""Structured output: every answer follows its schema or grammar, and the answers of other requests do not change."""

from __future__ import annotations

import asyncio
import json
import pickle
import re
import threading
import time
from types import SimpleNamespace

import jsonschema
import pytest
from sampled_cases import each_nth
from tiny_models import VOCAB, greedy, make_model

from fa_serve.engine import AsyncEngine, Engine, EngineConfig, SamplingParams, StructuredOutput
from fa_serve.engine.request.params import ComposedGrammar
from fa_serve.engine.scheduler.sequence import SequenceState
from fa_serve.engine.structured import grammars as structured
from fa_serve.engine.structured.matcher import Matcher
from fa_serve.sandbox.trials import Cancelled
from fa_serve.spec import ParameterError

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 130}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LARK = 'start: sum\nsum: number ("+" number){1,3}\nnumber: /[1-9][0-9]?/'
CLIENTS = ["one", "other", None]
STRANGE = ('a "quoted"\n', "back\\slash", "ünïcode 日本", "(a|b)*")
KINDS = {
    "json_schema": StructuredOutput(json_schema=SCHEMA),
    "json_text": StructuredOutput(json_schema=json.dumps(SCHEMA)),
    "regex": StructuredOutput(regex=r"[a-f]{3}-\d{2}/x?"),
    "choice": StructuredOutput(choice=STRANGE),
    "grammar": StructuredOutput(grammar=LARK),
}


def is_of_its_kind(kind: str, text: str) -> bool:
    if kind.startswith("json"):
        jsonschema.validate(json.loads(text), SCHEMA)
        return True
    if kind == "choice":
        return text in STRANGE
    pattern = r"[a-f]{3}-\d{2}/x?" if kind == "regex" else r"[1-9][0-9]?(\+[1-9][0-9]?){1,3}"
    return re.fullmatch(pattern, text) is not None


def params(kind: str, **values) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 200, "temperature": 1.0, "structured": KINDS[kind]} | values)


@pytest.fixture
def with_end(make_engine):
    """Engines whose model has an end token, which random weights seldom choose."""

    def make(depth: int = 0, **settings) -> Engine:
        model = make_model()
        model.generation_config.eos_token_id = [1]
        engine = make_engine(model=model, **settings)
        engine._steps.depth = depth  # 1: the host works a step ahead, as on a GPU
        return engine

    return make


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("settings", [{}, {"num_pages": 40, "max_num_batched_tokens": 13}], ids=["plain", "preempted"])
def test_every_kind_is_followed_and_neighbours_are_left_alone(with_end, depth, settings) -> None:
    """The weights are random, so the model would not follow a grammar by itself."""
    engine = with_end(depth, **settings)
    kinds = [kind for kind in KINDS for _ in range(3)]
    asked = [params(kind, seed=i) for i, kind in enumerate(kinds)]
    plain = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    completions = engine.generate([[3 + i, 4] for i in range(len(kinds))] + [[9, 8, 7]] * 3, asked + [plain] * 3)
    ended = 0
    for kind, completion in zip(kinds, completions, strict=False):
        assert completion.error is None
        if completion.finish_reason == "stop":
            ended += 1
            assert is_of_its_kind(kind, completion.text), completion.text
    assert ended > len(kinds) // 2
    assert [c.token_ids for c in completions[-3:]] == [greedy(make_model(), [9, 8, 7], 30)] * 3
    if settings:
        assert engine.stats().num_preemptions > 0
    assert not engine._answers.states
    engine.check_integrity()


@pytest.mark.slow
def test_the_step_ahead_changes_no_answer(with_end) -> None:
    kinds = list(KINDS)
    answers = [
        [c.token_ids for c in with_end(depth).generate([[3]] * 5, [params(kind, seed=5) for kind in kinds])] for depth in (0, 1)
    ]
    assert answers[0] == answers[1]
    alone = [with_end(1).generate([[3]], params(kind, seed=5))[0].token_ids for kind in kinds]
    assert alone == answers[0]


def test_the_embedded_model_writes_json() -> None:
    engine = Engine(EngineConfig(device="cpu", num_pages=64))
    completions = engine.generate(["Who is it? "] * 2, [params("json_schema", temperature=0.0), params("choice", seed=1)])
    assert all(is_of_its_kind(kind, c.text) for kind, c in zip(("json_schema", "choice"), completions, strict=True))
    free = engine.generate(
        ["x = "], SamplingParams(max_tokens=64, temperature=0.0, structured=StructuredOutput(json_object=True))
    )
    assert free[0].text.startswith("{")
    assert free[0].finish_reason == "length" or isinstance(json.loads(free[0].text), dict)


@pytest.mark.parametrize(
    ("structured", "message"),
    [
        pytest.param({"json_schema": {"type": "nothing"}}, "json_schema must be valid and satisfiable .*nothing", id="type"),
        pytest.param({"json_schema": "{"}, "json_schema must be JSON", id="text"),
        pytest.param({"json_schema": "[1]"}, "json_schema must be a JSON object", id="list"),
        pytest.param({"json_schema": {"a": {1, 2}}}, "json_schema must be JSON", id="set"),
        pytest.param({"json_schema": {"not": {"type": "string"}}}, "json_schema .*not", id="keyword"),
        pytest.param({"regex": "[0-9"}, "regex must be valid and satisfiable .*unclosed", id="regex"),
        pytest.param({"grammar": "start: missing"}, "grammar .*missing", id="grammar"),
        pytest.param({"json_schema": {"$ref": "#"}}, "json_schema must have no endless references, but '#' leads", id="circle"),
        pytest.param(
            {"json_schema": '{"$ref": "#/a"}'}, "refer only to existing parts of the same document, but '#/a' does", id="lost"
        ),
        pytest.param({"grammar": "start: start"}, "grammar .*no answer is possible: it refers to itself", id="no end"),
    ],
)
def test_what_cannot_be_followed_is_refused_at_submission(make_engine, structured, message) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match=f"(?s){message}"):
        engine.add_request("bad", [1], SamplingParams(structured=StructuredOutput(**structured)))
    with pytest.raises(ValueError, match=f"(?s){message}"):
        engine.generate([[1], [2]], [SamplingParams(max_tokens=1), SamplingParams(structured=StructuredOutput(**structured))])
    assert not engine.has_unfinished()


def test_without_a_tokenizer_or_an_end_it_is_refused(tokenizer) -> None:
    engine = Engine(EngineConfig(device="cpu", num_pages=32), model=make_model())
    with pytest.raises(ValueError, match="structured must be None because this engine has no tokenizer"):
        engine.generate([[1]], params("regex"))


@pytest.mark.parametrize(
    "values",
    [{}, {"regex": "a", "choice": ("a",)}, {"regex": ""}, {"choice": ()}, {"choice": "yes"}, {"json_object": 1}],
    ids=str,
)
def test_exactly_one_field_says_what_is_wanted(values) -> None:
    with pytest.raises(ValueError, match=r"must (give exactly one of|be a text|be a tuple|be True or)"):
        StructuredOutput(**values)


def test_masks_follow_drafts_and_leave_the_matcher_where_it_is(make_engine, tokenizer) -> None:
    grammars = make_engine().grammars
    digits = grammars.matcher(StructuredOutput(regex="[0-9]{3}"))
    letters = grammars.matcher(StructuredOutput(regex="a[bc]"))
    others = letters.deep_copy()
    one, a, b, x = (tokenizer.convert_tokens_to_ids(letter) for letter in "1abx")

    def allows(row: int, token: int) -> bool:
        return bool(words[row][token // 32] >> (token % 32) & 1)

    for _ in range(2):
        words, late = grammars.masks([letters, digits, others], CLIENTS[:3], [[a, b], [], [x, b]])
        assert not late
        assert words.shape[0] == 3 + 1 + 3
        assert [allows(row, a) for row in range(4)] == [True, False, False, False]
        assert [allows(row, b) for row in range(4)] == [False, True, False, False]
        assert allows(3, one)
        assert not allows(4, x)
        assert allows(5, x), "after a draft that may not come, the row does not matter"
    assert not letters.is_error()
    assert not others.is_error()
    assert grammars.masks([digits, letters], CLIENTS[:2])[0].shape[0] == 2


def test_masks_behind_slow_ones_are_the_same_and_a_spent_budget_leaves_no_token(make_engine, tokenizer) -> None:
    grammars = make_engine().grammars
    digits = grammars.matcher(StructuredOutput(regex="[0-9]{3}"))
    letters = grammars.matcher(StructuredOutput(regex="a[bc]"))
    drafts = [[tokenizer.convert_tokens_to_ids("a")], []]
    together, _ = grammars.masks([letters, digits], CLIENTS[:2], drafts)
    grammars._one_by_one = True
    assert (grammars.masks([letters, digits], CLIENTS[:2], drafts)[0] == together).all()
    letters.charge(10.0)
    words, _ = grammars.masks([letters, digits], CLIENTS[:2], drafts)
    assert not words[:2].any()
    assert (words[2] == together[2]).all()


def test_the_first_mask_of_a_grammar_is_computed_once(make_engine, tokenizer, monkeypatch) -> None:
    """Clients that come back with the same slow grammar, or with one schema for all requests, do not pay for it each time."""
    grammars = make_engine().grammars
    digits = StructuredOutput(regex="[0-9]{3}")
    words, _ = grammars.masks([grammars.matcher(digits)], CLIENTS[:1])

    def fill(rows: object, words: object) -> None:
        raise AssertionError("a mask is computed")

    monkeypatch.setattr(grammars, "_fill", fill)
    later = grammars.matcher(digits)
    assert (grammars.masks([later, later.deep_copy()], CLIENTS[:2])[0] == words).all()
    words[:] = 0
    assert grammars.masks([later], CLIENTS[:1])[0].any(), "the caller's array is not the one that is kept"
    later.consume_token(tokenizer.convert_tokens_to_ids("1"))
    with pytest.raises(AssertionError, match="a mask is computed"):
        grammars.masks([later], CLIENTS[:1])
    with pytest.raises(AssertionError, match="a mask is computed"):
        grammars.masks([grammars.matcher(StructuredOutput(regex="[0-8]{3}"))], CLIENTS[:1])


def test_a_grammar_whose_client_left_while_it_was_compiled_is_not_kept(make_engine, monkeypatch) -> None:
    """It takes up to `grammar_memory` bytes, and would stay for IDLE_SECONDS."""
    grammars = make_engine().grammars
    trial = SimpleNamespace(run=lambda _: b'{"error": "", "bytes": 1000000}', cancelled=False)
    compile_grammar = structured._compile

    def leaves(*arguments: object) -> object:
        trial.cancelled = True
        return compile_grammar(*arguments)

    monkeypatch.setattr(structured, "_compile", leaves)
    with pytest.raises(Cancelled):
        grammars.matcher(KINDS["regex"], trial)
    assert grammars.num_bytes == 0
    trial.cancelled = False
    monkeypatch.setattr(structured, "_compile", compile_grammar)
    grammars.matcher(KINDS["regex"], trial)
    assert grammars.num_bytes >= 1_000_000


def test_idle_grammars_are_let_go_of_but_for_a_small_part(make_engine, monkeypatch) -> None:
    grammars = make_engine(grammar_cache_bytes=64 << 20).grammars
    trial = SimpleNamespace(run=lambda _: b'{"error": "", "bytes": 700000}', cancelled=False)
    for count in range(1, 4):
        grammars.matcher(StructuredOutput(regex=f"[0-9]{{{count}}}"), trial)
    grammars.sweep()
    assert grammars.num_bytes > 3 * 700_000, "they have just been used"
    now = time.monotonic()
    monkeypatch.setattr(structured.time, "monotonic", lambda: now + structured.IDLE_SECONDS + 1)
    grammars.sweep()
    assert 700_000 < grammars.num_bytes <= 1 << 20, "a 64th of the bytes may stay"


class SlowMatcher(Matcher):
    """Each of its masks takes 0.6 s, which it is not charged for."""

    def fill(self, address: int, num_bytes: int) -> float:
        time.sleep(0.6)
        super().fill(address, num_bytes)
        return 0.6

    def charge(self, seconds: float, count: int = 1) -> None: ...

    def deep_copy(self) -> SlowMatcher:
        return SlowMatcher(self.inner.deep_copy())


def copies(matcher: Matcher, count: int) -> list[Matcher]:
    return [matcher.deep_copy() for _ in range(count)]


@pytest.mark.slow
def test_masks_of_one_client_do_not_wait_for_slow_ones_of_another(make_engine, monkeypatch) -> None:
    monkeypatch.setattr(structured, "MASKS_SECONDS", 0.5)
    grammars = make_engine().grammars
    fast = Matcher(grammars.matcher(StructuredOutput(regex="[0-9]{3}")).inner)
    slow = SlowMatcher(fast.inner)
    matchers = copies(slow, 5) + copies(fast, 3)
    expected, late = grammars.masks(copies(fast, 8), ["honest"] * 8)
    assert not late
    grammars._one_by_one = True
    clients = ["attacker"] * 5 + ["honest"] * 3
    assert grammars.masks(matchers, clients)[1] == [1, 2, 3, 4, 5, 6, 7], "nothing is known of the clients yet"
    for _ in range(3):
        words, late = grammars.masks(matchers, clients)
        assert late == [1, 2, 3, 4]
        assert not words[late].any()
        done = [0, 5, 6, 7]
        assert (words[done] == expected[done]).all()


@pytest.mark.slow
def test_side_by_side_no_more_than_a_slice_is_computed_after_slow_masks(make_engine, monkeypatch) -> None:
    grammars = make_engine().grammars
    matcher = grammars.matcher(StructuredOutput(regex="[0-9]{3}"))
    sizes = []
    fill = grammars._fill

    def slow_fill(rows, words) -> None:
        sizes.append(len(rows))
        time.sleep(1.1 if len(sizes) == 2 else 0.0)
        fill(rows, words)

    monkeypatch.setattr(grammars, "_fill", slow_fill)
    monkeypatch.setattr(structured, "SLOW_STEP_SECONDS", 1.0)
    monkeypatch.setattr(structured, "MASKS_SECONDS", 60.0)
    words, late = grammars.masks(copies(matcher, 100), [None] * 100)
    assert sizes == [8, 16], "the others are computed one by one"
    assert not late
    assert (words == words[0]).all()
    assert grammars._one_by_one


@pytest.mark.parametrize(("kind", "depth"), [*((kind, 1) for kind in each_nth(2, [*KINDS])), ("json_schema", 0)])
def test_answers_with_late_masks_are_the_same(with_end, monkeypatch, kind, depth) -> None:
    """Answers that wait for a mask sample the same tokens later; log-probabilities and penalties included."""
    more = {"n": 2, "max_tokens": 32, "logprobs": 2, "presence_penalty": 0.3, "prompt_logprobs": 1}
    wanted = [params(kind, seed=seed, **more) for seed in range(3)]
    wanted.append(SamplingParams(max_tokens=16, seed=7, frequency_penalty=0.2))
    prompts = [[5, 6, 7, 8, 9], [5, 6, 7, 8, 10, 11], [3], [4, 4]]
    expected = with_end(depth).generate(prompts, wanted)
    engine = with_end(depth)
    monkeypatch.setattr(structured, "MASKS_SECONDS", 0.0)  # one mask in a step
    engine.grammars._one_by_one = True
    monkeypatch.setattr(structured, "SLOW_STEP_SECONDS", -1.0)
    postponed = []
    monkeypatch.setattr(SequenceState, "postpone", counting(SequenceState.postpone, postponed))
    answers = engine.generate(prompts, wanted)
    assert [(x.token_ids, x.text, x.finish_reason) for x in answers] == [
        (x.token_ids, x.text, x.finish_reason) for x in expected
    ]
    for one, other in zip(answers, expected, strict=True):
        for mine, right in zip(one.logprobs or [], other.logprobs or [], strict=True):
            assert mine.logprob == pytest.approx(right.logprob, abs=1e-4)
    assert len(postponed) > 10
    engine.check_integrity()


def counting(function, calls):
    def counted(*arguments):
        calls.append(arguments)
        return function(*arguments)

    return counted


def test_a_mask_that_leaves_nothing_fails_its_request_alone(with_end) -> None:
    digits = tuple(range(2, VOCAB))
    bad = params("regex", bad_token_ids=digits)
    good, none = with_end(1).generate([[3], [4]], [SamplingParams(max_tokens=4, temperature=0.0), bad])
    assert (none.finish_reason, good.error) == ("error", None)
    assert none.error.code == "no_token_left"


def test_a_stack_that_cannot_be_had_is_not_every_threads(make_engine, monkeypatch) -> None:
    before = threading.stack_size()
    monkeypatch.setattr(structured.threading.Thread, "start", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make_engine().add_request("a", [1], params("regex"))
    assert threading.stack_size() == before


def test_parameters_cross_processes() -> None:
    for kind in KINDS:
        assert pickle.loads(pickle.dumps(params(kind))) == params(kind)


def test_streams_of_schemas_rejections_and_aborts() -> None:
    """In a thread. A process gets a structure in tests/security/test_health.py, and refuses one in test_errors.py."""

    async def collect(engine: AsyncEngine, name: str, wanted: SamplingParams) -> str:
        outputs = [output async for output in engine.generate("Say: ", wanted, name)]
        assert outputs[-1].finish_reason == "stop"
        return "".join(output.text for output in outputs)

    async def main() -> None:
        engine = AsyncEngine(EngineConfig(device="cpu", num_pages=64))
        await engine.start()
        kinds = ["json_schema", "choice", "grammar", "regex"]
        texts = await asyncio.gather(*(collect(engine, kind, params(kind, seed=0)) for kind in kinds))
        assert all(map(is_of_its_kind, kinds, texts)), texts
        with pytest.raises(ValueError, match="regex must be valid and satisfiable"):
            await collect(engine, "bad", SamplingParams(structured=StructuredOutput(regex="(")))
        # a request that leaves while its grammar is compiled
        task = asyncio.create_task(collect(engine, "left", params("json_schema")))
        await asyncio.sleep(0)
        task.cancel()
        assert is_of_its_kind("choice", await collect(engine, "next", params("choice")))
        assert (engine.stats().num_running, engine.stats().num_pages_used) == (0, 0)
        await engine.shutdown()

    asyncio.run(main())


AMBIGUOUS = 'start: s\ns: s s | s s s | s s s s | t\nt: t t | "a" | "b" | "ab"'


@pytest.mark.slow
def test_an_ambiguous_grammar_ends_when_its_masks_have_taken_too_long(with_end) -> None:
    """Behind a hundred tokens one mask takes 50 ms and more, and each step waits for it. All answers share the budget."""
    engine = with_end()
    slow = SamplingParams(
        max_tokens=120, structured=StructuredOutput(grammar=AMBIGUOUS), temperature=1.0, n=4, logit_bias={1: -100.0}
    )
    engine.add_request("slow", [5, 6], slow)
    engine.add_request("usual", [5, 6], params("json_schema"))
    ended = {}
    while engine.has_unfinished():
        for output in engine.step():
            if output.finished:
                ended[output.request_id, output.index] = output
    assert ended.pop(("usual", 0)).finish_reason == "stop"
    assert len(ended) == 4
    for output in ended.values():
        assert output.error is not None
        assert output.error.code == "grammar"
        assert "longer than usual" in output.error.message
        assert 1 < output.num_output_tokens < 120
    engine.check_integrity()


def test_an_answer_whose_matcher_gives_up_is_not_complete(with_end) -> None:
    """llguidance says of a matcher with an error that it has stopped. 10,000 choices have more items than it allows."""
    choices = StructuredOutput(choice=tuple(f"choice {i} {i * i}" for i in range(9_000)))
    answer = with_end().generate([[5, 6]], SamplingParams(max_tokens=50, structured=choices))[0]
    assert answer.finish_reason == "error"
    assert answer.error is not None
    assert answer.error.code == "grammar"


def test_numbers_that_llguidance_cannot_read_are_refused(make_engine) -> None:
    with pytest.raises(ParameterError, match="llguidance can read") as refused:
        make_engine().add_request("a", [5], SamplingParams(structured=StructuredOutput(json_schema={"minimum": -(10**300)})))
    assert refused.value.field == "structured"
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    "schema", [{"type": "nothing"}, {"type": "string", "minLength": 5, "maxLength": 2}], ids=["type", "none"]
)
@pytest.mark.parametrize("place", [0, 1])
def test_the_error_of_a_composed_grammar_is_that_of_the_part_to_blame(make_engine, schema, place: int) -> None:
    """Users have not seen the grammar, which is in neither the reason nor the value."""
    fine = {"type": "integer"}
    written = [json.dumps(each) for each in ((schema, fine) if place == 0 else (fine, schema))]
    text = f'start: first | second\nfirst: "<think>" %json {written[0]}\nsecond: %json {written[1]}'
    parts = tuple(StructuredOutput(json_schema=each) for each in written)
    grammars = make_engine().grammars
    with pytest.raises(ParameterError) as caught:
        grammars.matcher(ComposedGrammar(grammar=text, parts=parts), grammars.trial(parts[0]))
    assert (caught.value.field, caught.value.value) == ("json_schema", json.dumps(schema))
    assert "think" not in str(caught.value)
    whole = ComposedGrammar(grammar="start: missing", parts=parts[1 - place : 2 - place])
    with pytest.raises(ParameterError, match=r"grammar must be valid and satisfiable .*missing"):
        grammars.matcher(whole)
    grammars.close()
    assert pickle.loads(pickle.dumps(whole)) == whole
    assert (whole.kind, parts[0].kind) == ("grammar", "json_schema")
