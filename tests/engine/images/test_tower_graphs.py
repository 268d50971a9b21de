"""Layers of towers that are replayed come to what they come to without. Here a graph is what was recorded, or the function that
it was captured from, where attention reads numbers on the host."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from every_type import tiny_model
from image_cases import GREEDY, Case, answer
from image_inputs import CHANGES, IMAGE, one_image
from recorded_graphs import POOL, record, run_again
from torch import Tensor, nn
from tower_pictures import processes
from transformers.utils import output_capturing

import fa_serve
from fa_serve.engine import EngineConfig
from fa_serve.engine.images import tower_graphs
from fa_serve.engine.images.encoder import ImageEncoder, find_images
from fa_serve.engine.images.tower_graphs import TowerGraphs
from fa_serve.engine.scheduler.scheduled_batch import TowerWork
from fa_serve.hf.images import ImageReader

CPU = torch.device("cpu")


class Block(nn.Module):
    """A layer of a tower: what it returns depends on rows alone, and on angles."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.calls = 0

    def forward(self, hidden_states: Tensor, scale: float = 1.0, position_embeddings: Any = None, **_: Any) -> Tensor:
        self.calls += 1
        angles = 0.0 if position_embeddings is None else position_embeddings[0]
        return hidden_states + self.linear(hidden_states) * scale + angles


def tower(count: int = 3) -> list[Block]:
    torch.manual_seed(0)
    return [Block().requires_grad_(False) for _ in range(count)]


def run(blocks: list[Any], x: Tensor, **words: Any) -> list[Tensor]:
    """What each layer returns, kept as models keep it."""
    kept = []
    with torch.inference_mode():
        for block in blocks:
            x = block(x, **words)
            kept.append(x)
    return kept


def compare(blocks: list[Any], graphs: TowerGraphs, x: Tensor, **words: Any) -> None:
    expected = run(blocks, x, **words)
    with graphs.replaying():
        found = run(blocks, x, **words)
    for ours, own in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, own)


def test_a_form_that_comes_again_is_captured_and_replayed() -> None:
    blocks = tower()
    graphs = TowerGraphs(blocks, CPU, capture=record)
    numbers = []
    for seed in range(4):
        compare(blocks, graphs, torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(seed)))
        numbers.append((graphs.num_captures, graphs.num_replays))
    assert numbers == [(0, 0), (3, 0), (3, 3), (3, 6)]
    calls = [block.calls for block in blocks]
    with graphs.replaying():
        run(blocks, torch.ones(2, 5, 8))
    assert [block.calls for block in blocks] == calls, "no code of a layer runs in a replay"
    assert not any("forward" in vars(block) for block in blocks)


def test_outputs_of_layers_are_kept_as_they_were() -> None:
    """As deepstack features, or the hidden states of all layers. The next layers and forwards write none of them."""
    blocks = tower()
    graphs = TowerGraphs(blocks, CPU, capture=record)
    pictures = [torch.full((1, 4, 8), float(number)) for number in range(4)]
    with graphs.replaying():
        kept = [run(blocks, x) for x in pictures]
    assert graphs.num_replays == 6
    for found, x in zip(kept, pictures, strict=True):
        torch.testing.assert_close(found, run(blocks, x))


def test_an_output_that_is_written_in_place_is_the_next_layers_input() -> None:
    blocks = tower(2)
    graphs = TowerGraphs(blocks, CPU, capture=record)

    def forward(x: Tensor) -> Tensor:
        with torch.inference_mode():
            x = blocks[0](x)
            x += 1
            return blocks[1](x)

    x = torch.randn(2, 8)
    expected = forward(x)
    with graphs.replaying():
        found = [forward(x) for _ in range(4)]
    assert graphs.num_replays == 4
    for each in found:
        torch.testing.assert_close(each, expected)


def test_forms_differ_by_shapes_and_values_and_by_nothing_else() -> None:
    blocks = tower(1)
    graphs = TowerGraphs(blocks, CPU, capture=record)
    for _ in range(3):
        for rows in (2, 3):
            for scale in (1, 1.0, 2.0):
                compare(blocks, graphs, torch.randn(rows, 8), scale=scale)
    assert graphs.num_forms == 6
    compare(blocks, graphs, torch.randn(8, 2).T, scale=1.0)
    compare(blocks, graphs, torch.randn(8, 2).T, scale=1.0)
    assert graphs.num_forms == 7, "a transposed tensor has another form"


def test_what_layers_share_is_copied_once_for_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = tower()
    graphs = TowerGraphs(blocks, CPU, capture=record)
    copied: list[int] = []
    copy_to = tower_graphs.LayerCall.copy_to
    monkeypatch.setattr(
        tower_graphs.LayerCall,
        "copy_to",
        lambda call, memory, number: copied.append(number) or copy_to(call, memory, number),
    )
    for seed in range(3):
        copied.clear()
        angles = (torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)), torch.zeros(4, 8))
        compare(blocks, graphs, torch.randn(4, 8), position_embeddings=angles)
    assert copied == [0, 1, 2, 0, 0]
    same = angles
    same[0].add_(1)  # other numbers in the same tensor, in another forward
    compare(blocks, graphs, torch.randn(4, 8), position_embeddings=same)


def test_nothing_is_kept_of_a_forward() -> None:
    """And while it runs, no hidden states, of which there are as many as layers."""
    blocks = tower(2 * tower_graphs.MAX_KNOWN)
    graphs = TowerGraphs(blocks, CPU, capture=record)
    for _ in range(3):
        x = torch.randn(4, 8)
        with graphs.replaying(), torch.inference_mode():
            kept = []
            for block in blocks:
                x = block(x, position_embeddings=(torch.randn(4, 8), torch.zeros(4, 8)))
                kept.append(weakref.ref(x))
            del x
            assert len(graphs._known) <= tower_graphs.MAX_KNOWN
            assert not any(each() is not None for each in kept)
        assert not graphs._known
        statics = [each for form in graphs._forms.values() for each in form.statics or ()]
        assert all(each.given is None for each in statics)
    assert graphs.num_replays


def test_a_form_that_is_evicted_within_a_forward() -> None:
    """The next layers of the forward that met it do not use what was freed."""
    blocks = tower(6)
    graphs = TowerGraphs(blocks, CPU, max_forms=1, capture=record)
    shared = {name: {"position_embeddings": (torch.full((4, 8), float(number)),)} for number, name in enumerate("ab")}

    def forward(order: str) -> list[Tensor]:
        x = torch.ones(4, 8)
        kept = []
        with torch.inference_mode():
            for block, kind in zip(blocks, order, strict=True):
                x = block(x, scale=1.0 + (kind == "b"), **shared[kind])
                kept.append(x)
                assert all(each.form in graphs._forms.values() for each in graphs._known.values())
        return kept

    for order in ("aaaaaa", "aaaaaa", "ababab", "ababab", "bbaabb", "aaaaaa", "bbbbbb", "bababa"):
        expected = forward(order)
        with graphs.replaying():
            torch.testing.assert_close(forward(order), expected)
        assert graphs.num_forms <= 1
        assert {*graphs._known} == set()


def test_what_is_not_known_is_not_captured() -> None:
    blocks = tower(1)
    graphs = TowerGraphs(blocks, CPU, capture=record)
    for _ in range(3):
        compare(blocks, graphs, torch.randn(2, 8), cache=object())
        compare(blocks, graphs, torch.randn(2, 8), sizes=torch.ones(2, device="meta"))
    assert graphs.num_captures == 0
    with graphs.replaying():  # gradients are recorded
        for _ in range(3):
            assert blocks[0].requires_grad_()(torch.randn(2, 8)).requires_grad
    assert graphs.num_captures == 0


class Reading(Block):
    """Brings a number to the host, which no graph does."""

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        return self.linear(hidden_states) * hidden_states.abs().max().item()


class Stepping(Block):
    """Comes to something else each time."""

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        self.calls += 1
        return self.linear(hidden_states) * self.calls


class Wrapping(Block):
    """Returns what no replay could return."""

    def forward(self, hidden_states: Tensor) -> Any:  # type: ignore[override]
        return {1, 2}


@pytest.mark.parametrize(
    ("make", "told"),
    [(Reading, "not permitted"), (Stepping, "differs from its own code"), (Wrapping, "a set is not known")],
)
def test_what_cannot_be_captured_is_launched_as_before(make: type[Block], told: str, caplog: pytest.LogCaptureFixture) -> None:
    block = make().requires_grad_(False)
    graphs = TowerGraphs([block], CPU, capture=record)
    x = torch.randn(2, 8)
    with graphs.replaying(), torch.inference_mode():
        for call in range(5):
            found = block(x)
            if make is Reading:
                torch.testing.assert_close(found, block.linear(x) * x.abs().max())
            assert graphs.num_forms == 0, call
    assert caplog.text.count(told) == 1
    assert graphs.num_bytes == 0
    assert graphs._pool is None


def test_a_layer_within_which_a_model_records_outputs(caplog: pytest.LogCaptureFixture) -> None:
    """As transformers does by hooks, which no replay calls."""

    class Recording(Block):
        def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
            found: dict[str, list[Tensor]] | None = output_capturing._active_collector.get()
            if found is not None:
                found["router_logits"].append(hidden_states)
            return self.linear(hidden_states)

    block = Recording().requires_grad_(False)
    graphs = TowerGraphs([block], CPU, capture=record)
    collected: dict[str, list[Tensor]] = {"router_logits": []}
    token = output_capturing._active_collector.set(collected)
    try:
        for _ in range(3):
            compare([block], graphs, torch.randn(2, 8))
    finally:
        output_capturing._active_collector.reset(token)
    assert len(collected["router_logits"]) == 6
    assert graphs.num_captures == 0
    assert caplog.text.count("records what is computed within it") == 1


def test_a_layer_that_is_given_much_at_once_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tower_graphs, "MAX_TENSOR_BYTES", 4 * 8 * 4)
    blocks = tower(1)
    graphs = TowerGraphs(blocks, CPU, capture=record)
    for _ in range(3):
        for rows in (4, 5):
            compare(blocks, graphs, torch.randn(rows, 8))
    assert (graphs.num_forms, graphs.num_captures) == (1, 1)


def test_a_capture_that_fails_leaves_the_other_forms(caplog: pytest.LogCaptureFixture) -> None:
    blocks = tower(1)
    fails = [True]

    def capture(step: Callable[[], None], pool: Any) -> tuple[Callable[[], None], Any]:
        if fails.pop() if fails else False:
            raise torch.OutOfMemoryError("no memory")
        return record(step, pool)

    graphs = TowerGraphs(blocks, CPU, capture=capture)
    for _ in range(4):
        for rows in (2, 3):
            compare(blocks, graphs, torch.randn(rows, 8))
    assert (graphs.num_forms, graphs.num_captures, graphs.num_replays) == (1, 1, 2)
    assert caplog.text.count("no memory") == 1


def test_a_picture_that_is_not_finite_decides_nothing() -> None:
    blocks = tower(1)
    graphs = TowerGraphs(blocks, CPU, capture=record)
    with graphs.replaying():
        for _ in range(2):
            run(blocks, torch.full((2, 8), float("inf")))
    assert graphs.num_captures == 0
    for _ in range(2):
        compare(blocks, graphs, torch.randn(2, 8))
    assert graphs.num_replays == 1


def test_forms_and_their_bytes_are_bounded() -> None:
    blocks = tower(2)
    graphs = TowerGraphs(blocks, CPU, max_forms=2, capture=record)

    def use(rows: int) -> None:
        for _ in range(2):
            compare(blocks, graphs, torch.randn(rows, 8))

    for rows in (1, 2):
        use(rows)
    compare(blocks, graphs, torch.randn(1, 8))
    captures = graphs.num_captures
    use(3)  # in the place of two rows, which were used longest ago
    assert (graphs.num_forms, graphs.num_captures) == (2, captures + 2)
    use(1)
    assert graphs.num_captures == captures + 2
    use(2)
    assert graphs.num_captures == captures + 4
    # of four rows: 128 bytes that are read, and 128 that are written
    small = TowerGraphs(blocks, CPU, max_bytes=256, capture=record)
    for rows in (4, 3, 2):
        for _ in range(2):
            compare(blocks, small, torch.randn(rows, 8))
        assert small.num_bytes <= 256
    assert small.num_forms == 1
    for _ in range(4):
        compare(blocks, small, torch.randn(5, 8))
    assert (small.num_forms, small.num_bytes, small._pool) == (0, 0, None)


def test_the_forms_that_were_only_seen_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tower_graphs, "MAX_SEEN", 3)
    blocks = tower(1)
    graphs = TowerGraphs(blocks, CPU, capture=record)
    for rows in range(1, 9):
        compare(blocks, graphs, torch.randn(rows, 8))
    assert len(graphs._forms) == 3


def test_all_graphs_share_a_pool_that_ends_with_the_last() -> None:
    pools: list[Any] = []

    def capture(step: Callable[[], None], pool: Any) -> tuple[Callable[[], None], Any]:
        pools.append(pool)
        return record(step, pool)

    blocks = tower(2)
    graphs = TowerGraphs(blocks, CPU, capture=capture)
    for _ in range(2):
        compare(blocks, graphs, torch.randn(2, 8))
    graphs.clear()
    assert graphs.num_bytes == 0
    for _ in range(2):
        compare(blocks, graphs, torch.randn(2, 8))
    assert pools == [None, POOL, None, POOL]


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
