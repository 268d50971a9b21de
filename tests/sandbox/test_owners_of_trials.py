"""A process does the trials of one owner, one after the other, and what it keeps says nothing of the next one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from trial_children import children_of, started

from fa_serve.sandbox import trials as module
from fa_serve.sandbox.trials import Cancelled, TrialLimits, Trials

OWNED = """
import os, pathlib, resource, time

def prepare(given):
    gathered = []
    fell = pathlib.Path(given["folder"]) / "fell"

    def work(request, file=None):
        if file is not None:
            os.write(file, request[:1])
        if request == b"large\\n":
            b"x" * (240 << 20)
        if request == b"leak\\n":
            gathered.append(b"x" * (80 << 20))
        if request == b"second\\n":
            time.sleep(1)
        while request == b"busy\\n" and time.process_time() < 1.1:
            pass
        if request in (b"die\\n", b"fall\\n") and gathered:
            os.kill(os.getpid(), 9)
        if request == b"fall\\n" and not fell.exists():
            fell.touch()
            os.kill(os.getppid(), 9)
            time.sleep(60)
        if request == b"remember\\n":
            gathered.append(b"")
        return b"%d %d" % (os.getpid(), resource.getrlimit(resource.RLIMIT_CPU)[0])

    return work
"""
"""Work that tells its process and the limit of its processor's time, and that can leave something behind in it."""


@pytest.fixture
def owned(tmp_path: Path) -> Iterator[Trials]:
    path = tmp_path / "owned.py"
    path.write_text(OWNED)
    made = Trials(str(path), {"folder": str(tmp_path)}, TrialLimits("end", 3.0, 256 << 20, "test"), keep=2)
    yield made
    made.close()


def process_of(trials: Trials, owner: object, request: bytes = b"x") -> int:
    return int(trials.trial(owner).run(request).split()[0])


def test_a_child_does_trials_of_one_owner_alone(owned: Trials) -> None:
    """What hostile work has left in a process is not met by the work of others, nor by work that has no owner."""
    first = process_of(owned, "a")
    assert process_of(owned, "a") == first
    assert process_of(owned, "b") != first
    assert process_of(owned, None) != process_of(owned, None)
    assert process_of(owned, "a") == first, "two may wait, and those without an owner do not"
    assert process_of(owned, "c") != first
    assert process_of(owned, "b") not in (first, None)
    assert process_of(owned, "a") != first, "the child that had waited for the longest had to go"


@pytest.mark.slow
def test_two_trials_of_an_owner_at_once_have_two_children(owned: Trials) -> None:
    owned.start()
    threads = [started(lambda: process_of(owned, "a", b"second")) for _ in range(2)]
    for thread, _ in threads:
        thread.join(20)
    assert len({found[0] for _, found in threads}) == 2


def test_a_child_is_replaced_after_some_trials(owned: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [process_of(owned, "a") for _ in range(module.TRIALS_OF_CHILD + 1)]
    assert len(set(seen)) == 2
    assert seen[-2] != seen[-1]


@pytest.mark.slow
def test_each_trial_has_the_whole_limit_of_processor_time(owned: Trials) -> None:
    """The kernel counts what the process has used since it began: 1.1 seconds by the last of these trials."""
    assert [int(owned.trial("a").run(given).split()[1]) for given in (b"x", b"busy", b"x")] == [4, 4, 5]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system has no /proc")
def test_a_child_with_much_memory_does_not_wait(owned: Trials) -> None:
    assert process_of(owned, "a", b"large") != process_of(owned, "a")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system has no /proc")
def test_a_child_that_waits_ends_by_itself(owned: Trials) -> None:
    first = process_of(owned, "a")
    assert owned._process is not None
    deadline = time.monotonic() + 20
    while first in children_of(owned._process.pid):
        assert time.monotonic() < deadline, "5 seconds"
        time.sleep(0.05)
    assert process_of(owned, "a") != first


@pytest.mark.parametrize("last", [b"die", b"kill", b"fall"])
def test_work_whose_child_had_done_other_work_is_begun_again(owned: Trials, tmp_path: Path, last: bytes) -> None:
    """A child that dies of what was left in it, or that the system has ended while it waited, says nothing of this work, which
    is begun once more as well if its process dies then."""
    first = process_of(owned, "a", b"remember")
    if last == b"kill":
        os.kill(first, signal.SIGKILL)
    with (tmp_path / "shared").open("w+b", buffering=0) as file:
        assert int(owned.trial("a").run(last, file.fileno()).split()[0]) != first
        assert file.seek(0) == 0
        assert file.read() == last[:1], "the result begins where it began"


@pytest.mark.slow
def test_memory_that_earlier_trials_left_is_not_the_fault_of_a_trial(owned: Trials) -> None:
    """80 MiB are left in the child, and of the limit of 256 MiB the next trial needs 240."""
    first = process_of(owned, "a", b"leak")
    assert process_of(owned, "a") == first
    assert process_of(owned, "a", b"large") != first


def test_closing_ends_children_that_wait(owned: Trials) -> None:
    process_of(owned, "a")
    [child] = owned._waiting
    owned.close()
    assert child.connection.fileno() == -1
    with pytest.raises(Cancelled):
        owned.trial("a").run(b"x")
