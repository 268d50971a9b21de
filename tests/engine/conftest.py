"""Engines on tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from engine_fixtures import make_engine, replays, tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["make_engine", "replays", "tokenizer"]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A tiny Llama with its tokenizer, as a folder that from_pretrained takes."""
    from tiny_models import make_model

    folder = tmp_path_factory.mktemp("tiny-llama")
    make_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
