"""A capture: on which stream it is made, and what must not end it."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

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
    cuda_graphs.capture(lambda: None, None)
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
    cuda_graphs.capture(calls.function, None)
    calls.function.side_effect = ValueError("a kernel")
    with pytest.raises(ValueError, match="a kernel"):
        cuda_graphs.capture(calls.function, None)
    names = [call[0] for call in calls.mock_calls]
    captured = ["disable", "graph.capture_begin", "function", "graph.capture_end", *(["enable"] if enabled else [])]
    assert names == [*captured, "graph.pool", *captured]
