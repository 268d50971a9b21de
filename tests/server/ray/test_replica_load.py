"""How full a replica is, and how many replicas that asks for."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from fa_serve.server.ray.replica_load import autoscaling_policy, load_of, wanted_replicas

from fa_serve.engine import EngineStats

IDLE = EngineStats(0, 0, 100, 0, 0, 0, 0, 0, 0)


def test_load_is_the_fuller_of_slots_and_pages_and_counts_what_waits():
    assert load_of(IDLE, 8) == 0
    assert load_of(replace(IDLE, num_running=2), 8) == 0.25
    assert load_of(replace(IDLE, num_running=2, num_pages_used=50), 8) == 0.5
    assert load_of(replace(IDLE, num_running=4, num_waiting=6), 8) == 2.5, "long contexts fill the pages with 4 of 8 slots"
    assert load_of(replace(IDLE, num_waiting=3), 8) == 4
    assert load_of(replace(IDLE, num_pages=0, num_running=2), 8) == 0.25, "an encoder"
    assert load_of(replace(IDLE, num_pages=0, num_running=2, num_waiting=4), 8) == 3


@pytest.mark.parametrize(("loads", "wanted"), [([], 1), ([0.0, 0.0], 1), ([0.7], 1), ([0.7, 0.7, 0.1], 3), ([2.5], 4)])
def test_replicas_are_brought_to_the_target(loads, wanted):
    assert wanted_replicas(dict(enumerate(loads))) == wanted


def test_the_policy_changes_nothing_before_there_are_loads():
    context = SimpleNamespace(aggregated_metrics=None, target_num_replicas=3)
    assert autoscaling_policy(context) == (3, {})
    context.aggregated_metrics = {"load": {"a": 1.4, "b": 0.7}}
    assert autoscaling_policy(context) == (3, {})
    context.aggregated_metrics = {"load": {"a": 0.1, "b": 0.2}}
    assert autoscaling_policy(context) == (1, {})
