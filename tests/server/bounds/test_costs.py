"""The order of work follows what clients have cost; and who waits for debts."""

import asyncio
import time

import pytest
from fa_serve.server.bounds import costs as module
from fa_serve.server.bounds.costs import BILL, FREE_SECONDS, MAX_WAITING, SHARE, CostQueue, Costs
from fa_serve.server.errors import TooManyRequests

pytestmark = pytest.mark.anyio


def served(queue: CostQueue, count: int, cost: dict) -> str:
    """The clients of the next jobs, each of which is charged."""
    order = ""
    for _ in range(count):
        client = queue.get()
        order += client
        queue.charge(client, cost[client])
    return order


def test_clients_that_wait_get_the_same_time():
    queue = CostQueue()
    for client in "aaaaaaaabbbbbbbb":
        queue.put(client, client)
    assert served(queue, 10, {"a": 1.0, "b": 3.0}) == "abaabaaaba"
    assert queue.count("a") == 1
    assert queue.count("b") == 5


def test_a_client_that_comes_late_is_next_but_has_no_credit():
    queue = CostQueue()
    for client in "aaaa":
        queue.put(client, client)
    assert served(queue, 2, {"a": 5.0}) == "aa"
    for client in "bbb":
        queue.put(client, client)
    assert served(queue, 5, {"a": 5.0, "b": 5.0}) == "babab"
    assert not queue
    assert queue.get() is None


def test_what_a_client_did_alone_counts_for_its_next_job():
    queue = CostQueue()
    queue.charge("a", 1.0)
    for client in "ab":
        queue.put(client, client)
    assert queue.get() == "b"


def test_only_clients_that_may_go_are_served():
    queue = CostQueue()
    for client in "ab":
        queue.put(client, client)
    assert queue.get(lambda client: client == "b") == "b"
    assert queue.get(lambda client: client == "b") is None
    assert list(queue.clients) == ["a"]


def test_the_accounts_are_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_ACCOUNTS", 10)
    queue = CostQueue()
    queue.put("waits", "waits")
    for number in range(100):
        queue.charge(f"client {number}", 1.0)
    assert len(queue._accounts) <= 12
    assert queue.get() == "waits"


def nothing() -> None:
    pass


async def stays() -> dict:
    """`receive` of a client that waits for its answer."""
    return await asyncio.get_running_loop().create_future()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def spend(costs: Costs, client: str, seconds: float, unpaid: bool = True) -> None:
    """A request of this client that has ended."""
    bill = costs.open(client)
    bill.seconds = seconds
    costs.settle(bill, unpaid)


def spend_all(costs: Costs, client: str, seconds: float) -> None:
    """Many requests of this client that have ended."""
    while seconds > 1e-9:
        spend(costs, client, min(seconds, 0.01))
        seconds -= 0.01


async def waits(costs: Costs, client: str) -> bool:
    """Whether a request of this client has to wait."""
    task = asyncio.create_task(costs.take_turn(costs.open(client), stays))
    for _ in range(4):
        await asyncio.sleep(0)
    done = task.done()
    task.cancel()
    return not done


async def test_a_client_with_debts_waits_until_they_have_fallen():
    clock = Clock()
    delayed = []
    costs = Costs(lambda: delayed.append(1), clock)
    spend_all(costs, "honest", FREE_SECONDS)
    spend(costs, "pays", 100.0, unpaid=False)
    spend_all(costs, "attacker", FREE_SECONDS + 0.1)
    assert [await waits(costs, client) for client in ("honest", "pays", "attacker", "new")] == [False, False, True, False]
    assert len(delayed) == 1
    clock.now += 0.101 / SHARE
    assert not await waits(costs, "attacker")
    assert len(delayed) == 1


async def test_a_request_that_waits_goes_on_by_itself_and_those_of_a_client_one_after_the_other():
    costs = Costs(nothing)
    spend_all(costs, "attacker", FREE_SECONDS + 0.005)
    begin = time.monotonic()
    done = []

    async def request() -> None:
        bill = costs.open("attacker")
        await costs.take_turn(bill, stays)
        done.append(time.monotonic() - begin)
        bill.seconds = 0.004
        costs.settle(bill, unpaid=True)

    await asyncio.gather(*[request() for _ in range(3)])
    # each costs 4 ms, which is a tenth of the time: what the first one owes, then 40 ms for each
    assert done[0] >= 0.04
    assert done[2] - done[0] >= 0.06


async def test_no_more_than_a_share_is_unpaid_however_many_requests_wait():
    clock = Clock()
    costs = Costs(nothing, clock)
    spent = 0.0

    async def attack(client: str) -> None:
        nonlocal spent
        while True:
            bill = costs.open(client)
            await costs.take_turn(bill, stays)
            bill.seconds = 0.001
            spent += bill.seconds
            costs.settle(bill, unpaid=True)
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(attack(f"key {number % 2}")) for number in range(20)]
    for _ in range(600):
        for _ in range(3):
            await asyncio.sleep(0)
        clock.now += 0.01
        if costs._timer is not None:
            costs._timer.cancel()
            costs._release()
    for task in tasks:
        task.cancel()
    assert spent <= 1.3 * (6.0 * SHARE + 2 * FREE_SECONDS)
    assert spent >= 0.5 * 6.0 * SHARE


async def test_many_requests_that_wait_are_refused():
    costs = Costs(nothing)
    spend_all(costs, "attacker", 1.0)
    tasks = [asyncio.create_task(costs.take_turn(costs.open("attacker"), stays)) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(TooManyRequests, match=f"This client already has {MAX_WAITING} waiting requests"):
        await costs.take_turn(costs.open("attacker"), stays)
    await costs.take_turn(costs.open("other"), stays)
    for task in tasks:
        task.cancel()


async def test_refusals_are_slow_and_do_not_keep_those_that_wait_from_their_turns(monkeypatch):
    """Before: 10 connections were refused 1,700 times a second, which made debts, so that nothing of their client went on."""
    monkeypatch.setattr(module, "REFUSALS_A_SECOND", 200.0)
    costs = Costs(nothing)
    spend_all(costs, "attacker", 1.0)
    tasks = [asyncio.create_task(costs.take_turn(costs.open("attacker"), stays)) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0)
    owed = costs._debts["attacker"].seconds

    async def refused() -> None:
        bill = costs.open("attacker")
        with pytest.raises(TooManyRequests):
            await costs.take_turn(bill, stays)
        costs.settle(bill, unpaid=True)

    begin = time.monotonic()
    await asyncio.gather(*[refused() for _ in range(20)])
    assert time.monotonic() - begin >= 0.1
    assert costs._debts["attacker"].seconds <= owed

    async def leaves() -> dict:
        return {"type": "http.disconnect"}

    assert not await asyncio.wait_for(costs.take_turn(costs.open("attacker"), leaves), 1)
    for task in tasks:
        task.cancel()


async def test_clients_that_hang_up_pay_and_delay_nobody_else() -> None:
    """Before: each refusal pushed the next one of any client away by 8 ms, without a bound, and who hung up paid nothing."""
    now = [0.0]
    costs = Costs(nothing, clock=lambda: now[0])
    tasks = []
    for client in ("attacker", "other"):
        spend_all(costs, client, 1.0)
        tasks += [asyncio.create_task(costs.take_turn(costs.open(client), stays)) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0)
    owed = costs._debts["attacker"].seconds = 2 * module.FREE_SECONDS  # below MAX_DEBT

    async def leaves() -> dict:
        return {"type": "http.disconnect"}

    for _ in range(1000):
        bill = costs.open("attacker")
        assert not await costs.take_turn(bill, leaves)
        costs.settle(bill, unpaid=True)
    assert costs._debts["attacker"].seconds > owed
    assert costs._time_to_refuse("attacker") == module.MAX_REFUSAL_SECONDS
    assert costs._time_to_refuse("other") == pytest.approx(1 / module.REFUSALS_A_SECOND)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not costs._refused_until


async def test_work_of_many_milliseconds_is_done_in_several_iterations_and_the_cheapest_client_first():
    costs = Costs(nothing)
    order = []

    async def request(client: str, seconds: float) -> None:
        bill = costs.open(client)
        await costs.take_turn(bill, stays)
        with costs.work(bill):
            end = time.thread_time() + seconds
            while time.thread_time() < end:
                pass
        order.append(client)

    beats = 0

    async def beat() -> None:
        nonlocal beats
        while len(order) < 6:
            beats += 1
            await asyncio.sleep(0)

    costly = [asyncio.create_task(request("costly", 0.004)) for _ in range(5)]
    other = asyncio.create_task(request("cheap", 0.0))
    await asyncio.gather(beat(), other, *costly)
    assert order.index("cheap") <= 1
    assert beats >= 5


async def test_a_request_that_begins_sequences_takes_turns():
    costs = Costs(nothing)
    await costs.begin_sequences(5)  # outside of a request
    bill = costs.open("key")
    assert BILL.get() is bill
    before = bill.seconds
    await costs.begin_sequences(100)
    assert bill.seconds - before == pytest.approx(100 * module.SEQUENCE_SECONDS)
    turn = asyncio.create_task(costs.take_turn(costs.open("other"), stays))
    assert costs._used > module.ITERATION_SECONDS
    await turn
    assert costs._used == 0.0, "it got its turn in the next iteration"


async def test_the_prompts_of_a_list_wait_as_requests_do_and_are_not_counted_as_requests():
    """Before: each prompt added to the debt what the client's last refusal had cost, and 256 prompts refused the client."""
    clock = Clock()
    costs = Costs(nothing, clock)
    spend_all(costs, "key", FREE_SECONDS)
    spend(costs, "key", module.MAX_CHARGE)  # a refusal that has cost much
    begun = []

    async def prompt() -> None:
        costs.open("key")
        await costs.begin_sequences(1)
        begun.append(clock.now)

    prompts = [asyncio.create_task(prompt()) for _ in range(2 * MAX_WAITING)]
    await asyncio.sleep(0)
    assert not begun
    waiting = asyncio.create_task(costs.take_turn(costs.open("key"), stays))
    await asyncio.sleep(0)
    assert not waiting.done(), "it is not refused"
    while not waiting.done() and clock.now < 100.0:
        clock.now += 0.001
        if costs._timer is not None:
            costs._timer.cancel()
            costs._release()
        for _ in range(3):
            await asyncio.sleep(0)
    assert len(begun) == 2 * MAX_WAITING
    each = (begun[-1] - begun[0]) / len(begun)
    assert each == pytest.approx(module.REQUEST_SECONDS / SHARE, rel=0.2), "a client with debts has nothing of a list"
    await asyncio.gather(waiting, *prompts)


async def test_a_list_makes_no_debt_where_none_is_left():
    """Before: after one `GET /metrics`, however long ago, 128 prompts in a list were a debt of 0.1 s, and the next waited."""
    clock = Clock()
    costs = Costs(nothing, clock)
    spend(costs, "key", module.REQUEST_SECONDS)
    clock.now += 1.0
    costs.open("key")
    for _ in range(2 * MAX_WAITING):
        costs._used = module.ITERATION_SECONDS  # what the prompt before has taken, so that this one waits for its turn
        await asyncio.wait_for(costs.begin_sequences(1), 1.0)
    assert costs._wait("key", clock.now) == 0.0
    assert costs._debts["key"].seconds == 0.0


async def test_requests_whose_clients_have_left_are_not_counted():
    costs = Costs(nothing)
    spend_all(costs, "attacker", 1.0)

    async def leaves() -> dict:
        return {"type": "http.disconnect"}

    for _ in range(MAX_WAITING):
        assert not await costs.take_turn(costs.open("attacker"), leaves)
    assert await waits(costs, "attacker"), "it is not refused"
    await asyncio.sleep(0)
    assert not costs._waiting


async def test_a_single_request_makes_no_client_wait_and_many_do_not_make_it_wait_long():
    clock = Clock()
    costs = Costs(nothing, clock)
    spend(costs, "key", 100.0)
    assert not await waits(costs, "key")
    spend_all(costs, "key", 10.0)
    clock.now += (module.MAX_DEBT - FREE_SECONDS) / SHARE + 0.01
    assert not await waits(costs, "key")


async def test_a_client_that_leaves_does_not_wait_and_the_rest_of_its_body_is_dropped():
    costs = Costs(nothing)
    spend_all(costs, "attacker", 1.0)
    messages = [{"type": "http.request", "body": b"x", "more_body": True}] * 3 + [{"type": "http.disconnect"}]

    async def receive() -> dict:
        return messages.pop(0)

    assert not await asyncio.wait_for(costs.take_turn(costs.open("attacker"), receive), 1)
    assert not messages
