"""Reads the address of an image: a data URI that holds its bytes, or an https address.

picture = read_address(url, max_bytes=20 << 20)        # base64, or a Remote
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import urlsplit

from .decode_process import BROKEN_BASE64

MEDIA_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
OTHER_NAMES = {"image/jpg": "image/jpeg"}
"""Unregistered media types that clients send, and the registered ones that they stand for."""
MAX_REPEATED = 80
"""Characters of an address that an error repeats."""
MAX_HEAD = 512
"""The most characters of a data URI before its data. Parameters of the media type, such as a name, are allowed and ignored."""
_DATA = re.compile(r"data:([^;,]*)(?:;[^;,]*)*;base64,", re.IGNORECASE)


class RequestImage(NamedTuple):
    """place: the request's field that holds the url, as errors name it; is_of_tool: whether the image is in a tool result"""

    url: str
    place: str
    is_of_tool: bool = False


class ImageAddressError(ValueError):
    """An image or its address is refused. The text completes the sentence "<field> must ..."."""


class Remote(NamedTuple):
    """An https address. host: the host name in lower case; target: path and query"""

    host: str
    target: str


def read_address(url: str, max_bytes: int) -> memoryview | Remote:
    """The base64 of a data URI, or the https address of the image. Raises ImageAddressError.

    The base64 is one line of ASCII that has not been validated. Decoding it would hold the interpreter for milliseconds per
    megabyte, so the process that decodes the image does it.
    """
    url = url.strip()  # URL parsers ignore spaces around a URL
    if url[:5].lower() == "data:":
        return _data_of(url, max_bytes)
    return read_remote(url)


def read_remote(url: str, is_redirect: bool = False) -> Remote:
    """Split an address into host and target. Raises ImageAddressError unless it is https, with a plain host name and port 443.

    is_redirect: the address is from a redirect, and the client may have no right to know it. An error repeats only its scheme
    """

    def got(value: object) -> str:
        return "" if is_redirect else f", got {value}"

    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        shown = url.rpartition("@")[2][:MAX_REPEATED]  # the text before the @ may hold a password
        raise ImageAddressError(f"be a data URI or a valid https address{got(repr(shown))}") from None
    if parts.scheme != "https":
        raise ImageAddressError(f"be a data URI or an https address, got the scheme {parts.scheme[:20]!r}")
    if parts.username is not None or parts.password is not None:
        raise ImageAddressError(f"have no user name, and no port other than 443{got('a user name')}")
    if port not in (None, 443):
        raise ImageAddressError(f"have no user name, and no port other than 443{got(f'the port {port}')}")
    host = parts.hostname or ""
    if not is_host(host):
        raise ImageAddressError(f"name a host with only letters, digits, dots and hyphens{got(repr(host[:MAX_REPEATED]))}")
    target = parts.path or "/"
    target += f"?{parts.query}" if parts.query else ""
    if not target.isascii() or not target.isprintable() or " " in target:
        shown = repr(target[:MAX_REPEATED])
        raise ImageAddressError(f"have a path in ASCII, with %-escapes for other characters{got(shown)}")
    return Remote(host, target)


def is_host(name: str) -> bool:
    """Whether this is a host name as an address may have it: lower case, without a port."""
    return re.fullmatch(r"[a-z0-9.-]{1,253}", name) is not None


def media_type_of(text: str) -> str:
    """The registered name of a media type. Its case and its parameters are ignored."""
    name = text.partition(";")[0].strip().lower()
    return OTHER_NAMES.get(name, name)


def _data_of(url: str, max_bytes: int) -> memoryview:
    found = _DATA.match(url[:MAX_HEAD])
    if found is None or media_type_of(found[1]) not in MEDIA_TYPES:
        given = url[:MAX_HEAD].partition(",")[0][:MAX_REPEATED]
        raise ImageAddressError(f"be a base64 data URI of one of these types: {', '.join(MEDIA_TYPES)}, got {given!r}")
    length = len(url) - found.end()
    if length * 3 // 4 > max_bytes + 2:
        raise ImageAddressError(f"hold at most {max_bytes} bytes (--max-image-bytes), got about {length * 3 // 4}")
    if "\n" in url or not url.isascii():
        raise ImageAddressError(BROKEN_BASE64)
    return memoryview(url.encode("ascii"))[found.end() :]
