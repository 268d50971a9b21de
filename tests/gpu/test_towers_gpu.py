"""Images beside decoding on a GPU: towers that pause, captured steps, and layers of towers that are captured each by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from every_type import tiny_model
from image_inputs import CHANGES, IMAGE, one_image
from report_types import check_images
from transformers import Qwen2_5_VLConfig, Qwen3VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

import fa_serve
from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.engine.images import tower_graphs
from fa_serve.engine.images.encoder import ImageEncoder
from fa_serve.engine.images.prompt import ImageInput
from fa_serve.engine.images.tower_graphs import TowerGraphs
from fa_serve.engine.images.tower_time import Stopwatch
from fa_serve.engine.runner.cuda_graphs import StepGraphs
from fa_serve.engine.runner.padded_steps import Shape
from fa_serve.engine.scheduler.scheduled_batch import TowerWork
from fa_serve.hf.images import ImageReader
from fa_serve.hf.surgery.towers import speed_up_tower

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


@pytest.mark.parametrize("name", [*TYPES, "glm4v", "llava_onevision", "idefics3", "gemma4"])
def test_layers_of_towers_are_replayed(name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An engine gives the tokens that it gives without graphs, for images whose layers are replayed."""
    model = tiny_model(name, CHANGES[name])
    images = [one_image(name, model, seed) for seed in range(4)]
    model.to("cuda")  # type: ignore[arg-type]
    settings = {"num_pages": 64, "max_model_len": 128, "page_size": 16, "prefix_caching": False, "image_cache_bytes": 0}
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    ids = [5, 6, *[IMAGE] * images[0]["input_ids"].shape[1], 7]
    given = [[ImageInput.of(each)] for each in images]
    plain = Engine(EngineConfig(**settings), model=model)  # type: ignore[arg-type]
    expected = [plain.generate([ids], params, images=[own])[0].token_ids for own in given]
    plain.close()
    monkeypatch.setattr(tower_graphs, "REPLAYS_TOWERS", True)
    engine = Engine(EngineConfig(**settings), model=model)  # type: ignore[arg-type]
    encoder = engine._runner.images
    assert isinstance(encoder, ImageEncoder)
    assert encoder.graphs is not None
    assert [engine.generate([ids], params, images=[own])[0].token_ids for own in given] == expected
    assert encoder.graphs.num_captures
    assert encoder.graphs.num_replays
    assert "without a CUDA graph" not in caplog.text
    engine.close()
    assert encoder.graphs.num_bytes == 0


def tower_of(name: str, dtype: torch.dtype) -> Any:
    """The tower of a model of 7 or 8 billion weights, with few layers."""
    with torch.device("cuda"):
        if name == "qwen2_5_vl":
            vision = {"hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584, "depth": 4}
            config: Any = Qwen2_5_VLConfig(vision_config=vision | {"fullatt_block_indexes": [1]}).vision_config
            tower: Any = Qwen2_5_VisionTransformerPretrainedModel(config)
        else:
            config = Qwen3VLConfig(vision_config={"out_hidden_size": 4096, "depth": 4, "deepstack_visual_indexes": [0, 2]})
            tower = Qwen3VLVisionModel(config.vision_config)
    tower = tower.to(dtype).eval().requires_grad_(False)
    fa_serve.patch(tower)
    speed_up_tower(tower)
    return tower


def forward(tower: Any, *sides: tuple[int, int], seed: int = 0) -> list[torch.Tensor]:
    """What the tower makes of pictures of so many patches along each side."""
    draw = torch.Generator("cuda").manual_seed(seed)
    config = tower.config
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    dtype = next(tower.parameters()).dtype
    rows = sum(height * width for height, width in sides)
    pixels = torch.randn(rows, width, device="cuda", generator=draw).to(dtype)
    grid = torch.tensor([(1, *each) for each in sides], device="cuda")
    with torch.inference_mode():
        found = tower(pixels, grid)
    return [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]


PICTURES = [
    ((40, 40),),
    ((40, 38),),
    ((2, 4),),
    ((24, 60),),
    ((40, 40), (10, 16)),
    ((8, 8), (8, 8), (8, 8)),
    ((64, 64),),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_pictures_of_real_sizes_are_padded_and_replayed(
    name: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    tower = tower_of(name, dtype)
    graphs = TowerGraphs([*tower.blocks], torch.device("cuda:0"))
    expected = [forward(tower, *sides, seed=seed) for seed, sides in enumerate(PICTURES)]
    tolerance = {"rtol": 1e-3, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    with graphs.replaying():
        for _ in range(4):
            for seed, sides in enumerate(PICTURES):
                for ours, own in zip(forward(tower, *sides, seed=seed), expected[seed], strict=True):
                    torch.testing.assert_close(ours, own, **tolerance)  # type: ignore[arg-type]
    assert graphs.num_replays >= 2 * len(PICTURES) * len(tower.blocks)
    assert not caplog.text
    assert graphs.num_bytes <= graphs.max_bytes


def test_a_replay_waits_for_nothing(no_synchronisation: Callable[[], AbstractContextManager[None]]) -> None:
    """Copies, a replay and a copy: what a layer costs the host."""
    tower = tower_of("qwen2_5_vl", torch.bfloat16)
    block = tower.blocks[0]
    graphs = TowerGraphs([block], torch.device("cuda:0"))
    x = torch.randn(1600, 1280, device="cuda", dtype=torch.bfloat16)
    angles = torch.randn(1600, 40, device="cuda").repeat(1, 2)
    words = {
        "cu_seqlens": torch.arange(0, 1601, 64, device="cuda", dtype=torch.int32),
        "max_seqlen": 64,
        "position_embeddings": (angles.cos(), angles.sin()),
    }
    with torch.inference_mode(), graphs.replaying():
        expected = block(x, **words)
        block(x, **words)
        with no_synchronisation():
            found = block(x, **words)
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    assert graphs.num_replays == 1


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_attention_that_rotates_by_one_kernel(name: str) -> None:
    tower = tower_of(name, torch.bfloat16)
    attention = tower.blocks[0].attn
    assert type(attention.forward).__name__ == "PackedAttention"
    width = attention.qkv.in_features
    x = torch.randn(1600, width, device="cuda", dtype=torch.bfloat16)
    angles = torch.randn(1600, attention.head_dim // 2, device="cuda").repeat(1, 2)
    words = {
        "cu_seqlens": torch.tensor([0, 64, 64, 1600], device="cuda", dtype=torch.int32),
        "max_seqlen": 1536,
        "position_embeddings": (angles.cos(), angles.sin()),
    }
    with torch.inference_mode():
        own = type(attention).forward(attention, x, **words)
        torch.testing.assert_close(attention(x, **words), own, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("limit", [None, 8])
def test_the_host_waits_for_the_towers_alone(limit: int | None) -> None:
    """Models ask for sizes of images, which takes as long as what is queued on their stream. The step before is not on it, and
    what the engine queues afterwards has the embeddings."""
    model = tiny_model("qwen2_5_vl", CHANGES["qwen2_5_vl"])
    inputs = [one_image("qwen2_5_vl", model, seed) for seed in range(3)]
    model.to("cuda")  # type: ignore[arg-type]
    reader = ImageReader(model)
    expected = [reader.encode(each).embeds for each in inputs]
    images = [ImageInput.of(each) for each in inputs]
    ImageEncoder(reader, 1 << 20).advance(TowerWork(images[1:], None, 8))  # compiles
    encoder = ImageEncoder(reader, 1 << 20)
    for each in images:
        encoder.hold(each.key)
    encoder.advance(TowerWork(images[:1], None, 1))
    torch.cuda.synchronize()
    step = torch.cuda.Event()
    torch.cuda._sleep(4_000_000_000)  # cycles, some two seconds
    step.record()
    encoder.advance(TowerWork(images[1:], limit, 8))
    while encoder.is_busy:
        encoder.advance(TowerWork(images[1:], limit, 8))
    assert not step.query()
    found = encoder.features(images)
    for image, embeds in zip(images, expected, strict=True):
        torch.testing.assert_close(found[image.key].embeds, embeds, rtol=1e-4, atol=1e-4)


def test_the_time_of_images_is_that_of_their_stream() -> None:
    """Neither what the host takes, nor what is queued on other streams and behind them."""
    stream: Any = torch.cuda.Stream()
    torch.cuda._sleep(1_000_000_000)  # cycles, half a second
    with torch.cuda.stream(stream):
        watch = Stopwatch(stream)
        torch.cuda._sleep(200_000_000)
        watch.stop()
        torch.cuda._sleep(1_000_000_000)
    begin = time.perf_counter()
    assert 0.05 < watch.seconds() < 0.3
    assert time.perf_counter() - begin < 0.4, "it waits for the images alone"
    torch.cuda.synchronize()
