"""A benchmark's part in a separate group of processes, which tells results as lines "@ " and JSON.

    log = deque(maxlen=LOG_LINES)
    for answer in answers(command, environment, seconds=60.0, log=log):
        ...                                  # `break` ends the process and those that it has started
    print("".join(log))                      # the last other lines, and how the process ended

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
from typing import Any

MARK = "@ "
LOG_LINES = 150
"""What is shown of a process that fails: vLLM tells the cause first, and then the errors of all processes that wait for it."""


def answers(command: Sequence[str], environment: Mapping[str, str], seconds: float, log: deque[str]) -> Iterator[Any]:
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
                log.append(line[:200])
        late = not alarm.is_alive()
        log.append("its time is up\n" if late else f"it ended with {process.wait()}\n")
    finally:
        alarm.cancel()
        _kill(process)
        process.wait()
        process.stdout.close()


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
