"""The script that reads hardware counters: units of ncu are converted, and a run that has counted nothing is an error."""

from __future__ import annotations

import pytest

from benchmarks.tuning.profile_cells import COUNTERS, REASONS, STALLS, rows


def table(**values: tuple[str, str]) -> str:
    """What ncu prints for one kernel: the value and the unit of each counter, 0 for the others."""
    heads = ["Kernel Name", *COUNTERS.values(), *map(STALLS.format, REASONS)]
    found = {counter: values.get(name, ("0", "%")) for name, counter in COUNTERS.items()}
    found |= {STALLS.format(reason): values.get(reason, ("0", "")) for reason in REASONS}
    cells = [("forward(float, int)", ""), *(found[head] for head in heads[1:])]
    lines = [heads, [unit for _, unit in cells], [value for value, _ in cells]]
    return "==PROF== Connected\n" + "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines)


def test_counters_have_the_units_of_the_table() -> None:
    [row] = rows(table(us=("1,250,000", "ns"), GHz=("1.7", "Ghz"), MB=("2.5", "Gbyte"), gmma=("3.25", ""), wait=("4", "")))
    assert row["kernel"] == "forward(float, int)"
    assert (row["us"], row["GHz"], row["MB"]) == ("1250", "1.7", "2500")
    assert row["stalls"].startswith("wait 4.0, gmma 3.2, ")


def test_a_unit_that_is_not_known_is_an_error() -> None:
    with pytest.raises(ValueError, match="in fortnight, which is none of second, "):
        rows(table(us=("1", "fortnight")))


def test_a_run_that_has_counted_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="ncu has counted no kernel: ==WARNING== No kernels"):
        rows("==WARNING== No kernels were profiled.")
