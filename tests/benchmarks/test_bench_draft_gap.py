"""The measurement of the host between two steps runs on a CPU, and each of its steps verifies drafts."""

from __future__ import annotations

import pytest

from benchmarks.engine import bench_draft_gap
from benchmarks.engine.bench_draft_gap import Gap, make_engine, measure
from fa_serve.engine import SamplingParams


def test_gaps_are_measured_while_all_sequences_verify_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_draft_gap, "WARM_UP", 2)
    engine = make_engine(num_pages=128, max_model_len=1024, max_num_seqs=2)
    gap = Gap(seconds=0.0)
    measure(engine, 2, 10, SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True), gap)
    assert len(gap.gaps) == 10
    assert min(gap.gaps) > 0
    speculation = engine.stats().speculation
    assert speculation.num_drafts >= 20
    assert speculation.accepted_at[: bench_draft_gap.ACCEPTED] == (speculation.num_drafts,) * bench_draft_gap.ACCEPTED
    assert not engine.has_unfinished()
