"""The `AsyncEngine` whose worker is a deployment of Ray Serve.

    engine = ReplicatedEngine(config, Cluster(ReplicaOptions(replicas=2)))

`ReplicaWorker` stands where a thread or a process stands otherwise. It sends each request to a replica and passes on what comes
back. A request whose replica ends is ended with an error. It is not sent to another replica, because a request that ends one
replica would end the next one as well.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayActorError

from fa_serve.engine import AsyncEngine, EngineConfig, EngineStats, Phase, RequestError, RequestOutput
from fa_serve.engine.engine_loop import Abort, Add, StepOutputs
from fa_serve.engine.events import OnPhase
from fa_serve.engine.loading import load_tokenizer
from fa_serve.engine.worker import STOP_SECONDS, OnOutputs, Pulse, Ready, Worker

if TYPE_CHECKING:
    from .cluster import Cluster

log = logging.getLogger("fa_serve.server")
LOOK_SECONDS = 1.0
"""The time between two looks at the replicas."""


class ReplicaWorker:
    """Sends requests to replicas. `snapshots` has the statistics of each, by its name."""

    def __init__(self, cluster: Cluster, config: EngineConfig, on_outputs: OnOutputs, on_phase: OnPhase | None):
        self._cluster = cluster
        self._config = config
        self._on_outputs = on_outputs
        self._on_phase = on_phase
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._handle: Any = None
        self._generate: Any = None
        self._heard = time.monotonic()
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="fa_serve-replicas", daemon=True)
        self.snapshots: Mapping[str | None, EngineStats] = {}

    def start(self) -> Ready:
        """Deploy the replicas and wait until they are loaded. Raises what `Cluster` raises."""
        begin = time.perf_counter()
        self._handle = self._cluster.deploy(self._config)
        self._generate = self._handle.options(method_name="generate", stream=True)
        _, ready = self._handle.describe.remote().result()
        self._look()
        if self._on_phase is not None:
            self._on_phase(Phase("replicas", f"{self._cluster.num_running()} running", time.perf_counter() - begin))
        ready.tokenizer = load_tokenizer(self._config)
        self._watcher.start()
        found: Ready = ready
        return found

    def send(self, command: Add | Abort) -> None:
        """Send a request to a replica, or cancel it there. Called on the event loop."""
        if isinstance(command, Abort):
            if command.request_id in self._tasks:
                self._tasks[command.request_id].cancel()
            return
        name = command.request_id
        self._tasks[name] = asyncio.get_running_loop().create_task(self._relay(command))
        self._tasks[name].add_done_callback(lambda _: self._tasks.pop(name, None))

    async def _relay(self, add: Add) -> None:
        unfinished = set(range(1 if add.params is None else add.params.n))
        response = self._generate.remote(add)
        last: dict[str, Any] = {"finish_reason": "abort"}
        try:
            async for step in response:
                unfinished.difference_update(output.index for output in step.outputs if output.finished)
                if step.rejected:
                    unfinished.clear()
                self._on_outputs(step)
        except RayActorError as error:
            log.error("the replica of %s has ended: %s", add.request_id, type(error).__name__)
            last = _failed(RequestError("replica_lost", "the replica that computed the request has ended"))
        except Exception as error:
            log.exception("the replica of %s has failed", add.request_id)
            last = _failed(RequestError("step_failed", f"{type(error).__name__}: {error}"))
        finally:
            if unfinished:
                response.cancel()
                ends = [RequestOutput(add.request_id, [], finished=True, index=index, **last) for index in sorted(unfinished)]
                self._on_outputs(StepOutputs(None, ends))

    def _watch(self) -> None:
        """Look at the replicas until the end. Runs in a thread."""
        while not self._stopping.wait(LOOK_SECONDS):
            try:
                self._look()
            except Exception as error:  # the cluster cannot be reached; `pulse` tells for how long
                log.warning("the replicas cannot be reached: %s: %s", type(error).__name__, error)

    def _look(self) -> None:
        if self._cluster.num_running():
            self._heard = time.monotonic()
        found = self._handle.broadcast("snapshot").results(timeout_s=LOOK_SECONDS, return_exceptions=True)
        self.snapshots = dict(entry for entry in found if not isinstance(entry, Exception))

    def pulse(self) -> Pulse:
        """How long no replica has run."""
        return Pulse(silent_seconds=time.monotonic() - self._heard)

    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """Leave the cluster."""
        self._stopping.set()
        self._cluster.leave()

    def kill(self) -> None:
        """The replicas outlive this process, unless Ray ends with it."""


class ReplicatedEngine(AsyncEngine):
    """An `AsyncEngine` over the replicas of a cluster."""

    def __init__(self, config: EngineConfig, cluster: Cluster, *, on_phase: OnPhase | None = None) -> None:
        super().__init__(config, on_phase=on_phase)
        self._cluster = cluster
        self._config = config

    def _make_worker(self, on_outputs: OnOutputs, on_death: Any) -> Worker:
        return ReplicaWorker(self._cluster, self._config, on_outputs, self._on_phase)

    def snapshots(self) -> Mapping[str | None, EngineStats]:
        """The statistics of each replica, by its name."""
        return self._worker.snapshots if isinstance(self._worker, ReplicaWorker) else {}


def _failed(error: RequestError) -> dict[str, Any]:
    return {"finish_reason": "error", "error": error}
