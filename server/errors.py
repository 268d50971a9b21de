"""Every error a client can see, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}.

    ApiError (500)
    ├── BadRequest 400         a bad value, an unknown field, a prompt that is too long
    ├── Unauthorized 401
    ├── NotFound 404           a model or a path
    ├── TooLarge 413           the body
    ├── TooManyRequests 429    the queue is full; carries Retry-After
    ├── ClientGone 499         nobody is left to read it; for the logs
    ├── EngineFailed 500       the engine gave the request up
    ├── Unavailable 503        loading, draining or dead; carries Retry-After
    └── TimedOut 504

Handlers raise these and know nothing of JSON; `install` teaches an application to write them, and FastAPI's own errors, in
the same shape. A failure that nobody foresaw is a 500 without internals (guard.py).
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = 77
SHORT.maxlevel = 3
UNFORESEEN = "The server failed on this request; the reason is in its log."


class ApiError(Exception):
    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, retry_after: int | None = None):
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.code = code or self.code

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return JSONResponse(self.body(), self.status, headers)


class BadRequest(ApiError):
    status = 400
    type = "invalid_request_error"


class Unauthorized(ApiError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"

    def response(self) -> JSONResponse:
        response = super().response()
        response.headers["www-authenticate"] = "Bearer"
        return response


class NotFound(ApiError):
    status = 404
    type = "invalid_request_error"


class TooLarge(ApiError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


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


def install(app: FastAPI) -> None:
    async def known(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return error.response()

    async def invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return bad_request(error.errors()).response()

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        detail = f"Nothing at {request.method} {request.url.path}." if error.status_code in (404, 405) else str(error.detail)
        body = {"message": detail, "type": "invalid_request_error", "param": None, "code": None}
        return JSONResponse({"error": body}, error.status_code, error.headers)

    app.add_exception_handler(ApiError, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)


def bad_request(errors: Sequence[Any]) -> BadRequest:
    """One sentence from pydantic's list. Of a union's many complaints the deepest is the one about what was meant."""
    error = max(errors, key=lambda e: len(e["loc"]))
    param = _path(error["loc"])
    match error["type"]:
        case "extra_forbidden":
            param = ".".join(filter(None, (_path(error["loc"][:-1]), str(error["loc"][-1]))))
            return BadRequest(f"Unknown or unsupported field: {param}.", param=param, code="unknown_parameter")
        case "missing" if param:
            return BadRequest(f"Missing required field: {param}.", param=param, code="missing_required_parameter")
        case "model_attributes_type" | "model_type" | "dict_type" | "missing" if not param:
            return BadRequest("The body must be a JSON object, sent with Content-Type: application/json.")
        case "field" | "unsupported":
            param = f"{param}.{error['ctx']['field']}" if param else error["ctx"]["field"]
            code = "unsupported_parameter" if error["type"] == "unsupported" else "invalid_value"
            return BadRequest(f"{param} {error['ctx']['rule']}.", param=param, code=code)
    # not `repr` cut short: that would write out a value of megabytes first
    return BadRequest(f"{param}: {error['msg']}, got {SHORT.repr(error['input'])}.", param=param, code="invalid_value")


def _path(loc: Sequence[str | int]) -> str | None:
    """("body", "messages", 0, "list[TextPart]", 1, "type") -> "messages[0][1].type": fields and indices, no union tags."""
    text = ""
    for part in loc[1:]:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int"):
            text += f".{part}" if text else part
    return text or None
