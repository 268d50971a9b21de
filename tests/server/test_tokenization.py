"""Prompts as token ids, and conversations through the server's chat template."""

import pytest
from fa_serve.server.tokenization import MAX_TEMPLATES

pytestmark = pytest.mark.anyio


TEXT = {"model": "fake", "prompt": "Hi"}


async def test_a_text_that_cannot_fit_is_refused_unread(serving, engine):
    engine.tokenizer.backend_tokenizer.post_processor = (
        None  # the longest token has 13 characters, and a prompt at most 64 tokens
    )
    async with serving() as client:
        response = await client.post("/v1/completions", json=TEXT | {"prompt": "x" * (64 * 13 + 1)})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "832" in response.json()["error"]["message"]


async def test_the_chat_template_of_the_operator_or_of_the_request_is_used(serving, engine, tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text("operator: {{ messages[0].content }}")
    body = {"messages": [{"role": "user", "content": "Hi"}]}

    async def prompt(client, **fields):
        tokens = (await client.post("/tokenize", json=body | fields)).json()["tokens"]
        return engine.tokenizer.decode(tokens)

    async with serving(chat_template=path, allow_request_chat_template=True) as client:
        assert await prompt(client) == "operator: Hi"
        assert await prompt(client, chat_template="request: {{ messages[0].content }}") == "request: Hi"
    engine.tokenizer.chat_template = None
    async with serving() as client:
        response = await client.post("/tokenize", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")


async def test_parsed_templates_are_bounded(serving, engine):
    async with serving(allow_request_chat_template=True) as client:
        for number in range(2 * MAX_TEMPLATES):
            body = {"messages": [{"role": "user", "content": "Hi"}], "chat_template": f"{number}"}
            assert (await client.post("/tokenize", json=body)).status_code == 200
        assert client.service.tokenization._parsed.cache_info().currsize == MAX_TEMPLATES


async def test_a_template_that_makes_half_of_a_surrogate_pair_is_refused(serving, engine):
    body = {"messages": [{"role": "user", "content": "Hi"}], "chat_template": "{{ '\\ud800' }}"}
    async with serving(allow_request_chat_template=True) as client:
        response = await client.post("/tokenize", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{% for message in messages %}{{ message.content }}", "is not valid|Unexpected end of template"),
        ("{{ messages[0].text.upper() }}", "has no attribute"),
        ("{{ raise_exception('never') }}", "never"),
        ("{% if messages is none %}x{% endif %}", "makes nothing"),
    ],
    ids=["syntax", "a field that is not there", "refuses everything", "ignores the message"],
)
async def test_a_broken_chat_template(serving, tmp_path, text, said):
    """The application of these settings does not become ready, and its process ends."""
    (tmp_path / "template").write_text(text)
    with pytest.raises(ValueError, match=said) as error:
        async with serving(chat_template=tmp_path / "template"):
            pass
    assert str(tmp_path / "template") in str(error.value)


async def test_a_chat_template_that_does_not_end(serving, tmp_path):
    loops = "".join("{% for _ in range(100) %}" for _ in range(3)) + "x" + "{% endfor %}" * 3
    (tmp_path / "template").write_text(loops * 10)
    with pytest.raises(ValueError, match=r"must end within 0\.2 s"):
        async with serving(chat_template=tmp_path / "template", template_timeout=0.2):
            pass


@pytest.mark.parametrize(
    "text", ["{{ messages[0].content }}", "{{ messages[0].content[0].text }}", "{{ messages[1].content }}"]
)
async def test_a_chat_template_for_one_kind_of_conversation_is_enough(serving, tmp_path, text):
    (tmp_path / "template").write_text(text)
    async with serving(chat_template=tmp_path / "template") as client:
        assert (await client.get("/ready")).status_code == 200
