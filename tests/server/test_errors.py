"""Errors as clients see them, and the rule that no code reads an error's message.

A message is for people. Programs read the fields of an error, so rewording a message must change nothing else. One test looks
for code in server/ and fa_serve/client/ that takes a message apart; another rewords every message of the engine's errors and
compares all HTTP answers.
"""

import ast
import asyncio
import time
from pathlib import Path

import httpx
import pytest
from fa_serve.server.app import create_app
from fa_serve.server.errors import validation_refused
from fa_serve.server.schemas import CompletionRequest
from fa_serve.server.settings import Settings
from pydantic import ValidationError

from fa_serve import ParameterError
from fa_serve.engine import AsyncEngine, EngineConfig, EngineDeadError, QueueFullError, RequestError

ROOT = Path(__file__).parents[2]
READERS = {
    "split",
    "rsplit",
    "partition",
    "rpartition",
    "startswith",
    "endswith",
    "find",
    "rfind",
    "index",
    "count",
    "removeprefix",
    "removesuffix",
    "replace",
    "match",
    "fullmatch",
    "search",
    "findall",
    "sub",
}


def message_of(value) -> str:
    try:
        CompletionRequest(model="m", prompt="x", n=value)
    except ValidationError as error:
        return validation_refused([{**e, "loc": ("body", *e["loc"])} for e in error.errors()]).message
    raise AssertionError(f"{value!r} passed")


def test_a_huge_value_is_neither_written_out_nor_sent_back():
    deep = ["x"]
    for _ in range(500):
        deep = [deep]
    for value in ("x" * 10_000_000, [{"a": "b" * 1000}] * 1_000_000, deep, {str(i): i for i in range(100_000)}):
        begin = time.thread_time()
        text = message_of(value)
        assert time.thread_time() - begin < 0.2, "repr of the whole would take longer"
        assert len(text) < 700
        assert text.startswith("n must be an integer, got ")


@pytest.mark.parametrize("name", ["foo-bar", "str", "", "beam width"])
def test_an_unknown_field_is_named_whatever_its_name_is(name):
    with pytest.raises(ValidationError) as refused:
        CompletionRequest.model_validate({"model": "m", "prompt": "p", name: 1})
    error = validation_refused([each | {"loc": ("body", *each["loc"])} for each in refused.value.errors()])
    assert (error.param or "", error.code) == (name, "unknown_parameter")


def test_a_small_value_is_shown():
    assert message_of("three").endswith("got 'three'.")


def caught_names(tree):
    """The names that errors have in `except ... as name`, and the usual names of parameters that are errors."""
    caught = {node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.name}
    return caught | {"error", "exc", "exception"}


def is_message(node, names):
    """str(error), repr(error), f"{error}", error.args, or the message attribute of anything."""
    match node:
        case ast.Call(func=ast.Name(id="str" | "repr"), args=[ast.Name(id=name)]):
            return name in names
        case ast.Attribute(attr="message"):
            return True
        case ast.Attribute(value=ast.Name(id=name), attr="args"):
            return name in names
        case ast.Call(func=ast.Attribute(attr="getMessage")):
            return True
        case ast.JoinedStr(values=[ast.FormattedValue(value=ast.Name(id=name))]):
            return name in names
    return False


def read_messages(source):
    """The lines in which a message is compared, searched, split or indexed."""
    tree = ast.parse(source)
    names = caught_names(tree)
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, comparators=comparators):
                read = [left, *comparators]
            case ast.Subscript(value=value):
                read = [value]
            case ast.Call(func=ast.Attribute(value=value, attr=attribute), args=arguments) if attribute in READERS:
                read = [value, *arguments]
            case ast.Match(subject=subject):
                read = [subject]
            case ast.Assign(value=value):  # a message under another name would escape this search
                read = [value] if not isinstance(value, ast.Attribute) else []
            case _:
                read = []
        found += [ast.unparse(node) for each in read if is_message(each, names)]
    return found


@pytest.mark.parametrize("folder", ["server", "fa_serve/client"])
def test_no_code_reads_a_message(folder):
    modules = sorted((ROOT / folder).rglob("*.py"))
    assert len(modules) > 3
    assert {str(path): found for path in modules if (found := read_messages(path.read_text()))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "if 'leave no token' in str(error): pass",
        "name = str(error).partition(' ')[0]",
        "name = str(error).split()[0]",
        "if output.error.message == 'out of pages': pass",
        "if error.args[0].startswith('prompt'): pass",
        "phase, _, detail = record.getMessage().partition(': ')",
        "if re.search('no token', str(error)): pass",
        "text = str(error)",
        "kind = f'{error}'[:6]",
    ],
)
def test_code_that_reads_a_message_is_found(line):
    assert read_messages(f"try: f()\nexcept ValueError as error:\n    {line}")


@pytest.mark.parametrize(
    "line",
    [
        "if error.code == 'context_length_exceeded': pass",
        "fail(str(error))",
        "raise BadRequest(f'{error}.', param=error.field)",
        "log.error('%s failed: %s', name, error.message)",
        "param = fields.get(error.field)",
    ],
)
def test_code_that_reads_fields_is_not_blamed(line):
    assert read_messages(f"try: f()\nexcept ValueError as error:\n    {line}") == []


NO_TOKEN = {"guided_regex": "[0-9]{30}", "allowed_token_ids": [5]}
TEXT = {"model": "fa-serve-demo", "prompt": "import os\n", "max_tokens": 4}
CHAT = {"model": "fa-serve-demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
REFUSED = [
    *(
        ("/v1/completions", TEXT | fields)
        for fields in (
            {"prompt": "x" * 100_000},
            {"prompt": [2048]},
            {"prompt": [1] * 600},
            {"logit_bias": {"5000": 1}},
            {"stop_token_ids": [5000]},
            {"allowed_token_ids": [5000]},
            {"logit_bias": {str(token): 1 for token in range(1025)}},
            {"min_tokens": 9},
            {"guided_regex": "("},
            {"guided_grammar": "nonsense"},
            {"guided_json": "{"},
            {"guided_json": {"type": "nonsense"}},
            {"guided_json": {"$ref": "#"}},
            {"guided_grammar": "start: start"},
            {"structured_outputs": {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}},
            {"structured_outputs": {"json": {"type": 3}}},
            NO_TOKEN,
        )
    ),
    *(
        ("/v1/chat/completions", CHAT | fields)
        for fields in (
            {"messages": [{"role": "user", "content": "x" * 100_000}]},
            {"logit_bias": {"5000": 1}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 3}}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"allOf": [{"$ref": "#"}]}}}},
            NO_TOKEN,
        )
    ),
]


async def refusals():
    """Status, type, param and code of the answer to each request of REFUSED, plain and streamed, and the messages."""
    config = EngineConfig(device="cpu", num_pages=32, page_size=16, max_num_seqs=8)
    app = create_app(AsyncEngine(config), Settings(max_num_seqs=8))
    transport = httpx.ASGITransport(app)
    found = []
    messages = []
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        await app.state.service.loaded()
        for path, body in REFUSED:
            for stream in (False, True):
                response = await client.post(path, json=body | {"stream": stream})
                assert response.status_code >= 400, (body, response.text)
                error = response.json()["error"]
                found.append((response.status_code, error["type"], error["param"], error["code"]))
                messages.append(error["message"])
    return found, messages


@pytest.mark.slow
def test_rewording_every_message_of_the_engine_changes_only_messages(monkeypatch):
    before, plain = asyncio.run(refusals())
    assert {status for status, *_ in before} == {400}
    assert all(param for _, _, param, _ in before)
    assert {code for *_, code in before} >= {"invalid_value", "context_length_exceeded"}

    make = RequestError.__init__
    monkeypatch.setattr(ParameterError, "__str__", lambda self: "entirely other words")
    for kind in (QueueFullError, EngineDeadError):
        monkeypatch.setattr(kind, "__str__", lambda self: "entirely other words", raising=False)
    monkeypatch.setattr(RequestError, "__init__", lambda self, code, message: make(self, code, "entirely other words"))
    after, reworded = asyncio.run(refusals())
    assert after == before
    assert sum("entirely other words" in message for message in reworded) >= len(reworded) // 2
    assert not any("entirely other words" in message for message in plain)
    assert not any("NoExtensionBias" in message for message in plain), "a name of llguidance's code says nothing to a client"
