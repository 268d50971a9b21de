"""What the tests of operators share with those of the engine."""

from __future__ import annotations

from engine_fixtures import make_engine, tokenizer

__all__ = ["make_engine", "tokenizer"]
