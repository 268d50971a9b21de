"""The persistent kernel of a step of one token, whose programs wait for words with tags, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from decode_step_cases import StepCase, compute_plainly, make_layers, make_step, tensors_of
from interpreted_programs import DeadlockError, programs_together
from interpreter_bounds import reachable
from torch import Tensor

from fa_serve.ops.decode_step import word_kernel
from fa_serve.ops.decode_step.layout import StepTile
from fa_serve.ops.decode_step.run import DecodeStack

TILE = StepTile(tile_bytes=1024, block_k=32, num_warps=2, block_keys=16, key_stages=1, ahead_bytes=0, tagged=True)
CASES = {
    "two splits": (StepCase(kv_lens=(37,)), 5),
    "one split": (StepCase(kv_lens=(40,)), 2),
    "more programs than rows of the residual stream": (StepCase(hidden=8, intermediate=8, num_heads=2, num_kv_heads=1), 9),
    "two blocks of keys in a split": (StepCase(kv_lens=(50,), num_heads=6, head_norms=True), 4),
    "first token": (StepCase(kv_lens=(1,), qkv_bias=True), 4),
    "padding": (StepCase(kv_lens=(1,), padded=frozenset({0})), 4),
    "no rotation": (StepCase(kv_lens=(20,), rotary_dim=0, multiplier=0.5, activation="gelu_tanh"), 4),
    # words of 32 bits, without the products of tensor cores, which the interpreter computes in 16 bits as if they were integers
    "bfloat16": (StepCase(kv_lens=(1,), head_norms=True, dtype=torch.bfloat16), 4),
}


def compute(case: StepCase, programs: int, seed: int, *, steps: int = 1) -> tuple[Tensor, Tensor]:
    """What the kernel computes and what is right, of the last of some steps that are the same but for the caches."""
    layers = make_layers(case)
    x, step = make_step(case)
    copies = step._replace(caches=[(k.clone(), v.clone()) for k, v in step.caches])
    expected = compute_plainly(case, layers, x, copies)
    stack = DecodeStack(layers, case.options(), programs=programs, tile=TILE)
    assert stack.words()
    shared = [cache for pair in step.caches for cache in pair]
    actual = x
    for _ in range(steps):
        actual = x.clone()
        with reachable(*tensors_of(layers, step)), programs_together(seed, actual, *shared, *stack.memory()):
            stack.compute(actual, step)
    close = {"rtol": 1e-5, "atol": 1e-5} if case.dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    for pair, wanted in zip(step.caches, copies.caches, strict=True):
        for cache, copy in zip(pair, wanted, strict=True):
            torch.testing.assert_close(cache, copy, equal_nan=True, **close)
    return actual, expected


@pytest.mark.parametrize("name", CASES)
def test_any_order_of_arrival_gives_the_same_bits(name: str) -> None:
    case, programs = CASES[name]
    results = []
    for seed in range(2):
        actual, expected = compute(case, programs, seed, steps=2 - seed)
        close = 1e-5 if case.dtype == torch.float32 else 3e-2
        torch.testing.assert_close(actual.double(), expected, rtol=close, atol=close)
        results.append(actual)
    assert all(torch.equal(results[0], result) for result in results)


def test_tags_go_round() -> None:
    """Three launches with three tags each, of which the fifth is 0."""
    case, programs = CASES["first token"]
    layers = make_layers(case)
    x, step = make_step(case)
    stack = DecodeStack(layers, case.options(), programs=programs, tile=TILE)
    stack.words()[-1].fill_(0xFFFB)
    expected = compute_plainly(case, layers, x, step._replace(caches=[(k.clone(), v.clone()) for k, v in step.caches]))
    for seed in range(3):
        actual = x.clone()
        with reachable(*tensors_of(layers, step)), programs_together(seed, actual, *stack.memory()):
            stack.compute(actual, step)
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def test_steps_of_several_tokens_use_counters() -> None:
    case = StepCase(q_lens=(1, 1), kv_lens=(3, 20))
    layers = make_layers(case)
    x, step = make_step(case)
    expected = compute_plainly(case, layers, x, step._replace(caches=[(k.clone(), v.clone()) for k, v in step.caches]))
    stack = DecodeStack(layers, case.options(), programs=1, tile=TILE)
    before = [words.clone() for words in stack.words()]
    with reachable(*tensors_of(layers, step)):
        stack.compute(x, step)
    torch.testing.assert_close(x.double(), expected, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(words, old) for words, old in zip(stack.words(), before, strict=True))


@contextmanager
def without_store(which: int) -> Iterator[None]:
    """One of the stores of words of a layer writes the tag before."""
    original = word_kernel.store_words
    calls = [0]

    def store(words_ptr: Any, y: Any, tag: Any, keep: Any, dtype: Any) -> None:
        calls[0] += 1
        original(words_ptr, y, tag - 1 if calls[0] == which else tag, keep, dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(word_kernel, "store_words", store)
        yield


@pytest.mark.parametrize("which", [1, 8, 20])
def test_words_with_the_tag_before_are_waited_for(which: int) -> None:
    case, programs = CASES["two splits"]
    with without_store(which), pytest.raises(DeadlockError):
        compute(case, programs, 0)
