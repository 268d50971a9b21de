"""Layers of a tower that are replayed come to what they come to without. A graph is what was recorded, or fails to be.

Left out: towers of models (test_replayed_towers.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded_graphs import POOL, record
from torch import Tensor, nn
from transformers.utils import output_capturing

from fa_serve.engine.images import tower_graphs
from fa_serve.engine.images.tower_graphs import TowerGraphs

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
    [
        (Reading, "not permitted"),
        (Stepping, "differs from that of the layer's own code"),
        (Wrapping, "values of the type set are not supported"),
    ],
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
    assert caplog.text.count("records outputs from inside the layer") == 1


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

    def capture(step: Callable[[], None], pool: Any, block: nn.Module) -> tuple[Callable[[], None], Any]:
        if fails.pop() if fails else False:
            raise torch.OutOfMemoryError("no memory")
        return record(step, pool, block)

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

    def capture(step: Callable[[], None], pool: Any, block: nn.Module) -> tuple[Callable[[], None], Any]:
        pools.append(pool)
        return record(step, pool, block)

    blocks = tower(2)
    graphs = TowerGraphs(blocks, CPU, capture=capture)
    for _ in range(2):
        compare(blocks, graphs, torch.randn(2, 8))
    graphs.clear()
    assert graphs.num_bytes == 0
    for _ in range(2):
        compare(blocks, graphs, torch.randn(2, 8))
    assert pools == [None, POOL, None, POOL]
