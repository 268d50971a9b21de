"""Images of a composite model: the model's own towers compute embeddings, which the engine's forward puts in place of tokens.

    reader = ImageReader(model)                       # raises UnsupportedModelError, with the reason
    features = reader.encode(inputs)                  # inputs: what the model's processor returns for one image
    several = reader.encode_all([inputs, others])     # the same, in fewer forwards
    positions, delta = reader.positions(ids, [inputs])       # for the rotary embedding of types with several axes; else None
    with reader.placing(StepImages.of(rows, [features])):
        logits = paged_forward(model, ids, position_ids, batch, rows_of_logits)

The reader knows nothing about a model type except where its language model is. To encode images, it runs the model's own
forward on a prompt that holds them, and stops at the call of the language model: the embeddings that this call would pass at
the places of an image are the features of the image. In a step, `placing` puts the same arguments into the same call. So
projections, newlines between tiles and features for inner layers are computed by the model's own code. A type is served only
if tests have compared it with `generate` (PROVEN).

Images are encoded together if their inputs can be joined: patches end to end, or pictures of one shape. The first two images
show how a type's inputs can be joined: encoded together, they must give the same features as alone.

An encoding can pause after each layer of the towers and after each module next to these layers (`pausing`). It may run in
another thread than the forwards of the model, as long as only one of the two threads runs at a time.

Left out: how a text and images become inputs (processors.py, fa_serve.engine.images), and when an image is encoded.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import output_capturing

from fa_serve.hf.adapter.masks import leaving_out_blocks
from fa_serve.hf.adapter.releases import CACHE_NAMES
from fa_serve.hf.processors import find_image_token
from fa_serve.hf.surgery.towers import speed_up_tower
from fa_serve.spec import ParameterError, UnsupportedModelError

_PLAIN = {"input_ids", "inputs_embeds", "position_ids", "attention_mask", "use_cache", "cache_position", *CACHE_NAMES}
_MASK = "visual_pos_masks"
_DEEP = "deepstack_visual_embeds"
_OF_TOKENS = {"input_ids", "token_type_ids", "mm_token_type_ids", "attention_mask"}
log = logging.getLogger("fa_serve.hf")


PROVEN = frozenset(
    {
        "aria",
        "aya_vision",
        "cohere2_vision",
        "cohere_compass",
        "cosmos3_edge",
        "cosmos3_omni",
        "deepseek_vl",
        "ernie4_5_vl_moe",
        "exaone4_5",
        "gemma3",
        "gemma4",
        "gemma4_unified",
        "glm46v",
        "glm4v",
        "glm4v_moe",
        "glm_ocr",
        "glmga",
        "got_ocr2",
        "hunyuan_vl",
        "idefics2",
        "idefics3",
        "internvl",
        "lfm2_vl",
        "lighton_ocr",
        "llama4",
        "llava",
        "llava_next",
        "llava_next_video",
        "llava_onevision",
        "mistral3",
        "ovis2",
        "paddleocr_vl",
        "paligemma",
        "qianfan_ocr",
        "qwen2_5_omni_thinker",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_omni_moe_thinker",
        "qwen3_vl",
        "qwen3_vl_moe",
        "smolvlm",
        "step3p7",
        "video_llama_3",
        "video_llava",
        "vipllava",
    }
)
"""Types for which tests have compared answers about images with `generate` of transformers, both from inputs of the towers
and from prompts that the type's processor writes. Images of other types are refused."""
WITHOUT_PROMPTS = {
    "pp_chart2table": "its processor does not expand any text into image tokens",
    "shieldgemma2": "its processor replaces the given prompt with prompts that classify images",
}
"""Types whose images are refused because their processors cannot write the prompt of a request, and the reason."""
TwoWay = Literal["none", "images", "prompt"]


class _ReachedError(Exception):
    """The forward has reached the call of the language model."""


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """What the towers compute for one image.

    embeds:   (num_tokens, hidden), in the dtype and on the device of the model
    deep:     (num_tokens, hidden) for each of the first layers, added to the layer's output (Qwen3-VL); or an empty tuple
    two_way:  which tokens attend to each other both ways: none, runs of image tokens (Gemma 3) or the whole prompt (PaliGemma)
    failed:   True if the image could not be encoded: its embeddings are NaN, and `two_way` has no meaning
    """

    embeds: Tensor
    deep: tuple[Tensor, ...]
    two_way: TwoWay
    failed: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(x.untyped_storage().nbytes() for x in (self.embeds, *self.deep))

    def record_stream(self, stream: Any) -> None:
        """Keep the memory of these tensors from being reused before work on `stream`, which reads them, has ended."""
        for x in (self.embeds, *self.deep):
            x.record_stream(stream)


@dataclass(frozen=True, slots=True)
class StepImages:
    """The embeddings of images in one step.

    rows:   (total,) int64: for each token of the step, the row of `embeds` that replaces the token's own embedding; or -1
    embeds: (m, hidden); m may exceed the number of rows in use
    deep:   (used, hidden) for each layer, as in `ImageFeatures`
    """

    rows: Tensor
    embeds: Tensor
    deep: tuple[Tensor, ...] = ()


class ImageReader:
    """Encodes images with the towers of one model. speeds_up: whether `speed_up` does anything"""

    def __init__(self, model: PreTrainedModel, *, speeds_up: bool = True) -> None:
        name = type(model).__name__
        kind = model.config.model_type
        if kind in WITHOUT_PROMPTS:
            raise UnsupportedModelError(f"images of {name} ({kind}) are refused, because {WITHOUT_PROMPTS[kind]}")
        if kind not in PROVEN:
            raise UnsupportedModelError(f"images of {name} ({kind}) have not been compared with generate of transformers yet")
        self._model = model
        token = find_image_token(model.config)
        if token is None:
            raise UnsupportedModelError(f"{name} takes no images: its config names no image token")
        self.image_token = token
        decoder = cast(Any, model).get_decoder()
        if decoder is None or decoder is model:
            raise UnsupportedModelError(f"{name} takes no images: it has no separate language model")
        self._decoder: Any = decoder
        config = model.config.get_text_config()
        self.filler: int = getattr(config, "pad_token_id", None) or 0
        """The token id that a step has at the places of an image, where the image's embeddings then replace its embedding."""
        self.speeds_up = speeds_up
        self.speed_up()
        self.blocks = self._find_blocks()
        # found once, because a search of all modules takes milliseconds, in which the device may wait
        self._next_to_blocks = self._beside_blocks()
        self._names = frozenset(inspect.signature(model.forward).parameters)
        self._pauses: dict[int, Callable[[], None]] = {}  # `pause` by the id of the thread whose encodings pause
        self._joined_dim: int | Literal["none"] | None = None
        """The dimension in which inputs of several images are joined; "none" if they cannot be, None if not tried yet."""

    def speed_up(self) -> None:
        """If `speeds_up`, give modules of the towers forms that GPUs compute faster. Call it again after weights have moved."""
        if self.speeds_up:
            speed_up_tower(self._model, beside=self._decoder)

    @torch.no_grad()
    def encode(self, inputs: Mapping[str, Tensor]) -> ImageFeatures:
        """inputs: arguments of the model's forward for a prompt (batch of 1) that holds one image, input_ids among them

        Raises UnsupportedModelError if the model passes images to its language model in arguments that are not known here.
        """
        return self._run(_with_text(inputs, self.filler), [self.num_tokens(inputs)])[0]

    @torch.no_grad()
    def encode_all(self, images: Sequence[Mapping[str, Tensor]]) -> list[ImageFeatures]:
        """Do what `encode` does for several images. Images whose inputs can be joined share one forward."""
        found: dict[int, ImageFeatures] = {}
        for numbers in _of_one_form(images):
            if len(numbers) > 1 and self._joined_dim is None:
                pair = numbers[:2]
                found |= zip(pair, self._learn_to_join([images[n] for n in pair]), strict=True)
            left = [n for n in numbers if n not in found]
            if len(left) > 1 and isinstance(self._joined_dim, int):
                found |= zip(left, self._encode_joined([images[n] for n in left], self._joined_dim), strict=True)
            else:
                found |= {n: self.encode(images[n]) for n in left}
        return [found[n] for n in range(len(images))]

    def num_tokens(self, inputs: Mapping[str, Tensor]) -> int:
        """The number of embeddings that the images of a prompt produce. inputs: as `encode` takes them"""
        return int((inputs["input_ids"] == self.image_token).sum())

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def hidden(self) -> int:
        """The width of embeddings."""
        width: int = self._decoder.get_input_embeddings().embedding_dim
        return width

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's embedding, not counting its features for inner layers."""
        return self.hidden * self._model.dtype.itemsize

    def _find_blocks(self) -> list[nn.Module]:
        """The layers of the towers: members of module lists that lie neither in the language model nor in another list."""
        return [block for each in self._find_lists() for block in each]

    def _find_lists(self) -> list[nn.ModuleList]:
        beside = {*self._decoder.modules()}
        lists = [each for each in self._model.modules() if isinstance(each, nn.ModuleList) and each not in beside]
        inner = {module for each in lists for module in each.modules() if module is not each}
        return [each for each in lists if each not in inner]

    def _beside_blocks(self) -> list[nn.Module]:
        """Modules with parameters that are siblings of the layer lists, such as those that embed patches and merge them."""
        lists = {*self._find_lists()}
        towers = [tower for tower in self._model.modules() if not lists.isdisjoint(tower.children())]
        others = [x for tower in towers for x in tower.children() if not isinstance(x, nn.ModuleList)]
        return [x for x in others if x is not self._decoder and next(x.parameters(), None) is not None]

    @contextmanager
    def pausing(self, pause: Callable[[], None]) -> Iterator[None]:
        """Inside, forwards of this thread call `pause`: while another thread copies the inputs to the device, after each layer
        of the towers, and after each module next to the layers. The modules next to the layers count, because the start and the
        end of an image cost the host more time than several layers, and the engine's steps wait during that time."""
        thread = threading.get_ident()

        def after(*_: Any) -> None:
            if threading.get_ident() == thread:
                pause()

        hooks = [each.register_forward_hook(after) for each in (*self.blocks, *self._next_to_blocks)]
        self._pauses[thread] = pause
        try:
            yield
        finally:
            del self._pauses[thread]
            for hook in hooks:
                hook.remove()

    def _move_beside(self, parts: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Copy inputs to the device. In `pausing`, another thread copies them while this thread pauses."""
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        inference = torch.is_inference_mode_enabled()

        def move() -> list[dict[str, Tensor]]:
            with torch.inference_mode(inference), nullcontext() if stream is None else torch.cuda.stream(stream):
                return [{name: self._moved(x) for name, x in part.items()} for part in parts]

        pause = self._pauses.get(threading.get_ident())
        if pause is None:
            return move()
        moved: Future[list[dict[str, Tensor]]] = Future()
        # not a thread pool: a pool takes no more work once the main thread has ended, but an engine may go on in another thread
        threading.Thread(target=_settle, args=(moved, move), name="fa_serve-pixels").start()
        pause()
        try:
            return moved.result()
        finally:
            del moved  # breaks a cycle: an error refers to this frame, and both would keep the pixels until garbage collection

    def failed(self, inputs: Mapping[str, Tensor]) -> ImageFeatures:
        """The features of an image that cannot be encoded: they are NaN, which ends only the request of this image."""
        # one row in memory: a device that had no room for the image still has room for one row
        nothing = torch.full((1, self.hidden), float("nan"), dtype=self._model.dtype, device=self._model.device)
        return ImageFeatures(nothing.expand(self.num_tokens(inputs), -1), (), "none", failed=True)

    def _learn_to_join(self, pair: Sequence[Mapping[str, Tensor]]) -> list[ImageFeatures]:
        """Encode two images separately, and find the dimension in which their inputs may be joined."""
        alone = [self.encode(inputs) for inputs in pair]
        found: int | Literal["none"] = "none"
        for dim in (0, 1):
            try:
                together = self._encode_joined(pair, dim)
            except Exception as error:  # a model's code may raise anything for inputs that it does not take
                log.debug("images of %s are not joined in dimension %d: %s", type(self._model).__name__, dim, error)
                continue
            if all(_are_close(*both) for both in zip(alone, together, strict=True)):
                found = dim
                break
        self._joined_dim = found
        return alone

    def _encode_joined(self, images: Sequence[Mapping[str, Tensor]], dim: int) -> list[ImageFeatures]:
        """Encode several images in one forward. Inputs other than tokens are joined in this dimension."""
        parts = [_with_text(inputs, self.filler) for inputs in images]
        # Pixels are joined on the device, because on the host another copy of 100 MB takes longer than the towers. Tokens are
        # joined on the host, where `_run` looks for image tokens among them.
        pixels = self._move_beside([{name: x for name, x in part.items() if x.is_floating_point()} for part in parts])
        own = [{**part, **moved} for part, moved in zip(parts, pixels, strict=True)]
        joined = {name: torch.cat([part[name] for part in own], dim=1 if name in _OF_TOKENS else dim) for name in own[0]}
        return self._run(joined, [self.num_tokens(inputs) for inputs in images])

    def _run(self, inputs: Mapping[str, Tensor], counts: Sequence[int]) -> list[ImageFeatures]:
        """Run the model up to its language model -> the features of each image.

        inputs: arguments of the model's forward for a prompt that holds the images; counts: the number of tokens of each image
        """
        device = self._model.device
        [moved] = self._move_beside([{name: x for name, x in inputs.items() if name in self._names}])
        given: dict[str, Any] = {}
        thread = threading.get_ident()

        def stop(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if threading.get_ident() != thread:
                return  # this is a step of the engine, which runs while this encoding pauses
            given.update(kwargs)
            raise _ReachedError

        hook = self._decoder.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            with leaving_out_blocks() as blocks:
                self._model(**moved, use_cache=False)
        except _ReachedError:
            pass
        finally:
            hook.remove()
        # found on the host, where the tokens are, so that nothing waits for a device
        places = (inputs["input_ids"][0] == self.image_token).nonzero()[:, 0].to(device)
        two_way: TwoWay = "none"
        if any(bool((each >= 0).any()) for each in blocks):
            two_way = "prompt" if any(bool(each[0, -1] >= 0) for each in blocks) else "images"
        deep = given.get(_DEEP) or ()
        unknown = sorted(
            n for n, x in given.items() if isinstance(x, Tensor | list | tuple) and n not in {*_PLAIN, _MASK, _DEEP}
        )
        if unknown or given.get("inputs_embeds") is None:
            name = type(self._model).__name__
            raise UnsupportedModelError(
                f"{name} passes {unknown} to its language model for an image, which fa_serve cannot handle"
            )
        embeds = given["inputs_embeds"][0][places].split(list(counts))
        layers = [x.to(device).split(list(counts)) for x in deep]
        return [
            # copies, so that keeping the features of one image does not keep the memory of the others
            ImageFeatures(part.clone(), tuple(layer[n].clone() for layer in layers), two_way)
            for n, part in enumerate(embeds)
        ]

    def _moved(self, x: Tensor) -> Tensor:
        """An input on the model's device, and in the model's dtype if its elements are floating-point numbers."""
        x = x.to(self._model.device)
        return x.to(self._model.dtype) if x.is_floating_point() else x

    def positions(self, ids: Tensor, images: Sequence[Mapping[str, Tensor]]) -> tuple[Tensor, int] | None:
        """The positions of a prompt with images on several axes, (axes, total) int64, and the number that turns the place of a
        token after the prompt into its position; None for a type whose positions are the places of the tokens.

        ids: (total,) int64; images: the inputs of each image, in order

        Raises ParameterError for a prompt for which the model has no positions.
        """
        holder: Any = next(
            (x for x in (getattr(self._model, "model", None), self._model) if hasattr(x, "get_rope_index")), None
        )
        if holder is None:
            return None
        ids = ids.cpu()
        # such a model assumes that adjacent image tokens belong to one image, whatever their number
        runs = _runs(ids == self.image_token)
        counts = [count for count in map(self.num_tokens, images) if count]
        if runs != counts:
            rule = f"have the image tokens ({self.image_token}) of each image next to each other, {counts} of them in this "
            raise ParameterError("prompt", f"{rule}order, and another token between those of two images", runs)
        known = inspect.signature(holder.get_rope_index).parameters
        given: dict[str, Any] = {
            "input_ids": ids[None],
            "mm_token_type_ids": (ids == self.image_token).int()[None],
            "attention_mask": torch.ones_like(ids)[None],
        }
        try:
            for name in {name for image in images for name in image if name in known} - given.keys():
                given[name] = torch.cat([image[name].cpu() for image in images])
            positions, delta = holder.get_rope_index(**{name: x for name, x in given.items() if name in known})
        except Exception as error:  # a model's code may raise anything for a prompt that its processor would not write
            told = f"{type(self._model).__name__} finds no positions: {type(error).__name__}: {str(error)[:200]}"
            rule = f"place images, and the tokens that mark images, videos and sounds, as the model's processor does ({told})"
            raise ParameterError("prompt", rule, ids.tolist()) from error
        return cast(Tensor, positions)[:, 0], int(delta.flatten()[0])

    @contextmanager
    def placing(self, images: StepImages) -> Iterator[None]:
        """Inside, the language model of a packed forward gets these embeddings in place of the tokens' own."""

        def place(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            embeds = kwargs.get("inputs_embeds")
            if embeds is None:
                embeds = module.get_input_embeddings()(kwargs["input_ids"])
            replaced = images.rows >= 0
            rows = images.embeds.to(embeds.dtype)[images.rows.clamp(min=0)]
            changed = {**kwargs, "inputs_embeds": torch.where(replaced[:, None], rows, embeds)}
            if changed.get("input_ids") is not None:
                changed["input_ids"] = None
            if images.deep:
                changed[_MASK] = replaced[None]
                changed[_DEEP] = list(images.deep)
            return args, changed

        hook = self._decoder.register_forward_pre_hook(place, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()


def _settle(future: Future[Any], work: Callable[[], Any]) -> None:
    """Do the work, and put its result or error into the future."""
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
        del future  # breaks a cycle, as in `_move_beside`


def _runs(chosen: Tensor) -> list[int]:
    """The lengths of the runs of True. chosen: (n,) bool"""
    values, lengths = torch.unique_consecutive(chosen, return_counts=True)
    return cast("list[int]", lengths[values].tolist())


def _of_one_form(images: Sequence[Mapping[str, Tensor]]) -> list[list[int]]:
    """The indices of the images, grouped by the names, dtypes and shapes of their inputs without the first dimension."""
    forms: dict[Any, list[int]] = {}
    for number, inputs in enumerate(images):
        form = tuple((name, x.dtype, x.shape[1:]) for name, x in sorted(inputs.items()) if name not in _OF_TOKENS)
        forms.setdefault((form, tuple(sorted(inputs))), []).append(number)
    return list(forms.values())


def _are_close(first: ImageFeatures, second: ImageFeatures) -> bool:
    """Whether two encodings differ only by rounding. Encodings of different images differ by more than their largest number."""
    pairs = zip((first.embeds, *first.deep), (second.embeds, *second.deep), strict=True)
    bound = 16 * torch.finfo(first.embeds.dtype).eps
    return first.two_way == second.two_way and all(bool((a - b).abs().max() <= bound * a.abs().max()) for a, b in pairs)


def _with_text(inputs: Mapping[str, Tensor], token: int) -> dict[str, Tensor]:
    """The prompt of an image with one text token at its end, by which `_run` tells two-way prompts from two-way images."""
    added = {"input_ids": token, "token_type_ids": 0, "mm_token_type_ids": 0, "attention_mask": 1}
    return {name: torch.cat([x, x.new_full((1, 1), added[name])], dim=1) if name in added else x for name, x in inputs.items()}


def num_recorded_outputs() -> int:
    """How many module outputs the running forward has recorded on request, such as the hidden states of all layers."""
    collected = cast(Any, output_capturing)._active_collector.get() or {}
    return sum(len(each) for each in collected.values())
