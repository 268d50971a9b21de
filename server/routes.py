"""The endpoints. Each says what it takes and gives; the work is done by `Answer` and `Service`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from fastapi import APIRouter, Depends, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

import fa_serve

from .errors import Unavailable
from .generation import Answer, CompletionAnswer
from .messages import ChatAnswer
from .replies import ChatCompletion, Completion, ErrorReply, ModelCard, ModelList, Text, Tokens
from .schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from .service import Service
from .streaming import EventStream, attend

PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorReply, "description": "The request's fault, or there is no room (429)."},
    "5XX": {"model": ErrorReply, "description": "The server's fault, or it is not ready (503)."},
}
JSON_TYPE = re.compile(r"application/([^;]+\+)?json\s*(;|$)", re.IGNORECASE)
STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}


class JsonRequest(Request):
    """Strict JSON, unlike Python's own parser: no NaN, no half of a surrogate pair, which no tokenizer could take."""

    async def json(self) -> Any:
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise HTTPException(400, f"The body is not valid JSON: {error}.") from None


class BodyRoute(APIRoute):
    """A POST to `endpoint(body, request)`, called without FastAPI's dependencies: they take longer than all the rest of it.

    FastAPI reads the same signature for the schema, and finds the route; complaints have the shape of its own.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._model = get_type_hints(self.endpoint)["body"]

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await super().handle(scope, receive, send)
            return
        request = JsonRequest(scope, receive)
        is_json = JSON_TYPE.match(request.headers.get("content-type", "")) and await request.body()
        try:
            body = self._model.model_validate(await request.json() if is_json else None)
        except ValidationError as error:
            complaints = [each | {"loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
            raise RequestValidationError(complaints) from None
        response = await self.endpoint(body, request)
        await response(scope, receive, send)


router = APIRouter(responses=ERRORS)
posts = APIRouter(responses=ERRORS, route_class=BodyRoute)


async def _service(request: Request) -> Service:  # a plain function would be called in a thread, at every request
    service: Service = request.app.state.service
    return service


Shared = Annotated[Service, Depends(_service)]


@posts.post("/v1/completions", response_model=Completion, responses=STREAM, tags=["OpenAI"])
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue a prompt, or a batch of prompts, given as text or as token ids."""
    return await _respond(CompletionAnswer, body, request)


@posts.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAM, tags=["OpenAI"])
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    return await _respond(ChatAnswer, body, request)


async def _respond(kind: type[Answer], body: Any, request: Request) -> Response:
    request.state.user = body.user or getattr(body, "safety_identifier", None)
    service = await _service(request)
    settings = service.settings
    answer = kind(body, service, getattr(request.state, "key", None))
    if body.stream:
        return EventStream(answer.chunks(), settings.request_timeout, settings.send_timeout)
    return JSONResponse(await attend(answer.whole(), request.receive, settings.request_timeout))


@router.get("/v1/models", tags=["OpenAI"])
async def models(service: Shared) -> ModelList:
    """The one model that is served here."""
    service.require_ready()
    return {"object": "list", "data": [service.model_card()]}


@router.get("/v1/models/{model:path}", tags=["OpenAI"])
async def model(model: str, service: Shared) -> ModelCard:
    service.require_ready()
    service.require_model(model)
    return service.model_card()


@posts.post("/tokenize", response_model=Tokens, tags=["Tokens"])
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """The token ids of a prompt or of a conversation, as generation would see them."""
    service = await _service(request)
    service.require_ready()
    service.require_model(body.model)
    if body.prompt is not None:
        [tokens] = await service.encode([body.prompt], special=body.add_special_tokens is not False)
    else:
        tools = body.tools or []
        tokens, _ = await service.encode_chat(service.template(body, tools), body, tools, body.chat_template_kwargs or {})
    return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": service.engine.max_model_len})


@posts.post("/detokenize", response_model=Text, tags=["Tokens"])
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids, special tokens included."""
    service = await _service(request)
    service.require_ready()
    service.require_model(body.model)
    return JSONResponse({"prompt": await service.decode(body.tokens)})


@router.get("/health", tags=["Operation"])
async def health(service: Shared) -> dict[str, str]:
    """Alive: loading and draining count, a dead engine does not."""
    if reason := service.dead():
        raise Unavailable(f"Dead: {reason}.")
    return {"status": "alive"}


@router.get("/ready", tags=["Operation"])
async def ready(service: Shared) -> dict[str, str]:
    """Ready for requests: 503 while loading or draining."""
    service.require_ready()
    return {"status": "ready"}


@router.get("/metrics", tags=["Operation"], response_class=PlainTextResponse)
async def metrics(service: Shared) -> Response:
    """Prometheus text."""
    return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


@router.get("/", include_in_schema=False)
async def page() -> Response:
    """The playground: one file, which loads nothing from anywhere else."""
    policy = "default-src 'none'; connect-src 'self'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    headers = {"content-security-policy": f"{policy}; frame-ancestors 'none'", "x-content-type-options": "nosniff"}
    return HTMLResponse(PAGE, headers=headers)


@router.get("/version", tags=["Operation"])
async def version() -> dict[str, str]:
    return {"version": fa_serve.__version__}
