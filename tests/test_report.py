"""The README's figures are those of benchmarks/results."""

from pathlib import Path

import report


def test_the_tables_are_made_of_the_committed_results() -> None:
    """To write it anew: python benchmarks/report.py"""
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    for begin, block in report.blocks().items():
        assert begin + block in readme
