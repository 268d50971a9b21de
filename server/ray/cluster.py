"""The connection to a Ray cluster, and the deployment of engines in it.

    cluster = Cluster(ReplicaOptions(replicas=2))
    cluster.connect()                         # starts Ray on this machine; with an address, joins a running cluster
    handle = cluster.deploy(config)           # blocks until the first replicas are loaded
    cluster.leave()

A process that finds the deployment in its cluster uses it, and leaves it running when it ends. So several processes, also on
several machines, can speak HTTP for the same replicas. The process that has deployed the replicas takes them down when it ends.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, ProxyLocation, RequestRouterConfig

from ..settings import EXTRA_WAITING
from .engine_replica import EngineReplica
from .prefix_router import PrefixRouter

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from fa_serve.engine import EngineConfig

log = logging.getLogger("fa_serve.server")
APPLICATION = "fa_serve"
DEPLOYMENT = "engine"
RUNNING: Any = "RUNNING"  # a member of Ray's ReplicaState, whose members are strings
HEALTH_SECONDS = 10.0
"""The time in which a replica must answer `check_health`, which waits for no step. Ray replaces it after three failures."""
ROUTER: Any = f"{PrefixRouter.__module__}:PrefixRouter"  # Ray's documentation allows an import path, its annotation does not


@dataclass(frozen=True)
class ReplicaOptions:
    """How many engines there are, and what each may use.

    replicas:     how many engines run at the start, and at least
    max_replicas: how many engines run at most; if it is above `replicas`, Ray adds and removes engines by their load
    address:      the cluster to join, as ray.init takes it; None starts Ray on this machine
    replica_cpus: processors that Ray reserves for an engine
    step_timeout, drain_timeout: as in Settings
    """

    replicas: int = 1
    max_replicas: int | None = None
    address: str | None = None
    replica_cpus: float = 1.0
    step_timeout: float = 60.0
    drain_timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas must be at least replicas = {self.replicas}, got {self.max_replicas}")


def room_for(needs: Mapping[str, float], nodes: Iterable[Mapping[str, float]]) -> int:
    """How many replicas fit on machines with these resources. needs: what one replica needs, as Ray's options for an actor"""
    least = [(name, needs[option]) for option, name in (("num_cpus", "CPU"), ("num_gpus", "GPU")) if needs.get(option)]
    if not least:
        return sys.maxsize
    return sum(min(int(node.get(name, 0) / amount) for name, amount in least) for node in nodes)


class Cluster:
    def __init__(self, options: ReplicaOptions):
        self._options = options
        self._owns_ray = False
        self._owns_application = False

    def connect(self) -> None:
        """Start Ray, or join a cluster. Raises ConnectionError if there is none at the address."""
        if ray.is_initialized():
            return
        # otherwise Ray would send usage statistics to its developers
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        address = self._options.address or "local"  # None would join any cluster that has been started on this machine
        # Ray's dashboard runs any job that is sent to it, so a cluster that we start has none
        local: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, **local)
        except ConnectionError as error:
            raise ConnectionError(f"cannot connect to a Ray cluster at {address} with this RAY_AUTH_TOKEN: {error}") from None
        self._owns_ray = True

    def deploy(self, config: EngineConfig) -> DeploymentHandle[Any]:
        """The handle of the replicas. It is returned when the first replicas have loaded the model.

        Raises RuntimeError if the replicas cannot be started, and ValueError if the cluster runs replicas with other settings,
        or if Ray runs only on this machine and the machine has no room for them.
        """
        serve.start(proxy_location=ProxyLocation.Disabled)
        if APPLICATION in serve.status().applications:
            handle = serve.get_app_handle(APPLICATION)
            running, _ = handle.describe.remote().result()
            if running != config:
                raise ValueError(
                    f"the cluster already runs replicas with other settings. Use their settings or another cluster. "
                    f"Running: {running}; requested: {config}"
                )
            return handle
        settings = self._deployment_options(config)
        self._check_room(settings["ray_actor_options"], config.device)
        self._owns_application = True
        deployment: Any = serve.deployment(name=DEPLOYMENT, **settings)(EngineReplica)
        application = deployment.bind(config, self._options.step_timeout)
        try:
            return serve.run(application, name=APPLICATION, route_prefix=None, logging_config={"log_level": "WARNING"})
        except RuntimeError as error:
            raise RuntimeError(f"the replicas could not be started: {self._status_message() or error}") from error

    def _deployment_options(self, config: EngineConfig) -> dict[str, Any]:
        options = self._options
        scaling: dict[str, Any] = {"num_replicas": options.replicas}
        if options.max_replicas is not None and options.max_replicas > options.replicas:
            scaling = {
                "autoscaling_config": AutoscalingConfig(
                    min_replicas=options.replicas,
                    max_replicas=options.max_replicas,
                    policy=AutoscalingPolicy(policy_function=f"{__package__}.replica_load:autoscaling_policy"),  # type: ignore[no-untyped-call]
                )
            }
        resources: dict[str, Any] = {"num_cpus": options.replica_cpus}
        available: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        if config.device.startswith("cuda") or (config.device == "auto" and available.get("GPU")):
            resources["num_gpus"] = config.tensor_parallel  # all on one machine, because one replica is one actor
        return scaling | {
            "ray_actor_options": resources,
            # requests must not wait before they reach the engine's queue, because there clients take turns
            "max_ongoing_requests": config.max_num_seqs + config.max_waiting + EXTRA_WAITING,
            "graceful_shutdown_timeout_s": max(options.drain_timeout, 0.1),
            "graceful_shutdown_wait_loop_s": 0.1,
            "health_check_period_s": 5.0,
            "health_check_timeout_s": HEALTH_SECONDS,
            "request_router_config": RequestRouterConfig(request_router_class=ROUTER),
        }

    def _check_room(self, needs: Mapping[str, float], device: str) -> None:
        """Report if not all replicas can be started now: Ray would wait for more machines without a message."""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        room = room_for(needs, nodes)
        wanted = self._options.replicas
        gpus = needs.get("num_gpus", 0)
        each = f"{needs['num_cpus']:g} processors" + (f" and {gpus} GPUs" if gpus else "") + " on one machine"
        if self._options.address is None and room < wanted:
            raise ValueError(
                f"this machine has room for {room} of {wanted} replicas, each of which needs {each}. Lower --replicas"
                + ("" if gpus else " or --replica-cpus")
            )
        if room < wanted:
            log.warning(
                "the cluster has room for %d of %d replicas, each of which needs %s: waiting for more machines",
                room,
                wanted,
                each,
            )
        if device == "auto" and not gpus and self._options.address is not None:
            log.warning("the engines use no GPU. If machines with GPUs will join the cluster later, set --device cuda")

    def _status_message(self) -> str:
        """Ray's message about the deployment: the error of the replica that was started last."""
        application = serve.status().applications.get(APPLICATION)
        deployment = application.deployments.get(DEPLOYMENT) if application is not None else None
        return deployment.message if deployment is not None else ""

    def num_running(self) -> int:
        """The number of replicas that take requests."""
        application = serve.status().applications.get(APPLICATION)
        deployment = application.deployments.get(DEPLOYMENT) if application is not None else None
        return deployment.replica_states.get(RUNNING, 0) if deployment is not None else 0

    def leave(self) -> None:
        """Take down the replicas if this process has deployed them, and Ray if this process has started it."""
        if not ray.is_initialized():
            return
        if self._owns_application:
            serve.delete(APPLICATION, _blocking=False)
        if self._owns_ray:
            ray.shutdown()
