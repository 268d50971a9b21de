"""The profile of an encoder counts the products of a batch."""

from __future__ import annotations

from pathlib import Path

from benchmarks.engine.bench_embeddings import make_folder, texts_of
from benchmarks.tuning.profile_encoder import products_of
from fa_serve.engine import Encoder, EngineConfig


def test_all_products_of_a_batch_are_counted(tmp_path: Path) -> None:
    """Two layers of width 32: q, k and v, the output, and the two of the MLP; and BERT's pooler, which reads one token."""
    folder = make_folder("tiny", tmp_path, "float32")
    encoder = Encoder(EngineConfig(model=folder, device="cpu", dtype="float32"))
    of_layers = {(64, 32, 96): 2, (64, 32, 32): 2, (64, 32, 64): 2, (64, 64, 32): 2}
    assert products_of(encoder, texts_of(4, 16)) == of_layers | {(1, 32, 32): 1}
