"""Chats end at the token with which the chat template ends messages, whatever the model's files name as the end."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import httpx
import pytest
from fa_serve.server.app import create_app
from fa_serve.server.settings import Settings

from fa_serve.demo import model_path
from fa_serve.engine import AsyncEngine, EngineConfig

END = 2
MESSAGES = [{"role": "user", "content": "What is 17 + 25?"}]
CHATS = [
    ("/v1/chat/completions", {"messages": MESSAGES, "temperature": 0, "max_tokens": 24}),
    ("/v1/responses", {"input": "What is 17 + 25?", "temperature": 0, "max_output_tokens": 24}),
    ("/v1/messages", {"messages": MESSAGES, "temperature": 0, "max_tokens": 24}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model, whose generation_config.json names <|endoftext|> alone."""
    path = tmp_path_factory.mktemp("ends") / "model"
    shutil.copytree(model_path(), path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "pad_token_id": 0}))
    return path


@pytest.mark.slow
@pytest.mark.usefixtures("warm_engine_processes")
@pytest.mark.parametrize("process", [False, True], ids=["thread", "process"])
def test_every_chat_ends_there_and_completions_do_not(folder, process) -> None:
    async def main() -> None:
        config = EngineConfig(model=str(folder), device="cpu", dtype="float32", num_pages=128, process=process)
        app = create_app(AsyncEngine(config), Settings())
        opened = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
        async with app.router.lifespan_context(app), opened as client:
            await app.state.service.loaded()
            assert app.state.service.engine.eos_ids == {0}
            assert app.state.service.tokenization.chat_end == END
            for path, body in CHATS:
                for stream in (False, True):
                    text = (await client.post(path, json={"model": "model", "stream": stream, **body})).text
                    assert stream or "42." in text
                    assert any(end in text for end in ('"finish_reason":"stop"', '"status":"completed"', '"end_turn"')), text
                    assert "im_end" not in text
            chat = {"model": "model", **CHATS[0][1]}
            ignoring = (await client.post(CHATS[0][0], json=chat | {"ignore_eos": True})).json()["choices"][0]
            assert ignoring["finish_reason"] == "length"
            beams = (await client.post(CHATS[0][0], json=chat | {"use_beam_search": True, "n": 2})).json()["choices"][0]
            assert beams["finish_reason"] == "stop"
            # an end that a grammar allows, where it may end
            digits = {"guided_regex": "[0-9]+", "logit_bias": {str(END): 100}}
            constrained = (await client.post(CHATS[0][0], json=chat | digits)).json()["choices"][0]
            assert constrained["finish_reason"] == "stop"
            assert len(constrained["message"]["content"]) == 1
            prompt = "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n"
            plain = {"model": "model", "prompt": prompt, "temperature": 0, "max_tokens": 24}
            assert (await client.post("/v1/completions", json=plain)).json()["choices"][0]["finish_reason"] == "length"

    asyncio.run(main())


LOOP = "{% for message in messages %}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (LOOP + "<|user|>{{ message.content }}<|end|>{% endfor %}", "<|end|>"),
        (
            LOOP + "{{ message.content }}\n <|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
            "<|end|>",
        ),
        (
            LOOP + "<|{{ message.role }}|>{{ message.content }}{% endfor %}{% if add_generation_prompt %}<|user|>{% endif %}",
            None,
        ),
        (LOOP + "{{ message.content }} and so on <|end|>{% endfor %}", None),
        ("{{ messages[0].content }}<|end|>", None),
        ("{{ raise_exception('no') }}", None),
        ("{% for %}", None),
        (None, None),
    ],
)
@pytest.mark.anyio
async def test_the_end_is_the_special_token_behind_a_message(serving, engine, text, found) -> None:
    engine.tokenizer.chat_template = text
    async with serving() as client:
        end = client.service.tokenization.chat_end
        assert end == (None if found is None else engine.tokenizer.convert_tokens_to_ids(found))
        if end is None:
            return
        body = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
        for fields, expected in (({}, (end,)), ({"stop_token_ids": [3, end]}, (3, end)), ({"ignore_eos": True}, ())):
            assert (await client.post("/v1/chat/completions", json=body | fields)).status_code == 200
            assert engine.seen[-1].params.stop_token_ids == expected
        assert (await client.post("/v1/completions", json={"model": "fake", "prompt": "Hi"})).status_code == 200
        assert engine.seen[-1].params.stop_token_ids == ()


@pytest.mark.anyio
async def test_an_end_that_the_engine_knows_is_not_added(serving, engine) -> None:
    engine.tokenizer.chat_template = LOOP + "{{ message.content }}<|end|>{% endfor %}"
    engine.eos_ids = frozenset({engine.tokenizer.convert_tokens_to_ids("<|end|>")})
    async with serving() as client:
        assert client.service.tokenization.chat_end is None
