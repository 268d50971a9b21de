"""What the address of an image says: a data URI with its bytes, or the https address of a host.

picture = read_address(url, max_bytes=20 << 20)        # base64, or a Remote
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import urlsplit

from .decode_process import BROKEN_BASE64

MEDIA_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
OTHER_NAMES = {"image/jpg": "image/jpeg"}
"""Media types that are not registered, and that clients send."""
MAX_REPEATED = 80
"""Characters of an address that an error repeats."""
MAX_HEAD = 512
"""Characters of a data URI before its data: parameters of the media type, such as a name, have no effect."""
_DATA = re.compile(r"data:([^;,]*)(?:;[^;,]*)*;base64,", re.IGNORECASE)


class RequestImage(NamedTuple):
    """place: of the field with the url in the request, as errors name it; is_of_tool: whether it is in a result of a tool"""

    url: str
    place: str
    is_of_tool: bool = False


class ImageAddressError(ValueError):
    """Why the address of an image is refused. The text completes the sentence "<field> must ..."."""


class Remote(NamedTuple):
    """An https address. host: in lower case, as it is looked up; target: path and query"""

    host: str
    target: str


def read_address(url: str, max_bytes: int) -> memoryview | Remote:
    """The base64 of a data URI, or where the image lies. Raises ImageAddressError.

    The base64 is one line of ASCII, and not known to be right: reading it holds the interpreter for milliseconds a megabyte, so
    the process that decodes does it.
    """
    url = url.strip()  # as URLs are read
    if url[:5].lower() == "data:":
        return _data_of(url, max_bytes)
    return read_remote(url)


def read_remote(url: str, is_redirect: bool = False) -> Remote:
    """Raises ImageAddressError for anything but an https address with a plain host name and the usual port.

    is_redirect: the client has not written it, and may have no right to know it: no error repeats more of it than the scheme
    """

    def got(value: object) -> str:
        return "" if is_redirect else f", got {value}"

    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        shown = url.rpartition("@")[2][:MAX_REPEATED]  # what stands before may be a password
        raise ImageAddressError(f"be a data URI or an https address that can be read{got(repr(shown))}") from None
    if parts.scheme != "https":
        raise ImageAddressError(f"be a data URI or an https address, got one of the scheme {parts.scheme[:20]!r}")
    if parts.username is not None or parts.password is not None:
        raise ImageAddressError(f"have neither a user name nor another port than 443{got('a user name')}")
    if port not in (None, 443):
        raise ImageAddressError(f"have neither a user name nor another port than 443{got(f'the port {port}')}")
    host = parts.hostname or ""
    if not is_host(host):
        raise ImageAddressError(f"name a host in letters, digits, dots and hyphens{got(repr(host[:MAX_REPEATED]))}")
    target = parts.path or "/"
    target += f"?{parts.query}" if parts.query else ""
    if not target.isascii() or not target.isprintable() or " " in target:
        shown = repr(target[:MAX_REPEATED])
        raise ImageAddressError(f"have a path that is written in ASCII, with %-escapes for other characters{got(shown)}")
    return Remote(host, target)


def is_host(name: str) -> bool:
    """Whether an address can name this host: in lower case, without a port."""
    return re.fullmatch(r"[a-z0-9.-]{1,253}", name) is not None


def media_type_of(text: str) -> str:
    """The registered name of a media type, whose case and parameters say nothing."""
    name = text.partition(";")[0].strip().lower()
    return OTHER_NAMES.get(name, name)


def _data_of(url: str, max_bytes: int) -> memoryview:
    found = _DATA.match(url[:MAX_HEAD])
    if found is None or media_type_of(found[1]) not in MEDIA_TYPES:
        given = url[:MAX_HEAD].partition(",")[0][:MAX_REPEATED]
        raise ImageAddressError(f"be a data URI with base64 of one of these types: {', '.join(MEDIA_TYPES)}, got {given!r}")
    length = len(url) - found.end()
    if length * 3 // 4 > max_bytes + 2:
        raise ImageAddressError(f"hold at most {max_bytes} bytes (--max-image-bytes), got about {length * 3 // 4}")
    if "\n" in url or not url.isascii():
        raise ImageAddressError(BROKEN_BASE64)
    return memoryview(url.encode("ascii"))[found.end() :]
