"""Ranks of interpreted sums: one process for each, with buffers in a shared file.

The interpreter runs one kernel at a time in a process, so ranks that wait for each other are processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from fa_serve.ops.collectives.peer_buffers import MAX_PROGRAMS, Peers, buffer_bytes


def table(buffers: Tensor) -> Tensor:
    """The addresses of the buffers of all ranks."""
    return torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64)


def peers_of(path: str, rank: int, size: int, processors: int) -> tuple[Peers, Tensor]:
    """What a rank in a process of `run_ranks` sees, and the memory that must live as long."""
    num_bytes = size * buffer_bytes(size)
    buffers = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8).view(size, -1)
    return Peers(rank, size, table(buffers), torch.zeros(1 + MAX_PROGRAMS, dtype=torch.int64), processors), buffers


FORKING = """
import os, sys, traceback
script, module, path, size = sys.argv[1:]
__import__(module)
ranks = []
for rank in range(int(size)):
    ranks.append(os.fork())
    if not ranks[-1]:
        os.dup2(os.open(f"{path}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        sys.argv[1:] = [path, str(rank), size]
        try:
            exec(script)
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
sys.exit(any([os.waitpid(rank, 0)[1] for rank in ranks]))
"""


def run_ranks(script: str, module: str, size: int, folder: Path) -> list[str]:
    """What each rank prints that runs the script with the path of the buffers, its rank and the number of ranks.

    module: imported before ranks are forked, because each would take seconds to import what kernels need
    """
    path = folder / "buffers"
    with path.open("wb") as file:
        file.truncate(size * buffer_bytes(size))
    folders = os.pathsep.join(str(Path(__file__).parents[1] / name) for name in ("ops/collectives", "support"))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([folders, os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", FORKING, script, module, str(path), str(size)]
    with subprocess.Popen(command, env=environment, start_new_session=True) as forking:
        try:
            assert forking.wait(120) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(forking.pid, signal.SIGKILL)
    return [Path(f"{path}.{rank}").read_text() for rank in range(size)]
