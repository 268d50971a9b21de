"""The load of a replica, and the number of replicas that the loads call for. Plain Python, because Ray's controller runs it.

A load of 1 means that all slots or all pages of a replica are taken and nothing waits. An encoder has no pages. Waiting
sequences count beyond 1, in proportion to the running ones: with 30 sequences running and 30 waiting, the load is 2, because
these sequences would fill two replicas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fa_serve.engine import EngineStats

LOAD = "load"
TARGET_LOAD = 0.7
"""The load that replicas should have. The rest of their capacity is for requests that arrive while a new replica loads."""


def load_of(stats: EngineStats, max_num_seqs: int) -> float:
    """The load of a replica, from the statistics of its engine."""
    fullness = max(stats.num_running / max_num_seqs, stats.num_pages_used / max(stats.num_pages, 1))
    if not stats.num_waiting:
        return fullness
    return 1.0 + stats.num_waiting / max(stats.num_running, 1)


def wanted_replicas(loads: Mapping[Any, float]) -> int:
    """The number of replicas that brings these loads to TARGET_LOAD, at least 1."""
    return max(math.ceil(sum(loads.values()) / TARGET_LOAD), 1)


def autoscaling_policy(context: Any) -> tuple[int, dict[str, Any]]:
    """Ray Serve's policy: `wanted_replicas`, or the current target until the first loads have arrived.

    Ray keeps the number between the minimum and the maximum, and delays changes.

    context: ray.serve's AutoscalingContext; its loads are means over the last seconds
    """
    loads = (context.aggregated_metrics or {}).get(LOAD)
    return (wanted_replicas(loads) if loads else context.target_num_replicas), {}
