"""Decodes an image and processes it for the model's towers, in a process of fa_serve/sandbox that loads only this file.

A picture of 10 kB can have 10^9 pixels, and decoders are written in C. So the size is read from the header first, and the
process has limits of memory and time: whatever a file does to the process, the server goes on. The model's processor, which
resizes and normalises pixels, would hold the interpreter of the server for tens of milliseconds at a time, so it runs here too.

If the model's processor cannot be loaded here, the process returns the decoded pixels and the reason.

torch has no type of error for a lack of memory on the CPU, but it reports the event to its profiler. So an image that the
processor refuses is processed a second time, under the profiler, to find out whether memory was the cause.
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
BROKEN_BASE64 = "have complete base64 without invalid characters"  # completes "image_url must ..."
MAX_RATIO = 200  # of the longer side to the shorter one, at most: processors refuse longer pictures, or blow them up


STRIP = 1 << 20  # pixels that are written to the file at once


class Refused(Exception):
    """The image is refused. The text completes the sentence "image_url must ..."."""


def prepare(given: dict[str, Any]) -> Callable[[bytes, int], bytes]:
    """Make the function that decodes and processes one image.

    The function takes the image file in base64, and the descriptor of a file to which it writes the result. It returns JSON:

    - the fields that `ProcessedImage.read` needs, if the processor has run; the file then holds the tensors;
    - `error`, which completes the sentence "image_url must ...", if the image is refused;
    - `rule` and `value` of the ParameterError, if the processor refuses the image;
    - `width`, `height` and `reason` without a processor. `reason` says why it could not be loaded, or is "" if none was given.
      The file then holds pixels of four bytes: red, green, blue and an unused byte.

    It raises MemoryError.

    given: `max_pixels`, and `processor`, which is None or holds `path` and `trust_remote_code` of the model's processor
    """
    from PIL import Image

    Image.init()
    Image.MAX_IMAGE_PIXELS = None  # _check_header applies our own limit, without Pillow's warning
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
    """A function that processes an image and writes the result to a file, and ""; or None and why it cannot be loaded."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # forked children could not use a GPU that this process had opened
    os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler would write lines to the server's log
    try:
        import torch
        from PIL import Image

        from fa_serve.engine.images.processed import PixelProcessor
        from fa_serve.spec import ParameterError

        torch.set_num_threads(1)  # forked children inherit none of the threads of this process
        processor = PixelProcessor.of_model(given["path"], trust_remote_code=given["trust_remote_code"])
        with contextlib.suppress(ParameterError):  # loads here what the first use loads, so that no child has to load it
            processor.process(Image.new("RGB", (64, 64)))
    except Exception as error:  # the code of a processor may raise anything
        return None, f"{type(error).__name__}: {error}"

    def process(image: Any, file: int) -> dict[str, Any]:
        try:
            return processor.process(image).write(file)
        except ParameterError as error:
            told = {"rule": error.rule, "value": error.value}
        # after the handler, because its error keeps the memory of the first attempt alive
        if _lacks_memory(lambda: processor.process(image)):
            raise MemoryError
        return told

    return process, ""


def _lacks_memory(work: Callable[[], Any]) -> bool:
    """Whether torch runs out of memory in this work. Raises MemoryError if another library does."""
    from torch.autograd.profiler import profile
    from torch.autograd.profiler_util import OUT_OF_MEMORY_EVENT_NAME

    from fa_serve.spec import ParameterError

    with profile(profile_memory=True) as seen, contextlib.suppress(ParameterError):  # the caller reports the first one
        work()
    events: Any = seen.kineto_results
    return any(event.name() == OUT_OF_MEMORY_EVENT_NAME for event in events.events())


def _decode(request: bytes, max_pixels: int) -> Any:
    """Decode a file in base64 into a PIL image in RGB. Raises Refused."""
    from PIL import Image, ImageOps

    try:
        data = base64.b64decode(request.rstrip(b"\n"), validate=True)
    except binascii.Error:
        raise Refused(BROKEN_BASE64) from None
    if not data:
        raise Refused("hold an image, got no bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns about palettes with transparency and damaged EXIF, and goes on
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                _check_header(image, max_pixels)
                image.load()
                return ImageOps.exif_transpose(image).convert("RGB")
    except (Refused, MemoryError):
        raise
    except Exception as error:  # a decoder may raise anything for an untrusted file
        raise Refused(f"be a complete PNG, JPEG, WebP or GIF ({type(error).__name__})") from None


def _check_header(image: Any, max_pixels: int) -> None:
    width, height = image.size
    if width * height > max_pixels:
        raise Refused(f"have at most {max_pixels} pixels (--max-image-pixels), got {width} x {height}")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise Refused(f"have a longer side of at most {MAX_RATIO} times the shorter one, got {width} x {height}")
    # the first picture of a camera's MPO is a JPEG; the others are previews of it or views from another lens
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
