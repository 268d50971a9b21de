"""The endpoints. Each says what it takes and what it returns. `Answer` and `Service` do the work."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json, to_json
from starlette import types as asgi
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import fa_serve

from .answers.answer import Answer
from .answers.completion import CompletionAnswer
from .answers.size import SMALL, TEXT, written_in_steps
from .answers.streaming import EventStream, WholeReply
from .bounds.costs import Bill
from .bounds.guard import SMALL_BODY, ReceivedBody, header
from .bounds.json_bounds import JsonTotal
from .chat.answer import ChatAnswer
from .chat.conversation import ChatRequest, TokenizeRequest
from .dialects.anthropic_answer import MessagesAnswer
from .dialects.anthropic_replies import AnthropicErrorReply, MessageReply, TokenCount
from .dialects.anthropic_request import CountTokensRequest, MessagesRequest
from .dialects.responses_answer import ResponsesAnswer
from .dialects.responses_replies import ResponseObject
from .dialects.responses_request import ResponsesRequest
from .errors import MAX_NAME, ApiError, BadRequest, HttpError, Unavailable, response_to, validation_refused
from .replies import ChatCompletion, Completion, DetokenizeReply, ErrorReply, ModelCard, ModelList, TokenizeReply, TokenizerInfo
from .schemas import CompletionRequest, DetokenizeRequest
from .service import Service

PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
DOCS = Path(__file__).with_name("docs.html").read_text(encoding="utf-8")
POLICY = "default-src 'none'; connect-src 'self'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
PAGE_HEADERS = {
    "content-security-policy": f"{POLICY}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorReply, "description": "The request is wrong, or the queue is full (429)."},
    "5XX": {"model": ErrorReply, "description": "The server failed, or it is not ready (503)."},
}
ANTHROPIC_ERRORS = {status: each | {"model": AnthropicErrorReply} for status, each in ERRORS.items()}
ANTHROPIC_VERSIONS = ("2023-06-01", "2026-10-21")
JSON_TYPE = re.compile(r"application/([^;]+\+)?json\s*(;|$)", re.IGNORECASE)
FOREIGN = {
    b"\x1f\x8b": "compressed with gzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"\xef\xbb\xbf": "UTF-8 behind a byte order mark",
    b"\xff\xfe": "UTF-16 or UTF-32",
    b"\xfe\xff": "UTF-16",
    b"\x00": "UTF-16 or UTF-32",
    b"{\x00": "UTF-16 or UTF-32",
}
"""What a body is that begins so, and that is no JSON."""
STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}


def strict_json(content: bytes) -> Any:
    """Python's own parser accepts NaN, and halves of surrogate pairs, which no tokenizer accepts."""
    try:
        return from_json(content, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        kind = next((kind for begin, kind in FOREIGN.items() if content.startswith(begin)), None)
        reason = str(error) if kind is None else f"it is {kind}. Send plain JSON in UTF-8"
        raise HTTPException(400, f"The body is not valid JSON: {reason}.") from None


class BodyRoutes:
    """Middleware that answers the POSTs. The rest of FastAPI takes longer for one of them than all that is done here.

    FastAPI has these routes too, for the schema and for other methods. A large body is parsed beside the event loop.
    """

    def __init__(self, app: asgi.ASGIApp, service: Service):
        self._app = app
        self._service = service
        self._routes = {route.path: route for route in posts.routes if isinstance(route, APIRoute)}
        self._models = {path: get_type_hints(route.endpoint)["body"] for path, route in self._routes.items()}

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        path = scope.get("path")
        if path not in self._routes or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        route = scope["route"] = self._routes[path]
        try:
            body = await self._body(self._models[path], scope, receive)
            response = await route.endpoint(body, Request(scope, receive))
            await response(scope, receive, send)
        except (ApiError, HTTPException) as error:  # before the response has begun
            await response_to(error, scope)(scope, receive, send)

    async def _body(self, model: type[BaseModel], scope: asgi.Scope, receive: asgi.Receive) -> Any:
        service = self._service
        _require_plain(header(scope, b"content-encoding"))
        content = await _received(receive)
        if not JSON_TYPE.match(header(scope, b"content-type")):
            content = b""
        received: ReceivedBody | None = scope["state"].get("received_body")
        bill: Bill = scope["state"]["bill"]
        if received and not received.size:
            received.add(len(content))
        if not await service.costs.take_turn(bill, receive):
            raise ClientDisconnect
        if len(content) <= SMALL_BODY:
            with service.costs.work(bill):
                body = _validated(content, model, service)
        else:
            body = await service.parse(lambda: _validated(content, model, service), received.owner if received else None)
        if received:
            received.release()
        return body


def _require_plain(coding: str) -> None:
    """Raise a 415 for a compressed body: a small one can become gigabytes, so none is unpacked."""
    if coding.strip().lower() not in ("", "identity"):
        message = (
            f"The body must not be compressed, got Content-Encoding: {coding[:MAX_NAME]}. Send plain JSON without this header."
        )
        raise HttpError(415, message, code="unsupported_content_encoding")


async def _received(receive: asgi.Receive) -> bytes:
    """The whole body."""
    parts = []
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _validated(content: bytes, model: type[BaseModel], service: Service) -> Any:
    """The body as its model. What is quick to check comes before the validation, which may take milliseconds."""
    service.require_ready()
    service.json_bounds.check(content)
    values = strict_json(content) if content else None
    if isinstance(values, dict) and isinstance(name := values.get("model"), str):
        service.require_model(name)
    limit = service.settings.max_messages
    for field in ("messages", "input"):
        messages = values.get(field) if isinstance(values, dict) else None
        if isinstance(messages, list) and len(messages) > limit:
            message = f"{field} must hold at most {limit} messages (--max-messages), got {len(messages)}."
            raise BadRequest(message, param=field)
    try:
        arguments = JsonTotal(service.json_bounds, "the arguments of all tool calls")
        return model.model_validate(values, context={"lenient": service.settings.lenient, "arguments": arguments})
    except ValidationError as error:
        errors = [each | {"loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
        raise validation_refused(errors) from None


router = APIRouter(responses=ERRORS)
tokenizer_router = APIRouter(responses=ERRORS)  # served with --tokenizer-info
posts = APIRouter(responses=ERRORS)  # BodyRoutes answers them


async def _service(request: Request) -> Service:  # FastAPI calls a plain function in a thread for each request
    service: Service = request.app.state.service
    return service


Shared = Annotated[Service, Depends(_service)]


@posts.post("/v1/completions", response_model=Completion, responses=STREAM, tags=["OpenAI"])
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue a prompt or several prompts, given as text or as token ids."""
    return await _respond(CompletionAnswer, body, request)


@posts.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAM, tags=["OpenAI"])
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    return await _respond(ChatAnswer, body, request)


@posts.post("/v1/responses", response_model=ResponseObject, responses=STREAM, tags=["OpenAI"])
async def responses(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation in the form of OpenAI's Responses API. Nothing is stored."""
    return await _respond(ResponsesAnswer, body, request)


@posts.post("/v1/messages", response_model=MessageReply, responses=STREAM | ANTHROPIC_ERRORS, tags=["Anthropic"])
async def messages(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation in the form of Anthropic's Messages API."""
    _require_version(request)
    return await _respond(MessagesAnswer, body, request)


@posts.post("/v1/messages/count_tokens", response_model=TokenCount, responses=ANTHROPIC_ERRORS, tags=["Anthropic"])
async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
    """The number of tokens of a conversation's prompt."""
    _require_version(request)
    service = await _service(request)
    answer = MessagesAnswer(body, service, getattr(request.state, "key", None))
    return JSONResponse({"input_tokens": await answer.count_tokens()})


def _require_version(request: Request) -> None:
    """Either version has the same replies. What the later one removes from requests is still accepted, whatever the header."""
    version = request.headers.get("anthropic-version", ANTHROPIC_VERSIONS[0])
    if version not in ANTHROPIC_VERSIONS:
        message = f"The header anthropic-version must be {' or '.join(ANTHROPIC_VERSIONS)}, got {version[:80]!r}."
        raise BadRequest(message, param="anthropic-version")


async def _respond(kind: Callable[[Any, Service, str | None], Answer], body: Any, request: Request) -> Response:
    state = request.scope["state"]
    state["user"] = body.user or vars(body).get("safety_identifier")
    service = await _service(request)
    settings = service.settings
    answer = kind(body, service, state.get("key"))
    answer.timeline = state.get("timeline")
    if body.stream:
        return EventStream(answer, settings.request_timeout, settings.send_timeout)
    return _reply(answer.whole, service)


def _reply(work: Callable[[], Coroutine[Any, Any, bytes]], service: Service) -> Response:
    settings = service.settings
    return WholeReply(work, service.hold_bytes, settings.request_timeout, settings.send_timeout)


@router.get("/v1/models", tags=["OpenAI"])
async def models(service: Shared) -> ModelList:
    """The one model that this server serves."""
    service.require_ready()
    return {"object": "list", "data": [service.model_card()]}


@router.get("/v1/models/{model:path}", tags=["OpenAI"])
async def model(model: str, service: Shared) -> ModelCard:
    """The model, if it is the one that this server serves."""
    service.require_ready()
    service.require_model(model)
    return service.model_card()


@posts.post("/tokenize", response_model=TokenizeReply, tags=["Tokens"])
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """The token ids of a prompt or a conversation, as generation would get them."""
    service = await _service(request)
    service.require_ready()
    service.require_model(body.model)
    tokenization = service.tokenization
    key = getattr(request.state, "key", None)

    async def work() -> bytes:
        with service.reserve(1, key):
            if body.prompt is not None:
                [tokens] = await tokenization.encode([body.prompt], key, special=body.add_special_tokens is not False)
            else:
                tools = body.tools or []
                template = tokenization.template(body, tools)
                tokens, _ = await tokenization.encode_chat(template, body, tools, body.chat_template_kwargs or {}, key)
            reply: TokenizeReply = {"tokens": tokens, "count": len(tokens), "max_model_len": service.engine.max_model_len}
            size = TEXT * len(tokens) * (2 if body.return_token_strs else 1)
            field = "messages" if body.prompt is None else "prompt"
            service.require_size(size, field, [field])
            if body.return_token_strs:
                reply["token_strs"] = await tokenization.token_strs(tokens, key)
            return to_json(reply) if size <= SMALL else await service.write(lambda: written_in_steps(reply), key)

    return _reply(work, service)


@tokenizer_router.get("/tokenizer_info", response_model=TokenizerInfo, tags=["Tokens"])
async def tokenizer_info(service: Shared) -> Response:
    """The tokenizer's configuration and chat template."""
    service.require_ready()
    return JSONResponse(service.tokenization.info())


@posts.post("/detokenize", response_model=DetokenizeReply, tags=["Tokens"])
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids, including special tokens."""
    service = await _service(request)
    service.require_ready()
    service.require_model(body.model)
    key = getattr(request.state, "key", None)

    async def work() -> bytes:
        with service.reserve(1, key):
            return to_json({"prompt": await service.tokenization.decode(body.tokens, key)})

    return _reply(work, service)


@router.get("/health", tags=["Operation"])
@router.head("/health", include_in_schema=False)
async def health(service: Shared) -> dict[str, str]:
    """200 while the process can serve or will be able to, which includes loading and draining; 503 if the engine is dead or
    does not answer."""
    if sickness := service.sickness():
        raise Unavailable(sickness)
    return {"status": "alive"}


@router.get("/ready", tags=["Operation"])
@router.head("/ready", include_in_schema=False)
async def ready(service: Shared) -> dict[str, str]:
    """200 if requests are accepted; 503 while loading or draining, and while the engine does not answer."""
    service.require_ready()
    return {"status": "ready"}


@router.get("/metrics", tags=["Operation"], response_class=PlainTextResponse)
async def metrics(service: Shared) -> Response:
    """The metrics in Prometheus' text format."""
    return Response(await service.scraped.text(), media_type=CONTENT_TYPE_LATEST)


@router.get("/", include_in_schema=False)
@router.head("/", include_in_schema=False)
async def page() -> Response:
    """The playground: one file that loads nothing from anywhere else."""
    return HTMLResponse(PAGE, headers=PAGE_HEADERS)


@router.get("/docs", include_in_schema=False)
async def docs() -> Response:
    """The reference of the API, made in the browser from /openapi.json: one file that loads nothing from anywhere else."""
    return HTMLResponse(DOCS, headers=PAGE_HEADERS)


@router.get("/version", tags=["Operation"])
async def version() -> dict[str, str]:
    """The version of fa_serve."""
    return {"version": fa_serve.__version__}
