"""The cache of image embeddings, by content and within a budget of bytes; it encodes images and gives each step what it needs.

    encoder = ImageEncoder(reader, max_bytes=2 << 30)
    encoder.advance(TowerWork(images, 200, 200))       # part of the way through the towers, as a step has time for it
    images = encoder.step(pieces, input_ids) # what a step needs, encoded now if it is not in the cache -> StepImages

The scheduler decides which images are encoded and when (scheduler/tower_queue.py), and holds the images that sequences wait
for. Requests keep the inputs that their processor has made, so an evicted image is encoded again when a later chunk needs it.
The images of a step are encoded together, across requests, if their inputs can be joined.

Work that a step does not finish pauses after a layer of the towers (paused_call.py). With several ranks, only rank 0 encodes,
and all ranks keep the same embeddings (rank_features.py).

The towers have their own stream. A model's code reads image sizes back from the GPU several times per image, and each read
waits for everything queued earlier on the same stream. On the main stream that would be the previous step, and the host could
not launch the next step while it runs.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fa_serve.engine.config import EngineConfig
from fa_serve.engine.images import tower_graphs
from fa_serve.engine.images.paused_call import PausedCall
from fa_serve.engine.images.prompt import (
    ImageInput,
    ImagePiece,
    PromptImages,
    content_of,
    content_of_prefix,
    find_places,
    rows_of,
    runs_of,
)
from fa_serve.engine.images.rank_features import Made, share_features
from fa_serve.engine.images.tower_graphs import TowerGraphs
from fa_serve.engine.images.tower_time import Stopwatch
from fa_serve.engine.parallel.ranks import Alone, Ranks
from fa_serve.engine.scheduler.prompt_share import MAX_IMAGE_TOKENS
from fa_serve.engine.scheduler.scheduled_batch import TowerWork
from fa_serve.hf.images import ImageFeatures, ImageReader, StepImages, TwoWay
from fa_serve.spec import ParameterError, UnsupportedModelError

log = logging.getLogger("fa_serve.engine")


class ImageEncoder:
    """Owner of the embeddings.

    max_bytes:      budget of the cache. Images that sequences wait for are kept even if they exceed it
    refuses_blocks: why images whose tokens attend both ways are refused; empty if they are not refused
    graphs:         CUDA graphs of the towers' layers; None launches the kernels one by one
    """

    def __init__(
        self, reader: ImageReader, max_bytes: int, refuses_blocks: str = "", graphs: TowerGraphs | None = None
    ) -> None:
        self.reader = reader
        self.graphs = graphs
        self.refuses_blocks = refuses_blocks
        self.ranks: Ranks = Alone(reader.device)
        self.max_bytes = max_bytes
        self._bytes_per_token = reader.bytes_per_token  # of the newest image, so that all ranks have the same value
        self.num_bytes = 0
        self.num_encoded = 0
        self._two_way: TwoWay | None = None
        self._features: OrderedDict[bytes, ImageFeatures] = OrderedDict()  # the least recently used first
        self._held: set[bytes] = set()
        self._call: PausedCall[Made] | None = None
        self._is_busy = False
        self._num_pauses = max(len(reader.blocks), 1)  # of one encoding, without the copy; a guess before the first one
        self._num_asked = 0  # embeddings of the images on their way that steps have had time for so far
        self._stream = _new_stream(reader.device)
        self._has_new_weights = True

    @property
    def capacity(self) -> int:
        """How many embeddings the cache has room for."""
        return self.max_bytes // self._bytes_per_token

    @property
    def is_busy(self) -> bool:
        """Whether images are on their way through the towers."""
        return self._is_busy

    def join(self, ranks: Ranks) -> None:
        """Share embeddings with these ranks, so that all of them keep the same. Call this before the first image arrives."""
        self.ranks = ranks
        if ranks.rank:
            self.graphs = None

    @property
    def has_blocks(self) -> bool:
        """Whether images are known to have tokens that attend to each other both ways."""
        return self._two_way not in (None, "none") and not self.refuses_blocks

    @torch.inference_mode()
    def warm_up(self, images: Sequence[Mapping[str, Tensor]]) -> None:
        """Encode images only to compile kernels and capture graphs. Keeps what it learns about the model, but no embeddings."""
        self._await_weights()
        for _ in range(1 if self.graphs is None else 2):  # a graph is captured at the second call
            with self._encoding():
                self._two_way = self.reader.encode_all(images)[0].two_way

    def replaying(self) -> AbstractContextManager[None]:
        """Inside this context, forwards of this thread replay the graphs of the towers' layers, if there are graphs."""
        return nullcontext() if self.graphs is None else self.graphs.replaying()

    def is_encoded(self, key: bytes) -> bool:
        """Whether a step that is launched from now on finds the embeddings of an image in the cache."""
        return key in self._features

    def has_failed(self, key: bytes) -> bool:
        """Whether the towers have refused an image that sequences hold."""
        kept = self._features.get(key)
        return kept is not None and kept.failed

    def hold(self, key: bytes) -> None:
        """Keep this image from being evicted, because a sequence waits for it or is about to compute its tokens."""
        self._held.add(key)

    def retry(self, key: bytes) -> None:
        """A new sequence needs this image. If its encoding has failed for other sequences, encode it again for all of them."""
        if self.has_failed(key):
            self._drop(key)

    def release(self, key: bytes) -> None:
        """No sequence needs the image any more. If its encoding has failed, it is encoded again for the next sequence."""
        self._held.discard(key)
        self.retry(key)
        self._evict()

    def release_all(self) -> None:
        """No sequence is left: release all images, and give up those on their way through the towers."""
        self.abandon()
        for key in [*self._held]:
            self.release(key)

    def advance(self, work: TowerWork) -> Stopwatch:
        """Continue with the images that are on their way, or begin with those of `work` if there are none. Returns a stopwatch
        of this work.

        Without a limit, work that is queued on this thread's stream after this returns can read the embeddings of all of them.
        If anything but the device fails, the images that are not encoded have failed, and the rest of the step goes on. An
        interrupt, such as Ctrl-C, gives up the images on their way and is raised again.
        """
        watch = Stopwatch(self._stream)
        if not self._is_busy and work.limit is None:
            self.features(work.images)
        else:
            made = self._make(work.images, partial(self._advance, work))
            self._is_busy = made is None
            if made is not None:
                self._keep(made)
        watch.stop()
        return watch

    def _make(self, images: Sequence[ImageInput], make: Callable[[], Made | None]) -> Made | None:
        """The result of `make`, on every rank. If `make` raises an error, these images have failed."""
        return share_features(self.ranks, self.reader, images, lambda: self._make_or_fail(images, make))

    def _make_or_fail(self, images: Sequence[ImageInput], make: Callable[[], Made | None]) -> Made | None:
        try:
            made = make()
            self._await_towers((made or {}).values())
            return made
        except torch.AcceleratorError:
            raise  # the device is lost
        except Exception as error:
            count = len({image.key for image in images} - self._features.keys())
            log.error("%d images could not be encoded; their requests end with an error", count, exc_info=error)
        # outside of the handler, because its error keeps the memory of the forward alive
        return {image.key: self.reader.failed(image.inputs) for image in images}

    def _advance(self, work: TowerWork) -> Made | None:
        """The features of the images on their way, or None if a later step has to finish them."""
        begins = self._call is None
        if self._call is None:
            self._await_weights()
            self._call = PausedCall(lambda pause: self._encode_pausing(work.images, pause))
            self._num_asked = 0
        call = self._call
        pauses = None
        if work.limit is not None and begins:
            pauses = 1  # the first step only copies their pixels
        elif work.limit is not None:
            self._num_asked += work.limit
            count = max(sum(self.reader.num_tokens(image.inputs) for image in work.images), 1)
            # the pause that corresponds to all embeddings asked for so far, so that roundings of the parts do not add up
            pauses = 1 + round(self._num_asked * self._num_pauses / count) - call.num_pauses
        try:
            if not call.run(pauses):
                return None
        except BaseException:
            self.abandon()
            raise
        self._call = None
        self._num_pauses = max(call.num_pauses - 1, 1)
        return call.result()

    def _encode_pausing(self, images: Sequence[ImageInput], pause: Callable[[], None]) -> Made:
        """Encode images in the thread of a `PausedCall`. The caller puts the result into the cache."""
        with torch.inference_mode(), self.reader.pausing(pause):
            return self._encode(images)

    def _on_own_stream(self) -> AbstractContextManager[Any]:
        """Inside this context, this thread queues work on the towers' stream, whatever its current device and stream are."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    @contextmanager
    def _encoding(self) -> Iterator[None]:
        """The context of a forward of the towers. It pauses all-reduce in this thread: no other rank computes this forward."""
        sums = self.ranks.all_reduce
        with self.replaying(), self._on_own_stream(), nullcontext() if sums is None else sums.paused_in_thread():
            yield

    def _await_weights(self) -> None:
        """Let the towers begin after the engine's stream, which is this thread's current one, has written the weights."""
        if self._has_new_weights and self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.reader.device))
        self._has_new_weights = False

    def _await_towers(self, made: Iterable[ImageFeatures]) -> None:
        """Let the work that the engine queues from now on wait for the towers, so that it can read these images."""
        if self._stream is None:
            return
        stream = torch.cuda.current_stream(self.reader.device)
        stream.wait_stream(self._stream)
        for each in made:
            each.record_stream(stream)

    def abandon(self) -> None:
        """Give up the images on their way through the towers. They begin again when they are asked for."""
        if self._call is not None:
            self._call.close()
        self._call = None
        self._is_busy = False

    def features(self, images: Sequence[ImageInput]) -> Made:
        """The features of images, by key: from the cache, or encoded together if they are not in it.

        An image that the towers refuse gets features that are not finite. They end only its own request; the log says why.
        """
        found: Made = {}
        missing: dict[bytes, ImageInput] = {}
        for image in images:
            kept = self._features.get(image.key)
            if kept is None:
                missing[image.key] = image
            else:
                self._features.move_to_end(image.key)
                found[image.key] = kept
        if missing:
            self._await_weights()
        for batch in _batches(missing.values(), self.reader):
            made = self._make(batch, partial(self._encode, batch))
            assert made is not None
            self._keep(made)
            found |= made
        return found

    def _encode(self, images: Sequence[ImageInput]) -> Made:
        """Encode images together, or one by one if the towers refuse one of them."""
        try:
            with self._encoding():
                made = self.reader.encode_all([image.inputs for image in images])
        except torch.AcceleratorError:
            raise  # the device is lost
        except Exception as error:  # a model's code may raise anything for an image that it does not take
            made = []
            reason = f"{type(error).__name__}: {error}"
        # outside of the handler, because its error keeps the memory of the forward alive
        if not made and len(images) > 1:
            return {key: x for image in images for key, x in self._encode([image]).items()}
        if not made:
            log.warning("an image could not be encoded; its request ends with an error: %s", reason)
            with self._on_own_stream():
                return {images[0].key: self.reader.failed(images[0].inputs)}
        self.num_encoded += len(made)
        return {image.key: each for image, each in zip(images, made, strict=True)}

    def _keep(self, made: Made) -> None:
        """Put images into the cache. Failed ones are only kept for sequences that hold them, because the cause may pass."""
        for key, each in made.items():
            if not each.failed:
                self._bytes_per_token = each.num_bytes // max(len(each.embeds), 1)
            if key not in self._features and (key in self._held or not each.failed):
                self._features[key] = each
                self.num_bytes += each.num_bytes
        self._evict()

    def _evict(self) -> None:
        """Evict images that no sequence holds, the least recently used first, until the cache is within its budget."""
        if self.num_bytes <= self.max_bytes:
            return
        for key in [key for key in self._features if key not in self._held]:
            self._drop(key)
            if self.num_bytes <= self.max_bytes:
                return

    def _drop(self, key: bytes) -> None:
        self.num_bytes -= self._features.pop(key).num_bytes

    def close(self) -> None:
        """Give up the images on their way, and free the graphs. They are captured again when images are encoded."""
        self.abandon()
        if self.graphs is not None:
            self.graphs.clear()

    def forget(self) -> None:
        """Empty the cache and free the graphs, because the weights have changed and may lie elsewhere in memory."""
        self.close()
        self._features.clear()
        self.num_bytes = 0
        self._has_new_weights = True

    def step(self, pieces: Sequence[ImagePiece], input_ids: NDArray[np.int64]) -> StepImages:
        """The embeddings of one step, from at least one piece. Overwrites `input_ids` in the places of images with a token that
        the model can embed."""
        for piece in pieces:
            input_ids[piece.rows] = self.reader.filler
        found = self.features([piece.image for piece in pieces])
        parts = [(found[piece.image.key], slice(piece.first, piece.first + len(piece.rows))) for piece in pieces]
        rows = rows_of(pieces, len(input_ids))
        depth = max(len(each.deep) for each, _ in parts)
        return StepImages(
            torch.from_numpy(rows).to(self.reader.device, non_blocking=True),
            torch.cat([each.embeds[part] for each, part in parts]),
            # an image that could not be encoded has no features for inner layers, so its embeddings (NaN) stand in
            tuple(
                torch.cat([(each.deep or (each.embeds,) * depth)[layer][part] for each, part in parts])
                for layer in range(depth)
            ),
        )

    def place(self, tokens: Sequence[int], images: Sequence[ImageInput], max_block: int) -> PromptImages:
        """Place the images of a prompt. The first image that the engine gets shows which tokens attend both ways.

        tokens: the prompt, with an image token for each embedding, in the order of the images
        max_block: the most tokens that one step can compute together

        Raises ParameterError for images that do not fit the prompt, for tokens that attend both ways if they are refused, and
        for a block of them that is too long for a step.
        """
        placed = find_places(tokens, images, self.reader.image_token)
        if self._two_way is None:
            self._two_way = self._find_two_way(images[0])
        two_way = self._two_way
        blocks: tuple[tuple[int, int], ...] = ()
        if two_way != "none":
            blocks = ((0, len(tokens)),) if two_way == "prompt" else runs_of(placed)
            longest = max(end - begin for begin, end in blocks)
            if self.refuses_blocks:
                raise ParameterError("images", f"be empty, because {self.refuses_blocks}", len(placed))
            if longest > max_block:
                rule = f"have at most {max_block} tokens that attend to each other both ways (max_num_batched_tokens)"
                raise ParameterError("images", rule, longest)
        found = self.reader.positions(torch.tensor(tokens), [image.inputs for image in images])
        positions, delta = (None, 0) if found is None else (found[0].numpy(), found[1])
        content = (content_of_prefix if two_way == "prompt" else content_of)(tokens, placed)
        return PromptImages(placed, content, blocks, positions, delta)

    def _find_two_way(self, image: ImageInput) -> TwoWay:
        """Which tokens attend both ways. Raises ParameterError for an image that the towers refuse."""
        # the other ranks do not see this image yet; all must keep the same, so with several ranks it is not put into the cache
        found = (self.features([image]) if self.ranks.size == 1 else self._encode([image]))[image.key]
        if found.failed:
            raise ParameterError("images", "be images that the model's vision tower can encode (see the log)", "another one")
        return found.two_way

    def check_integrity(self) -> None:
        """Assert that `num_bytes` is the sum of the entries and exceeds the budget only by held images, and that every failed
        image is held."""
        sizes = {key: each.num_bytes for key, each in self._features.items()}
        assert self.num_bytes == sum(sizes.values())
        held = sum(size for key, size in sizes.items() if key in self._held)
        assert self.num_bytes <= max(self.max_bytes, held)
        assert self._held >= {key for key, each in self._features.items() if each.failed}


def _new_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream for the towers; None for a device without streams."""
    make_stream: Any = torch.cuda.Stream
    stream: torch.cuda.Stream | None = make_stream(device) if device.type == "cuda" else None
    return stream


def _batches(images: Iterable[ImageInput], reader: ImageReader) -> Iterator[list[ImageInput]]:
    """Batches of images for one forward of the towers: MAX_IMAGE_TOKENS embeddings at most, or a single image."""
    batch: list[ImageInput] = []
    room = MAX_IMAGE_TOKENS
    for image in images:
        count = reader.num_tokens(image.inputs)
        if batch and count > room:
            yield batch
            batch = []
            room = MAX_IMAGE_TOKENS
        batch.append(image)
        room -= count
    if batch:
        yield batch


def require_encoder(images: ImageEncoder | str) -> ImageEncoder:
    """The encoder that `find_images` has found. Raises ParameterError, with the reason, if it has found none."""
    if isinstance(images, str):
        raise ParameterError("images", f"be empty, because {images}", "images")
    return images


def find_images(model: Any, config: EngineConfig) -> ImageEncoder | str:
    """The image encoder of a model, or the reason why an engine with these settings takes no images."""
    if not config.max_images:
        return "the engine is configured to take no images (max_images is 0)"
    try:
        reader = ImageReader(model, speeds_up=config.fuses)
    except UnsupportedModelError as error:
        return str(error)
    refuses = ""
    if config.kv_cache_dtype == "fp8":
        refuses = "tokens that attend both ways are not supported with a float8 cache yet"
    if config.deterministic:
        refuses = "tokens that attend both ways are not supported in deterministic mode yet"
    replays = tower_graphs.REPLAYS_TOWERS and reader.device.type == "cuda" and not (config.eager or config.deterministic)
    graphs = TowerGraphs(reader.blocks, reader.device) if replays else None
    return ImageEncoder(reader, config.image_cache_bytes, refuses, graphs)
