"""Images of a composite model: its own towers compute embeddings, which take their places in the engine's forward.

    reader = ImageReader(model)                       # raises UnsupportedModelError, with the reason
    features = reader.encode(inputs)                  # inputs: what the model's processor makes of one image
    several = reader.encode_all([inputs, others])     # the same, in fewer forwards
    positions, delta = reader.positions(ids, places, [inputs])         # of rotary embedding, for types with several axes
    with reader.placing(StepImages.of(rows, [features])):
        logits = paged_forward(model, ids, position_ids, batch, rows_of_logits)

Nothing is known of a type but where its language model is. To encode, the model's own forward runs on a prompt that holds
images, and stops where it calls the language model: what it was to be given at the places of an image is what the image comes
to. In a step, the same arguments are put in at the same call. So projections, newlines between tiles and features for inner
layers are the model's own. Types are served if tests have compared them with `generate` (PROVEN).

Images are encoded together if their inputs can be joined: patches end to end, or pictures of one shape. How a type joins them
is tried with the first two, which must come to the same together as alone.

An encoding can be cut into parts by the layers of the towers and what is beside them (`pausing`). It may run in another thread
than forwards of the model, as long as one of the two stands still while the other one runs.

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
from fa_serve.hf.surgery.towers import quicken_tower
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
"""Types whose images tests have compared with `generate` of transformers: from inputs of towers, and from prompts that their
processors write. Images of other types are refused."""
WITHOUT_PROMPTS = {
    "pp_chart2table": "its processor replaces no text by the tokens of an image",
    "shieldgemma2": "its processor writes other prompts than it is given, by which it classifies images",
}
"""Types whose processors write no prompt for a request, which is the reason."""
TwoWay = Literal["none", "images", "prompt"]


class _ReachedError(Exception):
    """The forward has come to the language model."""


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """What one image comes to.

    embeds:   (num_tokens, hidden), in the dtype and on the device of the model
    deep:     (num_tokens, hidden) for each of the first layers, which is added to their outputs (Qwen3-VL); or none
    two_way:  which tokens attend to each other both ways: none, runs of image tokens (Gemma 3) or the whole prompt (PaliGemma)
    failed:   the towers have refused it: its embeddings are not finite, and `two_way` says nothing
    """

    embeds: Tensor
    deep: tuple[Tensor, ...]
    two_way: TwoWay
    failed: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(x.untyped_storage().nbytes() for x in (self.embeds, *self.deep))

    def record_stream(self, stream: Any) -> None:
        """Their memory is not used again before work on this stream, which reads them, has ended."""
        for x in (self.embeds, *self.deep):
            x.record_stream(stream)


@dataclass(frozen=True, slots=True)
class StepImages:
    """The embeddings of images in one step.

    rows:   (total,) int64, for each token of the step which row of `embeds` replaces its own embedding; or -1
    embeds: (m, hidden), of which m may be more than are used; deep: (used, hidden) for each layer, as in `ImageFeatures`
    """

    rows: Tensor
    embeds: Tensor
    deep: tuple[Tensor, ...] = ()


class ImageReader:
    """The towers of one model. quickens: see `quicken`"""

    def __init__(self, model: PreTrainedModel, *, quickens: bool = True) -> None:
        name = type(model).__name__
        kind = model.config.model_type
        if kind in WITHOUT_PROMPTS:
            raise UnsupportedModelError(f"images of {name} ({kind}) are refused, because {WITHOUT_PROMPTS[kind]}")
        if kind not in PROVEN:
            raise UnsupportedModelError(f"images of {name} ({kind}) have not been compared with generate of transformers yet")
        self._model = model
        token = find_image_token(model.config)
        if token is None:
            raise UnsupportedModelError(f"{name} takes no images: its config names no token that stands for them")
        self.image_token = token
        decoder = cast(Any, model).get_decoder()
        if decoder is None or decoder is model:
            raise UnsupportedModelError(f"{name} takes no images: it has no language model beside a tower")
        self._decoder: Any = decoder
        config = model.config.get_text_config()
        self.filler: int = getattr(config, "pad_token_id", None) or 0
        """The token that is embedded where an image is, before its embeddings are put in."""
        self.quickens = quickens
        self.quicken()
        self.blocks = self._find_blocks()
        self._pauses: dict[int, Callable[[], None]] = {}  # by the thread whose encodings are cut
        self._joined_dim: int | Literal["none"] | None = None
        """The dimension in which inputs of several images are joined; None before it has been tried."""

    def quicken(self) -> None:
        """Give modules of the towers forms that GPUs compute faster, if that is asked for; again after weights have moved."""
        if self.quickens:
            quicken_tower(self._model, beside=self._decoder)

    @torch.no_grad()
    def encode(self, inputs: Mapping[str, Tensor]) -> ImageFeatures:
        """inputs: arguments of the model's forward for a prompt (batch of 1) that holds one image, input_ids among them

        Raises UnsupportedModelError if the model tells its language model of images in a way that is not known.
        """
        return self._run(_with_text(inputs, self.filler), [self.num_tokens(inputs)])[0]

    @torch.no_grad()
    def encode_all(self, images: Sequence[Mapping[str, Tensor]]) -> list[ImageFeatures]:
        """`encode` for each of several images, in one forward for all whose inputs can be joined."""
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
        """How many embeddings the images come to that a prompt holds. inputs: as `encode` takes them"""
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
        """Bytes of an embedding without those for inner layers."""
        return self.hidden * self._model.dtype.itemsize

    def _find_blocks(self) -> list[nn.Module]:
        """The layers of the towers: members of lists of modules that lie neither in the language model nor in another list."""
        return [block for each in self._find_lists() for block in each]

    def _find_lists(self) -> list[nn.ModuleList]:
        beside = {*self._decoder.modules()}
        lists = [each for each in self._model.modules() if isinstance(each, nn.ModuleList) and each not in beside]
        inner = {module for each in lists for module in each.modules() if module is not each}
        return [each for each in lists if each not in inner]

    def _beside_blocks(self) -> list[nn.Module]:
        """Modules with parameters that stand beside the layers: what embeds patches, and what merges them."""
        lists = {*self._find_lists()}
        towers = [tower for tower in self._model.modules() if not lists.isdisjoint(tower.children())]
        others = [x for tower in towers for x in tower.children() if not isinstance(x, nn.ModuleList)]
        return [x for x in others if x is not self._decoder and next(x.parameters(), None) is not None]

    @contextmanager
    def pausing(self, pause: Callable[[], None]) -> Iterator[None]:
        """Inside, `pause` is called in forwards of this thread: while another thread copies the inputs to the device, and after
        each layer of the towers and each module beside the layers. The host takes longer for the beginning of an image and for
        its end than for several layers, and the steps of the engine wait for it."""
        thread = threading.get_ident()

        def after(*_: Any) -> None:
            if threading.get_ident() == thread:
                pause()

        hooks = [each.register_forward_hook(after) for each in (*self.blocks, *self._beside_blocks())]
        self._pauses[thread] = pause
        try:
            yield
        finally:
            del self._pauses[thread]
            for hook in hooks:
                hook.remove()

    def _move_beside(self, parts: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Inputs on the device. In `pausing`, another thread copies them while this one stands still."""
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        inference = torch.is_inference_mode_enabled()

        def move() -> list[dict[str, Tensor]]:
            with torch.inference_mode(inference), nullcontext() if stream is None else torch.cuda.stream(stream):
                return [{name: self._moved(x) for name, x in part.items()} for part in parts]

        pause = self._pauses.get(threading.get_ident())
        if pause is None:
            return move()
        moved: Future[list[dict[str, Tensor]]] = Future()
        # no pool: it takes no more work once the main thread has ended, and an engine may go on in another one
        threading.Thread(target=_settle, args=(moved, move), name="fa_serve-pixels").start()
        pause()
        try:
            return moved.result()
        finally:
            del moved  # an error has this frame: they would keep each other, and the pixels, until the garbage is collected

    def failed(self, inputs: Mapping[str, Tensor]) -> ImageFeatures:
        """What stands for an image that cannot be encoded: numbers that end its own request alone."""
        # one row in memory: a device that had no room for the image has room for this
        nothing = torch.full((1, self.hidden), float("nan"), dtype=self._model.dtype, device=self._model.device)
        return ImageFeatures(nothing.expand(self.num_tokens(inputs), -1), (), "none", failed=True)

    def _learn_to_join(self, pair: Sequence[Mapping[str, Tensor]]) -> list[ImageFeatures]:
        """Encode two images alone, and find the dimension in which their inputs may be joined."""
        alone = [self.encode(inputs) for inputs in pair]
        found: int | Literal["none"] = "none"
        for dim in (0, 1):
            try:
                together = self._encode_joined(pair, dim)
            except Exception as error:  # whatever the code of a model raises for inputs that it does not take
                log.debug("images of %s are not joined in dimension %d: %s", type(self._model).__name__, dim, error)
                continue
            if all(_are_close(*both) for both in zip(alone, together, strict=True)):
                found = dim
                break
        self._joined_dim = found
        return alone

    def _encode_joined(self, images: Sequence[Mapping[str, Tensor]], dim: int) -> list[ImageFeatures]:
        """One forward for images whose inputs other than tokens are joined in this dimension."""
        parts = [_with_text(inputs, self.filler) for inputs in images]
        # pixels are joined on the device: on a host it takes longer than the towers to lay out 100 MB once more. Tokens are
        # joined on the host, where `_run` looks for the images among them
        pixels = self._move_beside([{name: x for name, x in part.items() if x.is_floating_point()} for part in parts])
        own = [{**part, **moved} for part, moved in zip(parts, pixels, strict=True)]
        joined = {name: torch.cat([part[name] for part in own], dim=1 if name in _OF_TOKENS else dim) for name in own[0]}
        return self._run(joined, [self.num_tokens(inputs) for inputs in images])

    def _run(self, inputs: Mapping[str, Tensor], counts: Sequence[int]) -> list[ImageFeatures]:
        """What the language model is told of images with so many places each. inputs: of a prompt that holds them"""
        device = self._model.device
        taken = inspect.signature(self._model.forward).parameters
        [moved] = self._move_beside([{name: x for name, x in inputs.items() if name in taken}])
        given: dict[str, Any] = {}
        thread = threading.get_ident()

        def stop(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if threading.get_ident() != thread:
                return  # a step of the engine, while this encoding pauses
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
            raise UnsupportedModelError(f"{type(self._model).__name__} tells its language model {unknown} of an image")
        embeds = given["inputs_embeds"][0][places].split(list(counts))
        layers = [x.to(device).split(list(counts)) for x in deep]
        return [
            # copies, so that an image which is kept does not keep the others
            ImageFeatures(part.clone(), tuple(layer[n].clone() for layer in layers), two_way)
            for n, part in enumerate(embeds)
        ]

    def _moved(self, x: Tensor) -> Tensor:
        """An input on the device of the model, and in its dtype if it is a floating-point number."""
        x = x.to(self._model.device)
        return x.to(self._model.dtype) if x.is_floating_point() else x

    def positions(self, ids: Tensor, images: Sequence[Mapping[str, Tensor]]) -> tuple[Tensor, int] | None:
        """Positions on several axes of a prompt with images, (axes, total) int64, and what is added to the place of each token
        after it; None for a type whose tokens have one position, which is their place.

        ids: (total,) int64; images: the inputs of each, in order

        Raises ParameterError for a prompt for which the model has no positions.
        """
        holder: Any = next(
            (x for x in (getattr(self._model, "model", None), self._model) if hasattr(x, "get_rope_index")), None
        )
        if holder is None:
            return None
        ids = ids.cpu()
        # such a model takes the tokens that stand side by side for those of one image, whatever their number
        runs = _runs(ids == self.image_token)
        counts = [count for count in map(self.num_tokens, images) if count]
        if runs != counts:
            rule = f"have the image tokens ({self.image_token}) of each image side by side, {counts} of them in order, and "
            raise ParameterError("prompt", f"{rule}another token between those of two images", runs)
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
        except Exception as error:  # whatever the code of a model raises for a prompt that its processor would not write
            told = f"{type(self._model).__name__} finds no positions: {type(error).__name__}: {str(error)[:200]}"
            rule = (
                f"have images, and the tokens that mark images, videos and sounds, as the model's processor puts them ({told})"
            )
            raise ParameterError("prompt", rule, ids.tolist()) from error
        return cast(Tensor, positions)[:, 0], int(delta.flatten()[0])

    @contextmanager
    def placing(self, images: StepImages) -> Iterator[None]:
        """Inside, the language model of a packed forward is given these embeddings."""

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
    """Compute what a future is to hold."""
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
        del future  # as in `_move_beside`


def _runs(chosen: Tensor) -> list[int]:
    """The lengths of the runs of True. chosen: (n,) bool"""
    values, lengths = torch.unique_consecutive(chosen, return_counts=True)
    return cast("list[int]", lengths[values].tolist())


def _of_one_form(images: Sequence[Mapping[str, Tensor]]) -> list[list[int]]:
    """The numbers of the images by what their inputs are, but for their first dimension."""
    forms: dict[Any, list[int]] = {}
    for number, inputs in enumerate(images):
        form = tuple((name, x.dtype, x.shape[1:]) for name, x in sorted(inputs.items()) if name not in _OF_TOKENS)
        forms.setdefault((form, tuple(sorted(inputs))), []).append(number)
    return list(forms.values())


def _are_close(first: ImageFeatures, second: ImageFeatures) -> bool:
    """Whether two encodings differ by roundings alone. Other images differ by more than their largest number."""
    pairs = zip((first.embeds, *first.deep), (second.embeds, *second.deep), strict=True)
    bound = 16 * torch.finfo(first.embeds.dtype).eps
    return first.two_way == second.two_way and all(bool((a - b).abs().max() <= bound * a.abs().max()) for a, b in pairs)


def _with_text(inputs: Mapping[str, Tensor], token: int) -> dict[str, Tensor]:
    """The prompt of an image with one more token of text."""
    added = {"input_ids": token, "token_type_ids": 0, "mm_token_type_ids": 0, "attention_mask": 1}
    return {name: torch.cat([x, x.new_full((1, 1), added[name])], dim=1) if name in added else x for name, x in inputs.items()}


def num_recorded_outputs() -> int:
    """How many outputs of modules a forward has recorded that is asked for them, such as the hidden states of all layers."""
    collected = cast(Any, output_capturing)._active_collector.get() or {}
    return sum(len(each) for each in collected.values())
