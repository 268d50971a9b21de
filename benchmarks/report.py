"""Tables and charts from the committed results: what the README and docs/kernels.md show.

    python benchmarks/report.py            # writes docs/images/*.svg, prints the tables in Markdown

It measures nothing: it reads benchmarks/results/*.jsonl, the last run of each bench.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

ROOT = Path(__file__).parent.parent
COLOURS = {"ours": "#d1495b", "cudnn": "#30638e", "fa3": "#003d5b", "flash": "#8d99ae"}
LABELS = {"ours": "fa_serve", "cudnn": "cuDNN", "fa3": "FlashAttention-3", "flash": "FlashAttention-2 (SDPA)"}
Line = dict[str, Any]


def read(bench: str) -> list[Line]:
    path = ROOT / "benchmarks" / "results" / f"{bench}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def prefill_chart(lines: list[Line], name: str) -> None:
    groups: dict[str, list[Line]] = {}
    for line in lines:
        groups.setdefault(line["case"].rsplit("_", 1)[0], []).append(line)
    figure, axes = plt.subplots(2, 3, figsize=(11, 5.2), sharex=True)
    for index, (group, cells) in enumerate(
        sorted(groups.items(), key=lambda g: (g[0].endswith("causal"), int(g[0][1:].split("_")[0])))
    ):
        axis = axes[index // 3][index % 3]
        lengths = [cell["case"].rsplit("_", 1)[1] for cell in cells]
        for kind in ("flash", "fa3", "cudnn", "ours"):
            rates = [cell["ours"] if kind == "ours" else cell["peers"].get(kind) for cell in cells]
            if all(rate is not None for rate in rates):
                axis.plot(
                    lengths, rates, marker="o", ms=4, lw=2.2 if kind == "ours" else 1.4, color=COLOURS[kind], label=LABELS[kind]
                )
        head_dim, mode = group.split("_")
        axis.set_title(f"head_dim {head_dim[1:]}, {mode}", fontsize=9)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=7)
    axes[0][0].legend(fontsize=7, loc="lower right")
    figure.supylabel("TFLOPS", fontsize=9)
    figure.supxlabel(f"sequence length; 16k tokens in all, bfloat16, {lines[0]['gpu']}", fontsize=9)
    _save(figure, name)


def decode_chart(lines: list[Line], name: str) -> None:
    lines = [line for line in lines if "fa3" in line["peers"]]
    figure, axis = plt.subplots(figsize=(11, 3.6))
    ratios = [line["ratio"] for line in lines]
    axis.bar(range(len(lines)), ratios, color=[COLOURS["ours"] if ratio >= 1 else COLOURS["flash"] for ratio in ratios])
    axis.axhline(1.0, color="black", lw=0.8)
    axis.set_xticks(range(len(lines)), [line["case"] for line in lines], rotation=90, fontsize=6)
    axis.set_ylabel("speed, FlashAttention-3 = 1", fontsize=9)
    axis.grid(axis="y", alpha=0.3)
    _save(figure, name)


def _save(figure: Any, name: str) -> None:
    path = ROOT / "docs" / "images" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def summary(bench: str) -> None:
    """One row per peer: the geometric mean and the least ratio over the cells of this bench."""
    lines = read(bench)
    if not lines:
        return
    print(f"\n### {bench}: {len(lines)} cells, {lines[0]['gpu']}, torch {lines[0]['torch']}, commit {lines[0]['commit']}\n")
    print("| against | geometric mean | least | at |\n|---|---|---|---|")
    for peer in sorted({name for line in lines for name in line["peers"]}):
        ratios = {}
        for line in lines:
            if peer in line["peers"]:
                ours, theirs = line["ours"], line["peers"][peer]
                ratios[line["case"]] = theirs / ours if line["unit"] == "us" else ours / theirs
        worst = min(ratios, key=ratios.__getitem__)
        print(
            f"| {LABELS.get(peer, peer)} | {statistics.geometric_mean(ratios.values()):.2f} | {ratios[worst]:.2f} | {worst} |"
        )


def main() -> None:
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "fa_serve"  # the same results give the same file
    for bench in ("prefill", "prefill_triton"):
        if lines := read(bench):
            prefill_chart(lines, f"{bench}.svg")
    if lines := read("decode"):
        decode_chart(lines, "decode.svg")
    for bench in ("prefill", "prefill_triton", "varlen", "decode", "mixed"):
        summary(bench)


if __name__ == "__main__":
    main()
