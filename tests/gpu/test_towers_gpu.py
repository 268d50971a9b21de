"""Images beside decoding on a GPU: towers that pause, or have a separate stream, and captured steps. All are off until this and
`bench_images --cells "text p99"` have been run."""

from __future__ import annotations

import pytest
import torch
from every_type import tiny_model
from image_inputs import CHANGES, IMAGE, one_image
from report_types import check_images

from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.engine.images import encoder
from fa_serve.engine.images.encoder import ImageEncoder
from fa_serve.engine.images.prompt import ImageInput
from fa_serve.engine.runner import image_arrays
from fa_serve.engine.runner.cuda_graphs import Shape, StepGraphs
from fa_serve.engine.scheduler.scheduled_batch import TowerWork
from fa_serve.hf.images import ImageReader

pytestmark = pytest.mark.usefixtures("full_float32")
TYPES = ["llava", "mistral3", "internvl", "gemma3", "qwen2_5_vl", "qwen3_vl"]


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "ENCODES_BESIDE", True)


@pytest.fixture(autouse=True)
def _own_stream() -> object:
    with torch.cuda.stream(torch.cuda.default_stream()):
        yield


@pytest.mark.parametrize("name", TYPES)
def test_tokens_with_towers_that_pause(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "PAUSES_ON_GPU", True)
    check_images(name, device="cuda")


@pytest.mark.parametrize("name", TYPES)
def test_tokens_with_towers_beside_steps(name: str, beside: None) -> None:
    check_images(name, device="cuda")


@pytest.mark.parametrize("name", TYPES)
def test_tokens_of_captured_steps_with_images(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_arrays, "CAPTURES_IMAGES", True)
    check_images(name, device="cuda")


@pytest.mark.parametrize(("name", "axes"), [("llava", 1), ("qwen2_5_vl", 3)])
def test_steps_with_images_replay_graphs(name: str, axes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_arrays, "CAPTURES_IMAGES", True)
    model = tiny_model(name, CHANGES[name])
    images = [one_image(name, model, seed) for seed in range(4)]
    model.to("cuda")  # type: ignore[arg-type]
    settings = {"num_pages": 64, "max_model_len": 128, "page_size": 16, "prefix_caching": False}
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    ids = [5, 6, *[IMAGE] * images[0]["input_ids"].shape[1], 7]
    given = [[ImageInput.of(each)] for each in images]
    eager = Engine(EngineConfig(eager=True, **settings), model=model)  # type: ignore[arg-type]
    expected = [eager.generate([ids], params, images=[own])[0].token_ids for own in given]
    eager.close()
    engine = Engine(EngineConfig(**settings), model=model)  # type: ignore[arg-type]
    shapes: list[Shape] = []
    run = StepGraphs.run
    monkeypatch.setattr(StepGraphs, "run", lambda self, shape: shapes.append(shape) or run(self, shape))
    assert [engine.generate([ids], params, images=[own])[0].token_ids for own in given] == expected
    assert [shape.axes for shape in shapes if shape.axes] == [axes] * 3, "the first step of a shape is not captured"


def test_a_step_does_not_wait_for_the_towers(beside: None) -> None:
    """What is queued for the towers is not there when `advance` returns, and is right when it is."""
    model = tiny_model("qwen2_5_vl", {**CHANGES["qwen2_5_vl"], "vision_config": {"depth": 8}})
    given = one_image("qwen2_5_vl", model, seed=1)
    model.to("cuda")  # type: ignore[arg-type]
    reader = ImageReader(model)
    expected = reader.encode(given).embeds
    made = ImageEncoder(reader, max_bytes=1 << 20)
    image = ImageInput.of(given)
    while not made.is_encoded(image.key):
        made.advance(TowerWork([image], limit=1, count=1))
    torch.testing.assert_close(made.features([image])[image.key].embeds, expected, rtol=1e-4, atol=1e-4)
    assert made.num_encoded == 1
