"""Which calls the Hopper kernel of latent attention serves, and its tiles."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fa_serve.backends.hopper import HopperBackend
from fa_serve.backends.hopper.latent.tiles import cannot_decode_latent, latent_hopper_tiles
from fa_serve.spec import AttentionSpec

BFLOAT16 = torch.bfloat16
CALL = AttentionSpec(
    "paged", "cuda", 90, BFLOAT16, BFLOAT16, 576, 512, 128, 1, (-1, 0), page_size=16, op="decode", values_in_keys=True
)


def test_few_rows_are_left_to_the_portable_kernel() -> None:
    hopper = HopperBackend()
    assert hopper.supports(CALL) is None
    assert hopper.supports(replace(CALL, num_heads=33)) is None
    few = replace(CALL, num_heads=16)
    assert "at least 33 query heads over all its queries, got 16 heads and up to 1 queries" in str(hopper.supports(few))
    assert "got 16 heads and up to 2 queries" in str(hopper.supports(replace(few, sizes=(8, 2, 4096))))
    assert hopper.supports(replace(few, sizes=(8, 4, 4096))) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"window_size": (9, 0)}, "got a window"),
        ({"softcap": True, "sinks": True}, "got softcap, sinks"),
        ({"num_kv_heads": 2}, "got 2 with 512 and 64 more"),
        ({"head_dim": 640}, "got 1 with 512 and 128 more"),
        ({"head_dim": 552}, "got 1 with 512 and 40 more"),
        ({"head_dim": 448, "head_dim_v": 384}, "got 1 with 384 and 64 more"),
    ],
    ids=str,
)
def test_what_it_does_not_compute(changes: dict, reason: str) -> None:
    assert reason in str(cannot_decode_latent(replace(CALL, **changes)))
    assert reason in str(HopperBackend().supports(replace(CALL, **changes)))


@pytest.mark.parametrize(
    "changes", [{"page_size": 8}, {"kv_dtype": torch.float8_e4m3fn}, {"whole_rows": False}, {"dtype": torch.float32}], ids=str
)
def test_what_no_kernel_for_hopper_reads(changes: dict) -> None:
    assert HopperBackend().supports(replace(CALL, **changes)) is not None


def test_programs_fill_the_gpu_once() -> None:
    many = latent_hopper_tiles(132, 128, 1, 64, 1, 8192, 0)
    assert (many.splits, many.balanced, many.min_blocks * many.block_n) == (66, True, 128)
    one = latent_hopper_tiles(132, 128, 1, 1, 1, 131072, 0)
    assert (one.splits, one.balanced) == (66, False)
    assert latent_hopper_tiles(132, 64, 1, 1, 1, 131072, 0).splits == 132
    assert latent_hopper_tiles(132, 64, 1, 5, 1, 32, 0).splits == 1
    assert latent_hopper_tiles(132, 64, 1, 5, 1, 8192, 7).splits == 7
