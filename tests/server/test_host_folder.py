"""A server that is started again finds the histories of the one before in its folder, and says so in `cached_tokens`."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import ServerProcess, start_warm

HISTORY = [
    {"role": "user", "content": "Tell me about pages. " * 20},
    {"role": "assistant", "content": "They are kept. "},
    {"role": "user", "content": "And then?"},
]


def ask(served: ServerProcess, key: str = "", **fields: Any) -> tuple[str, int, int]:
    """The answer to the history, how many tokens the prompt has, and how many of them were cached."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = {"model": "fa-serve-demo", "messages": HISTORY, "max_tokens": 4, "temperature": 0, **fields}
    reply = httpx.post(f"{served.url}/v1/chat/completions", json=body, headers=headers, timeout=60).raise_for_status().json()
    usage = reply["usage"]
    return reply["choices"][0]["message"]["content"], usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["drained", "killed"])
def test_a_history_of_a_server_that_is_started_again_is_cached(tmp_path: Path, ends: str) -> None:
    """A server that is drained writes what it has. One that is killed has written it while there was no request."""
    flags = ("--kv-host-memory", "16MiB", "--kv-host-folder", str(tmp_path / "kv"), "--kv-host-folder-bytes", "64MiB")
    first = start_warm(*flags)
    text, num_tokens, cached = ask(first)
    assert cached == 0
    size = num_tokens // 16
    if ends == "killed":
        deadline = time.monotonic() + 30
        while len([*tmp_path.rglob("*.page")]) < size and time.monotonic() < deadline:
            time.sleep(0.05)
    else:
        first.process.send_signal(signal.SIGTERM)
        first.process.wait(timeout=30)
    first.end()
    second = start_warm(*flags)
    try:
        assert ask(second, cache_salt="other") == (text, num_tokens, 0)
        assert ask(second) == (text, num_tokens, (num_tokens - 1) // 16 * 16)
        assert second.metric("kv_host_folder_hits_total") == (num_tokens - 1) // 16
        assert 0 < second.metric("kv_host_folder_bytes_used") <= second.metric("kv_host_folder_bytes") == 64 * 2**20
    finally:
        second.end()


@pytest.mark.slow
def test_each_key_and_each_salt_finds_its_own_history_again(tmp_path: Path) -> None:
    flags = ("--kv-host-memory", "16MiB", "--kv-host-folder", str(tmp_path / "kv"))
    first = start_warm(*flags, FA_SERVE_API_KEYS="one,two")
    text, num_tokens, _ = ask(first, "one")
    assert ask(first, "one", cache_salt="salt")[2] == 0
    first.process.send_signal(signal.SIGTERM)
    first.process.wait(timeout=30)
    first.end()
    second = start_warm(*flags, FA_SERVE_API_KEYS="two,one")
    full = (num_tokens - 1) // 16 * 16
    try:
        asked = [("two", {}), ("two", {"cache_salt": "salt"}), ("one", {"cache_salt": "salt"}), ("one", {})]
        found = [ask(second, key, **fields) for key, fields in asked]
        assert found == [(text, num_tokens, cached) for cached in (0, 0, full, full)]
    finally:
        second.end()
