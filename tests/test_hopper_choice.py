"""What the Hopper backend accepts, in words, and the tiles it chooses: no GPU, no compiler."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton

from fa_serve.api import _of_whole_rows
from fa_serve.backends.hopper import HopperBackend
from fa_serve.backends.hopper.schedule import _COUNTERS, TileCounters
from fa_serve.backends.hopper.tiles import HEAD_DIMS, TileConfig, forward_tiles, head_group
from fa_serve.spec import AttentionSpec

H200 = AttentionSpec("varlen", "cuda", 90, torch.bfloat16, torch.bfloat16, 128, 128, 32, 8, window_size=(-1, 0))


@pytest.mark.parametrize("dims", HEAD_DIMS)
@pytest.mark.parametrize("layout", ["dense", "varlen", "paged"])
def test_accepts(dims: tuple[int, int], layout: str) -> None:
    spec = replace(
        H200,
        layout=layout,
        page_size=48 if layout == "paged" else 0,
        head_dim=dims[0],
        head_dim_v=dims[1],
        softcap=True,
        sinks=True,
        window_size=(100, 20),
    )
    assert HopperBackend().supports(spec) is None
    assert HopperBackend().supports(replace(spec, dtype=torch.float16, kv_dtype=torch.float16)) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": "cpu", "arch": 0}, "got cpu"),
        ({"arch": 100}, "got compute capability 10.0"),
        ({"dtype": torch.float32, "kv_dtype": torch.float32}, "got float32"),
        ({"layout": "paged", "page_size": 16, "few_queries": True}, "decoding kernels"),
        ({"layout": "paged", "page_size": 16, "kv_dtype": torch.float8_e4m3fn}, "got float8_e4m3fn"),
        ({"layout": "paged", "page_size": 8}, "got 8"),
        ({"layout": "paged", "page_size": 16, "whole_rows": False}, "whole number of tokens"),
        ({"head_dim": 80, "head_dim_v": 80}, "got 80"),
        ({"head_dim": 128, "head_dim_v": 64}, "got 128 with 64"),
        ({"mask": "bool"}, "explicit mask"),
        ({"needs_grad": True}, "gradients"),
    ],
)
def test_refuses_in_words(change: dict, words: str) -> None:
    reason = HopperBackend().supports(replace(H200, **change))
    assert reason is not None
    assert words in reason


@pytest.mark.parametrize(
    ("strides", "whole"),
    [
        ((2048, 128, 64, 1), True),
        ((4096, 128, 64, 1), True),
        ((2048, 64, 1024, 1), True),
        ((2050, 128, 64, 1), False),
        ((2048, 132, 64, 1), False),
        ((2048, 128, 60, 1), False),
    ],
    ids=str,
)
def test_which_caches_have_whole_rows(strides: tuple[int, ...], whole: bool) -> None:
    cache = torch.zeros(20_000, dtype=torch.bfloat16).as_strided((3, 16, 2, 64), strides)
    assert _of_whole_rows(cache) == whole
    assert not _of_whole_rows(cache.as_strided(cache.shape, strides, storage_offset=4))


def test_refuses_another_gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.7.0")
    assert "3.7.0" in str(HopperBackend().supports(H200))


def shared_bytes(tiles: TileConfig, head_dim: int, head_dim_v: int) -> int:
    """What a block takes; Hopper has 232,448 bytes for one block and 233,472 for all blocks of a multiprocessor."""
    first, second, value = HEAD_DIMS[head_dim, head_dim_v]
    queries = tiles.q_stages * tiles.block_m * (first + second)
    keys = tiles.stages * tiles.block_n * (first + second + value)
    out = tiles.block_m * value // tiles.o_parts if tiles.o_parts else 0
    return 2 * (queries + keys + out) + 1024


@pytest.mark.parametrize("dims", HEAD_DIMS)
@pytest.mark.parametrize("seqlen", [1, 64, 65, 512, 1024, 2048, 4096, 100_000])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (127, 0)], ids=["full", "causal", "window"])
def test_chosen_tiles_fit_the_chip(dims: tuple[int, int], seqlen: int, window: tuple[int, int]) -> None:
    for varlen, paged in ((False, False), (True, False), (True, True)):
        tiles = forward_tiles(*dims, window, seqlen, seqlen, varlen, paged)
        assert shared_bytes(tiles, *dims) <= 232_448
        assert tiles.blocks_per_sm * shared_bytes(tiles, *dims) <= 233_472
        at_launch, consumer = tiles.registers
        threads = 128 * (tiles.groups + 1)
        assert at_launch % 8 == 0
        assert consumer % 8 == 0
        assert tiles.blocks_per_sm * threads * at_launch <= 65_536
        assert 128 * (tiles.groups * consumer + 24) <= threads * at_launch


def test_rows_that_see_few_keys_take_small_tiles() -> None:
    small = forward_tiles(64, 64, (-1, 0), 2048, 2048, False)
    assert (small.block_m, small.block_n, small.blocks_per_sm) == (64, 64, 3)
    assert forward_tiles(64, 64, (127, 0), 100_000, 100_000, True, True) == small
    assert forward_tiles(64, 64, (-1, 0), 500, 8000, True, True).block_m == 128, "the last rows of a long prompt see all of it"
    assert forward_tiles(64, 64, (-1, -1), 512, 512, False).block_m == 192
    assert forward_tiles(128, 128, (127, 0), 4096, 4096, False).block_m == 64
    assert forward_tiles(128, 128, (-1, 0), 1024, 1024, False).block_m == 128


def test_head_group_keeps_heads_of_one_key_head_together() -> None:
    assert head_group(64, 4, 1 << 20, 200) == (64, 4)
    assert head_group(64, 4, 8 << 20, 200) == (8, 4)
    assert head_group(64, 4, 1 << 30, 200) == (4, 4)
    assert head_group(2, 1, 0, 1) == (2, 2)
    assert head_group(64, 4, 1 << 20, 32, equal=True) == (4, 4)
    assert head_group(16, 1, 8 << 20, 128, equal=True) == (2, 4)


def test_the_last_group_gives_every_multiprocessor_several_tiles() -> None:
    assert head_group(64, 1, 16 << 20, 32) == (1, 13)
    assert head_group(64, 4, 16 << 20, 32) == (4, 16)
    assert head_group(8, 1, 16 << 20, 128) == (8, 8), "half of them at the end: all"
    assert head_group(256, 1, 16 << 20, 4) == (1, 32), "no more heads at once than share what they read"


def test_no_stream_shares_a_counter_with_a_graph() -> None:
    counters = TileCounters()
    device = torch.device("cpu")
    eager = counters.take(device, 1, False)
    assert counters.take(device, 1, False) is eager
    captured = {counters.take(device, 1, True).data_ptr() for _ in range(_COUNTERS + 5)}
    assert len(captured) == _COUNTERS
    assert not {eager.data_ptr(), counters.take(device, 2, False).data_ptr()} & captured
