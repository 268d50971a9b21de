"""Processes of benchmarks: what they tell, how they end, and that nothing of them is left."""

from __future__ import annotations

import os
import sys
import time
from collections import deque

from benchmarks.child_process import answers

CHILD = "import subprocess, sys; other = subprocess.Popen(['sleep', '60']); print('@', other.pid, flush=True); other.wait()"


def told(script: str, seconds: float = 30.0) -> tuple[list[object], list[str]]:
    log: deque[str] = deque(maxlen=3)
    return list(answers([sys.executable, "-c", script], os.environ, seconds, log)), list(log)


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


def test_a_late_process_ends_with_those_that_it_has_started() -> None:
    (other,), log = told(CHILD, seconds=5.0)
    assert log == ["its time is up\n"]
    assert has_ended(int(str(other)))


def test_one_who_has_heard_enough_ends_the_group() -> None:
    begin = time.monotonic()
    other = next(iter(answers([sys.executable, "-c", CHILD], os.environ, 60.0, deque())))
    assert has_ended(other)
    assert time.monotonic() - begin < 30
