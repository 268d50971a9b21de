"""Decodes an image, in a process of fa_serve/sandbox, which loads this file alone.

A picture of 10 kB can have 10^9 pixels, and decoders are written in C. So the size is read from the header first, and the
process has limits of memory and time: whatever a file does to it, the server goes on.
"""

import base64
import binascii
import io
import json
import os
import warnings
from collections.abc import Callable
from typing import Any

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_RATIO = 200  # of the longer side to the shorter one: processors refuse or blow up what is longer


STRIP = 1 << 20  # pixels that are written at once


def prepare(given: dict[str, Any]) -> Callable[[bytes, int], bytes]:
    """The function takes the bytes of a file in base64, and a descriptor of a file to which it writes pixels of four bytes:
    red, green, blue and nothing. It returns JSON with the size, or an error that completes the sentence "image_url must ...".

    given: max_pixels
    """
    from PIL import Image, ImageOps

    Image.init()
    max_pixels = given["max_pixels"]
    Image.MAX_IMAGE_PIXELS = None  # ours is the limit, which raises no warning

    def refusal(text: str) -> bytes:
        return json.dumps({"error": text}).encode()

    def work(request: bytes, pixels: int) -> bytes:
        try:
            data = base64.b64decode(request.rstrip(b"\n"), validate=True)
        except binascii.Error:
            return refusal("be a data URI whose base64 is complete and without other characters")
        if not data:
            return refusal("hold an image, got no bytes")
        warnings.simplefilter("error")
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
                if width * height > max_pixels:
                    return refusal(f"have at most {max_pixels} pixels (--max-image-pixels), got {width} x {height}")
                if max(width, height) > MAX_RATIO * min(width, height):
                    return refusal(f"have sides of which one is at most {MAX_RATIO} times the other, got {width} x {height}")
                if getattr(image, "is_animated", False):
                    return refusal("be a single picture, got an animated one")
                image.load()
                rgb = ImageOps.exif_transpose(image).convert("RGB")
        except MemoryError:
            raise
        except Exception as error:  # whatever a decoder raises for a file of a stranger
            return refusal(f"be a complete PNG, JPEG, WebP or GIF ({type(error).__name__})")
        rows = max(STRIP // rgb.width, 1)
        for top in range(0, rgb.height, rows):
            strip = rgb.crop((0, top, rgb.width, min(top + rows, rgb.height))).tobytes("raw", "RGBX")
            written = 0
            while written < len(strip):
                written += os.write(pixels, strip[written:])
        return json.dumps({"width": rgb.width, "height": rgb.height}).encode()

    return work
