"""Chooses the replica for a request: the one that has most of the prompt in its prefix cache, unless it is too busy.

Ray Serve makes one router for each handle, in the process of the handle. The router returns the order in which replicas are
tried, and the first replica that accepts the request gets it.

A conversation stays at one replica, and prompts that begin alike go to the replicas that have seen this beginning. Many clients
may send the same beginning, such as a system prompt, and they must not fill one replica while others are idle. So a replica
loses its preference when it has more than BOUND times the mean number of sequences in flight, and SLACK more than the mean
(consistent hashing with bounded loads; Mirrokni, Thorup and Zadimoghaddam, 2018). Without a preference, the replica with the
fewest sequences in flight comes first. An encoder has no prefix cache. For its requests, the replica with the fewest input
tokens in flight comes first, because the time for an input grows with its tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from itertools import count
from typing import Any, TypeVar

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from fa_serve.engine.process.engine_loop import Add, Encode

from .engine_replica import Front, Listen
from .prefix_table import PrefixTable, prefix_keys

T = TypeVar("T")
BOUND = 1.25
SLACK = 4


class PrefixRouter(RequestRouter):
    def initialize_state(self, **_: Any) -> None:
        """Set up the state. Ray calls this instead of a constructor of this class."""
        self._table = PrefixTable()
        self._in_flight: Counter[str] = Counter()  # by replica: its sequences in flight, or the tokens of its inputs
        self._counted: dict[str, int] = {}  # by Ray's id of a request in flight: its part of `_in_flight`
        self._serial = count()
        self._chosen: Counter[str] = Counter()  # by replica: the serial number of the last call that put it first

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas that may get a request, the best first. Ray tries one inner list after the other."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # if none accepts, Ray waits before it asks again
        by_name = {_name(replica.replica_id): replica for replica in candidate_replicas}
        who = _argument(pending_request, Listen)
        if who is not None:
            return [[by_name[who.replica]]] if who.replica in by_name else []
        add = _command(pending_request)
        front = _argument(pending_request, Front)
        if add is None or front is None:
            return [candidate_replicas]
        loads = {name: self._in_flight[name] for name in by_name if name in front.heard}
        if not loads:
            return []  # Ray asks again soon
        holders = self._table.holders(_keys(add), loads)
        order = in_order(loads, holders, self._chosen)
        self._chosen[order[0]] = next(self._serial)
        return [[by_name[name]] for name in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Note that a replica has accepted a request."""
        name = _name(replica_id)
        add = _command(pending_request)
        if add is None:
            return
        self._table.note(_keys(add), name)
        size = len(add.inputs.ids) if isinstance(add, Encode) else add.num_answers
        self._counted[pending_request.metadata.internal_request_id] = size
        self._in_flight[name] += size

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Note that a request has ended, for whatever reason."""
        size = self._counted.pop(internal_request_id, 0)
        if _name(replica_id) in self._in_flight:
            self._in_flight[_name(replica_id)] -= size

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica that has ended, because its prefix cache is gone."""
        super().on_replica_actor_died(replica_id)
        self._forget(_name(replica_id))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the replicas that exist from now on, and forget the others."""
        gone = {_name(replica_id) for replica_id in self.curr_replicas} - {_name(replica.replica_id) for replica in replicas}
        super().update_replicas(replicas)
        for name in gone:
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._table.forget(name)
        self._chosen.pop(name, None)
        self._in_flight.pop(name, None)


def in_order(loads: Mapping[str, int], holders: Collection[str], chosen: Mapping[str, int]) -> list[str]:
    """The replicas in the order in which they are tried.

    loads:   by replica, the sequences or tokens in flight
    holders: the replicas that have seen the longest beginning of the prompt
    chosen:  by replica, when it was last first in the order. In a burst of requests all loads are equal: then the replica for
             which that is longest ago goes first
    """
    mean = sum(loads.values()) / max(len(loads), 1)
    limit = max(BOUND * mean, mean + SLACK)
    return sorted(loads, key=lambda name: (name not in holders or loads[name] > limit, loads[name], chosen[name]))


def _name(replica_id: ReplicaID) -> str:
    return str(replica_id.unique_id)


def _command(request: PendingRequest | None) -> Add | Encode | None:
    """The client's request that a call carries, or None."""
    return _argument(request, Add) or _argument(request, Encode)


def _keys(add: Add | Encode) -> list[int]:
    """The keys of a prompt; an encoder's inputs have none."""
    return [] if isinstance(add, Encode) else prefix_keys(add.prompt, (add.cache_salt, add.adapter))


def _argument(request: PendingRequest | None, kind: type[T]) -> T | None:
    """The argument of this kind that a call has, or None."""
    return next((value for value in request.args if isinstance(value, kind)), None) if request is not None else None
