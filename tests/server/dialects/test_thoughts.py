"""Thoughts on all three APIs, plain and streamed, with chat templates that open them, close them or only know them."""

import json
from typing import Any

import httpx
import pytest

MESSAGES = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}<|assistant|>"
OPENS = MESSAGES + "<think>\n"
OPENS_IF_ASKED = MESSAGES + "{{ '<think>' if enable_thinking else '' }}"
CLOSES = MESSAGES.replace("message.content ", "message.content.split('</think>')[-1] ")
KNOWS = "{# the model may write <think> #}" + MESSAGES
REST = ("One", " and\n", "</thi", "nk>", "\n\nFour", ".")  # of an answer whose thoughts are open
WHOLE = ("<thi", "nk>\n", *REST)

USER = [{"role": "user", "content": "Hi"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "fake", "messages": USER},
    "/v1/responses": {"model": "fake", "input": "Hi"},
    "/v1/messages": {"model": "fake", "messages": USER, "max_tokens": 50},
}


def plain(url: str, path: str, more: dict[str, Any]) -> tuple[str, str]:
    """The thoughts and the content of a plain reply."""
    reply = httpx.post(url + path, json=REQUESTS[path] | more).json()
    if path == "/v1/chat/completions":
        message = reply["choices"][0]["message"]
        return message.get("reasoning_content", ""), message["content"]
    if path == "/v1/responses":
        parts = {item["type"]: item["content"][0]["text"] for item in reply["output"]}
        return parts.get("reasoning", ""), parts["message"]
    parts = {block["type"]: block.get("text") or block.get("thinking") for block in reply["content"]}
    return parts.get("thinking", ""), parts["text"]


def streamed(url: str, path: str, more: dict[str, Any]) -> tuple[str, str]:
    """The same of a stream."""
    lines = httpx.post(url + path, json=REQUESTS[path] | more | {"stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    thoughts = answer = ""
    for event in events:
        if path == "/v1/chat/completions":
            delta = event["choices"][0]["delta"]
            thoughts += delta.get("reasoning_content", "")
            answer += delta.get("content", "")
        elif path == "/v1/responses":
            thoughts += event["delta"] if event["type"] == "response.reasoning_text.delta" else ""
            answer += event["delta"] if event["type"] == "response.output_text.delta" else ""
        else:
            thoughts += event.get("delta", {}).get("thinking", "")
            answer += event.get("delta", {}).get("text", "")
    return thoughts, answer


@pytest.mark.every_case
@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize(
    ("template", "words"),
    [
        pytest.param(OPENS, REST, id="opens"),
        pytest.param(OPENS_IF_ASKED, REST, id="opens if asked"),
        pytest.param(OPENS_IF_ASKED, WHOLE, id="opens if asked, the model opens"),
        pytest.param(CLOSES, WHOLE, id="closes"),
        pytest.param(KNOWS, WHOLE, id="knows"),
    ],
)
def test_thoughts_are_separated_whatever_tags_the_template_has(speaking, path, template, words) -> None:
    asks = template is OPENS_IF_ASKED and words is REST
    wishes = {
        "/v1/chat/completions": {"chat_template_kwargs": {"enable_thinking": asks}},
        "/v1/responses": {"reasoning": {"effort": "high" if asks else "none"}},
        "/v1/messages": {"thinking": {"type": "adaptive" if asks else "disabled"}},
    }
    more = wishes[path] if template is OPENS_IF_ASKED else {}
    url = speaking(*words, template=template)
    assert plain(url, path, more) == streamed(url, path, more) == ("One and", "Four.")


@pytest.mark.parametrize("path", REQUESTS)
def test_an_answer_that_is_cut_off_in_open_thoughts_is_all_thoughts(speaking, path) -> None:
    url = speaking("One", " and", " two", template=OPENS)
    more = {"/v1/chat/completions": "max_tokens", "/v1/responses": "max_output_tokens", "/v1/messages": "max_tokens"}
    assert streamed(url, path, {more[path]: 2}) == ("One and", "")


@pytest.mark.parametrize("path", REQUESTS)
def test_a_template_without_tags_has_no_thoughts(speaking, path) -> None:
    url = speaking(*WHOLE, template=MESSAGES)
    assert plain(url, path, {}) == streamed(url, path, {}) == ("", "".join(WHOLE))


@pytest.mark.parametrize("path", REQUESTS)
def test_a_closing_tag_that_is_a_special_token_is_seen(speaking, engine, path) -> None:
    """Only the template writes the opening tag, which is plain text in this vocabulary."""
    engine.tokenizer.add_special_tokens({"additional_special_tokens": ["</think>"]})
    url = speaking(*REST, template=OPENS)
    assert plain(url, path, {}) == ("One and", "Four.")
    assert engine.seen[-1].params.skip_special_tokens is False
