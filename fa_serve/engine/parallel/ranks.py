"""The ranks of tensor parallelism: N processes, one for each device, which run the same engine in lockstep.

    ranks = lead(config)                         # rank 0; starts the others (links.py), or meets them (torchrun.py)
    ranks.tell("abort", "request-1")             # the others make the same call
    now = ranks.decide("clock", time.monotonic)  # a value that may differ between processes comes from rank 0
    x = ranks.all_reduce(x)                      # tensors are added up on the devices
    ranks.close()

Each rank schedules, computes, samples and commits by itself. Rank 0 sends the calls that it is given, and what depends on
clocks, random bits or threads, through a link to each follower, and it never waits for an answer. Nothing is sent for a token.
Each step begins with a digest of what rank 0 has scheduled and sampled before, and a follower whose digest differs ends with an
error. With one rank there is no follower, and every method does what it says at once.

A rank that ends takes the others with it: a follower ends when its link does, and rank 0 learns from the link that a follower
has ended. Left out: what is divided (fa_serve.hf.surgery.divide.plan), and the sums themselves
(fa_serve.ops.collectives.all_reduce).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeVar

import torch

from fa_serve import __version__
from fa_serve.engine.config import EngineConfig
from fa_serve.engine.errors import EngineDeadError
from fa_serve.engine.parallel.links import Hello, Link, kill_all, start_children
from fa_serve.engine.parallel.torchrun import Torchrun, follow_if_told
from fa_serve.ops.collectives.all_reduce import LOOPBACK, AllReduce, AllReduceError, join, listen
from fa_serve.spec import ParameterError

T = TypeVar("T")
OnLost = Callable[[EngineDeadError], None]
STOP_SECONDS = 5.0
"""How long followers may take to end before they are killed."""
CAUSE_SECONDS = 2.0
"""How long rank 0 waits, after an error, for the news that another rank has caused it."""


class Ranks(Protocol):
    """What an engine needs to know of its rank and of the others.

    local_rank: among the ranks of this machine
    all_reduce: adds a tensor up over the ranks; None with one rank
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    all_reduce: AllReduce | None

    def tell(self, call: str, *args: Any) -> None: ...
    def end_step(self) -> None: ...
    def decide(self, what: str, make: Callable[[], T]) -> T: ...
    def least(self, value: int) -> int: ...
    def note(self, numbers: Iterable[int]) -> None: ...
    def check(self, error: Exception) -> None: ...
    def check_lost(self) -> None: ...
    def starting(self) -> AbstractContextManager[None]: ...
    def close(self) -> None: ...


def lead(config: EngineConfig, on_lost: OnLost | None = None) -> Leader:
    """Rank 0. In a process that torchrun has started as another rank this does not return: the process follows rank 0."""
    follow_if_told(config)
    return Leader(config, on_lost)


class Leader:
    """Rank 0. Owner of the links to the followers, and of their processes unless torchrun has started them.

    on_lost: called once, from a thread, when a follower ends although it was not told to

    Raises ParameterError if there are not enough devices, and EngineDeadError if a follower ends while it starts.
    """

    rank = 0
    local_rank = 0

    def __init__(self, config: EngineConfig, on_lost: OnLost | None = None) -> None:
        self.size = config.tensor_parallel
        torchrun = Torchrun.find(config)
        self.device = torch.device(config.device_of(torchrun.local_rank if torchrun else 0))
        self.all_reduce: AllReduce | None = None
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
        if self.size > 1:
            check_devices(config, torchrun.local_size if torchrun else self.size)
            try:
                self._start(config, torchrun)
            except BaseException:
                self.close()
                raise

    def tell(self, call: str, *args: Any) -> None:
        """Let the followers make a call of the engine. A step carries the digest.

        Raises EngineDeadError if the step before has not come to its end: Ctrl-C may have ended it on this rank alone.
        """
        if self._in_step and self._links and self._failure is None:
            self._failure = EngineDeadError("a step was interrupted: the ranks are out of step")
        if self._failure is not None:
            raise self._failure
        self._in_step = call == "step"
        self._send(call, (self._digest,) if call == "step" else args)

    def end_step(self) -> None:
        """The step has come to its end."""
        self._in_step = False

    def decide(self, what: str, make: Callable[[], T]) -> T:
        """A value that every rank shall have. Followers ask for the same at the same point."""
        value = make()
        self._send(what, value)
        return value

    def least(self, value: int) -> int:
        """The smallest value of all ranks. Raises EngineDeadError if a follower has ended."""
        return self.decide("least", lambda: min([value, *(int(self._reply(link)) for link in self._links)]))

    def note(self, numbers: Iterable[int]) -> None:
        """Take numbers that must be the same on every rank into the digest."""
        if self._links:
            self._digest = hash((self._digest, *numbers))

    def check(self, error: Exception) -> None:
        """Raise EngineDeadError, because an error of one rank leaves the others without it. With one rank, do nothing."""
        if self.size == 1:
            return
        if self._failure is None:
            self._is_lost.wait(CAUSE_SECONDS)
            mine = f"rank 0 of {self.size} failed: {type(error).__name__}: {error}"
            self._failure = self._lost or EngineDeadError(mine)
        raise self._failure from None if error is self._failure else error

    def check_lost(self) -> None:
        """Raise EngineDeadError if a follower has ended, because sums that were aborted have undefined values."""
        if self._lost is not None:
            self.check(self._lost)

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Around the start of the engine: if it fails, the followers end, and one that has caused the failure is named."""
        try:
            yield
        except BaseException as error:
            try:
                if isinstance(error, AllReduceError):
                    self.check(error)
                raise
            finally:
                self._failure = self._failure or EngineDeadError("the engine did not start")
                self.close()

    def close(self) -> None:
        """End the followers: after the step that they are in, or at once if a rank has failed or a step was interrupted."""
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
        if self.size > 1:
            torch.set_num_threads(self._num_threads)

    def _start(self, config: EngineConfig, torchrun: Torchrun | None) -> None:
        if self.device.type == "cpu":
            torch.set_num_threads(max(self._num_threads // (torchrun.local_size if torchrun else self.size), 1))
        host = torchrun.host if torchrun else LOOPBACK
        store, port = listen(self.size, host)
        if torchrun is None:
            start_children(self.size, self._links)
        else:
            torchrun.accept(self._links)
        for link in self._links:
            link.connection.send(Hello(config, link.rank, host, port, torch.get_num_threads()))
            name = f"fa_serve-rank-{link.rank}"
            threading.Thread(target=_watch, args=(weakref.ref(self), link), name=name, daemon=True).start()
        for link in self._links:
            self._reply(link)  # AllReduce would wait for minutes for a follower that has ended
        self.all_reduce = AllReduce(store, 0, self.size, self.device, host=host, ordered=config.deterministic)

    def _send(self, what: str, value: Any) -> None:
        if not self._links:
            return
        message = pickle.dumps((what, value))
        for link in self._links:
            try:
                link.connection.send_bytes(message)
            except OSError as error:
                self.check(error)

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


class Follower:
    """A rank other than 0. `tell` does nothing, because a follower makes calls and gives none.

    local_rank: among the ranks of this machine, if torchrun has started it; None for a child of rank 0

    If the link from rank 0 closes, this process ends at once, whatever it waits for. `start` joins the other ranks.
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
        """Join the other ranks. Rank 0 waits in its sums once it is told that this rank is ready.

        Raises EngineDeadError for another release of fa_serve, and ParameterError if there are not enough devices.
        """
        host = self._hello.host
        if self._hello.version != __version__:
            raise EngineDeadError(f"it runs fa_serve {__version__}, and rank 0 runs {self._hello.version}")
        check_devices(self.config, self.local_rank + 1)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        store = join(self._hello.port, self.size, host)
        self._connection.send("ready")
        ordered = self.config.deterministic
        self.all_reduce = AllReduce(store, self.rank, self.size, self.device, host=host, ordered=ordered)

    def calls(self) -> Iterator[tuple[str, Any]]:
        """(name, arguments) of the calls that rank 0 was given, until it ends. Raises EngineDeadError if the digests differ."""
        while True:
            call, args = self._messages.get()
            if call == "stop":
                return
            if call == "step":
                self._num_steps += 1
                if args != (self._digest,):
                    raise EngineDeadError(
                        f"it has scheduled or sampled something else than rank 0 before step {self._num_steps}: the ranks "
                        "are out of step"
                    )
                args = ()
            yield call, args

    def tell(self, call: str, *args: Any) -> None:
        """Rank 0 tells the others."""

    def end_step(self) -> None:
        """Rank 0 knows whether the step was interrupted."""

    def decide(self, what: str, make: Callable[[], T]) -> T:
        """What rank 0 has decided. `make` is not called."""
        kind, value = self._messages.get()
        if kind != what:
            raise EngineDeadError(f"it waits for {what!r} of rank 0, which has sent {kind!r}: the ranks are out of step")
        decided: T = value
        return decided

    def least(self, value: int) -> int:
        """The smallest value of all ranks."""
        self._connection.send(value)
        return self.decide("least", lambda: value)

    def note(self, numbers: Iterable[int]) -> None:
        """Take numbers that must be the same on every rank into the digest."""
        self._digest = hash((self._digest, *numbers))

    def check(self, error: Exception) -> None:
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
        """Nothing to do: this process ends now. NCCL would wait for rank 0 to leave the group, and rank 0 for this process."""


def check_devices(config: EngineConfig, num_ranks: int) -> None:
    """Raise ParameterError unless this machine has a device for each of so many ranks."""
    device = config.resolve_device()
    if device not in ("cpu", "cuda"):
        rule = "be auto, cpu or cuda with tensor_parallel, which takes the first GPUs of CUDA_VISIBLE_DEVICES"
        raise ParameterError("device", rule, config.device)
    if device == "cuda" and torch.cuda.device_count() < num_ranks:
        rule = f"be at most {torch.cuda.device_count()}, the number of GPUs"
        if num_ranks != config.tensor_parallel:
            rule = f"have a GPU for each rank of a machine, and this one has {torch.cuda.device_count()}"
        raise ParameterError("tensor_parallel", rule, config.tensor_parallel)


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


def _listen(connection: Connection, messages: queue.SimpleQueue[tuple[str, Any]]) -> None:
    """Read what rank 0 sends. Runs in a thread of a follower."""
    try:
        while True:
            messages.put(connection.recv())
    except (EOFError, OSError):
        os._exit(1)  # rank 0 is gone
