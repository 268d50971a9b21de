"""A capture: on which stream it is made, and what must not end it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from every_type import tiny_model
from torch import Tensor, nn

from fa_serve.engine import SamplingParams
from fa_serve.engine.runner import cuda_graphs


def fake_streams(monkeypatch: pytest.MonkeyPatch, current: str) -> list[str]:
    """Streams of a GPU that is not there, and those that work was queued on, in order."""
    entered: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: "default")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(entered.append(stream)))
    monkeypatch.setattr(cuda_graphs, "_capture_stream", lambda: "captures")
    return entered


@pytest.mark.parametrize(("current", "captured_on"), [("default", "captures"), ("towers", "towers")])
def test_what_has_its_own_stream_is_captured_there(monkeypatch: pytest.MonkeyPatch, current: str, captured_on: str) -> None:
    """A graph keeps cuBLAS's workspace of the stream of its capture: those of towers and of steps, which may be replayed at the
    same time, must not share one."""
    entered = fake_streams(monkeypatch, current)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", mock.Mock())
    cuda_graphs.capture(lambda: None, None, nn.Module())
    assert entered == [captured_on]


@pytest.mark.parametrize("enabled", [True, False])
def test_a_capture_frees_no_graph_of_a_closed_engine(monkeypatch: pytest.MonkeyPatch, enabled: bool) -> None:
    """Graphs that garbage holds would be freed by a collection, which ends a capture."""
    calls = mock.Mock()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: calls.graph)
    fake_streams(monkeypatch, current="default")
    monkeypatch.setattr(gc, "isenabled", lambda: enabled)
    monkeypatch.setattr(gc, "disable", calls.disable)
    monkeypatch.setattr(gc, "enable", calls.enable)
    cuda_graphs.capture(calls.function, None, nn.Module())
    calls.function.side_effect = ValueError("a kernel")
    with pytest.raises(ValueError, match="a kernel"):
        cuda_graphs.capture(calls.function, None, nn.Module())
    names = [call[0] for call in calls.mock_calls]
    captured = ["disable", "graph.capture_begin", "function", "graph.capture_end", *(["enable"] if enabled else [])]
    assert names == [*captured, "graph.pool", *captured]


class Growing(nn.Module):
    """Has tables of positions, a buffer and an attribute, which a longer input replaces, and the output of its last forward."""

    def __init__(self) -> None:
        super().__init__()
        self.angles = nn.Buffer(torch.zeros(2))
        self.offsets = torch.zeros(2)
        self.last = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > len(self.angles):
            self.angles = nn.Buffer(torch.zeros(len(x)))
            self.offsets = torch.zeros(len(x))
        self.last = x + self.angles[: len(x)] + self.offsets[: len(x)]
        return self.last


def test_a_graph_keeps_the_tables_that_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_streams(monkeypatch, current="default")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", mock.Mock())
    model = nn.Sequential(Growing())
    model(torch.ones(2))
    angles, offsets, last = (weakref.ref(x) for x in (model[0].angles, model[0].offsets, model[0].last))
    replay, _ = cuda_graphs.capture(lambda: model(torch.ones(2)), None, model)
    assert last() is None, "every forward makes its own"
    model(torch.ones(5))
    assert angles() is not None
    assert offsets() is not None
    del replay
    assert angles() is None
    assert offsets() is None


def test_no_graph_of_an_engine_reads_a_table_that_is_gone(
    make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kosmos-2's table of positions grows with the largest step, which is captured after decoding has been."""
    fake_streams(monkeypatch, current="default")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", mock.Mock())
    model = tiny_model("kosmos-2")
    positions = model.text_model.model.embed_positions
    alive: list[bool] = []
    capture = cuda_graphs.capture

    def watched(function: Callable[[], None], pool: Any, computes: nn.Module) -> tuple[Callable[[], None], Any]:
        table = weakref.ref(positions.weights)
        replay, pool = capture(function, pool, computes)

        def run() -> None:
            alive.append(table() is not None)
            replay()
            function()

        return run, pool

    monkeypatch.setattr(cuda_graphs, "capture", watched)
    engine = make_engine(model=model, max_num_batched_tokens=600)
    engine._runner.make_graphs()
    size = len(positions.weights)
    prompts = [[5, 6, 7, 8, 9], [10, 11, 12]]
    params = SamplingParams(max_tokens=4, temperature=0.0)
    first, second = ([x.token_ids for x in engine.generate(prompts, params)] for _ in range(2))
    assert first == second
    assert len(positions.weights) > size
    assert len(alive) == 2 + 3, "decoding, but for the first step, which is captured"
    assert all(alive)
