"""The figures of a load: nearest ranks, several processes together, failures left out."""

import io
from itertools import pairwise

from rich.console import Console

from fa_serve.client.bench_report import EIGHTHS, LoadResult, make_report, plot, print_report, quantiles
from fa_serve.client.http_connection import Exchange

SETTINGS = {"model": "m", "requests": 3}


def good(sent: float, *arrivals: float) -> Exchange:
    return Exchange(sent=sent, arrivals=[*arrivals, arrivals[-1], arrivals[-1]], status=200, tokens=len(arrivals))


def test_quantiles_are_those_of_the_nearest_rank():
    found = quantiles([number / 1000 for number in range(1, 101)])
    assert (found["mean"], found["p50"], found["p90"], found["p99"]) == (50.5, 50, 90, 99)
    assert found["p95"] == 95
    assert quantiles([0.002, 0.001])["p50"] == 1
    assert quantiles([]) == {}


def test_processes_are_put_together_and_failures_left_out():
    results = [
        LoadResult([good(0.0, 1.0, 1.5)], begin=0.0, end=2.0, busy=0.25),
        LoadResult([good(1.0, 3.0, 4.0), Exchange(error="lost")], begin=1.0, end=5.0, busy=0.9),
    ]
    report = make_report(SETTINGS, results)
    assert (report["failed"], report["errors"], report["seconds"], report["client_busy"]) == (1, ["lost"], 5.0, 0.9)
    assert (report["output_tokens_per_s"], report["requests_per_s"]) == (4 / 5, 2 / 5)
    assert (report["ttft_ms"]["mean"], report["itl_ms"]["mean"], report["e2e_ms"]["p99"]) == (1500, 750, 3000)
    out = io.StringIO()
    print_report(report, Console(file=out, width=100))
    assert "m: 2 of 3 requests in 5.0 s" in out.getvalue()
    assert "--processes" in out.getvalue(), "the client was busy"


def test_goodput_counts_requests_that_meet_both_goals():
    slow_start = good(0.0, 0.21, 0.22)
    slow_tokens = good(0.0, 0.1, 0.126)
    fast = [good(0.0, 0.2, 0.225), good(0.0, 0.1)]
    report = make_report(SETTINGS, [LoadResult([slow_start, slow_tokens, *fast], begin=0.0, end=2.0, busy=0.5)])
    assert report["goodput_per_s"] == 1.0
    assert (report["tpot_ms"]["p50"], report["tpot_ms"]["p99"]) == (25, 26)


def test_a_report_without_any_answer_can_be_printed():
    out = io.StringIO()
    print_report(make_report(SETTINGS, [LoadResult([Exchange(error="lost")], 0.0, 1.0, 0.0)]), Console(file=out, width=100))
    assert "m: 2 of 3 requests" in out.getvalue()


REPORT = {
    "ttft_ms": {"mean": 99.0, "p50": 10.0, "p90": 20.0, "p99": 40.0},
    "tpot_ms": {},
    "itl_ms": {"mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0},
    "e2e_ms": {"mean": 1.0, "p50": 1.0, "p90": 1.1, "p99": 1.2},
}


def test_quantiles_are_drawn_in_proportion():
    lines = plot(REPORT, 58)
    assert lines[0] == "first token, ms"
    assert lines[1] == f"  p50       10.00 {'█' * 10}"
    assert lines[2] == f"  p90       20.00 {'█' * 20}"
    assert lines[3] == f"  p99       40.00 {'█' * 40}"
    assert lines[4:8] == ["between tokens, ms", "  p50        0.00", "  p90        0.00", "  p99        0.00"]
    assert not [line for line in lines if "per token" in line or "mean" in line]
    assert max(map(len, lines)) == 58
    eighths = [
        8 * line.count("█") + EIGHTHS.index(line[-1]) % 8 if line[-1] in EIGHTHS else 8 * line.count("█") for line in lines
    ]
    assert [later - sooner for sooner, later in pairwise(eighths[-3:])] == [26, 27], "of 320"
    assert max(map(len, plot(REPORT, 500))) == 80
    assert plot(REPORT, 58, blocks=False)[3] == f"  p99       40.00 {'#' * 40}"


def test_the_plot_is_printed_below_the_table():
    out = io.StringIO()
    report = make_report(SETTINGS, [LoadResult([good(0.0, 1.0, 1.5)], begin=0.0, end=2.0, busy=0.25)])
    print_report(report, Console(file=out, width=80))
    assert "first token, ms\n  p50" in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 80
