"""The group through whose store ranks exchange the handles of their buffers, when torch makes symmetric memory.

    with exchange_group(rank, size) as name:
        handle = torch.distributed._symmetric_memory.rendezvous(memory, name)

torch numbers the exchanges from the start of the process, and the key of a value ends with "/<number>/<rank>"
(`StoreExchange` of CUDASymmetricMemoryUtils.hpp, 2.10 to 2.13). In a process that connects for the second time, such as rank 0
of a second engine, the numbering continues, while a follower is a new process and begins with 0. Their keys would differ, and
each rank would wait for the other until the store's timeout. Every rendezvous after the first therefore gets a group whose
store numbers the exchanges from 0 again. The first rendezvous uses torch's default group unchanged, which assumes that nothing
else in this process has used symmetric memory. Left out: the buffers (peer_memory.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Store, _register_process_group, _unregister_process_group

TIMEOUT = timedelta(seconds=60)
"""How long a later rendezvous waits for another rank. It is shorter than the store's own timeout of 300 s, within which a rank
that has failed can still tell the others why."""
_count = 0
"""How many rendezvous this process has begun."""


class ExchangeStore(Store):
    """A store in which the exchanges of one rendezvous have the numbers 0, 1, ...

    store: holds the values

    torch holds only the C++ part of this object, so the caller must keep a reference to it. torch 2.11 calls `set`, `wait` and
    `get`. torch 2.13 also calls `multi_get`, which calls `get`, and a barrier, which calls `add`, `set` and `wait` with the
    names of its counters instead of the rank.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._first: int | None = None

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Publish this rank's value."""
        self._store.set(self._renumbered(key), value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """The value of a rank. Raises DistStoreError if it is not there within TIMEOUT."""
        self.wait([key])
        return self._store.get(self._renumbered(key))

    def wait(self, keys: list[str], timeout: timedelta = TIMEOUT) -> None:
        """Wait until these values have been published. Raises DistStoreError after `timeout`."""
        self._store.wait([self._renumbered(key) for key in keys], timeout)

    def add(self, key: str, value: int) -> int:
        """Count the ranks that have reached a barrier."""
        return self._store.add(self._renumbered(key), value)

    def _renumbered(self, key: str) -> str:
        name, number, rank = key.rsplit("/", 2)
        if self._first is None:
            self._first = int(number)
        return f"{name}/{int(number) - self._first}/{rank}"


def can_exchange() -> bool:
    """Whether this process can take part in another rendezvous. torch 2.10 only finds the store of the default group."""
    return _count == 0 or tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)


@contextmanager
def exchange_group(rank: int, size: int) -> Iterator[str]:
    """The name of the group for the next rendezvous of this process.

    The first time, it is torch's default group, of which all ranks must be members. Afterwards it is a group that exists only
    inside this context, and whose store renumbers the exchanges.
    """
    global _count
    world = dist.group.WORLD
    assert world is not None
    _count += 1
    if _count == 1:
        yield world.group_name
        return
    name = f"fa_serve rendezvous {_count}"
    exchanges = ExchangeStore(dist.distributed_c10d._get_process_group_store(world))
    group = ProcessGroup(exchanges, rank, size)
    _register_process_group(name, group)  # type: ignore[arg-type]
    try:
        yield name
    finally:
        _unregister_process_group(name)  # type: ignore[arg-type]
