"""The figures of docs/performance.md are those of benchmarks/results."""

from benchmarks import report


def test_the_tables_are_made_of_the_committed_results() -> None:
    """To write them anew: python -m benchmarks.report"""
    page = report.PAGE.read_text()
    for begin, block in report.blocks().items():
        assert begin + block in page
