"""Which model types of transformers are served, as text and with images, by the plugin and by the engine: one row for each.

    rows()               # {"llava": {"plugin text": "yes", "engine text": "yes", "plugin image": "yes", "engine image": "yes"}}

"yes" in a column of the engine means that a tiny random model has given the tokens of transformers' `generate` in float32: with
prompts of different lengths in one batch, and for images with one and two of them, in chunks, and again from the prefix cache.
"yes" in a column of the plugin means that every part of the model takes fa_serve's attention. Anything else is the reason.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import report_hybrids
import torch
from every_type import CAUSAL, IMAGE_TEXT, tiny_config, tiny_model
from image_inputs import CHANGES, IMAGE, IMAGES, one_image, whole_prompt
from transformers import PreTrainedModel

from fa_serve import patch
from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.engine.images.prompt import ImageInput
from fa_serve.engine.scheduler.scheduled_batch import TowerWork
from fa_serve.hf.adapter.composites import auto_class, text_model
from fa_serve.hf.images import ImageReader
from fa_serve.spec import ParameterError, UnsupportedModelError

COLUMNS = ("plugin text", "plugin image", "engine text", "engine image")
MOST_WEIGHTS = 60_000_000
NUM_TOKENS = 5
YES = "yes"
UNTRIED: dict[str, str] = {
    "diffusion_gemma": "it writes blocks by diffusion, not token by token",
    "florence2": "it is an encoder-decoder, whose cross-attention has no place in the cache",
    "pi0": "it gives the actions of a robot, not text",
    "pix2struct": "it is an encoder-decoder, whose cross-attention has no place in the cache",
    "pp_formulanet": "it is an encoder-decoder, whose cross-attention has no place in the cache",
    "qwen4_exp": "its n-gram states and sparse attention are not built",
    "t5gemma2": "it is an encoder-decoder, whose cross-attention has no place in the cache",
    "udop": "it is an encoder-decoder, whose cross-attention has no place in the cache",
    "vision-encoder-decoder": "it is an encoder-decoder, whose cross-attention has no place in the cache",
}
"""Types whose text cannot be tried with a tiny model, and why the engine does not serve it."""


def rows() -> dict[str, dict[str, str]]:
    """A row for each type of transformers that writes text."""
    logging.disable(logging.WARNING)
    try:
        return {name: row_of(name) for name in sorted({*IMAGE_TEXT, *CAUSAL})}
    finally:
        logging.disable(logging.NOTSET)


def row_of(name: str) -> dict[str, str]:
    """What is served of one type."""
    sees = name in IMAGE_TEXT
    row = dict.fromkeys(COLUMNS, "")
    row["plugin text"] = reason_of(lambda: patch(_tiny(name)))
    if not sees and name in report_hybrids.TYPES and name != "inkling_text":
        # tests/engine/test_hybrids.py compares these
        answer = _hybrids()[name]["engine"]
        row["engine text"] = YES if answer == "y" else answer
    else:
        row["engine text"] = UNTRIED.get(name) or reason_of(lambda: check_text(name))
    if not sees:
        return row | {"plugin image": "-", "engine image": "-"}
    row["plugin image"] = row["plugin text"]
    if row["engine text"] != YES:
        row["engine image"] = row["engine text"]
    elif name in IMAGES:
        row["engine image"] = reason_of(lambda: check_images(name))
    else:
        row["engine image"] = "its images are not proven against generate"
    return row


@functools.cache
def _hybrids() -> dict[str, dict[str, str]]:
    return report_hybrids.rows()


def reason_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except UnsupportedModelError as error:
        return _short(str(error))
    except ParameterError as error:
        return _short(str(error))
    except AssertionError as error:
        return f"differs: {_short(str(error))}"
    except Exception as error:  # what the code of a type raises for a tiny config
        return f"not tried: {type(error).__name__}: {_short(str(error))}"
    return YES


def _short(reason: str) -> str:
    text = " ".join(reason.split()).replace("|", "/").replace("`", "")
    text = text.split("cannot run on a paged cache: ")[-1].partition(", so fa_serve")[0].partition(". If it is")[0]
    return text[:160]


def _tiny(name: str) -> PreTrainedModel:
    changes = CHANGES.get(name)
    config = tiny_config(name, changes)
    with torch.device("meta"):
        size = sum(p.numel() for p in auto_class(config).from_config(config, attn_implementation="eager").parameters())
    if size > MOST_WEIGHTS:
        raise ValueError(f"the tiny model has {size / 1e6:.0f}M weights")
    return tiny_model(name, changes)


def _generated(model: PreTrainedModel, inputs: dict[str, Any]) -> list[int]:
    length = inputs["input_ids"].shape[1]
    options = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False}
    if model.config.model_type == "git":
        options["use_cache"] = False  # with a cache, transformers adds the number of cached tokens to the positions twice
    with torch.no_grad():
        output: Any = model.generate(**inputs, **options, pad_token_id=0, eos_token_id=None)
    return output[0, length:].tolist()


def _ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, 140, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def _served(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], images: Sequence[Sequence[ImageInput]], **settings: Any
) -> list[list[int]]:
    """The tokens of the engine, twice: the second time the prompts are in the prefix cache."""
    config = EngineConfig(num_pages=96, max_model_len=192, page_size=4, **settings)
    engine = Engine(config, model=model)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    first, second = ([list(x.token_ids) for x in engine.generate(prompts, params, images=images)] for _ in range(2))
    engine.check_integrity()
    assert first == second, f"{second} from the prefix cache, {first} before"
    return first


def _served_in_slices(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], images: Sequence[Sequence[ImageInput]], **settings: Any
) -> tuple[list[list[int]], int]:
    """The tokens of the engine, the first tokens of each answer. The first request decodes before the others come, and steps
    have time for one embedding beside it. Also returns the number of steps that encoded."""
    config = EngineConfig(num_pages=96, max_model_len=192, page_size=4, target_itl=1e-3, **settings)
    engine = Engine(config, model=model)
    answers: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    num_slices = 0
    encode = engine._runner.encode

    def count(work: TowerWork | None) -> None:
        nonlocal num_slices
        num_slices += work is not None
        encode(work)

    engine._runner.encode = count  # type: ignore[method-assign]
    share = engine._scheduler.prompt_share
    assert share is not None
    share.image_limit = lambda *_, **__: 1  # type: ignore[method-assign]
    for number, (prompt, own) in enumerate(zip(prompts, images, strict=True)):
        params = SamplingParams(max_tokens=NUM_TOKENS if number else 60, temperature=0.0, ignore_eos=True)
        engine.add_request(str(number), prompt, params, images=own)
        for _ in range(2 if not number else 0):
            for output in engine.step():
                answers[output.request_id] += output.token_ids
    while engine.has_unfinished():
        for output in engine.step():
            answers[output.request_id] += output.token_ids
    engine.check_integrity()
    engine.close()
    return [each[:NUM_TOKENS] for each in answers.values()], num_slices


def check_text(name: str, device: str = "cpu") -> None:
    """Assert that the engine gives the tokens of `generate`."""
    model = _tiny(name)
    model.to(device)  # type: ignore[arg-type]
    prompts = [_ids(17, 1), _ids(6, 2)]
    inner = text_model(model)
    inputs = [whole_prompt(name, inner, ids, []) for ids in prompts]
    expected = [_generated(inner, {key: x.to(device) for key, x in each.items()}) for each in inputs]
    actual = _served(model, prompts, [(), ()])
    assert actual == expected, f"{actual}, and generate {expected}"


def check_images(name: str, device: str = "cpu") -> None:
    """The same for prompts with no, one and two images in one batch, in chunks where no block forbids it; and with images that
    go through the towers a layer at a time, while the prompt without images decodes."""
    model = _tiny(name)
    one, two = (one_image(name, model, seed) for seed in (1, 2))
    model.to(device)  # type: ignore[arg-type]
    count = one["input_ids"].shape[1]
    places = [IMAGE] * count
    given = [
        (_ids(9, 3), []),
        (_ids(5, 4) + places + _ids(6, 5), [one]),
        (_ids(3, 6) + places + _ids(2, 7) + places + _ids(4, 8), [one, two]),
    ]
    inputs = [whole_prompt(name, model, ids, images) for ids, images in given]
    expected = [_generated(model, {key: x.to(device) for key, x in each.items()}) for each in inputs]
    images = [tuple(ImageInput.of(image) for image in own) for _, own in given]
    whole = name == "paligemma"
    settings = {} if whole else {"max_num_batched_tokens": max(count, 9) + 3, "max_num_seqs": 3}
    actual = _served(model, [ids for ids, _ in given], images, **settings)
    assert actual == expected, f"{actual}, and generate {expected}"
    sliced, num_slices = _served_in_slices(model, [ids for ids, _ in given], images, **settings)
    assert sliced == expected, f"{sliced} in slices, and generate {expected}"
    # a tower without layers, and an image of one embedding, are encoded whole
    is_cut = count > 1 and ImageReader(model).blocks
    assert num_slices >= 2 or not is_cut, "the images did not go through the towers in parts"
