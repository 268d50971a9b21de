"""A crowd of connections in the kernel's queue: clients take turns, a few in each, and what is too many gives way."""

import asyncio
import contextlib
import socket
from collections import Counter

import pytest
from fa_serve.server.bounds import acceptor
from fa_serve.server.bounds.acceptor import TURN, Acceptor
from fa_serve.server.bounds.guard import ClientNames
from fa_serve.server.bounds.protocol import ConnectionTable

pytestmark = pytest.mark.anyio


class Served(asyncio.Protocol):
    """Notes the client's port and the turn of the event loop in which it was prepared."""

    def __init__(self, test):
        self.test = test

    def connection_made(self, transport):
        self.transport = transport
        self.test.made.append((transport.get_extra_info("peername")[1], self.test.turn))
        self.test.table.admit(self)

    def connection_lost(self, error):
        self.test.table.leave(self)

    def data_received(self, data):
        self.transport.write(data)


class Crowd:
    def __init__(self, count: int, limit: int = 1000):
        self.counts = Counter()
        self.table = ConnectionTable(limit, lambda reason: self.counts.update([reason]))
        self.made: list[tuple[int, int]] = []
        self.turn = 0
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.clients = [socket.create_connection(self.listener.getsockname()) for _ in range(count)]
        client_of = ClientNames(("one-key", "another-key"))
        self.acceptor = Acceptor(self.listener, lambda: Served(self), self.table, client_of)

    async def turns(self, until):
        """Run the event loop until the condition holds, and count its turns."""
        for _ in range(2000):
            if until():
                return
            self.turn += 1
            await asyncio.sleep(0)
        raise AssertionError("2,000 turns have not been enough")

    @property
    def ports(self) -> list[int]:
        return [client.getsockname()[1] for client in self.clients]

    def is_reset(self, index: int) -> bool:
        self.clients[index].setblocking(False)
        with contextlib.suppress(BlockingIOError):
            try:
                return self.clients[index].recv(1) == b""
            except ConnectionResetError:
                return True
        return False

    def close(self):
        self.acceptor.close()
        for client in self.clients:
            client.close()


@pytest.fixture
async def crowd():
    made = []

    def make(*given, **options):
        made.append(Crowd(*given, **options))
        made[-1].acceptor.start()
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def whole_turns(monkeypatch):
    """One turn takes all that the kernel's queue holds, on a busy machine as well."""
    monkeypatch.setattr(acceptor, "TAKE_SECONDS", 10.0)


@pytest.mark.usefixtures("whole_turns")
async def test_a_turn_has_the_newest_and_the_oldest(crowd):
    """Only the newest: a client that was not among the first waits for as long as more come than can be prepared."""
    given = crowd(100)
    await given.turns(lambda: len(given.made) == 100)
    assert given.made[0][0] == given.ports[-1]
    half = TURN // 2
    assert {port for port, _ in given.made[:TURN]} == {*given.ports[-half:], *given.ports[:half]}
    assert max(Counter(turn for _, turn in given.made).values()) <= TURN
    assert not given.counts


async def test_a_client_that_comes_later_does_not_wait_for_the_crowd(crowd):
    given = crowd(400)
    await given.turns(lambda: len(given.made) >= TURN)
    late = socket.create_connection(given.listener.getsockname())
    given.clients.append(late)
    await given.turns(lambda: late.getsockname()[1] in [port for port, _ in given.made])
    assert len(given.made) < 200, "it waited for those that had come before it"


@pytest.mark.usefixtures("whole_turns")
async def test_the_oldest_of_too_many_give_way_before_anything_is_spent_on_them(crowd):
    given = crowd(150, limit=50)
    await given.turns(lambda: len(given.made) >= 50)
    assert {port for port, _ in given.made} == set(given.ports[-50:])
    assert given.counts == {"gave_way": 100}
    await asyncio.sleep(0.01)
    assert [given.is_reset(index) for index in range(150)] == [True] * 100 + [False] * 50


HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\n"
WHOLE = [
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    HEAD + b"Content-Length: 3\r\n\r\nask",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nask\r\n0\r\n\r\n",
]
UNFINISHED = [
    HEAD + b"X-Slow: ",
    HEAD + b"content-length: 4\r\n\r\nask",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nask\r\n",
]


def keyed(key: str) -> bytes:
    return f"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n\r\n".encode()


@pytest.mark.usefixtures("whole_turns")
@pytest.mark.parametrize("request_sent", WHOLE, ids=["no-body", "length", "chunked"])
async def test_one_that_has_sent_a_request_does_not_give_way_to_silent_ones(crowd, request_sent):
    given = Crowd(150, limit=50)
    given.clients[3].sendall(request_sent)
    given.acceptor.start()
    await given.turns(lambda: len(given.made) >= 50)
    assert given.ports[3] in [port for port, _ in given.made]
    assert given.counts["gave_way"] in (99, 100)
    given.clients[3].setblocking(False)
    assert await asyncio.get_running_loop().sock_recv(given.clients[3], 1000) == request_sent
    given.close()


@pytest.mark.usefixtures("whole_turns")
@pytest.mark.parametrize("request_begun", UNFINISHED, ids=["head", "length", "chunked"])
async def test_a_client_does_not_wait_for_a_crowd_that_has_begun_requests(crowd, request_begun):
    """Before: 300 heads that did not end were prepared before the client that came after them, in a quarter of a second."""
    given = Crowd(300, limit=50)
    for client in given.clients:
        client.sendall(request_begun)
    late = socket.create_connection(given.listener.getsockname())
    given.clients.append(late)
    given.acceptor.start()
    await given.turns(lambda: late.getsockname()[1] in [port for port, _ in given.made])
    assert len(given.made) <= TURN
    assert given.counts["gave_way"] >= 250
    given.close()


@pytest.mark.usefixtures("whole_turns")
async def test_another_key_does_not_wait_for_the_requests_of_one(crowd):
    """Before: who was not served at once waited behind all that came later, a minute under 500 requests a second."""
    given = Crowd(1, limit=1000)
    given.clients[0].sendall(keyed("another-key"))
    for _ in range(200):  # newer ones
        given.clients.append(socket.create_connection(given.listener.getsockname()))
        given.clients[-1].sendall(keyed("one-key"))
    given.acceptor.start()
    await given.turns(lambda: len(given.made) >= TURN)
    assert given.ports[0] in [port for port, _ in given.made[:2]]
    given.close()


async def test_those_that_are_not_prepared_are_reset_at_the_end(crowd):
    given = crowd(100)
    await given.turns(lambda: given.made)
    given.acceptor.close()
    await given.acceptor.wait_closed()
    await asyncio.sleep(0.01)
    left = sum(not given.is_reset(index) for index in range(100))
    assert left == len(given.made) < 100
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", given.ports[0]))


async def test_without_files_it_waits_and_goes_on(crowd, monkeypatch):
    """Before: each refusal of the system was a pause of 50 ms, and the crowd of a small limit met it six times."""
    given = crowd(0)
    failures = [OSError(24, "Too many open files") for _ in range(3)]
    pauses = []

    class Listener:
        def __init__(self, inner):
            self.inner = inner

        def accept(self):
            if failures:
                raise failures.pop()
            return self.inner.accept()

        def __getattr__(self, name):
            return getattr(self.inner, name)

    class Loop:
        def __init__(self, inner):
            self.inner = inner

        def call_later(self, seconds, work):
            pauses.append(seconds)
            return self.inner.call_later(seconds, work)

        def __getattr__(self, name):
            return getattr(self.inner, name)

    monkeypatch.setattr(given.acceptor, "_listener", Listener(given.listener))
    monkeypatch.setattr(given.acceptor, "_loop", Loop(given.acceptor._loop))
    given.clients.append(socket.create_connection(given.listener.getsockname()))
    for _ in range(200):
        if given.made:
            break
        await asyncio.sleep(0.01)
    assert [port for port, _ in given.made] == given.ports
    assert not failures
    assert sum(pauses) < 0.01, "a connection that has ended gives its file back within a turn"
    failures += [OSError(24, "Too many open files") for _ in range(9)]
    given.clients.append(socket.create_connection(given.listener.getsockname()))
    await asyncio.sleep(0.3)
    assert max(pauses) == acceptor.LONGEST_PAUSE
