"""The pictures of a request as pixels: fetched and decoded one after the other, in turns with those of other clients.

loader = ImageLoader(settings)
images = await loader.load(urls, client)         # PIL images in RGB; raises BadRequest
loader.close()
"""

from __future__ import annotations

import base64
import fcntl
import json
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from fa_serve.sandbox.trials import Trial, TrialError, TrialLimits, Trials

from ..bounds.deadline_thread import DeadlineThread
from ..errors import BadRequest
from ..settings import Settings
from . import decode_process
from .addresses import ImageAddressError, Remote, read_address
from .fetching import FetchLimits, fetch

FIELD = "messages"
PIXEL = 4  # bytes
PIECE = 3 << 18  # bytes that are written in base64 at once: the interpreter is held for a millisecond


class ImageLoader:
    """Two threads: one waits for other people's servers, the other one for the process that decodes."""

    def __init__(self, settings: Settings):
        self._fetching = DeadlineThread("images of other hosts")
        self._decoding = DeadlineThread("images")
        self._max_images = settings.max_images
        self._max_bytes = settings.max_image_bytes
        self._max_pixels = settings.max_image_pixels
        self._limits = FetchLimits(
            tuple(host.lower() for host in settings.image_hosts), settings.max_image_bytes, settings.image_timeout
        )
        self._trial_limits = TrialLimits("be decoded", settings.image_timeout, settings.image_memory, "image")

    @cached_property
    def _trials(self) -> Trials:
        return Trials(decode_process.__file__, {"max_pixels": self._max_pixels}, self._trial_limits)

    def close(self) -> None:
        """End the process that decodes."""
        if "_trials" in vars(self):
            self._trials.close()

    async def load(self, urls: Sequence[str], client: str | None) -> list[Any]:
        """The number of images is checked before anything is done with them."""
        if len(urls) > self._max_images:
            message = f"A request may have at most {self._max_images} images (--max-images), got {len(urls)}."
            raise BadRequest(message, param=FIELD, code="invalid_value")
        return [await self._load(url, client) for url in urls]

    async def _load(self, url: str, client: str | None) -> Any:
        try:
            found = await self._decoding.run(lambda: read_address(url, self._max_bytes), client)
            if isinstance(found, Remote):
                remote = found
                data: bytes | memoryview = await self._fetching.run(lambda: _base64_of(fetch(remote, self._limits)), client)
            else:
                data = found
            trial = self._trials.trial()
            return await self._decoding.run(lambda: decode(data, self._max_pixels, trial), client, cancel=trial.cancel)
        except (ImageAddressError, TrialError) as error:
            raise BadRequest(f"image_url must {error}.", param=FIELD, code="invalid_value") from None


def decode(data: bytes | memoryview, max_pixels: int, trial: Trial) -> Any:
    """A PIL image of an untrusted file. Raises ImageAddressError for one that is refused, and what `Trial.run` raises.

    The process writes pixels into memory that both share. A reply of 64 MB in base64 would hold the interpreter for a quarter
    of a second, in single calls that nothing can interrupt.

    data: in base64
    """
    from PIL import Image

    with _shared_memory(PIXEL * max_pixels) as file:
        told = json.loads(trial.run(data, file))
        if "error" in told:
            raise ImageAddressError(told["error"])
        size = (told["width"], told["height"])
        mapped: Any = mmap.mmap(file, PIXEL * size[0] * size[1], access=mmap.ACCESS_READ)
        # Pillow lays RGB out in four bytes as well, so this copies rows, and lets others run meanwhile
        return Image.frombuffer("RGBX", size, mapped, "raw", "RGBX", 0, 1).convert("RGB")


@contextmanager
def _shared_memory(size: int) -> Iterator[int]:
    """A file without a name, of which memory is taken only where it is written. No process can change its size."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("image", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        with tempfile.TemporaryFile() as named:
            file = os.dup(named.fileno())
    try:
        os.ftruncate(file, size)
        if hasattr(os, "memfd_create"):
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        yield file
    finally:
        os.close(file)


def _base64_of(data: bytes) -> bytes:
    return b"".join(base64.b64encode(data[begin : begin + PIECE]) for begin in range(0, len(data), PIECE))
