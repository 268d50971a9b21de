"""How long work on a stream takes while other streams are busy.

    watch = Stopwatch(stream)                # None for a device without streams
    ...                                      # queues work on the stream
    watch.stop()
    seconds = watch.seconds()                # waits for the work

Where streams share a device, this time is longer than the work delays the other streams, because it includes waiting for them.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class Stopwatch:
    """Starts when it is made. Without a stream it reads the host's clock, because each call returns when its work is done."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        self._mark()

    def stop(self) -> None:
        self._mark()

    def seconds(self) -> float:
        """Seconds from the start to `stop`, as the device measures them. Waits for the work. Call `stop` before."""
        if self._stream is None:
            begin, end = self._times
            return end - begin
        first, last = self._events
        last.synchronize()
        return float(first.elapsed_time(last)) / 1000

    def _mark(self) -> None:
        if self._stream is None:
            self._times.append(time.perf_counter())
            return
        make_event: Any = torch.cuda.Event
        event: torch.cuda.Event = make_event(enable_timing=True)
        event.record(self._stream)
        self._events.append(event)
