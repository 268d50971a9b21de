"""An engine that repeats given words, a server for SDKs, and OpenAI's schemas of replies."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import jsonschema
import pytest
from fa_serve.server.app import create_app
from fa_serve.server.settings import Settings
from server_process import ServerProcess
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fa_serve.engine import EngineConfig, RequestError, RequestOutput, SamplingParams, SequenceTimes, TokenLogprob
from fa_serve.engine.cache.folder_tier import FolderStats
from fa_serve.engine.cache.host_tier import HostTierStats
from fa_serve.engine.process.parent import Pulse
from fa_serve.engine.request.prompts import PromptReader
from fa_serve.engine.speculation.drafts import SpeculationStats
from fa_serve.engine.stats import StepStats
from fa_serve.engine.summary import EngineSummary

FOLDER = FolderStats(num_bytes=900, num_bytes_used=700, num_hits=6, bytes_out=80, num_bad=1)
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('a system message must come first') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and special tokens for the roles and the end."""
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
    """Answers every prompt with `words`, one token each. `gate` holds answers back; `aborted` has requests that ended early."""

    model_name = "fake"
    max_model_len = 64
    is_alive = True
    is_restarting = False
    num_restarts = 0
    death_cause = ""
    eos_ids: frozenset[int] = frozenset()
    adapters: tuple[str, ...] = ()
    config = EngineConfig()
    card = inputs = None
    summary = EngineSummary(images="it takes none")
    default_params = SamplingParams()

    def __init__(self, words: tuple[str, ...] = ("Hello", ",", " wörld")):
        self.words = words
        self.tokenizer = byte_tokenizer()
        self.reader = PromptReader(self.tokenizer, len(self.tokenizer), self.max_model_len)
        self.gate = asyncio.Event()
        self.aborted = []
        self.seen = []
        self.error: RequestError | None = None
        self.beats = Pulse()
        self.gate.set()

    async def start(self) -> None: ...

    def pulse(self) -> Pulse:
        return self.beats

    def kill(self) -> None: ...

    async def shutdown(self, timeout: float = 30) -> None:
        self.error = RequestError("engine_dead", "the engine was shut down")
        self.gate.set()

    def snapshots(self) -> dict[None, SimpleNamespace]:
        return {None: self._stats()}

    def _stats(self) -> SimpleNamespace:
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
            num_late_compilations=10,
            num_late_captures=11,
            num_states=8,
            num_states_used=2,
            speculation=SpeculationStats(10, 20, (8, 4)),
            host_tier=HostTierStats(
                num_bytes=100, num_bytes_used=60, num_hits=3, num_misses=4, bytes_in=30, seconds=0.5, folder=FOLDER
            ),
            steps=StepStats().plus(0.003).plus(99.0),
        )

    def _logprobs(self, token: int, count: int | None) -> list[TokenLogprob] | None:
        if count is None:
            return None
        return [TokenLogprob(token, -0.5, [(token + 1 + k, float("-inf") if k else -0.25) for k in range(count)])]

    async def generate(
        self, prompt: list[int], params: Any, request_id: str, *, priority: int = 0, **isolation: str | None
    ) -> AsyncIterator[RequestOutput]:
        self.seen.append(SimpleNamespace(prompt=prompt, params=params, request_id=request_id, priority=priority, **isolation))
        words = self.words[: params.max_tokens]
        ended = False
        try:
            for i, word in enumerate(words):
                await self.gate.wait()
                await asyncio.sleep(0)
                last = i + 1 == len(words)
                reason = ("error" if self.error else "length" if len(words) < len(self.words) else "stop") if last else None
                for index in reversed(range(params.n)):  # nothing may rely on the order of the sequences
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
                        times=SequenceTimes(0.0, queue=0.25, prompt=0.5, decode=0.125, begun=True) if last else None,
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
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            await app.state.service.loaded()
            client.service = app.state.service
            yield client

    return start


SDK_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }} <tool_call></tool_call>{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content.split('</think>')[-1] }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}{% if enable_thinking %}{{ '<think>\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def sdk_server(start_server: Callable[..., ServerProcess], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server for the tests with SDKs: its chat template knows tools and thoughts, and its key is "secret"."""
    path = tmp_path_factory.mktemp("template") / "tools.jinja"
    path.write_text(SDK_TEMPLATE)
    flags = ("--dtype", "float32", "--chat-template", str(path), "--log-level", "warning")
    served = start_server(*flags, whole=True, FA_SERVE_API_KEYS="secret")
    yield served.url
    served.end()


@pytest.fixture(scope="session")
def conforms() -> Callable[[str, Any], None]:
    """`conforms(name, reply)`: assert that the reply is an instance of OpenAI's schema of that name and has no further keys."""
    document = json.loads((Path(__file__).parent / "openai_schemas.json").read_text())
    schemas = _json_schema(document["components"]["schemas"])

    def check(name: str, reply: Any) -> None:
        jsonschema.validate(reply, {"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}})

    return check


def _json_schema(node: Any) -> Any:
    """OpenAPI 3.0's `nullable` in the form of JSON Schema."""
    if isinstance(node, list):
        return [_json_schema(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {key: _json_schema(value) for key, value in node.items() if key != "nullable"}
    return {"anyOf": [kept, {"type": "null"}]} if node.get("nullable") is True else kept


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
