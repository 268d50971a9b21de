"""Chat templates that read contents as parts get parts, and all others the strings that they have always got."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fa_serve.server.chat.content_forms import PROBE, STRINGS, ContentForms, find_forms, shows_probe
from fa_serve.server.chat.conversation import Message
from fa_serve.server.chat.special_tokens import SpecialTokens
from fa_serve.server.chat.templates import Template
from image_models import TEMPLATE as BOTH
from tiny_models import make_tokenizer

pytestmark = pytest.mark.anyio
EACH = "{% for message in messages %}"
# in the manner of LLaVA 1.5: first the images of a message, then its texts
LLAVA = (
    EACH + "{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
# in the manner of SmolVLM: part after part, and the first one is looked at
SMOLVLM = (
    "<|im_start|>" + EACH + "{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
CHATML = (
    EACH + "<|im_start|>{{ message.role }}\n{{ message.content }}{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = {
    "chatml": CHATML,
    "trim": CHATML.replace("message.content", "message.content | trim"),
    "capitals": CHATML.replace("message.content", "message.content | upper"),
    "json": CHATML.replace("message.content", "message.content | tojson"),
    "letters": CHATML.replace("{{ message.content }}", "{% for letter in message.content %}{{ letter }}{% endfor %}"),
    "no-system": "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML,
    "system-first": "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML,
    "drops-system": CHATML.replace(EACH, EACH + "{% if message.role != 'system' %}").replace(
        "\n{% endfor %}", "\n{% endif %}{% endfor %}"
    ),
    "thoughts": CHATML.replace("message.content", "message.content.split('</think>')[-1]"),
    "both": BOTH,
    "nothing": "{{ bos_token }}",
    "broken": "{{ messages[0].content.a.b }}",
}
"""Templates that are written for strings, and one that takes both."""
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Is it "}, {"type": "text", "text": "a cat?"}]},
    {"role": "assistant", "content": "A red cat"},
    {"role": "user", "content": "Are you sure?"},
]
IMAGE = {"type": "image_url", "image_url": {"url": "data:x"}}
CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def template_of(text: str) -> Template:
    return Template(make_tokenizer(), text, SimpleNamespace(max_chars=10_000))


def written(text: str, messages: list[dict[str, Any]]) -> str:
    """The prompt, as the server makes it."""
    template = template_of(text)
    forms = template.forms()
    return template.render([_message(each).rendered(forms.in_parts(each["role"])) for each in messages], None, {})


def _message(fields: dict[str, Any]) -> Message:
    return Message.model_validate(fields)


def test_templates_of_parts_get_every_text() -> None:
    """Before, a string was gone through as if it had parts: 'USER: ASSISTANT: USER: ASSISTANT:', and no error."""
    assert written(LLAVA, CONVERSATION) == ("Be brief. USER: Is it  a cat? ASSISTANT: A red cat USER: Are you sure? ASSISTANT:")
    assert written(SMOLVLM, CONVERSATION) == (
        "<|im_start|>System: Be brief.<end_of_utterance>\nUser: Is it a cat?<end_of_utterance>\n"
        "Assistant: A red cat<end_of_utterance>\nUser: Are you sure?<end_of_utterance>\nAssistant:"
    )


def test_texts_around_an_image_are_written() -> None:
    turns = [{"role": "user", "content": [IMAGE, {"type": "text", "text": "What?"}]}, *CONVERSATION[2:]]
    assert written(LLAVA, turns) == "USER: <image>\nWhat? ASSISTANT: A red cat USER: Are you sure? ASSISTANT:"
    assert written(SMOLVLM, turns) == (
        "<|im_start|>User:<image>What?<end_of_utterance>\nAssistant: A red cat<end_of_utterance>\n"
        "User: Are you sure?<end_of_utterance>\nAssistant:"
    )


@pytest.mark.parametrize("name", TEXTS)
def test_templates_of_strings_get_what_they_have_always_got(name: str) -> None:
    forms = template_of(TEXTS[name]).forms()
    for role in ("user", "system", "assistant", "tool", "critic"):
        assert not forms.in_parts(role), role


def test_a_conversation_of_texts_is_written_as_before() -> None:
    strings = [{"role": each["role"], "content": Message.model_validate(each).rendered()["content"]} for each in CONVERSATION]
    assert all(isinstance(each["content"], str) for each in strings)
    expected = make_tokenizer().apply_chat_template(strings, chat_template=CHATML, tokenize=False, add_generation_prompt=True)
    assert written(CHATML, CONVERSATION) == expected
    assert written(BOTH, CONVERSATION[1:2]) == "user: Is it a cat?\nassistant: "


PARTS_OF = "{% for part in message.content %}{{ part.text }}{% endfor %}"
BY_ROLE = (
    EACH + "[{{ message.role }}]{% if message.role == 'ROLE' %}" + PARTS_OF + "{% else %}{{ message.content }}{% endif %}"
    "{{ message.tool_calls }}{% endfor %}"
)


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_a_template_may_read_one_role_in_another_form(role: str) -> None:
    forms = template_of(BY_ROLE.replace("ROLE", role)).forms()
    for other in ("user", "system", "assistant", "tool"):
        assert forms.in_parts(other) == (other == role), other
    assert forms.in_parts("critic") == (role == "user"), "a role that no template is known to have is like the user's"


def test_an_empty_text_of_an_assistant_with_calls_has_a_part() -> None:
    """SmolVLM's template reads the first part of each message."""
    turns = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call00001", "content": "a cat"},
    ]
    assert written(SMOLVLM + "{# tool_calls #}", turns) == (
        "<|im_start|>User: Look.<end_of_utterance>\nAssistant: <end_of_utterance>\nTool: a cat<end_of_utterance>\nAssistant:"
    )


def test_images_in_results_of_tools_are_tried() -> None:
    assert template_of(LLAVA).writes_tool_images("<image>")
    assert template_of(BOTH).writes_tool_images("<image>")
    assert not template_of(CHATML).writes_tool_images("<image>")
    assert not template_of(LLAVA).writes_tool_images("<IMAGE>"), "letters of a token are not those of another case"


def test_what_follows_a_message_of_the_assistant() -> None:
    """The end of a turn is looked for in the form that the template reads."""
    assert template_of(SMOLVLM).closing() == "<end_of_utterance>\n"
    assert template_of(CHATML).closing() == "<|im_end|>\n"


def test_names_of_types_stay_when_special_tokens_begin_with_their_letters() -> None:
    turns = [{"role": "user", "content": [{"type": "text", "text": "<s> or [text] or text tokens?"}]}]
    template = template_of(SMOLVLM)
    for names in (["<s>"], ["text tokens", "image tokens", "<s>"]):
        prompt = SpecialTokens(names).apply(template.render, turns, None, {})
        assert prompt.text == "<|im_start|>User: <s> or [text] or text tokens?<end_of_utterance>\nAssistant:"
        assert [prompt.text[begin:end] for begin, end in prompt.plain] == [n for n in ("<s>", "text tokens") if n in names]


def test_the_word_of_a_probe() -> None:
    assert shows_probe(f"<{PROBE.upper()}>")
    assert not shows_probe("Xylo")
    assert not shows_probe(None)
    assert find_forms(lambda groups: [None] * len(groups)) == STRINGS
    assert ContentForms({"user": True}).content("system", "a") == [{"type": "text", "text": "a"}]
    assert STRINGS.content("system", "a") == "a"


USER = {"role": "user", "content": "What is 17 + 25?"}


@pytest.mark.usefixtures("warm_trials")
@pytest.mark.parametrize("of_request", [False, True], ids=["model", "request"])
@pytest.mark.parametrize("text", [LLAVA, SMOLVLM], ids=["llava", "smolvlm"])
async def test_two_questions_are_two_prompts(teller, engine, text: str, of_request: bool) -> None:
    """Over HTTP: /tokenize gave the same tokens for all questions, and chats an answer to an empty prompt."""
    more = {"chat_template": text} if of_request else {}
    async with teller(("a",), CHATML if of_request else text, allow_request_chat_template=True) as client:
        found = []
        for question in ("What is it?", "Who was it?"):
            turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
            reply = await client.post("/tokenize", json={"messages": turns, **more})
            found.append(engine.tokenizer.decode(reply.json()["tokens"]))
            assert question in found[-1]
            assert "Be brief." in found[-1]
        body = {"model": "fake", "messages": [USER], **more}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert USER["content"] in engine.tokenizer.decode(engine.seen[-1].prompt)


LOSES = {
    "nothing": "BOS{% if tools %}{{ messages }}{% endif %}",
    "other-parts": EACH + "USER: {% for part in message.content %}{{ part.words }}{% endfor %}{% endfor %}ASSISTANT:",
    "roles": EACH + "{{ message.role }}: {% endfor %}",
}


@pytest.mark.parametrize("name", LOSES)
async def test_a_template_that_loses_texts_is_refused_with_a_sentence(teller, caplog, name: str) -> None:
    """Before, it answered to an empty prompt."""
    async with teller(("a",), LOSES[name]) as client:
        assert "it leaves out the text of a message that says Xylophone" in caplog.text
        reply = await client.post("/v1/chat/completions", json={"model": "fake", "messages": [USER]})
        assert (reply.status_code, reply.json()["error"]["code"]) == (501, "broken_chat_template")
        assert "leaves out the text of a message" in reply.json()["error"]["message"]
        if name == "nothing":  # which writes all with tools
            tools = [{"type": "function", "function": {"name": "add"}}]
            body = {"model": "fake", "messages": [USER], "tools": tools, "tool_choice": "required"}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


async def test_an_operators_template_that_loses_texts_ends_the_start(teller, tmp_path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(LOSES["other-parts"])
    with pytest.raises(ValueError, match="it leaves out the text of a message that says Xylophone"):
        async with teller(("a",), chat_template=str(path)):
            pass


@pytest.mark.parametrize(
    ("name", "template", "expected"),
    [
        *((name, template, name == "both") for name, template in TEXTS.items()),
        ("llava", LLAVA, True),
        ("smolvlm", SMOLVLM, True),
        ("llava without images", LLAVA.replace("<image>", ""), False),
        (
            "else",
            EACH + "{% for x in message.content %}{{ x.text if x.type == 'text' else '<image>' }}{% endfor %}{% endfor %}",
            True,
        ),
    ],
)
def test_places_of_images_are_found(name: str, template: str, expected: bool) -> None:
    """A template that expects a string writes the list of parts, which is no place."""
    found = template_of(template)
    assert not found.writes_images, "nothing is known yet"
    found.learn()
    assert found.writes_images is expected
