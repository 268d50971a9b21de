"""How rank 0 ends a follower, and notices that one has ended: a child of this process, and a process of another machine."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from fa_serve.engine.parallel.links import Link, kill_all, start_children


def test_a_child_is_killed_and_its_exit_code_is_told() -> None:
    ours, theirs = Pipe()
    link = Link(1, ours, subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
    link.wait(0.01)
    begin = time.monotonic()
    kill_all([link])
    assert time.monotonic() - begin < 10
    assert link.describe_end(2) == "rank 1 of 2 ended with exit code -9"
    with pytest.raises(EOFError):
        theirs.recv()
    theirs.close()


def test_children_get_the_other_end_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that ends at once closes its end, so rank 0 need not wait for an answer."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    links: list[Link] = []
    start_children(3, links)
    for rank, link in enumerate(links, start=1):
        assert link.rank == rank
        with pytest.raises(EOFError):
            link.connection.recv()
        link.wait(10)
        assert link.describe_end(3) == f"rank {rank} of 3 ended with exit code 1"
    kill_all(links)


def test_a_process_of_another_machine_is_told_while_a_thread_reads() -> None:
    near, far = socket.socketpair()
    link = Link(1, Connection(near.detach()), host="10.0.0.2")
    other = Connection(far.detach())
    reader = threading.Thread(target=_read_until_closed, args=(link,))
    reader.start()
    link.wait(0.01)
    assert not link.closed.is_set()
    link.kill()
    with pytest.raises((EOFError, OSError)):
        other.recv()
    link.wait(10)
    assert link.closed.is_set()
    reader.join(10)
    link.kill()  # once more does no harm
    assert link.describe_end(2) == "rank 1 of 2 on 10.0.0.2 has ended, or its machine cannot be reached"
    other.close()


def _read_until_closed(link: Link) -> None:
    with pytest.raises((EOFError, OSError)):
        link.connection.recv()
    link.closed.set()
