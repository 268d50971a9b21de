"""Image files that a hostile client sends, and pictures as large as the defaults allow.

name, (url, count) in FILES.items()       # a request has the image so many times
"""

from __future__ import annotations

import base64
import io
import struct
import zlib

from image_models import picture, png


def uri(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def bomb(width: int, height: int) -> bytes:
    """A PNG of one colour whose rows are compressed to a thousandth."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    rows = zlib.compress(bytes((width // 8 + 1) * height), 9)
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def animated(form: str, frames: int = 3) -> bytes:
    file = io.BytesIO()
    pictures = [picture(seed) for seed in range(frames)]
    pictures[0].save(file, form, save_all=True, append_images=pictures[1:])
    return file.getvalue()


FILES = {
    "bombs": (uri(bomb(30_000, 30_000)), 16),
    "10,000 x 1": (uri(bomb(10_000, 1)), 16),
    "truncated": (uri(png(picture(1, 400, 400))[:-2000]), 16),
    "truncated JPEG": (uri(png(picture(1, 400, 400), "JPEG")[:-2000], "jpeg"), 16),
    "SVG": (uri(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), 16),
    "animated": (uri(animated("GIF", 30), "gif"), 16),
    "1,000 data URIs": (uri(png(picture(1))), 1000),
    "a host of the operator's network": ("https://127.0.0.1/latest/meta-data", 1),
}
"""All of them are refused."""
