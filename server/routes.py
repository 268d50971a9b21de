"""The endpoints. Each declares what it takes and what it returns. `Answer` and `Service` do the work."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic_core import to_json

import fa_serve

from .adapters import ADMINISTRATION
from .answers.answer import Answer
from .answers.completion import CompletionAnswer
from .answers.size import SMALL, TEXT, written_in_steps
from .answers.streaming import EventStream, WholeReply
from .browser import PLAYGROUND, REFERENCE
from .chat.answer import ChatAnswer
from .chat.conversation import ChatRequest, TokenizeRequest
from .dialects.anthropic_answer import MessagesAnswer
from .dialects.anthropic_replies import AnthropicErrorReply, MessageReply, TokenCount
from .dialects.anthropic_request import CountTokensRequest, MessagesRequest
from .dialects.responses_answer import ResponsesAnswer
from .dialects.responses_replies import ResponseObject
from .dialects.responses_request import ResponsesRequest
from .errors import BadRequest, Unavailable
from .replies import (
    AdapterReply,
    ChatCompletion,
    Completion,
    DetokenizeReply,
    ErrorReply,
    ModelCard,
    ModelList,
    TokenizeReply,
    TokenizerInfo,
)
from .schemas import CompletionRequest, DetokenizeRequest, LoadAdapterRequest, UnloadAdapterRequest
from .service import Service

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorReply, "description": "The request is wrong, or the queue is full (429)."},
    "5XX": {"model": ErrorReply, "description": "The server failed, or it is not ready (503)."},
}
ANTHROPIC_ERRORS = {status: each | {"model": AnthropicErrorReply} for status, each in ERRORS.items()}
ANTHROPIC_VERSIONS = ("2023-06-01", "2026-10-21")
STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}


router = APIRouter(responses=ERRORS)


async def _service(request: Request) -> Service:  # async: FastAPI would call a plain function in a thread
    service: Service = request.app.state.service
    return service


Shared = Annotated[Service, Depends(_service)]


@router.post("/v1/completions", response_model=Completion, responses=STREAM, tags=["OpenAI"])
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue a prompt or several prompts, given as text or as token ids."""
    return await _respond(CompletionAnswer, body, request)


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAM, tags=["OpenAI"])
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    return await _respond(ChatAnswer, body, request)


@router.post("/v1/responses", response_model=ResponseObject, responses=STREAM, tags=["OpenAI"])
async def responses(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation in the form of OpenAI's Responses API. Nothing is stored."""
    return await _respond(ResponsesAnswer, body, request)


@router.post("/v1/messages", response_model=MessageReply, responses=STREAM | ANTHROPIC_ERRORS, tags=["Anthropic"])
async def messages(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation in the form of Anthropic's Messages API."""
    _require_version(request)
    return await _respond(MessagesAnswer, body, request)


@router.post("/v1/messages/count_tokens", response_model=TokenCount, responses=ANTHROPIC_ERRORS, tags=["Anthropic"])
async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
    """The number of tokens of a conversation's prompt."""
    _require_version(request)
    service = await _service(request)
    service.require_task("generate")
    answer = MessagesAnswer(body, service, getattr(request.state, "key", None))
    return JSONResponse({"input_tokens": await answer.count_tokens()})


def _require_version(request: Request) -> None:
    """Raise BadRequest for an unknown version. The known versions make no difference: their replies are the same, and the
    fields that the later one has removed from requests are accepted with both."""
    version = request.headers.get("anthropic-version", ANTHROPIC_VERSIONS[0])
    if version not in ANTHROPIC_VERSIONS:
        message = f"The header anthropic-version must be {' or '.join(ANTHROPIC_VERSIONS)}, got {version[:80]!r}."
        raise BadRequest(message, param="anthropic-version")


async def _respond(kind: Callable[[Any, Service, str | None], Answer], body: Any, request: Request) -> Response:
    state = request.scope["state"]
    state["user"] = body.user or vars(body).get("safety_identifier")
    service = await _service(request)
    service.require_task("generate")
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
    """The model that this server serves, and its adapters."""
    service.require_ready()
    names = [name for name in service.adapters.names() if name != service.model_name]
    cards = [service.model_card(), *map(service.model_card, names)]
    return {"object": "list", "data": cards}


@router.get("/v1/models/{model:path}", tags=["OpenAI"])
async def model(model: str, service: Shared) -> ModelCard:
    """The card of the model that this server serves, or of one of its adapters."""
    service.require_ready()
    service.require_model(model)
    return service.model_card(None if model == service.model_name else model)


@router.post("/v1/load_lora_adapter", response_model=AdapterReply, tags=[ADMINISTRATION])
async def load_lora_adapter(body: LoadAdapterRequest, request: Request) -> Response:
    """Load the adapter in a folder on the server, and serve it under a name. If the name is in use, the new adapter replaces
    the old one. Only for the administrator's key."""
    service = await _service(request)
    service.require_ready()
    if body.lora_name == service.model_name:
        raise BadRequest("lora_name must not be the name of the model.", param="lora_name")
    await service.adapters.load(body.lora_name, body.lora_path)
    return JSONResponse({"lora_name": body.lora_name, "status": "loaded"})


@router.post("/v1/unload_lora_adapter", response_model=AdapterReply, tags=[ADMINISTRATION])
async def unload_lora_adapter(body: UnloadAdapterRequest, request: Request) -> Response:
    """Stop serving an adapter. Requests that already use it finish. Only for the administrator's key."""
    service = await _service(request)
    service.require_ready()
    await service.adapters.unload(body.lora_name)
    return JSONResponse({"lora_name": body.lora_name, "status": "unloaded"})


@router.post("/tokenize", response_model=TokenizeReply, tags=["Tokens"])
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """The token ids of a prompt or a conversation, as a request for an answer would use them."""
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
                variables = body.chat_template_kwargs or {}
                salt = service.isolation.cache_salt(key, None)
                found = await tokenization.encode_chat(template, body, tools, variables, key, salt)
                tokens = found.tokens
            reply: TokenizeReply = {"tokens": tokens, "count": len(tokens), "max_model_len": service.engine.max_model_len}
            size = TEXT * len(tokens) * (2 if body.return_token_strs else 1)
            field = "messages" if body.prompt is None else "prompt"
            service.require_size(size, field, [field])
            if body.return_token_strs:
                reply["token_strs"] = await tokenization.token_strs(tokens, key)
            return to_json(reply) if size <= SMALL else await service.write(lambda: written_in_steps(reply), key)

    return _reply(work, service)


@router.get("/tokenizer_info", response_model=TokenizerInfo, tags=["Tokens"])
async def tokenizer_info(service: Shared) -> Response:
    """The tokenizer's configuration and chat template."""
    service.require_ready()
    return JSONResponse(service.tokenization.info())


@router.post("/detokenize", response_model=DetokenizeReply, tags=["Tokens"])
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
    return HTMLResponse(PLAYGROUND.text, headers=PLAYGROUND.headers)


@router.get("/docs", include_in_schema=False)
async def docs() -> Response:
    """The API reference, built in the browser from /openapi.json: one file that loads nothing from anywhere else."""
    return HTMLResponse(REFERENCE.text, headers=REFERENCE.headers)


@router.get("/version", tags=["Operation"])
async def version() -> dict[str, str]:
    """The version of fa_serve."""
    return {"version": fa_serve.__version__}
