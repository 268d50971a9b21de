"""GRPO on the embedded model, with exact rollouts and with an engine in its usual mode: rewards and first ratios by step.

    python -m benchmarks.engine.bench_grpo            # twenty minutes on one core of a CPU; writes docs/images/rewards.svg

Both runs are examples/grpo.py with the same seeds. The first one generates in deterministic mode and trains in
`fa_serve.exact`, so that the ratio of new and old probabilities is exactly 1 before each first update. The second one has the
engine's usual mode and the plain forward, whose numbers differ by roundings. The lines are in results/grpo.jsonl. Left out: any
claim about speed (`bench_rollouts`), and how large a difference harms training, which this model is too small to show.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from benchmarks.measure import Results

ROOT = Path(__file__).parents[2]
FIGURE = ROOT / "docs" / "images" / "rewards.svg"
STEPS = 110
MODES = {"exact": ("fa_serve.exact", "#d1495b", []), "usual": ("usual mode and plain forward", "#003d5b", ["--not-exact"])}
"""By name in the lines: name in the figure, its colour, and the arguments of the example."""
WIDTH = 720
HEIGHT = 322
LEFT = 56
RIGHT = 690
TOP = 40
BOTTOM = 250
WINDOW = 5
"""Steps of the moving average."""


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("grpo", ROOT / "examples" / "grpo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(results: Results, arguments: list[str]) -> None:
    """Run the example in both modes, and add a line for each step, mode and number."""
    example = load_example()
    for mode, (_, _, own) in MODES.items():
        for number, step in enumerate(example.main([*own, *arguments])):
            results.add(f"{mode} step {number:03}", "reward", step.reward, {})
            results.add(f"{mode} ratio {number:03}", "distance of the first ratios from 1", step.first, {})


def series(lines: list[dict[str, Any]], prefix: str) -> list[float]:
    return [line["ours"] for line in sorted(lines, key=lambda line: line["case"]) if line["case"].startswith(prefix)]


def figure(lines: list[dict[str, Any]]) -> str:
    """The curves of rewards as SVG, from the lines of `measure`."""
    curves = {mode: series(lines, f"{mode} step ") for mode in MODES}
    count = max(map(len, curves.values()))
    top = max(0.1, *(max(curve, default=0.0) for curve in curves.values()))

    def text(x: float, y: float, words: str, colour: str = "#222222", anchor: str = "start") -> str:
        return f'<text x="{x:g}" y="{y:g}" font-size="11" fill="{colour}" text-anchor="{anchor}">{escape(words)}</text>'

    def place(step: float, reward: float) -> str:
        x = LEFT + (RIGHT - LEFT) * step / max(count - 1, 1)
        return f"{x:.1f},{BOTTOM - (BOTTOM - TOP) * reward / top:.1f}"

    title = f"Mean reward of GRPO on the embedded model by step; a line is the mean of {WINDOW} steps"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#ffffff"/>',
        f'<path d="M{LEFT},{TOP} V{BOTTOM} H{RIGHT}" stroke="#222222" fill="none"/>',
        text(LEFT, BOTTOM + 18, "step 0"),
        text(RIGHT, BOTTOM + 18, f"step {count - 1}", anchor="end"),
        text(LEFT - 6, TOP + 4, f"{top:.2f}", anchor="end"),
        text(LEFT - 6, BOTTOM, "0", anchor="end"),
        text(LEFT, 24, title),
    ]
    for row, (mode, (label, colour, _)) in enumerate(MODES.items()):
        curve = curves[mode]
        means = [sum(curve[max(0, i - WINDOW + 1) : i + 1]) / min(i + 1, WINDOW) for i in range(len(curve))]
        parts += [
            f'<circle cx="{x}" cy="{y}" r="2.2" fill="{colour}" fill-opacity="0.35"/>'
            for x, y in (place(step, reward).split(",") for step, reward in enumerate(curve))
        ]
        points = " ".join(place(step, mean) for step, mean in enumerate(means))
        dashes = ' stroke-dasharray="6 6"' if row else ""  # the curves may be the same
        parts.append(f'<polyline points="{points}" stroke="{colour}" stroke-width="2.5"{dashes} fill="none"/>')
        first = max(series(lines, f"{mode} ratio "), default=0.0)
        told = "exactly 1 in every step" if first == 0.0 else f"up to {first:.1e} away from 1"
        parts.append(text(LEFT + 10, HEIGHT - 24 + 14 * row, f"{label}: first ratios {told}", colour))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--samples", type=int, default=4, help="answers to each of the example's prompts")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    parser.add_argument("--figure", type=Path, default=FIGURE)
    options = parser.parse_args()
    results = Results("grpo", options.out)
    measure(results, ["--steps", str(options.steps), "--samples", str(options.samples)])
    options.figure.write_text(figure(results.lines))


if __name__ == "__main__":
    main()
