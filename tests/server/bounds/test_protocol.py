"""Connections of a real server over the fake engine: what is too large, too slow or too many is refused or closed."""

import asyncio
import json
import logging
import re
from collections import Counter
from contextlib import asynccontextmanager

import pytest
from fa_serve.server.app import create_app
from fa_serve.server.bounds.protocol import BoundedProtocol, connection_limit
from fa_serve.server.process import Server
from fa_serve.server.settings import Settings
from streams import until
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

pytestmark = pytest.mark.anyio
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
BODY = b'{"model":"fake","prompt":"Hi"}'


@pytest.fixture
def listening(engine):
    """`async with listening(setting=value) as connect`: a server; `await connect()` opens a connection to it."""

    @asynccontextmanager
    async def start(**settings):
        url = asyncio.get_running_loop().create_future()
        app = create_app(engine, Settings(**settings))
        server = Server(app, "127.0.0.1", 0, drain_timeout=1, on_ready=url.set_result)
        serving = asyncio.create_task(server.serve())
        port = int((await url).rpartition(":")[2])
        opened = []

        async def connect():
            opened.append(await asyncio.open_connection("127.0.0.1", port))
            return opened[-1]

        connect.refused = lambda reason: app.state.service.metrics._refused.labels(reason)._value.get()
        try:
            yield connect
        finally:
            for _, writer in opened:
                writer.close()
            server.should_exit = True
            await asyncio.wait_for(serving, 10)

    return start


async def ask(connect, *parts, pause=0.0):
    """(status, error code) of what the server answers until it closes the connection, or (None, None)."""
    reader, writer = await connect()
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause)
        return said(await asyncio.wait_for(reader.read(), 30))
    except (ConnectionError, TimeoutError):
        return None, None


def said(answer):
    if not answer:
        return None, None
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return int(head.split()[1]), error["code"]


CLOSE = b"Connection: close\r\n\r\n"
LONG = b"y" * 3000


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((b"GET /" + LONG,), (414, "url_too_long")),
        ((b"GET /", *[b"y" * 100] * 30), (414, "url_too_long")),
        ((HEALTH + b"X: " + LONG + b"\r\n\r\n",), (431, "headers_too_large")),
        ((HEALTH, b"X: ", *[LONG] * 3), (431, "headers_too_large")),
        ((HEALTH, b"X: y\r\n" * 500, CLOSE), (431, "headers_too_large")),
        ((CHUNKED, b"1\r\n[\r\n" * 3000), (400, "chunks_too_small")),
        ((CHUNKED + b"1;", *[b"a=b;" * 100_000] * 4), (413, "request_too_large")),
        ((CHUNKED + b"0\r\n", b"X: y\r\n" * 500, b"\r\n"), (431, "headers_too_large")),
        ((b"\x16\x03\x01\x02\x00\r\n\r\n",), (400, "invalid_http")),
        ((HEALTH + b"Host: other\r\n" + CLOSE,), (400, "invalid_http")),
    ],
    ids=["url", "url in parts", "header", "header in parts", "headers", "chunks", "extension", "trailers", "TLS", "two hosts"],
)
async def test_too_many_bytes(listening, parts, expected):
    async with listening(max_url_bytes=2000, max_header_bytes=2500, max_body_bytes=10_000) as connect:
        assert await ask(connect, *parts) == expected
        assert connect.refused(expected[1]) == 1


async def test_what_is_just_within_the_bounds_passes(listening):
    async with listening(max_url_bytes=2000, max_header_bytes=2500) as connect:
        reader, writer = await connect()
        writer.write(b"GET /health?" + b"y" * 1988 + b" HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 2400 + b"\r\n" + CLOSE)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        reader, writer = await connect()
        pieces = b"".join(b"%x\r\n%b\r\n" % (1, BODY[i : i + 1]) for i in range(len(BODY)))
        writer.write(POST + b"Transfer-Encoding: chunked\r\n" + CLOSE + pieces + b"0\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((), (None, None)),
        ((b"GET /health HT",), (408, "header_timeout")),
        ((HEALTH, *[b"X"] * 100), (408, "header_timeout")),
        (tuple([b"\r\n"] * 100), (408, "header_timeout")),
        ((POST + b"Content-Length: 1000\r\n\r\n",), (408, "body_timeout")),
        ((POST + b"Content-Length: 1000\r\n\r\n", *[b" "] * 100), (408, "body_timeout")),
        ((b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n",), None),
    ],
    ids=["silent", "half a head", "dribbled head", "blank lines", "no body", "dribbled body", "answered before its body"],
)
async def test_too_slow(listening, parts, expected):
    async with listening(header_timeout=0.3, body_timeout=0.4) as connect:
        begin = asyncio.get_running_loop().time()
        reader, writer = await connect()
        answer = asyncio.create_task(reader.read())
        for part in parts:
            if answer.done():
                break
            writer.write(part)
            await asyncio.sleep(0.02)
        answer = await asyncio.wait_for(answer, 30)
        assert asyncio.get_running_loop().time() - begin > 0.25
        if expected is not None:
            assert said(answer) == expected


@pytest.mark.slow
async def test_an_idle_connection_is_closed_and_a_used_one_is_not(listening):
    async with listening(header_timeout=2, body_timeout=2, keep_alive_timeout=2) as connect:
        reader, writer = await connect()
        for _ in range(5):
            writer.write(HEALTH + b"\r\n")
            assert b"200 OK" in await reader.readuntil(b"alive")
            await asyncio.sleep(0.5)
        assert await asyncio.wait_for(reader.read(), 30) == b'"}'


@pytest.mark.slow
async def test_a_stream_outlives_all_deadlines(listening, engine):
    async with listening(header_timeout=1, body_timeout=1, keep_alive_timeout=1) as connect:
        engine.gate.clear()
        reader, writer = await connect()
        writer.write(POST + b"Content-Length: %d\r\n" % len(BODY) + CLOSE + BODY)
        await asyncio.sleep(1.5)
        engine.gate.set()
        assert b"200 OK" in await asyncio.wait_for(reader.read(), 30)


async def test_one_request_is_pipelined_and_more_end_the_connection(listening, engine):
    async with listening() as connect:
        engine.gate.clear()
        reader, writer = await connect()
        one = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
        writer.write(one * 2000)
        await until(lambda: engine.seen)
        await asyncio.sleep(0.2)
        assert len(engine.seen) == 1
        engine.gate.set()
        answer = await asyncio.wait_for(reader.read(), 30)
        assert answer.count(b"HTTP/1.1 200 ") == 2
        assert connect.refused("pipelined") == 1
        reader, writer = await connect()
        writer.write(one + HEALTH + CLOSE)
        assert (await asyncio.wait_for(reader.read(), 30)).count(b"HTTP/1.1 200 ") == 2


@pytest.mark.slow
async def test_the_time_in_which_the_server_does_not_read_is_not_the_clients(listening, engine):
    """A pipelined body of more than 64 KB waits for the answer before it. Before: both were cut off at the body's deadline."""
    async with listening(body_timeout=0.3) as connect:
        engine.gate.clear()
        reader, writer = await connect()
        writer.write(POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        body = b" " * 4_000_000 + BODY
        writer.write(POST + b"Content-Length: %d\r\n" % len(body) + CLOSE + body)
        await asyncio.sleep(0.7)
        engine.gate.set()
        answer = await asyncio.wait_for(reader.read(), 30)
        assert answer.count(b"HTTP/1.1 200 ") == 2

        engine.gate.clear()  # once the server reads, the client has its time and no more
        reader, writer = await connect()
        writer.write(POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        writer.write(POST + b"Content-Length: %d\r\n" % len(body) + CLOSE + body[:2_000_000])
        await asyncio.sleep(0.5)
        engine.gate.set()
        begin = asyncio.get_running_loop().time()
        answer = await asyncio.wait_for(reader.read(), 30)
        assert (answer.count(b"HTTP/1.1 200 "), answer.count(b"HTTP/1.1 408 ")) == (1, 1)
        assert asyncio.get_running_loop().time() - begin < 2


async def test_idle_connections_give_way(listening, caplog):
    caplog.set_level(logging.WARNING, "fa_serve.server")
    async with listening(max_connections=3) as connect:
        silent = [await connect() for _ in range(3)]
        silent[1][1].write(HEALTH + b"\r\n")
        assert b"200 OK" in await silent[1][0].readuntil(b"alive")
        for _ in range(2):
            reader, writer = await connect()
            writer.write(HEALTH + b"\r\n")
            assert b"200 OK" in await reader.readuntil(b"alive")
        for number in (0, 2):  # they have waited longer than the one that asked
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await asyncio.wait_for(silent[number][0].readexactly(1), 2)
        assert connect.refused("gave_way") == 2
    assert sum("all 3 connections are in use" in record.getMessage() for record in caplog.records) == 1


async def test_a_connection_beyond_the_busy_ones_gets_a_503(listening, engine):
    async with listening(max_connections=2) as connect:
        engine.gate.clear()
        busy = [await connect() for _ in range(2)]
        for _, writer in busy:
            writer.write(POST + b"Content-Length: %d\r\n" % len(BODY) + CLOSE + BODY)
        while len(engine.seen) < 2:
            await asyncio.sleep(0.01)
        assert await ask(connect) == (503, "too_many_connections")
        engine.gate.set()
        for reader, _ in busy:
            assert b"200 OK" in await asyncio.wait_for(reader.read(), 30)
        reader, writer = await connect()
        writer.write(HEALTH + CLOSE)
        assert b"200 OK" in await reader.read()


def test_the_limit_of_open_files_leaves_room(monkeypatch):
    for files, expected in ((1024, 768), (256, 192), (100, 36), (10, 1)):
        monkeypatch.setattr("resource.getrlimit", lambda _, files=files: (files, files))
        assert connection_limit(None) == expected
        assert connection_limit(5) == min(5, expected)


LENGTH = b"Content-Length: %d\r\n" % len(BODY)
SECOND = b"GET /second HTTP/1.1\r\nHost: localhost\r\n\r\n"
REFUSED = {
    "cl+te": POST + LENGTH + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SECOND,
    "te+cl": POST + b"Transfer-Encoding: chunked\r\n" + LENGTH + b"\r\n0\r\n\r\n" + SECOND,
    "two cl differ": POST + LENGTH + b"Content-Length: 5\r\n\r\n" + BODY,
    "two cl same": POST + LENGTH + LENGTH + b"\r\n" + BODY,
    "cl list": POST + b"Content-Length: 30, 30\r\n\r\n" + BODY,
    "cl negative": POST + b"Content-Length: -1\r\n\r\n" + BODY,
    "cl plus": POST + b"Content-Length: +30\r\n\r\n" + BODY,
    "cl hex": POST + b"Content-Length: 0x1e\r\n\r\n" + BODY,
    "cl huge": POST + b"Content-Length: 99999999999999999999999\r\n\r\n" + BODY,
    "cl empty": POST + b"Content-Length:\r\n\r\n" + BODY,
    "te xchunked": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + SECOND,
    "te identity": POST + b"Transfer-Encoding: identity\r\n\r\n" + BODY + SECOND,
    "te chunked, identity": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + SECOND,
    "te gzip, chunked": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "te space": POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "te vt": POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n" + SECOND,
    "te twice": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n" + SECOND,
    "te http10": POST.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
    "chunk neg": CHUNKED + b"-1\r\n",
    "chunk 0x": CHUNKED + b"0x1e\r\n" + BODY,
    "chunk overflow": CHUNKED + b"fffffffffffffffff\r\n" + BODY,
    "chunk bare lf": CHUNKED + b"1e\n" + BODY + b"\n0\n\n",
    "chunk no crlf": CHUNKED + b"%x\r\n%bX0\r\n\r\n" % (len(BODY), BODY),
    "chunk ext lf": CHUNKED + b"2;\nxx\r\n0\r\n\r\n" + SECOND,
    "bare lf": b"GET /health HTTP/1.1\nHost: localhost\n\n",
    "bare cr": b"GET /health HTTP/1.1\rHost: localhost\r\r",
    "obs-fold": HEALTH + b"X: a\r\n b\r\n\r\n",
    "nul header": HEALTH + b"X: a\x00b\r\n\r\n",
    "nul name": HEALTH + b"X\x00: a\r\n\r\n",
    "no colon": HEALTH + b"garbage\r\n\r\n",
    "space name": HEALTH + b"X y: a\r\n\r\n",
    "empty name": HEALTH + b": a\r\n\r\n",
    "first line space": b"GET /health HTTP/1.1\r\n Host: localhost\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "connect": b"CONNECT evil:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "lower method": b"get /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "long method": b"A" * 3000 + b" / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "http 0.9": b"GET /health\r\n\r\n",
    "http 2.0": b"GET /health HTTP/2.0\r\nHost: localhost\r\n\r\n",
    "preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "http 9.9": b"GET /health HTTP/9.9\r\nHost: localhost\r\n\r\n",
    "path utf8": b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "space url": b"GET /hea lth HTTP/1.1\r\nHost: localhost\r\n\r\n",
}
READ = {
    "cl over": (413, POST + b"Content-Length: 99999999999\r\n\r\n" + BODY),
    "te tab": (200, POST + b"Transfer-Encoding:\tchunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)),
    "absolute": (200, b"GET http://evil/health HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "trace": (405, b"TRACE /health HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "options *": (404, b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "h2c": (200, HEALTH + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n"),
    "websocket": (
        200,
        HEALTH + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n\r\n",
    ),
    "expect": (200, POST + LENGTH + b"Expect: 100-continue\r\n\r\n" + BODY),
    "expect other": (200, POST + LENGTH + b"Expect: 200-ok\r\n\r\n" + BODY),
    "get body": (200, b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(SECOND) + SECOND),
    "path nul": (404, b"GET /health%00 HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "dots": (404, b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "dots enc": (404, b"GET /docs/%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "double slash": (404, b"GET //health HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "semicolon": (404, b"GET /health;x HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "hdr latin": (200, HEALTH + b"X: \xff\xfe\r\n\r\n"),
    "auth latin": (200, HEALTH + b"Authorization: Bearer \xff\r\n\r\n"),
    "blank lines": (200, b"\r\n\r\n" + HEALTH + b"\r\n"),
    "head post": (405, b"HEAD /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "delete": (405, b"DELETE /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"),
}


async def answers(connect, request: bytes) -> tuple[list[int], bytes]:
    """The statuses of all answers, the last of which is followed by silence, and what came."""
    reader, writer = await connect()
    writer.write(request)
    came = b""
    statuses: list[int] = []
    try:
        while piece := await asyncio.wait_for(reader.read(65536), 0.3 if set(statuses) - {100} else 30):
            came += piece
            statuses = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", came)]
    except (TimeoutError, ConnectionError):
        pass
    writer.close()
    return statuses, came


async def test_what_another_parser_may_read_in_another_way_is_refused(listening):
    async with listening() as connect:
        for name, request in REFUSED.items():
            statuses, came = await answers(connect, request)
            assert statuses == [400], (name, statuses)
            assert said(came) == (400, "invalid_http"), name


async def test_unusual_requests_get_one_answer(listening):
    async with listening() as connect:
        given = await asyncio.gather(*(answers(connect, request) for _, request in READ.values()))
        for (name, (expected, _)), (statuses, came) in zip(READ.items(), given, strict=True):
            assert [status for status in statuses if status != 100] == [expected], (name, statuses)
            assert b"/second" not in came, name


async def test_large_bodies_take_turns(listening, monkeypatch):
    """Eight bodies of 4 MB on their way, some for a route that does not want them: each iteration reads from one connection."""
    reads = []
    data_received = BoundedProtocol.data_received

    def note(self, data):
        reads.append((iteration[0], self, len(data)))
        data_received(self, data)

    monkeypatch.setattr(BoundedProtocol, "data_received", note)
    iteration = [0]

    def count():
        iteration[0] += 1
        asyncio.get_running_loop().call_soon(count)

    body = b" " * 4_000_000 + BODY
    length = f"Content-Length: {len(body)}\r\n\r\n".encode()
    body += HEALTH + CLOSE  # the connection serves another request behind the body
    wanted = POST + length
    unwanted = wanted.replace(b"completions", b"nothing")
    async with listening() as connect:
        opened = [await connect() for _ in range(8)]
        for _, writer in opened:
            writer.write(b"POST /v1/")  # what follows is not the first that the server hears of the connection
            await writer.drain()
        await asyncio.sleep(0.1)
        reads.clear()
        asyncio.get_running_loop().call_soon(count)
        heads = [(wanted, unwanted)[number % 2].removeprefix(b"POST /v1/") for number in range(8)]
        for (_, writer), head in zip(opened, heads, strict=True):
            writer.write(head + body)
        answers = await asyncio.wait_for(asyncio.gather(*(reader.read() for reader, _ in opened)), 20)
    assert [re.findall(rb"HTTP/1.1 (\d+)", answer) for answer in answers] == [[b"200", b"200"], [b"404", b"200"]] * 4
    assert sum(size for _, _, size in reads) == sum(len(head) + len(body) for head in heads), "all of it is read"
    turns = Counter()  # by iteration: reads of connections that the read before has stopped
    stopped = set()
    for at, connection, size in reads:
        turns[at] += connection in stopped
        if size > HIGH_WATER_LIMIT:
            stopped.add(connection)
        else:
            stopped.discard(connection)
    assert turns.total() > 4 * len(opened)
    assert max(turns.values()) == 1


async def test_an_answer_before_the_body_is_the_only_one(listening):
    """The rest of the body does not come in time. The connection is closed, and no 408 follows the answer."""
    async with listening(body_timeout=0.2) as connect:
        reader, writer = await connect()
        writer.write(POST.replace(b"completions", b"nothing") + b"Content-Length: 100\r\n\r\nx")
        answer = await asyncio.wait_for(reader.read(), 30)
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    ("given", "logged"),
    [
        ("9.9.9.9 INJ", "127.0.0.1"),
        ("9.9.9.9 key=abcdef01 user='root'", "127.0.0.1"),
        ("unknown", "127.0.0.1"),
        ("_hidden", "127.0.0.1"),
        ("1.2.3.4.5, 9.9.9", "127.0.0.1"),
        ("[::1", "127.0.0.1"),
        ("9.9.9.9", "9.9.9.9"),
        ("9.9.9.9:1234", "9.9.9.9"),
        ("[2001:db8::1]:1234", "2001:db8::1"),
        ("2001:db8::1", "2001:db8::1"),
        ("x INJ, 9.9.9.9", "9.9.9.9"),
        ("9.9.9.9, x INJ", "9.9.9.9"),
        ("9.9.9.9, 127.0.0.1", "9.9.9.9"),
    ],
)
async def test_only_addresses_of_forwarded_clients_reach_the_log(listening, caplog, given, logged):
    """`9.9.9.9 INJ` from a proxy that is trusted forged the fields behind it."""
    caplog.set_level(logging.INFO, "fa_serve.access")
    async with listening() as connect:
        reader, writer = await connect()
        asked = HEALTH.replace(b"/health", b"/v1/models")  # probes are not logged
        writer.write(asked + f"X-Forwarded-For: {given}\r\n".encode() + CLOSE)
        answer = await asyncio.wait_for(reader.read(), 30)
    assert answer.startswith(b"HTTP/1.1 200 ")
    [record] = [each for each in caplog.records if each.name == "fa_serve.access"]
    assert record.fields["client"] == logged
    assert record.getMessage().endswith(f" {logged}")
