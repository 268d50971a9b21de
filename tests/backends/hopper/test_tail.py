"""Rows behind the last sequence of a packed call in the Hopper kernels, which the emulator runs: out is 0 and lse is -inf."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hopper_emulator import emulated
from tail_cases import Attend, TailCase, check_tail, make_tail, params
from torch import Tensor

from fa_serve.backends.hopper.forward.plan import plan_hopper_forward
from fa_serve.backends.hopper.forward.tile_scheduler import PackedOutput
from fa_serve.backends.hopper.latent.plan import plan_latent_decode
from fa_serve.testing import run_plan

D64 = {"head_dim": 64, "heads": (2, 1)}
CASES = [
    TailCase((70, 4), (70, 4), **D64),
    TailCase((5, 0), (5, 0), sinks=True, tail=600, **D64),  # the host knows that most rows have no tile
    TailCase((), (), **D64),
    TailCase((0, 0), (5, 3), sinks=True, **D64),
    TailCase((5, 4), (0, 0), sinks=True, **D64),
    TailCase((130, 20), (130, 90), sparse=True, **D64),
    TailCase((70, 4), (70, 4), precision="qk8", **D64),
    TailCase((40, 33), (64, 70), layout="paged", sinks=True, **D64),
    TailCase((33,), (64,), tail=1, layout="paged", **D64),
]
SPLITS = [
    TailCase((40, 20), (300, 70), layout="paged", **D64),
    TailCase((3, 4), (300, 700), layout="paged", sinks=True, heads=(8, 2), head_dim=64),  # query heads share tiles
    TailCase((4,), (500,), tail=300, layout="paged", heads=(6, 2), head_dim=64),  # padded tiles
]
LATENT = [
    TailCase((1, 1), (40, 90), layout="paged", heads=(32, 1), head_dim=272, latent=True),
    TailCase((2, 0, 3), (40, 9, 90), layout="paged", heads=(32, 1), head_dim=272, latent=True, tail=40),
    TailCase((), (), layout="paged", heads=(32, 1), head_dim=272, latent=True),
]


def emulate(make: Any, case: TailCase) -> Attend:
    def call(q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any = None, **given: Any) -> tuple[Tensor, Tensor]:
        options = {"window_size": (-1, 0), "softcap": 0.0, "precision": case.precision}
        with emulated():
            found, lse = run_plan(make, q, k, v, **given, **options, blocks=block_mask)
        assert lse is not None
        return found, lse

    return call


@pytest.mark.parametrize("case", params(CASES))
def test_forward(case: TailCase) -> None:
    check_tail(case, emulate(plan_hopper_forward, case), torch.bfloat16)


@pytest.mark.parametrize("case", params(SPLITS))
def test_forward_with_split_keys(case: TailCase) -> None:
    check_tail(case, emulate(partial(plan_hopper_forward, max_splits=4), case), torch.bfloat16)


@pytest.mark.parametrize("case", params(LATENT))
def test_latent_decoding(case: TailCase) -> None:
    check_tail(case, emulate(plan_latent_decode, case), torch.bfloat16)


def test_the_other_kernel_of_a_mixed_batch_clears_the_rows() -> None:
    """With `skip_q` these rows stay as they are, like those of the sequences that are skipped."""
    case = TailCase((40, 1), (64, 70), layout="paged", **D64)
    q, k, v, given = make_tail(case, torch.bfloat16)
    out = torch.full_like(q, 7.0)
    with emulated():
        run_plan(plan_hopper_forward, q, k, v, **given, window_size=(-1, 0), softcap=0.0, out=out, skip_q=16)
    assert (out[40:] == 7.0).all()
    assert not (out[:40] == 7.0).any()


def test_a_long_tail_has_more_programs() -> None:
    known = PackedOutput(1000, 2, 1000, 128, 64, 64, tail=990)
    assert known.programs(1) == 61
    assert known._replace(tail=1 << 20).programs(7) == 1024
    assert known._replace(tail=-5).programs(7) == 7
