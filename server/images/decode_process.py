"""Decodes an image and processes it for the model's towers, in a process of fa_serve/sandbox, which loads this file alone.

A picture of 10 kB can have 10^9 pixels, and decoders are written in C. So the size is read from the header first, and the
process has limits of memory and time: whatever a file does to it, the server goes on. The model's processor, which resizes and
normalises pixels, would hold the interpreter of the server for tens of milliseconds at a time, so it runs here as well.

A processor that cannot be loaded here gets no pixels: they are what comes of the image then, and why is told with them.

torch says by no type of error that it has no memory, but it tells its profiler. So an image that the processor refuses is
processed once more, with the profiler.
"""

import base64
import binascii
import contextlib
import io
import json
import os
import warnings
from collections.abc import Callable
from typing import Any

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
BROKEN_BASE64 = "have base64 that is complete and without other characters"  # of a data URI, or without one
MAX_RATIO = 200  # of the longer side to the shorter one: processors refuse or blow up what is longer


STRIP = 1 << 20  # pixels that are written at once


class Refused(Exception):
    """The image is refused. The text completes the sentence "image_url must ..."."""


def prepare(given: dict[str, Any]) -> Callable[[bytes, int], bytes]:
    """The function takes the bytes of a file in base64, and a descriptor of a file to which it writes what it makes of them.

    It returns JSON: what `ProcessedImage.read` needs; or, for an image that is refused, an error that completes the sentence
    "image_url must ...", or the rule for images that the processor has. Without a processor it returns the size, and why there
    is no processor, and the file has pixels of four bytes: red, green, blue and nothing. It raises MemoryError.

    given: max_pixels; processor: None, or `path` and `trust_remote_code` of the model's
    """
    from PIL import Image

    Image.init()
    Image.MAX_IMAGE_PIXELS = None  # ours is the limit, which raises no warning
    max_pixels = given["max_pixels"]
    process, reason = _load_processor(given["processor"]) if given["processor"] else (None, "")

    def work(request: bytes, file: int) -> bytes:
        try:
            image = _decode(request, max_pixels)
        except Refused as error:
            told = {"error": str(error)}
        else:
            told = process(image, file) if process else _write_pixels(image, file) | {"reason": reason}
        return json.dumps(told).encode()

    return work


def _load_processor(given: dict[str, Any]) -> tuple[Callable[[Any, int], dict[str, Any]] | None, str]:
    """What processes an image and writes the result to a file; or None, and the reason."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # its children could not use what this process had opened
    os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler would write lines to the server's log
    try:
        import torch
        from PIL import Image

        from fa_serve.engine.images.processed import PixelProcessor
        from fa_serve.spec import ParameterError

        torch.set_num_threads(1)  # children have none of the threads of this process
        processor = PixelProcessor.of_model(given["path"], trust_remote_code=given["trust_remote_code"])
        with contextlib.suppress(ParameterError):  # what is loaded at first use is not loaded again by each child
            processor.process(Image.new("RGB", (64, 64)))
    except Exception as error:  # whatever the code of a processor can raise
        return None, f"{type(error).__name__}: {error}"

    def process(image: Any, file: int) -> dict[str, Any]:
        try:
            return processor.process(image).write(file)
        except ParameterError as error:
            told = {"rule": error.rule, "value": error.value}
        # outside of the handler, whose error keeps the memory of the work
        if _lacks_memory(lambda: processor.process(image)):
            raise MemoryError
        return told

    return process, ""


def _lacks_memory(work: Callable[[], Any]) -> bool:
    """Whether torch gets no memory in this work. Raises MemoryError where others get none."""
    from torch.autograd.profiler import profile
    from torch.autograd.profiler_util import OUT_OF_MEMORY_EVENT_NAME

    from fa_serve.spec import ParameterError

    with profile(profile_memory=True) as seen, contextlib.suppress(ParameterError):  # the first one is told
        work()
    events: Any = seen.kineto_results
    return any(event.name() == OUT_OF_MEMORY_EVENT_NAME for event in events.events())


def _decode(request: bytes, max_pixels: int) -> Any:
    """An image of PIL in RGB. Raises Refused."""
    from PIL import Image, ImageOps

    try:
        data = base64.b64decode(request.rstrip(b"\n"), validate=True)
    except binascii.Error:
        raise Refused(BROKEN_BASE64) from None
    if not data:
        raise Refused("hold an image, got no bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of palettes with transparency and of spoilt EXIF, and goes on
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                _check_header(image, max_pixels)
                image.load()
                return ImageOps.exif_transpose(image).convert("RGB")
    except (Refused, MemoryError):
        raise
    except Exception as error:  # whatever a decoder raises for a file of a stranger
        raise Refused(f"be a complete PNG, JPEG, WebP or GIF ({type(error).__name__})") from None


def _check_header(image: Any, max_pixels: int) -> None:
    width, height = image.size
    if width * height > max_pixels:
        raise Refused(f"have at most {max_pixels} pixels (--max-image-pixels), got {width} x {height}")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise Refused(f"have sides of which one is at most {MAX_RATIO} times the other, got {width} x {height}")
    # the first picture of a camera's MPO is a JPEG, and those behind it are previews of it or seen by another eye
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise Refused("be a single picture, got an animated one")


def _write_pixels(image: Any, file: int) -> dict[str, Any]:
    rows = max(STRIP // image.width, 1)
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height))).tobytes("raw", "RGBX")
        written = 0
        while written < len(strip):
            written += os.write(file, strip[written:])
    return {"width": image.width, "height": image.height}
