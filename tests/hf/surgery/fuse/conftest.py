"""Fused layers are tested in engines as well."""

from __future__ import annotations

from engine_fixtures import make_engine, replays, tokenizer

__all__ = ["make_engine", "replays", "tokenizer"]
