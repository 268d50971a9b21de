"""One API key cannot hold up another one by the number, length or priority of its requests, nor find out its prompts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from server_process import ServerProcess

MODEL = "fa-serve-demo"
SECRET = "The PIN of the account is 4921. Do not tell it to anybody, no matter who asks for it and how politely they ask. " * 4


@pytest.fixture(scope="module")
def server(start_server: Callable[..., ServerProcess]) -> Iterator[ServerProcess]:
    served = start_server(
        "--max-num-seqs", "4", "--max-waiting", "56", "--dtype", "float32", FA_SERVE_API_KEYS="attacker,honest,other"
    )
    yield served
    served.end()


def complete(server: ServerProcess, key: str, prompt: str = "x", **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0} | fields
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60, trust_env=False)


def cached_tokens(server: ServerProcess, key: str, prompt: str = SECRET, **fields: Any) -> int:
    reply = complete(server, key, prompt, **fields)
    assert reply.status_code == 200, reply.text
    return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_key_learns_nothing_of_what_another_key_has_sent(server) -> None:
    assert cached_tokens(server, "honest") == 0
    own = cached_tokens(server, "honest")
    assert own > 100
    assert cached_tokens(server, "attacker") == 0
    for length in range(40, len(SECRET), 40):  # guessing the prompt piece by piece
        prompt = SECRET[:length] + "?"
        assert cached_tokens(server, "attacker", prompt, cache_salt=str(length)) == 0


def test_a_salt_separates_the_requests_of_one_key(server) -> None:
    prompt = "Another text. " * 30
    assert [cached_tokens(server, "honest", prompt, cache_salt=salt) > 0 for salt in "aab"] == [False, True, False]
    assert cached_tokens(server, "honest", prompt) == 0
    assert cached_tokens(server, "other", prompt, cache_salt="a") == 0


@pytest.mark.parametrize("priority", [-1000, 0])
def test_a_flood_of_one_key_delays_another_by_about_one_request(server, priority) -> None:
    """More requests than slots, each fifty times as long as those of the honest client, and first in rank."""
    latencies = {"calm": [], "flood": []}
    health = []

    def probe(phase: str) -> None:
        begin = time.perf_counter()
        reply = complete(server, "honest")
        latencies[phase].append(time.perf_counter() - begin)
        assert reply.status_code == 200, reply.text
        begin = time.perf_counter()
        assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200
        health.append(time.perf_counter() - begin)

    for _ in range(10):
        probe("calm")
    statuses = []
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            fields = {"max_tokens": 200, "ignore_eos": True, "priority": priority}
            statuses.append(complete(server, "attacker", "attack", **fields).status_code)
            stop.wait(0.05)

    begin = time.perf_counter()
    with ThreadPoolExecutor(24) as pool:
        for _ in range(24):
            pool.submit(flood)
        try:
            while not server_is_full(server):
                assert time.perf_counter() - begin < 30, "the flood does not fill the slots"
                time.sleep(0.05)
            for _ in range(10):
                probe("flood")
        finally:
            stop.set()
    assert 200 in statuses
    calm, flooded = (sorted(latencies[phase])[-2] for phase in ("calm", "flood"))
    print(f"\npriority {priority}: calm {calm:.3f} s, under the flood {flooded:.3f} s, /health at most {max(health):.3f} s")
    # a step of four sequences on a busy machine takes longer than one of a single sequence; a wait for the flood takes seconds
    assert flooded <= max(5 * calm, 1.0)
    assert complete(server, "attacker", priority=-(2**31)).status_code == 400


def server_is_full(server: ServerProcess) -> bool:
    text = httpx.get(f"{server.url}/metrics", headers={"authorization": "Bearer honest"}, trust_env=False).text
    waiting = [line for line in text.splitlines() if line.startswith("fa_serve:num_requests_waiting")]
    return any(float(line.split()[-1]) > 4 for line in waiting)
