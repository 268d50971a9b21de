"""What a hostile client sends: bodies, and bytes that are no request yet. Each attack is bounded in count and time.

`BODIES` has bodies for the routes, by name. `WIRE` has attacks on the connection, which take the address and a key. The
tests run each of them alone, and benchmarks/soak/abuse.py mixes them.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

MODEL = "fa-serve-demo"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
Address = tuple[str, int]
_fresh = itertools.count()  # so that no cache has seen a body before


def completion(**fields: Any) -> tuple[str, bytes]:
    return COMPLETIONS, json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 4} | fields).encode()


def chat(**fields: Any) -> tuple[str, bytes]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    return CHAT, json.dumps(body | fields).encode()


def _with(path: str, field: str, value: bytes) -> tuple[str, bytes]:
    """A body with a value that Python's json cannot or would not write."""
    given = b'"prompt":"x"' if path == COMPLETIONS else b'"messages":[{"role":"user","content":"x"}]'
    return path, b'{"model":"%b",%b,"%b":%b}' % (MODEL.encode(), given, field.encode(), value)


def empty_messages(count: int = 3_300_000) -> tuple[str, bytes]:
    return CHAT, b'{"model":"%b","messages":[%b]}' % (MODEL.encode(), b",".join([b"{}"] * count))


def empty_items(count: int = 3_300_000) -> tuple[str, bytes]:
    return RESPONSES, b'{"model":"%b","input":[%b]}' % (MODEL.encode(), b",".join([b"{}"] * count))


def empty_blocks(count: int = 3_300_000) -> tuple[str, bytes]:
    content = b'{"role":"user","content":[%b]}' % b",".join([b"{}"] * count)
    return MESSAGES, b'{"model":"%b","max_tokens":4,"messages":[%b]}' % (MODEL.encode(), content)


def unknown_keys(count: int = 1_400_000) -> tuple[str, bytes]:
    return CHAT, b'{"model":"%b",%b}' % (MODEL.encode(), b",".join(b'"%x":0' % i for i in range(count)))


def large_schema(size: int = 169_000) -> dict[str, Any]:
    """A JSON schema of about `size` bytes that no cache has seen."""
    each = 65
    number = next(_fresh)
    return {
        "type": "object",
        "properties": {
            f"field_{number}_{i}": {"type": "string", "pattern": "[a-z]{1,64}", "maxLength": 90} for i in range(size // each)
        },
        "required": [f"field_{number}_0"],
    }


def hostile_regex() -> str:
    """The expanded regular expression has a million states; the letters make it a new one each time."""
    number = next(_fresh)
    letters = chr(ord("a") + number % 26) + chr(ord("A") + number // 26 % 26)
    return f"((({letters}{{100}}){{100}}){{100}})z"


def deep_schema(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def doubling_references(levels: int = 40) -> dict[str, Any]:
    """A schema whose references stand for 2^levels strings."""
    definitions: dict[str, Any] = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(levels)}
    return {"$defs": definitions | {f"a{levels}": {"type": "string"}}, "$ref": "#/$defs/a0"}


def product_of_alternatives(factors: int = 12, size: int = 6) -> dict[str, Any]:
    """allOf over anyOf: size^factors combinations."""

    def one(i: int, j: int) -> dict[str, Any]:
        return {"type": "object", "properties": {f"p{i}_{j}": {"type": "string"}}, "required": [f"p{i}_{j}"]}

    return {"allOf": [{"anyOf": [one(i, j) for j in range(size)]} for i in range(factors)]}


def tool_call(arguments: str) -> tuple[str, bytes]:
    """A chat in which the assistant has called a function with these arguments, JSON inside of a text."""
    call = {"id": "\r\n\x00", "type": "function", "function": {"name": "f\n", "arguments": arguments}}
    return chat(messages=[{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}])


def many_tool_calls(count: int = 120) -> tuple[str, bytes]:
    """Calls whose arguments are within the bounds of one call, and have five million objects together."""
    arguments = '{"a":[' + "{}," * 43_000 + "{}]}"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return chat(messages=[{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call] * count}])


def unusual_roles(count: int = 4_900) -> tuple[str, bytes]:
    """Messages that must be found in the prompt, behind 12 MB of another message."""
    critics = [{"role": "critic", "content": f"the {i}th"} for i in range(count)]
    return chat(messages=[{"role": "user", "content": "word " * 2_400_000}, *critics])


AMBIGUOUS = 'start: s\ns: s s | s s s | s s s s | t\nt: t t | "a" | "b" | "ab"'
LONG_ANSWER = {"max_tokens": 1900, "temperature": 1.5}

BODIES: dict[str, Callable[[], tuple[str, bytes]]] = {
    # the shape of the body
    "empty-messages": empty_messages,
    "empty-items": empty_items,
    "empty-blocks": empty_blocks,
    "unknown-keys": unknown_keys,
    "unknown-keys-of-a-message": lambda: (CHAT, b'{"messages":[%b]}' % unknown_keys(700_000)[1]),
    "nested-lists": lambda: _with(CHAT, "tools", b"[" * 100_000 + b"]" * 100_000),
    "nested-objects": lambda: _with(CHAT, "tools", b'{"a":' * 100_000 + b"0" + b"}" * 100_000),
    "many-nested-objects": lambda: _with(CHAT, "tools", b"[%b]" % b",".join([b'{"a":' * 90 + b"0" + b"}" * 90] * 8_000)),
    "duplicate-keys": lambda: _with(COMPLETIONS, "user", b'"x","user":' * 1_000_000 + b'"x"'),
    "a-number-of-a-million-digits": lambda: _with(COMPLETIONS, "seed", b"9" * 1_000_000),
    "a-float-of-a-million-digits": lambda: _with(COMPLETIONS, "temperature", b"0." + b"1" * 1_000_000),
    "escapes": lambda: _with(COMPLETIONS, "user", b'"' + b"\\u0041" * 2_000_000 + b'"'),
    "a-long-value-that-is-refused": lambda: _with(COMPLETIONS, "cache_salt", b'"' + b"x" * 10_000_000 + b'"'),
    "a-long-name-of-a-model": lambda: (COMPLETIONS, b'{"prompt":"x","model":"%b"}' % (b"x" * 15_000_000)),
    "content-parts": lambda: chat(messages=[{"role": "user", "content": [{"type": "text", "text": ""}] * 250_000}]),
    "unknown-content-parts": lambda: chat(messages=[{"role": "user", "content": [{}] * 2_000_000}]),
    "tool-calls": lambda: chat(messages=[{"role": "assistant", "tool_calls": [{}] * 2_000_000}]),
    "tools": lambda: chat(tools=[{"type": "function", "function": {"name": f"f{i}"}} for i in range(100_000)]),
    "broken-tools": lambda: chat(tools=[{}] * 2_000_000),
    "metadata": lambda: chat(metadata={f"k{i}": "v" for i in range(500_000)}),
    # the work that it asks for
    "prompt-of-16-mb": lambda: completion(prompt="a b" * 5_200_000),
    "prompt-without-spaces": lambda: completion(prompt="a" * 4_000_000),
    "prompts": lambda: completion(prompt=["x"] * 1_000_000),
    "empty-prompts": lambda: completion(prompt=[[]] * 2_000_000),
    "token-ids": lambda: completion(prompt=[7] * 4_000_000),
    "bad-token-ids": lambda: completion(prompt=[-7] * 2_000_000),
    "message-of-10-mb": lambda: chat(messages=[{"role": "user", "content": "word " * 2_000_000}]),
    "messages": lambda: chat(messages=[{"role": "user", "content": "x"}] * 200_000),
    "logit-bias": lambda: completion(logit_bias={str(i): 1 for i in range(1_000_000)}),
    "broken-logit-bias": lambda: completion(logit_bias={f"x{i}": "y" for i in range(800_000)}),
    "stop-token-ids": lambda: completion(stop_token_ids=[5] * 4_000_000),
    "allowed-token-ids": lambda: completion(allowed_token_ids=[5] * 4_000_000),
    "stop-strings": lambda: completion(
        stop=[f"{i}" + "ab" * 20_000 for i in range(16)], n=32, max_tokens=1024, ignore_eos=True
    ),
    "many-stop-strings": lambda: completion(stop=[""] * 2_000_000),
    "choices": lambda: completion(guided_choice=[f"c{i}" for i in range(500_000)]),
    "schema": lambda: completion(guided_json=large_schema()),
    "regex": lambda: completion(guided_regex=hostile_regex()),
    "regex-alternatives": lambda: completion(guided_regex="|".join(f"{next(_fresh)}(a|b)*c{{99}}" for _ in range(20_000))),
    "recursive-grammar": lambda: completion(
        guided_grammar="start: a\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(5_000))
    ),
    "n-of-all-prompts": lambda: completion(prompt=["x"] * 1_000, n=128, max_tokens=2000),
    # the answer that it asks for
    "large-answer": lambda: completion(prompt=[7] * 2_000, prompt_logprobs=20, n=128),
    "large-echo": lambda: completion(prompt=[[7] * 2_000] * 64, echo=True, logprobs=20, prompt_logprobs=20),
    "detokenize": lambda: ("/detokenize", json.dumps({"tokens": [7] * 4_000_000}).encode()),
    "bad-detokenize": lambda: ("/detokenize", json.dumps({"tokens": [-7] * 2_000_000}).encode()),
    "log-probabilities-of-many": lambda: chat(n=128, logprobs=True, top_logprobs=20, max_tokens=1900),
    "best-of-with-log-probabilities": lambda: completion(n=128, best_of=128, logprobs=20, max_tokens=1900),
    # JSON and grammars that are worse than they are long
    "lone-surrogates": lambda: _with(COMPLETIONS, "user", b'"' + b"\\ud800" * 1000 + b'"'),
    "numbers-that-are-none": lambda: _with(COMPLETIONS, "logit_bias", b'{"5":Infinity}'),
    "gzip": lambda: (COMPLETIONS, gzip.compress(b" " * 50_000_000)),
    "arguments-of-a-tool-call": lambda: tool_call('{"a":[' + "{}," * 3_000_000 + "{}]}"),
    "nested-arguments-of-a-tool-call": lambda: tool_call('{"a":' * 100_000 + "1" + "}" * 100_000),
    "arguments-of-many-tool-calls": many_tool_calls,
    "messages-of-unusual-roles": unusual_roles,
    "schema-in-a-string": lambda: completion(guided_json='{"a":[' + "{}," * 3_000_000 + "{}]}"),
    "schema-with-large-numbers": lambda: completion(
        guided_json={"type": "number", "minimum": -(10**300), "multipleOf": 1e-300}
    ),
    "deep-tools": lambda: chat(
        tools=[{"type": "function", "function": {"name": f"f{i}", "parameters": deep_schema(85)}} for i in range(100)],
        tool_choice="required",
    ),
    "cycle-of-references": lambda: completion(
        guided_json={"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    ),
    "reference-to-a-file": lambda: completion(guided_json={"$ref": "file:///etc/passwd"}),
    "doubling-references": lambda: completion(guided_json=doubling_references()),
    "product-of-alternatives": lambda: completion(guided_json=product_of_alternatives()),
    "counted-regex": lambda: completion(guided_regex="a{2147483647}"),
    "regex-with-many-states": lambda: completion(guided_regex="(.*[aeiou].{30}){3}", **LONG_ANSWER),
    "endless-grammar": lambda: completion(guided_grammar="start: start"),
    "left-recursive-grammar": lambda: completion(guided_grammar='start: start "a" | "a"', **LONG_ANSWER),
    "ambiguous-grammar": lambda: completion(guided_grammar=AMBIGUOUS, logit_bias={"0": -100, "2": -100}, n=4, **LONG_ANSWER),
    "many-long-choices": lambda: completion(guided_choice=[f"choice {i} {i * i}" for i in range(9_000)], **LONG_ANSWER),
    "tokenize": lambda: ("/tokenize", json.dumps({"prompt": "a b" * 5_000_000}).encode()),
    "tokenize-without-spaces": lambda: ("/tokenize", json.dumps({"prompt": "a" * 4_000_000}).encode()),
}


def head(path: str, key: str | None, *headers: str, method: str = "POST") -> bytes:
    """The head of a request. A body's length is among `headers`."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    if key:
        lines.append(f"Authorization: Bearer {key}")
    return "\r\n".join([*lines, "", ""]).encode()


def post(route: tuple[str, bytes], key: str | None) -> bytes:
    """A whole request with a body."""
    path, body = route
    return head(path, key, f"Content-Length: {len(body)}") + body


def get(path: str, key: str | None) -> bytes:
    return head(path, key, method="GET")


def _messages(count: int, **fields: Any) -> tuple[str, bytes]:
    return chat(messages=[{"role": "user", "content": "x" * 12}] * count, max_tokens=1, **fields)


def _items(count: int) -> tuple[str, bytes]:
    items = [{"role": "user", "content": "x" * 30}] * count
    return RESPONSES, json.dumps({"model": "nope", "input": items}).encode()


def _last_is_wrong(count: int) -> tuple[str, bytes]:
    """The model is there, and all of the body is validated before it is refused."""
    return chat(messages=[*[{"role": "user", "content": "x"}] * count, {"role": "user", "content": 1}])


def many_ids() -> tuple[str, bytes]:
    """21 kB with three fields of 1,024 token ids for each of 128 prompts."""
    ids = list(range(5, 1029))
    bias = dict.fromkeys(map(str, ids), 1)
    return completion(prompt=["x"] * 128, max_tokens=1, stop_token_ids=ids, allowed_token_ids=ids, logit_bias=bias)


def large_variables(size: int = 1_000_000) -> tuple[str, bytes]:
    """What a template gets beside the messages, which are short."""
    text = "word " * (size // 5)
    tool = {"type": "function", "function": {"name": "f", "description": text}}
    thinks = {"role": "assistant", "content": "", "reasoning_content": text}
    call = {"id": "c", "type": "function", "function": {"name": text, "arguments": "{}"}}
    turns = [{"role": "user", "content": "x"}, thinks, {"role": "assistant", "tool_calls": [call]}]
    return chat(messages=turns, tools=[tool], chat_template_kwargs={"x": text})


# what twenty connections send again and again, with the attacker's key or without one: work that no budget of the engine counts
FLOODS: dict[str, Callable[[str], bytes]] = {
    "health": lambda _: get("/health", None),
    "openapi": lambda key: get("/openapi.json", key),
    "metrics": lambda key: get("/metrics", key),
    "models": lambda key: get("/v1/models", key),
    "no such path": lambda key: get("/nowhere", key),
    "a wrong key": lambda _: get("/v1/models", "a wrong key"),
    "messages for no model": lambda key: post(_messages(1050, model="nope"), key),
    "items for no model": lambda key: post(_items(850), key),
    "arguments for no model": lambda key: post(
        (CHAT, tool_call('{"a":[' + "{}," * 12_000 + "{}]}")[1].replace(MODEL.encode(), b"nope")), key
    ),
    "a wrong message": lambda key: post(_last_is_wrong(1500), key),
    "a wrong token id": lambda key: post(completion(prompt=[7] * 20_000 + [-1]), key),
    "messages that do not fit": lambda key: post(_messages(1050), key),
    "a text that does not fit": lambda key: post(completion(prompt="word " * 12_000), key),
    "a grammar that is none": lambda key: post(completion(guided_grammar="start: " + "a " * 20_000), key),
}


def connect(address: Address, timeout: float = 20.0) -> socket.socket:
    return socket.create_connection(address, timeout)


def pour(connection: socket.socket, chunk: bytes, total: int, seconds: float = 20.0) -> int:
    """Send `chunk` over and over until `total` bytes are sent or the server ends the connection. Returns the bytes sent."""
    sent = 0
    end = time.monotonic() + seconds
    with contextlib.suppress(OSError):
        while sent < total and time.monotonic() < end:
            connection.sendall(chunk)
            sent += len(chunk)
    return sent


def reply_of(connection: socket.socket, seconds: float = 20.0) -> bytes:
    """What the server says until it closes the connection, at most `seconds` long."""
    found = b""
    end = time.monotonic() + seconds
    with contextlib.suppress(OSError):
        while (left := end - time.monotonic()) > 0:
            connection.settimeout(left)
            if not (piece := connection.recv(65536)):
                break
            found += piece
    return found


def headers(address: Address, key: str | None = None, total: int = 100_000_000) -> int:
    """A head that does not end, before any authentication. Small headers take twenty times their bytes once they are parsed."""
    with connect(address) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        return pour(connection, b"".join(b"X-%06d: y\r\n" % i for i in range(20_000)), total)


def one_header(address: Address, key: str | None = None, total: int = 100_000_000) -> int:
    with connect(address) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
        return pour(connection, b"y" * 262_144, total)


def url(address: Address, key: str | None = None, total: int = 100_000_000) -> int:
    with connect(address) as connection:
        connection.sendall(b"GET /")
        return pour(connection, b"a%41" * 65_536, total)


def pipelined(address: Address, key: str | None = None, count: int = 20_000) -> int:
    """Many requests on one connection, and no answer is read."""
    with connect(address) as connection:
        return pour(connection, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100, 41 * count, seconds=5)


def small_chunks(address: Address, key: str | None = None, count: int = 1_000_000) -> int:
    """A chunked body of single bytes: much work for the parser, and a large list for who keeps the pieces."""
    with connect(address) as connection:
        connection.sendall(head(COMPLETIONS, key, "Transfer-Encoding: chunked"))
        return pour(connection, b"1\r\n[\r\n" * 1_000, 6 * count, seconds=10)


def chunk_extensions(address: Address, key: str | None = None, total: int = 50_000_000) -> int:
    with connect(address) as connection:
        connection.sendall(head(COMPLETIONS, key, "Transfer-Encoding: chunked") + b"1;")
        return pour(connection, b"a=b;" * 65_536, total, seconds=10)


def trailers(address: Address, key: str | None = None, total: int = 50_000_000) -> int:
    with connect(address) as connection:
        connection.sendall(head(COMPLETIONS, key, "Transfer-Encoding: chunked") + b"0\r\n")
        return pour(connection, b"X-T: %b\r\n" % (b"y" * 1000) * 256, total, seconds=10)


def many_streams(address: Address, key: str | None = None, count: int = 40) -> int:
    """Streams of which nothing is read, and which are left after two seconds."""
    body = completion(stream=True, max_tokens=1900, ignore_eos=True)[1]
    opened = []
    for _ in range(count):
        opened.append(connect(address))
        opened[-1].sendall(head(COMPLETIONS, key, f"Content-Length: {len(body)}") + body)
    time.sleep(2)
    for each in opened:
        each.close()
    return len(opened)


def come_and_go(address: Address, key: str | None = None, count: int = 100) -> int:
    """Requests whose client resets the connection at once."""
    body = completion(guided_regex=hostile_regex(), max_tokens=500)[1]
    for _ in range(count):
        with connect(address) as connection:
            connection.sendall(head(COMPLETIONS, key, f"Content-Length: {len(body)}") + body)
    return count


def come_back(address: Address, key: str | None = None, count: int = 100) -> int:
    """The same with one expression, which is compiled once. Each request has a slow mask in its first step."""
    body = completion(guided_regex="(((q{100}){100}){100})z", max_tokens=500)[1]
    message = head(COMPLETIONS, key, f"Content-Length: {len(body)}", "Connection: close") + body
    with connect(address) as connection:
        connection.sendall(message)
        reply_of(connection)
    for _ in range(count):
        with connect(address) as connection:
            connection.sendall(message)
        time.sleep(0.01)
    return count


WIRE: dict[str, Callable[[Address, str | None], int]] = {
    each.__name__: each
    for each in (
        headers,
        one_header,
        url,
        pipelined,
        small_chunks,
        chunk_extensions,
        trailers,
        many_streams,
        come_and_go,
        come_back,
    )
}


class Silent:
    """Connections that say nothing, or only a part of a request; `open` counts those that the server has not ended."""

    def __init__(self, address: Address, count: int, say: bytes = b""):
        self._connections = []
        for _ in range(count):
            with contextlib.suppress(OSError):
                connection = connect(address, 2.0)
                self._connections.append(connection)
                connection.sendall(say)

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._connections:
            each.close()

    def dribble(self, byte: bytes = b" ") -> None:
        for each in self._connections:
            with contextlib.suppress(OSError):
                each.send(byte)

    @property
    def open(self) -> int:
        return sum(map(_is_open, self._connections))


def _is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while piece := connection.recv(65536):
            del piece
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def together(work: Callable[[], Any], count: int) -> list[Any]:
    """`work` in `count` threads at once; what each returns or raises.

    An attacker has another machine and does not take the server's processors, so the threads run when nothing else wants to.
    With a low priority instead, 60 threads together would outweigh the server.
    """

    def one(_: int) -> Any:
        try:
            return work()
        except Exception as error:
            return error

    with ThreadPoolExecutor(count, initializer=_lower_priority) as threads:
        return list(threads.map(one, range(count)))


def _lower_priority() -> None:
    if sys.platform == "linux":  # where a thread has a scheduling class
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
