"""The figures of docs/performance.md are those of benchmarks/results."""

import report


def test_the_tables_are_made_of_the_committed_results() -> None:
    """To write them anew: python benchmarks/report.py"""
    page = report.PAGE.read_text()
    for begin, block in report.blocks().items():
        assert begin + block in page
