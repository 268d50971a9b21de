"""Token ids with images as no processor writes them: each is served or refused by name, and the engine goes on."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from image_cases import GREEDY, Case, answer
from image_inputs import IMAGE
from sampled_cases import examples

from fa_serve.engine import SamplingParams
from fa_serve.engine.images.prompt import ImageInput
from fa_serve.spec import ParameterError

MARKS = {
    "video_token_id": 151,
    "vision_start_token_id": 152,
    "vision_end_token_id": 153,
    "audio_token_id": 154,
    "audio_start_token_id": 155,
    "audio_end_token_id": 156,
}
FAMILIES = [
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen2_5_omni_thinker",
    "glm4v",
    "hunyuan_vl",
    "ernie4_5_vl_moe",
    "llava",
    "gemma3",
    "paligemma",
    "idefics3",
]
COMPUTE_POSITIONS = FAMILIES[:6]
PROMPTS = examples(180)
ONE = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
BAD = [-1, -(2**63), 160, 10**6, 2**63, 2**70, 1.5, None, "150", b"x", [5]]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param, MARKS)


def drawn(case: Case, choose: random.Random) -> tuple[list[Any], list[ImageInput]]:
    """A prompt with too few, too many or as many image tokens as its images have embeddings, wherever they stand."""
    images = [case.images[number] for number in choose.choices((0, 1), k=choose.choice((1, 1, 2, 3)))]
    needed = case.count * len(images)
    count = choose.choice([needed] * 5 + [needed + 1, needed - 1, 0, 2 * needed])
    words = [*range(5, 140), *[*MARKS.values()] * 8]
    text = choose.choices(words, k=choose.randrange(12))
    tokens: list[Any] = []
    match choose.randrange(4):
        case 0:
            tokens = [*text, *[IMAGE] * count]
            choose.shuffle(tokens)
        case 1:
            cut = choose.randrange(len(text) + 1)
            tokens = [*text[:cut], *[IMAGE] * count, *text[cut:]]
        case 2:
            for begin in range(0, count, case.count):
                tokens += [choose.choice(words), *[IMAGE] * min(case.count, count - begin)]
        case 3:
            for begin in range(0, count, case.count):
                tokens += [152, *[IMAGE] * min(case.count, count - begin), 153, choose.choice(words)]
    if choose.random() < 0.1:
        tokens.insert(choose.randrange(len(tokens) + 1), choose.choice(BAD))
    return tokens, images


def test_prompts_at_random(case: Case) -> None:
    engine = case.engine()
    choose = random.Random(case.name)
    blamed = []
    for number in range(PROMPTS):
        tokens, images = drawn(case, choose)
        try:
            engine.add_request(str(number), tokens, ONE, images=images)
        except ParameterError as error:
            blamed.append(error.field)
    assert {*blamed} == {"prompt"}
    assert 3 < len(blamed) < PROMPTS - 3
    reasons = set()
    while engine.has_unfinished():
        reasons |= {output.finish_reason for output in engine.step() if output.finished}
    assert reasons == {"length"}
    engine.check_integrity()
    ids = [10, 152, *case.prompt(0, text=0), 153, 11]
    assert answer(engine, ids, case.images[0]) == case.generate(ids, 0)


@pytest.mark.parametrize("case", COMPUTE_POSITIONS, indirect=True)
def test_images_side_by_side_are_refused_where_the_model_could_not_tell_them_apart(case: Case) -> None:
    engine = case.engine()
    count = case.count
    told = rf"prompt must have the image tokens \(150\) of each image next to each other, \[{count}, {count}\] of them in this "
    for tokens, runs in [
        ([5, *[IMAGE] * 2 * count, 6], [2 * count]),
        ([5, *[IMAGE] * (count - 1), 6, *[IMAGE] * (count + 1)], [count - 1, count + 1]),
        ([5, *[IMAGE] * count, 6, *[IMAGE] * (count - 1), 7, IMAGE], [count, count - 1, 1]),
    ]:
        with pytest.raises(
            ParameterError, match=told + re.escape(f"order, and another token between those of two images, got {runs}")
        ):
            engine.add_request("bad", tokens, GREEDY, images=case.images)
    assert not engine.has_unfinished()


@pytest.mark.parametrize("case", ["llava", "gemma3", "idefics3"], indirect=True)
def test_images_side_by_side_are_served_where_a_token_has_one_position(case: Case) -> None:
    ids = [5, *[IMAGE] * 2 * case.count, 6]
    assert answer(case.engine(), ids, *case.images) == case.generate(ids, 0, 1)


@pytest.mark.parametrize("case", ["qwen2_5_omni_thinker"], indirect=True)
@pytest.mark.parametrize("mark", [152, 154, 155])
def test_what_the_models_own_code_raises_is_told_with_its_rule(case: Case, mark: int) -> None:
    """Marks of images and sounds at the end, of which there are none."""
    engine = case.engine()
    tokens = [5, 152, *[IMAGE] * case.count, 153, 152, 151, mark]
    with pytest.raises(ParameterError, match=r"prompt must place images, .* as the model's processor does \(") as error:
        engine.add_request("bad", tokens, GREEDY, images=case.images[:1])
    assert "finds no positions" in error.value.rule
    assert error.value.value == tokens


@pytest.mark.parametrize("case", ["llava"], indirect=True)
@pytest.mark.parametrize("token", BAD)
def test_a_token_that_is_none_is_refused_beside_an_image_as_without_one(case: Case, token: Any) -> None:
    engine = case.engine()
    for images in ([], case.images[:1]):
        with pytest.raises(ParameterError, match=r"prompt must hold token ids from 0 to 159"):
            engine.add_request("bad", [5, *[IMAGE] * case.count * len(images), token], GREEDY, images=images)


@pytest.mark.parametrize("case", ["llava", "qwen2_5_vl"], indirect=True)
def test_images_that_are_none(case: Case) -> None:
    engine = case.engine()
    for image in ("a.png", None, case.inputs[0], ImageInput.of({"pixel_values": torch.zeros(3)})):
        with pytest.raises(ParameterError, match=r"images must hold what ImageInput.of returns for inputs with input_ids"):
            engine.add_request("bad", case.prompt(0), GREEDY, images=[image])
    answer(engine, case.prompt(0), case.images[0])
    named = {name: x for name, x in case.inputs[0].items() if name != "image_grid_thw"}
    if case.name == "qwen2_5_vl":
        with pytest.raises(ParameterError, match=r"prompt must place images, .*finds no positions"):
            engine.add_request("bad", case.prompt(0), GREEDY, images=[ImageInput.of(named)])
