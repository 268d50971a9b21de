"""A sample of a grid of cases has each value of each parameter. Tables and marked grids run whole, and all cases on demand."""

from __future__ import annotations

from pathlib import Path

import pytest
import sampled_cases

GRIDS = """
import pytest

@pytest.fixture(params=["left", "right"])
def side(request):
    return request.param

@pytest.mark.parametrize("size", range(10))
@pytest.mark.parametrize(("dim", "dtype"), [(64, "half"), (64, "float"), (128, "half"), (80, "half"), ([], {})])
def test_grid(size, dim, dtype, side): ...

@pytest.mark.every_case
@pytest.mark.parametrize("route", range(10))
@pytest.mark.parametrize("fault", "abcde")
def test_planted_faults(fault, route): ...

@pytest.mark.parametrize("rule", range(30))
def test_table(rule): ...

@pytest.mark.parametrize("a", [False, True])
@pytest.mark.parametrize("b", [False, True])
@pytest.mark.parametrize("c", [False, True])
def test_switches(a, b, c): ...
"""


@pytest.fixture(autouse=True)
def session_of_all_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests collect other files; the share that the running session takes does not count for them."""
    monkeypatch.setattr(sampled_cases, "SHARE", "")


class Selected:
    """Keeps what was collected and what is left of it."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.num_deselected = 0

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.num_deselected += len(items)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = [item.name for item in session.items]

    def of(self, function: str) -> list[list[str]]:
        """The values of the parameters of the cases of a function, as their ids write them."""
        return [name.rstrip("]").split("[")[1].split("-") for name in self.names if name.startswith(function)]


def collect(folder: Path, *arguments: str) -> Selected:
    (folder / "test_grids.py").write_text(GRIDS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = every_case: all cases run")
    selected = Selected()
    flags = ["--collect-only", "-qq", "--import-mode=importlib", "--rootdir", str(folder)]
    flags += ["-p", "no:cacheprovider", "-p", "no:xdist"]
    ended = pytest.main([str(folder), *flags, *arguments], [selected, sampled_cases])
    assert ended in (0, pytest.ExitCode.NO_TESTS_COLLECTED)
    return selected


@pytest.mark.slow
def test_a_grid_is_sampled_and_each_value_of_each_axis_occurs(tmp_path: Path) -> None:
    selected = collect(tmp_path)
    grid = selected.of("test_grid")
    assert len(grid) == 10
    assert selected.num_deselected == 100 - 10 + 8 - sampled_cases.FEWEST
    assert {value for case in grid for value in case} >= {*map(str, range(10)), "left", "right"}
    text = " ".join("-".join(case) for case in grid)
    assert all(row in text for row in ("64-half", "64-float", "128-half", "80-half", "dim4-dtype4"))
    switches = selected.of("test_switches")
    assert len(switches) == sampled_cases.FEWEST
    assert all({case[axis] for case in switches} == {"True", "False"} for axis in range(3))


@pytest.mark.slow
def test_tables_and_marked_grids_run_whole(tmp_path: Path) -> None:
    selected = collect(tmp_path)
    assert len(selected.of("test_planted_faults")) == 50
    assert len(selected.of("test_table")) == 30


@pytest.mark.slow
def test_a_sample_is_taken_of_the_cases_that_are_asked_for(tmp_path: Path) -> None:
    grid = collect(tmp_path, "-k", "test_grid and left").of("test_grid")
    assert len(grid) == 10
    assert all("left" in case for case in grid)


@pytest.mark.slow
def test_everything_runs_on_demand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled_cases, "ALL", True)
    assert len(collect(tmp_path).names) == 100 + 50 + 30 + 8
    assert sampled_cases.each_nth(4, range(9)) == list(range(9))


@pytest.mark.slow
def test_shares_of_files_are_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [str(path) for path in Path(__file__).parent.rglob("test_*.py")]
    shares = []
    for share in ("0/2", "1/2"):
        monkeypatch.setattr(sampled_cases, "SHARE", share)
        shares.append([file for file in files if sampled_cases.is_shared(file)])
    assert sorted(shares[0] + shares[1]) == sorted(files)
    assert min(map(len, shares)) > 0.4 * len(files)
    found = []
    for share in ("0/2", "1/2"):
        monkeypatch.setattr(sampled_cases, "SHARE", share)
        found.append(len(collect(tmp_path).names))
    assert sorted(found) == [0, 10 + 50 + 30 + sampled_cases.FEWEST]


def test_each_nth_row_of_a_slow_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled_cases, "ALL", False)
    assert sampled_cases.each_nth(4, range(9)) == [0, 4, 8]


def test_every_grid_of_the_gpu_suite_runs_whole() -> None:
    """What only a GPU shows is seldom run."""
    assert "pytest.mark.every_case" in (Path(__file__).parent / "gpu/conftest.py").read_text()
