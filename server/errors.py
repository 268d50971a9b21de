"""Every error that a client can see, in the shape of the API that the route belongs to.

OpenAI's shape is {"error": {"message", "type", "param", "code"}}. Routes below /v1/messages have Anthropic's, which is
{"type": "error", "error": {"type", "message"}, "request_id"}.

    ApiError (500)
    ├── BadRequest 400         a bad value, an unknown field, a prompt that is too long
    │   └── ParameterRefused   by the engine
    ├── Unauthorized 401       the API key is missing or wrong
    ├── Forbidden 403          the route needs the administrator's key
    ├── NotFound 404           an unknown model or path
    ├── TooLarge 413           the body is too large
    ├── WrongHost 421          the request names a host that this server does not serve
    ├── TooManyRequests 429    the queue is full; carries Retry-After
    ├── ClientGone 499         the client has disconnected; only the logs show it
    ├── EngineFailed 500       the engine could not finish the request
    ├── Unavailable 503        the server is loading, draining or dead; carries Retry-After
    ├── TimedOut 504           the request took longer than its time limit
    └── HttpError              an error of the protocol or of the routing, with any status

Handlers raise these errors and do not know how they are written as JSON. `response_to` writes them and FastAPI's own errors in
the same shapes, and `install` makes an application use it. An unexpected failure becomes a 500 that shows no internals.

`parameter_refused` turns the engine's ParameterError into a 400. It reads the error's fields; nothing parses a message.
`trials_failed` turns the failure of a process of fa_serve/sandbox into a 503.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette import types as asgi
from starlette.exceptions import HTTPException
from starlette.routing import Match

from fa_serve.sandbox.trials import Cancelled, TrialProcessError
from fa_serve.spec import ParameterCode, ParameterError

from .rules import rule_of_all

INTERNAL_ERROR = "The server failed to answer this request. The server's log has the reason."
PARAMETER_CODES: dict[ParameterCode, str] = {
    "invalid_value": "invalid_value",
    "context_length_exceeded": "context_length_exceeded",
    "no_tokenizer": "unsupported_parameter",
    "duplicate_request_id": "invalid_value",
    "unsupported": "unsupported_parameter",
}

ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}  # any other status: invalid_request_error below 500, api_error from 500 on

RETRY_SECONDS = 5  # when a client may try again while the server, or one of its processes, loads, drains or restarts
MIN_PATH = 5  # an error suggests a route only if the route and the unknown path have at least this many characters
MAX_NAME = 200  # characters of an unknown name that an error repeats
MAX_NAMED = 8  # how many of the served names the error for an unknown model lists

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 77
_short.maxlevel = 3


class ApiError(Exception):
    """An error with its HTTP status and the fields of OpenAI's error object.

    message:     the text for people
    param:       the request's field that is wrong, or None
    code:        the code for programs; None takes the class's code
    retry_after: seconds after which a client may try again, or None
    """

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, retry_after: int | None = None):
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.code = code or self.code

    def openai_body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def anthropic_body(self, request_id: str | None = None) -> dict[str, Any]:
        kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}, "request_id": request_id}

    def body(self, path: str, request_id: str | None = None) -> dict[str, Any]:
        """The error in the shape of the API that the path belongs to."""
        return self.anthropic_body(request_id) if is_anthropic(path) else self.openai_body()

    def response(self, scope: asgi.Scope) -> JSONResponse:
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        body = self.body(scope["path"], scope.get("state", {}).get("request_id"))
        return JSONResponse(body, self.status, headers)


class BadRequest(ApiError):
    status = 400
    type = "invalid_request_error"


class ParameterRefused(BadRequest):
    """A parameter that the engine refuses. cause: the engine's error; field: the request's field that the parameter is from"""

    def __init__(self, cause: ParameterError, field: str):
        message = f"{cause}." if field == cause.field else f"{field}: {cause}."
        super().__init__(message, param=field, code=PARAMETER_CODES[cause.code])
        self.cause = cause
        self.field = field


class Unauthorized(ApiError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"

    def response(self, scope: asgi.Scope) -> JSONResponse:
        response = super().response(scope)
        response.headers["www-authenticate"] = "Bearer"
        return response


class Forbidden(ApiError):
    status = 403
    type = "permission_error"
    code = "forbidden"


class NotFound(ApiError):
    status = 404
    type = "invalid_request_error"


class TooLarge(ApiError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class WrongHost(ApiError):
    status = 421
    type = "invalid_request_error"
    code = "host_not_allowed"


class TooManyRequests(ApiError):
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class ClientGone(ApiError):
    status = 499
    type = "client_closed_request"


class EngineFailed(ApiError):
    code = "engine_error"


class Unavailable(ApiError):
    status = 503
    type = "service_unavailable_error"
    code = "service_unavailable"


class TimedOut(ApiError):
    status = 504
    type = "timeout_error"
    code = "request_timeout"


class HttpError(ApiError):
    """An error of the protocol or of the routing, with any status."""

    def __init__(self, status: int, message: str, *, code: str | None = None):
        super().__init__(message, code=code)
        self.status = status
        self.type = "server_error" if status >= 500 else "invalid_request_error"


def is_anthropic(path: str) -> bool:
    return path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/")


def install(app: FastAPI) -> None:
    """Make the application write every error in the shape of its route."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        return response_to(error, request.scope)

    for kind in (ApiError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def response_to(error: Exception, scope: asgi.Scope) -> JSONResponse:
    """The error as a response, in the shape of its route."""
    match error:
        case ApiError():
            return error.response(scope)
        case RequestValidationError():
            return validation_refused(error.errors()).response(scope)
        case HTTPException():
            methods = _methods_of_path(scope) if error.status_code == 405 else ""
            message = _no_route(scope, methods) if error.status_code in (404, 405) else str(error.detail)
            response = HttpError(error.status_code, message).response(scope)
            response.headers.update(error.headers or {})
            if methods:
                response.headers["Allow"] = methods
            return response
    return ApiError(INTERNAL_ERROR).response(scope)


def _methods_of_path(scope: asgi.Scope) -> str:
    """The methods of a path that lacks the one of the request. Starlette names those of the first route only."""
    matching = (route for route in scope["app"].routes if route.matches(scope)[0] is not Match.NONE)
    return ", ".join(sorted({method for route in matching for method in getattr(route, "methods", None) or ()}))


def _no_route(scope: asgi.Scope, methods: str) -> str:
    """The message for an unknown route. It names the methods of the path, or a similar path with or without /v1."""
    path = scope["path"]
    message = f"There is no route {scope['method']} {path}."
    if methods:
        return f"{message} This path takes {methods}."
    routes = (getattr(route, "path", "") for route in scope["app"].routes)
    known = [each for each in routes if len(path) >= MIN_PATH <= len(each) and (path in each or each in path)]
    nearest = min(known, key=lambda each: abs(len(each) - len(path)), default=None)
    return message if nearest is None else f"{message} Did you mean {nearest}?"


def parameter_refused(error: ParameterError, param: str) -> ParameterRefused:
    """The error for a parameter that the engine refuses. param: the request's field that the parameter was made from"""
    return ParameterRefused(error, param)


def trials_failed(error: TrialProcessError | Cancelled) -> Unavailable:
    """The process that does work for a request has failed, or ends with the server. The request itself may be fine."""
    reason = "the server is shutting down" if isinstance(error, Cancelled) else str(error)
    return Unavailable(f"The server is not ready: {reason}.", retry_after=RETRY_SECONDS)


def validation_refused(errors: Sequence[Any]) -> BadRequest:
    """One sentence from pydantic's list of errors.

    A value of a union type has one error for each member of the union. The errors with the deepest location belong to the
    member that the client most likely meant.
    """
    error = max(errors, key=lambda e: len(e["loc"]))
    param = _path(error["loc"])
    match error["type"]:
        case "unknown_field":
            return _unknown_field(param, error["ctx"]["field"], error["ctx"]["nearest"])
        case "missing" if param:
            return BadRequest(f"Missing required field: {param}.", param=param, code="missing_required_parameter")
        case "model_attributes_type" | "model_type" | "dict_type" | "missing" if not param:
            return BadRequest("The body must be a JSON object, sent with Content-Type: application/json.")
        case "unknown_type":  # a block or an item has an unknown `type`
            param = f"{param}.type"
            kind = error["input"].get("type") if isinstance(error["input"], dict) else error["input"]
            message = f"{param} {error['msg']}, got {_short.repr(kind)}: leave it out."
            return BadRequest(message, param=param, code="invalid_value")
        case "field" | "unsupported":
            param = f"{param}.{error['ctx']['field']}" if param else error["ctx"]["field"]
            code = "unsupported_parameter" if error["type"] == "unsupported" else "invalid_value"
            return BadRequest(f"{param} {error['ctx']['rule']}.", param=param, code=code)
    same = [each for each in errors if len(each["loc"]) == len(error["loc"]) and _path(each["loc"]) == param]
    remedy = f": {error['ctx']['remedy']}" if "remedy" in error.get("ctx", {}) else ""
    # reprlib shortens while it writes: repr() would first write out a value of many megabytes
    message = f"{param} {rule_of_all(same)}, got {_short.repr(error['input'])}{remedy}."
    return BadRequest(message, param=param, code="invalid_value")


def _unknown_field(parent: str | None, name: str, nearest: str) -> BadRequest:
    """nearest: the field of the same object that was probably meant, or "" """
    param = ".".join(filter(None, (parent, name[:MAX_NAME])))
    remedy = f"Did you mean {nearest}?" if nearest else "Leave it out."
    return BadRequest(f"Unknown or unsupported field: {param}. {remedy}", param=param, code="unknown_parameter")


def _path(loc: Sequence[str | int]) -> str | None:
    """The location as fields and indices, without the names of union members.

    ("body", "messages", 0, "list[TextPart]", 1, "type") becomes "messages[0][1].type".
    """
    text = ""
    for part in loc[1:]:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int"):
            text += f".{part}" if text else part
    return text or None
