"""Streams of a process that falls behind: what a stream has gained meanwhile becomes one event, and nothing is lost."""

import asyncio
import json

import httpx
import pytest
from fa_serve.server.app import create_app
from fa_serve.server.settings import Settings

from fa_serve.engine import AsyncEngine, EngineConfig, RequestOutput, TokenLogprob
from fa_serve.engine.engine import EngineStats
from fa_serve.engine.process import async_engine
from fa_serve.engine.process.engine_loop import Add, StepOutputs
from fa_serve.engine.process.parent import Pulse
from fa_serve.engine.process.pipe import Ready

pytestmark = pytest.mark.anyio
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12}}\n</tool_call>'
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
PATHS = {"text": "/v1/completions", "chat": "/v1/chat/completions"}


class Script:
    """A worker that the test drives: `step` gives every request its next word."""

    def __init__(self, source, on_message, on_death, on_phase=None):
        self.on_message = on_message
        self.requests = {}
        Script.now = self

    def start(self):
        return Ready(EngineConfig(max_model_len=512), 300, frozenset(), self.stats(), Script.tokenizer)

    def stats(self):
        return EngineStats(0, 0, 8, 0, 0, 0, 0, 0, 0)

    def send(self, command):
        if isinstance(command, Add):
            self.requests[command.request_id] = command

    def stop(self, timeout=None): ...

    def pulse(self):
        return Pulse()

    def step(self, number, words):
        last = number + 1 == len(words)
        self.on_message(
            StepOutputs(
                self.stats(),
                [
                    RequestOutput(
                        name,
                        [],
                        words[number],
                        [number],
                        [TokenLogprob(number, -0.5, [])],
                        last,
                        "stop" if last else None,
                        None,
                        4,
                        number + 1,
                    )
                    for name in self.requests
                ],
            )
        )


@pytest.fixture
def ask(engine, monkeypatch):
    """`await ask(kind, words, behind)`: two streams of the words, one word in each step.

    behind: all steps happen while the event loop is busy
    """
    monkeypatch.setattr(async_engine, "ThreadWorker", Script)
    engine.tokenizer.chat_template = "{{ tools }}{{ messages[0].content }}"
    Script.tokenizer = engine.tokenizer

    async def run(kind, words, behind, **fields):
        app = create_app(AsyncEngine(EngineConfig(device="cpu")), Settings(tool_call_parser="hermes"))
        transport = httpx.ASGITransport(app)
        body = {"model": app.state.service.engine._source.model_name, "stream": True, "stream_options": {"include_usage": True}}
        body |= {"return_token_ids": True} | fields
        body |= {"messages": [{"role": "user", "content": "Hi"}]} if kind == "chat" else {"prompt": [1, 2, 3, 4]}
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            await app.state.service.loaded()
            streams = [asyncio.create_task(client.post(PATHS[kind], json=body)) for _ in range(2)]
            while len(Script.now.requests) < 2:
                for stream in streams:
                    assert not stream.done(), stream.result().text
                await asyncio.sleep(0.001)
            for number in range(len(words)):
                Script.now.step(number, words)
                if not behind:
                    await asyncio.sleep(0.01)
            replies = [(await stream).text for stream in streams]
        for reply in replies:
            assert reply.endswith("data: [DONE]\n\n")
        return [[json.loads(line[6:]) for line in reply.split("\n\n")[:-2]] for reply in replies]

    return run


@pytest.mark.parametrize("behind", [False, True], ids=["idle", "behind"])
@pytest.mark.parametrize("kind", PATHS)
async def test_events_are_merged_if_the_loop_is_behind(ask, kind, behind):
    words = [" a", " b", "", " c", " d"]
    asked = {"logprobs": True} if kind == "chat" else {"logprobs": 0}
    for chunks in await ask(kind, words, behind, **asked):
        parts = [choice for chunk in chunks for choice in chunk["choices"] if choice["token_ids"]]
        assert len(parts) == (1 if behind else len(words))
        assert "".join(part["text"] if kind == "text" else part["delta"].get("content", "") for part in parts) == " a b c d"
        assert [token for part in parts for token in part["token_ids"]] == [0, 1, 2, 3, 4]
        name = "token_logprobs" if kind == "text" else "content"
        assert sum(len(part["logprobs"][name]) for part in parts) == len(words)
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["stop"]
        assert chunks[-1]["usage"]["completion_tokens"] == len(words)


@pytest.mark.parametrize("behind", [False, True], ids=["idle", "behind"])
async def test_a_tool_call_is_the_same_in_one_event(ask, behind):
    words = ["Well. ", *(CALL[i : i + 5] for i in range(0, len(CALL), 5))]
    for chunks in await ask("chat", words, behind, tools=[ADD]):
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert "".join(delta.get("content", "") for delta in deltas).strip() == "Well."
        assert calls[0]["function"]["name"] == "add"
        assert "".join(call["function"]["arguments"] for call in calls) == '{"a": 12}'
        assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
        assert (len(deltas) <= 3) == behind
