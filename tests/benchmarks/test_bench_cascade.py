"""The benchmark of cascade attention runs from start to end on a CPU, and compares values before it times."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.engine import bench_cascade
from benchmarks.engine.engine_workloads import make_model
from benchmarks.measure import Results


@pytest.mark.slow
def test_each_part_has_a_line(tmp_path: Path) -> None:
    results = Results("cascade", tmp_path)
    bench_cascade.measure_layer(results, bench_cascade.TINY, "cpu")
    model = make_model("tiny", "cpu", dtype="float32")
    bench_cascade.measure_engine(results, "tiny", model, "cpu", bench_cascade.Sizes(tiny=True))
    assert [line["case"] for line in results.lines] == [
        "layer 4_2_d16 2x3x64+20 members 2",
        "tiny 4 over 64",
        "tiny 2 of 48, n = 4",
    ]
    assert all(line["ours"] > 0 and line["peers"]["each"] > 0 for line in results.lines)


def test_wrong_values_are_not_timed() -> None:
    case = bench_cascade.TINY[0]
    step, q = bench_cascade.make_step(case, "cpu", torch.float32)
    step.common.own_seqused_k.add_(1)  # a key that is not the sequence's
    with pytest.raises(AssertionError):
        bench_cascade.check_step(case, step, q)
