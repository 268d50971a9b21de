"""A short form of benchmarks/soak/long_run.py, with the host one step ahead and without."""

from __future__ import annotations

import pytest

from benchmarks.soak.long_run import long_run


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1])
def test_nothing_is_lost_in_random_traffic(make_engine, depth) -> None:
    engine = make_engine(num_pages=48, max_model_len=128, max_num_batched_tokens=48, max_num_seqs=12)
    engine._steps.depth = depth
    report = long_run(engine, 50, alive=16, longest=60)
    assert set(report["answers"]) >= {"length", "abort"}
    assert report["preemptions"] > 0
    assert report["cached_tokens"] > 0
