"""How full a replica is, and how many replicas that asks for. Plain Python: Ray's controller runs it.

A load of 1 is a replica whose slots or pages are all taken while nothing waits; an encoder has no pages. What waits counts
beyond 1, in proportion to what runs: with 30 sequences running and 30 waiting, two replicas would be full.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fa_serve.engine import EngineStats

LOAD = "load"
TARGET_LOAD = 0.7
"""The load that replicas are to have. What is left takes the requests that come while another replica loads its weights."""


def load_of(stats: EngineStats, max_num_seqs: int) -> float:
    """The load of a replica, by the snapshot of its engine."""
    fullness = max(stats.num_running / max_num_seqs, stats.num_pages_used / max(stats.num_pages, 1))
    if not stats.num_waiting:
        return fullness
    return 1.0 + stats.num_waiting / max(stats.num_running, 1)


def wanted_replicas(loads: Mapping[Any, float]) -> int:
    """The number of replicas that brings these loads to TARGET_LOAD, at least 1."""
    return max(math.ceil(sum(loads.values()) / TARGET_LOAD), 1)


def autoscaling_policy(context: Any) -> tuple[int, dict[str, Any]]:
    """Ray Serve's policy: `wanted_replicas`, or what there is before the first loads have come.

    Ray keeps the number between the least and the most, and waits before it follows.

    context: ray.serve's AutoscalingContext; its loads are means over the last seconds
    """
    loads = (context.aggregated_metrics or {}).get(LOAD)
    return (wanted_replicas(loads) if loads else context.target_num_replicas), {}
