"""Which cases of a test function run: a hook of pytest, which tests/conftest.py takes, `each_nth`, for tables of slow rows,
and `examples`, for properties.

A function with several axes of parameters is a grid: an axis is a decorator `parametrize`, or a fixture with parameters.
A sample of a grid runs, in which each value of each axis occurs, but not each combination. A function with one axis runs
whole, because its cases are rules of which none follows from the others. The marker `every_case` says the same of a grid:
faults that are planted, requests that are refused, attacks. FA_SERVE_CASES=all runs all cases (`make test CASES=all`).

FA_SERVE_SHARE=0/2 runs half of the files (`make check SHARE=0/2`): CI has a time that slow machines keep too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import combinations
from typing import Any, TypeVar
from zlib import crc32

import pytest

Row = TypeVar("Row")
Case = set[tuple[str, Any]]
"""A value for each axis, as (name of the axis, value)."""

ALL = os.environ.get("FA_SERVE_CASES") == "all"
SHARE = os.environ.get("FA_SERVE_SHARE", "")
"""Which of how many shares of the files runs, such as 0/2; all of them if it is empty."""
whole_runs = pytest.mark.skipif(not ALL, reason="FA_SERVE_CASES=all runs it, each night")
"""Marks a test that takes tens of seconds to run a tool from start to end, and nothing of the product alone."""
FEWEST = 2
"""A grid of as many cases runs whole, and of others as many run."""


def each_nth(step: int, rows: Sequence[Row]) -> list[Row]:
    """Each `step`th row, or all rows under FA_SERVE_CASES=all."""
    return list(rows[:: 1 if ALL else step])


def examples(count: int) -> int:
    """How many random examples hypothesis tries: a third of `count`, or all under FA_SERVE_CASES=all."""
    return count if ALL else count // 3


def is_shared(file: str) -> bool:
    """Whether a file, as the id of its tests begins, is in the share that runs."""
    if ALL or not SHARE:
        return True
    number, count = map(int, SHARE.split("/"))
    return crc32(file.encode()) % count == number


def cover(cases: Sequence[Case]) -> list[int]:
    """Positions, in order, of cases that have each value of each axis, and of at least FEWEST.

    Each position is the one that adds the most values, then the most pairs of values, then the farthest from the others.
    """
    pairs = [set(combinations(sorted(case, key=str), 2)) for case in cases]
    values = set[tuple[str, Any]]().union(*cases)
    chosen: list[int] = []
    seen: set[Any] = set()
    while len(chosen) < len(cases) and (len(chosen) < FEWEST or values - seen):
        best = max(
            (position for position in range(len(cases)) if position not in chosen),
            key=lambda position: (
                len(cases[position] - seen),
                len(pairs[position] - seen),
                min((abs(position - other) for other in chosen), default=0),
            ),
        )
        chosen.append(best)
        seen |= cases[best] | pairs[best]
    return sorted(chosen)


def axes(item: pytest.Item) -> Case:
    """The values of a case. Those of one decorator that names several parameters are one axis."""
    axis_of: dict[str, str] = {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        axis_of |= dict.fromkeys(names, ",".join(names))
    found: dict[str, tuple[int, ...]] = {}
    for name, value in item.callspec.params.items():
        axis = axis_of.get(name, name)
        found[axis] = (*found.get(axis, ()), id(value))  # a value need not be hashable, and all cases share its object
    return set(found.items())


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the cases of grids that are not in the sample, and the files of other shares."""
    if ALL:
        return
    functions: dict[str, list[pytest.Item]] = {}
    left_out: list[pytest.Item] = []
    for item in items:
        if is_shared(item.nodeid.partition("::")[0]):
            functions.setdefault(item.nodeid.split("[")[0], []).append(item)
        else:
            left_out.append(item)
    for cases in functions.values():
        if len(cases) > FEWEST and cases[0].get_closest_marker("every_case") is None:
            chosen = set(cover([axes(case) for case in cases]))
            left_out += [case for position, case in enumerate(cases) if position not in chosen]
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]
