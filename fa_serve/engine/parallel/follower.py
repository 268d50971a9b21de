"""The ranks, as the engine of a rank other than 0 sees them: its calls arrive through the link from rank 0.

    ranks = Follower(connection)
    ranks.start()                                # joins the others
    engine = Engine(ranks.config, ranks=ranks)
    for call, args in ranks.calls():
        getattr(engine, call)(*args)

Left out: the process around it (follower_main.py), and the other end of the link (leader.py).
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from fa_serve import __version__
from fa_serve.engine.errors import EngineDeadError
from fa_serve.engine.parallel.links import Hello
from fa_serve.engine.parallel.ranks import check_devices
from fa_serve.ops.collectives.all_reduce import AllReduce, join

T = TypeVar("T")


class Follower:
    """A rank other than 0. `tell` does nothing, because a follower carries out calls and sends none.

    local_rank: its number among the ranks of this machine, if torchrun has started it; None for a child of rank 0

    If the link from rank 0 closes, this process ends at once, even while it waits. `start` joins the other ranks.
    """

    def __init__(self, connection: Connection, local_rank: int | None = None) -> None:
        self._connection = connection
        hello: Hello = connection.recv()
        self.config = hello.config
        self.rank = hello.rank
        self.size = hello.config.tensor_parallel
        self.local_rank = hello.rank if local_rank is None else local_rank
        self.device = torch.device(hello.config.device_of(self.local_rank))
        self.all_reduce: AllReduce | None = None
        self._hello = hello
        torch.set_num_threads(hello.num_threads)
        self._digest = 0
        self._num_steps = 0
        self._messages: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=_listen, args=(connection, self._messages), name="fa_serve-rank-0", daemon=True).start()

    def start(self) -> None:
        """Join the other ranks. Once rank 0 hears that this rank is ready, it waits for it in the constructor of AllReduce.

        Raises EngineDeadError if rank 0 runs another release of fa_serve, and ParameterError if there are not enough devices.
        """
        host = self._hello.host
        if self._hello.version != __version__:
            raise EngineDeadError(f"it runs fa_serve {__version__}, but rank 0 runs {self._hello.version}")
        check_devices(self.config, self.local_rank + 1)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        store = join(self._hello.port, self.size, host)
        self._connection.send("ready")
        ordered = self.config.deterministic
        self.all_reduce = AllReduce(store, self.rank, self.size, self.device, host=host, ordered=ordered)

    def calls(self) -> Iterator[tuple[str, Any]]:
        """(name, arguments) of the calls that rank 0 sends, until it ends. Raises EngineDeadError if the digests differ."""
        while True:
            call, args = self._messages.get()
            if call == "stop":
                return
            if call == "step":
                self._num_steps += 1
                if args != (self._digest,):
                    raise EngineDeadError(
                        f"its scheduling or sampling differed from rank 0's before step {self._num_steps}: the ranks are out "
                        "of step"
                    )
                args = ()
            yield call, args

    def tell(self, call: str, *args: Any) -> None:
        """Nothing to do: only rank 0 tells the others."""

    def end_step(self) -> None:
        """Nothing to do: only rank 0 needs to know whether the step was interrupted."""

    def broadcast(self, what: str, make: Callable[[], T]) -> T:
        """The value that rank 0 has sent. `make` is not called. Raises EngineDeadError if rank 0 has sent something else."""
        kind, value = self._messages.get()
        if kind != what:
            raise EngineDeadError(f"it expected {what!r} from rank 0, which sent {kind!r}: the ranks are out of step")
        decided: T = value
        return decided

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order."""
        self._connection.send(value)
        return self.broadcast("gather", lambda: [value])

    def add_to_digest(self, numbers: Iterable[int]) -> None:
        """Add numbers that must be the same on every rank to the digest."""
        self._digest = hash((self._digest, *numbers))

    def escalate(self, error: Exception) -> None:
        """Raise the error, which ends this process."""
        if isinstance(error, EngineDeadError):
            raise error
        raise EngineDeadError(f"{type(error).__name__}: {error}") from error

    def check_lost(self) -> None:
        """Nothing to do: rank 0 ends this process if another rank is lost."""

    def starting(self) -> AbstractContextManager[None]:
        """Nothing to do: `follow` reports a failed start to rank 0."""
        return contextlib.nullcontext()

    def fail(self, error: Exception) -> None:
        """Tell rank 0 why this process ends."""
        text = str(error) if isinstance(error, EngineDeadError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            self._connection.send(EngineDeadError(f"rank {self.rank} of {self.size} failed: {text}"))

    def close(self) -> None:
        """Nothing to do: this process ends now. Leaving NCCL's group would wait for rank 0, which waits for this process."""


def _listen(connection: Connection, messages: queue.SimpleQueue[tuple[str, Any]]) -> None:
    """Read what rank 0 sends. Runs in a thread of a follower."""
    try:
        while True:
            messages.put(connection.recv())
    except (EOFError, OSError):
        os._exit(1)  # rank 0 is gone
