"""What a request may ask of an encoder."""

import pickle

import numpy as np
import pytest

from fa_serve.engine.pooling.params import EncoderCard, PooledRows, PoolingParams
from fa_serve.engine.request.outputs import RequestOutput
from fa_serve.spec import ParameterError

EMBEDDER = EncoderCard("embed", 32, 48)
RERANKER = EncoderCard("score", 1, 48, labels=("LABEL_0",))


@pytest.mark.parametrize(
    ("card", "params", "field"),
    [
        (EMBEDDER, PoolingParams(dimensions=33), "dimensions"),
        (EMBEDDER, PoolingParams(dimensions=0), "dimensions"),
        (RERANKER, PoolingParams(dimensions=1), "dimensions"),
        (RERANKER, PoolingParams(tokens=True), "tokens"),
        (RERANKER, PoolingParams(activation="tanh"), "activation"),
    ],
)
def test_what_an_encoder_does_not_compute_is_refused(card, params, field: str) -> None:
    with pytest.raises(ParameterError) as caught:
        params.check(card)
    assert caught.value.field == field


def test_what_it_computes_is_not_refused() -> None:
    PoolingParams(dimensions=32, tokens=True, normalize=False).check(EMBEDDER)
    PoolingParams(activation="none").check(RERANKER)


def test_results_cross_the_pipe_between_processes() -> None:
    rows = PooledRows(np.arange(6, dtype=np.float32).reshape(3, 2))
    found = pickle.loads(pickle.dumps(RequestOutput("a", [], finished=True, index=3, pooled=rows)))
    assert found.index == 3
    np.testing.assert_array_equal(found.pooled.values, rows.values)


def test_rows_know_which_of_them_are_those_of_an_input() -> None:
    rows = PooledRows(np.arange(5, dtype=np.float32), np.array([0, 2, 2, 5]), np.arange(10, 15, dtype=np.int32))
    assert [each.values.tolist() for each in rows] == [[0, 1], [], [2, 3, 4]]
    assert [each.indices.tolist() for each in rows.part(1, 3)] == [[], [12, 13, 14]]
    plain = PooledRows(np.arange(6, dtype=np.float32).reshape(3, 2))
    assert (len(plain), plain.part(1, 3)[1].values.tolist()) == (3, [4, 5])
    with pytest.raises(IndexError):
        plain[3]
