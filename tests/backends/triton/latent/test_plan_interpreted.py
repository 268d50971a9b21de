"""Latent attention in Triton's interpreter against the float64 oracle: decoding, verify steps, prompts and mixed batches.

The interpreter computes in NumPy, which has no bfloat16: that is left to the GPU suite.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from latent_cases import CASES, LatentCase, assert_right, check_latent, make_latent
from sampled_cases import each_nth

import fa_serve
from fa_serve.backends.triton.latent import plan as latent
from fa_serve.backends.triton.latent.plan import LatentTiles, plan_latent
from fa_serve.launching.plans import PLANS
from fa_serve.testing import cu_seqlens, run_plan


@pytest.mark.parametrize("case", each_nth(2, CASES), ids=str)
def test_latent_attention(case: LatentCase) -> None:
    check_latent(case)


def test_the_kernel_computes_what_it_serves(monkeypatch) -> None:
    """Keys of 40 numbers, which other kernels could read as well, whole values, and a window, which this kernel has not."""
    calls: list[bool] = []
    plan = plan_latent
    monkeypatch.setattr(latent, "plan_latent", lambda *args, decodes: calls.append(decodes) or plan(*args, decodes=decodes))
    PLANS.clear()
    check_latent(LatentCase())
    check_latent(LatentCase(q_lens=(17,), kv_lens=(18,), heads=(4, 1)))
    check_latent(LatentCase(q_lens=(1, 17), kv_lens=(20, 17), heads=(4, 1)))
    assert calls == [True, False, False, True]
    q, cache, keys, options = make_latent(LatentCase())
    doubled, lse = fa_serve.attention_paged(q, cache, (2 * cache)[..., :24], backend="triton", **options)
    windowed = fa_serve.attention_paged(q, cache, cache[..., :24], backend="triton", window_size=(9, 0), **options)
    assert len(calls) == 4
    assert_right(LatentCase(), doubled / 2, lse, q, keys)  # other values, whose strides are those of a part of the keys
    assert not torch.equal(doubled / 2, windowed[0])


def test_a_fixed_number_of_splits_does_not_depend_on_the_batch() -> None:
    case = LatentCase(q_lens=(1, 1), kv_lens=(150, 17), heads=(8, 1), num_splits=4)
    q, cache, _, options = make_latent(case)
    together, _ = fa_serve.attention_paged(q, cache, cache[..., :24], backend="triton", **options)
    for row in range(2):
        own = options | {
            "block_table": options["block_table"][row : row + 1],
            "seqused_k": options["seqused_k"][row : row + 1],
            "cu_seqlens_q": cu_seqlens((1,)),
            "max_seqlen_k": 160,
        }
        alone, _ = fa_serve.attention_paged(q[row : row + 1], cache, cache[..., :24], backend="triton", **own)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("decodes", [True, False])
def test_sequences_of_another_kernel_are_left_alone(decodes: bool) -> None:
    """Decoding leaves those with more queries than its bound, prompts those with few, and `out` may have any strides."""
    case = LatentCase(q_lens=(1, 19, 2), kv_lens=(50, 34, 20), heads=(4, 1))
    q, cache, _, options = make_latent(case)
    out = torch.full((22, 4, 40), 7.0)[..., :24]
    bounds = {"max_seqlen_q": 2} if decodes else {"skip_q": 2}
    given = options | bounds | {"window_size": (-1, 0), "softcap": 0.0, "out": out}
    tiles = LatentTiles(16, 16, 4, 1, 3, balanced=True, min_blocks=2)
    run_plan(partial(plan_latent, decodes=decodes), q, cache, cache[..., :24], tiles=tiles, **given)
    ours = torch.ones(22, dtype=torch.bool)
    ours[1:20] = False
    if not decodes:
        ours = ~ours
    assert bool((out[~ours] == 7.0).all())
    whole = check_latent(case)
    torch.testing.assert_close(out[ours], whole[ours])
