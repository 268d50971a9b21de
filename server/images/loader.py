"""The pictures of a request as the model's towers take them: fetched, decoded and processed one after the other, in turns with
those of other clients. A picture whose file came before is neither decoded nor processed again (kept_images.py).

loader = ImageLoader(settings, config_of_engine)
loader.start()                                   # in the background; without it, the first picture waits for seconds
images = await loader.load(found, client, salt)  # processed images; raises BadRequest, and Unavailable if no process works
loader.close()

found: `RequestImage`s, whose place in the request is what an error names.

Without a model, or with one whose processor cannot be loaded by the process that decodes, they are PIL images in RGB. The
caller processes these, which holds the interpreter for tens of milliseconds at a time.
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
PIXEL = 4  # bytes
MAX_PROCESSES = 8  # by default: the process that they are forked from makes some tens a second
MAX_FETCHES = 16  # images of other hosts that are fetched at the same time
MAX_FETCHES_OF_HOST = 3  # of these, from one host: five hosts that do not answer leave a thread to others
PIECE = 3 << 18  # bytes that are written in base64 at once: the interpreter is held for a millisecond


class ImageLoader:
    """Threads: one reads addresses and hashes files, some wait for other people's servers, and the others wait for processes
    that decode and process pictures.

    config: tells the settings of the engine once it is loaded; without it there is no model whose processor could run
    """

    def __init__(self, settings: Settings, config: Callable[[], EngineConfig] | None = None):
        self._config = config
        self._reading = DeadlineThread("addresses of images")
        self._fetching = DeadlineThread("images of other hosts", MAX_FETCHES, MAX_FETCHES_OF_HOST)
        self._num_processes = settings.image_processes or _default_processes()
        self._decoding = DeadlineThread("images", self._num_processes)
        # no two requests share anything then
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
        """Start the process in the background, if requests may have images."""
        if self._max_images:
            threading.Thread(target=_start, args=[self._trials], name="start of images", daemon=True).start()

    def close(self) -> None:
        """End the process."""
        if "_trials" in vars(self):
            self._trials.close()

    async def load(self, images: Sequence[RequestImage], client: str | None, salt: str | None = None) -> list[Any]:
        """The number of images is checked before anything is done with them.

        salt: requests of the same salt share what is made of a file (bounds/isolation.py)
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
        """The file in base64. A resolver that does not answer holds its thread for longer than this waits for it."""
        limits = self._limits
        lane = remote.host if remote.host in limits.hosts else None  # others are refused at once
        try:
            return await self._fetching.run(
                lambda: _base64_of(fetch(remote, limits)), client, timeout=limits.timeout, lane=lane
            )
        except asyncio.TimeoutError:  # python 3.10 has two kinds
            raise limits.too_late() from None

    def _decode(self, data: bytes | memoryview, key: bytes, trial: Trial) -> Any:
        image, reason = decode(data, self._max_result, trial, key)
        if reason and not self._has_warned:
            self._has_warned = True
            log.warning(
                "pictures are processed in the server's own process, where other requests wait for them, because the process "
                "that decodes them cannot load the model's processor: %s",
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
        log.warning("requests with images get a 503 until the first of them has started the process that decodes: %s", error)


def decode(data: bytes | memoryview, max_result: int, trial: Trial, key: bytes = b"") -> tuple[Any, str]:
    """What the process makes of an untrusted file: a processed image, or a PIL image and why it is not processed.

    The process writes tensors or pixels into memory that both share, at most `max_result` bytes. A reply of 64 MB in base64
    would hold the interpreter for a quarter of a second, in single calls that nothing can interrupt.

    data: in base64; key: of the processed image

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
        # Pillow lays RGB out in four bytes as well, so this copies rows, and lets others run meanwhile
        return Image.frombuffer("RGBX", size, mapped, "raw", "RGBX", 0, 1).convert("RGB"), told["reason"]


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
