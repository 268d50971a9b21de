"""The report of `fa-serve bench`: latencies, throughput and errors, as a dictionary for JSON, a table and a plot.

Times are in milliseconds: `ttft_ms` until the first token, `tpot_ms` per later token as the mean of a request, `itl_ms` between
two tokens, `e2e_ms` for the whole request. `goodput_per_s` is the rate of requests whose first token arrived within 200 ms and
whose time per token was within 25 ms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.table import Table

from .http_connection import Exchange

QUANTILES = (0.5, 0.9, 0.95, 0.99)
ROWS = {"first token": "ttft_ms", "per token": "tpot_ms", "between tokens": "itl_ms", "whole request": "e2e_ms"}
FIRST_TOKEN_GOAL = 0.2  # seconds; a request that meets both goals counts as goodput
PER_TOKEN_GOAL = 0.025
BUSY = 0.8  # above this fraction the client may be slower than the server
MAX_ERRORS = 5  # different errors in a report
EIGHTHS = " ▏▎▍▌▋▊▉"
"""The end of a bar, by the eighths of a column that it fills."""
LABEL_COLUMNS = 18
MAX_PLOT_COLUMNS = 80


@dataclass
class LoadResult:
    """What one process of the client has measured.

    begin, end: on the machine's monotonic clock, which all processes share
    busy:       fraction of the time in which the process was busy
    """

    exchanges: list[Exchange]
    begin: float
    end: float
    busy: float


def make_report(settings: Mapping[str, Any], results: Sequence[LoadResult]) -> dict[str, Any]:
    """The settings of the load, and what all processes have measured together."""
    exchanges = [exchange for result in results for exchange in result.exchanges]
    good = [exchange for exchange in exchanges if exchange.error is None]
    seconds = max(result.end for result in results) - min(result.begin for result in results)
    tokens = sum(exchange.tokens for exchange in good)
    return {
        **settings,
        "failed": len(exchanges) - len(good),
        "errors": sorted({exchange.error for exchange in exchanges if exchange.error})[:MAX_ERRORS],
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(good) / seconds, 3),
        "output_tokens_per_s": round(tokens / seconds, 1),
        "goodput_per_s": round(sum(map(_meets_goals, good)) / seconds, 3),
        "client_busy": round(max(result.busy for result in results), 2),
        "ttft_ms": quantiles([exchange.arrivals[0] - exchange.sent for exchange in good]),
        "tpot_ms": quantiles([each for each in map(_per_token, good) if each is not None]),
        "itl_ms": quantiles([gap for exchange in good for gap in _gaps(exchange.token_arrivals)]),
        "e2e_ms": quantiles([exchange.arrivals[-1] - exchange.sent for exchange in good]),
    }


def _per_token(exchange: Exchange) -> float | None:
    """Seconds per token after the first one; None for an answer of one token."""
    times = exchange.token_arrivals
    return (times[-1] - times[0]) / (exchange.tokens - 1) if exchange.tokens > 1 and times else None


def _meets_goals(exchange: Exchange) -> bool:
    first = exchange.arrivals[0] - exchange.sent
    return first <= FIRST_TOKEN_GOAL and (_per_token(exchange) or 0.0) <= PER_TOKEN_GOAL


def _gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """The mean and the quantiles by nearest rank, in milliseconds. Empty if there are no values."""
    if not seconds:
        return {}
    ranked = sorted(seconds)
    found = {"mean": sum(ranked) / len(ranked)}
    for quantile in QUANTILES:
        rank = math.ceil(round(quantile * len(ranked), 6))
        found[f"p{quantile * 100:g}"] = ranked[rank - 1]
    return {name: round(value * 1e3, 3) for name, value in found.items()}


def print_report(report: Mapping[str, Any], console: Console) -> None:
    answered = report["requests"] - report["failed"]
    title = f"{report['model']}: {answered} of {report['requests']} requests in {report['seconds']} s"
    table = Table("milliseconds", *report["e2e_ms"], title=title)
    for name, key in ROWS.items():
        table.add_row(name, *(f"{value:.2f}" for value in report[key].values()))
    console.print(table)
    for line in plot(report, console.width, blocks=console.encoding.startswith("utf")):
        console.print(line, highlight=False)
    rates = f"{report['output_tokens_per_s']:.0f} tokens/s, {report['requests_per_s']:.2f} requests/s"
    console.print(rates, highlight=False)
    if report["client_busy"] > BUSY:
        advice = "This client was busy almost all the time, so the server may be faster than measured. Try more --processes."
        console.print(advice, highlight=False)


def plot(report: Mapping[str, Any], width: int, *, blocks: bool = True) -> list[str]:
    """The quantiles as bars, one in each line of at most `width` columns. The longest bar of a latency is its last quantile.

    blocks: draw with eighths of a column, which need Unicode; without, with whole columns of #
    """
    lines = []
    for title, key in ROWS.items():
        found = {name: value for name, value in report[key].items() if name.startswith("p")}
        if not found:
            continue
        longest = max(found.values())
        room = max(min(width, MAX_PLOT_COLUMNS) - LABEL_COLUMNS, 1)
        lines.append(f"{title}, ms")
        for name, value in found.items():
            eighths = round(8 * room * value / longest) if longest else 0
            bar = "█" * (eighths // 8) + EIGHTHS[eighths % 8] if blocks else "#" * (eighths // 8)
            lines.append(f"  {name:<4}{value:>11.2f} {bar}".rstrip())
    return lines
