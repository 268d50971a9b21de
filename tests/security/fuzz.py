"""A stateful fuzzer of a running server: connections that send requests, parts of requests and nonsense in any order.

    fuzz(fortress, seconds=600, seed=1)     # raises the first failure, with the shortest steps that hypothesis finds

Routes and fields are read from the server's /openapi.json, so that a new route or field is fuzzed without a change here. A step
is plain data, and a failure prints its steps as JSON. Kept in tests/security/seeds/, they are replayed by every later run.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from typing import Any

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from security.conftest import ATTACKER, MODEL, Fortress

Step = list  # [what, connection, text]: JSON
CONNECTIONS = 4
EXAMPLES = 10  # between two looks at the clock
ALLOWED_STATUS = {200, 307, 308, 400, 401, 403, 404, 405, 408, 411, 413, 414, 415, 421, 422, 429, 431, 501, 503}
HEAD = re.compile(rb"HTTP/1\.1 (\d{3}) [A-Za-z -]*\r\n")  # an answer's text has no raw line feed
INTERIM = re.compile(rb"HTTP/1\.1 100 Continue\r\n\r\n(?=HTTP/1\.1 |$)")  # comes before another response, or that is awaited
LEAKS = (b"Traceback", b'File "/', b"site-packages", ATTACKER.encode())
VALUES: dict[str, list[Any]] = {
    "model": [MODEL],
    "prompt": ["x", "", ["a", "b"], [1, 2, 3], [[1], [2]], "word " * 3000, [2047], [2048], "\x00\ud7ff🙂", [[]]],
    "messages": [
        [{"role": "user", "content": "x"}],
        [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        [{"role": "assistant", "content": None, "tool_calls": []}],
        [],
        [{"role": "user"}],
    ],
    "input": [
        "x",
        [{"role": "user", "content": "x"}],
        [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}],
        [{"type": "reasoning", "summary": []}],
        [{"type": "item_reference"}],
        [],
    ],
    "system": ["x", [{"type": "text", "text": "x"}], [{}]],
    "thinking": [{"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, {}],
    "stop_sequences": [["a"], [""], ["x" * 5000] * 16],
    "max_output_tokens": [1, 4, 2048, 0],
    "truncate_prompt_tokens": [1, 100, -1, 0],
    "max_tokens": [1, 4, 64, 2048, 0, -1, 2**63],
    "n": [1, 3, 128, 0, 10**6],
    "stream": [True, False, True],
    "stop": ["a", ["a", "b"], [""], ["x" * 5000] * 16],
    "logit_bias": [{"5": 100}, {"5": -100}, {"-1": 1}, {"99999": 1}, {"x": 1}, {str(i): -100 for i in range(2048)}],
    "guided_regex": ["[ab]{2}", "(", "((X{100}){100}){100}z", "(a|b)*c{99}", "\\p{L}+"],
    "guided_json": [{"type": "integer"}, {"$ref": "#"}, {"type": "nothing"}, "{", {"enum": list(range(500))}],
    "guided_choice": [["yes", "no"], [""], ["a"] * 1000],
    "guided_grammar": ['start: "a"', "start: start", 'start: "a" start "b" |', "x"],
    "tools": [[{"type": "function", "function": {"name": "f"}}], [{}], []],
    "tool_choice": ["none", "auto", "required", {"type": "function", "function": {"name": "g"}}],
    "tokens": [[1, 2], [-1], [2**40], [7] * 20_000],
    "priority": [0, 1000, -1000, -(2**31)],
    "logprobs": [True, 0, 20, 21],
    "prompt_logprobs": [0, 20],
    "temperature": [0, 1, 2, 1e308, -1],
    "cache_salt": ["", "x", "y" * 300],
}
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from([2**31, -(2**63), 2**64, 10**400, 1e308, "x" * 10_000, [0] * 10_000, {str(i): {} for i in range(1000)}]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
HEADER_LINES = [
    "Content-Type: application/json",
    "Content-Type: text/plain",
    "Content-Type: multipart/form-data; boundary=x",
    "Content-Encoding: gzip",
    "Transfer-Encoding: chunked",
    "Transfer-Encoding: gzip, chunked",
    "Content-Length: 5",
    "Content-Length: -1",
    "Content-Length: 99999999999999999999",
    "Expect: 100-continue",
    "Connection: close",
    "Connection: Upgrade\r\nUpgrade: websocket",
    "Upgrade: h2c",
    "Host: other.example",
    "Host: ",
    "X-Request-Id: \x7f\x01",
    "X-Request-Id: " + "i" * 3000,
    "Traceparent: 00-0-0-0",
    "Authorization: Bearer wrong",
    "Authorization: Basic ////",
    "X-Forwarded-For: 127.0.0.1",
    " folded: x",
    "No colon",
    "X: " + "y" * 40_000,
]
METHODS = ["GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE", "CONNECT", "PRI", "post", "\x00"]
PATHS = [
    "/",
    "/docs",
    "/redoc",
    "/openapi.json",
    "//",
    "/../etc/passwd",
    "/v1/models/%00",
    "*",
    "http://other/",
    "/" + "a" * 20_000,
    "",
]


class Session:
    """Performs steps on the server's connections, and judges every byte that comes back."""

    def __init__(self, fortress: Fortress):
        self._fortress = fortress
        self._connections: dict[int, socket.socket] = {}
        self._came: dict[int, bytes] = {}
        self._half_closed: set[int] = set()
        self.steps: list[Step] = []

    def perform(self, step: Step) -> None:
        self.steps.append(step)
        what, number, text = step
        connection = self._connections.get(number)
        with contextlib.suppress(OSError):
            if connection is None:
                connection = self._connections[number] = socket.create_connection(self._fortress.address, 10)
                connection.settimeout(0.05)
                self._came[number] = b""
            if what == "send":
                connection.sendall(text.encode("latin-1"))
            elif what == "half-close":
                connection.shutdown(socket.SHUT_WR)
                self._half_closed.add(number)
            elif what == "reset" or (what == "leave" and number in self._half_closed):
                # only a reset tells a server that a half-closed connection has gone, before the server writes to it
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        if what == "read":
            self._read(number)
        elif what in ("leave", "reset") and connection is not None:
            self._read(number)
            connection.close()
            self._half_closed.discard(number)
            del self._connections[number]
        assert self._fortress.process.process.poll() is None, "the server's process ended"

    def _read(self, number: int) -> None:
        with contextlib.suppress(OSError):
            while piece := self._connections[number].recv(65536):
                self._came[number] = (self._came[number] + piece)[-2_000_000:]
        came = self._came[number]
        for status in HEAD.findall(INTERIM.sub(b"", came)):
            assert int(status) in ALLOWED_STATUS, f"status {status.decode()}: {came[:500]!r}"
        for leak in LEAKS:
            assert leak not in came, f"the answer has {leak!r}: {came[:500]!r}"

    def end(self) -> None:
        """Leave, and wait until the server is as it was: idle, no page held, and the memory bounded."""
        try:
            for number in list(self._connections):
                self.perform(["leave", number, ""])
        finally:
            for connection in self._connections.values():
                connection.close()
        begin = time.monotonic()
        while self._busy():
            assert time.monotonic() - begin < 30, "requests are left after their clients have gone"
            time.sleep(0.05)
        fortress = self._fortress
        assert fortress.complete().status_code == 200
        kept = fortress.memory() - fortress.calm_memory
        assert kept < 400 * 2**20, f"{kept >> 20} MB more than before"

    def _busy(self) -> bool:
        begin = time.monotonic()
        metric = self._fortress.metric
        busy = metric("num_requests_running") + metric("num_requests_waiting") + metric("kv_cache_usage_perc") > 0
        assert time.monotonic() - begin < 5, "the server was frozen"
        return busy


def routes(fortress: Fortress) -> list[tuple[str, str, list[str]]]:
    """Method, path and the fields of the body of every route that the server documents."""
    with fortress.client() as client:
        document = client.get("/openapi.json").raise_for_status().json()
    found = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            name = content.get("$ref", "").rpartition("/")[2]
            fields = list(document["components"]["schemas"].get(name, {}).get("properties", {}))
            found.append((method.upper(), path.replace("{model}", MODEL), fields))
    assert found
    return found


@st.composite
def bodies(draw: st.DrawFn, fields: list[str]) -> str:
    """Mostly a right body with a few fields drawn from typical values or from any JSON; sometimes cut or damaged."""
    body: dict[str, Any] = {name: VALUES[name][0] for name in ("model", "prompt", "messages", "tokens") if name in fields}
    if "prompt" in body and "messages" in body:
        del body["prompt"]
    if "max_tokens" in fields:
        body["max_tokens"] = draw(st.sampled_from([1, 4, 64]))
    for name in draw(st.lists(st.sampled_from([*fields, "unknown"]), max_size=4, unique=True)):
        typical = VALUES.get(name)
        body[name] = draw(st.sampled_from(typical) if typical and draw(st.integers(0, 3)) else JSON_VALUES)
    text = json.dumps(body, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 7)) == 0:
        text = text[: draw(st.integers(0, len(text)))]
    if draw(st.integers(0, 7)) == 0:
        text += draw(st.binary(max_size=8))
    return text.decode("latin-1")


@st.composite
def requests(draw: st.DrawFn, known: list[tuple[str, str, list[str]]]) -> str:
    """A request as text in Latin-1, each character a byte."""
    method, path, fields = draw(st.sampled_from(known))
    body = draw(bodies(fields)) if fields else ""
    if draw(st.integers(0, 9)) == 0:
        method = draw(st.sampled_from(METHODS))
    if draw(st.integers(0, 9)) == 0:
        path = draw(st.sampled_from(PATHS))
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {ATTACKER}"]
    if fields:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    if draw(st.integers(0, 4)) == 0:
        at = draw(st.integers(1, len(lines)))
        lines[at:at] = draw(st.lists(st.sampled_from(HEADER_LINES), min_size=1, max_size=3))
    return "\r\n".join([*lines, "", body])


def _machine(fortress: Fortress, last: list[Session]) -> type[RuleBasedStateMachine]:
    known = routes(fortress)
    numbers = st.integers(0, CONNECTIONS - 1)

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.session = Session(fortress)
            last[:] = [self.session]

        @rule(number=numbers, text=requests(known))
        def request(self, number: int, text: str) -> None:
            self.session.perform(["send", number, text])

        @rule(number=numbers, text=requests(known), data=st.data())
        def part_of_a_request(self, number: int, text: str, data: st.DataObject) -> None:
            at = data.draw(st.integers(0, len(text)))
            self.session.perform(["send", number, text[:at]])

        @rule(number=numbers, text=st.binary(min_size=1, max_size=64))
        def nonsense(self, number: int, text: bytes) -> None:
            self.session.perform(["send", number, text.decode("latin-1")])

        @precondition(lambda self: self.session.steps)
        @rule(number=numbers, what=st.sampled_from(["read", "half-close", "leave", "reset"]))
        def other(self, number: int, what: str) -> None:
            self.session.perform([what, number, ""])

        def teardown(self) -> None:
            self.session.end()

    return Machine


def replay(fortress: Fortress, steps: list[Step]) -> None:
    session = Session(fortress)
    for step in steps:
        session.perform(step)
    session.end()


def fuzz(fortress: Fortress, seconds: float, seed: int) -> int:
    """Fuzz until the time is over. Returns the number of rounds; the first failure is raised with its steps as a note."""
    last: list[Session] = []
    machine = _machine(fortress, last)
    settings = hypothesis.settings(
        max_examples=EXAMPLES,
        stateful_step_count=12,
        deadline=None,
        database=None,
        derandomize=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        print_blob=False,
    )
    rounds = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            run_state_machine_as_test(hypothesis.seed(seed + rounds)(machine), settings=settings)
        except BaseException as error:
            steps = last[0].steps if last else []
            error.add_note(f"seed {seed + rounds}; steps to keep in tests/security/seeds/: {json.dumps(steps)}")
            raise
        rounds += 1
    return rounds
