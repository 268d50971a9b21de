"""The ranks of tensor parallelism: N processes, one for each device, which run the same engine in lockstep.

    ranks = Leader(config)                       # rank 0; starts the others as processes (follower.py)
    ranks.tell("abort", "request-1")             # the others make the same call
    now = ranks.decide("clock", time.monotonic)  # a value that may differ between processes comes from rank 0
    x = ranks.all_reduce(x)                      # tensors are added up on the devices
    ranks.close()

Each rank schedules, computes, samples and commits by itself. Rank 0 sends the calls that it is given, and what depends on
clocks, random bits or threads, through a pipe to each follower, and it never waits for an answer. Nothing is sent for a token.
Each step begins with a digest of what rank 0 has scheduled and sampled before, and a follower whose digest differs ends with an
error. With one rank there is no follower, and every method does what it says at once.

A rank that ends takes the others with it: a follower ends when its pipe does, and rank 0 learns from the pipe that a follower
has ended. Left out: what is divided (fa_serve.hf.division), and the sums themselves (fa_serve.ops.all_reduce).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeVar

import torch

from fa_serve.engine.config import EngineConfig
from fa_serve.engine.errors import EngineDeadError
from fa_serve.ops.all_reduce import AllReduce, AllReduceError, join, listen
from fa_serve.spec import ParameterError

T = TypeVar("T")
OnLost = Callable[[EngineDeadError], None]
STOP_SECONDS = 5.0
"""How long followers may take to end before they are killed."""
CAUSE_SECONDS = 2.0
"""How long rank 0 waits, after an error, for the news that another rank has caused it."""


class Ranks(Protocol):
    """What an engine needs to know of its rank and of the others.

    all_reduce: adds a tensor up over the ranks; None with one rank
    """

    rank: int
    size: int
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


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message to a follower. num_threads: of PyTorch, whose number may change the last bits of a result"""

    config: EngineConfig
    rank: int
    port: int
    num_threads: int


@dataclass(slots=True)
class _Link:
    """Rank 0's end of a follower. replies: what it has sent"""

    rank: int
    process: subprocess.Popen[bytes]
    connection: Connection
    replies: queue.SimpleQueue[Any]


class Leader:
    """Rank 0. Owner of the followers' processes.

    on_lost: called once, from a thread, when a follower ends although it was not told to

    Raises ParameterError if there are not enough devices, and EngineDeadError if a follower ends while it starts.
    """

    rank = 0

    def __init__(self, config: EngineConfig, on_lost: OnLost | None = None) -> None:
        self.size = config.tensor_parallel
        self.device = torch.device(config.device_of(0))
        self.all_reduce: AllReduce | None = None
        self._on_lost = on_lost
        self._digest = 0
        self._links: list[_Link] = []
        self._closing = False
        self._failure: EngineDeadError | None = None
        self._in_step = False
        self._lost: EngineDeadError | None = None
        self._is_lost = threading.Event()
        self._num_threads = torch.get_num_threads()
        self._finalizer = weakref.finalize(self, _kill, self._links)
        if self.size > 1:
            _check_devices(config)
            try:
                self._start(config)
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
        """End the followers: after the step that they are in, or at once if a rank has failed."""
        self._closing = True
        if self._failure is None and not self._is_lost.is_set():
            with contextlib.suppress(EngineDeadError):
                self._send("stop", None)
            for link in self._links:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    link.process.wait(STOP_SECONDS)
        if self.size > 1:
            self._failure = self._failure or EngineDeadError("the engine was closed")
        self._finalizer()
        if self.all_reduce is not None:
            self.all_reduce.close()
            self.all_reduce = None
        if self.size > 1:
            torch.set_num_threads(self._num_threads)

    def _start(self, config: EngineConfig) -> None:
        if self.device.type == "cpu":
            torch.set_num_threads(max(self._num_threads // self.size, 1))
        store, port = listen(self.size)
        for rank in range(1, self.size):
            ours, theirs = Pipe()
            with theirs:
                command = [sys.executable, "-m", "fa_serve.engine.follower", str(theirs.fileno())]
                # a module in the working directory must not take the place of an installed one; one progress bar is enough
                environment = os.environ | {"PYTHONSAFEPATH": "1", "TQDM_DISABLE": "1"}
                process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment)
            link = _Link(rank, process, ours, queue.SimpleQueue())
            self._links.append(link)
            ours.send(Hello(config, rank, port, torch.get_num_threads()))
            threading.Thread(target=_watch, args=(weakref.ref(self), link), name=f"fa_serve-rank-{rank}", daemon=True).start()
        for link in self._links:
            self._reply(link)  # AllReduce would wait for minutes for a follower that has ended
        self.all_reduce = AllReduce(store, 0, self.size, self.device, ordered=config.deterministic)

    def _send(self, what: str, value: Any) -> None:
        if not self._links:
            return
        message = pickle.dumps((what, value))
        for link in self._links:
            try:
                link.connection.send_bytes(message)
            except OSError as error:
                self.check(error)

    def _reply(self, link: _Link) -> Any:
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

    If the pipe from rank 0 closes, this process ends at once, whatever it waits for. `start` joins the other ranks.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        hello: Hello = connection.recv()
        self.config = hello.config
        self.rank = hello.rank
        self.size = hello.config.tensor_parallel
        self.device = torch.device(hello.config.device_of(hello.rank))
        self.all_reduce: AllReduce | None = None
        self._port = hello.port
        torch.set_num_threads(hello.num_threads)
        self._digest = 0
        self._num_steps = 0
        self._messages: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=_listen, args=(connection, self._messages), name="fa_serve-rank-0", daemon=True).start()

    def start(self) -> None:
        """Join the other ranks. Rank 0 waits in its sums once it is told that this rank is ready."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        store = join(self._port, self.size)
        self._connection.send("ready")
        self.all_reduce = AllReduce(store, self.rank, self.size, self.device, ordered=self.config.deterministic)

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
        """Leave the group."""
        if self.all_reduce is not None:
            self.all_reduce.close()


def _check_devices(config: EngineConfig) -> None:
    device = config.resolve_device()
    if device not in ("cpu", "cuda"):
        rule = "be auto, cpu or cuda with tensor_parallel, which takes the first GPUs of CUDA_VISIBLE_DEVICES"
        raise ParameterError("device", rule, config.device)
    if device == "cuda" and torch.cuda.device_count() < config.tensor_parallel:
        rule = f"be at most {torch.cuda.device_count()}, the number of GPUs"
        raise ParameterError("tensor_parallel", rule, config.tensor_parallel)


def _watch(leader: weakref.ref[Leader], link: _Link) -> None:
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
        with contextlib.suppress(subprocess.TimeoutExpired):
            link.process.wait(STOP_SECONDS)
        error = EngineDeadError(f"rank {link.rank} of {owner.size} ended with exit code {link.process.returncode}")
    owner.lose(error)
    link.replies.put(error)


def _listen(connection: Connection, messages: queue.SimpleQueue[tuple[str, Any]]) -> None:
    """Read what rank 0 sends. Runs in a thread of a follower."""
    try:
        while True:
            message = connection.recv()
            messages.put(message)
            if message[0] == "stop":
                return
    except (EOFError, OSError):
        os._exit(1)  # rank 0 is gone


def _kill(links: list[_Link]) -> None:
    """End the processes of followers at once."""
    for link in links:
        link.process.kill()
        link.process.wait()
        link.connection.close()
