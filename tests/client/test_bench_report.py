"""The figures of a load: nearest ranks, several processes together, failures left out."""

import io

from rich.console import Console

from fa_serve.client.bench_report import LoadResult, make_report, print_report, quantiles
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
