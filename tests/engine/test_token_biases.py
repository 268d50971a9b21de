"""What requests add to the logits of single tokens, for a whole step."""

from __future__ import annotations

import time

from fa_serve.engine import SamplingParams
from fa_serve.engine.request import Request
from fa_serve.engine.sampler import sampling_arrays
from fa_serve.engine.token_biases import NO_BIASES, TokenBiases


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
