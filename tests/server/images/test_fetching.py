"""Fetching connects to nothing but public addresses of allowed hosts, whatever names, redirects and servers say."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest
from fa_serve.server.images import fetching
from fa_serve.server.images.addresses import ImageAddressError, Remote, read_address, read_remote
from fa_serve.server.images.fetching import FetchLimits, check_addresses, fetch

PUBLIC = "93.184.216.34"
LIMITS = FetchLimits(hosts=("images.example.org",), max_bytes=100, timeout=5.0)
REMOTE = Remote("images.example.org", "/cat.png")


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(host, address) of each request, whose answer is b"picture"."""
    made: list[tuple[str, str]] = []

    def get(remote: Remote, address: str, deadline: float, max_bytes: int) -> Any:
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
        with pytest.raises(ImageAddressError, match="name a host with public addresses alone") as error:
            fetch(REMOTE, LIMITS, lambda host, found=found: found)
        assert address not in str(error.value)
    assert connections == []


def test_a_name_is_looked_up_once_and_the_connection_goes_there(connections: list[tuple[str, str]]) -> None:
    answers = iter([[PUBLIC], ["127.0.0.1"]])
    assert fetch(REMOTE, LIMITS, lambda host: next(answers)) == b"picture"
    assert connections == [("images.example.org", PUBLIC)]


def test_only_allowed_hosts(connections: list[tuple[str, str]]) -> None:
    for host in ("example.org", "images.example.org.evil.net", "localhost", "127.0.0.1"):
        with pytest.raises(ImageAddressError, match=r"it allows images[.]example[.]org alone"):
            fetch(Remote(host, "/"), LIMITS, lambda host: [PUBLIC])
    with pytest.raises(ImageAddressError, match="this server fetches no images"):
        fetch(REMOTE, FetchLimits((), 100, 5.0), lambda host: [PUBLIC])
    assert connections == []


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("https://localhost/", "it allows images.example.org alone"),
        ("https://127.0.0.1/", "it allows images.example.org alone"),
        ("http://images.example.org/", "got one of the scheme 'http'"),
        ("file:///etc/passwd", "got one of the scheme 'file'"),
        ("https://images.example.org:22/", "nor another port than 443"),
        ("//evil.net/x", "it allows images.example.org alone"),
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
    with pytest.raises(ImageAddressError, match="public addresses alone"):
        fetch(REMOTE, LIMITS, lambda host: next(answers))


class Response:
    """The part of an http.client response that is read."""

    def __init__(self, *pieces: bytes):
        self._pieces = iter([*pieces, b""])

    def read1(self, size: int) -> bytes:
        return next(self._pieces)


class Secure:
    def settimeout(self, seconds: float) -> None:
        assert seconds > 0


@pytest.mark.parametrize(("pieces", "fits"), [((b"x" * 60, b"x" * 40), True), ((b"x" * 60, b"x" * 41), False)])
def test_a_body_is_cut_off_at_its_limit(pieces: tuple[bytes, ...], fits: bool) -> None:
    read: Callable[..., bytes] = fetching._read
    if fits:
        assert len(read(Response(*pieces), Secure(), 1e12, 100)) == 100
        return
    with pytest.raises(ImageAddressError, match=r"at most 100 bytes \(--max-image-bytes\)"):
        read(Response(*pieces, b"never read" * 100), Secure(), 1e12, 100)


def test_the_time_is_that_of_the_whole_fetch() -> None:
    with pytest.raises(ImageAddressError, match=r"answers in time \(--image-timeout\)"):
        fetching._read(Response(b"x"), Secure(), 0.0, 100)


def test_a_connection_goes_to_the_address_and_not_to_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(address: tuple[str, int], timeout: float) -> socket.socket:
        asked.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(fetching.socket, "create_connection", refuse)
    with pytest.raises(ImageAddressError, match=r"be an address that answers \(ConnectionRefusedError\)"):
        fetch(REMOTE, LIMITS, lambda host: [PUBLIC])
    assert asked == [(PUBLIC, 443)]


def test_a_name_that_is_not_known() -> None:
    def fails(host: str) -> list[str]:
        raise socket.gaierror

    for resolve in (fails, lambda host: []):
        with pytest.raises(ImageAddressError):
            check_addresses("images.example.org", resolve)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://images.example.org/x", "scheme 'ftp'"),
        ("/etc/passwd", "scheme ''"),
        ("file:///etc/passwd", "scheme 'file'"),
        ("https://user:word@images.example.org/", "neither a user name"),
        ("https://images.example.org:8443/", "nor another port"),
        ("https://[::1/", "that can be read"),
        ("https://exämple.org/", "name a host in letters"),
        ("https://images.example.org/a b", "written in ASCII"),
        ("https://images.example.org/\r\nHost: x", "written in ASCII|that can be read"),
        ("data:image/svg+xml;base64,PHN2Zz4=", "one of these types"),
        ("data:text/html;base64,PHN2Zz4=", "one of these types"),
        ("data:image/png,abc", "one of these types"),
        ("data:image/png;base64," + "A" * 200, r"at most 100 bytes \(--max-image-bytes\), got about 150"),
    ],
)
def test_addresses_that_are_refused(url: str, message: str) -> None:
    with pytest.raises(ImageAddressError, match=message):
        read_address(url, max_bytes=100)


def test_addresses_that_are_read() -> None:
    assert read_address("data:image/png;base64,QUJD", 100) == b"QUJD"
    assert read_remote("https://Images.Example.org/a?b=c#d") == Remote("images.example.org", "/a?b=c")
