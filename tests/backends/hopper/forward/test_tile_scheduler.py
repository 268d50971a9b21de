"""`hopper.tile_schedule`: the table of tiles (in the emulator) and the counters of the dynamic schedule."""

from __future__ import annotations

import pytest
import torch
from hopper_cases import CAUSAL, FULL, Case, run_paged, run_with_skipped_sequences
from hopper_emulator import EmulationError, emulated

from fa_serve.backends.hopper.forward import tile_scheduler as tile_schedule
from fa_serve.backends.hopper.forward.tile_scheduler import (
    _COUNTERS,
    _MAX_STREAMS,
    RECORD,
    PackedOutput,
    TileCounters,
    max_tile_count,
    table_launch,
    take_counter,
    tile_table,
)
from fa_serve.testing import cu_seqlens


@pytest.mark.parametrize("window", [FULL, CAUSAL, (-1, 50), (100, 0)], ids=str)
def test_the_table_holds_every_tile_longest_first(window: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    # a program reads the sequences in two parts, of which the second is not full, whatever the size of a part
    monkeypatch.setattr(tile_schedule, "SEQUENCES_AT_A_TIME", 64)
    batch = 73
    lengths_q = torch.randint(0, 300, (batch,), generator=generator).tolist()
    lengths_k = torch.randint(0, 300, (batch,), generator=generator).tolist()
    cu_q = cu_seqlens(lengths_q)
    cu_k = cu_seqlens(lengths_k)
    output = PackedOutput(sum(lengths_q), 2, sum(lengths_q), 16, 8, dim_v=8)
    with emulated(resident_blocks=8):
        max_tiles = max_tile_count(sum(lengths_q), len(lengths_q), max(lengths_q), 128)
        launch = table_launch(max_tiles, len(lengths_q), window, 128, 64, 0, False, output)
        *records, behind = (
            tile_table(launch, max_tiles, cu_q, cu_k, torch.empty(sum(lengths_q), 2, 8), None).view(-1, RECORD).tolist()
        )
    live = [r for r in records if r[0] >= 0]
    assert records[: len(live)] == live
    assert behind[:2] == [0, len(live)]
    assert len(records) == max_tiles
    tiles = {(b, m) for b, n in enumerate(lengths_q) for m in range(0, n, 128)}
    starts = {start: b for b, start in enumerate(cu_q[:-1].tolist()) if lengths_q[b]}
    assert {(starts[r[2]], r[0]) for r in live} == tiles
    assert len(live) == len(tiles)

    def reach(r: list[int]) -> int:
        end = r[5] if window[1] < 0 else min(r[5], r[0] + 128 + r[5] - r[3] + window[1])
        return -(-max(end, 0) // 64)

    assert [reach(r) for r in live] == sorted((reach(r) for r in live), reverse=True)
    for row, _, q0, q_len, k0, kv_len, low, high in live:
        b = starts[q0]
        assert (q_len, k0, kv_len) == (lengths_q[b], cu_k[b], lengths_k[b])
        first = max(row + kv_len - q_len - window[0], 0) // 64 if window[0] >= 0 else 0
        assert high == max(reach([row, 0, q0, q_len, k0, kv_len]), 1)
        assert low == min(first, high - 1)


def test_the_number_of_tiles_is_bounded_by_rows_and_by_sequences() -> None:
    assert max_tile_count(1000, 1, 1000, 128) == 8
    assert max_tile_count(1000, 10, 100, 128) == 10
    assert max_tile_count(1000, 100, 1000, 128) == 107
    assert max_tile_count(1000, 100, 1000, 128, skip_q=99) == 17, "at most 10 sequences have more than 99 queries"


def test_the_emulator_sees_another_sequences_pages() -> None:
    with pytest.raises((EmulationError, AssertionError)):
        run_paged(Case("", window=FULL), faults={"tl.store(record + 4, k_start)": "tl.store(record + 4, k_start * 0)"})


def test_the_emulator_sees_a_sequence_that_should_be_left_out() -> None:
    with pytest.raises((EmulationError, AssertionError)):
        run_with_skipped_sequences(faults={"tl.where(q_len > skip_q, q_len, 0)": "q_len"})


def test_no_stream_shares_a_counter_with_a_graph() -> None:
    counters = TileCounters()
    device = torch.device("cpu")
    eager = counters.take(device, 1, False)
    assert counters.take(device, 1, False) is eager
    captured = {counters.take(device, 1, True).data_ptr() for _ in range(_COUNTERS + 5)}
    assert len(captured) == _COUNTERS
    assert not {eager.data_ptr(), counters.take(device, 2, False).data_ptr()} & captured
    assert all(address % 16 == 0 for address in captured)


def test_the_counters_of_streams_are_bounded() -> None:
    counters = TileCounters()
    for stream in range(2 * _MAX_STREAMS):
        assert counters.take(torch.device("cpu"), stream, False)[0] == 0
    assert len(counters._by_stream) <= _MAX_STREAMS


def test_a_counter_starts_at_zero() -> None:
    assert take_counter(torch.empty(1)).item() == 0
