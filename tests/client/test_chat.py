"""The chat command and its conversation, against a real server."""

import subprocess
import sys
from types import SimpleNamespace

import httpx
import pytest
from typer.testing import CliRunner

from fa_serve.__main__ import app
from fa_serve.client.chat import COMMANDS, ChatError, Conversation, talk
from fa_serve.client.failures import NO_KEY, refusal


def chat(served, *arguments, **options):
    return CliRunner().invoke(app, ["chat", *arguments, "--url", served.url], **options)


def test_a_conversation_in_the_terminal(served):
    answered = chat(served, "--temperature", "0", input="What is 17 + 25?\n\nNow 3 plus 4.\n/reset\n/help\n")
    assert (answered.exit_code, answered.stdout) == (0, f"17 + 25 = 42.\n3 + 4 = 7.\n{COMMANDS}\n")


def test_a_terminal_has_a_prompt(monkeypatch, capsys):
    lines = iter(["/help", "/reset"])
    shown = []

    def read(prompt):
        shown.append(prompt)
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", read)
    with Conversation("http://127.0.0.1:1") as conversation:
        talk(conversation)
    assert shown == ["> "] * 3
    assert capsys.readouterr().out == f"{COMMANDS}\n" * 2 + "\n"


@pytest.mark.slow
def test_one_question(served):
    command = [sys.executable, "-m", "fa_serve", "chat", "What is 17 + 25?", "--temperature", "0", "--url", served.url]
    answered = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (answered.returncode, answered.stdout) == (0, "17 + 25 = 42.\n")


def test_a_refusal_is_shown_in_the_servers_words(served):
    refused = chat(served, "Hi", "--model", "other")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "The model 'other' does not exist" in refused.stderr
    refused = chat(served, "--model", "other", input="Hi\n")
    assert refused.exit_code == 0, "a conversation goes on after an error"
    assert "The model 'other' does not exist" in refused.stderr


def test_a_command_without_a_key_is_told_where_it_goes():
    refused = httpx.Response(401, json={"error": {"message": "A valid API key is required."}})
    assert refusal(refused) == f"A valid API key is required. ({NO_KEY})"
    assert refusal(httpx.Response(404, json={"error": {"message": "No such model."}})) == "No such model."


def test_the_conversation_keeps_what_was_said_and_forgets_what_failed(served):
    with Conversation(served.url, system="Be brief.", temperature=0, max_completion_tokens=16) as conversation:
        answer = "".join(conversation.ask("What is 17 + 25?"))
        said = [message["content"] for message in conversation.messages]
        assert said == ["Be brief.", "What is 17 + 25?", answer]
        with pytest.raises(ChatError):
            list(conversation.ask("x" * 10_000))
        assert len(conversation.messages) == 3
        conversation.reset()
        assert [message["role"] for message in conversation.messages] == ["system"]


def test_a_server_that_cannot_be_reached():
    with Conversation("http://127.0.0.1:1") as conversation, pytest.raises(ChatError, match=r"127\.0\.0\.1:1"):
        list(conversation.ask("Hi"))
