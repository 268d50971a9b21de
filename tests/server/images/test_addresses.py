"""Addresses of images: data URIs as clients write them, and https addresses of hosts."""

from __future__ import annotations

import time

import pytest
from fa_serve.server.images.addresses import ImageAddressError, Remote, media_type_of, read_address, read_remote

PASSWORD = "secret"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://images.example.org/x", "scheme 'ftp'"),
        ("/etc/passwd", "scheme ''"),
        ("file:///etc/passwd", "scheme 'file'"),
        (f"https://user:{PASSWORD}@images.example.org/", "no user name, and no port other than 443, got a user name$"),
        ("https://images.example.org:8443/", "no port other than 443, got the port 8443$"),
        ("https://images.example.org:99999/", "a valid https address, got 'https://images.example.org:99999/'$"),
        (f"https://user:{PASSWORD}@[::1/", r"a valid https address, got '\[::1/'$"),
        ("https://exämple.org/", "name a host with only letters, digits, dots and hyphens, got 'exämple.org'$"),
        (f"https://{'ä' * 200}.org/", "hyphens, got 'ä{80}'$"),
        ("https://images.example.org/a b", "for other characters, got '/a b'$"),
        ("https://images.example.org/\r\nHost: x", "a path in ASCII|a valid https address"),
        ("data:image/svg+xml;base64,PHN2Zz4=", "one of these types"),
        ("data:text/html;base64,PHN2Zz4=", "one of these types"),
        ("data:image/png,abc", "one of these types"),
        ("data:;base64,QUJD", "one of these types"),
        ("data:image/png;base64", "one of these types"),
        ("data:application/octet-stream;base64,QUJD", r"image/gif, got 'data:application/octet-stream;base64'"),
        ("data:image/png;name=" + "x" * 1000 + ";base64,QUJD", "one of these types.*, got 'data:image/png;name=x{60}'"),
        ("data:image/png;base64," + "A" * 200, r"at most 100 bytes \(--max-image-bytes\), got about 150"),
    ],
)
def test_addresses_that_are_refused(url: str, message: str) -> None:
    with pytest.raises(ImageAddressError, match=message) as error:
        read_address(url, max_bytes=100)
    assert PASSWORD not in str(error.value)


@pytest.mark.parametrize(
    "head",
    [
        "data:image/png;base64",
        "DATA:image/png;base64",
        "data:image/PNG;BASE64",
        "data:image/jpg;base64",
        "Data:Image/JPG;charset=utf-8;base64",
        "data:image/webp;charset=utf-8;name=a.webp;base64",
    ],
)
def test_data_uris_that_are_read(head: str) -> None:
    assert read_address(f"{head},QUJD", 100) == b"QUJD"
    assert read_address(f" \n{head},QUJD\n", 100) == b"QUJD", "white space around an address is no part of it"


def test_the_head_of_a_data_uri_is_read_in_no_time() -> None:
    begin = time.thread_time()
    for head in ("data:" + ";" * (1 << 20), "data:image/png" + ";base64" * (1 << 18), "data:image/png" + ";a" * (1 << 20)):
        with pytest.raises(ImageAddressError, match="one of these types"):
            read_address(head, 1 << 30)
    assert time.thread_time() - begin < 0.1


def test_an_address_that_is_read() -> None:
    assert read_remote("https://Images.Example.org/a?b=c#d") == Remote("images.example.org", "/a?b=c")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("image/png", "image/png"),
        ("IMAGE/JPG", "image/jpeg"),
        ("image/webp ;charset=utf-8", "image/webp"),
        ("text/html", "text/html"),
        ("", ""),
    ],
)
def test_names_of_media_types(text: str, name: str) -> None:
    assert media_type_of(text) == name
