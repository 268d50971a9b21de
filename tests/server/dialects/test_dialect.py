"""The parts of an answer, from what the reader of messages returns."""

import pytest
from fa_serve.server.chat.messages import MessageReader
from fa_serve.server.chat.reasoning import ThoughtReader
from fa_serve.server.chat.tools import FORMATS, ToolReader
from fa_serve.server.dialects.dialect import Parts, event


def call(arguments: str, name: str | None = None) -> dict:
    begin = {} if name is None else {"id": f"id-{name}", "type": "function"}
    return {"index": 0, **begin, "function": {"arguments": arguments} | ({} if name is None else {"name": name})}


def changes(*outputs: tuple[str, list]) -> list[tuple[str, str, str]]:
    parts = Parts()
    found = [change for output in outputs for change in parts.read(*output)] + list(parts.end())
    return [(change, f"{part.kind}{part.number}", text) for change, part, text in found]


def test_a_part_begins_is_filled_and_ends_before_the_next_one() -> None:
    assert changes(("a", []), ("b", ["c"]), ("", ["d"])) == [
        ("begin", "thoughts0", ""),
        ("more", "thoughts0", "a"),
        ("more", "thoughts0", "b"),
        ("end", "thoughts0", ""),
        ("begin", "text1", ""),
        ("more", "text1", "c"),
        ("more", "text1", "d"),
        ("end", "text1", ""),
    ]


def test_the_rest_of_a_call_goes_to_this_call_although_text_follows_in_the_same_output() -> None:
    found = changes(("", [call("{", "add")]), ("", [call("}"), "so"]))
    assert found == [
        ("begin", "call0", ""),
        ("more", "call0", "{"),
        ("more", "call0", "}"),
        ("end", "call0", ""),
        ("begin", "text1", ""),
        ("more", "text1", "so"),
        ("end", "text1", ""),
    ]


def test_each_call_is_a_part() -> None:
    parts = Parts()
    for _ in parts.read("", [call("{}", "one"), call("", "two"), call("[]")]):
        pass
    assert [(part.identity, part.name, part.text) for part in parts.all] == [("id-one", "one", "{}"), ("id-two", "two", "[]")]


def test_nothing_has_no_parts() -> None:
    assert changes(("", []), ("", [])) == []


@pytest.mark.parametrize("size", [1, 2, 7, 50, 1000])
def test_the_order_of_texts_and_calls_does_not_depend_on_where_the_answer_is_cut(size: int) -> None:
    """An output has many tokens if drafts are accepted, or if the client or the server is slow."""
    calls = [f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>' for name in ("one", "two")]
    answer = f"<think>Hm</think>First {calls[0]} then {calls[1]} and done."
    reader = MessageReader(ThoughtReader(None), ToolReader(FORMATS["hermes"], ["one", "two"]))
    parts = Parts()
    for begin in range(0, len(answer), size):
        list(parts.read(*reader.pieces(answer[begin : begin + size], begin + size >= len(answer))))
    found = [part.name or part.text for part in parts.all]
    assert found == ["Hm", "First", "one", "then", "two", "and done."]


def test_an_event_has_its_name_in_both_lines() -> None:
    assert event("ping", {"a": 1}) == b'ping\ndata: {"type":"ping","a":1}'
