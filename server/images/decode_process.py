"""Decodes an image, in a process of fa_serve/sandbox, which loads this file alone.

A picture of 10 kB can have 10^9 pixels, and decoders are written in C. So the size is read from the header first, and the
process has limits of memory and time: whatever a file does to it, the server goes on.
"""

import base64
import io
import json
import warnings
from collections.abc import Callable
from typing import Any

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_RATIO = 200  # of the longer side to the shorter one: processors refuse or blow up what is longer


def prepare(given: dict[str, Any]) -> Callable[[bytes], bytes]:
    """The function takes the bytes of a file in base64, and returns a line: JSON, a tab, and base64 of RGB.

    given: max_pixels
    The JSON has the size, or an error that completes the sentence "image_url must ...".
    """
    from PIL import Image, ImageOps

    Image.init()
    max_pixels = given["max_pixels"]
    Image.MAX_IMAGE_PIXELS = None  # ours is the limit, which raises no warning

    def refusal(text: str) -> bytes:
        return json.dumps({"error": text}).encode() + b"\t"

    def work(request: bytes) -> bytes:
        data = base64.b64decode(request)
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
        size = {"width": rgb.width, "height": rgb.height}
        return json.dumps(size).encode() + b"\t" + base64.b64encode(rgb.tobytes())

    return work
