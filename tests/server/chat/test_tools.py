"""Tool calls in texts as models write them, cut at every position: the result does not depend on the cuts."""

import time

import pytest
from fa_serve.server.chat.tools import FORMATS, REQUIRED, ToolReader, detect_format
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled_cases import examples

OFFERED = ("get_weather", "add")


PARIS = '{"city": "Paris \\"]}\\u00e9", "days": [1, {"x": "{"}]}'


def read(style: str, *pieces: str, single: bool = False) -> tuple[str, list[tuple[str, str]]]:
    """The content and the name and arguments of each call, assembled from the deltas as a client does."""
    reader = ToolReader(FORMATS.get(style, REQUIRED), OFFERED, single)
    content = ""
    calls = {}
    for position, piece in enumerate(pieces):
        for delta in reader.read(piece, last=position + 1 == len(pieces)):
            if isinstance(delta, str):
                content += delta
                continue
            if delta["index"] not in calls:
                assert delta["index"] == len(calls)
                assert delta["type"] == "function"
                calls[delta["index"]] = [delta["id"], delta["function"]["name"], ""]
            else:
                assert not delta.keys() & {"id", "type"}
            calls[delta["index"]][2] += delta["function"]["arguments"]
    assert len({identity for identity, _, _ in calls.values()}) == len(calls)
    assert reader.num_calls >= len(calls)
    return content, [(name, arguments) for _, name, arguments in calls.values()]


def call(name: str = "get_weather", arguments: str = PARIS, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


ADD = ("add", '{"a": 1, "b": 2}')


TEXTS = [
    pytest.param("hermes", f"<tool_call>\n{call()}\n</tool_call>", "", [("get_weather", PARIS)], id="hermes"),
    pytest.param(
        "hermes",
        f"I shall look.\n\n<tool_call>\n{call()}\n</tool_call>\n<tool_call>\n{call(*ADD)}\n</tool_call>\n",
        "I shall look.",
        [("get_weather", PARIS), ADD],
        id="hermes, two after a word",
    ),
    pytest.param("hermes", f"<tool_call>{call(*ADD)}</tool_call> done. ", "done.", [ADD], id="hermes, a word after"),
    pytest.param("hermes", f"<tool_call>\n{call(*ADD)}\n<tool_call>\n{call(*ADD)}", "", [ADD, ADD], id="hermes, never closed"),
    pytest.param(
        "hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')], id="swapped"
    ),
    pytest.param(
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("f", '{"a": 1}')],
        id="arguments as a string",
    ),
    pytest.param(
        "hermes",
        '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g", "arguments": null}</tool_call>',
        "",
        [("f", "{}"), ("g", "{}")],
        id="no arguments",
    ),
    pytest.param("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1', "", [("add", '{"a": 1')], id="cut off"),
    pytest.param("hermes", '<tool_call>{"na', '<tool_call>{"na', [], id="cut off before its name"),
    pytest.param("hermes", "<tool_call>\nadd(1, 2)\n</tool_call>", "<tool_call>\nadd(1, 2)\n</tool_call>", [], id="no JSON"),
    pytest.param("hermes", '<tool_call>{"name": 1}</tool_call>', '<tool_call>{"name": 1}</tool_call>', [], id="no name"),
    pytest.param("hermes", "<tool_call></tool_call> ", "<tool_call></tool_call> ", [], id="empty"),
    pytest.param("hermes", " 1 < 2, <tool>, <tool_cal ", " 1 < 2, <tool>, <tool_cal ", [], id="hermes, words"),
    pytest.param("llama3_json", call(key="parameters"), "", [("get_weather", PARIS)], id="llama"),
    pytest.param("llama3_json", f"\n<|python_tag|>{call(*ADD, key='parameters')}", "", [ADD], id="llama, tagged"),
    pytest.param(
        "llama3_json",
        f"{call(*ADD, key='parameters')}; {call(key='parameters')}",
        "",
        [ADD, ("get_weather", PARIS)],
        id="llama, two",
    ),
    pytest.param("llama3_json", '{"type": "function", "name": "add", "parameters": {}}', "", [("add", "{}")], id="llama, type"),
    pytest.param("llama3_json", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', [], id="other name"),
    pytest.param("llama3_json", '<|python_tag|>{"name": "Bob", "parameters": {}}', "", [("Bob", "{}")], id="tagged, other"),
    pytest.param("llama3_json", ' {"answer": [1, 2]}\n', ' {"answer": [1, 2]}\n', [], id="llama, JSON that is no call"),
    pytest.param("llama3_json", f"See: {call(*ADD)}", f"See: {call(*ADD)}", [], id="llama, not at the start"),
    pytest.param("llama3_json", f"{call(*ADD)}; {{1}} ", "{1}", [ADD], id="llama, then rubbish"),
    pytest.param("mistral", f"[TOOL_CALLS] [{call()}, {call(*ADD)}]", "", [("get_weather", PARIS), ADD], id="mistral, list"),
    pytest.param("mistral", f"[TOOL_CALLS]{call(*ADD)}", "", [ADD], id="mistral, object"),
    pytest.param(
        "mistral",
        f"Yes [1].[TOOL_CALLS]add[ARGS]{ADD[1]}[TOOL_CALLS]get_weather{PARIS}",
        "Yes [1].",
        [ADD, ("get_weather", PARIS)],
        id="mistral, names",
    ),
    pytest.param("mistral", f"[TOOL_CALLS]add[CALL_ID]abcDEF123[ARGS]{ADD[1]}", "", [ADD], id="mistral, id"),
    pytest.param("mistral", "[TOOL_CALLS]a b {", "[TOOL_CALLS]a b {", [], id="mistral, no call"),
    pytest.param(
        "required",
        f"[{call(*ADD, key='parameters')}, {call(key='parameters')}]",
        "",
        [ADD, ("get_weather", PARIS)],
        id="required",
    ),
    pytest.param("required", '[{"name": "add", "parameters": {"a": 1', "", [("add", '{"a": 1')], id="required, cut off"),
    pytest.param("required", '[{"name": "ad', "", [], id="required, cut off before its name"),
    pytest.param(
        "required", f'[{call(*ADD, key="parameters")}, {{"na', "", [ADD], id="required, cut off before the second name"
    ),
]


@pytest.mark.parametrize(("style", "text", "content", "calls"), TEXTS)
def test_tool_calls_wherever_the_text_is_cut(style, text, content, calls):
    assert read(style, text) == (content, calls)
    assert read(style, *text) == (content, calls)
    assert read(style, text, "") == (content, calls)
    for cut in range(1, len(text)):
        assert read(style, text[:cut], text[cut:]) == (content, calls), text[:cut]


SCRAPS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "{",
        "}",
        "[",
        "]",
        '"name": ',
        '"add"',
        ", ",
        "; ",
        '"arguments": ',
        '"parameters": ',
        '"',
        "\\",
        "\n",
        " ",
        "a",
        "<",
        "null",
        "1",
        '{"name": "add"',
        ', "arguments": {"a": 1}}',
    ]
)


@given(style=st.sampled_from([*FORMATS, "required"]), scraps=st.lists(SCRAPS, max_size=12), cut=st.integers(1, 60))
@settings(max_examples=examples(150), deadline=None)
def test_rubbish_is_read_alike_wherever_it_is_cut(style, scraps, cut):
    text = "".join(scraps)
    whole = read(style, text)
    assert read(style, *text, "") == whole
    assert read(style, text[:cut], text[cut:]) == whole
    if not whole[1] and style != "required":
        assert whole[0] == text, "without a call the content is the text; with a grammar it is a call that was cut off"


def test_arguments_stream_as_they_come():
    reader = ToolReader(FORMATS["hermes"], OFFERED)
    assert reader.read('Now <tool_call>{"name": "ad') == ["Now"]
    [first] = reader.read('d", "arguments": {"a": ')
    assert first["function"] == {"name": "add", "arguments": '{"a": '}
    assert reader.read("1") == [{"index": 0, "function": {"arguments": "1"}}]


def test_one_call_alone_and_ids():
    assert read("hermes", *f"<tool_call>{call(*ADD)}</tool_call><tool_call>{call()}</tool_call>", single=True) == ("", [ADD])
    [delta] = ToolReader(FORMATS["mistral"], OFFERED).read(f"[TOOL_CALLS][{call(*ADD)}]", last=True)
    assert (len(delta["id"]), delta["id"].isalnum()) == (9, True), "Mistral's templates check it"


TEMPLATES = {
    "hermes": "Answer in <tool_call>{'name': ...}</tool_call>{% if tools %}{% endif %}",
    "mistral": "{{ '[AVAILABLE_TOOLS]' }}{{ '[TOOL_CALLS]' }}",
    "llama3_json": '<|start_header_id|>system<|end_header_id|>{"name": name, "parameters": values}',
}


def test_the_format_is_the_one_that_the_template_teaches():
    assert {name: detect_format(template) for name, template in TEMPLATES.items()} == FORMATS
    assert detect_format("<tool_call><function=add>") is None, "XML is not ours"
    assert detect_format("<|start_header_id|>") is None


@pytest.mark.parametrize(
    ("style", "unit"),
    [
        ("hermes", "<tool_call>"),
        ("mistral", "[TOOL_CALLS]"),
        ("hermes", "<tool_call>\n{x}"),
        ("mistral", "[TOOL_CALLS]add[ARGS]x "),
    ],
)
def test_a_hundred_thousand_markers_are_read_in_linear_time(style, unit):
    """They take 0.4 s of a processor at most, and took 5 to 20 s."""
    text = (unit * 100_000).rstrip()
    begin = time.thread_time()
    assert read(style, text) == (text, [])
    assert time.thread_time() - begin < 3
