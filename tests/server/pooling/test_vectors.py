"""Vectors in JSON: the integers are those of sentence-transformers."""

import base64
import json

import numpy as np
import pytest
import torch
from fa_serve.server.pooling.vectors import FORMAT_BYTES, embedding_list, joined, quantised, written

FORMS = ["int8", "uint8", "binary", "ubinary"]
VECTORS = np.random.default_rng(0).normal(size=(5, 20)).astype(np.float32)


@pytest.mark.parametrize("form", FORMS)
def test_integers_are_those_of_sentence_transformers(form) -> None:
    quantization = pytest.importorskip(
        "sentence_transformers.util.quantization", reason="sentence-transformers is not installed"
    )
    for row in VECTORS:
        largest = np.abs(row).max()
        ranges = np.stack([np.full(20, -largest), np.full(20, largest)])
        [wanted] = quantization.quantize_embeddings(row[None], form, ranges=ranges)
        found = quantised(row, form)
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)


def test_integers_keep_the_direction_of_a_vector() -> None:
    found = quantised(VECTORS[0], "int8") + 0.5
    assert found @ VECTORS[0] / np.linalg.norm(found) / np.linalg.norm(VECTORS[0]) > 0.9999
    assert quantised(np.zeros(9, dtype=np.float32), "uint8").tolist() == [0] * 9


@pytest.mark.parametrize("form", ["float16", "bfloat16"])
def test_numbers_of_16_bits_are_the_nearest(form: str) -> None:
    """Among them are halves, which go to the even neighbour, both zeros, and numbers that float16 does not have."""
    halves = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 0.0, -0.0, 2**-20], dtype=np.float32)
    for row in (*VECTORS, halves):
        wanted = torch.from_numpy(row).to(getattr(torch, form))
        found = torch.frombuffer(bytearray(base64.b64decode(written(row, form))), dtype=wanted.dtype)
        assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))
    [large] = np.frombuffer(base64.b64decode(written(np.array([-1e9], dtype=np.float32), "float16")), dtype="<f2")
    assert large == np.finfo(np.float16).min


@pytest.mark.parametrize("form", ["float", "base64", "float16", "bfloat16", *FORMS])
def test_an_answer_has_no_more_bytes_than_estimated(form) -> None:
    body = joined(embedding_list(VECTORS, form, {"model": "m"}))
    data = json.loads(body)["data"]
    assert [each["index"] for each in data] == [0, 1, 2, 3, 4]
    own = sum(len(json.dumps(each["embedding"], separators=(",", ":"))) for each in data)
    assert own <= FORMAT_BYTES[form] * VECTORS.size + 5 * len(VECTORS)
