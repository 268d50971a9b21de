"""The figure of the README and of the first page of the site: fa_serve beside what people would use instead.

    python -m benchmarks.report            # writes docs/images/overview.svg with the other charts

Each row has a dot for each measured cell and a line at the geometric mean, on a logarithmic axis. Cells in which the peer is
faster are left of the line at 1. The figure is written as text, so that a test compares it with benchmarks/results/*.jsonl
without matplotlib. Left out: benchmarks that compare fa_serve with itself.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.line_tables import TIMES

ROOT = Path(__file__).parent.parent
FIGURE = ROOT / "docs" / "images" / "overview.svg"
SMALLEST = 0.5
LARGEST = 4.0
WIDTH = 840
LEFT = 330
RIGHT = 566
ROW = 24
TOP = 58
INK = "#1d2a35"
GREY = "#5c6b7a"
RED = "#b3364a"
BLUE = "#30638e"
MODELS = ("llama-3.1-8b", "qwen3-0.6b", "gemma-3-4b")
DENSE = ("A", "B", "C", "D", "shared")
OTHERS = ("llama8b-w4", "llama8b-fp8", "qwen30a3b", "gptoss20b", "deepseek-lite")
Line = dict[str, Any]


class Row(NamedTuple):
    """What is compared with whom: the lines of `bench` with this peer that `takes` accepts."""

    what: str
    bench: str
    peer: str
    peer_name: str
    takes: Callable[[str], bool] = lambda case: True

    def lines(self) -> list[Line]:
        path = ROOT / "benchmarks" / "results" / f"{self.bench}.jsonl"
        found = [json.loads(line) for line in path.read_text().splitlines()]
        return [line for line in found if self.peer in line["peers"] and self.takes(line["case"])]

    def ratios(self) -> list[float]:
        """Our speed over the peer's, of each cell."""
        pairs = [(line["ours"], line["peers"][self.peer], line["unit"] in TIMES) for line in self.lines()]
        return [peer / ours if is_time else ours / peer for ours, peer, is_time in pairs]


def _of_dense(case: str) -> bool:
    return case in {f"{shape} {load}" for shape in ("llama8b", "qwen06") for load in DENSE}


def _of_other_weights(case: str) -> bool:
    return case.split()[0] in OTHERS and "startup" not in case


def _of_two_gpus(case: str) -> bool:
    return "on 2 GPUs" in case and "startup" not in case


GROUPS: dict[str, tuple[Row, ...]] = {
    "Attention kernels": (
        Row("prompts", "prefill", "flash", "PyTorch's sdpa, FlashAttention-2"),
        Row("prompts", "prefill", "cudnn", "PyTorch's sdpa, cuDNN"),
        Row("prompts", "prefill", "fa3", "FlashAttention-3"),
        Row("prompts", "prefill", "fa4", "FlashAttention-4"),
        Row("decoding, paged cache", "decode", "fa3", "FlashAttention-3"),
        Row("encoders", "encoder", "cudnn", "cuDNN"),
        Row("diffusion", "diffusion", "fa3", "FlashAttention-3"),
        Row("gradients", "backward", "cudnn", "cuDNN"),
        Row("training", "train", "cudnn", "cuDNN"),
        Row("linear attention, prompts", "linear", "fla", "flash-linear-attention", lambda case: case.startswith("prefill")),
        Row("linear attention, decoding", "linear", "fla", "flash-linear-attention", lambda case: case.startswith("decode")),
    ),
    "transformers": (Row("generate, three models", "generate", "sdpa", "sdpa", lambda case: "batch" not in case),),
    "Engine, tokens per second": (
        Row("dense models, bfloat16", "engine", "vllm", "vLLM 0.26", _of_dense),
        Row("mixtures, 4 and 8 bits", "engine", "vllm", "vLLM 0.26", _of_other_weights),
        Row("a dense model on two GPUs", "engine", "vllm", "vLLM 0.26", _of_two_gpus),
    ),
}


def _x(ratio: float) -> float:
    """Where a ratio is; what is beyond the axis is at its end."""
    share = math.log(min(max(ratio, SMALLEST), LARGEST) / SMALLEST) / math.log(LARGEST / SMALLEST)
    return LEFT + share * (RIGHT - LEFT)


def _text(x: float, y: float, text: str, size: int = 12, colour: str = INK, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'


def _row(row: Row, y: float) -> list[str]:
    ratios = row.ratios()
    mean = statistics.geometric_mean(ratios)
    centre = y - 4
    parts = [_text(20, y, row.what), _text(LEFT - 16, y, row.peer_name, colour=GREY, anchor="end", size=11)]
    for ratio in ratios:
        colour = RED if ratio >= 1 else BLUE
        parts.append(f'<circle cx="{_x(ratio):.1f}" cy="{centre:g}" r="3.2" fill="{colour}" fill-opacity="0.35"/>')
    parts.append(f'<rect x="{_x(mean) - 1.5:.1f}" y="{centre - 8:g}" width="3" height="16" fill="{INK}"/>')
    parts.append(_text(RIGHT + 52, y, f"{mean:.2f}", bold=True, anchor="end"))
    commits = ", ".join(dict.fromkeys(line["commit"] for line in row.lines()))
    cells = f"{min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} cells, {commits}"
    parts.append(_text(RIGHT + 60, y, cells, size=9, colour=GREY))
    return parts


def figure() -> str:
    """The figure as SVG."""
    parts: list[str] = []
    y = TOP
    for name, rows in GROUPS.items():
        parts.append(_text(20, y, name, bold=True))
        for row in rows:
            y += ROW
            parts += _row(row, y)
        y += ROW + 8
    height = y
    axis: list[str] = []
    for ratio in (0.5, 1.0, 2.0, 4.0):
        x = _x(ratio)
        colour, width = (INK, 1.2) if ratio == 1 else (GREY, 0.5)
        axis.append(f'<path d="M{x:.1f},38 V{height - 26:g}" stroke="{colour}" stroke-width="{width}" fill="none"/>')
        label = {0.5: "half as fast", 1.0: "equal", 2.0: "twice", 4.0: "4 times"}[ratio]
        axis.append(_text(x, 30, label, size=11, anchor="middle"))
    title = "Speed of fa_serve over that of others on H200 GPUs: a dot for each measured cell, a bar at the geometric mean"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" viewBox="0 0 {WIDTH} {height:g}" '
            'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" role="img">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{WIDTH}" height="{height:g}" rx="6" fill="#ffffff"/>',
            *axis,
            *parts,
            _text(20, 30, "speed of fa_serve over that of ...", colour=GREY, size=11),
            "</svg>",
            "",
        ]
    )


def summary() -> dict[str, tuple[float, float, float]]:
    """For each row, geometric mean, least and largest ratio, by "what, peer": what README.md and docs/index.md quote."""
    rows = [row for group in GROUPS.values() for row in group]
    return {
        f"{row.what}, {row.peer_name}": (statistics.geometric_mean(found), min(found), max(found))
        for row in rows
        for found in [row.ratios()]
    }


def write() -> None:
    FIGURE.write_text(figure(), encoding="utf-8")


if __name__ == "__main__":
    write()
    for name, numbers in summary().items():
        print(name, *(f"{number:.2f}" for number in numbers))
