"""The tile scheduler of split keys, emulated: splits cover the keys of each tile once, about equally, and fit the table."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from cross_compile import compiling_for
from hopper_emulator import emulated

from fa_serve.backends.hopper.forward.tile_scheduler import PackedOutput, max_tile_count, tile_table
from fa_serve.backends.hopper.forward.tiles import MAX_SPLITS
from fa_serve.backends.hopper.split_kv import tile_scheduler
from fa_serve.backends.hopper.split_kv.tile_scheduler import split_table_launch, table_capacity
from fa_serve.testing import cu_seqlens

QUERIES = 16
BLOCK_N = 64
MANY = 73
CASES = [
    ([4] * 5, [300, 20, 4096, 64, 700]),
    ([40, 1, 0, 16, 17], [2000, 1, 50, 0, 17]),
    ([16], [8192]),
    ([4] * MANY, [64 + 37 * i % 900 for i in range(MANY)]),
]


@pytest.fixture(autouse=True)
def _short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program reads MANY sequences in two parts, of which the second is not full, whatever the size of a part."""
    monkeypatch.setattr(tile_scheduler, "SEQUENCES_AT_A_TIME", 64)


def splits_of(
    lengths_q: list[int],
    lengths_k: list[int],
    window: tuple[int, int],
    *,
    num_heads: int,
    resident: int,
    max_splits: int,
    processors: int = 0,
    skip_q: int = 0,
    by_waves: bool = False,
    min_blocks: int = 2,
) -> tuple[list[list[int]], int]:
    """The live records, and the room that the table has. processors: by default one for each slot"""
    batch = len(lengths_q)
    max_tiles = max_tile_count(sum(lengths_q), batch, max(lengths_q), QUERIES, skip_q)
    capacity = table_capacity(max_tiles, num_heads, resident, max_splits, by_waves=by_waves)
    launch = split_table_launch(
        capacity,
        batch,
        window,
        QUERIES,
        BLOCK_N,
        skip_q,
        True,
        PackedOutput(sum(lengths_q), 2, sum(lengths_q), 16, 8, dim_v=8),
        tile_heads=num_heads,
        processors=processors or resident,
        resident=resident,
        max_splits=max_splits,
        min_blocks=min_blocks,
        by_waves=by_waves,
    )
    with emulated():
        lengths = (cu_seqlens(lengths_q), torch.tensor(lengths_k, dtype=torch.int32))
        table = tile_table(launch, capacity, *lengths, torch.empty(sum(lengths_q), 2, 8), None)
    live = int(table[capacity * 8 + 1])
    records = table[: capacity * 8].view(capacity, 8).tolist()
    assert all(record[0] == -1 for record in records[live:])
    return records[:live], capacity


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (100, 0)], ids=str)
@pytest.mark.parametrize(("num_heads", "resident", "max_splits"), [(2, 24, 16), (8, 264, 4), (8, 8, 16)])
@pytest.mark.parametrize(("lengths_q", "lengths_k"), CASES, ids=["few", "unequal", "one", "many"])
@pytest.mark.parametrize("by_waves", [False, True])
def test_splits_cover_the_keys_of_each_tile_once(
    by_waves: bool,
    lengths_q: list[int],
    lengths_k: list[int],
    num_heads: int,
    resident: int,
    max_splits: int,
    window: tuple[int, int],
) -> None:
    sizes = {"num_heads": num_heads, "resident": resident, "max_splits": max_splits, "by_waves": by_waves}
    records, capacity = splits_of(lengths_q, lengths_k, window, **sizes)
    assert len(records) <= capacity
    tiles: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
    for record in records:
        tiles[record[4], record[0]].append(record)
    expected = {(b, row) for b, q in enumerate(lengths_q) for row in range(0, q, QUERIES)}
    assert set(tiles) == expected
    left, right = window
    for (b, row), found in tiles.items():
        assert [r[1] % MAX_SPLITS for r in found] == list(range(len(found)))
        assert {r[1] // MAX_SPLITS for r in found} == {len(found)}
        assert len(found) <= max_splits
        offset = lengths_k[b] - lengths_q[b]
        end = lengths_k[b] if right < 0 else min(lengths_k[b], row + QUERIES + offset + right)
        high = max(-(-end // BLOCK_N), 1)
        low = min(max(row + offset - left, 0) // BLOCK_N, high - 1) if left >= 0 else 0
        visited = [block for r in found if r[5] or lengths_k[b] == 0 for block in range(r[6], r[7])]
        assert visited == list(range(low, high))
        assert all(r[7] == r[6] + 1 for r in found if r[5] == 0), "an empty split visits one block, of a sequence without keys"


def test_shares_are_about_equal() -> None:
    """One long sequence among short ones is cut, and the short ones are not."""
    records, _ = splits_of([4] * 8, [8192] + [512] * 7, (-1, 0), num_heads=8, resident=64, max_splits=16)
    longest = [r for r in records if r[4] == 0]
    share = -(-(128 + 7 * 8) * 8 // 64)
    assert len(longest) == round(128 / share)
    assert max(r[7] - r[6] for r in records) <= 1.5 * share
    assert len(records) == len(longest) + 7


@pytest.mark.parametrize(
    ("lengths", "expected"), [([4096] * 8, [1] * 8), ([4096] * 6, [3] * 6), ([8192] + [600] * 7, [13] + [1] * 7)]
)
def test_sequences_that_fill_the_multiprocessors_stay_whole(lengths: list[int], expected: list[int]) -> None:
    """Two heads of 8 sequences fill 20 multiprocessors, on each of which 2 thread blocks run; those of 6 sequences do not."""
    records, _ = splits_of([4] * len(lengths), lengths, (-1, 0), num_heads=2, processors=20, resident=40, max_splits=16)
    assert [sum(record[4] == b for record in records) for b in range(len(lengths))] == expected


@pytest.mark.parametrize(
    ("tiles", "heads", "blocks", "expected"),
    [
        (3, 16, 42, 2),  # three splits would be 144 tiles: two waves
        (5, 8, 42, 3),
        (2, 16, 34, 4),
        (19, 8, 42, 3),  # 456 tiles in four waves of 14 blocks, not 152 in two of 42
        (16, 8, 42, 1),
        (4, 32, 68, 1),
        (30, 8, 42, 1),
    ],
)
def test_a_chunk_is_cut_so_that_the_waves_end_soonest(tiles: int, heads: int, blocks: int, expected: int) -> None:
    sizes = {"num_heads": heads, "resident": 132, "max_splits": 16, "min_blocks": 8}
    records, capacity = splits_of([tiles * QUERIES], [blocks * BLOCK_N], (-1, -1), by_waves=True, **sizes)
    assert len(records) == tiles * expected <= capacity
    unequal, _ = splits_of([QUERIES] * 2, [blocks * BLOCK_N, 64], (-1, -1), by_waves=True, **sizes)
    assert unequal == splits_of([QUERIES] * 2, [blocks * BLOCK_N, 64], (-1, -1), **sizes)[0], "unequal tiles have no waves"


def test_sequences_of_another_kernel_have_no_records() -> None:
    records, _ = splits_of([1, 40, 16], [9000, 900, 900], (-1, 0), num_heads=2, resident=24, max_splits=16, skip_q=16)
    assert {r[4] for r in records} == {1}


def test_compiles_without_spills() -> None:
    tiling = (8, 3, (100, 0), QUERIES, BLOCK_N, 0, True, PackedOutput(12, 8, 12, 1024, 128, dim_v=128))
    launch = split_table_launch(*tiling, tile_heads=8, processors=132, resident=264, max_splits=4, min_blocks=8)
    with compiling_for("sm90") as kernels:
        keys = torch.tensor([9, 9, 9], dtype=torch.int32)
        tile_table(launch, 8, cu_seqlens([4, 4, 4]), keys, torch.empty(12, 8, 128, dtype=torch.bfloat16), torch.empty(8, 12))
    assert [(kernel.name, kernel.spill_bytes) for kernel in kernels] == [("_split_table", 0)]
