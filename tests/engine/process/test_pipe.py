"""The pipe between the engine's process and its parent: what waits is sent together."""

from __future__ import annotations

import multiprocessing
import queue

from fa_serve.engine.process.pipe import receive_items, send_items


def test_what_waits_crosses_the_pipe_at_once():
    """A slow reader gets everything in one read. What follows None is not read."""
    items = queue.SimpleQueue()
    ours, theirs = multiprocessing.Pipe()
    for item in (1, 2, 3, None, 4):
        items.put(item)
    send_items(items, theirs)
    assert ours.recv() == [1, 2, 3, None]
    for batch in ([1], [2, 3], [4, None, 5]):
        theirs.send(batch)
    assert list(receive_items(ours)) == [1, 2, 3, 4]
    theirs.close()
    assert list(receive_items(ours)) == [], "the other process has died"
