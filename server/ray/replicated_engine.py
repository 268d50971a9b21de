"""The `AsyncEngine` whose worker is a deployment of Ray Serve.

    engine = ReplicatedEngine(config, Cluster(ReplicaOptions(replicas=2)))

`ReplicaWorker` takes the place of the thread or process that otherwise runs the engine. It sends each request to a replica and
passes on the outputs. If the replica of a request ends, the request is ended with an error. It is not sent to another replica,
because a request that has killed one replica would kill the next one as well. Only a request that the replica has not begun to
compute is sent again. If the replica ended before it said whether it has begun, the request is sent again once.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Mapping
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayActorError

from fa_serve.engine import AsyncEngine, EngineConfig, EngineDeadError, EngineStats, Phase, RequestError, RequestOutput
from fa_serve.engine.events import OnPhase
from fa_serve.engine.process.controls import Control
from fa_serve.engine.process.engine_loop import Add, Encode, LoadAdapter, Message, StepOutputs
from fa_serve.engine.process.parent import STOP_SECONDS, OnOutputs, Pulse, Worker
from fa_serve.engine.process.pipe import Ready
from fa_serve.engine.request.outputs import FinishReason
from fa_serve.engine.start.loading import load_tokenizer
from fa_serve.spec import ParameterError

from .engine_replica import Front, Listen

if TYPE_CHECKING:
    from .cluster import Cluster

log = logging.getLogger("fa_serve.server")
LOOK_SECONDS = 1.0
"""The time between two looks at the replicas."""
SILENT_LOOKS = 10
"""After this many looks without a sign of life, a replica's requests are ended. It gets new ones once it is heard again."""
HANG_UP_SECONDS = 1.0
REPLICA_LOST = "the replica that computed the request has stopped"
AGAIN_SECONDS = 0.1
"""If a replica or its engine ends before it begins to compute a request, the request is sent again after this time."""
LATE_SECONDS = 5.0
"""How long the last outputs of a request may take to arrive after its replica has reported its end."""


@dataclass(slots=True)
class _Request:
    """A request that has not ended.

    unfinished: indices of the answers that have not ended
    replica:    the name of the replica that has taken the request
    ended:      set when all outputs have arrived
    """

    unfinished: set[int]
    replica: str | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _Listener:
    """A stream from one replica. silent_looks: how often this process has looked at the replicas since its last message"""

    task: asyncio.Task[None]
    silent_looks: int = 0


class ReplicaWorker:
    """Sends requests to replicas. `snapshots` has the statistics of each replica, by its name."""

    def __init__(self, cluster: Cluster, config: EngineConfig, on_outputs: OnOutputs, on_phase: OnPhase | None):
        self._cluster = cluster
        self._config = config
        self._on_outputs = on_outputs
        self._on_phase = on_phase
        self._front = Front(secrets.token_hex(8))
        self._loop = asyncio.get_running_loop()
        self._requests: dict[str, _Request] = {}
        self._listeners: dict[str, _Listener] = {}  # by replica
        self._handle: Any = None
        self._add: Any = None
        self._listen_to: Any = None
        self._heard = time.monotonic()
        self._counted = time.monotonic()
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="fa_serve-replicas", daemon=True)
        self.snapshots: Mapping[str | None, EngineStats] = {}

    def start(self) -> Ready:
        """Deploy the replicas and wait until they are loaded. Raises what `Cluster` raises."""
        begin = time.perf_counter()
        tokenizer = load_tokenizer(self._config)  # raises if there is no such model, before a cluster tries to load it
        self._handle = self._cluster.deploy(self._config)
        self._add = self._handle.options(method_name="add")
        self._listen_to = self._handle.options(method_name="listen", stream=True)
        _, ready = self._handle.describe.remote().result()
        self._look()
        if self._on_phase is not None:
            self._on_phase(Phase("replicas", f"{self._cluster.num_running()} running", time.perf_counter() - begin))
        ready.tokenizer = tokenizer
        self._watcher.start()
        found: Ready = ready
        return found

    def send(self, command: Message) -> None:
        """Send a request to a replica, or cancel it there. Called on the event loop.

        Raises ParameterError for a control or an adapter to load: these would have to succeed in all replicas or in none.
        """
        if isinstance(command, Control):
            rule = f"not be used with {command.name}, which needs a single engine (fa-serve serve)"
            raise ParameterError("replicas", rule, "ray")
        if isinstance(command, LoadAdapter):
            rule = "be given at the start (--lora): with several replicas, no adapter can be loaded later"
            raise ParameterError("lora_name", rule, command.name)
        name = command.request_id
        if isinstance(command, Add | Encode):
            request = self._requests[name] = _Request(set(range(command.num_answers)))
            request.task = self._loop.create_task(self._run(command, request))
            request.task.add_done_callback(lambda _: self._requests.pop(name))
        elif name in self._requests:
            self._stop(name, "abort")

    async def _run(self, add: Add | Encode, request: _Request) -> None:
        """Send a request, and wait for its end. Its outputs arrive through `_listen`."""
        name = add.request_id
        try:
            refusal = await self._call(add, request)
            if refusal is not None:
                request.unfinished.clear()
                self._on_outputs(StepOutputs(None, [], [(name, refusal)]))
            elif request.unfinished:
                await asyncio.wait_for(request.ended.wait(), LATE_SECONDS)
        except (RayActorError, asyncio.TimeoutError) as error:
            log.error("the replica that computed %s has stopped: %s", name, type(error).__name__)
            self._end(name, request, "error", RequestError("replica_lost", REPLICA_LOST))
        except Exception as error:
            log.exception("the replica that computed %s has failed", name)
            self._end(name, request, "error", RequestError("step_failed", f"{type(error).__name__}: {error}"))

    async def _call(self, add: Add | Encode, request: _Request) -> Exception | None:
        """Call `EngineReplica.add` of one replica after the other, until one computes the request. Returns what `add` returns.

        Raises RayActorError if the replica ends that has taken the request: the request may be the reason. If a replica ends
        and nobody knows whether it had taken the request, the request is sent again, but only once.
        """
        has_lost_one = False
        while True:
            response = self._add.remote(self._front, add)
            try:
                refusal: Exception | None = await response
                if not isinstance(refusal, EngineDeadError):
                    return refusal
                request.replica = None  # it may have taken the request before its engine ended, but has computed nothing of it
                await asyncio.sleep(AGAIN_SECONDS)
            except RayActorError:
                await asyncio.sleep(AGAIN_SECONDS)  # what the replica has sent last may arrive after the news of its end
                if has_lost_one or request.replica is not None:
                    raise
                has_lost_one = True
            except asyncio.CancelledError:
                response.cancel()
                raise

    def _stop(self, name: str, reason: FinishReason, error: RequestError | None = None) -> None:
        """End a request and cancel it in its replica. It is ended here because its task may not have begun to run."""
        request = self._requests[name]
        self._end(name, request, reason, error)
        if request.task is not None:
            request.task.cancel()

    def _end(self, name: str, request: _Request, reason: FinishReason, error: RequestError | None = None) -> None:
        """Send a last output for each unfinished answer of a request."""
        end = RequestOutput(name, [], finished=True, finish_reason=reason, error=error)
        self._on_outputs(StepOutputs(None, [replace(end, index=index) for index in sorted(request.unfinished)]))
        request.unfinished.clear()

    async def _listen(self, replica: str) -> None:
        """Pass on the outputs that a replica sends for the requests of this process."""
        response = self._listen_to.remote(Listen(self._front.name, replica))
        try:
            async for gains in response:
                self._listeners[replica].silent_looks = 0
                self._heard = time.monotonic()
                for name in gains.accepted:
                    if name in self._requests:
                        self._requests[name].replica = replica
                for output in gains.outputs:
                    self._note(output, replica)
                if gains.outputs:
                    self._on_outputs(StepOutputs(None, gains.outputs))
        except Exception as error:
            log.error("the replica %s has stopped: %s", replica, type(error).__name__)
            self._lose(replica)
        finally:
            response.cancel()
            self._front.heard.discard(replica)
            del self._listeners[replica]

    def _lose(self, replica: str) -> None:
        """End the requests of a replica."""
        for name, request in self._requests.items():
            if request.replica == replica:
                self._stop(name, "error", RequestError("replica_lost", REPLICA_LOST))

    def _note(self, output: RequestOutput, replica: str) -> None:
        if output.error is not None and output.error.code == "engine_dead":  # only this replica's engine is dead
            output.error = RequestError("replica_lost", output.error.message)
            self._front.heard.discard(replica)  # it would refuse the next requests until its process has ended
        request = self._requests.get(output.request_id)
        if request is not None and output.finished:
            request.unfinished.difference_update(output.answers)
            if not request.unfinished:
                request.ended.set()

    def _watch(self) -> None:
        """Look at the replicas until the end. Runs in a thread."""
        while not self._stopping.wait(LOOK_SECONDS):
            try:
                self._loop.call_soon_threadsafe(self._count_silence)
                self._look()
            except Exception as error:  # the cluster cannot be reached; `pulse` reports for how long
                log.warning("the replicas cannot be reached: %s: %s", type(error).__name__, error)

    def _look(self) -> None:
        found = self._handle.broadcast("snapshot", self._front.name).results(timeout_s=LOOK_SECONDS, return_exceptions=True)
        self.snapshots = dict(entry for entry in found if not isinstance(entry, Exception))
        if self.snapshots:
            self._heard = time.monotonic()
        self._loop.call_soon_threadsafe(self._listen_to_all, frozenset(self.snapshots))

    def _listen_to_all(self, replicas: frozenset[str]) -> None:
        """Listen to new replicas. Stop listening to a replica that no longer takes requests and has none of this process."""
        for replica in replicas - self._listeners.keys():
            self._listeners[replica] = _Listener(self._loop.create_task(self._listen(replica)))
            self._front.heard.add(replica)
        busy = {request.replica for request in self._requests.values()}
        for replica in self._listeners.keys() - replicas:
            if None not in busy and replica not in busy:
                self._listeners[replica].task.cancel()

    def _count_silence(self) -> None:
        """Give up silent replicas. Looks are counted instead of seconds, which also pass while this process is suspended."""
        now = time.monotonic()
        if now - self._counted < LOOK_SECONDS / 2:
            return  # the event loop was held up, and now runs several looks at once
        self._counted = now
        for replica, listener in self._listeners.items():
            listener.silent_looks += 1
            if listener.silent_looks == SILENT_LOOKS:
                log.error("the replica %s does not respond, so its requests are ended", replica)
                self._lose(replica)
                listener.task.cancel()

    def pulse(self) -> Pulse:
        """The time since the last sign of life from any replica."""
        return Pulse(silent_seconds=time.monotonic() - self._heard)

    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """Leave the cluster. Call this from a thread other than the event loop's."""
        self._stopping.set()
        with suppress(futures.TimeoutError, RuntimeError):  # RuntimeError: the loop has ended
            asyncio.run_coroutine_threadsafe(self._stop_listening(), self._loop).result(HANG_UP_SECONDS)
        self._cluster.leave()

    async def _stop_listening(self) -> None:
        """Stop listening to all replicas: a replica does not end while a front listens to it."""
        tasks = [listener.task for listener in self._listeners.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def kill(self) -> None:
        """Do nothing: the replicas outlive this process, unless Ray ends with it."""


class ReplicatedEngine(AsyncEngine):
    """An `AsyncEngine` over the replicas of a cluster. All replicas serve the same generating model or encoder."""

    def __init__(self, config: EngineConfig, cluster: Cluster, *, on_phase: OnPhase | None = None) -> None:
        super().__init__(config, on_phase=on_phase)
        self._cluster = cluster
        self._config = config

    def _make_worker(self, on_outputs: OnOutputs, on_death: Any) -> Worker:
        return ReplicaWorker(self._cluster, self._config, on_outputs, self._on_phase)

    def snapshots(self) -> Mapping[str | None, EngineStats]:
        """The statistics of each replica, by its name."""
        return self._worker.snapshots if isinstance(self._worker, ReplicaWorker) else {}
