"""Which waiting sequence is next: clients take turns, and each client's own sequences go by rank. Plain Python, no torch.

    queue.add(sequence)
    sequence = queue.first()
    turn = queue.admit(cost=len(sequence.tokens))    # takes `first` out; its client is charged so many tokens
    queue.settle(sequence, 40)                       # it has cost its client 40 tokens more

This is start-time fair queueing (Goyal, Vin, Cheng 1996) over tokens. Virtual time is the turn of the newest admission. The
next turn of a client begins where its last one ended, or now if it had nothing to do, and the client with the earliest turn is
served. Therefore the tokens that two waiting clients have received differ by at most one request of each, however many requests
one of them has queued, and no client waits forever. What an answer costs is known only when it ends, so an admission is charged
an estimate, as in the virtual token counter of Sheng et al. (2024, arXiv:2401.00588), and `settle` corrects it.

A turn belongs to the client. If a running sequence is preempted, its turn goes back to the client, and the client's first
sequence by rank takes it. So the rank, and with it a request's priority, affects only the order of the client's own sequences.

An operation costs O(log n) comparisons. What waits is a sequence, or an input of an encoder (pooling/batches.py). Left out:
slots and pages (scheduler.py).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, Protocol, TypeVar

MAX_IDLE_CLIENTS = 1024
"""Clients without a sequence whose accounts are kept. Beyond that the debts of idle clients are forgotten."""


class Owned(Protocol):
    """A request, which belongs to a client."""

    @property
    def client(self) -> str | None: ...


class Queued(Protocol):
    """Something that can wait in a `FairQueue`.

    rank:         its place among the entries of its client, which never changes while it waits
    turn, charge: the turn that `admit` returned for it, and the cost that `admit` was given
    """

    @property
    def request(self) -> Owned: ...

    @property
    def rank(self) -> tuple[float, int]: ...

    @property
    def turn(self) -> int: ...

    @property
    def charge(self) -> int: ...


S = TypeVar("S", bound=Queued)


@dataclass(slots=True, eq=False)
class _Client(Generic[S]):
    """The account of one client.

    waiting:      its sequences, by rank
    turns:        turns that preempted sequences gave back, the earliest first; no more turns than `waiting` sequences
    num_admitted: its running sequences
    start:        virtual time at which it began to wait, or was last served
    finish:       virtual time up to which it has been served
    place:        (next turn, serial) in the order of the clients while it has sequences that wait
    """

    waiting: list[S] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    num_admitted: int = 0
    start: int = 0
    finish: int = 0
    serial: int = 0
    place: tuple[int, int] | None = None


class FairQueue(Generic[S]):
    """Owner of the waiting sequences and of the clients' accounts."""

    def __init__(self) -> None:
        self._now = 0
        self._clients: dict[str | None, _Client[S]] = {}
        self._order: list[_Client[S]] = []  # clients with waiting sequences, by place
        self._length = 0
        self._num_admitted = 0
        self._serial = count()

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[S]:
        """All waiting sequences, client by client."""
        for client in self._order:
            yield from client.waiting

    def add(self, sequence: S) -> None:
        """A sequence has arrived."""
        name = sequence.request.client
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = _Client()
        if not client.waiting:
            client.start = self._now
            client.serial = next(self._serial)
        self._insert(client, sequence)

    def first(self) -> S:
        """The sequence that is next. There has to be one."""
        return self._order[0].waiting[0]

    def next_turn(self) -> int:
        """The turn that `first` would get now."""
        return _place(self._order[0])[0]

    def admit(self, cost: int) -> int:
        """Take out `first` and charge its client. Returns the turn of the sequence."""
        client = self._order[0]
        client.waiting.pop(0)
        self._length -= 1
        turn = client.turns.pop(0) if client.turns else max(client.start, client.finish)
        client.finish = max(client.finish, turn) + cost
        client.num_admitted += 1
        self._num_admitted += 1
        self._now = max(self._now, turn)
        client.start = self._now
        client.serial = next(self._serial)  # a tie goes to the client that was not just served
        self._arrange(client)
        return turn

    def give_back(self, sequence: S) -> None:
        """A running sequence waits again. Its client gets its charge back, and its turn."""
        client = self._clients[sequence.request.client]
        insort(client.turns, sequence.turn)
        self._return(client, sequence)

    def give_way(self, sequence: S) -> None:
        """A running sequence waits again. Its client gets its charge back.

        The client of `first` gets the sequence's turn, unless its own turn is earlier.
        """
        first = self._order[0]
        client = self._clients[sequence.request.client]
        client.serial = next(self._serial)
        self._return(client, sequence)
        if sequence.turn <= max(first.start, first.finish):
            self._take_turn(first, sequence.turn)

    def _return(self, client: _Client[S], sequence: S) -> None:
        client.num_admitted -= 1
        self._num_admitted -= 1
        client.finish -= sequence.charge
        self._insert(client, sequence)

    def prefer_idle(self) -> None:
        """`first` waits for pages, which its own client may hold. Its turn goes to the next client that runs nothing."""
        first = self._order[0]
        idle = next((client for client in self._order if not client.num_admitted), first)
        if first.num_admitted and idle is not first:
            turn = first.turns.pop(0) if first.turns else _place(first)[0]
            first.serial = next(self._serial)
            self._arrange(first)
            self._take_turn(idle, turn)

    def _take_turn(self, client: _Client[S], turn: int) -> None:
        """A waiting client gets a turn of another client."""
        insort(client.turns, turn)
        del client.turns[len(client.waiting) :]
        self._arrange(client)

    def settle(self, sequence: S, difference: int) -> None:
        """A running sequence has ended. It has cost `difference` tokens more than was charged."""
        client = self._clients[sequence.request.client]
        client.num_admitted -= 1
        self._num_admitted -= 1
        client.finish += difference
        self._arrange(client)
        self._forget_idle()

    def remove(self, sequence: S) -> None:
        """A waiting sequence has ended."""
        client = self._clients[sequence.request.client]
        index = bisect_left(client.waiting, sequence.rank, key=_rank)
        while client.waiting[index] is not sequence:
            index += 1
        del client.waiting[index]
        self._length -= 1
        del client.turns[len(client.waiting) :]
        self._arrange(client)
        self._forget_idle()

    def crowding(self, running: Sequence[S]) -> S | None:
        """The running sequence that should make room for `first`.

        None unless the client of `first` has no running sequence and another client has several.
        """
        if self._order[0].num_admitted or len(running) == 0:
            return None
        last = self.last_of_largest(running)
        return last if self._clients[last.request.client].num_admitted > 1 else None

    def last_of_largest(self, running: Sequence[S]) -> S:
        """The running sequence with the last turn, of the client that has the most running sequences."""
        most = max(client.num_admitted for client in self._clients.values())
        return next(each for each in reversed(running) if self._clients[each.request.client].num_admitted == most)

    def check_integrity(self, running: Sequence[S]) -> None:
        """Assert that the accounts are those of the waiting and of the running sequences."""
        assert self._length == len(list(self)), "the number of waiting sequences is wrong"
        assert [client.place for client in self._order] == sorted(client.place or (0, 0) for client in self._order)
        assert {id(client) for client in self._order} == {id(c) for c in self._clients.values() if c.waiting}
        for name, client in self._clients.items():
            assert client.waiting == sorted(client.waiting, key=_rank), "a queue is out of order"
            assert client.turns == sorted(client.turns), "turns are out of order"
            assert len(client.turns) <= len(client.waiting), "a turn is left over"
            own = [sequence for sequence in running if sequence.request.client == name]
            assert client.num_admitted == len(own)
            assert own == sorted(own, key=_rank), "a client's running sequences are not in the order of their ranks"
        assert self._num_admitted == len(running)

    def _insert(self, client: _Client[S], sequence: S) -> None:
        insort(client.waiting, sequence, key=_rank)
        self._length += 1
        self._arrange(client)

    def _arrange(self, client: _Client[S]) -> None:
        """Put a client where its next turn belongs."""
        turn = client.turns[0] if client.turns else max(client.start, client.finish)
        place = (turn, client.serial) if client.waiting else None
        if place == client.place:
            return
        if client.place is not None:
            del self._order[bisect_left(self._order, client.place, key=_place)]
        client.place = place
        if place is not None:
            insort(self._order, client, key=_place)

    def _forget_idle(self) -> None:
        """Drop accounts that are not needed: all of them when no sequence is left, and idle ones when there are too many."""
        if not self._order and not self._num_admitted:
            self._clients.clear()
            self._now = 0
        elif len(self._clients) > MAX_IDLE_CLIENTS:
            self._clients = {name: c for name, c in self._clients.items() if c.waiting or c.num_admitted}


def turns_by_rank(newest: S, running: Sequence[S]) -> list[tuple[S, int]]:
    """The turns of the running sequences of a client once another one of it runs, so that they are in the order of their ranks.

    newest: the sequence that is admitted, with its turn; running: the others, by turn

    Returns an empty list if the order is right without a change.
    """
    client = newest.request.client
    last = next((each for each in reversed(running) if each.request.client == client), None)
    if last is None or (last.rank <= newest.rank and last.turn <= newest.turn):
        return []
    own = [*(each for each in running if each.request.client == client), newest]
    return [*zip(sorted(own, key=_rank), sorted(each.turn for each in own), strict=True)]


def _rank(sequence: Queued) -> tuple[float, int]:
    return sequence.rank


def _place(client: _Client[S]) -> tuple[int, int]:
    assert client.place is not None
    return client.place
