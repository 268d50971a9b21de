"""Small batches take graphs and give what they give without. Here a graph is the function that it was captured from."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from encoder_folders import MANY_TEXTS, TEXTS, save_encoder
from torch import nn

from fa_serve.engine import Encoder, EngineConfig
from fa_serve.engine.pooling.graphs import EncoderGraphs, most_inputs
from fa_serve.engine.pooling.inputs import EncoderInputs

SIZES = [16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144, *range(7168, 16385, 1024)]


def load(path, captured: list[int], capture: Callable | None = None, max_tokens: int = 48) -> Encoder:
    encoder = Encoder(EngineConfig(model=path, device="cpu", dtype="float32"))

    def take(step: Callable[[], None], pool: int | None, model: nn.Module) -> tuple[Callable[[], None], int]:
        captured.append(pool or 0)
        return step, 7

    model = encoder._pipeline.model
    encoder._pipeline = replace(encoder._pipeline, graphs=EncoderGraphs(model, max_tokens, capture=capture or take))
    return encoder


@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3"])
def test_padded_batches_give_the_same(tmp_path, family: str) -> None:
    kind = "lasttoken" if family == "qwen3" else "mean_tokens"
    path = save_encoder(tmp_path, family, [("Pooling", {f"pooling_mode_{kind}": True})])
    wanted = Encoder(EngineConfig(model=path, device="cpu", dtype="float32")).encode(TEXTS)
    captured: list[int] = []
    encoder = load(path, captured)
    for first in range(0, len(TEXTS), 2):
        found = encoder.encode(TEXTS[first : first + 2])
        np.testing.assert_allclose(found, wanted[first : first + 2], atol=1e-5)
    assert captured == [0, 7, 7]  # 16, 32 and 64 tokens, of which an input may have 48, in one pool
    np.testing.assert_allclose(encoder.encode(TEXTS * 3), [*wanted] * 3, atol=1e-5)  # with two sequences of padding
    assert captured == [0, 7, 7, 7]


def test_all_sizes_are_captured_ahead(tmp_path) -> None:
    captured: list[int] = []
    encoder = load(save_encoder(tmp_path), captured)
    encoder._warm_up()
    assert len(captured) == 13  # up to 3,072: 4,096 tokens would need more sequences of padding, of 48 tokens each
    encoder.encode("a cat")
    encoder.encode(["a"] * 257)
    assert len(captured) == 13


def test_all_graphs_write_to_the_same_memory(tmp_path) -> None:
    """The hidden states of each of 43 graphs would take 440 MB together for the width of bge-base."""
    encoder = load(save_encoder(tmp_path), [])
    graphs = encoder._pipeline.graphs
    assert graphs is not None
    found = []
    with torch.inference_mode():
        for length in (40, 10, 40):
            result = graphs.run(EncoderInputs.of([encoder._padding(length)]))
            assert result is not None
            assert len(result[1]) == length
            found.append(result[1].untyped_storage())
    assert len({storage.data_ptr() for storage in found}) == 1
    assert found[0].nbytes() == graphs._sizes[-1] * encoder.card.size * 4


def test_the_shorter_the_inputs_the_more_of_them_a_graph_takes(tmp_path) -> None:
    """100 inputs of few tokens are a batch of 2,000, which a graph takes. With one input of 65 tokens among them, none does."""
    limit = {"max_seq_length": 512, "do_lower_case": False}
    pooling = ("Pooling", {"pooling_mode_mean_tokens": True})
    path = save_encoder(tmp_path, "bert", [pooling], transformer=limit, max_position_embeddings=512)
    texts = [" ".join(["a"] * (10 + index % 17)) for index in range(100)]
    longer = [*texts[1:], " ".join(["a"] * 65)]
    plain = Encoder(EngineConfig(model=path, device="cpu", dtype="float32"))
    wanted = plain.encode(texts)
    wanted_longer = plain.encode(longer)
    captured: list[int] = []
    encoder = load(path, captured, max_tokens=512)
    for _ in range(2):
        np.testing.assert_allclose(encoder.encode(texts), wanted, atol=1e-5)
        np.testing.assert_allclose(encoder.encode(longer), wanted_longer, atol=1e-5)
    graphs = encoder._pipeline.graphs
    assert graphs is not None
    assert [key[:2] for key in graphs._graphs] == [(2048, 64)]
    assert [most_inputs(16384, longest) for longest in (64, 512, 8192)] == [1024, 128, 64]


def test_long_inputs_have_graphs_of_their_own(tmp_path) -> None:
    """Attention plans for 512 tokens in all batches that have no longer input."""
    captured: list[int] = []
    limit = {"max_seq_length": 1024, "do_lower_case": False}
    pooling = ("Pooling", {"pooling_mode_mean_tokens": True})
    path = save_encoder(tmp_path, "bert", [pooling], transformer=limit, max_position_embeddings=1024)
    encoder = load(path, captured, max_tokens=1024)
    texts = [MANY_TEXTS[0], " ".join(["cat"] * 300), *MANY_TEXTS[1:3]]
    wanted = Encoder(EngineConfig(model=path, device="cpu", dtype="float32")).encode(texts)
    for _ in range(2):
        np.testing.assert_allclose(encoder.encode(texts), wanted, atol=1e-5)
        np.testing.assert_allclose(encoder.encode(texts[1]), wanted[1], atol=1e-5)
        np.testing.assert_allclose(encoder.encode([texts[0], *texts[2:]]), wanted[[0, 2, 3]], atol=1e-5)
    graphs = encoder._pipeline.graphs
    assert graphs is not None
    assert {longest for _, longest, _ in graphs._graphs} == {512, 1024}
    assert {longest for size, longest, _ in graphs._graphs if size <= 768} <= {512, 768}


def test_what_cannot_be_captured_runs_as_usual(tmp_path, caplog) -> None:
    def fail(step: Callable[[], None], pool: object, model: nn.Module) -> None:
        raise RuntimeError("not permitted")

    path = save_encoder(tmp_path)
    wanted = load(path, []).encode(TEXTS[0])
    encoder = load(path, [], fail)
    for _ in range(2):
        np.testing.assert_allclose(encoder.encode(TEXTS[0]), wanted, atol=1e-6)
    assert caplog.text.count("not permitted") == 1


@pytest.mark.parametrize(
    ("max_tokens", "most", "sizes"),
    [
        (24, 4096, SIZES[:9]),  # 1,536 tokens would be up to 512 of padding, and sequences of padding 16 of 24
        (48, 4096, SIZES[:13]),
        (512, 4096, SIZES[:14]),
        (512, 16384, SIZES),
        (512, 512, SIZES[:7]),
        (512, 600, SIZES[:8]),
    ],
)
def test_sizes_are_those_that_a_batch_can_have(tmp_path, max_tokens: int, most: int, sizes: list[int]) -> None:
    model = load(save_encoder(tmp_path), [])._pipeline.model
    assert EncoderGraphs(model, max_tokens, most)._sizes == sizes


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_large_sizes_have_several_inputs_and_windows(tmp_path, family: str) -> None:
    """A batch of 1,024 tokens and more, of which an input may have 512. ModernBERT's windows are shorter than that."""
    limit = {"max_seq_length": 512, "do_lower_case": False}
    pooling = ("Pooling", {"pooling_mode_mean_tokens": True})
    path = save_encoder(tmp_path, family, [pooling], transformer=limit, max_position_embeddings=512)
    wanted = Encoder(EngineConfig(model=path, device="cpu", dtype="float32")).encode(MANY_TEXTS)
    captured: list[int] = []
    encoder = load(path, captured, max_tokens=512)
    for _ in range(2):
        for count in (1, 2, 4, 32):
            np.testing.assert_allclose(encoder.encode(MANY_TEXTS[:count]), wanted[:count], atol=1e-5)
    graphs = encoder._pipeline.graphs
    assert graphs is not None
    assert len(captured) == len(graphs._graphs) == 4
    assert max(size for size, _, _ in graphs._graphs) >= 1024
