"""The limits of the table are those that the committed lines of benchmarks show."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from product_cases import of_case

from fa_serve.ops.products.crossovers import CROSSOVERS, EXPERT_WGMMA_PAIRS, GROUPED_PAIRS, Crossover
from fa_serve.ops.products.table import kernel_named, select_kernel

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


@cache
def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


def row_of(line: str) -> dict[str, Any]:
    """The one row with this case on Hopper."""
    name, _, case = line.partition(": ")
    found = [row for row in rows(name) if row["case"] == case]
    assert len(found) == 1, f"{line} must be one line, found {len(found)}"
    assert found[0]["gpu"] in ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
    return found[0]


@pytest.mark.parametrize("name", CROSSOVERS)
def test_lines_exist_and_name_the_kernel_that_is_chosen(name: str) -> None:
    crossover = CROSSOVERS[name]
    assert crossover.lines or crossover.faster
    for line, kernel in crossover.lines.items():
        assert row_of(line)["unit"] == "us"
        assert select_kernel(of_case(line.partition(": ")[2])).kernel is kernel_named(kernel), line


@pytest.mark.parametrize("name", CROSSOVERS)
def test_the_named_kernels_are_on_their_side_of_the_limit(name: str) -> None:
    """A case ends with its tokens; where the limit is one of tokens, its kernels have the lines up to it and no others."""
    crossover = CROSSOVERS[name]
    assert all(kernel_named(kernel) for kernel in crossover.kernels)
    for line, kernel in crossover.lines.items():
        if crossover.unit == "tokens":
            is_within = int(line.split()[-1]) <= crossover.limit
            assert is_within == (kernel in crossover.kernels), line
    assert not crossover.lines or set(crossover.kernels) <= set(crossover.lines.values())


@pytest.mark.parametrize("name", CROSSOVERS)
def test_the_faster_kernel_was_timed_faster_in_the_same_run(name: str) -> None:
    for faster, slower in CROSSOVERS[name].faster:
        rows_of_both = [row_of(faster), row_of(slower)]
        assert rows_of_both[0]["ours"] < rows_of_both[1]["ours"], f"{faster} is slower than {slower}"
        assert len({(row["commit"], row["gpu"], row["triton"]) for row in rows_of_both}) == 1


@pytest.mark.parametrize(("crossover", "crossing"), [(EXPERT_WGMMA_PAIRS, 517), (GROUPED_PAIRS, 171)], ids=["wgmma", "grouped"])
def test_straight_lines_cross_near_the_limit(crossover: Crossover, crossing: int) -> None:
    """Between 128 and 1,024 pairs for each expert, the sizes that were timed."""
    (kernel_below, matrices_below), (matrices_above, kernel_above) = crossover.faster
    pairs = [int(line.split()[3]) * 4 / 32 for line in (kernel_below, kernel_above)]
    kernel = [row_of(line)["ours"] for line in (kernel_below, kernel_above)]
    matrices = [row_of(line)["ours"] for line in (matrices_below, matrices_above)]
    share = (matrices[0] - kernel[0]) / (kernel[1] - kernel[0] - matrices[1] + matrices[0])
    assert round(pairs[0] + share * (pairs[1] - pairs[0])) == crossing
    assert abs(crossover.limit - crossing) <= 0.13 * crossing
