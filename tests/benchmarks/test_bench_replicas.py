"""The parts of the benchmark of replicas that need no cluster."""

import os

import pytest

pytest.importorskip("ray", reason="the ray extra is not installed")
from fa_serve.server.ray import prefix_router

from benchmarks.engine import bench_replicas


def test_the_router_that_is_compared_with_knows_nothing_of_prompts(monkeypatch):
    monkeypatch.setattr(prefix_router, "in_order", prefix_router.in_order)  # so that it is restored
    loads = {"a": 1, "b": 0}
    assert prefix_router.in_order(loads, {"a"}, {"a": 0, "b": 0}) == ["a", "b"]
    exec(bench_replicas.BLIND.removesuffix(bench_replicas.PLAIN), {})
    assert prefix_router.in_order(loads, {"a"}, {"a": 0, "b": 0}) == ["b", "a"]


def test_processes_of_others_are_no_replicas():
    assert bench_replicas.replicas_of(os.getpid()) == []
