"""Programs that tests of deploy/ start: nginx with a configuration, and any other until the end of a block."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **options)


def program(name: str) -> str:
    """Where a program is. Without it, the test is skipped."""
    return shutil.which(name, path="/usr/bin:/usr/sbin:/bin:/sbin") or pytest.skip(f"{name} is not installed")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


@contextmanager
def running(*command: str) -> Iterator[None]:
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


@contextmanager
def running_nginx(nginx: str, folder: Path, text: str) -> Iterator[None]:
    """text: its servers; folder: of its files"""
    folders = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off; pid {folder}/pid; error_log stderr warn; events {{}}\nhttp {{ access_log off; {folders}\n{text}}}\n"
    )
    checked = run(nginx, "-t", "-p", str(folder), "-c", str(config))
    assert "test is successful" in checked.stderr, checked.stderr
    with running(nginx, "-p", str(folder), "-c", str(config)):
        yield


def wait_for(client: httpx.Client, url: str) -> None:
    """Return when a server answers this without the status of an error of a server."""
    deadline = time.monotonic() + 10
    while True:
        try:
            if client.get(url).status_code < 500:
                return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.05)
