"""The process of a rank other than 0: it loads the engine and carries out the calls that rank 0 sends.

    python -m fa_serve.engine.parallel.follower_main <descriptor of the pipe from rank 0>

    engine = open_engine(config)                 # scripts that run on every rank of torchrun
    follow_if_not_rank_0(config)                       # other entry points, before they make an engine

Entry points ask whether this process is to follow, and constructors do not: a follower's process ends with rank 0, so these
functions do not return on a follower. It ignores SIGINT and SIGTERM, because rank 0 handles them and ends its followers itself.
Left out: how ranks talk (leader.py, follower.py), and how torchrun's processes find each other (torchrun.py).
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NoReturn

from fa_serve.engine.errors import EngineDeadError
from fa_serve.engine.process.host_memory import MemoryTrimmer, importing, limit_host_memory

if TYPE_CHECKING:
    from fa_serve.engine.config import EngineConfig
    from fa_serve.engine.engine import Engine
    from fa_serve.engine.events import OnPhase
    from fa_serve.engine.parallel.ranks import OnLost

log = logging.getLogger("fa_serve.engine")
MAY_REFUSE = ("submit", "read_adapter", "load_adapter", "unload_adapter")
"""Calls that may raise an exception only to refuse their arguments, on every rank. The engine goes on afterwards."""


def open_engine(
    config: EngineConfig | None = None,
    *,
    on_phase: OnPhase | None = None,
    ahead: bool = False,
    on_lost: OnLost | None = None,
) -> Engine:
    """The engine, for a script that torchrun may run on every rank. The arguments are those of `Engine`.

    On rank 0, and without torchrun, this is `Engine(config)`. On another rank of torchrun it does not return: the process
    follows rank 0, and ends when rank 0 closes its engine. Raises what `Engine` raises.
    """
    from fa_serve.engine.config import EngineConfig

    config = config or EngineConfig()
    follow_if_not_rank_0(config)
    from fa_serve.engine.engine import Engine

    return Engine(config, on_phase=on_phase, ahead=ahead, on_lost=on_lost)


def follow_if_not_rank_0(config: EngineConfig) -> None:
    """Return on rank 0, and without torchrun. On another rank of torchrun, follow rank 0 until it ends, then end this process.

    Raises ParameterError, and EngineDeadError if rank 0 is not found.
    """
    from fa_serve.engine.parallel.torchrun import Torchrun

    torchrun = Torchrun.find(config)
    if torchrun is None or torchrun.rank == 0:
        return
    log.info("rank %d of %d follows rank 0 at %s, and takes its settings", torchrun.rank, torchrun.size, torchrun.host)
    os.environ["TQDM_DISABLE"] = "1"  # rank 0's progress bar is enough
    run(torchrun.connect(), torchrun.local_rank)


def follow(connection: Connection, local_rank: int | None = None) -> int:
    """Run an engine until rank 0 ends. Returns the exit code."""
    with importing(freeze=True):  # not at the top: rank 0 may run its engine in another process
        from fa_serve.engine.engine import Engine
        from fa_serve.engine.parallel.follower import Follower
    ranks = Follower(connection, local_rank)
    try:
        ranks.start()
        engine = Engine(ranks.config, ranks=ranks)
        gc.collect()
        gc.freeze()
        MemoryTrimmer().start()
        for call, args in ranks.calls():
            try:
                getattr(engine, call)(*args)
            except EngineDeadError:
                raise
            except Exception:
                # rank 0 refuses the request or the adapter as well; if it does not, the digests will differ
                if call not in MAY_REFUSE:
                    raise
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
