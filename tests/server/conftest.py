"""An engine that repeats set words, a real server process, and OpenAI's response schemas."""

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import jsonschema
import pytest
from fa_serve.server.app import create_app
from fa_serve.server.settings import Settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fa_serve.engine import RequestOutput, TokenLogprob
from fa_serve.engine.prompts import PromptReader

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('a system message must come first') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, then the roles and the end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    roles = ["<|system|>", "<|user|>", "<|assistant|>"]
    tokenizer.add_special_tokens([*roles, "<|end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = TEMPLATE
    return fast


class FakeEngine:
    """Answers every prompt with `words`, one token each. `gate` holds it back; `aborted` tells who left early."""

    model_name = "fake"
    max_model_len = 64
    is_alive = True
    is_restarting = False

    def __init__(self, words: tuple[str, ...] = ("Hello", ",", " wörld")):
        self.words = words
        self.tokenizer = byte_tokenizer()
        self.reader = PromptReader(self.tokenizer, len(self.tokenizer), self.max_model_len)
        self.gate = asyncio.Event()
        self.aborted = []
        self.seen = []
        self.error = None
        self.gate.set()

    async def start(self) -> None: ...

    async def shutdown(self) -> None:
        self.error = "the engine was shut down"
        self.gate.set()

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(
            num_running=1,
            num_waiting=2,
            num_pages=8,
            num_pages_used=4,
            num_steps=5,
            num_prompt_tokens=6,
            num_cached_tokens=7,
            num_output_tokens=8,
            num_preemptions=9,
        )

    def _logprobs(self, token: int, count: int | None) -> list[TokenLogprob] | None:
        if count is None:
            return None
        return [TokenLogprob(token, -0.5, [(token + 1 + k, float("-inf") if k else -0.25) for k in range(count)])]

    async def generate(
        self, prompt: list[int], params: Any, request_id: str, *, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        self.seen.append(SimpleNamespace(prompt=prompt, params=params, request_id=request_id, priority=priority))
        words = self.words[: params.max_tokens]
        ended = False
        try:
            for i, word in enumerate(words):
                await self.gate.wait()
                await asyncio.sleep(0)
                last = i + 1 == len(words)
                reason = ("error" if self.error else "length" if len(words) < len(self.words) else "stop") if last else None
                for index in reversed(range(params.n)):  # none may count on the first to come first
                    ended = last and not index
                    scored = not (i or index) and params.prompt_logprobs is not None
                    scores = [self._logprobs(token, params.prompt_logprobs)[0] for token in prompt[1:]] if scored else []
                    yield RequestOutput(
                        request_id,
                        prompt,
                        word,
                        [i],
                        self._logprobs(i, params.logprobs),
                        last,
                        reason,
                        self.error,
                        num_prompt_tokens=len(prompt),
                        num_output_tokens=i + 1,
                        num_cached_tokens=2,
                        index=index,
                        queue_time=0.25 if last else None,
                        prompt_logprobs=[None, *scores] if scored else None,
                    )
        finally:
            if not ended:
                self.aborted.append(request_id)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def serving(engine: FakeEngine) -> Callable[..., Any]:
    """`async with serving(setting=value) as client`: an httpx client of an application over the fake engine."""

    @asynccontextmanager
    async def start(**settings: Any) -> AsyncIterator[httpx.AsyncClient]:
        app = create_app(engine, Settings(**settings))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            await app.state.service.loaded()
            client.service = app.state.service
            yield client

    return start


@pytest.fixture(scope="session")
def conforms() -> Callable[[str, Any], None]:
    """`conforms(name, reply)`: the reply is an instance of OpenAI's published schema of that name, with no key beyond it."""
    document = json.loads((Path(__file__).parent / "openai_schemas.json").read_text())
    schemas = _json_schema(document["components"]["schemas"])

    def check(name: str, reply: Any) -> None:
        jsonschema.validate(reply, {"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}})

    return check


def _json_schema(node: Any) -> Any:
    """OpenAPI 3.0's `nullable` as JSON Schema has it."""
    if isinstance(node, list):
        return [_json_schema(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {key: _json_schema(value) for key, value in node.items() if key != "nullable"}
    return {"anyOf": [kept, {"type": "null"}]} if node.get("nullable") is True else kept


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Served:
    process: subprocess.Popen
    url: str
    lines: list[str]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def metric(self, name: str, labels: str = "") -> float:
        text = httpx.get(f"{self.url}/metrics").text
        found = re.search(rf"^fa_serve:{name}{{{labels}.*}} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def aborted(self) -> float:
        return self.metric("request_success_total", 'finished_reason="abort"')


def _start(*arguments: str, log: Path | None = None, **environment: str) -> Served:
    command = [sys.executable, "-m", "fa_serve", "serve", "--port", "0", "--device", "cpu", "--num-pages", "1024", *arguments]
    with ExitStack() as files:
        stderr = files.enter_context(log.open("w")) if log else None
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=os.environ | environment)
    watchdog = threading.Timer(120, process.kill)
    watchdog.start()
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip())
        if line.startswith("curl"):
            break
    watchdog.cancel()
    served = Served(process, next((line for line in lines if line.startswith("http://")), ""), lines)
    if not served.url:
        served.end()
        pytest.fail(f"the server did not start: {lines}")
    return served


@pytest.fixture(scope="session")
def start_server() -> Callable[..., Served]:
    """`start_server("--flag", ..., FA_SERVE_NAME="value")`: a server process that is ready, with the embedded model."""
    return _start


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """One server for all tests that leave it as it was."""
    served = _start("--dtype", "float32")
    yield served
    served.end()
