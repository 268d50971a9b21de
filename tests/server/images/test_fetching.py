"""Fetching connects to nothing but public addresses of allowed hosts, whatever names, redirects and servers say."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fa_serve.server.images import fetching
from fa_serve.server.images.addresses import ImageAddressError, Remote
from fa_serve.server.images.fetching import FetchLimits, check_addresses, fetch

PUBLIC = "93.184.216.34"
LIMITS = FetchLimits(hosts=("images.example.org",), max_bytes=100, timeout=5.0)
REMOTE = Remote("images.example.org", "/cat.png")


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(host, address) of each request, whose answer is b"picture"."""
    made: list[tuple[str, str]] = []

    def get(remote: Remote, address: str, *_: Any) -> Any:
        made.append((remote.host, address))
        return b"picture"

    monkeypatch.setattr(fetching, "_get", get)
    return made


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.0.0.1",
        "172.16.5.4",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1",
        "fc00::1",
        "ff02::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "2002:7f00:1::",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
    ],
)
def test_addresses_inside_are_refused(address: str, connections: list[tuple[str, str]]) -> None:
    for found in ([address], [PUBLIC, address]):
        with pytest.raises(ImageAddressError, match="name a host that has only public addresses") as error:
            fetch(REMOTE, LIMITS, lambda host, found=found: found)
        assert address not in str(error.value)
    assert connections == []


def test_a_name_is_looked_up_once_and_the_connection_goes_there(connections: list[tuple[str, str]]) -> None:
    answers = iter([[PUBLIC], ["127.0.0.1"]])
    assert fetch(REMOTE, LIMITS, lambda host: next(answers)) == b"picture"
    assert connections == [("images.example.org", PUBLIC)]


def test_only_allowed_hosts(connections: list[tuple[str, str]]) -> None:
    for host in ("example.org", "images.example.org.evil.net", "localhost", "127.0.0.1"):
        with pytest.raises(ImageAddressError, match=r"it allows only images[.]example[.]org"):
            fetch(Remote(host, "/"), LIMITS, lambda host: [PUBLIC])
    with pytest.raises(ImageAddressError, match="this server fetches no images"):
        fetch(REMOTE, FetchLimits((), 100, 5.0), lambda host: [PUBLIC])
    assert connections == []


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("https://localhost/", "it allows only images.example.org"),
        ("https://127.0.0.1/", "it allows only images.example.org"),
        ("http://images.example.org/", "got the scheme 'http'"),
        ("file:///etc/passwd", "got the scheme 'file'"),
        ("https://images.example.org:22/", "no port other than 443$"),
        ("https://name@images.example.org/", "no port other than 443$"),
        ("https://inside_1/", "name a host with only letters, digits, dots and hyphens$"),
        ("https://[inside/", "not redirect to an invalid URL$"),
        ("https://images.example.org:99999/", "a valid https address$"),
        ("/inside 1", "with %-escapes for other characters$"),
        ("//evil.net/x", "it allows only images.example.org"),
        ("/again", "within 3 redirects"),
        ("", "within 3 redirects"),
    ],
)
def test_redirects_are_checked_like_addresses(monkeypatch: pytest.MonkeyPatch, location: str, message: str) -> None:
    asked = []

    def get(remote: Remote, *_: Any) -> Any:
        asked.append(remote.host)
        return fetching._Redirect(location)

    monkeypatch.setattr(fetching, "_get", get)
    with pytest.raises(ImageAddressError, match=message):
        fetch(REMOTE, LIMITS, lambda host: [PUBLIC])
    assert set(asked) == {"images.example.org"}


def test_a_redirect_to_a_name_that_has_moved_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([[PUBLIC], ["127.0.0.1"]])
    monkeypatch.setattr(fetching, "_get", lambda *_: fetching._Redirect("/again"))
    with pytest.raises(ImageAddressError, match="only public addresses"):
        fetch(REMOTE, LIMITS, lambda host: next(answers))


Host = Callable[..., None]
Server = Callable[[socket.socket], None]
HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """`host(serve)`: the allowed host, which each connection goes to and `serve` speaks for. tls: as a client wants it"""
    with contextlib.ExitStack() as stack:

        def start(serve: Server, tls: bool = False) -> None:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def run() -> None:
                with contextlib.suppress(OSError):  # closed by the client, or at the end of the test
                    while True:
                        with listener.accept()[0] as connection:
                            connection.recv(1 << 16)
                            serve(connection)

            def connect(address: tuple[str, int], timeout: float) -> socket.socket:
                assert address == (PUBLIC, 443)
                plain = socket.socket()
                plain.settimeout(timeout)
                plain.connect(listener.getsockname())
                return plain

            threading.Thread(target=run, daemon=True).start()
            monkeypatch.setattr(fetching.socket, "create_connection", connect)
            if not tls:
                context = SimpleNamespace(wrap_socket=lambda plain, server_hostname: plain)
                monkeypatch.setattr(fetching.ssl, "create_default_context", lambda: context)

        yield start


def answering(answer: bytes) -> Server:
    return lambda connection: connection.sendall(answer)


def fetched(timeout: float = 5.0, max_bytes: int = 100) -> bytes:
    return fetch(REMOTE, FetchLimits(LIMITS.hosts, max_bytes, timeout), lambda _: [PUBLIC])


@pytest.mark.parametrize(
    "answer",
    [
        HEAD + b"content-length: 100\r\n\r\n" + b"x" * 100,
        HEAD + b"content-length: 100\r\nContent-Encoding: Identity\r\n\r\n" + b"x" * 100,
        HEAD + b"transfer-encoding: chunked\r\n\r\n64\r\n" + b"x" * 100 + b"\r\n0\r\n\r\n",
        HEAD + b"\r\n" + b"x" * 100,
    ],
    ids=["length", "identity", "chunks", "until-it-closes"],
)
def test_a_body_of_as_many_bytes_as_allowed(host: Host, answer: bytes) -> None:
    host(answering(answer))
    assert fetched() == b"x" * 100


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "be an address that answers with the status 200, got 404"),
        (b"HTTP/1.1 503 Busy\r\n\r\n", "be an address that answers with the status 200, got 503"),
        (
            HEAD + b"content-length: 101\r\n\r\n" + b"x" * 101,
            "lead to an image of at most 100 bytes (--max-image-bytes), got 101",
        ),
        (HEAD + b"\r\n" + b"x" * 101, "lead to an image of at most 100 bytes (--max-image-bytes), got more"),
        (HEAD + b"content-length: 9\r\n\r\n" + b"x" * 4, "lead to a complete image, got 4 of 9 bytes"),
        (HEAD + b"content-encoding: gzip\r\n\r\nx", "be an address that answers without a content encoding, got 'gzip'"),
        (HEAD + b"content-encoding: " + b"z" * 999 + b"\r\n\r\nx", f"without a content encoding, got '{'z' * 40}'"),
        (b"nothing of HTTP\r\n\r\n", "be an address that answers, got BadStatusLine"),
        (b"", "be an address that answers, got RemoteDisconnected"),
    ],
    ids=["404", "503", "length", "large", "cut", "encoding", "long", "other", "none"],
)
def test_what_a_host_has_answered_is_told(host: Host, answer: bytes, message: str) -> None:
    """Before, all of these said "be an address that answers (ImageAddressError)"."""
    host(answering(answer))
    with pytest.raises(ImageAddressError) as error:
        fetched()
    assert str(error.value).endswith(message)


def drip(connection: socket.socket, data: bytes) -> None:
    for byte in data:
        connection.sendall(bytes([byte]))
        time.sleep(0.05)


LATE = r"be an address whose image arrives within 0[.]4 seconds \(--image-timeout\)"


@pytest.mark.parametrize(
    ("sent", "tls"),
    [
        (HEAD + b"x-a: b\r\n" * 100, False),
        (HEAD + b"content-length: 99\r\n\r\n" + b"x" * 99, False),
        (b"", False),
        (b"", True),
        (b"\x16\x03\x03\x02\x00" + b"\x02\x00\x01\xfc\x03\x03" + b"\0" * 500, True),
    ],
    ids=["head", "body", "silence", "silence-of-tls", "handshake"],
)
def test_a_host_that_drips_is_left_in_time(host: Host, sent: bytes, tls: bool) -> None:
    """Before, a byte every 0.3 s kept the thread for as long as the host liked: 16 s with a timeout of 1 s."""
    gate = threading.Event()

    def serve(connection: socket.socket) -> None:
        drip(connection, sent)
        gate.wait(20)

    host(serve, tls)
    begin = time.monotonic()
    with pytest.raises(ImageAddressError, match=LATE):
        fetched(timeout=0.4)
    seconds = time.monotonic() - begin
    gate.set()
    assert 0.4 <= seconds < 3, seconds


def test_a_host_that_does_not_read_is_left_in_time(host: Host) -> None:
    gate = threading.Event()
    host(lambda _: gate.wait(20) and None)
    begin = time.monotonic()
    with pytest.raises(ImageAddressError, match=LATE):
        fetch(Remote(REMOTE.host, "/" + "x" * (16 << 20)), FetchLimits(LIMITS.hosts, 100, 0.4), lambda _: [PUBLIC])
    gate.set()
    assert time.monotonic() - begin < 10


@pytest.mark.slow
def test_a_handshake_has_what_a_connection_has_left(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    host(lambda _: gate.wait(20) and None, tls=True)
    connect = fetching.socket.create_connection

    def connect_slowly(address: tuple[str, int], timeout: float) -> socket.socket:
        time.sleep(1.0)
        return connect(address, timeout)

    monkeypatch.setattr(fetching.socket, "create_connection", connect_slowly)
    begin = time.monotonic()
    with pytest.raises(ImageAddressError, match=r"arrives within 1[.]2 seconds"):
        fetched(timeout=1.2)
    seconds = time.monotonic() - begin
    gate.set()
    assert seconds < 2, seconds


def test_the_time_is_that_of_all_redirects(host: Host) -> None:
    def serve(connection: socket.socket) -> None:
        time.sleep(0.3)
        connection.sendall(b"HTTP/1.1 302 Found\r\nlocation: /again\r\ncontent-length: 0\r\n\r\n")

    host(serve)
    with pytest.raises(ImageAddressError, match=LATE):
        fetched(timeout=0.4)


def test_an_answer_without_tls_is_none(host: Host) -> None:
    host(answering(HEAD + b"content-length: 1\r\n\r\nx"), tls=True)
    with pytest.raises(ImageAddressError, match="be an address that answers, got SSLError"):
        fetched()


def test_a_connection_goes_to_the_address_and_not_to_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(address: tuple[str, int], timeout: float) -> socket.socket:
        asked.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(fetching.socket, "create_connection", refuse)
    with pytest.raises(ImageAddressError, match="be an address that answers, got ConnectionRefusedError"):
        fetch(REMOTE, LIMITS, lambda host: [PUBLIC])
    assert asked == [(PUBLIC, 443)]


def test_a_name_that_is_not_known() -> None:
    def fails(host: str) -> list[str]:
        raise socket.gaierror

    for resolve in (fails, lambda host: []):
        with pytest.raises(ImageAddressError):
            check_addresses("images.example.org", resolve)
