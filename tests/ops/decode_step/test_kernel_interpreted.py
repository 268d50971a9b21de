"""The persistent kernel of a decoding step in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from decode_step_cases import StepCase, compute_plainly, make_layers, make_step, tensors_of
from interpreter_bounds import reachable

from fa_serve.ops.decode_step.layout import StepTile
from fa_serve.ops.decode_step.run import DecodeStack

TILE = StepTile(tile_bytes=1024, block_k=32, num_warps=2, block_keys=16, key_stages=1, ahead_bytes=0)

CASES = {
    "llama": StepCase(),
    "qwen3": StepCase(head_norms=True, num_heads=6, num_kv_heads=2, kv_lens=(37,)),
    "qwen2": StepCase(qkv_bias=True, rotary_dim=8, kv_lens=(1,)),
    "granite": StepCase(multiplier=0.5, activation="gelu_tanh"),
    "eight": StepCase(q_lens=(1,) * 8, kv_lens=(3, 17, 1, 40, 16, 2, 33, 9), layers=1),
    "drafts": StepCase(q_lens=(3, 3), kv_lens=(18, 3), head_norms=True),
    "padding": StepCase(q_lens=(1, 1, 1, 1), kv_lens=(20, 5, 1, 1), padded=frozenset({2, 3})),
}


@pytest.mark.parametrize("name", CASES)
def test_layers_are_those_of_a_plain_computation(name: str) -> None:
    case = CASES[name]
    layers = make_layers(case)
    x, step = make_step(case)
    copies = step._replace(caches=[(k.clone(), v.clone()) for k, v in step.caches])
    expected = compute_plainly(case, layers, x, copies)
    stack = DecodeStack(layers, case.options(), programs=1, tile=TILE)
    assert stack.refusal(step) is None
    with reachable(*tensors_of(layers, step)):
        actual = stack.compute(x, step)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
    for pair, wanted in zip(step.caches, copies.caches, strict=True):
        for cache, copy in zip(pair, wanted, strict=True):
            torch.testing.assert_close(cache, copy, rtol=1e-5, atol=1e-5, equal_nan=True)
