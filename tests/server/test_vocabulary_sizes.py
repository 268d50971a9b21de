"""A model whose tokenizer has one token more than the model: every API constrains its answers, plain and streamed."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path

import httpx
import pytest
from fa_serve.server.app import create_app
from fa_serve.server.settings import Settings
from server_process import one_layer
from transformers import AutoTokenizer

from fa_serve.engine import AsyncEngine, EngineConfig

NUM_LOGITS = 2048
ADDED = "<|added|>"
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"name": "answer", "schema": SCHEMA}
MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
GUIDED = (
    {"guided_json": SCHEMA},
    {"guided_regex": r'\{"a": [12]\}'},
    {"guided_choice": ['{"a": 1}', '{"a": 2}']},
    {"guided_grammar": 'start: "{\\"a\\": " ("1" | "2") "}"'},
    {"structured_outputs": {"json": SCHEMA}},
)
TOOL = {"type": "function", "function": {"name": "call", "parameters": SCHEMA}}
ASKED = [
    *((TEXT, {"prompt": "x = ", "max_tokens": 150} | fields) for fields in GUIDED),
    *((CHAT, {"messages": MESSAGES, "max_tokens": 150} | fields) for fields in GUIDED),
    (CHAT, {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": FORMAT}}),
    (CHAT, {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"}),
    ("/v1/responses", {"input": "Hi", "text": {"format": {"type": "json_schema", **FORMAT}}}),
    (
        "/v1/messages",
        {"messages": MESSAGES, "max_tokens": 150, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("larger") / "model"
    shutil.copytree(one_layer(), path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_special_tokens({"additional_special_tokens": [ADDED]})
    assert len(tokenizer) == NUM_LOGITS + 1
    tokenizer.chat_template = "{{ tools }}{{ messages[0].content }}"
    tokenizer.save_pretrained(path)
    return path


def of(text: str) -> str:
    """The JSON object in a reply, whatever its API: strings are unescaped and pieces of a stream are joined."""
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")] or [json.loads(text)]
    found = "".join(piece for event in events for piece in texts(event))
    match = re.search(r'\{\s*"a"\s*:\s*[12]\s*\}', found)
    assert match is not None, text
    return match[0]


def texts(node: object) -> list[str]:
    """The strings of a reply that may hold text of the answer."""
    if isinstance(node, list):
        return [text for item in node for text in texts(item)]
    if isinstance(node, dict):
        names = ("text", "content", "delta", "arguments", "partial_json")
        own = [value for name, value in node.items() if name in names and isinstance(value, str)]
        return own + [text for value in node.values() for text in texts(value)]
    return []


@pytest.mark.slow
def test_every_api_constrains_its_answers(folder) -> None:
    async def main() -> None:
        config = EngineConfig(model=str(folder), device="cpu", dtype="float32", num_pages=128, speculative="ngram")
        app = create_app(AsyncEngine(config), Settings(max_num_seqs=8, tool_call_parser="hermes"))
        opened = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
        async with app.router.lifespan_context(app), opened as client:
            await app.state.service.loaded()
            name = (await client.get("/v1/models")).json()["data"][0]["id"]
            bodies = [(path, {"model": name, "stream": stream, **body}) for path, body in ASKED for stream in (False, True)]
            replies = await asyncio.gather(*[client.post(path, json=body) for path, body in bodies])
            for (path, body), reply in zip(bodies, replies, strict=True):
                assert reply.status_code == 200, (path, body, reply.text)
                assert json.loads(of(reply.text))["a"] in (1, 2)
            free = {"messages": MESSAGES, "max_tokens": 4, "response_format": {"type": "json_object"}}
            reply = await client.post(CHAT, json={"model": name} | free)
            assert reply.json()["choices"][0]["message"]["content"].startswith("{")
            for path, body in ((TEXT, {"prompt": f"a {ADDED}"}), (TEXT, {"prompt": [5, NUM_LOGITS]})):
                reply = await client.post(path, json={"model": name} | body)
                assert reply.status_code == 400
                assert f"leave out {ADDED}, whose id is 2048" in reply.json()["error"]["message"]

    asyncio.run(main())
