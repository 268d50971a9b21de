"""schemathesis with /openapi.json: the server refuses what the document forbids, and every answer is one that it describes.

A server with one layer of the embedded model and small limits gets thousands of requests: the bounds of every field, and a few
random bodies. The document cannot say which fields exclude each other, so a case that it allows is corrected before it is sent;
otherwise few cases would reach the engine. Guards that are broken on purpose show that each kind of fault is found. A longer
search, with different cases each time:

    FA_SERVE_FUZZ=500 pytest tests/server/test_openapi.py
"""

import gc
import os
import sys
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import pytest
from encoder_folders import save_encoder
from fa_serve.server import bodies, errors, routes
from fa_serve.server.answers import streaming
from fa_serve.server.app import create_app
from fa_serve.server.process import Server
from fa_serve.server.schemas import CompletionRequest, SamplingRequest
from fa_serve.server.settings import Settings
from fa_serve.server.tokenization import Tokenization
from sampled_cases import ALL
from starlette.responses import JSONResponse

from fa_serve.engine import AsyncEngine, Encoder, EngineConfig

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
EXAMPLES = int(os.environ.get("FA_SERVE_FUZZ", "0"))
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "missing_required_header",
)
TOGETHER = {
    "stream_options": "stream",
    "top_logprobs": "logprobs",
    "truncation_side": "truncate_prompt_tokens",
    "length_penalty": "use_beam_search",
}  # the first is refused without the second
ALONE = {"/tokenize": ("messages",), "/v1/completions": ("suffix", "best_of")}
# fields whose values depend on the vocabulary, the chat template or the grammar, which the document does not describe
MEANT_FOR = (
    "stop_token_ids",
    "allowed_token_ids",
    "logit_bias",
    "tools",
    "tool_choice",
    "reasoning_effort",
    "chat_template",
    "chat_template_kwargs",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_grammar",
    "response_format",
    "output_config",
    "text",
)
LIMITS = {
    "/v1/completions": {"max_tokens": 2},
    "/v1/chat/completions": {"max_tokens": 2},
    "/v1/messages": {"max_tokens": 2},
    "/v1/responses": {"max_output_tokens": 2},
}  # fields that bound an answer
SHORT = 4
COMPLETIONS = "/v1/completions"
OF_SAMPLING = SamplingRequest.model_fields.keys() - {"model", "stream", "max_tokens", "n"}
FIELDS_OF_COMPLETIONS = CompletionRequest.model_fields.keys() - OF_SAMPLING
"""Those that chats do not have, and a few that they need beside them."""
OF_ENCODERS = ("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/score", "/classify", "/embed", "/embed_all", "/rerank")
"""Routes of encoders. Left out of these are /embed_sparse and /predict, which every run asks."""


@dataclass
class Found:
    """failures by check, statuses of allowed cases by path, and the number of streams"""

    failures: dict[str, str] = field(default_factory=dict)
    statuses: dict[str, Counter[int]] = field(default_factory=dict)
    streams: int = 0


def fuzz(url: str, examples: int, path: str | None = None, fields: Collection[str] = (), without: Sequence[str] = ()) -> Found:
    """path: the only route, whose bodies have these fields only. without: routes that are left out"""
    from schemathesis.config import SchemathesisConfig
    from schemathesis.engine import from_schema
    from schemathesis.engine.events import NonFatalError, ScenarioFinished

    document = httpx.get(f"{url}/openapi.json", timeout=60).json()
    if path:
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        properties = document["components"]["schemas"][body["$ref"].rpartition("/")[2]]["properties"]
        for name in properties.keys() - fields:
            del properties[name]
    cards = httpx.get(f"{url}/v1/models", timeout=60).json()
    settings = {
        "base-url": url,
        "continue-on-failure": True,
        "phases": {"stateful": {"enabled": False}},
        "generation": {"max-examples": examples, "no-shrink": True, "deterministic": not EXAMPLES},
        "checks": {"enabled": False, **{name: {"enabled": True} for name in CHECKS}},
    }
    schema = schemathesis.openapi.from_dict(document, config=SchemathesisConfig.from_dict(settings))
    if path or without:
        schema = schema.include(path=path) if path else schema.exclude(path=list(without))

    def before_call(context, case, kwargs) -> None:
        if isinstance(case.body, dict):
            # a wrong name or an empty prompt would hide every other reason for a refusal
            if isinstance(case.body.get("model"), str):
                case.body["model"] = cards["data"][0]["id"]
            if case.body.get("prompt") == "":
                case.body["prompt"] = "import"
            if allowed(case):
                put_in_order(case.body, case.operation.path)

    found = Found()
    schemathesis.hook(before_call)
    try:
        for event in from_schema(schema).execute():
            if isinstance(event, NonFatalError):
                found.failures[event.label] = str(event.value)
            elif isinstance(event, ScenarioFinished):
                note(event.recorder, found)
    finally:
        schemathesis.hooks.unregister(before_call)
    return found


def allowed(case) -> bool:
    return case.meta is None or case.meta.generation.mode.is_positive


def put_in_order(body: dict, path: str) -> None:
    if path in LIMITS:
        body |= {**LIMITS[path], "stream": len(str(body)) % 3 == 0}
    if path.endswith("completions"):
        body["n"] = 1 + ((body.get("n") or 1) - 1) % 2
        body.pop("max_completion_tokens", None)
        if body.get("truncate_prompt_tokens") == 0:
            body.pop("truncate_prompt_tokens")
        if body.get("min_tokens"):
            body["min_tokens"] = 1
    for name, other in TOGETHER.items():
        if not body.get(other):
            body.pop(name, None)
    if body.get("use_beam_search"):
        for name, neutral in SamplingRequest.NOT_FOR_BEAMS.items():
            if body.get(name) not in (None, *neutral):
                body.pop(name)
        body.pop("guided_choice", None)
    for name in ALONE.get(path, ()):
        if body.get("prompt") is not None:
            body.pop(name, None)
    if body.get("messages"):
        body.pop("add_special_tokens", None)
    if body.get("prompt") == []:
        body["prompt"] = "import"
    shorter = ("prompt", "tokens", "messages", "input", "system", "instructions")
    body.update({name: shortened(body[name]) for name in shorter if body.get(name)})
    for name in (*MEANT_FOR, *(["prompt_logprobs"] if body.get("stream") else [])):
        body.pop(name, None)
    if path.startswith("/v1/messages") or path == "/v1/responses":
        turns = body.get("messages", body.get("input"))
        for turn in turns if isinstance(turns, list) else ():
            put_turn_in_order(turn)
        return
    for message in body.get("messages") or []:
        for name in ("tool_calls", "tool_call_id", "name", *(["reasoning_content"] if message["role"] != "assistant" else [])):
            message.pop(name, None)
        message |= {"role": "user" if message["role"] == "tool" else message["role"], "content": message.get("content") or "a"}


def put_turn_in_order(turn: dict) -> None:
    """Blocks and items that belong to a turn of the assistant or to a tool need others before them."""
    content = turn.get("content")
    texts = [part for part in content if part.get("type") in ("text", "input_text")] if isinstance(content, list) else content
    turn.clear()
    turn.update(role="user", content=texts or "a")


def shortened(value):
    if isinstance(value, str):
        return value[:SHORT]
    if isinstance(value, int | float):
        return int(value) % 2000
    return [shortened(item) if not isinstance(item, dict) else item for item in value[:2]]


def note(recorder, found: Found) -> None:
    for name, node in recorder.cases.items():
        case = node.value
        exchange = recorder.interactions.get(name)
        for check in recorder.checks.get(name, ()):
            if check.failure_info is not None:
                found.failures.setdefault(
                    check.name, f"{recorder.label}: {check.failure_info.failure}\n{case.as_curl_command()}"
                )
        if exchange is None or exchange.response is None:
            found.failures.setdefault("no answer", case.as_curl_command())
        elif allowed(case):
            response = exchange.response
            found.statuses.setdefault(case.operation.path, Counter())[response.status_code] += 1
            found.streams += response.headers.get("content-type", [""])[0].startswith("text/event-stream")


@pytest.mark.slow
def test_the_service_does_what_its_document_says(start_server):
    """Completions share most of their fields with chats, so that a sample has their other fields. Of the routes of encoders,
    which this server refuses, it has two; the next test asks an encoder."""
    limits = ("--max-model-len", "64", "--max-n", "4", "--max-num-seqs", "16", "--log-level", "error")
    served = start_server("--dtype", "float32", *limits)
    try:
        everything = ALL or EXAMPLES
        found = fuzz(served.url, EXAMPLES or 2, without=() if everything else (COMPLETIONS, *OF_ENCODERS))
        if not everything:
            own = fuzz(served.url, 2, COMPLETIONS, FIELDS_OF_COMPLETIONS)
            found = Found(own.failures | found.failures, own.statuses | found.statuses, own.streams + found.streams)
    finally:
        served.end()
    assert found.failures == {}
    assert found.streams > 5
    for path in (*LIMITS, "/v1/messages/count_tokens", "/tokenize", "/detokenize"):
        assert found.statuses[path][200] > 0.5 * found.statuses[path].total(), f"{path}: {found.statuses[path]}"


@contextmanager
def serving(app) -> Iterator[str]:
    """The application over the fake engine, in a thread of this process, so that a test can break it."""
    urls = []
    ready = threading.Event()

    def announce(url: str) -> None:
        urls.append(url)
        ready.set()

    server = Server(app, "127.0.0.1", 0, 1.0, announce)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert ready.wait(10)
        yield urls[0]
    finally:
        server.should_exit = True
        thread.join()


ENCODER_ROUTES = {
    "/v1/embeddings": ("model", "input", "dimensions", "encoding_format", "prompt_name", "truncate"),
    "/v1/rerank": ("model", "query", "documents", "top_n", "return_documents"),
    "/embed": ("inputs", "normalize", "truncate"),
}


@pytest.mark.slow
def test_an_encoder_does_what_its_document_says(tmp_path):
    encoder = Encoder(EngineConfig(model=save_encoder(tmp_path), device="cpu", dtype="float32"))
    with serving(create_app(AsyncEngine(encoder), Settings(log_level="error"))) as url:
        for path, fields in ENCODER_ROUTES.items():
            found = fuzz(url, EXAMPLES or 1, path, fields)
            assert found.failures == {}
            assert found.statuses[path][200] > 0, f"{path}: {found.statuses}"


@pytest.mark.slow
def test_what_is_loaded_is_not_searched_for_garbage_again(engine):
    interval = sys.getswitchinterval()
    try:
        gc.unfreeze()
        with serving(create_app(engine, Settings(log_level="error"))):
            assert gc.get_freeze_count() > 10_000
            assert sys.getswitchinterval() == pytest.approx(0.001)
    finally:
        gc.unfreeze()
        sys.setswitchinterval(interval)


def a_handler_fails(monkeypatch):
    monkeypatch.setattr(Tokenization, "encode", lambda *_: 1 / 0)


def errors_are_fastapis_own(monkeypatch):
    monkeypatch.setattr(bodies, "validation_refused", lambda found: Plain(str(found)))


class Plain(errors.BadRequest):
    def response(self, scope):
        return JSONResponse({"detail": self.message}, 422)


def fields_are_not_looked_at(monkeypatch):
    strict = bodies.strict_json

    def without_options(content):
        body = strict(content)
        needed = ("model", "prompt", "stream")
        return {name: value for name, value in body.items() if name in needed} if isinstance(body, dict) else body

    monkeypatch.setattr(bodies, "strict_json", without_options)


def streams_are_called_json(monkeypatch):
    monkeypatch.setattr(streaming, "EVENT_HEADERS", [(b"content-type", b"application/x-ndjson")])


def any_method_will_do(monkeypatch):
    monkeypatch.setattr(routes.router, "routes", [*routes.router.routes])
    routes.router.add_api_route("/v1/completions", lambda: {}, methods=["GET", "PUT", "PATCH"], include_in_schema=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (a_handler_fails, "not_a_server_error"),
        (errors_are_fastapis_own, "response_schema_conformance"),
        (fields_are_not_looked_at, "negative_data_rejection"),
        (streams_are_called_json, "content_type_conformance"),
        (any_method_will_do, "unsupported_method"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_is_found(fault, check, engine, monkeypatch):
    """Each check fails for its fault, and for no other. A few fields of each kind are enough for that."""
    with monkeypatch.context() as patch:
        fault(patch)
        with serving(create_app(engine, Settings(log_level="error"))) as url:
            found = fuzz(url, 2, "/v1/completions", ("model", "prompt", "stream", "max_tokens", "n", "temperature", "echo"))
    assert found.failures.keys() == {check}, found.failures
