"""The Hopper kernel of latent attention in the emulator, against the float64 oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hopper_emulator import emulated
from hopper_latent_cases import CASES, DEEPSEEK, SMALL, run_latent
from latent_cases import LatentCase, make_latent
from sampled_cases import each_nth

from fa_serve.backends.calls import AttentionTensors
from fa_serve.backends.hopper.latent.plan import plan_latent_decode
from fa_serve.backends.triton.latent.plan import LatentPlan
from fa_serve.backends.triton.tiles import DecodeTiles
from fa_serve.testing import run_plan


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case: LatentCase) -> None:
    run_latent(case)


def test_maxima_that_grow() -> None:
    run_latent(replace(SMALL, kv_lens=(500, 70, 330)), sharpness=4.0)


@pytest.mark.parametrize("seed", each_nth(3, range(3)))
def test_the_sizes_of_deepseek(seed: int) -> None:
    run_latent(DEEPSEEK, seed=seed)


@pytest.mark.parametrize("resident", [1, 2, 7])
def test_shares_of_the_batch(resident: int) -> None:
    """A program has several sequences, or a sequence several programs."""
    run_latent(replace(SMALL, q_lens=(1,) * 6, kv_lens=(300, 33, 0, 1, 260, 64)), resident_blocks=resident)


@pytest.mark.parametrize(("block_n", "stages"), [(16, 4), (32, 2), (32, 5), (64, 2)])
def test_other_rings(block_n: int, stages: int) -> None:
    tiles = DecodeTiles(64, block_n, num_warps=4, num_stages=stages, splits=2, balanced=False, registers=128)
    run_latent(replace(SMALL, kv_lens=(190, 64, 31)), tiles)


def test_sequences_with_more_queries_are_left_alone_and_out_may_have_any_strides() -> None:
    q, cache, _, options = make_latent(replace(SMALL, q_lens=(1, 19, 2), kv_lens=(50, 34, 20)))
    out = torch.full((22, 32, 300), 7.0, dtype=q.dtype)[..., :256]
    given = options | {"max_seqlen_q": 2, "window_size": (-1, 0), "softcap": 0.0, "out": out}
    with emulated():
        result, _ = run_plan(plan_latent_decode, q, cache, cache[..., :256], **given)
    assert result is out
    assert bool((out[1:20] == 7.0).all())
    assert not bool((out[[0, 20, 21]] == 7.0).any())


def test_an_unaligned_cache_is_copied_first() -> None:
    q, cache, _, options = make_latent(SMALL)
    given = options | {"window_size": (-1, 0), "softcap": 0.0}
    memory = torch.empty(cache.numel() + 1, dtype=cache.dtype)
    shifted = memory[1:].view(cache.shape).copy_(cache)
    with emulated():
        expected, _ = run_plan(plan_latent_decode, q, cache, cache[..., :256], **given)
        found, _ = run_plan(plan_latent_decode, q, shifted, shifted[..., :256], **given)
    assert shifted.data_ptr() & 15
    assert torch.equal(found, expected)


@pytest.mark.parametrize("gap", each_nth(2, [0, 8, 15, 16]))
def test_queries_are_copied_to_where_threads_can_copy_16_bytes(gap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their address is unaligned, and with some gaps between heads so are their strides."""
    q, cache, _, options = make_latent(SMALL)
    given = options | {"window_size": (-1, 0), "softcap": 0.0}
    memory = torch.full((3 * 32 * (288 + gap) + 1,), float("nan"), dtype=q.dtype)
    shifted = memory[1:].view(3, 32, 288 + gap)[..., :288].copy_(q)
    run = LatentPlan.__call__

    def run_aligned(plan: LatentPlan, tensors: AttentionTensors) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert not tensors.q.data_ptr() & 15
        assert not any(stride % 16 for stride in tensors.q.stride()[:2])
        return run(plan, tensors)

    monkeypatch.setattr(LatentPlan, "__call__", run_aligned)
    with emulated():
        expected, _ = run_plan(plan_latent_decode, q, cache, cache[..., :256], **given)
        found, _ = run_plan(plan_latent_decode, shifted, cache, cache[..., :256], **given)
    assert shifted.data_ptr() & 15
    assert torch.equal(found, expected)


def test_a_batch_without_queries() -> None:
    q, cache, _, options = make_latent(replace(SMALL, q_lens=(0,), kv_lens=(20,)))
    given = options | {"window_size": (-1, 0), "softcap": 0.0}
    out, lse = run_plan(plan_latent_decode, q, cache, cache[..., :256], **given)
    assert (out.shape, lse.shape) == ((0, 32, 256), (32, 0))
