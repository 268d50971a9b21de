"""What goes through the pipe between the engine's process and its parent, and how.

    send_items(queue, connection)            # in a thread: sends all waiting items at once, until None
    for item in receive_items(connection): ...

The parent sends an `EngineConfig` and then commands (engine_loop.py). The process sends phases, log records and one `Ready`,
and then a `StepOutputs` for each step and a `Beat` each second. An exception is the last item that it sends. Left out: who
reads and who writes (parent.py, child.py).
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from fa_serve.engine.config import EngineConfig
from fa_serve.engine.pooling.params import EncoderCard
from fa_serve.engine.request.params import SamplingParams
from fa_serve.engine.stats import EngineStats
from fa_serve.engine.summary import EngineSummary

log = logging.getLogger("fa_serve.engine")


@dataclass(slots=True)
class Ready:
    """What others need to know about a loaded engine. Nothing in `config` is "auto" any more.

    card:    describes an encoder; None for an engine that generates
    summary: what the engine has decided in addition to its config
    """

    config: EngineConfig
    vocab_size: int
    eos_ids: frozenset[int]
    stats: EngineStats
    tokenizer: Any
    default_params: SamplingParams = field(default_factory=SamplingParams)
    card: EncoderCard | None = None
    summary: EngineSummary = field(default_factory=EngineSummary)


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life of the engine's process. `busy_seconds`: how long the current step of its loop has taken so far."""

    busy_seconds: float


def send_items(source: queue.SimpleQueue[Any], connection: Connection) -> None:
    """Send the items of a queue up to and including None.

    All items that wait are sent at once, so that a slow reader catches up.
    """
    batch: list[Any] = []
    with suppress(OSError):  # the other end is closed, which its reader notices as well
        while not (batch and batch[-1] is None):
            batch = [source.get()]
            while batch[-1] is not None and not source.empty():
                batch.append(source.get())
            connection.send(batch)


def receive_items(connection: Connection) -> Iterator[Any]:
    """The items that the other end sends, one by one, until it sends None, closes, or sends what cannot be read."""
    try:
        while True:
            for item in connection.recv():
                if item is None:
                    return
                yield item
    except (EOFError, OSError):
        return
    except Exception:  # an exception class that can be pickled but not unpickled
        log.exception("an item from the pipe between the engine's process and the server cannot be read")
