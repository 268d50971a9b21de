"""What holds for every test: no network, one thread per worker, fresh memory that is poisoned, grids of cases of which a sample
runs, and interpreted kernels that stay inside their tensors.

Files called `test_*_interpreted.py` run Triton's kernels on a CPU. They are collected only under TRITON_INTERPRET=1, and then
no other file is, because Triton reads the variable when it is imported. `tests/gpu` is collected only where there is a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from sampled_cases import pytest_collection_modifyitems as pytest_collection_modifyitems

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext

    from server_process import ServerProcess

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a pool of processes that import torch takes longer than it saves
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")  # g++ would compile a program for each set of instructions: 5 s
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process that a test starts would compile the sources: 0.7 s
if "PYTEST_XDIST_WORKER" in os.environ:
    import torch  # which the process that hands tests to workers does not need

    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start
    torch.set_num_threads(1)

with contextlib.suppress(ImportError):  # the GPU suite runs where only pytest is installed
    import hypothesis

    # a busy machine is slow, not wrong; CI tries the same examples each time
    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("house", deadline=None, suppress_health_check=slow, derandomize="CI" in os.environ)
    hypothesis.settings.load_profile("house")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Interpreted tests and all other tests never share a process, and tests of a GPU need one.

    A folder without interpreted tests is left out with what its conftest.py imports.
    """
    if collection_path == Path(__file__).parent / "gpu":
        import torch

        return None if torch.cuda.is_available() else True
    if INTERPRETED and collection_path.is_dir():
        return None if any(collection_path.rglob("*_interpreted.py")) else True
    if collection_path.suffix != ".py" or collection_path.name == "conftest.py":
        return None
    return True if collection_path.name.endswith("_interpreted.py") != INTERPRETED else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What tests import stays, so that nobody searches it for garbage: that takes a quarter of the time of an import."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        gc.set_threshold(10_000, 20, 20)  # 5% of the time of all tests went to searches


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty returns NaN (the largest integer for integers), so that reading what nobody wrote is seen."""
    import torch

    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.fixture(scope="session")
def warm_context() -> ForkServerContext:
    """The context of warm_processes.py, made before a test changes the environment."""
    import warm_processes

    return warm_processes.warm_context()


@pytest.fixture
def warm_engine_processes(warm_context: ForkServerContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of engines find everything imported. test_engine_process.py starts fresh interpreters."""
    from fa_serve.engine.process import engine_process

    monkeypatch.setattr(engine_process, "multiprocessing", SimpleNamespace(get_context=lambda _: warm_context))


@pytest.fixture
def warm_followers(warm_context: ForkServerContext, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The followers that this process starts find everything imported. They have to end with the test."""
    from warm_processes import WarmProcess, warm_module

    from fa_serve.engine.parallel import links

    started: list[WarmProcess] = []

    def start(command: list[str], **options: Any) -> WarmProcess:
        started.append(warm_module(command, **options))
        return started[-1]

    names = {"Popen": start, "DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired}
    monkeypatch.setattr(links, "subprocess", SimpleNamespace(**names))
    yield
    for follower in started:
        follower.wait(10)
        follower.stdout.close()


@pytest.fixture
def warm_trials(warm_context: ForkServerContext) -> Iterator[None]:
    """The processes of trials find everything imported. tests/sandbox starts fresh interpreters. They end with the test."""
    from warm_processes import end_processes, forked_trials

    with forked_trials() as started:
        yield
    end_processes(started)


@pytest.fixture(scope="session")
def start_server(warm_context: ForkServerContext) -> Callable[..., ServerProcess]:
    """`start_server("--flag", ..., FA_SERVE_NAME="value")`: a server process that is ready."""
    from server_process import start_warm  # the GPU suite has no httpx

    return start_warm


@pytest.fixture(scope="session")
def served(start_server: Callable[..., ServerProcess]) -> Iterator[ServerProcess]:
    """One server of the embedded model for all tests that leave it as it was."""
    served = start_server("--dtype", "float32", whole=True)
    yield served
    served.end()


@pytest.fixture(scope="session", autouse=True)
def kernels_in_bounds() -> Iterator[None]:
    """An interpreted kernel that accesses memory outside its tensors raises."""
    if not INTERPRETED:
        yield
        return
    from interpreter_bounds import checked_accesses
    from interpreter_shortcuts import shortened

    with checked_accesses(), shortened():
        yield
