"""What requests add to the logits of single tokens, for a whole step."""

from __future__ import annotations

import time

import numpy as np

from fa_serve.engine import SamplingParams
from fa_serve.engine.request.request import Request
from fa_serve.engine.request.token_biases import NO_BIASES, TokenBiases
from fa_serve.engine.runner.sampler import sampling_arrays


def test_a_request_without_biases_has_none() -> None:
    assert TokenBiases.of(SamplingParams(temperature=0.5), frozenset({3}), 10) is NO_BIASES
    assert sampling_arrays([Request("a", [1], SamplingParams(temperature=0.0), 4)], [1], 10) == {}


def test_thousands_of_token_ids_of_many_answers_cost_a_step_little() -> None:
    """128 answers that name 1,024 tokens in each field took 50 ms of each step."""
    params = SamplingParams(
        max_tokens=9,
        min_tokens=5,
        logit_bias=dict.fromkeys(range(0, 2048, 2), 1.0),
        bad_token_ids=(2, 5),
        allowed_token_ids=tuple(range(1024)),
    )
    biases = TokenBiases.of(params, frozenset(range(2000, 3024)), 3000)
    requests = [Request(str(i), [1], params, 9, biases=biases) for i in range(128)]
    begin = time.thread_time()
    arrays = sampling_arrays(requests, [3] * 127 + [6], 3000)
    assert time.thread_time() - begin < 0.02
    expected = dict.fromkeys(range(0, 2048, 2), 1.0) | {2: float("-inf"), 5: float("-inf")}
    early = expected | dict.fromkeys(range(2000, 3000), float("-inf"))
    found = dict(zip(arrays["bias_index"].tolist(), arrays["bias"].tolist(), strict=True))
    assert len(found) == len(arrays["bias_index"])
    assert found == {
        row * 3000 + token: value for row in range(128) for token, value in (expected if row == 127 else early).items()
    }
    assert arrays["allowed_index"].tolist() == [row * 3000 + token for row in range(128) for token in range(1024)]
    assert (arrays["bias"].dtype, arrays["bias_index"].dtype) == ("float32", "int64")


def test_rows_of_a_request_are_those_of_as_many_requests() -> None:
    """A sequence with drafts has several rows of logits, which differ in their positions."""
    options = [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "presence_penalty": 0.5, "repetition_penalty": 1.2},
        {"temperature": 1.0, "min_tokens": 4, "logit_bias": {3: 1.5}, "allowed_token_ids": (3, 4), "seed": 7},
    ]
    requests = []
    for number, given in enumerate(options):
        params = SamplingParams(max_tokens=9, **given)
        biases = TokenBiases.of(params, frozenset({2}), 10)
        requests.append(Request(str(number), [1], params, 9, seed=number, biases=biases))
    num_rows = np.array([2, 1, 3])
    positions = [1, 2, 4, 3, 4, 5]
    repeated = [request for request, count in zip(requests, num_rows, strict=True) for _ in range(count)]
    expected = sampling_arrays(repeated, positions, 10)
    arrays = sampling_arrays(requests, np.array(positions), 10, num_rows=num_rows)
    assert arrays.keys() == expected.keys() >= {"keys", "top_k", "top_p", "min_p", "repetition", "bias_index", "allowed_rows"}
    for name, values in expected.items():
        assert arrays[name].tolist() == values.tolist(), name
        assert arrays[name].dtype == values.dtype, name
