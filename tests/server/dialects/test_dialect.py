"""The parts of an answer, from the deltas that the reader of messages gives."""

from fa_serve.server.dialects.dialect import Parts, event


def call(arguments: str, name: str | None = None) -> dict:
    begin = {} if name is None else {"id": f"id-{name}", "type": "function"}
    return {"index": 0, **begin, "function": {"arguments": arguments} | ({} if name is None else {"name": name})}


def changes(*deltas: dict) -> list[tuple[str, str, str]]:
    parts = Parts()
    found = [change for delta in deltas for change in parts.read(delta)] + list(parts.end())
    return [(change, f"{part.kind}{part.number}", text) for change, part, text in found]


def test_a_part_begins_is_filled_and_ends_before_the_next_one() -> None:
    assert changes({"reasoning_content": "a"}, {"reasoning_content": "b", "content": "c"}, {"content": "d"}) == [
        ("begin", "thoughts0", ""),
        ("more", "thoughts0", "a"),
        ("more", "thoughts0", "b"),
        ("end", "thoughts0", ""),
        ("begin", "text1", ""),
        ("more", "text1", "c"),
        ("more", "text1", "d"),
        ("end", "text1", ""),
    ]


def test_the_rest_of_a_call_goes_to_this_call_although_text_follows_in_the_same_delta() -> None:
    found = changes({"tool_calls": [call("{", "add")]}, {"tool_calls": [call("}")], "content": "so"})
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
    for _ in parts.read({"tool_calls": [call("{}", "one"), call("", "two"), call("[]")]}):
        pass
    assert [(part.identity, part.name, part.text) for part in parts.all] == [("id-one", "one", "{}"), ("id-two", "two", "[]")]


def test_nothing_has_no_parts() -> None:
    assert changes({}, {"content": ""}) == []


def test_an_event_has_its_name_in_both_lines() -> None:
    assert event("ping", {"a": 1}) == b'ping\ndata: {"type":"ping","a":1}'
