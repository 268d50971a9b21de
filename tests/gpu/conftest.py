"""What the GPU suite shares."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

import pytest
import torch

from fa_serve.engine import EngineConfig
from fa_serve.engine.cache import tensors


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every", type=int, default=1, metavar="N", help="each Nth of the chosen tests; of a prime number, every dtype"
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """What only a GPU can show is seldom run, and then whole."""
    item.add_marker(pytest.mark.every_case)


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:] = items[:: config.getoption("--every")]


@contextmanager
def _no_synchronisation() -> Iterator[None]:
    """A call inside that makes the host wait for the device raises RuntimeError."""
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls this mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def _a_share_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside other processes of this suite, an engine that may take most of the GPU leaves them theirs: others that start
    meanwhile would find no room. Left out: tests that ask for a share."""
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if processes == 1:
        return
    device_room = tensors.device_room
    usual = EngineConfig().gpu_memory_utilization

    def share_of_room(device: torch.device, share: float, needed: int, least: int) -> int:
        room = device_room(device, share, needed, least)
        return max(least, room // (2 * processes)) if share == usual else room

    monkeypatch.setattr(tensors, "device_room", share_of_room)


@pytest.fixture
def no_synchronisation() -> Callable[[], AbstractContextManager[None]]:
    return _no_synchronisation


@pytest.fixture
def full_float32() -> Iterator[None]:
    """Products of float32 without TF32. Not a monkeypatch: torch answers by `__getattr__`, which pytest 9.2 cannot restore."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(autouse=True)
def _no_graphs_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips a test that captures a graph while `make memcheck` has switched off the allocator's cache, which captures need."""

    def skip(*_: Any, **__: Any) -> NoReturn:
        pytest.skip("a graph cannot be captured with PYTORCH_NO_CUDA_MEMORY_CACHING=1")

    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1":
        monkeypatch.setattr(torch.cuda, "CUDAGraph", skip)
