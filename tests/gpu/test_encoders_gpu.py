"""Encoders on a GPU: batches of 16 bits are near eager float32, and answers keep their order one batch ahead."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from encoder_folders import FAMILIES, MANY_TEXTS, PADDED, PAIRS, TEXTS, cosine_distance, load_eager, save_encoder

from fa_serve.engine import Encoder, EngineConfig
from fa_serve.engine.pooling import pipeline
from fa_serve.hf.surgery.fuse.encoder import FusedEncoderLayer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SIZES = {"hidden_size": 128, "intermediate_size": 192}  # heads of 32


def load(path: Path, dtype: str = "float16", *, tokens: int = 64, eager: bool = False) -> Encoder:
    """tokens: of a batch; eager: without CUDA graphs"""
    settings = EngineConfig(model=path, device="cuda", dtype=dtype, max_num_batched_tokens=tokens, eager=eager)
    return Encoder(settings, ahead=True)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("qwen3", "gemma3", "gemma3-causal")])
def test_vectors_are_near_those_of_eager_float32(
    tmp_path: Path, family: str, dtype: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "FUSES_ON_GPU", fused)
    pooling = ("Pooling", {"pooling_mode_mean_tokens": True, "word_embedding_dimension": 128})
    path = save_encoder(tmp_path, family, [pooling, ("Normalize", {})], **SIZES)
    encoder = load(path, dtype)
    assert encoder._pipeline.model.packs == (family not in PADDED)
    layers = [module for module in encoder._pipeline.model.base.modules() if isinstance(module.forward, FusedEncoderLayer)]
    assert len(layers) == (2 if fused and family not in PADDED else 0)
    eager = load_eager(path)
    with torch.inference_mode():
        ids = [torch.from_numpy(each.ids).long()[None] for each in encoder.reader.read(TEXTS)]
        wanted = torch.cat([eager(input_ids=each).last_hidden_state.mean(1) for each in ids])
    found = encoder.encode(TEXTS)
    assert cosine_distance(found, wanted) < (1e-4 if dtype == "float16" else 3e-3)
    assert encoder.stats().num_steps > 1
    alone = np.stack([encoder.encode(text) for text in TEXTS])
    assert cosine_distance(found, alone) < (1e-5 if dtype == "float16" else 1e-3)


def test_a_decoder_is_fused_as_in_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_encoder(tmp_path, "qwen3", [("Pooling", {"pooling_mode_lasttoken": True})], **SIZES)
    plain = load(path, "bfloat16").encode(TEXTS)
    monkeypatch.setattr(pipeline, "FUSES_ON_GPU", True)
    encoder = load(path, "bfloat16")
    assert len(encoder._pipeline.model._caches) == 2
    assert cosine_distance(encoder.encode(TEXTS), plain) < 3e-3


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3"])
def test_small_batches_take_graphs(tmp_path: Path, family: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "FUSES_ON_GPU", fused)
    kind = "lasttoken" if family == "qwen3" else "mean_tokens"
    path = save_encoder(tmp_path, family, [("Pooling", {f"pooling_mode_{kind}": True})], **SIZES)
    plain = load(path, eager=True).encode(TEXTS)
    encoder = load(path)
    graphs = encoder._pipeline.graphs
    assert graphs is not None
    assert len(graphs._graphs) == 3 or (family == "qwen3" and not fused)  # whose own code looks for packed sequences
    for _ in range(3):
        assert cosine_distance(np.stack([encoder.encode(text) for text in TEXTS]), plain) < 1e-4
    assert cosine_distance(encoder.encode(TEXTS * 4), np.concatenate([plain] * 4)) < 1e-4


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_large_graphs_have_several_inputs_and_windows(tmp_path: Path, family: str) -> None:
    """Up to 4,096 tokens and 64 inputs, of which one may have 512. ModernBERT's windows are shorter than that."""
    limit = {"max_seq_length": 512, "do_lower_case": False}
    pooling = ("Pooling", {"pooling_mode_mean_tokens": True})
    path = save_encoder(tmp_path, family, [pooling], transformer=limit, max_position_embeddings=512, **SIZES)
    plain = load(path, tokens=4096, eager=True)
    encoder = load(path, tokens=4096)
    graphs = encoder._pipeline.graphs
    assert graphs is not None
    captured = set(graphs._graphs)
    assert max(size for size, _, _ in captured) == 4096
    for _ in range(2):
        for count in (1, 2, 4, 32):
            assert cosine_distance(encoder.encode(MANY_TEXTS[:count]), plain.encode(MANY_TEXTS[:count])) < 1e-4
    assert set(graphs._graphs) == captured, "every graph has been captured at the start"


def test_many_inputs_keep_their_order(tmp_path: Path) -> None:
    """Batches are launched before the results of the last one are read."""
    encoder = load(save_encoder(tmp_path))
    texts = [TEXTS[i % len(TEXTS)] for i in range(500)]
    once = encoder.encode(TEXTS)
    assert cosine_distance(encoder.encode(texts), once[[i % len(TEXTS) for i in range(500)]]) < 1e-4


def test_scores_of_pairs(tmp_path: Path) -> None:
    path = save_encoder(tmp_path, "bert", None, head="ForSequenceClassification", num_labels=1)
    exact = Encoder(EngineConfig(model=path, device="cpu", dtype="float32")).score(PAIRS[0][0], TEXTS)
    np.testing.assert_allclose(load(path).score(PAIRS[0][0], TEXTS), exact, atol=5e-3)
