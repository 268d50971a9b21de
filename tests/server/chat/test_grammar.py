"""Which answers a composed grammar accepts, token by token, if markers are text and if markers are special tokens."""

import json
import random
import re
import time

import pytest
from fa_serve.server.chat.conversation import Tool
from fa_serve.server.chat.grammar import ANY_TEXT, call_rules, compose, rule
from fa_serve.server.chat.tool_schemas import call_list_schema
from fa_serve.server.chat.tools import FORMATS, ToolFormat, ToolReader
from fa_serve.server.errors import BadRequest

from fa_serve.engine import StructuredOutput
from fa_serve.engine.request.params import MAX_STRUCTURED

llguidance = pytest.importorskip("llguidance")
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]")
DIGIT = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/D"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"D": {"enum": [1, 2]}},
}
TOOLS = [Tool(**{"type": "function", "function": {"name": name, "parameters": DIGIT}}) for name in ("f", "g")]
SCHEMA = StructuredOutput(json_schema=DIGIT)
F, G, H = (f'{{"name": "{name}", "arguments": {{"a": 1}}}}' for name in "fgh")
BAD = '{"name": "f", "arguments": {"a": 3}}'


@pytest.fixture(params=[False, True], ids=["text", "special"])
def accepts(request, engine):
    """`accepts(grammar, text)`: None if no answer begins with the text, else whether the text is a complete answer."""
    tokenizer = engine.tokenizer
    if request.param:
        tokenizer.add_special_tokens({"additional_special_tokens": list(MARKERS)})
    ids = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    tables = llguidance.LLTokenizer(tokenizer.backend_tokenizer.to_str(), eos_token=[tokenizer.eos_token_id])

    def check(grammar: str, text: str) -> bool | None:
        matcher = llguidance.LLMatcher(tables, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        tokens = tokenizer.encode(text)
        return matcher.is_accepting() if matcher.try_consume_tokens(tokens) == len(tokens) else None

    check.mark = ids.get
    return check


def held(accepts, style: ToolFormat, answer: StructuredOutput = ANY_TEXT, thoughts: bool | None = False, single=False) -> str:
    free = answer is ANY_TEXT
    start, rules = call_rules(style, TOOLS, single, accepts.mark, with_text=free)
    return (
        compose(start, rules, thoughts, accepts.mark)
        if free
        else compose(f"answer | {start}", [f"answer: {rule(answer)}", *rules], thoughts, accepts.mark)
    )


STYLES = {
    "hermes": (f"<tool_call>\n{F}\n</tool_call>", f"<tool_call>\n{BAD}", f"<tool_call>\n{H}", f"\n<tool_call>{G}</tool_call>"),
    "llama3_json": (
        F.replace("arguments", "parameters"),
        BAD.replace("arguments", "parameters"),
        H.replace("arguments", "parameters"),
        "; " + G.replace("arguments", "parameters"),
    ),
    "mistral": (f"[TOOL_CALLS][{F}]", f"[TOOL_CALLS][{BAD}]", f"[TOOL_CALLS][{H}]", None),
}


@pytest.mark.parametrize("style", STYLES)
def test_strict_calls_or_text(accepts, style):
    call, wrong, unknown, another = STYLES[style]
    grammar = held(accepts, FORMATS[style])
    texts = (call, wrong, unknown, "", "Hello, 1 < 2 [x].\n")
    assert [accepts(grammar, text) for text in texts] == [True, None, None, True, True]
    if style != "llama3_json":
        assert accepts(grammar, f"I see. {call}") is True
        assert accepts(grammar, f"I see. {wrong}") is None
    if another:
        assert accepts(grammar, call + another) is True
        assert accepts(held(accepts, FORMATS[style], single=True), call + another) is None
    [delta] = ToolReader(FORMATS[style], "fg").read(call, last=True)
    assert json.loads(delta["function"]["arguments"]) == {"a": 1}


@pytest.mark.parametrize("style", STYLES)
def test_an_answer_of_a_schema_or_calls(accepts, style):
    call, wrong, unknown, _ = STYLES[style]
    grammar = held(accepts, FORMATS[style], SCHEMA)
    texts = (call, '{"a": 2}', '{ "a":1 }', wrong, unknown, '{"a": 3}', "Hello", f"Hello {call}")
    assert [accepts(grammar, text) for text in texts] == [True, True, True, None, None, None, None, None]


@pytest.mark.parametrize(
    ("thoughts", "good", "bad"),
    [
        (True, ['Hm < 1 </x</think>\n{"a": 1}', '</think>{"a": 1}'], ['</think>{"a": 3}', "</think>Hm"]),
        (None, ['<think>Hm</think>\n\n{"a": 1}', '{"a": 1}'], ["Hm", "<think></think>Hm", '<think></think>{"a": 3}']),
        (False, ['{"a": 1}'], ["Hm", '<think></think>{"a": 1}']),
    ],
    ids=["opened", "own", "closed"],
)
def test_thoughts_are_free(accepts, thoughts, good, bad):
    grammar = compose("answer", [f"answer: {rule(SCHEMA)}"], thoughts, accepts.mark)
    assert [accepts(grammar, text) for text in good] == [True] * len(good)
    assert [accepts(grammar, text) for text in bad] == [None] * len(bad)
    assert accepts(grammar, good[0][:-1]) is False, "it is not complete"


@pytest.mark.parametrize(
    ("output", "good", "bad"),
    [
        (StructuredOutput(regex=r"a/\/[/\\]"), ["a//\\"], ["a/x"]),
        (StructuredOutput(regex="a\nb"), ["a\nb"], ["ab"]),
        (StructuredOutput(choice=('é"', "ab")), ['é"', "ab"], ["e"]),
        (StructuredOutput(json_object=True), ['{"x": [1]}'], ["[1]"]),
        (StructuredOutput(json_schema='{"enum": ["a/b"]}'), ['"a/b"'], ['"c"']),
    ],
    ids=["slashes", "newline", "choice", "object", "schema as text"],
)
def test_every_kind_of_answer_after_thoughts(accepts, output, good, bad):
    grammar = compose("answer", [f"answer: {rule(output)}"], None, accepts.mark)
    assert [accepts(grammar, f"<think>x</think>{text}") for text in good] == [True] * len(good)
    assert [accepts(grammar, f"<think>x</think>{text}") for text in bad] == [None] * len(bad)


def test_slashes_of_a_long_regular_expression_are_escaped_at_once():
    """What is escaped stays. 262,144 slashes took 40 ms of the event loop, and 16 MB of them two seconds."""
    draw = random.Random(0)
    for _ in range(300):
        regex = "".join(draw.choice("\\/\n.a") for _ in range(draw.randrange(1, 20)))
        expected = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], regex, flags=re.DOTALL)
        assert rule(StructuredOutput(regex=regex)) == f"/{expected}/".replace("\n", r"\n")
    slashes = StructuredOutput(regex="/" * MAX_STRUCTURED)
    begin = time.thread_time()
    rule(slashes)
    assert time.thread_time() - begin < 0.015


def test_schemas_of_tools_that_are_too_long_are_refused_before_they_are_copied():
    tools = [Tool(**{"type": "function", "function": {"name": "f", "parameters": {"enum": [1] * 200_000}}})]
    for make in (
        lambda: call_list_schema(tools, "parameters", True),
        lambda: call_rules(FORMATS["hermes"], tools, True, {}.get, True),
    ):
        with pytest.raises(BadRequest, match="at most 262144 characters in total") as error:
            make()
        assert error.value.param == "tools"


def test_numbers_of_schemas_are_followed_in_calls_and_formats_as_in_plain_schemas(accepts):
    """llguidance allows 0 in (0, 0.5)."""
    half = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5}
    parameters = {"type": "object", "properties": {"a": half}, "required": ["a"], "additionalProperties": False}
    tool = Tool(**{"type": "function", "function": {"name": "f", "parameters": parameters}})
    start, rules = call_rules(FORMATS["hermes"], [tool], True, accepts.mark, with_text=False)
    whole = compose(f"answer | {start}", [f"answer: {rule(StructuredOutput(json_schema=half))}", *rules], False, accepts.mark)
    call = '<tool_call>\n{{"name": "f", "arguments": {{"a": {}}}}}\n</tool_call>'
    assert [accepts(whole, call.format(number)) for number in ("0.25", "0", "0.0")] == [True, None, None]
    assert [accepts(whole, number) for number in ("0.25", "0", "0.0")] == [True, False, False], "an answer may begin with 0"
    assert half["exclusiveMinimum"] == 0, "the caller's schema stays as it is"
