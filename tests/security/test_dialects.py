"""Each route for answers refuses what is unauthenticated, oversized or malformed, in the words of its API."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from server_process import ServerProcess

OPENAI = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
ANTHROPIC = ("/v1/messages", "/v1/messages/count_tokens")
KEY = {"authorization": "Bearer se#cret"}
JSON = {"content-type": "application/json"}
TYPES = {
    404: "not_found_error",
    400: "invalid_request_error",
    401: "authentication_error",
    405: "invalid_request_error",
    413: "request_too_large",
}


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("# the first is for tests\nse#cret\n")
    limits = ["--max-body-bytes", "20000", "--max-json-values", "500", "--max-json-fields", "200", "--max-messages", "5"]
    served = start_server(*limits, "--body-timeout", "1", "--log-level", "error", "--api-key-file", str(keys))
    yield served
    served.end()


@pytest.fixture(scope="module")
def url(server: ServerProcess) -> str:
    return server.url


def check(path: str, status: int, reply: dict) -> None:
    if path in OPENAI:
        assert reply.keys() == {"error"}
        assert reply["error"].keys() == {"message", "type", "param", "code"}
    else:
        assert reply.keys() == {"type", "error", "request_id"}
        assert (reply["type"], reply["error"]["type"]) == ("error", TYPES.get(status, "invalid_request_error"))
        assert reply["error"].keys() == {"type", "message"}


BAD = {
    "nothing": (b"", 400),
    "half of an object": (b'{"model":', 400),
    "a list": (b"[]", 400),
    "a number that JSON lacks": (b'{"model": NaN}', 400),
    "half of a surrogate pair": (b'{"model": "\\ud800"}', 400),
    "too many bytes": (b" " * 20_001, 413),
    "too many values": (b"[" + b"1," * 600 + b"1]", 413),
    "too many fields": (b"[" + b"{}," * 300 + b"{}]", 413),
    "too deep": (b"[" * 190 + b"]" * 190, 400),
    "another model": (
        b'{"model": "x", "prompt": "a", "messages": [{"role": "user", "content": "a"}], "input": "a", "max_tokens": 1}',
        404,
    ),
}


@pytest.mark.every_case
@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("path", [*OPENAI, *ANTHROPIC])
def test_bad_bodies(url: str, path: str, kind: str) -> None:
    body, status = BAD[kind]
    reply = httpx.post(url + path, content=body, headers=KEY | JSON)
    assert reply.status_code == status, reply.text
    check(path, status, reply.json())


@pytest.mark.parametrize("path", [*OPENAI, *ANTHROPIC])
def test_strangers_are_told_before_anything_is_read(url: str, path: str) -> None:
    wrong = ({"authorization": f"Bearer {key}"} for key in ("wrong", "se", "#cret", "# the first is for tests"))
    for headers in ({}, {"x-api-key": "wrong"}, {"x-api-key": ""}, *wrong):
        reply = httpx.post(url + path, content=b" " * 30_000, headers=headers | JSON)
        assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
        check(path, 401, reply.json())
    get = httpx.get(url + path, headers=KEY)
    assert get.status_code == 405
    check(path, 405, get.json())


def test_sighup_is_ignored(server: ServerProcess) -> None:
    server.process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert server.process.poll() is None


@pytest.mark.parametrize(("path", "field"), [("/v1/responses", "input"), ("/v1/messages", "messages")])
def test_conversations_are_bounded(url: str, path: str, field: str) -> None:
    body = {"model": "fa-serve-demo", field: [{"role": "user", "content": "a"}] * 6, "max_tokens": 1}
    reply = httpx.post(url + path, json=body, headers=KEY)
    assert reply.status_code == 400
    assert f"{field} must hold at most 5 messages (--max-messages), got 6." in reply.text


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_a_body_that_does_not_arrive(url: str, path: str) -> None:
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port), timeout=10) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer se#cret\r\nContent-Length: 100\r\n\r\n{{"
        connection.sendall(head.encode())
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408")
    check(path, 408, json.loads(body))
