"""Fixtures of engines on tiny models. The conftest.py of a folder imports those that its tests need.

Nothing is imported before a test asks, because the process that hands tests to workers reads conftest.py, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from fa_serve.engine import Engine
    from fa_serve.engine.parallel.ranks import Ranks


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    from tiny_models import make_tokenizer

    return make_tokenizer()


@pytest.fixture
def make_engine(tokenizer: PreTrainedTokenizerFast) -> Callable[..., Engine]:
    from tiny_models import make_model

    from fa_serve.engine import Engine, EngineConfig

    def make(
        family: str = "llama", *, model: PreTrainedModel | None = None, ranks: Ranks | None = None, **settings: Any
    ) -> Engine:
        config = EngineConfig(**{"device": "cpu", "num_pages": 128, "page_size": 4, "max_num_seqs": 8, "seed": 0} | settings)
        return Engine(config, model=model or make_model(family), tokenizer=tokenizer, ranks=ranks)

    return make


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """CUDA graphs without CUDA: a capture keeps the function, and a replay calls it. The list has one entry for each replay."""
    from fa_serve.engine.runner import cuda_graphs

    calls: list[int] = []

    def capture(function: Callable[[], None], pool: Any, model: nn.Module) -> tuple[Callable[[], None], Any]:
        def replay() -> None:
            calls.append(1)
            function()

        return replay, pool or (0, 1)

    monkeypatch.setattr(cuda_graphs, "capture", capture)
    return calls
