"""Large requests to an encoder: what an honest client gets meanwhile, and what memory is kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import server_process
from encoder_folders import save_encoder
from security.conftest import ATTACKER, CALM_SECONDS, FULL, HONEST, MODEL, Fortress
from security.probe import measure, memory_of

CONNECTIONS = 8
EMBEDDINGS = "/v1/embeddings"
RERANK = "/v1/rerank"
PROBE = (EMBEDDINGS, {"model": MODEL, "input": "x"})
TEXT = "the quick brown fox sat on a mat "


def _embeddings(*texts: str) -> tuple[str, bytes]:
    return EMBEDDINGS, json.dumps({"model": MODEL, "input": texts}).encode()


def _rerank(count: int) -> tuple[str, bytes]:
    return RERANK, json.dumps({"model": MODEL, "query": "a cat", "documents": [f"{n}" for n in range(count)]}).encode()


ATTACKS: dict[str, tuple[Callable[[], tuple[str, bytes]], int, set[int]]] = {
    "as many texts as allowed": (lambda: _embeddings(*[TEXT] * 2048), 8, {200, 429}),
    "as many documents as allowed": (lambda: _rerank(2048), 8, {200, 429}),
    "a text of 10 MB": (lambda: _embeddings(TEXT * 320_000), 6, {400, 413, 429}),
    "100,000 texts": (lambda: _embeddings(*[TEXT] * 100_000), 6, {400, 413, 429}),
    "a million documents": (lambda: _rerank(1_000_000), 6, {400, 413, 429}),
}
"""A request, how often it is sent (thirty times as often in a full run), and the answers that it may get."""


@pytest.fixture(scope="module")
def encoding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fortress]:
    """A server of a tiny embedder, which has seen some requests."""
    folder = tmp_path_factory.mktemp("encoder")
    save_encoder(folder)
    log = folder / "log"
    keys = f"{ATTACKER},{HONEST}"
    process = server_process.start(str(folder), "--served-model-name", MODEL, log=log, FA_SERVE_API_KEYS=keys)
    pid = process.process.pid
    try:
        fortress = Fortress(process, log, measure(process.url, HONEST, 0.5, ask=PROBE), 0, PROBE)
        for path, body in (_embeddings(*[TEXT] * 2048), _rerank(2048)):
            for _ in range(4 if FULL else 2):
                assert fortress.post(path, body, HONEST).status_code == 200
        fortress.calm = measure(process.url, HONEST, CALM_SECONDS, pid, PROBE)
        fortress.calm_memory = memory_of(pid)
        yield fortress
    finally:
        process.end()


@pytest.mark.parametrize("name", ATTACKS)
def test_large_requests_to_an_encoder(encoding: Fortress, name: str) -> None:
    make, count, allowed = ATTACKS[name]
    path, body = make()

    def ask(_: int) -> list[httpx.Response]:
        try:
            return [encoding.post(path, body)]
        except httpx.TransportError:  # the attacker's own timeout, or a connection that was closed while it sent
            return []

    with encoding.under_attack(f"encoders: {name}"), ThreadPoolExecutor(CONNECTIONS) as threads:
        replies = [reply for found in threads.map(ask, range(count * (30 if FULL else 1))) for reply in found]
    assert replies
    assert {reply.status_code for reply in replies} <= allowed, {reply.text[:200] for reply in replies}
    assert min(reply.status_code for reply in replies) != 429, "some are answered, or told what is wrong"
