"""Handles the body of a POST before its endpoint: waits for the client's turn, checks the bounds, and validates the body.

`BodyRoutes` answers every POST of the application instead of FastAPI. FastAPI takes longer for a POST than all the work that is
done here, and its time could not be charged to the client. It still has the same routes, for the schema and for the answer to
other methods.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, get_type_hints

from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette import types as asgi
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from .adapters import ADMINISTRATION, require_administrator
from .bounds.costs import Bill
from .bounds.guard import SMALL_BODY, ReceivedBody, header
from .bounds.json_bounds import JsonTotal
from .errors import MAX_NAME, ApiError, BadRequest, HttpError, response_to, validation_refused
from .service import Service
from .strict import MESSAGE_LISTS

JSON_TYPE = re.compile(r"application/([^;]+\+)?json\s*(;|$)", re.IGNORECASE)
FOREIGN = {
    b"\x1f\x8b": "compressed with gzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"\xef\xbb\xbf": "UTF-8 with a byte order mark",
    b"\xff\xfe": "UTF-16 or UTF-32",
    b"\xfe\xff": "UTF-16",
    b"\x00": "UTF-16 or UTF-32",
    b"{\x00": "UTF-16 or UTF-32",
}
"""What a body probably is that begins with these bytes and is not valid JSON."""


def strict_json(content: bytes) -> Any:
    """Parse JSON. Raises HTTPException. Python's parser would accept NaN, and lone surrogates, which no tokenizer accepts."""
    try:
        return from_json(content, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        kind = next((kind for begin, kind in FOREIGN.items() if content.startswith(begin)), None)
        reason = str(error) if kind is None else f"it is {kind}. Send plain JSON in UTF-8"
        raise HTTPException(400, f"The body is not valid JSON: {reason}.") from None


class BodyRoutes:
    """Middleware that answers each POST of `routes`. A large body is parsed in a thread, not on the event loop.

    An endpoint is called with the body, as an instance of its model, and with the request. Its Response is sent unchanged.
    Raises TypeError for a POST whose endpoint takes other arguments, because its body would have no bounds, or returns another
    type.
    """

    def __init__(self, app: asgi.ASGIApp, service: Service, routes: Iterable[BaseRoute]):
        self._app = app
        self._service = service
        self._routes = {
            route.path: route for route in routes if isinstance(route, APIRoute) and "POST" in (route.methods or ())
        }
        self._models = {path: _model_of(route) for path, route in self._routes.items()}
        self._administrators = {path for path, route in self._routes.items() if ADMINISTRATION in route.tags}

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        route = self._route(scope)
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        try:
            if route.path in self._administrators:  # before the body is read, or an error tells anything
                require_administrator(Request(scope), self._service.settings)
            body = await self._body(self._models[route.path], scope, receive)
            response = await route.endpoint(body, Request(scope, receive))
            await response(scope, receive, send)
        except (ApiError, HTTPException) as error:  # before the response has begun
            await response_to(error, scope)(scope, receive, send)

    def _route(self, scope: asgi.Scope) -> APIRoute | None:
        """The route of a POST; None for other requests and for unknown paths.

        It must be found exactly as FastAPI finds it, because FastAPI would answer a POST that is not found here without any of
        these checks. The pattern of a route ends with `$`, so it also matches a path that ends with a newline (`/pause%0A`).
        """
        if scope["type"] != "http" or scope["method"] != "POST":
            return None
        path = _route_path(scope)
        found = self._routes.get(path)
        return found or next((route for route in self._routes.values() if route.path_regex.match(path)), None)

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


def _route_path(scope: asgi.Scope) -> str:
    """The path without the path of an application that mounts this one, as Starlette's private `get_route_path` returns it
    (starlette/_utils.py)."""
    path: str = scope["path"]
    behind = path.removeprefix(scope.get("root_path", ""))
    return behind if behind[:1] in ("", "/") else path


def _model_of(route: APIRoute) -> type[BaseModel]:
    """The model of the body that the endpoint takes."""
    hints = get_type_hints(route.endpoint)
    reply = hints.pop("return", None)
    if list(hints) != ["body", "request"] or route.path_regex.groups or not issubclass(hints["body"], BaseModel):
        message = (
            f"the endpoint of POST {route.path} must have exactly the parameters body (a pydantic model) and request, and its "
            f"path must have none, got {', '.join(hints) or 'no parameters'} (server/bodies.py)"
        )
        raise TypeError(message)
    if not (isinstance(reply, type) and issubclass(reply, Response)):
        message = (
            f"the endpoint of POST {route.path} must return a Response, such as JSONResponse, and name its reply's type in "
            f"response_model, got {reply} (server/bodies.py)"
        )
        raise TypeError(message)
    model: type[BaseModel] = hints["body"]
    return model


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
    """The body as an instance of its model. Quick checks come first, because the validation may take milliseconds."""
    service.require_ready()
    service.json_bounds.check(content)
    values = strict_json(content) if content else None
    if isinstance(values, dict) and isinstance(name := values.get("model"), str):
        service.require_model(name)
    limit = service.settings.max_messages
    for field in getattr(model, "MESSAGE_LISTS", MESSAGE_LISTS):
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
