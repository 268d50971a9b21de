"""The README's figures are those of benchmarks/results."""

from pathlib import Path

import report


def test_the_table_is_made_of_the_committed_results() -> None:
    """To write it anew: python benchmarks/report.py"""
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    assert report.BEGIN + report.table() + report.END in readme
