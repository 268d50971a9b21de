"""What the requests of each client have cost, and whose work is next.

    queue = CostQueue()                          # for one thread; its owner does the locking
    queue.put(client, job)
    job = queue.get()                            # a job of the client whose work has cost least
    queue.charge(client, seconds)

    costs = Costs(metrics.delayed)               # for the event loop
    bill = costs.open(client)                    # one for each request
    await costs.take_turn(bill, receive)         # before work on the event loop, or before the answer begins
    with costs.work(bill): ...                   # the work, which is measured
    costs.settle(bill, unpaid=True)              # the request has ended, and no other budget counts it

The cost of work is the processor time that it takes. It is charged to the client, whatever the answer is. A client is an API
key or, before authentication, an address. `CostQueue` is start-time fair queueing (Goyal, Vin, Cheng 1996) over seconds, as
fa_serve/engine/scheduler/fair_queue.py is over tokens: two clients that both wait get the same time, however many jobs one of
them has.

The engine's queue limits work for the engine. All other work is *unpaid*: requests that are refused, and requests that ask for
no tokens, such as `GET /health`. A client that sends such requests one after another could keep the event loop busy. Therefore
unpaid work adds to the client's debt, which falls with time. A client whose debt is above FREE_SECONDS waits before its next
body is parsed, or before its next answer begins if that needs no body. It also waits before each prompt of a list, because it
could have sent each prompt as a separate request. A debt delays requests and does not refuse them, unless MAX_WAITING
requests of the client wait already. REFUSALS_A_SECOND delays such refusals, or a client could ask for them endlessly.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from starlette import types as asgi

from ..errors import TooManyRequests

T = TypeVar("T")
SHARE = 0.1
"""The part of a processor that unpaid work may take in the long run. Clients whose unpaid work waits share it."""
FREE_SECONDS = 0.1
"""A client with a smaller debt does not wait."""
MAX_CHARGE = 0.05
"""The most seconds that a request adds to a debt. A key may have many users, and one of them may send costly requests."""
MAX_DEBT = 0.3
"""The largest debt, in seconds. So no client waits longer than (MAX_DEBT - FREE_SECONDS) / SHARE for a request if it sends no
other."""
REQUEST_SECONDS = 0.0008
"""What a request costs besides the work that is measured: its connection, its head, its answer and its line in the log.
Measured on a slow processor: 590 requests a second without such work took 0.46 of its time."""
SEQUENCE_SECONDS = 0.0002
"""What the event loop does for a sequence before its first token."""
ITERATION_SECONDS = 0.002
"""Once one iteration of the event loop has done this much work, the next request has to wait for the next iteration."""
MAX_WAITING = 256
"""Requests of one client that may wait because of its debt. The prompts of a request that has had its turn do not count."""
REFUSALS_A_SECOND = SHARE / REQUEST_SECONDS
"""How many requests of one client are refused per second because too many wait. Such a refusal adds no debt, because that would
delay the waiting requests further. If the client hangs up before the refusal, its request does add debt; otherwise the client
could send such requests endlessly."""
MAX_REFUSAL_SECONDS = 2.0
"""The longest time that a request waits for its refusal."""
MAX_ACCOUNTS = 4096
"""The number of clients without waiting work whose costs are remembered."""


@dataclass(slots=True)
class _Account(Generic[T]):
    """start: virtual time at which its next job may begin. finish: virtual time up to which it has been served"""

    waiting: deque[T] = field(default_factory=deque)
    start: float = 0.0
    finish: float = 0.0


class CostQueue(Generic[T]):
    """Waiting jobs. The next one is the oldest job of the client whose work has cost least since that client began to wait."""

    def __init__(self) -> None:
        self._now = 0.0  # virtual time: the start of the newest job that was taken
        self._accounts: dict[Hashable, _Account[T]] = {}
        self._waiting: OrderedDict[Hashable, _Account[T]] = OrderedDict()  # the most recently served client is the last

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def clients(self) -> Collection[Hashable]:
        """The clients that have waiting jobs."""
        return self._waiting.keys()

    def count(self, client: Hashable) -> int:
        """How many jobs of this client wait."""
        return len(self._waiting[client].waiting) if client in self._waiting else 0

    def put(self, client: Hashable, job: T) -> None:
        account = self._account(client)
        if not account.waiting:
            account.start = max(self._now, account.finish)
            self._waiting[client] = account
        account.waiting.append(job)

    def get(self, may_go: Callable[[Hashable], bool] = lambda _: True) -> T | None:
        """The next job among the clients for which `may_go` returns True. None if there is no such client."""
        able = [client for client in self._waiting if may_go(client)]
        if not able:
            return None
        client = min(able, key=lambda each: self._waiting[each].start)
        account = self._waiting[client]
        job = account.waiting.popleft()
        self._now = max(self._now, account.start)
        account.finish = max(account.finish, account.start)
        account.start = account.finish
        if account.waiting:
            self._waiting.move_to_end(client)
        else:
            del self._waiting[client]
        return job

    def charge(self, client: Hashable, seconds: float) -> None:
        """Record that work of this client has cost this many seconds."""
        account = self._account(client)
        account.finish = max(account.finish, self._now) + seconds
        account.start = max(account.start, account.finish)

    def _account(self, client: Hashable) -> _Account[T]:
        account = self._accounts.get(client)
        if account is None:
            if len(self._accounts) >= MAX_ACCOUNTS + len(self._waiting):
                self._forget_idle()
            account = self._accounts[client] = _Account()
        return account

    def _forget_idle(self) -> None:
        """Drop the accounts of clients without waiting jobs that have not been served past the virtual time.

        If there are none, drop the accounts of all clients without waiting jobs.
        """
        accounts = self._accounts
        kept = {name: each for name, each in accounts.items() if each.waiting or each.finish > self._now}
        self._accounts = kept if len(kept) < len(accounts) else dict(self._waiting)


@dataclass(slots=True)
class Bill:
    """What one request has cost so far.

    had_turn: whether it has waited for its client's turn
    advance:  seconds that were added to its client's debt in advance, when it got its turn
    refused:  whether it was refused because too many requests of its client wait
    """

    client: str
    seconds: float = REQUEST_SECONDS
    had_turn: bool = False
    advance: float = 0.0
    refused: bool = False


@dataclass(slots=True)
class _Turn:
    """Something that waits for a turn: a request, or the sequences of one prompt of a request that has had its turn."""

    bill: Bill
    may_go: asyncio.Future[None]
    is_prompt: bool


BILL: ContextVar[Bill | None] = ContextVar("BILL", default=None)
"""The bill of the request that the current task works for. The time that threads work for the request is added to it."""


@dataclass(slots=True)
class _Debt:
    """seconds: unpaid work that the client owes at the time `at`. usual: the cost of the client's last unpaid request"""

    seconds: float
    at: float
    usual: float


class Costs:
    """Gives clients their turns on the event loop. Call all methods on the event loop.

    count_delayed: called for each request that has to wait because of a debt
    """

    def __init__(self, count_delayed: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._count_delayed = count_delayed
        self._clock = clock
        self._queue: CostQueue[_Turn] = CostQueue()
        self._waiting: Counter[str] = Counter()  # by client: how many of its requests wait because of a debt
        self._refused_until: dict[str, float] = {}  # by client: when its newest refusal is answered
        self._debts: dict[str, _Debt] = {}
        self._used = 0.0  # seconds of work in this iteration of the event loop
        self._timer: asyncio.Handle | None = None

    def open(self, client: str) -> Bill:
        """Open the bill of a new request, and set BILL. Call this in the task that answers the request."""
        bill = Bill(client)
        BILL.set(bill)
        return bill

    @property
    def is_busy(self) -> bool:
        """Whether a request or a prompt waits for its turn."""
        return bool(self._queue)

    async def take_turn(self, bill: Bill, receive: asgi.Receive) -> bool:
        """Wait for the client's turn. Return True when the work may go on, or False when the client has left.

        While a client with a debt waits, the rest of its request's body is dropped. Raises TooManyRequests if MAX_WAITING
        requests of the client wait already.
        """
        bill.had_turn = True
        owes = self._wait(bill.client, self._clock()) > 0
        if owes:
            self._count_delayed()
            if self._waiting[bill.client] >= MAX_WAITING:
                message = (
                    f"This client already has {MAX_WAITING} waiting requests, because many of its earlier requests were "
                    "refused or asked for no tokens. Try again later, with fewer requests at once."
                )
                bill.refused = True
                if await _has_left(receive, [], self._time_to_refuse(bill.client)):
                    bill.refused = False
                    return False
                raise TooManyRequests(message, retry_after=1)
        turn = self._ask_for_turn(bill)
        if turn is None:
            return True
        if not owes:
            await turn
            return True
        self._waiting[bill.client] += 1
        try:
            return not await _has_left(receive, [turn])
        finally:
            turn.cancel()
            self._waiting[bill.client] -= 1
            if not self._waiting[bill.client]:
                del self._waiting[bill.client]
                self._refused_until.pop(bill.client, None)

    def _time_to_refuse(self, client: str) -> float:
        """Seconds until the next request of a client may be refused."""
        now = self._clock()
        until = max(self._refused_until.get(client, now), now) + 1 / REFUSALS_A_SECOND
        self._refused_until[client] = min(until, now + MAX_REFUSAL_SECONDS)
        return self._refused_until[client] - now

    def _ask_for_turn(self, bill: Bill, *, is_prompt: bool = False) -> asyncio.Future[None] | None:
        """A future that is done when the work may go on, or None if the work may go on at once."""
        client = bill.client
        if self._used < ITERATION_SECONDS and not self._queue.count(client) and not self._wait(client, self._clock()):
            return None
        turn = asyncio.get_running_loop().create_future()
        self._queue.put(client, _Turn(bill, turn, is_prompt))
        self._set_timer()
        return turn

    @contextmanager
    def work(self, bill: Bill) -> Iterator[None]:
        """Measure the work that is done inside this context, and charge it. The work must not wait for anything."""
        begin = time.thread_time()
        try:
            yield
        finally:
            self._charge(bill, time.thread_time() - begin)

    async def begin_sequences(self, count: int) -> None:
        """Wait for the turn of the current task's client, before the task begins `count` sequences of one prompt."""
        bill = BILL.get()
        if bill is not None:
            turn = self._ask_for_turn(bill, is_prompt=True)
            if turn is not None:
                await turn
            self._charge(bill, count * SEQUENCE_SECONDS)

    def _charge(self, bill: Bill, seconds: float) -> None:
        bill.seconds += seconds
        self._queue.charge(bill.client, seconds)
        if not self._used:
            asyncio.get_running_loop().call_soon(self._begin_iteration)
        self._used += seconds

    def settle(self, bill: Bill, unpaid: bool) -> None:
        """Settle the bill of a request that has ended. unpaid: no other budget counts what the request has cost"""
        unpaid = unpaid and not bill.refused
        if not unpaid and not bill.advance:
            return
        now = self._clock()
        debt = self._debts.get(bill.client)
        if debt is None:
            debt = _Debt(0.0, now, 0.0)
        self._fall(debt, now)
        debt.seconds = max(debt.seconds - bill.advance, 0.0)
        if unpaid:
            debt.usual = min(bill.seconds, MAX_CHARGE)
            debt.seconds = min(debt.seconds + debt.usual, MAX_DEBT)
            if bill.client not in self._debts and len(self._debts) >= MAX_ACCOUNTS:
                self._forget_paid(now)
            self._debts[bill.client] = debt
        bill.advance = 0.0

    def _fall(self, debt: _Debt, now: float) -> None:
        """Lower a debt according to the time that has passed. Waiting clients divide SHARE among themselves."""
        share = SHARE / max(len(self._queue.clients), 1)
        debt.seconds = max(debt.seconds - (now - debt.at) * share, 0.0)
        debt.at = now

    def _wait(self, client: Hashable, now: float) -> float:
        """Seconds until the debt of a client is small enough."""
        debt: _Debt | None = self._debts.get(client)  # type: ignore[call-overload]
        if debt is None:
            return 0.0
        self._fall(debt, now)
        if debt.seconds <= FREE_SECONDS:
            return 0.0
        return (debt.seconds - FREE_SECONDS) * max(len(self._queue.clients), 1) / SHARE

    def _begin_iteration(self) -> None:
        self._used = 0.0

    def _set_timer(self) -> None:
        """Schedule `_release` for when the first waiting client may go on, in the next iteration at the earliest."""
        if self._timer is not None:
            self._timer.cancel()
        now = self._clock()
        wait = min(self._wait(client, now) for client in self._queue.clients)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(wait, self._release) if wait else loop.call_soon(self._release)

    def _release(self) -> None:
        """Give the turn to one request or prompt.

        A request is expected to cost as much as its client's last unpaid one. This is added to the client's debt at once, and
        `settle` takes it off again. While the client has a debt, a prompt adds the least that a request costs, and this is not
        taken off: otherwise, a client with a debt would send lists of prompts.
        """
        self._timer = None
        now = self._clock()
        while turn := self._queue.get(lambda client: not self._wait(client, now)):
            if turn.may_go.done():  # its task has ended
                continue
            turn.may_go.set_result(None)
            debt = self._debts.get(turn.bill.client)
            if debt is not None and (debt.seconds or not turn.is_prompt):
                debt.seconds += REQUEST_SECONDS if turn.is_prompt else debt.usual
                turn.bill.advance += 0.0 if turn.is_prompt else debt.usual
            break
        if self._queue:
            self._set_timer()

    def _forget_paid(self, now: float) -> None:
        """Drop the debts that have fallen to zero, or all debts if none has."""
        for debt in self._debts.values():
            self._fall(debt, now)
        kept = {client: debt for client, debt in self._debts.items() if debt.seconds}
        self._debts = kept if len(kept) < len(self._debts) else {}


async def _has_left(receive: asgi.Receive, turns: list[asyncio.Future[None]], timeout: float | None = None) -> bool:
    """Wait for one of the turns, for the client to leave, or for the timeout. Return whether the client left without a turn."""
    left = asyncio.ensure_future(_end_of(receive))
    try:
        done, _ = await asyncio.wait([*turns, left], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        return left in done and not any(turn.done() for turn in turns)
    finally:
        left.cancel()


async def _end_of(receive: asgi.Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
