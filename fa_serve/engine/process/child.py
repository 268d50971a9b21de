"""What runs in the engine's process: its main thread runs the engine, one thread reads commands and one writes to the parent.

    run_engine(connection)                   # engine_process.py calls it in a fresh interpreter

Left out: how the process is started (engine_process.py), and what happens to what it sends (parent.py).
"""

from __future__ import annotations

import gc
import logging
import logging.handlers
import os
import queue
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from fa_serve import __version__
from fa_serve.engine.config import EngineConfig
from fa_serve.engine.errors import EngineDeadError
from fa_serve.engine.process.engine_loop import Commands, EngineLoop, StepOutputs, import_engine, ready_of
from fa_serve.engine.process.host_memory import MemoryTrimmer, limit_host_memory
from fa_serve.engine.process.pipe import Beat, receive_items, send_items
from fa_serve.launching.compilations import use_kernel_cache

log = logging.getLogger("fa_serve.engine")

EXIT_SECONDS = 5.0
"""How long a process that has lost a rank may take to report why it ends."""
SWITCH_SECONDS = 0.0002
"""How long a thread keeps the interpreter while another one waits for it. A thread of the pipe needs it twice for each message:
with Python's default of 5 ms, a step that launches kernels for some milliseconds would delay the answers of the previous step.
A step needs it dozens of times, and would wait for a thread that reads an adapter."""
BEAT_SECONDS = 1.0
"""The time between two beats of a process."""


def run_engine(connection: Connection) -> None:
    """Run the engine until the parent ends it.

    connection: delivers an EngineConfig, and then lists of commands. If the parent ends before it sends a config, nothing runs.
    """
    limit_host_memory()
    commands: Commands = queue.SimpleQueue()
    outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
    logging.getLogger().addHandler(logging.handlers.QueueHandler(outgoing))
    logging.getLogger("fa_serve").setLevel(logging.INFO)
    imported: Any
    try:
        imported = import_engine(outgoing.put, freeze=True)
    except Exception as error:
        imported = error
    try:
        config: EngineConfig = connection.recv()
    except (EOFError, OSError):
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from now on also in a process that was started ahead (engine_process.py)
    writer = threading.Thread(target=send_items, args=(outgoing, connection))
    writer.start()

    def deliver(step: StepOutputs) -> None:
        for output in step.outputs:
            output.prompt_token_ids = []  # the parent knows them
        outgoing.put(step)

    def end(error: EngineDeadError) -> None:
        """Another rank is lost: end the process from this thread. The main thread may be waiting for that rank inside a step,
        and would not notice."""
        log.error("the engine has ended: %s", error)
        outgoing.put(error)
        outgoing.put(None)
        writer.join(EXIT_SECONDS)
        os._exit(1)

    try:
        ready = threading.Event()
        threading.Thread(target=_listen, args=(connection, commands, ready), daemon=True).start()
        if isinstance(imported, Exception):
            raise imported
        use_kernel_cache(config.resolve_device(), __version__)
        engine = imported(config, on_phase=outgoing.put, on_lost=end, ahead=True)
        ready.set()
        tune_interpreter()
        outgoing.put(ready_of(engine, None))
        loop = EngineLoop(engine, commands, deliver)
        threading.Thread(target=_beat, args=(loop, outgoing), daemon=True).start()
        MemoryTrimmer().start()
        try:
            loop.run()
        except Exception:
            log.exception("the engine has ended")
            raise
    except Exception as error:
        outgoing.put(error)
    finally:
        outgoing.put(None)
        writer.join()


def tune_interpreter() -> None:
    """Settings for the time after loading.

    The garbage collector skips what is loaded, because a collection that visits all modules takes a quarter of a second. A
    thread that waits for the interpreter gets it after SWITCH_SECONDS.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_SECONDS)


def _beat(loop: EngineLoop, outgoing: queue.SimpleQueue[Any]) -> None:
    """Send a sign of life each second. Runs in a thread of the process."""
    while True:
        outgoing.put(Beat(loop.busy_seconds))
        time.sleep(BEAT_SECONDS)


def _listen(connection: Connection, commands: Commands, ready: threading.Event) -> None:
    """Read commands from the parent. Runs in a thread of the process."""
    for command in receive_items(connection):
        commands.put(command)
    if not ready.is_set():
        os._exit(1)  # the parent is gone or does not want the model that is being loaded
    commands.put(None)  # the parent wants the loop to end, or is gone
