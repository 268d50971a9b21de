"""Images on two ranks, which are processes: the tokens of `generate`, one decision about what is encoded, and what fails."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_cases import GREEDY, Case, answer
from image_inputs import IMAGE, Inputs
from sampled_cases import each_nth
from tiny_models import make_tokenizer

from fa_serve.engine import Engine, EngineConfig, EngineDeadError, SamplingParams
from fa_serve.engine.images.prompt import ImageInput, PlacedImage, PromptImages
from fa_serve.engine.parallel import leader
from fa_serve.hf.images import ImageFeatures
from fa_serve.spec import ParameterError, UnsupportedModelError

TEXT = [5, 6, 7]
LONG = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def llava() -> Case:
    return Case("llava")


def start(case: Case, folder: Path, **settings: Any) -> Engine:
    case.model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    given = {"device": "cpu", "dtype": "float32", "num_pages": 64, "max_model_len": 128, "page_size": 4, "tensor_parallel": 2}
    return Engine(EngineConfig(**given | {"model": folder} | settings))


@pytest.fixture(autouse=True)
def engines(warm_followers: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Those of a test that fails end with it, or no later one of this process could start."""
    made: list[Engine] = []
    own = Engine.__init__

    def init(self: Engine, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(Engine, "__init__", init)
    yield
    for engine in made:
        engine.close()


def close(engine: Engine) -> None:
    """The follower has checked its integrity as well, and ends without an error."""
    engine.check_integrity()
    engine._runner.images.check_integrity()
    [link] = engine._ranks._links
    engine.close()
    assert link.process.returncode == 0


def answers(engine: Engine, case: Case, given: Sequence[tuple[list[int], list[int]]]) -> list[list[int]]:
    images = [[case.images[n] for n in numbers] for _, numbers in given]
    return [list(x.token_ids) for x in engine.generate([ids for ids, _ in given], GREEDY, images=images)]


@pytest.mark.slow
@pytest.mark.parametrize("name", each_nth(2, ["llava", "qwen2_5_vl", "gemma3", "qwen3_vl_moe"]))
def test_two_ranks_write_the_tokens_of_generate(tmp_path: Path, name: str) -> None:
    """Pictures, positions on three axes, features for inner layers and blocks that attend both ways, mixed with text, in
    chunks and preempted; then with what is cached."""
    case = Case(name)
    engine = start(case, tmp_path, num_pages=10, max_model_len=40, max_num_batched_tokens=10, max_num_seqs=4)
    prompts = [(case.prompt(0, text=3), [0]), (case.prompt(1, text=4), [1]), (TEXT * 2, []), (case.prompt(1, 0), [1, 0])]
    expected = [case.generate(ids, *numbers) for ids, numbers in prompts]
    assert answers(engine, case, prompts) == expected
    assert engine.stats().num_preemptions > 0
    answers(engine, case, prompts[:1])
    cached = engine.stats().num_cached_tokens
    assert answers(engine, case, prompts[:1]) == expected[:1]
    assert engine.stats().num_cached_tokens >= cached + 4
    assert engine._runner.images.num_encoded == 3, "the first one tells how tokens attend, before the others know of it"
    close(engine)


def test_pixels_stay_with_rank_0(llava: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower is told places and shapes. The numbers are those of a step with embeddings alone."""
    large = ImageInput.of({**llava.inputs[0], "unused": torch.zeros(1 << 22)})
    sent: list[int] = []
    own = leader._pickled

    def pickled(value: Any) -> bytes:
        data = own(value)
        sent.append(len(data))
        return data

    engine = start(llava, tmp_path)
    monkeypatch.setattr(leader, "_pickled", pickled)
    ids = llava.prompt(0)
    assert answer(engine, ids, large) == llava.generate(ids, 0)
    assert 0 < max(sent) < 1 << 13
    close(engine)


def test_the_answers_of_a_request_share_their_images_on_a_follower() -> None:
    """They are like each other (`Request.is_like`) by the identity of their images."""
    image = ImageInput.of({"input_ids": torch.full((1, 2), IMAGE), "pixel_values": torch.zeros(1 << 20)})
    images = PromptImages((PlacedImage(image, np.arange(2)),), [IMAGE, IMAGE])
    data = leader._pickled([images, images])
    assert len(data) < 2000
    found, again = pickle.loads(data)
    assert found is again
    [placed] = found.placed
    assert (placed.image.key, placed.places.tolist()) == (image.key, [0, 1])
    assert placed.image.inputs.keys() == {"input_ids"}
    assert placed.image.inputs["input_ids"].tolist() == [[IMAGE, IMAGE]]


def test_embeddings_that_are_not_kept_are_encoded_again(llava: Case, tmp_path: Path) -> None:
    engine = start(llava, tmp_path, image_cache_bytes=0, max_num_batched_tokens=4, max_num_seqs=2)
    prompts = [(llava.prompt(0, 1), [0, 1]), (llava.prompt(1), [1])]
    assert answers(engine, llava, prompts) == [llava.generate(ids, *numbers) for ids, numbers in prompts]
    close(engine)


def large_image(seed: int) -> Inputs:
    """36 tokens of Qwen's kind, of which a step encodes 16 at first."""
    ids = torch.full((1, 36), IMAGE)
    values = torch.randn(144, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(seed))
    types = {"mm_token_type_ids": torch.ones_like(ids, dtype=torch.int32), "token_type_ids": torch.ones_like(ids)}
    return {"input_ids": ids, "pixel_values": values, "image_grid_thw": torch.tensor([[1, 12, 12]]), **types}


def deep_case() -> Case:
    case = Case("qwen2_5_vl", {"vision_config": {"depth": 8}})
    case.inputs = [large_image(seed) for seed in (1, 2)]
    case.images = [ImageInput.of(inputs) for inputs in case.inputs]
    case.count = 36
    return case


def run_beside_text(engine: Engine, name: str, ids: list[int], *images: ImageInput) -> dict[str, Any]:
    """The tokens of a text that decodes and of a request with images that comes later, and the code of its error.

    "busy": steps that left images on their way
    """
    found: dict[str, Any] = {"text": [], name: [], "busy": 0, "error": None}
    engine.add_request("text", TEXT, LONG)
    found["text"] += [token for output in engine.step() for token in output.token_ids]
    engine.add_request(name, ids, GREEDY, images=images)
    while engine.has_unfinished():
        for output in engine.step():
            found[output.request_id] += output.token_ids
            found["error"] = found["error"] or (output.error and output.error.code)
        found["busy"] += engine._runner.images.is_busy
    return found


@pytest.mark.slow
def test_images_go_through_the_towers_in_parts(tmp_path: Path) -> None:
    case = deep_case()
    engine = start(case, tmp_path, max_num_batched_tokens=64, target_itl=15.0)
    ids = case.prompt(0, 1)
    found = run_beside_text(engine, "image", ids, *case.images)
    assert found["busy"] > 1
    assert found["image"] == case.generate(ids, 0, 1)
    assert len(found["text"]) == 24
    assert answer(engine, TEXT, params=LONG) == found["text"]
    close(engine)


def failing(own: Callable[..., Any], error: Exception, count: int) -> Callable[..., Any]:
    """The towers of rank 0 fail so many times."""
    left = [count]

    def encode_all(images: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return own(images)

    return encode_all


@pytest.mark.slow
@pytest.mark.parametrize(("error", "in_parts"), [(KeyError("broken"), False), (torch.OutOfMemoryError("no memory"), True)])
def test_towers_that_fail_end_their_request_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llava: Case, error: Exception, in_parts: bool
) -> None:
    case = deep_case() if in_parts else llava
    engine = start(case, tmp_path, max_num_batched_tokens=64, target_itl=15.0)
    reader = engine._runner.images.reader
    ids = case.prompt(1)
    assert answer(engine, case.prompt(0), case.images[0]) == case.generate(case.prompt(0), 0)
    with monkeypatch.context() as patch:
        patch.setattr(reader, "encode_all", failing(reader.encode_all, error, 1))
        found = run_beside_text(engine, "image", ids, case.images[1])
    assert (found["image"], found["error"], len(found["text"])) == ([], "image_failed", 24)
    assert answer(engine, TEXT, params=LONG) == found["text"]
    assert answer(engine, ids, case.images[1]) == case.generate(ids, 1), "it is encoded again for the next request"
    close(engine)


def test_an_image_that_the_towers_refuse_ends_its_own_request(tmp_path: Path, llava: Case) -> None:
    """As the first image of an engine it is refused before the other rank hears of it."""
    engine = start(llava, tmp_path)
    wrong = ImageInput.of({**llava.inputs[1], "pixel_values": torch.zeros(1, 3, 30, 28)})
    ids = llava.prompt(1)
    with pytest.raises(ParameterError, match="images must be images that the model's vision tower can encode"):
        engine.add_request("first", ids, GREEDY, images=[wrong])
    images = [[llava.images[0]], [wrong], [llava.images[1]]]
    prompts = [llava.prompt(0), ids, llava.prompt(1, text=8)]
    outputs = engine.generate(prompts, GREEDY, images=images)
    assert [x.finish_reason for x in outputs] == ["length", "error", "length"]
    assert outputs[1].error is not None
    assert outputs[1].error.code == "image_failed"
    assert list(outputs[0].token_ids) == llava.generate(prompts[0], 0)
    assert list(outputs[2].token_ids) == llava.generate(prompts[2], 1)
    close(engine)


@pytest.mark.slow
def test_numbers_that_are_not_finite_end_the_request_on_all_ranks(
    tmp_path: Path, llava: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The towers do not refuse the image; the sampler finds no token."""
    engine = start(llava, tmp_path)
    ids = llava.prompt(0)
    assert answer(engine, ids, llava.images[0]) == llava.generate(ids, 0)
    reader = engine._runner.images.reader

    def encode_all(images: Any) -> list[ImageFeatures]:
        return [ImageFeatures(torch.full((llava.count, reader.hidden), float("nan")), (), "none") for _ in images]

    with monkeypatch.context() as patch:
        patch.setattr(reader, "encode_all", encode_all)
        found = run_beside_text(engine, "image", llava.prompt(1), llava.images[1])
    assert (found["image"], len(found["text"])) == ([], 24)
    assert found["error"] is not None
    close(engine)


def test_a_rank_that_is_lost_while_an_image_is_encoded_ends_the_engine(
    tmp_path: Path, llava: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(llava, tmp_path)
    ids = llava.prompt(0)
    answer(engine, ids, llava.images[0])
    reader = engine._runner.images.reader
    own = reader.encode_all

    def encode_all(images: Any) -> Any:
        [link] = engine._ranks._links
        link.kill()
        link.wait(10)
        return own(images)

    monkeypatch.setattr(reader, "encode_all", encode_all)
    with pytest.raises(EngineDeadError, match="rank 1 of 2"):
        answer(engine, llava.prompt(1), llava.images[1])
    engine.close()


def test_a_language_model_without_a_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModelError, match="cannot be divided between 2 ranks: transformers has no tensor-parallel plan"
    ):
        start(Case("qwen3_vl"), tmp_path)


def test_images_and_drafts_on_two_ranks(tmp_path: Path, llava: Case) -> None:
    engine = start(llava, tmp_path, speculative="ngram", num_speculative_tokens=3)
    prompts = [(llava.prompt(0, 1), [0, 1]), (TEXT * 3, []), (llava.prompt(1), [1])]
    assert answers(engine, llava, prompts) == [llava.generate(ids, *numbers) for ids, numbers in prompts]
    close(engine)
