"""What a request may ask of an encoder."""

import pickle

import numpy as np
import pytest

from fa_serve.engine.pooling.params import EncoderCard, Pooled, PoolingParams
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
    PoolingParams(dimensions=32, tokens=True, normalise=False).check(EMBEDDER)
    PoolingParams(activation="none").check(RERANKER)


def test_results_cross_the_pipe_between_processes() -> None:
    output = RequestOutput("a", [], finished=True, index=3, pooled=Pooled(np.arange(3, dtype=np.float32)))
    found = pickle.loads(pickle.dumps(output))
    assert found.index == 3
    np.testing.assert_array_equal(found.pooled.values, output.pooled.values)
