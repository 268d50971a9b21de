"""Errors of a proxy in front of the server: those of nginx and Caddy have the shape of the server's errors."""

import re
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import httpx
import pytest
from fa_serve.server.errors import ApiError, Forbidden, HttpError, TimedOut, TooLarge, TooManyRequests, Unavailable
from proxies import free_port, program, running, running_nginx, wait_for

DEPLOY = Path(__file__).parents[2] / "deploy"


class Troubled(BaseHTTPRequestHandler):
    """A server that answers late below /slow, and with an error that no proxy makes elsewhere."""

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length", 0))
        self.rfile.read(length)
        if self.path.endswith("/slow"):
            Troubled.ending.wait(20)
            return
        body = b'{"error": "of the server"}'
        self.send_response(413)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST
    ending: ClassVar[threading.Event]

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def troubled():
    Troubled.ending = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Troubled)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    Troubled.ending.set()
    server.shutdown()
    server.server_close()


def assert_errors_are_json(client: httpx.Client, statuses: dict[int, ApiError], ask) -> None:
    """What a proxy answers itself has the shape of the server's errors. ask: sends what gets a status below a path"""
    for status, like in statuses.items():
        for path in ("/v1/chat/completions", "/v1/messages"):
            reply = ask(status, path)
            assert reply.status_code == status, (status, reply.text)
            assert reply.headers["content-type"] == "application/json"
            body = reply.json()
            expected = like.body(path)
            message = body["error"].pop("message")
            assert len(message) > 20
            expected["error"].pop("message")
            assert body == expected, (status, path)
            assert reply.headers.get("retry-after") == (None if like.retry_after is None else str(like.retry_after))


class BadGateway(Unavailable):
    """What a proxy answers for a server that is not there."""

    status = 502


@pytest.mark.slow
def test_errors_of_nginx_are_those_of_the_apis(troubled, tmp_path):
    """Before: pages of HTML, in which clients found no error."""
    nginx = program("nginx")
    text = (DEPLOY / "nginx" / "fa-serve.conf").read_text()
    port = free_port()
    slow = free_port()
    crowded = free_port()
    changes = {
        "server 127.0.0.1:8000;": f"server {troubled};",
        "listen 443 ssl;": f"listen 127.0.0.1:{port};",
        "    listen [::]:443 ssl;\n": "",
        "    ssl_certificate     /etc/ssl/fa-serve/fullchain.pem;\n": "",
        "    ssl_certificate_key /etc/ssl/fa-serve/privkey.pem;\n": "",
        "proxy_read_timeout 600s": "proxy_read_timeout 1s",
    }
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    [server] = re.findall(r"^server \{.*^\}", text, re.MULTILINE | re.DOTALL)
    gone = server.replace(f":{port};", f":{slow};").replace("http://fa_serve", f"http://127.0.0.1:{free_port()}")
    narrow = server.replace(f":{port};", f":{crowded};").replace("addresses 1000", "addresses 1")
    expected = {
        403: Forbidden(""),
        413: TooLarge(""),
        429: TooManyRequests("", retry_after=1),
        502: BadGateway("", retry_after=5),
        504: TimedOut(""),
        414: HttpError(414, ""),
    }
    with running_nginx(nginx, tmp_path, f"{text}\n{gone}\n{narrow}"), httpx.Client(timeout=60) as client:

        def ask(status: int, path: str) -> httpx.Response:
            base = f"http://127.0.0.1:{slow if status == 502 else crowded if status == 429 else port}"
            match status:
                case 403:
                    return client.get(f"{base}/metrics")
                case 413:
                    return client.post(base + path, content=bytes(17 << 20))
                case 414:
                    return client.get(f"{base}{path}?{'x' * 40000}")
                case 429:
                    with socket.create_connection(("127.0.0.1", crowded)) as first:
                        first.sendall(f"GET {path}/slow HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                        time.sleep(0.3)
                        return client.get(base + path)
            return client.post(f"{base}{path}/slow" if status == 504 else base + path, content=b"{}")

        wait_for(client, f"http://127.0.0.1:{port}/")
        assert client.post(f"http://127.0.0.1:{port}/v1/x").json() == {"error": "of the server"}, "it passes as it is"
        metrics = {403, 414}  # of a path that no API has, and of a URL that is not read
        assert_errors_are_json(client, {status: like for status, like in expected.items() if status not in metrics}, ask)
        for status in metrics:
            reply = ask(status, "/v1/models")
            assert reply.status_code == status
            assert reply.json()["error"]["code"] == expected[status].code


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Caddyfile", "Caddyfile.replicas"])
def test_errors_of_caddy_are_those_of_the_apis(troubled, tmp_path, name):
    """Before: bodies without anything."""
    caddy = program("caddy")
    port = free_port()
    late = free_port()
    text = (DEPLOY / "caddy" / name).read_text()
    text = re.sub(r"reverse_proxy( 127\.0\.0\.1:\d+)+", f"reverse_proxy {troubled}", text)
    text = text.replace("response_header_timeout 600s", "response_header_timeout 1s").replace("\t\thealth_uri /ready\n", "")
    text = text.replace("\t\thealth_interval 5s\n", "").replace("\t\tlb_retries 1\n", "")
    ours = text.replace("llm.example.com", f"http://127.0.0.1:{port}")
    gone = text.replace("llm.example.com", f"http://127.0.0.1:{late}").replace(troubled, f"127.0.0.1:{free_port()}")
    (tmp_path / "errors.caddyfile").write_text((DEPLOY / "caddy" / "errors.caddyfile").read_text())
    (tmp_path / "Caddyfile").write_text(f"{{\n\tadmin off\n}}\n{ours}\n{gone}")
    expected = {413: TooLarge(""), 502: BadGateway("", retry_after=5), 504: TimedOut("")}
    with (
        running(caddy, "run", "--adapter", "caddyfile", "--config", str(tmp_path / "Caddyfile")),
        httpx.Client(timeout=60) as client,
    ):

        def ask(status: int, path: str) -> httpx.Response:
            base = f"http://127.0.0.1:{late if status == 502 else port}"
            content = bytes(17 << 20) if status == 413 else b"{}"
            return client.post(f"{base}{path}/slow" if status == 504 else base + path, content=content)

        wait_for(client, f"http://127.0.0.1:{port}/")
        assert client.post(f"http://127.0.0.1:{port}/v1/x").json() == {"error": "of the server"}, "it passes as it is"
        assert_errors_are_json(client, expected, ask)
        reply = client.get(f"http://127.0.0.1:{port}/metrics")
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "forbidden"), "as nginx"
