"""Fetches an image from a host that the operator allows, without ever connecting to anything else.

    data = fetch(remote, FetchLimits(hosts=("images.example.org",), max_bytes=20 << 20, timeout=10.0))

A name is looked up once, and the connection goes to an address that was checked: a second answer of the DNS changes nothing.
An address counts only if it is global, and every address of the name must be. A redirect is another fetch, with all checks. The
body is cut off at its limit while it arrives. No proxy is asked, because that would look the name up again.

Left out: which clients may ask for it. Each client that may use the model may.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urljoin

from .addresses import ImageAddressError, Remote, read_remote

MAX_REDIRECTS = 3
PIECE = 1 << 16
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_REDIRECTS = {301, 302, 303, 307, 308}
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str], list[str]]


@dataclass(frozen=True)
class FetchLimits:
    """hosts: that are allowed, in lower case; max_bytes: of a body; timeout: seconds for all of it, redirects included"""

    hosts: tuple[str, ...]
    max_bytes: int
    timeout: float


def resolve_host(host: str) -> list[str]:
    """The addresses of a name, as the system's resolver gives them."""
    found = socket.getaddrinfo(host, 443, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def fetch(remote: Remote, limits: FetchLimits, resolve: Resolve = resolve_host) -> bytes:
    """The body behind an address. Raises ImageAddressError, which says nothing of addresses inside the operator's network."""
    deadline = time.monotonic() + limits.timeout
    for _ in range(MAX_REDIRECTS + 1):
        if remote.host not in limits.hosts:
            told = "this server fetches no images" if not limits.hosts else f"it allows {', '.join(limits.hosts)} alone"
            raise ImageAddressError(f"be a data URI or name a host that the operator allows (--image-hosts): {told}")
        address = check_addresses(remote.host, resolve)
        try:
            answer = _get(remote, address, deadline, limits.max_bytes)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ImageAddressError(f"be an address that answers ({type(error).__name__})") from None
        if isinstance(answer, bytes):
            return answer
        remote = read_remote(urljoin(f"https://{remote.host}{remote.target}", answer.location))
    raise ImageAddressError(f"lead to an image within {MAX_REDIRECTS} redirects")


def check_addresses(host: str, resolve: Resolve) -> str:
    """The address to connect to. Raises ImageAddressError unless every address of the name is global."""
    try:
        found = [ipaddress.ip_address(each.partition("%")[0]) for each in resolve(host)]
    except (OSError, ValueError):
        raise ImageAddressError("name a host that can be looked up") from None
    if not found or not all(map(_is_global, found)):
        raise ImageAddressError("name a host with public addresses alone")
    return str(found[0])


def _is_global(address: Address) -> bool:
    """Whether an address is one of the public internet, also inside of the forms in which IPv6 holds one of IPv4."""
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


def _get(remote: Remote, address: str, deadline: float, max_bytes: int) -> bytes | _Redirect:
    """One request over TLS, whose certificate must be that of the name."""
    connection = http.client.HTTPConnection(remote.host)
    context = ssl.create_default_context()
    with (
        socket.create_connection((address, 443), timeout=_left(deadline)) as plain,
        context.wrap_socket(plain, server_hostname=remote.host) as secure,
    ):
        connection.sock = secure
        headers = {"accept": "image/*", "accept-encoding": "identity", "user-agent": "fa_serve", "connection": "close"}
        connection.request("GET", remote.target, headers=headers)
        secure.settimeout(_left(deadline))
        response = connection.getresponse()
        if response.status in _REDIRECTS:
            return _Redirect(response.headers.get("location", ""))
        if response.status != 200:
            raise ImageAddressError(f"be an address that answers with 200, got {response.status}")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise ImageAddressError("be an address that answers without a content encoding")
        return _read(response, secure, deadline, max_bytes)


def _read(response: http.client.HTTPResponse, secure: ssl.SSLSocket, deadline: float, max_bytes: int) -> bytes:
    pieces: list[bytes] = []
    length = 0
    while True:
        secure.settimeout(_left(deadline))
        piece = response.read1(PIECE)
        if not piece:
            return b"".join(pieces)
        length += len(piece)
        if length > max_bytes:
            raise ImageAddressError(f"lead to an image of at most {max_bytes} bytes (--max-image-bytes)")
        pieces.append(piece)


def _left(deadline: float) -> float:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise ImageAddressError("be an address that answers in time (--image-timeout)")
    return seconds
