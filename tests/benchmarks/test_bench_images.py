"""The benchmark of images runs, and writes its lines in the common form."""

from __future__ import annotations

import json

from benchmarks.engine.bench_images import TINY, measure
from benchmarks.measure import Results


def test_tiny_sizes(tmp_path) -> None:
    results = Results("images", tmp_path)
    measure(TINY, results)
    results.write()
    lines = [json.loads(line) for line in (tmp_path / "images.jsonl").read_text().splitlines()]
    assert [(line["bench"], line["case"]) for line in lines] == [
        ("images", "requests"),
        ("images", "first"),
        ("images", "again"),
        ("images", "text p99"),
    ]
    assert all(line["ours"] > 0 for line in lines)
