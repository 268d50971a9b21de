"""Turns the pictures of a request into inputs of the model's towers. They are fetched, decoded and processed one after another,
and clients take turns. A file that is still kept from an earlier request is neither decoded nor processed again
(kept_images.py).

loader = ImageLoader(settings, config_of_engine)
loader.start()                                   # in the background; without it, the first picture waits for seconds
images = await loader.load(found, client, salt)  # processed images; raises BadRequest, and Unavailable if no process works
loader.close()

found: the `RequestImage`s of a request. An error names the place of an image in the request.

If there is no model, or if the process that decodes cannot load the model's processor, `load` returns PIL images in RGB. The
caller then has to process them, which holds the interpreter for tens of milliseconds at a time.
"""

from __future__ import annotations

import asyncio
import base64
import fcntl
import json
import logging
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from fa_serve.engine import EngineConfig
from fa_serve.engine.images.processed import ProcessedImage
from fa_serve.sandbox.trials import Cancelled, Trial, TrialError, TrialLimits, TrialProcessError, Trials
from fa_serve.spec import ParameterError

from ..bounds.deadline_thread import DeadlineThread
from ..errors import BadRequest, parameter_refused, trials_failed
from ..settings import Settings
from . import decode_process
from .addresses import ImageAddressError, Remote, RequestImage, read_address
from .fetching import FetchLimits, fetch
from .kept_images import KeptImages, key_of_file

log = logging.getLogger("fa_serve.server")
PIXEL = 4  # bytes of a pixel
MAX_PROCESSES = 8  # the most by default: the process from which they are forked makes only some tens of them a second
MAX_FETCHES = 16  # images that are fetched from other hosts at the same time
MAX_FETCHES_OF_HOST = 3  # of these, from one host: with five hosts that do not answer, one thread is left for other hosts
PIECE = 3 << 18  # bytes that are encoded in base64 at once, which holds the interpreter for a millisecond


class ImageLoader:
    """Loads pictures with several threads: one reads addresses and hashes files, some wait for the hosts of images, and the
    others wait for the processes that decode and process pictures.

    config: returns the engine's settings once the engine is loaded; None if there is no model whose processor could run
    """

    def __init__(self, settings: Settings, config: Callable[[], EngineConfig] | None = None):
        self._config = config
        self._reading = DeadlineThread("addresses of images")
        self._fetching = DeadlineThread("images of other hosts", MAX_FETCHES, MAX_FETCHES_OF_HOST)
        self._num_processes = settings.image_processes or _default_processes()
        self._decoding = DeadlineThread("images", self._num_processes)
        # with "none", no two requests share anything
        self._kept = KeptImages(0 if settings.prefix_sharing == "none" else settings.kept_image_bytes)
        self._has_warned = False
        self._max_images = settings.max_images
        self._max_bytes = settings.max_image_bytes
        self._max_pixels = settings.max_image_pixels
        self._limits = FetchLimits(
            tuple(host.lower() for host in settings.image_hosts), settings.max_image_bytes, settings.image_timeout
        )
        verb = "be decoded and processed"
        self._trial_limits = TrialLimits(verb, settings.image_timeout, settings.image_memory, "image")
        self._max_result = max(PIXEL * settings.max_image_pixels, settings.image_memory)

    @cached_property
    def _trials(self) -> Trials:
        processor = None
        if self._config is not None:
            config = self._config()
            processor = {"path": config.model_path(), "trust_remote_code": config.trust_remote_code}
        given = {"max_pixels": self._max_pixels, "processor": processor}
        return Trials(decode_process.__file__, given, self._trial_limits, keep=self._num_processes)

    def start(self) -> None:
        """Start the process that decodes images in the background, if requests may have images."""
        if self._max_images:
            threading.Thread(target=_start, args=[self._trials], name="start of images", daemon=True).start()

    def close(self) -> None:
        """End the process that decodes images."""
        if "_trials" in vars(self):
            self._trials.close()

    async def load(self, images: Sequence[RequestImage], client: str | None, salt: str | None = None) -> list[Any]:
        """Load the images of a request. Their number is checked first.

        salt: only requests with the same salt share the processed image of a file (bounds/isolation.py)
        """
        if len(images) > self._max_images:
            message = f"A request may have at most {self._max_images} images (--max-images), got {len(images)}."
            raise BadRequest(message, param=images[self._max_images].place, code="invalid_value")
        return [await self._load(image, client, salt) for image in images]

    async def _load(self, image: RequestImage, client: str | None, salt: str | None) -> Any:
        try:
            found = await self._reading.run(lambda: read_address(image.url, self._max_bytes), client)
            data = await self._fetch(found, client) if isinstance(found, Remote) else found
            key = await self._reading.run(lambda: key_of_file(data, salt), client)
            kept = self._kept.find(key)
            if kept is not None:
                return kept
            trial = self._trials.trial((client, salt))
            made = await self._decoding.run(lambda: self._decode(data, key, trial), client, trial=trial)
            if isinstance(made, ProcessedImage):
                self._kept.keep(made)
            return made
        except (ImageAddressError, TrialError) as error:
            raise BadRequest(f"{image.place} must {error}.", param=image.place, code="invalid_value") from None
        except (Cancelled, TrialProcessError) as error:
            raise trials_failed(error) from None
        except ParameterError as error:
            raise parameter_refused(error, image.place) from None

    async def _fetch(self, remote: Remote, client: str | None) -> bytes | memoryview:
        """Fetch a file, in base64. A resolver that does not answer may hold its thread for longer than this method waits."""
        limits = self._limits
        lane = remote.host if remote.host in limits.hosts else None  # `fetch` refuses other hosts at once
        try:
            return await self._fetching.run(
                lambda: _base64_of(fetch(remote, limits)), client, timeout=limits.timeout, lane=lane
            )
        except asyncio.TimeoutError:  # in Python 3.10, this is not the built-in TimeoutError
            raise limits.too_late() from None

    def _decode(self, data: bytes | memoryview, key: bytes, trial: Trial) -> Any:
        image, reason = decode(data, self._max_result, trial, key)
        if reason and not self._has_warned:
            self._has_warned = True
            log.warning(
                "images are processed in the server's own process, which delays other requests, because the process that "
                "decodes images cannot load the model's processor: %s",
                reason,
            )
        return image


def _default_processes() -> int:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(usable // 4, 1), MAX_PROCESSES)


def _start(trials: Trials) -> None:
    try:
        trials.start()
    except Cancelled:
        pass
    except TrialProcessError as error:
        log.warning("the image decoder has not started; requests with images get a 503 until one of them starts it: %s", error)


def decode(data: bytes | memoryview, max_result: int, trial: Trial, key: bytes = b"") -> tuple[Any, str]:
    """Let a process decode an untrusted file. Returns a processed image and "", or a PIL image and why it is not processed.

    The process writes the tensors or pixels into memory that it shares with the server, at most `max_result` bytes. A reply of
    64 MB in base64 would hold the interpreter for a quarter of a second, in single calls that nothing can interrupt.

    data: the file in base64; key: the key of the processed image

    Raises ImageAddressError for a file that is refused, ParameterError for an image that the model's processor refuses, and
    what `Trial.run` raises.
    """
    from PIL import Image

    with _shared_memory(max_result) as file:
        told = json.loads(trial.run(data, file))
        if "error" in told:
            raise ImageAddressError(told["error"])
        if "rule" in told:
            raise ParameterError("images", told["rule"], told["value"])
        if "inputs" in told:
            return ProcessedImage.read(told, file, key), ""
        size = (told["width"], told["height"])
        mapped: Any = mmap.mmap(file, PIXEL * size[0] * size[1], access=mmap.ACCESS_READ)
        # Pillow also stores RGB in four bytes per pixel, so this only copies rows, and other threads can run meanwhile
        return Image.frombuffer("RGBX", size, mapped, "raw", "RGBX", 0, 1).convert("RGB"), told["reason"]


@contextmanager
def _shared_memory(size: int) -> Iterator[int]:
    """An unnamed file that takes memory only where it has been written. With memfd, no process can change its size."""
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
