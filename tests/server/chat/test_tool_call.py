"""A single tool call, one character at a time. Calls within texts are in test_tools.py."""

import time

import pytest
from fa_serve.server.chat.tool_call import CallParser, new_call


def parse(text: str, name: str | None = None) -> tuple[str | None, str, bool]:
    parser = CallParser(name)
    arguments = ""
    for character in text:
        parser.feed(character)
        arguments += parser.take_arguments()
    return parser.name, arguments, parser.complete


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"name": "f", "arguments": {"a": [1, "}"]}}', ("f", '{"a": [1, "}"]}', True)),
        ('{"arguments": {}, "name": "f"}', ("f", "{}", True)),
        ('{"name": "f"}', ("f", "{}", True)),
        ('{"name": "f", "arguments": null}', ("f", "{}", True)),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', ("f", '{"a": 1}', True)),
        ('{"name": "f", "parameters": {"a": 1', ("f", '{"a": 1', False)),
        ('{"id": "x", "type": "function", "name": "f", "arguments": {}}', ("f", "{}", True)),
    ],
)
def test_calls(text, found):
    assert parse(text) == found


def test_arguments_of_a_known_name():
    assert parse('{"a": 1}', "f") == ("f", '{"a": 1}', True)


@pytest.mark.parametrize(
    "text",
    ['{"name": 1}', '{"other": 1}', "{name: 1}", '{"name": "f"]', '{"arguments": {}}', '{"arguments": {}, "parameters": {}}'],
)
def test_what_is_no_call_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"."):
        parse(text)


def test_ids_differ():
    assert new_call(0, "f")["id"] != new_call(0, "f")["id"]
    assert new_call(0, "f")["id"].startswith("call_")
    assert len(new_call(0, "f", 9)["id"]) == 9


def test_the_time_is_linear_in_the_text():
    """Characters were appended to a text that was copied each time: 800,000 of them took ten seconds."""
    for text in ('{"name": "f", "arguments": {"a": "' + "a" * 800_000, '{"name": "f", "arguments": ' + "[" * 800_000):
        parser = CallParser()
        begin = time.thread_time()
        for character in text:
            parser.feed(character)
        assert time.thread_time() - begin < 1.5
        assert len(parser.take_arguments()) > 800_000 - 1
        assert parser.take_arguments() == ""
