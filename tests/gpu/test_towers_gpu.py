"""Images beside decoding on a GPU: towers that pause, and captured steps."""

from __future__ import annotations

import pytest
from every_type import tiny_model
from image_inputs import CHANGES, IMAGE, one_image
from report_types import check_images

from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.engine.images.prompt import ImageInput
from fa_serve.engine.runner.cuda_graphs import Shape, StepGraphs

pytestmark = pytest.mark.usefixtures("full_float32")
TYPES = ["llava", "mistral3", "internvl", "gemma3", "qwen2_5_vl", "qwen3_vl"]


@pytest.mark.parametrize("name", TYPES)
def test_tokens_of_towers_that_pause_and_of_captured_steps(name: str) -> None:
    check_images(name, device="cuda")


@pytest.mark.parametrize(("name", "axes"), [("llava", 1), ("qwen2_5_vl", 3)])
def test_steps_with_images_replay_graphs(name: str, axes: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
