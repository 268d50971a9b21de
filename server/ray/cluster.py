"""The connection to a Ray cluster, and the deployment of engines in it.

    cluster = Cluster(ReplicaOptions(replicas=2))
    cluster.connect()                         # starts Ray on this machine; with an address, joins a cluster that runs
    handle = cluster.deploy(config)           # blocks until the replicas are loaded
    cluster.leave()

A process that finds the deployment in its cluster uses it, and leaves it running when it ends. So several processes, on as many
machines, can speak HTTP for the same replicas. The process that has deployed the replicas takes them down.
"""

from __future__ import annotations

import logging
import os
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
RUNNING: Any = "RUNNING"  # of Ray's ReplicaState, whose members are strings
HEALTH_SECONDS = 10.0
"""The time in which a replica must answer `check_health`, which waits for no step. Ray replaces it after three failures."""
ROUTER: Any = f"{PrefixRouter.__module__}:PrefixRouter"  # Ray documents that it takes an import path, without annotating it


@dataclass(frozen=True)
class ReplicaOptions:
    """How many engines there are, and what each may use.

    replicas:     engines at the start, and the least number of them
    max_replicas: the most engines; above `replicas`, Ray adds and removes engines by their load
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


class Cluster:
    def __init__(self, options: ReplicaOptions):
        self._options = options
        self._owns_ray = False
        self._owns_application = False

    def connect(self) -> None:
        """Start Ray, or join a cluster. Raises ConnectionError if there is none at the address."""
        if ray.is_initialized():
            return
        # Ray would send statistics of its use to its makers
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        address = self._options.address or "local"  # None would join any cluster that has been started on this machine
        # Ray's dashboard runs any job that is sent to it, so a cluster that we start has none
        local: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, **local)
        self._owns_ray = True

    def deploy(self, config: EngineConfig) -> DeploymentHandle[Any]:
        """The handle of the replicas, of which the first have loaded the model.

        Raises RuntimeError if the replicas cannot be started, ValueError if the cluster runs replicas with other settings.
        """
        serve.start(proxy_location=ProxyLocation.Disabled)
        if APPLICATION in serve.status().applications:
            handle = serve.get_app_handle(APPLICATION)
            running, _ = handle.describe.remote().result()
            if running != config:
                raise ValueError(
                    f"the cluster already has replicas with other settings. Start with the settings of these, or in another "
                    f"cluster. It has {running}; asked for was {config}"
                )
            return handle
        self._owns_application = True
        deployment: Any = serve.deployment(name=DEPLOYMENT, **self._deployment_options(config))(EngineReplica)
        application = deployment.bind(config, self._options.step_timeout)
        return serve.run(application, name=APPLICATION, route_prefix=None, logging_config={"log_level": "WARNING"})

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
            resources["num_gpus"] = config.tensor_parallel  # of one machine, because one replica is one actor
        return scaling | {
            "ray_actor_options": resources,
            # the engine's queue takes turns between clients; requests are not to wait before they reach it
            "max_ongoing_requests": config.max_num_seqs + config.max_waiting + EXTRA_WAITING,
            "graceful_shutdown_timeout_s": max(options.drain_timeout, 0.1),
            "graceful_shutdown_wait_loop_s": 0.1,
            "health_check_period_s": 5.0,
            "health_check_timeout_s": HEALTH_SECONDS,
            "request_router_config": RequestRouterConfig(request_router_class=ROUTER),
        }

    def num_running(self) -> int:
        """The number of replicas that take requests."""
        application = serve.status().applications.get(APPLICATION)
        deployment = application.deployments.get(DEPLOYMENT) if application is not None else None
        return deployment.replica_states.get(RUNNING, 0) if deployment is not None else 0

    def leave(self) -> None:
        """Take down the replicas, if this process has deployed them, and Ray, if it has started it."""
        if not ray.is_initialized():
            return
        if self._owns_application:
            serve.delete(APPLICATION, _blocking=False)
        if self._owns_ray:
            ray.shutdown()
