"""Engines on tiny models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_fixtures import make_engine, tokenizer
from tiny_models import make_model
from transformers import PreTrainedTokenizerFast

from fa_serve.engine.process import engine_process
from fa_serve.engine.runner import cuda_graphs

__all__ = ["make_engine", "tokenizer"]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A tiny Llama with its tokenizer, as a folder that from_pretrained takes."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    make_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def warm_engine_processes(warm_context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of engines find everything imported. test_engine_process.py starts fresh interpreters."""
    monkeypatch.setattr(engine_process, "multiprocessing", SimpleNamespace(get_context=lambda _: warm_context))


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """CUDA graphs without CUDA: a capture keeps the function, and a replay calls it. The list has one entry for each replay."""
    calls: list[int] = []

    def capture(function: Callable[[], None], pool: Any) -> tuple[Callable[[], None], Any]:
        def replay() -> None:
            calls.append(1)
            function()

        return replay, pool or (0, 1)

    monkeypatch.setattr(cuda_graphs, "capture", capture)
    return calls
