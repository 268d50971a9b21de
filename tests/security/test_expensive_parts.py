"""Grammars, stop strings, token routes and chat templates: one client's expensive requests do not hold up another client.

Each test attacks a real server with the embedded model. A second client with another key probes all the while: the route
/health, and a completion of four tokens. FA_SERVE_LOAD=full makes the attacks as long as the ones that were seen.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from server_process import ServerProcess, start

FULL = os.environ.get("FA_SERVE_LOAD") == "full"
ATTACKER = {"authorization": "Bearer attacker"}
VICTIM = {"authorization": "Bearer victim"}
MODEL = {"model": "fa-serve-demo"}
SLACK_SECONDS = 0.3
"""What a test machine with busy cores may add to a waiting time."""


def served(*arguments: str) -> ServerProcess:
    return start("--max-model-len", "2048", *arguments, FA_SERVE_API_KEYS="attacker,victim,third")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    running = served()
    yield running
    running.end()


def complete(url: str, headers: dict[str, str] = VICTIM, **fields: object) -> httpx.Response:
    body = MODEL | {"prompt": "Once", "max_tokens": 4, "temperature": 0.0} | fields
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)


def wait_times(count: int, url: str, **fields: object) -> list[float]:
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        assert complete(url, **fields).status_code == 200
        times.append(time.perf_counter() - begin)
    return sorted(times)


def p99(times: list[float]) -> float:
    return sorted(times)[int(0.99 * (len(times) - 1))]


class Prober:
    """The second client: probes until the block ends. `health` and `completions` hold the seconds of each probe."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.health: list[float] = []
        self.completions: list[float] = []

    def __enter__(self) -> Prober:
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._probe)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _probe(self) -> None:
        while not self._end.wait(0.02):
            begin = time.perf_counter()
            assert httpx.get(f"{self._url}/health", timeout=60).status_code == 200
            self.health.append(time.perf_counter() - begin)
            self.completions += wait_times(1, self._url)


def large_schema(index: int) -> dict:
    """About 169 kB, which take llguidance two seconds."""
    return {"type": "object", "properties": {f"s{index}k{i}": {"type": "string"} for i in range(5600)}}


def quietly(function: Callable[..., object], *arguments: object, **fields: object) -> None:
    """Whatever becomes of an attacker's request."""
    with contextlib.suppress(httpx.HTTPError):
        function(*arguments, **fields)


def leave(url: str, count: int) -> None:
    """Send large schemas and close the connections without reading an answer."""
    for index in range(count):
        with contextlib.suppress(httpx.TimeoutException):
            body = MODEL | {"prompt": "x", "max_tokens": 4, "structured_outputs": {"json": large_schema(1000 + index)}}
            httpx.post(f"{url}/v1/completions", json=body, headers=ATTACKER, timeout=0.7)


def test_the_server_ends_at_once_after_clients_with_large_schemas_have_left() -> None:
    """Before: the process outlived its drain by 10 s."""
    running = served()
    try:
        leave(running.url, 6)
        begin = time.perf_counter()
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(30) == 0
        seconds = time.perf_counter() - begin
        print(f"ended {seconds:.1f} s after SIGTERM")
        assert seconds < 6
    finally:
        running.end()


def test_many_characters_of_stop_strings_are_refused_with_the_limit(server) -> None:
    """Before: 16 strings of 40 kB with n = 32 slowed every completion to 1.7 s."""
    refused = complete(server.url, ATTACKER, stop=["x" * 40_000 + str(i) for i in range(16)], n=32)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "stop"
    assert "4096" in error["message"]
    assert "--max-stop-chars" in error["message"]
    too_many = complete(server.url, ATTACKER, stop=[str(i) for i in range(17)])
    assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "stop")


def test_allowed_stop_strings_cost_others_little(server) -> None:
    calm = p99(wait_times(20, server.url))
    stop = ["a" * 240 + chr(ord("A") + i) for i in range(16)]
    with Prober(server.url) as probes:
        assert complete(server.url, ATTACKER, stop=stop, n=8, max_tokens=200, logit_bias={}).status_code == 200
    print(f"completion: calm p99 {calm:.3f} s, attacked p99 {p99(probes.completions):.3f} s")
    assert p99(probes.completions) <= 5 * max(calm, 0.085) + SLACK_SECONDS


@pytest.mark.parametrize(("route", "body"), [("tokenize", {"prompt": "Hi"}), ("detokenize", {"tokens": [5, 6]})])
def test_token_routes_are_admitted_like_generation(route, body) -> None:
    """Before: they ran however many requests their key had in flight."""
    running = served("--max-per-key", "1")
    try:
        stream = MODEL | {"prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{running.url}/v1/completions", json=stream, headers=ATTACKER, timeout=60) as answer:
            lines = answer.iter_lines()  # the connection closes with it
            next(lines)
            refused = httpx.post(f"{running.url}/{route}", json=body, headers=ATTACKER)
            other = httpx.post(f"{running.url}/{route}", json=body, headers=VICTIM)
        assert (refused.status_code, other.status_code) == (429, 200)
    finally:
        running.end()


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LOCKING = "{{ (9 ** (9 ** 9)) % 7 }}"
"""One call into C, which keeps the interpreter's lock for hours and cannot be interrupted."""


def chat(url: str, template: str) -> httpx.Response:
    body = MODEL | {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "chat_template": template}
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=ATTACKER, timeout=60)


def test_an_endless_chat_template_is_interrupted_and_sigterm_ends_the_process() -> None:
    """Before: the template ran for ever, every prompt waited for it, and the process outlived SIGTERM.

    In a thread of the server, LOCKING would stop the server for good.
    """
    running = served("--allow-request-chat-template", "--template-timeout", "2", "--drain-timeout", "1")
    try:
        calm = p99(wait_times(20, running.url))
        with Prober(running.url) as probes:
            for template in (ENDLESS, LOCKING):
                begin = time.perf_counter()
                answer = chat(running.url, template)
                assert time.perf_counter() - begin < 10
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template")
                assert "--template-timeout" in answer.json()["error"]["message"]
        print(f"completion: calm p99 {calm:.3f} s, p99 during the template {p99(probes.completions):.3f} s")
        assert p99(probes.completions) <= 5 * calm + SLACK_SECONDS
        assert chat(running.url, "{{ messages[0].content }}").status_code == 200

        threading.Thread(target=quietly, args=(chat, running.url, LOCKING), daemon=True).start()
        time.sleep(0.5)
        begin = time.perf_counter()
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(30) == 0
        assert time.perf_counter() - begin < 10
    finally:
        running.end()
