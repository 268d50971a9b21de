"""A benchmark's part in a separate group of processes, which tells results as lines "@ " and JSON.

    log = Log(Path("peer_vllm.log"))         # the file gets every other line
    for answer in answers(command, environment, seconds=60.0, log=log):
        ...                                  # `break` ends the process and those that it has started
    print(log.report())                      # its errors, its last lines, and how the process ended

Left out: what the processes tell (engine_runs.py, bench_vllm_plugin.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

MARK = "@ "
LOG_LINES = 150
"""What is shown of the end of a process that fails."""
ERROR_LINES = 20
"""How many lines with an error are shown before: vLLM tells the cause first, on stdout and perhaps hundreds of lines before the
end, and then the errors of all processes that wait for it."""


class Log:
    """What a process says beside its answers.

    path:  file for all of it; without one, only what `report` shows is kept
    lines: how many of the last lines that is
    """

    def __init__(self, path: Path | None = None, lines: int = LOG_LINES) -> None:
        self.path = path
        self.last: deque[str] = deque(maxlen=lines)
        self._errors: list[str] = []
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")

    def add(self, line: str) -> None:
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(line)
        self.last.append(line[:200])
        if "Error" in line and len(self._errors) < ERROR_LINES:
            self._errors.append(line[:200])

    def report(self) -> str:
        """The first lines with an error, the last lines, and where the others are."""
        behind = "" if self.path is None else f"all of it is in {self.path}\n"
        return "".join([*self._errors, *self.last, behind])


def answers(command: Sequence[str], environment: Mapping[str, str], seconds: float, log: Log) -> Iterator[Any]:
    """Run a command for at most so many seconds. Yields what it tells as soon as it does.

    The whole group is killed at the end: engines are further processes, which would keep the memory of a GPU.

    log: gets all other lines, and behind them how the process ended, unless the caller does not want any more answers
    """
    process = subprocess.Popen(
        command, env=dict(environment), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    alarm = threading.Timer(max(seconds, 1.0), _kill, [process])
    alarm.start()
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith(MARK):
                yield json.loads(line.removeprefix(MARK))
            else:
                log.add(line)
        late = not alarm.is_alive()
        log.add("its time is up\n" if late else f"it ended with {process.wait()}\n")
    finally:
        alarm.cancel()
        _kill(process)
        process.wait()
        process.stdout.close()


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
