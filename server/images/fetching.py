"""Fetches an image from a host that the operator allows, without ever connecting to anything else.

    data = fetch(remote, FetchLimits(hosts=("images.example.org",), max_bytes=20 << 20, timeout=10.0))

A name is looked up once, and the connection goes to an address that was checked, so a second DNS answer changes nothing. Every
address of the name must be global. A redirect is another fetch, with all checks. The body is cut off at its limit while it
arrives. No proxy is used, because a proxy would look the name up again.

Each wait for a byte of the TLS handshake, the head or the body ends when the time of the whole fetch is up. So a server that
sends one byte a second holds a thread no longer than one that sends none. The system's resolver looks names up, and nothing can
interrupt it: when the time is up, the caller stops waiting for the thread (loader.py).

An error tells what an allowed host has answered: its status, its encoding, its size. It contains no IP address, and not the
name of a host that a redirect leads to.

Left out: which clients may fetch images. Every client that may use the model may.
"""

from __future__ import annotations

import http.client
import io
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin

from .addresses import ImageAddressError, Remote, read_remote

MAX_REDIRECTS = 3
MAX_REPEATED = 40
"""Characters of a host's answer that an error repeats."""
PIECE = 1 << 16
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_REDIRECTS = {301, 302, 303, 307, 308}
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str], list[str]]


@dataclass(frozen=True)
class FetchLimits:
    """hosts: the allowed hosts, in lower case; max_bytes: the largest body; timeout: seconds for a fetch with its redirects"""

    hosts: tuple[str, ...]
    max_bytes: int
    timeout: float

    def too_late(self) -> ImageAddressError:
        return ImageAddressError(f"be an address whose image arrives within {self.timeout:g} seconds (--image-timeout)")

    def too_large(self, size: str) -> ImageAddressError:
        return ImageAddressError(f"lead to an image of at most {self.max_bytes} bytes (--max-image-bytes), got {size}")


class _Deadline:
    """The time at which a fetch must have ended."""

    def __init__(self, limits: FetchLimits) -> None:
        self._limits = limits
        self._end = time.monotonic() + limits.timeout

    def left(self) -> float:
        """The seconds that are left, more than 0. Raises ImageAddressError when the time is up."""
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise self._limits.too_late()
        return seconds


class _Incoming(io.RawIOBase):
    """The bytes that arrive on a connection. No wait for them outlasts the deadline of the fetch."""

    def __init__(self, connection: socket.socket, deadline: _Deadline) -> None:
        self._connection = connection
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._connection.settimeout(self._deadline.left())
        return self._connection.recv_into(buffer)


class _Channel:
    """A connection as http.client takes it, with one deadline for the whole fetch instead of a timeout for each call."""

    def __init__(self, connection: socket.socket, deadline: _Deadline) -> None:
        self._connection = connection
        self._deadline = deadline

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Incoming(self._connection, self._deadline))

    def sendall(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            self._connection.settimeout(self._deadline.left())
            view = view[self._connection.send(view) :]

    def close(self) -> None:
        """Do nothing. http.client would close the connection before the body has been read; `_get` closes it afterwards."""


def resolve_host(host: str) -> list[str]:
    """The addresses of a name, as the system's resolver gives them."""
    found = socket.getaddrinfo(host, 443, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def fetch(remote: Remote, limits: FetchLimits, resolve: Resolve = resolve_host) -> bytes:
    """Fetch the body at an address. Raises ImageAddressError, which reveals no address inside the operator's network."""
    deadline = _Deadline(limits)
    for _ in range(MAX_REDIRECTS + 1):
        if remote.host not in limits.hosts:
            told = "this server fetches no images" if not limits.hosts else f"it allows only {', '.join(limits.hosts)}"
            raise ImageAddressError(f"be a data URI or name a host that the operator allows (--image-hosts): {told}")
        address = check_addresses(remote.host, resolve)
        try:
            answer = _get(remote, address, deadline, limits)
        except ImageAddressError:  # it is also a ValueError, but its text is better than the one below
            raise
        except TimeoutError:
            raise limits.too_late() from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ImageAddressError(f"be an address that answers, got {type(error).__name__}") from None
        if isinstance(answer, bytes):
            return answer
        try:
            url = urljoin(f"https://{remote.host}{remote.target}", answer.location)
        except ValueError:
            raise ImageAddressError("not redirect to an invalid URL") from None
        remote = read_remote(url, is_redirect=True)
    raise ImageAddressError(f"lead to an image within {MAX_REDIRECTS} redirects")


def check_addresses(host: str, resolve: Resolve) -> str:
    """The address to connect to. Raises ImageAddressError unless every address of the name is global."""
    try:
        found = [ipaddress.ip_address(each.partition("%")[0]) for each in resolve(host)]
    except (OSError, ValueError):
        raise ImageAddressError("name a host that can be looked up") from None
    if not found or not all(map(_is_global, found)):
        raise ImageAddressError("name a host that has only public addresses")
    return str(found[0])


def _is_global(address: Address) -> bool:
    """Whether an address is on the public internet. An IPv4 address that is embedded in an IPv6 address must be, too."""
    inner: list[Address] = [address]
    if isinstance(address, ipaddress.IPv6Address):
        held = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        inner += [each for each in held if each is not None]
        if address in _NAT64:
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return all(each.is_global and not each.is_multicast for each in inner)


@dataclass(frozen=True)
class _Redirect:
    location: str


def _get(remote: Remote, address: str, deadline: _Deadline, limits: FetchLimits) -> bytes | _Redirect:
    """Send one request over TLS. The server's certificate must be valid for the host name."""
    connection = http.client.HTTPConnection(remote.host)
    context = ssl.create_default_context()
    with socket.create_connection((address, 443), timeout=deadline.left()) as plain:
        plain.settimeout(deadline.left())  # for the whole handshake
        with context.wrap_socket(plain, server_hostname=remote.host) as secure:
            connection.sock = _Channel(secure, deadline)
            headers = {"accept": "image/*", "accept-encoding": "identity", "user-agent": "fa_serve", "connection": "close"}
            connection.request("GET", remote.target, headers=headers)
            with connection.getresponse() as response:
                if response.status in _REDIRECTS:
                    return _Redirect(response.headers.get("location", ""))
                if response.status != 200:
                    raise ImageAddressError(f"be an address that answers with the status 200, got {response.status}")
                encoding = response.headers.get("content-encoding", "identity")
                if encoding.lower() != "identity":
                    raise ImageAddressError(
                        f"be an address that answers without a content encoding, got {encoding[:MAX_REPEATED]!r}"
                    )
                return _read(response, limits)


def _read(response: http.client.HTTPResponse, limits: FetchLimits) -> bytes:
    """Read the body. Its length is also checked while it arrives, because the head need not give it."""
    if response.length is not None and response.length > limits.max_bytes:
        raise limits.too_large(str(response.length))
    pieces: list[bytes] = []
    length = 0
    while piece := response.read1(PIECE):
        length += len(piece)
        if length > limits.max_bytes:
            raise limits.too_large("more")
        pieces.append(piece)
    if response.length:
        raise ImageAddressError(f"lead to a complete image, got {length} of {length + response.length} bytes")
    return b"".join(pieces)
