"""What work takes that is queued on a stream beside other work.

    watch = Stopwatch(stream)                # None for a device without streams
    ...                                      # queues work on the stream
    watch.stop()
    seconds = watch.seconds()                # waits for the work

Where streams share a device, this is more than the work holds up the other ones: the time includes what it waits for them.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class Stopwatch:
    """Runs from its making on. Without a stream, work is done when the call that does it returns."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        self._mark()

    def stop(self) -> None:
        self._mark()

    def seconds(self) -> float:
        """Of the device, when it has done the work. To be called after `stop`."""
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
