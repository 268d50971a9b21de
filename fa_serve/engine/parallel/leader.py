"""Rank 0 of several: it starts the followers or meets those of torchrun, sends them its calls, and notices when they end.

    ranks = open_ranks(config)                   # called by `Engine`; with one rank, this returns `Alone`
    leader = Leader(config)
    leader.start()

Left out: what a rank is told and why (ranks.py), processes and connections (links.py, torchrun.py), and the other end
(follower.py).
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import pickle
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from fa_serve.engine.config import EngineConfig
from fa_serve.engine.errors import EngineDeadError
from fa_serve.engine.images.prompt import PlacedImage
from fa_serve.engine.parallel.links import Hello, Link, kill_all, start_children
from fa_serve.engine.parallel.ranks import Alone, OnLost, Ranks, check_devices
from fa_serve.engine.parallel.torchrun import Torchrun
from fa_serve.ops.collectives.all_reduce import LOOPBACK, AllReduce, AllReduceError, listen
from fa_serve.spec import ParameterError

T = TypeVar("T")
STOP_SECONDS = 5.0
"""How long followers may take to end before they are killed."""
CAUSE_SECONDS = 2.0
"""How long rank 0 waits, after an error, for the news that another rank has caused it."""


def open_ranks(config: EngineConfig, on_lost: OnLost | None = None) -> Ranks:
    """The rank of a process that does not follow: the only rank, or rank 0. Its followers run when this returns.

    on_lost: called once, from a thread, when a follower ends although it was not told to

    Raises ParameterError if there are not enough devices, or if torchrun has started this process as another rank, and
    EngineDeadError if a follower ends while it starts.
    """
    if config.tensor_parallel == 1:
        return Alone(torch.device(config.device_of(0)))
    torchrun = Torchrun.find(config)
    if torchrun is not None and torchrun.rank != 0:
        rule = (
            "be 0 for Engine(): the other ranks of torchrun follow rank 0, and call fa_serve.engine.open_engine(config) instead"
        )
        raise ParameterError("RANK", rule, torchrun.rank)
    leader = Leader(config, torchrun, on_lost)
    leader.start()
    return leader


class Leader:
    """Rank 0. Owner of the links to the followers, and of their processes unless torchrun has started them.

    torchrun: describes the processes, if torchrun has started this one and the others; None: `start` starts the others
    on_lost:  as in `open_ranks`
    """

    rank = 0
    local_rank = 0

    def __init__(self, config: EngineConfig, torchrun: Torchrun | None = None, on_lost: OnLost | None = None) -> None:
        self.size = config.tensor_parallel
        self.device = torch.device(config.device_of(torchrun.local_rank if torchrun else 0))
        self.all_reduce: AllReduce | None = None
        self._config = config
        self._torchrun = torchrun
        self._on_lost = on_lost
        self._digest = 0
        self._links: list[Link] = []
        self._closing = False
        self._failure: EngineDeadError | None = None
        self._in_step = False
        self._lost: EngineDeadError | None = None
        self._is_lost = threading.Event()
        self._num_threads = torch.get_num_threads()
        self._finalizer = weakref.finalize(self, kill_all, self._links)

    def start(self) -> None:
        """Start the followers, or wait until those of torchrun connect, and join them. Raises as `open_ranks`."""
        check_devices(self._config, self._torchrun.local_size if self._torchrun else self.size)
        try:
            self._join_followers()
        except BaseException:
            self.close()
            raise

    def tell(self, call: str, *args: Any) -> None:
        """Let the followers make a call of the engine. A step carries the digest.

        Raises EngineDeadError if the previous step did not finish: Ctrl-C may have ended it on this rank only.
        """
        if self._in_step and self._failure is None:
            self._failure = EngineDeadError("a step was interrupted: the ranks are out of step")
        if self._failure is not None:
            raise self._failure
        self._in_step = call == "step"
        self._send(call, (self._digest,) if call == "step" else args)

    def end_step(self) -> None:
        """The step has finished."""
        self._in_step = False

    def broadcast(self, what: str, make: Callable[[], T]) -> T:
        """Send a value to every rank. Followers ask for `what` at the same point."""
        value = make()
        self._send(what, value)
        return value

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order. Raises EngineDeadError if a follower has ended."""
        return self.broadcast("gather", lambda: [value, *(self._reply(link) for link in self._links)])

    def add_to_digest(self, numbers: Iterable[int]) -> None:
        """Add numbers that must be the same on every rank to the digest."""
        self._digest = hash((self._digest, *numbers))

    def escalate(self, error: Exception) -> None:
        """Raise EngineDeadError, because the other ranks cannot go on without a rank that has failed."""
        if self._failure is None:
            self._is_lost.wait(CAUSE_SECONDS)
            mine = f"rank 0 of {self.size} failed: {type(error).__name__}: {error}"
            self._failure = self._lost or EngineDeadError(mine)
        raise self._failure from None if error is self._failure else error

    def check_lost(self) -> None:
        """Raise EngineDeadError if a follower has ended, because sums that were aborted have undefined values."""
        if self._lost is not None:
            self.escalate(self._lost)

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """The context of the engine's start. If it fails, the followers end, and a follower that has caused it is named."""
        try:
            yield
        except BaseException as error:
            try:
                if isinstance(error, AllReduceError):
                    self.escalate(error)
                raise
            finally:
                self._failure = self._failure or EngineDeadError("the engine did not start")
                self.close()

    def close(self) -> None:
        """End the followers: after their current step, or at once if a rank has failed or a step was interrupted."""
        self._closing = True
        if self._failure is None and not self._in_step and not self._is_lost.is_set():
            with contextlib.suppress(EngineDeadError):
                self._send("stop", None)
            for link in self._links:
                link.wait(STOP_SECONDS)
        self._failure = self._failure or EngineDeadError("the engine was closed")
        self._finalizer()
        if self.all_reduce is not None:
            self.all_reduce.close()
            self.all_reduce = None
        torch.set_num_threads(self._num_threads)

    def _join_followers(self) -> None:
        torchrun = self._torchrun
        if self.device.type == "cpu":
            torch.set_num_threads(max(self._num_threads // (torchrun.local_size if torchrun else self.size), 1))
        host = torchrun.host if torchrun else LOOPBACK
        store, port = listen(self.size, host)
        if torchrun is None:
            start_children(self.size, self._links)
        else:
            torchrun.accept(self._links)
        for link in self._links:
            link.connection.send(Hello(self._config, link.rank, host, port, torch.get_num_threads()))
            name = f"fa_serve-rank-{link.rank}"
            threading.Thread(target=_watch, args=(weakref.ref(self), link), name=name, daemon=True).start()
        for link in self._links:
            self._reply(link)  # AllReduce would wait for minutes for a follower that has ended
        self.all_reduce = AllReduce(store, 0, self.size, self.device, host=host, ordered=self._config.deterministic)

    def _send(self, what: str, value: Any) -> None:
        message = _pickled((what, value))
        for link in self._links:
            try:
                link.connection.send_bytes(message)
            except OSError as error:
                self.escalate(error)

    def _reply(self, link: Link) -> Any:
        reply = link.replies.get()
        if isinstance(reply, EngineDeadError):
            raise reply
        return reply

    def lose(self, error: EngineDeadError) -> None:
        """A follower has ended. Called by the thread that watches it."""
        if self._closing or self._is_lost.is_set():
            return
        self._lost = error
        self._is_lost.set()
        if self._on_lost is not None:
            self._on_lost(error)
        if self.all_reduce is not None:
            self.all_reduce.abort()


class _Pickler(pickle.Pickler):
    """Leaves the pixels out. The other ranks do not run the towers (rank_features.py), so megabytes of each image need not
    travel.
    """

    dispatch_table = copyreg.dispatch_table | {PlacedImage: PlacedImage.reduce_without_pixels}


def _pickled(value: Any) -> bytes:
    """A value, in the form in which it is sent to followers."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def _watch(leader: weakref.ref[Leader], link: Link) -> None:
    """Pass on what a follower sends until it ends. Runs in a thread of rank 0."""
    error: EngineDeadError | None = None
    with contextlib.suppress(EOFError, OSError):
        while error is None:
            reply = link.connection.recv()
            if isinstance(reply, EngineDeadError):
                error = reply
            else:
                link.replies.put(reply)
    owner = leader()
    if owner is None:
        return
    if error is None:
        link.closed.set()
        link.wait(STOP_SECONDS)
        error = EngineDeadError(link.describe_end(owner.size))
    owner.lose(error)
    link.replies.put(error)
