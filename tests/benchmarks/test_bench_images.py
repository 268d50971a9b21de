"""The benchmark of images runs, and writes its lines in the common form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.engine.bench_images import SETTINGS, SHAPES, TINY, Sizes, measure
from benchmarks.measure import Cells, Results


def run(folder: Path, cells: Cells) -> list[str]:
    results = Results("images", folder)
    measure(TINY, results, cells)
    lines = [json.loads(line) for line in (folder / "images.jsonl").read_text().splitlines()]
    assert all(line["ours"] > 0 for line in lines)
    return [line["case"].removeprefix("tiny ") for line in lines]


@pytest.mark.slow
def test_tiny_sizes(tmp_path: Path) -> None:
    assert run(tmp_path, Cells("requests,first,again,text", 600)) == [
        "requests",
        "first of 32",
        "first",
        "again",
        "text",
        *(f"{case} {name}".strip() for name in SETTINGS for case in ("text p99", "beside text")),
    ]


def test_cells_are_selected_and_end_with_the_budget(tmp_path: Path) -> None:
    assert run(tmp_path, Cells("encode", 600)) == ["encode"]
    late = Cells("first", -1.0)
    assert run(tmp_path, late) == ["encode"], "lines of an earlier run stay"
    assert late.left_out == ["first of 32", "first"]


def test_shapes_have_the_patches_of_their_towers() -> None:
    for name, config in ((name, SHAPES[name]()) for name in ("qwen25vl-7b", "qwen3vl-8b")):
        vision = config.vision_config
        size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        assert Sizes(name).patch == size, name
        assert vision.out_hidden_size == config.text_config.hidden_size, name
