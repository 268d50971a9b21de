"""The programs of the persistent kernel wait for all that they read, and for nothing that never comes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from decode_step_cases import StepCase, compute_plainly, make_layers, make_step, tensors_of
from interpreted_programs import DataRaceError, DeadlockError, programs_together
from interpreter_bounds import reachable
from torch import Tensor

from fa_serve.ops.decode_step import kernel
from fa_serve.ops.decode_step.layout import StepTile
from fa_serve.ops.decode_step.run import DecodeStack

TILE = StepTile(tile_bytes=1024, block_k=32, num_warps=2, block_keys=16, key_stages=1, ahead_bytes=0)
CASES = {
    "one token in two splits": (StepCase(kv_lens=(37,)), 4),
    "more programs than rows of a head": (StepCase(hidden=16, intermediate=16, head_dim=16, num_heads=2, num_kv_heads=1), 7),
    "tasks for two rounds": (StepCase(q_lens=(1, 1, 1), kv_lens=(5, 33, 1), head_norms=True), 3),
    "drafts in splits": (StepCase(q_lens=(4,), kv_lens=(40,), num_kv_heads=1), 5),
}


def compute(
    case: StepCase, programs: int, seed: int, *, steps: int = 1, weakened: dict[str, str] | None = None
) -> tuple[Tensor, Tensor]:
    """What the kernel computes and what is right, of the last of some steps that are the same but for the caches."""
    layers = make_layers(case)
    x, step = make_step(case)
    expected = compute_plainly(case, layers, x, step._replace(caches=[(k.clone(), v.clone()) for k, v in step.caches]))
    stack = DecodeStack(layers, case.options(), programs=programs, tile=TILE)
    shared = [cache for pair in step.caches for cache in pair]
    actual = x
    for _ in range(steps):
        actual = x.clone()
        together = programs_together(seed, actual, *shared, *stack.memory(), weakened=weakened)
        with reachable(*tensors_of(layers, step)), together:
            stack.compute(actual, step)
    return actual, expected


@pytest.mark.parametrize("name", CASES)
def test_any_order_of_arrival_gives_the_same_bits(name: str) -> None:
    case, programs = CASES[name]
    results = []
    for seed in range(2):
        actual, expected = compute(case, programs, seed, steps=2 - seed)
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
        results.append(actual)
    assert all(torch.equal(results[0], result) for result in results)


def test_random_shapes() -> None:
    for seed in range(6):
        draw = torch.Generator().manual_seed(seed)

        def number(low: int, high: int, draw: torch.Generator = draw) -> int:
            return int(torch.randint(low, high + 1, (), generator=draw))

        kv_heads = number(1, 2)
        q_lens = [number(1, 2) for _ in range(number(1, 3))]
        case = StepCase(
            q_lens=q_lens,
            kv_lens=[q_len + number(0, 40) for q_len in q_lens],
            hidden=8 * number(1, 6),
            intermediate=8 * number(1, 6),
            num_heads=kv_heads * number(1, 3),
            num_kv_heads=kv_heads,
            head_norms=bool(number(0, 1)),
            layers=number(1, 3),
        )
        actual, expected = compute(case, number(1, 6), seed)
        assert torch.allclose(actual.double(), expected, rtol=1e-5, atol=1e-5), case


def test_a_step_that_fills_a_page_which_another_sequence_reads_is_a_race() -> None:
    """Nothing orders these accesses, so engines compute such steps layer by layer (`BatchArrays.by_layers`)."""
    case = StepCase(q_lens=(5, 1), kv_lens=(5, 5))
    layers = make_layers(case)
    x, step = make_step(case)
    step.block_table[1, 0] = step.block_table[0, 0]
    stack = DecodeStack(layers, case.options(), programs=4, tile=TILE)
    shared = [cache for pair in step.caches for cache in pair]
    together = programs_together(0, x, *shared, *stack.memory())
    with pytest.raises(DataRaceError), reachable(*tensors_of(layers, step)), together:
        stack.compute(x, step)


@contextmanager
def without_wait(phase: int) -> Iterator[None]:
    original = kernel.wait_for_phase

    def wait(counters_ptr: Any, which: Any, target: Any) -> None:
        if int(getattr(which, "value", which)) != phase:
            original(counters_ptr, which, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "wait_for_phase", wait)
        yield


@pytest.mark.parametrize("phase", range(5))
def test_a_dropped_wait_is_found(phase: int) -> None:
    case, programs = CASES["one token in two splits"]
    with without_wait(phase), pytest.raises(DataRaceError):
        compute(case, programs, 0)


@pytest.mark.parametrize("semantics", ["release", "acquire", "acq_rel"])
def test_an_atomic_operation_that_orders_nothing_is_found(semantics: str) -> None:
    """acq_rel is how the splits of a KV head hand their results to the one that merges them."""
    case, programs = CASES["one token in two splits"]
    with pytest.raises(DataRaceError):
        compute(case, programs, 0, weakened={semantics: "relaxed"})


def test_a_program_that_does_not_arrive_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case, programs = CASES["one token in two splits"]
    original = kernel.arrive

    def arrive(counters_ptr: Any, phase: Any) -> None:
        if int(getattr(phase, "value", phase)) != 2:
            original(counters_ptr, phase)

    monkeypatch.setattr(kernel, "arrive", arrive)
    with pytest.raises(DeadlockError):
        compute(case, programs, 0)
