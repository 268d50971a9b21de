"""Processes of benchmarks: what they tell, how they end, and that nothing of them is left."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks.child_process import Log, answers

CHILD = "import subprocess, sys; other = subprocess.Popen(['sleep', '60']); print('@', other.pid, flush=True); other.wait()"


def told(script: str, seconds: float = 30.0) -> tuple[list[object], list[str]]:
    log = Log(lines=3)
    return list(answers([sys.executable, "-c", script], os.environ, seconds, log)), list(log.last)


def has_ended(process: int) -> bool:
    limit = time.monotonic() + 10
    while time.monotonic() < limit:
        try:
            with open(f"/proc/{process}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":  # nobody waits for it
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def test_answers_and_other_lines_are_told_apart() -> None:
    script = "print('one'); print('@ [1, null]'); print('two'); print('@ {\"a\": 2}'); raise SystemExit(3)"
    assert told(script) == ([[1, None], {"a": 2}], ["one\n", "two\n", "it ended with 3\n"])


def test_the_cause_is_shown_first_and_everything_is_in_a_file(tmp_path: Path) -> None:
    log = Log(tmp_path / "peer.log", lines=2)
    script = "print('ValueError: the cause'); print('\\n'.join(['.'] * 50)); print('EngineDeadError'); raise SystemExit(1)"
    assert not list(answers([sys.executable, "-c", script], os.environ, 30.0, log))
    told_errors = ["ValueError: the cause", "EngineDeadError"]
    assert log.report().splitlines() == [*told_errors, "EngineDeadError", "it ended with 1", f"all of it is in {log.path}"]
    assert (tmp_path / "peer.log").read_text().count("\n") == 53


@pytest.mark.slow
def test_a_late_process_ends_with_those_that_it_has_started() -> None:
    (other,), log = told(CHILD, seconds=2.0)
    assert log == ["its time is up\n"]
    assert has_ended(int(str(other)))


def test_one_who_has_heard_enough_ends_the_group() -> None:
    begin = time.monotonic()
    other = next(iter(answers([sys.executable, "-c", CHILD], os.environ, 60.0, Log())))
    assert has_ended(other)
    assert time.monotonic() - begin < 30
