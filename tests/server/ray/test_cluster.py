"""What is said of a cluster that is too small or cannot load the model. Real clusters are in tests/server/test_ray.py."""

import asyncio
import logging
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason="the ray extra is not installed")
from fa_serve.server.ray import cluster
from fa_serve.server.ray.cluster import Cluster, ReplicaOptions, room_for
from fa_serve.server.ray.replicated_engine import ReplicatedEngine

from fa_serve.engine import EngineConfig
from fa_serve.spec import ParameterError

GPU_MACHINE = {"CPU": 32.0, "GPU": 4.0, "memory": 1e9}


def test_room_is_counted_by_machines():
    assert room_for({"num_cpus": 1.0, "num_gpus": 2}, [GPU_MACHINE, GPU_MACHINE, {"CPU": 64.0}]) == 4
    assert room_for({"num_cpus": 1.0, "num_gpus": 3}, [GPU_MACHINE, GPU_MACHINE]) == 2, "a replica is in one machine"
    assert room_for({"num_cpus": 0.5}, [{"CPU": 2.0}, {"GPU": 1.0}]) == 4
    assert room_for({"num_cpus": 0.0}, []) == sys.maxsize


def _check(monkeypatch: pytest.MonkeyPatch, options: ReplicaOptions, needs: dict, device: str = "auto") -> None:
    machines = [{"Alive": True, "Resources": GPU_MACHINE}, {"Alive": False, "Resources": GPU_MACHINE}]
    monkeypatch.setattr(cluster, "ray", SimpleNamespace(nodes=lambda: machines))
    Cluster(options)._check_room(needs, device)


def test_replicas_without_room_are_refused_on_one_machine(monkeypatch):
    needs = {"num_cpus": 1.0, "num_gpus": 2}
    _check(monkeypatch, ReplicaOptions(replicas=2), needs)
    with pytest.raises(
        ValueError, match="room for 2 of 3 replicas, each of which needs 1 processors and 2 GPUs on one machine"
    ):
        _check(monkeypatch, ReplicaOptions(replicas=3), needs)
    with pytest.raises(ValueError, match="Lower --replicas or --replica-cpus"):
        _check(monkeypatch, ReplicaOptions(replicas=33), {"num_cpus": 1.0})


def test_in_a_cluster_replicas_without_room_wait_and_the_log_says_so(monkeypatch, caplog):
    with caplog.at_level(logging.WARNING, "fa_serve.server"):
        _check(monkeypatch, ReplicaOptions(replicas=3, address="auto"), {"num_cpus": 1.0, "num_gpus": 2})
        _check(monkeypatch, ReplicaOptions(replicas=1, address="auto"), {"num_cpus": 1.0})
        _check(monkeypatch, ReplicaOptions(replicas=1, address="auto"), {"num_cpus": 1.0}, device="cpu")
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        "the cluster has room for 2 of 3 replicas",
        "the engines use no GPU. If machines with GPUs will join the cluster later",
    ]


def test_what_kept_replicas_from_starting_is_said(monkeypatch):
    """Ray's own error names neither the model nor the reason."""
    deployment = SimpleNamespace(message="ParameterError: model must be a hub name or an existing folder")
    applications = {}

    def run(*_, **__):
        applications["fa_serve"] = SimpleNamespace(deployments={"engine": deployment})
        raise RuntimeError("Deploying application fa_serve failed.")

    def bind(*_):
        return SimpleNamespace(bind=lambda *_: None)

    serve = SimpleNamespace(
        start=lambda **_: None,
        status=lambda: SimpleNamespace(applications=applications),
        deployment=lambda **_: bind,
        run=run,
    )
    monkeypatch.setattr(cluster, "serve", serve)
    machine = SimpleNamespace(cluster_resources=lambda: {}, nodes=lambda: [{"Alive": True, "Resources": {"CPU": 1.0}}])
    monkeypatch.setattr(cluster, "ray", machine)
    with pytest.raises(RuntimeError, match="the replicas could not be started: ParameterError: model must be"):
        Cluster(ReplicaOptions()).deploy(EngineConfig(device="cpu"))


def test_a_model_that_does_not_exist_is_refused_before_anything_is_deployed(tmp_path):
    async def main() -> None:
        config = EngineConfig(model=tmp_path / "missing", device="cpu")
        with pytest.raises(ParameterError, match="existing folder"):
            await ReplicatedEngine(config, SimpleNamespace()).start()  # a cluster that can do nothing

    asyncio.run(main())
