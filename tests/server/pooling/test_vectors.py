"""Vectors in JSON: the integers are those of sentence-transformers."""

import json

import numpy as np
import pytest
from fa_serve.server.pooling.vectors import FORMAT_BYTES, embedding_list, joined, quantised

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


@pytest.mark.parametrize("form", ["float", "base64", *FORMS])
def test_an_answer_has_no_more_bytes_than_estimated(form) -> None:
    body = joined(embedding_list(VECTORS, form, {"model": "m"}))
    data = json.loads(body)["data"]
    assert [each["index"] for each in data] == [0, 1, 2, 3, 4]
    own = sum(len(json.dumps(each["embedding"], separators=(",", ":"))) for each in data)
    assert own <= FORMAT_BYTES[form] * VECTORS.size + 5 * len(VECTORS)
