"""The process of an engine may be started before there is a config, and ends if there will be none."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from streams import collect
from warm_processes import warm_program

from fa_serve.engine import AsyncEngine, EngineConfig
from fa_serve.engine.process import engine_process
from fa_serve.engine.process.engine_process import drop_process, start_ahead, take_process

LIGHT = """
import sys
from fa_serve.engine.process import engine_process
engine_process.start_ahead()
engine_process.drop_process()
assert "torch" not in sys.modules, "the parent has imported what the process imports"
"""
LONELY = """
import os
from fa_serve.engine.process import engine_process
from warm_processes import fork_engines
fork_engines()
engine_process.start_ahead()
print(engine_process._ahead.process.pid, flush=True)
os._exit(0)
"""


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    drop_process()


def started() -> int:
    """The id of the process that was started ahead."""
    assert engine_process._ahead is not None
    return int(engine_process._ahead.process.pid)


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_the_engine_takes_the_process_that_was_started_ahead(model_folder: str) -> None:
    async def main() -> None:
        start_ahead()
        process = started()
        start_ahead()
        assert started() == process, "there is one at a time"
        engine = AsyncEngine(EngineConfig(model=model_folder, device="cpu", num_pages=64, process=True))
        await engine.start()
        assert engine._worker._process.pid == process  # type: ignore[union-attr]
        assert engine_process._ahead is None
        assert len((await collect(engine, [1, 5]))[-1].token_ids) > 0
        await engine.shutdown()
        assert not alive(process)

    asyncio.run(main())


def test_one_that_has_died_is_not_taken() -> None:
    start_ahead()
    assert engine_process._ahead is not None
    engine_process._ahead.process.kill()
    engine_process._ahead.process.join()
    died = started()
    process, connection = take_process()
    assert process.pid != died
    process.kill()
    process.join()
    connection.close()


def test_an_engine_in_a_thread_drops_it(model_folder: str) -> None:
    async def main() -> None:
        start_ahead()
        process = started()
        engine = AsyncEngine(EngineConfig(model=model_folder, device="cpu", num_pages=64, process=False))
        await engine.start()
        assert not alive(process)
        await engine.shutdown()

    asyncio.run(main())


def test_the_parent_imports_nothing_of_an_engine() -> None:
    subprocess.run([sys.executable, "-c", LIGHT], check=True)


@pytest.mark.slow
def test_it_ends_with_a_parent_that_has_no_engine() -> None:
    """Both have been forked with everything imported, so that it reads its connection at once."""
    # the process inherits this pipe, so it is not read to its end
    parent = warm_program(LONELY)
    process = int(parent.stdout.readline())
    assert parent.wait(30) == 0
    deadline = time.monotonic() + 60
    while alive(process) and time.monotonic() < deadline:
        time.sleep(0.1)
    parent.stdout.close()
    assert not alive(process)


@pytest.mark.parametrize(("given", "expected"), [({}, "'0'"), ({"GOMP_SPINCOUNT": "7"}, "'7'")], ids=str)
def test_its_threads_sleep_while_they_wait_unless_the_operator_wants_otherwise(
    given: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """OpenMP prints what it has read. Before, threads that spun took the server's processors, and each other's."""
    for name in engine_process.WAITS:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_DISPLAY_ENV", "VERBOSE")
    before = dict(os.environ)
    printed = tmp_path / "stderr"
    own = os.dup(2)
    try:
        with printed.open("w") as file:
            os.dup2(file.fileno(), 2)
        process, connection = take_process()
    finally:
        os.dup2(own, 2)
        os.close(own)
    assert dict(os.environ) == before, "the server's own threads are not concerned"
    deadline = time.monotonic() + 120
    while not (spins := re.findall(r"GOMP_SPINCOUNT = (.*)\n", printed.read_text())) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()  # it has loaded PyTorch, and would import the rest
    process.join()
    connection.close()
    assert set(spins) == {expected}
