"""The figures of docs/performance.md and docs/performance-engine.md are those of benchmarks/results."""

from benchmarks import report


def test_the_tables_are_made_of_the_committed_results() -> None:
    """To write them anew: python -m benchmarks.report"""
    pages = "".join(page.read_text() for page in report.PAGES)
    for begin, block in report.blocks().items():
        assert pages.count(begin + block) == 1
