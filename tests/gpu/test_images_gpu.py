"""Images on a GPU: the tokens of `generate`, by graphs for the tokens after the prompt."""

from __future__ import annotations

import pytest
import torch
from every_type import tiny_model
from image_inputs import CHANGES, IMAGE, one_image
from report_types import check_images, check_text
from transformers.utils import is_timm_available

from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.engine.images.prompt import ImageInput
from fa_serve.engine.runner.cuda_graphs import StepGraphs
from fa_serve.hf.images import ImageReader

pytestmark = pytest.mark.usefixtures("full_float32")


@pytest.mark.parametrize(
    "name",
    ["llava", "llava_onevision", "mistral3", "internvl", "gemma3", "gemma4", "paligemma", "qwen2_5_vl", "qwen3_vl", "smolvlm"],
)
def test_tokens_are_those_of_generate(name: str) -> None:
    check_images(name, device="cuda")


@pytest.mark.parametrize(
    "name", ["blip", "deepseek_ocr2", "evolla", "gemma3n", "git", "glm5_next", "idefics", "kosmos-2", "minimax_m3_vl"]
)
def test_texts_of_types_with_code_that_is_replaced(name: str) -> None:
    """Masks, positions, blank images, choices of keys, and attention over gathered keys; some of them cannot be captured."""
    if name == "gemma3n" and is_timm_available():
        pytest.skip("with timm the model has its whole tower of 294M weights")
    check_text(name, device="cuda")


@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen2_5_vl"])
def test_decoding_after_images_replays_graphs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures, blocks that attend both ways, and positions on three axes: only the steps with the prompts run eagerly."""
    model = tiny_model(name, CHANGES[name])
    image = one_image(name, model, seed=1)
    model.to("cuda")  # type: ignore[arg-type]
    engine = Engine(EngineConfig(num_pages=64, max_model_len=128, page_size=16), model=model)
    replays = []
    run = StepGraphs.run
    monkeypatch.setattr(StepGraphs, "run", lambda self, shape: replays.append(shape) or run(self, shape))
    ids = [5, 6, *[IMAGE] * image["input_ids"].shape[1], 7]
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    engine.generate([ids], params, images=[[ImageInput.of(image)]])
    assert [shape.queries for shape in replays] == [1] * 8


def test_images_are_encoded_together_in_bfloat16() -> None:
    for name in ("llava", "qwen2_5_vl", "qwen3_vl", "gemma3"):
        model = tiny_model(name, CHANGES[name])
        given = [one_image(name, model, seed) for seed in range(4)]
        model.to("cuda", torch.bfloat16)  # type: ignore[arg-type]
        reader = ImageReader(model)
        alone = [reader.encode(inputs) for inputs in given]
        for _ in range(2):
            for one, other in zip(reader.encode_all(given), alone, strict=True):
                torch.testing.assert_close(one.embeds, other.embeds, rtol=0.02, atol=0.02)
        assert reader._joined_dim == 0, name
