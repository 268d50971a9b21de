"""The process of a rank other than 0: it loads the engine and makes the calls that rank 0 sends.

    python -m fa_serve.engine.parallel.follower <descriptor of the pipe from rank 0>
    run(connection, local_rank=0)                # in a process that torchrun has started (torchrun.py)

It ends with rank 0, and ignores the signals that end rank 0 in its own time. Left out: how ranks talk (ranks.py).
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection
from typing import NoReturn

from fa_serve.engine.process.host_memory import MemoryTrimmer, importing, limit_host_memory


def follow(connection: Connection, local_rank: int | None = None) -> int:
    """Run an engine until rank 0 ends. Returns the exit code."""
    with importing(freeze=True):
        from fa_serve.engine.engine import Engine
        from fa_serve.engine.parallel.ranks import Follower
    ranks = Follower(connection, local_rank)
    try:
        ranks.start()
        engine = Engine(ranks.config, ranks=ranks)
        gc.collect()
        gc.freeze()
        MemoryTrimmer().start()
        for call, args in ranks.calls():
            # an exception here refuses one request, on rank 0 as well; if it does not, the digests will differ
            with suppress(Exception) if call == "submit" else nullcontext():
                getattr(engine, call)(*args)
        engine.check_integrity()
        engine.close()
    except Exception as error:
        ranks.fail(error)
        return 1
    return 0


def run(connection: Connection, local_rank: int | None = None) -> NoReturn:
    """Run an engine until rank 0 ends, and end this process. local_rank: as in `Follower`"""
    limit_host_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = follow(connection, local_rank)
    sys.stderr.flush()
    os._exit(code)  # threads of a broken process group may not end


if __name__ == "__main__":
    run(Connection(int(sys.argv[1])))
