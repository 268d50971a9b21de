"""Image files of strangers, sent to a model that sees images: what an honest client gets meanwhile, and what memory is kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import server_process
from image_models import picture, png, save_llava
from security.conftest import ATTACKER, CALM_SECONDS, FULL, HONEST, MODEL, Fortress
from security.hostile_images import FILES, bomb, uri
from security.probe import measure, memory_of

REQUESTS = 200 if FULL else 24
CONNECTIONS = 8
TEXT = {"type": "text", "text": "What is this?"}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fortress]:
    """A server of a tiny model with a vision tower, which has seen some pictures."""
    folder = tmp_path_factory.mktemp("llava")
    save_llava(folder)
    log = folder / "log"
    keys = f"{ATTACKER},{HONEST}"
    flags = ("--served-model-name", MODEL, "--max-model-len", "256")
    process = server_process.start(str(folder), *flags, log=log, FA_SERVE_API_KEYS=keys)
    try:
        fortress = Fortress(process, log, measure(process.url, HONEST, 0.5), 0)
        for seed in range(40):
            assert _ask(fortress, HONEST, [uri(png(picture(seed, 400 + seed, 300)))] * 4).status_code == 200
        fortress.calm = measure(process.url, HONEST, CALM_SECONDS)
        fortress.calm_memory = memory_of(process.process.pid)
        yield fortress
    finally:
        process.end()


def _ask(fortress: Fortress, key: str, urls: list[str]) -> httpx.Response:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    body = {"model": MODEL, "messages": [{"role": "user", "content": [*parts, TEXT]}], "max_tokens": 4, "temperature": 0}
    return fortress.post("/v1/chat/completions", body, key)


def _attack(fortress: Fortress, urls: list[str], requests: int = REQUESTS) -> list[httpx.Response]:
    """The answers that came before the attacker's own timeout."""

    def ask(_: int) -> list[httpx.Response]:
        try:
            return [_ask(fortress, ATTACKER, urls)]
        except httpx.TimeoutException:
            return []

    with ThreadPoolExecutor(CONNECTIONS) as threads:
        return [reply for replies in threads.map(ask, range(requests)) for reply in replies]


@pytest.mark.parametrize("name", FILES)
def test_hostile_files(seeing: Fortress, name: str) -> None:
    url, count = FILES[name]
    with seeing.under_attack(f"images: {name}"):
        replies = _attack(seeing, [url] * count)
    for reply in replies:
        # a client in debt waits and is asked to come again
        assert reply.status_code in (400, 429), reply.text[:300]
    error = next(reply.json()["error"] for reply in replies if reply.status_code == 400)
    assert re.fullmatch(r"messages|messages\[0\]\.content\[\d+\]\.image_url\.url", error["param"]), error
    assert len(error["message"]) < 1000


def test_pictures_as_large_as_allowed(seeing: Fortress) -> None:
    """Files of 5 kB with 16 million pixels, which a client may send: each takes 48 MB and much time to be made smaller."""
    with seeing.under_attack("images: as large as allowed"):
        replies = _attack(seeing, [uri(bomb(4000, 4000))], requests=40 if FULL else 4)
    assert replies
    assert {reply.status_code for reply in replies} <= {200, 429}
