"""The bodies of POSTs over a fake engine: what is read, what is refused, and that no POST misses its bounds."""

import asyncio
import gc
import gzip
import json
import threading
import weakref

import pytest
from fa_serve.server import bodies, routes
from fa_serve.server.app import create_app
from fa_serve.server.bounds.costs import REQUEST_SECONDS
from fa_serve.server.schemas import CompletionRequest
from fa_serve.server.settings import Settings
from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette._utils import get_route_path

pytestmark = pytest.mark.anyio


CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}


TEXT = {"model": "fake", "prompt": "Hi"}


@pytest.mark.parametrize("root", ["", "/", "/llm", "/llm/"])
@pytest.mark.parametrize("path", ["", "/", "/llm", "/llm/", "/llm/v1/x", "/llmv1", "/v1/x"])
def test_paths_behind_a_mount_are_those_of_starlette(root, path):
    """It keeps the function to itself."""
    scope = {"type": "http", "path": path, "root_path": root}
    assert bodies._route_path(scope) == get_route_path(scope)
    assert bodies._route_path({"type": "http", "path": path}) == path


async def test_a_large_body_is_parsed_beside_the_event_loop(serving, monkeypatch):
    threads = []
    validated = bodies._validated
    monkeypatch.setattr(bodies, "_validated", lambda *given: threads.append(threading.current_thread()) or validated(*given))
    async with serving() as client:
        for size in (100, 100_000):
            headers = {"content-type": "application/json"}
            body = json.dumps(TEXT).encode().rjust(size)
            assert (await client.post("/v1/completions", content=body, headers=headers)).status_code == 200
    assert threads[0] is threading.main_thread()
    assert threads[1].name.startswith("parser")


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/chat/completions", {**CHAT, "messages": [{}] * 11}, 400, "messages"),
        ("/v1/chat/completions", {**CHAT, "messages": [{}] * 10}, 400, "messages[0].role"),
        ("/v1/chat/completions", {**CHAT, "messages": [{}] * 60}, 413, None),
        ("/v1/completions", {**TEXT, "prompt": [5] * 200}, 413, None),
        ("/v1/completions%0A", {**TEXT, "prompt": [5] * 200}, 413, None),
        ("/v1/completions", {**TEXT, "logit_bias": {"a": "b"}}, 400, "logit_bias.a"),
        ("/tokenize", {"messages": [{}] * 11}, 400, "messages"),
    ],
)
async def test_values_of_a_body_are_bounded(serving, conforms, path, body, status, param):
    async with serving(max_messages=10, max_json_fields=60, max_json_values=100) as client:
        response = await client.post(path, json=body)
    assert response.status_code == status
    conforms("ErrorResponse", response.json())
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "3", "null", '{"model": NaN}', '{"model": "\\ud800"}', "[" * 50_000], ids=range(8)
)
async def test_no_json_object(serving, conforms, content):
    async with serving() as client:
        response = await client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    conforms("ErrorResponse", response.json())


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
        ("", 400),
        ("text/plain", 400),
        ("text/json", 400),
        ("application/jsonl", 400),
        ("multipart/form-data", 400),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_only_json_is_read(serving, path, content_type, status):
    """A page of another origin can make a browser send other content types without a preflight request."""
    body = TEXT if path == "/v1/completions" else {"prompt": "x"}
    async with serving() as client:
        response = await client.post(path, content=json.dumps(body), headers={"content-type": content_type})
    assert response.status_code == status
    if status == 400:
        assert response.json()["error"]["message"].endswith("sent with Content-Type: application/json.")


@pytest.mark.parametrize("size", [100, 100_000], ids=["parsed at once", "parsed in a thread"])
async def test_a_refused_body_is_not_kept(serving, monkeypatch, size):
    """Ten refused bodies of 16 MB a second would fill the memory: texts alone do not make the garbage collector run."""

    class Values(dict):
        pass

    kept = []

    def parsed(content):
        values = Values(json.loads(content))
        kept.append(weakref.ref(values))
        return values

    monkeypatch.setattr(bodies, "strict_json", parsed)
    async with serving() as client:
        gc.collect()
        gc.disable()
        try:
            response = await client.post("/v1/completions", json={**TEXT, "priority": "x" * size})
            await asyncio.sleep(0.05)
            assert response.status_code == 400
            assert [each() for each in kept] == [None]
        finally:
            gc.enable()


async def test_a_post_has_its_bounds_wherever_it_is_declared(serving, monkeypatch):
    """FastAPI would read a body of any depth and encoding, and nobody's turn would be asked for."""

    class Echo(BaseModel):
        text: str

    async def echo(body: Echo, request: Request) -> Response:
        return JSONResponse({"text": body.text, "seconds": request.scope["state"]["bill"].seconds})

    monkeypatch.setattr(routes.router, "routes", [*routes.router.routes])
    routes.router.add_api_route("/echo", echo, methods=["POST"])
    async with serving(max_json_values=8) as client:
        answer = await client.post("/echo", json={"text": "a"})
        assert answer.json()["text"] == "a"
        assert answer.json()["seconds"] > REQUEST_SECONDS
        deep = await client.post("/echo", json={"text": "a", "more": [0] * 9})
        assert deep.status_code == 413
        assert "--max-json-values" in deep.json()["error"]["message"]
        packed = await client.post("/echo", content=gzip.compress(b"{}"), headers={"content-encoding": "gzip"})
        assert packed.status_code == 415


@pytest.mark.parametrize("path", ["/bare", "/named/{name}"])
def test_a_post_that_would_have_no_bounds_ends_the_start(serving, monkeypatch, path):
    async def bare() -> dict[str, str]:
        return {}

    async def named(body: CompletionRequest, request: Request, name: str) -> dict[str, str]:
        return {}

    monkeypatch.setattr(routes.router, "routes", [*routes.router.routes])
    routes.router.add_api_route(path, bare if path == "/bare" else named, methods=["POST"])
    with pytest.raises(
        TypeError, match=f"the endpoint of POST {path} must have exactly the parameters body [(]a pydantic model[)] and request"
    ):
        create_app(None, Settings())


def test_a_post_that_returns_no_response_is_refused_at_the_start(monkeypatch):
    """FastAPI would make a response of a dictionary. Here nothing would, and each request would get a 500."""

    async def plain(body: CompletionRequest, request: Request) -> dict[str, str]:
        return {}

    monkeypatch.setattr(routes.router, "routes", [*routes.router.routes])
    routes.router.add_api_route("/plain", plain, methods=["POST"])
    with pytest.raises(TypeError, match=r"the endpoint of POST /plain must return a Response, .*, got dict"):
        create_app(None, Settings())
