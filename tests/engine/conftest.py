"""Engines on tiny models."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_fixtures import make_engine, replays, tokenizer
from tiny_models import make_model
from transformers import PreTrainedTokenizerFast

__all__ = ["make_engine", "replays", "tokenizer"]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A tiny Llama with its tokenizer, as a folder that from_pretrained takes."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    make_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
