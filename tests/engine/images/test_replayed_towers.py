"""Towers of models whose layers are replayed: embeddings, tokens, pauses, other weights, and where there are graphs.

Here a graph is what was recorded, or the function that it was captured from, where attention reads numbers on the host.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from every_type import tiny_model
from image_cases import GREEDY, Case, answer
from image_inputs import CHANGES, IMAGE, one_image
from recorded_graphs import record, run_again
from torch import Tensor
from tower_pictures import processes

import fa_serve
from fa_serve.engine import EngineConfig
from fa_serve.engine.images import tower_graphs
from fa_serve.engine.images.encoder import ImageEncoder, find_images
from fa_serve.engine.images.tower_graphs import TowerGraphs
from fa_serve.engine.scheduler.scheduled_batch import TowerWork
from fa_serve.hf.images import ImageReader

CPU = torch.device("cpu")


def test_hidden_states_that_a_model_records_are_copies() -> None:
    """LLaVA takes the output of the layer before the last, which transformers records by hooks."""
    case = Case("llava", {"vision_feature_layer": -2})
    graphs = TowerGraphs((reader := ImageReader(case.model)).blocks, CPU, capture=record)
    expected = [reader.encode(inputs).embeds for inputs in case.inputs]
    with graphs.replaying():
        for _ in range(3):
            found = [reader.encode(inputs).embeds for inputs in case.inputs]
            torch.testing.assert_close(found, expected)
    assert graphs.num_replays


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_pictures_of_any_size_meet_the_same_forms(name: str) -> None:
    changes = CHANGES[name] | ({"vision_config": {"depth": 3, "fullatt_block_indexes": [1]}} if name == "qwen2_5_vl" else {})
    model = tiny_model(name, changes)
    fa_serve.patch(model)
    reader = ImageReader(model)
    graphs = TowerGraphs(reader.blocks, CPU, capture=run_again)
    images = [picture(name, model, *sides) for sides in ((4, 4), (4, 8), (6, 6), (2, 10), (6, 10), (8, 8), (4, 10))]
    with torch.inference_mode():
        expected = [reader.encode(inputs) for inputs in images]
        for _ in range(2):
            with graphs.replaying():
                found = [reader.encode(inputs) for inputs in images]
            for ours, own in zip(found, expected, strict=True):
                torch.testing.assert_close(ours.embeds, own.embeds, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(ours.deep, own.deep, rtol=1e-4, atol=1e-5)
    blocks = [block for block in reader.blocks if "Block" in type(block).__name__]
    padded = [key for key, form in graphs._forms.items() if {*form.graphs} & {*blocks}]
    assert 0 < len(padded) <= 6, "seven pictures of at most 64 patches"
    assert all(key[1][0][0] == 64 for key in padded)


def picture(name: str, model: Any, height: int, width: int) -> dict[str, Tensor]:
    """One picture of so many patches along each side."""
    inputs = one_image(name, model, seed=height * 16 + width)
    draw = torch.Generator().manual_seed(height * 16 + width)
    ids = torch.full((1, height * width // 4), IMAGE)
    pixels = torch.randn(height * width, inputs["pixel_values"].shape[1], generator=draw)
    types = {key: torch.ones_like(ids, dtype=inputs[key].dtype) for key in ("mm_token_type_ids", "token_type_ids")}
    return {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, width]]), **types}


def with_graphs(encoder: Any, capture: Callable[..., Any] = run_again) -> TowerGraphs:
    assert isinstance(encoder, ImageEncoder)
    encoder.graphs = TowerGraphs(encoder.reader.blocks, CPU, capture=capture)
    return encoder.graphs


@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen2_5_vl", "qwen3_vl"])
def test_an_engine_gives_the_same_tokens(name: str) -> None:
    case = Case(name)
    engine = case.engine(image_cache_bytes=0)
    encoder = engine._runner.images
    graphs = with_graphs(encoder)
    ids = case.prompt(0, 1)
    for _ in range(4):
        assert answer(engine, ids, *case.images) == case.generate(ids, 0, 1)
    assert graphs.num_replays
    engine.close()
    assert graphs.num_bytes == 0, "a closed engine keeps no memory"


def test_towers_pause_between_layers_that_are_replayed() -> None:
    """Another encoding runs while one of them stands still, and uses the same memory."""
    case = Case("qwen2_5_vl", {"vision_config": {"depth": 4}})
    fa_serve.patch(case.model)
    reader = ImageReader(case.model)
    encoder = ImageEncoder(reader, max_bytes=1 << 20)
    expected = [reader.encode(inputs).embeds for inputs in case.inputs]
    graphs = with_graphs(encoder)
    for _ in range(2):
        encoder.warm_up([case.inputs[0]])
    replays = graphs.num_replays
    encoder.advance(TowerWork([case.images[0]], limit=1, count=1))
    for _ in range(2):
        assert encoder.is_busy
        found = encoder.features([case.images[1]])[case.images[1].key]
        torch.testing.assert_close(found.embeds, expected[1])
        encoder._drop(case.images[1].key)
        encoder.advance(TowerWork([case.images[0]], limit=1, count=1))
    assert encoder.is_busy
    # a forward of another thread, such as that of another engine of this model, is not touched
    replays_before = graphs.num_replays
    torch.testing.assert_close(reader.encode(case.inputs[1]).embeds, expected[1])
    assert graphs.num_replays == replays_before
    encoder.advance(TowerWork([case.images[0]], limit=None, count=1))
    torch.testing.assert_close(encoder.features([case.images[0]])[case.images[0].key].embeds, expected[0])
    assert graphs.num_replays == replays + 3 * 4
    assert not any("forward" in vars(block) for block in reader.blocks)


def test_an_encoding_that_is_given_up_leaves_the_layers_as_they_were() -> None:
    case = Case("qwen2_5_vl", {"vision_config": {"depth": 4}})
    encoder = ImageEncoder(ImageReader(case.model), max_bytes=1 << 20)
    with_graphs(encoder)
    encoder.advance(TowerWork([case.images[0]], limit=1, count=1))
    encoder.forget()
    assert not any("forward" in vars(block) for block in encoder.reader.blocks)


def test_other_weights_are_used() -> None:
    """A graph would read the memory of the weights before."""
    case = Case("llava")
    model = copy.deepcopy(case.model)
    reader = ImageReader(model)
    encoder = ImageEncoder(reader, max_bytes=1 << 20)
    graphs = with_graphs(encoder, record)
    for _ in range(2):
        encoder.warm_up([case.inputs[0]])
    assert graphs.num_replays
    before = encoder.features([case.images[0]])[case.images[0].key].embeds
    for parameter in (parameter for block in reader.blocks for parameter in block.parameters()):
        parameter.data = parameter.data * 1.5
    encoder.forget()
    expected = reader.encode(case.inputs[0]).embeds
    for _ in range(3):
        found = encoder.features([case.images[0]])[case.images[0].key].embeds
        torch.testing.assert_close(found, expected)
        encoder._drop(case.images[0].key)
    assert not torch.allclose(before, expected)


def test_a_warm_up_captures() -> None:
    process = processes("qwen2_5_vl")
    model = tiny_model("qwen2_5_vl", CHANGES["qwen2_5_vl"])
    encoder = ImageEncoder(ImageReader(model), max_bytes=1 << 20)
    graphs = with_graphs(encoder)
    encoder.warm_up([process(np.zeros((56, 56, 3), dtype=np.uint8))])
    assert graphs.num_captures == len(encoder.reader.blocks)


@pytest.mark.parametrize("settings", [{"eager": True}, {"deterministic": True}, {}], ids=["eager", "deterministic", "GPU"])
def test_where_there_are_graphs(settings: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("llava")
    config = EngineConfig(device="cpu", **settings)  # type: ignore[arg-type]
    made = []
    monkeypatch.setattr(ImageReader, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    for switch in (False, True):
        monkeypatch.setattr(tower_graphs, "REPLAYS_TOWERS", switch)
        found = find_images(case.model, config)
        assert isinstance(found, ImageEncoder)
        made.append(found.graphs is not None)
    assert made == [False, not settings]
    monkeypatch.undo()
    monkeypatch.setattr(tower_graphs, "REPLAYS_TOWERS", True)
    found = find_images(case.model, config)
    assert isinstance(found, ImageEncoder)
    assert found.graphs is None, "a CPU has no graphs"


def test_a_prompt_with_text_alone_and_one_with_images_share_steps() -> None:
    case = Case("qwen3_vl")
    engine = case.engine()
    with_graphs(engine._runner.images)
    prompts = [case.prompt(0), [5, 6, 7], case.prompt(1), case.prompt(0, 1)]
    images = [[case.images[0]], [], [case.images[1]], [*case.images]]
    wanted = [c.token_ids for c in case.engine().generate(prompts, GREEDY, images=images)]
    assert [c.token_ids for c in engine.generate(prompts, GREEDY, images=images)] == wanted
