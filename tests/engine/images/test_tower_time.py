"""A stopwatch without streams counts the time of the calls themselves. tests/gpu has the one of a stream."""

from __future__ import annotations

import time

from fa_serve.engine.images.tower_time import Stopwatch


def test_calls_that_return_when_their_work_is_done() -> None:
    begin = time.perf_counter()
    watch = Stopwatch(None)
    time.sleep(0.02)
    watch.stop()
    most = time.perf_counter() - begin
    time.sleep(0.02)
    assert 0.02 <= watch.seconds() <= most
