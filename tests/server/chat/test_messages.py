"""Generated text as the fields of a message, for streams and plain replies."""

from fa_serve.server.chat.messages import MessageReader
from fa_serve.server.chat.reasoning import ThoughtReader
from fa_serve.server.chat.tools import FORMATS, ToolReader

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def reader(**changes):
    parts = {"thoughts": ThoughtReader(None), "tools": ToolReader(FORMATS["hermes"], ["add"])} | changes
    return MessageReader(**parts)


def test_a_whole_message():
    read = reader()
    message = read.whole(f"<think>Hm</think>I add. {CALL}")
    [call] = message.pop("tool_calls")
    assert message == {"role": "assistant", "content": "I add.", "refusal": None, "reasoning_content": "Hm"}
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert "index" not in call
    assert (read.finish_reason("stop"), read.finish_reason("length")) == ("tool_calls", "length")


def test_deltas_have_only_what_is_new():
    read = reader()
    assert read.read("<think>Hm") == {"reasoning_content": "Hm"}
    assert read.read("</think>") == {}
    assert read.read("Four.") == {"content": "Four."}
    assert read.read("", last=True) == {}
    assert read.finish_reason("stop") == "stop"


def test_an_answer_without_text_has_empty_content():
    assert reader(thoughts=None, tools=None).whole("") == {"role": "assistant", "content": "", "refusal": None}


def test_the_arguments_of_a_named_function_are_one_call():
    read = MessageReader(function="add", id_length=9)
    [first] = read.read('{"a"')["tool_calls"]
    [second] = read.read(": 1}", last=True)["tool_calls"]
    assert (first["function"]["name"], len(first["id"])) == ("add", 9)
    assert first["function"]["arguments"] + second["function"]["arguments"] == '{"a": 1}'
    assert "id" not in second
    assert read.finish_reason("stop") == "stop", "OpenAI says stop for a named function"
