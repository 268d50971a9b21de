"""Tables and charts from the committed results, as docs/performance.md and docs/performance-engine.md show them.

    python -m benchmarks.report            # writes the tables of both pages and of docs/kernels/, and docs/images/*.svg

This module measures nothing: it reads benchmarks/results/*.jsonl, which hold the last run of each benchmark.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks import line_tables, overview

ROOT = Path(__file__).parent.parent
PAGES = tuple(ROOT / "docs" / f"{name}.md" for name in ("performance", "performance-engine", "engine/scheduling"))
COLOURS = {"ours": "#d1495b", "cudnn": "#30638e", "fa3": "#003d5b", "fa4": "#edae49", "flash": "#8d99ae"}
LABELS = {
    "ours": "fa_serve",
    "cudnn": "cuDNN",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
    "flash": "FlashAttention-2 (SDPA)",
    "flex": "FlexAttention",
}
# precision or peer, its name in a chart, its colour
FLOAT8 = {
    "fp8": ('fa_serve, "fp8"', "#d1495b"),
    "qk8": ('fa_serve, "qk8"', "#e8909a"),
    "bf16": ("fa_serve, bfloat16", "#f3c9cd"),
    "fa3 float8": ("FlashAttention-3, float8", "#003d5b"),
    "cudnn": ("cuDNN, bfloat16", "#30638e"),
}
# policy of the simulated scheduler, its name in the chart, its colour
POLICIES = {
    "fa_serve": ("fa_serve, target_ttft", "#d1495b"),
    "guard": ("the guard as it was, target_itl", "#e8909a"),
    "vllm": ("vLLM's policy, tokens of a step", "#003d5b"),
}
# benchmark and the peer that is 1 in its chart
RATIO_CHARTS = (
    ("decode", "fa3"),
    ("sparse", "flex"),
    ("chunk", "fa3"),
    ("verify", "fa3"),
    ("mixed", "fa3"),
    ("models", "fa3"),
)
# benchmark, description, whether to take only the cells with unequal lengths in a batch, peers, command
TABLE = [
    (
        "prefill",
        "prefill, the backend that `auto` selects",
        False,
        ("cudnn", "fa3", "fa4", "flash"),
        "`python -m benchmarks.attention.bench_attention prefill`",
    ),
    (
        "prefill_triton",
        "prefill, the portable Triton kernel",
        False,
        ("flash",),
        "`... prefill --backend triton --peers flash,cudnn`",
    ),
    ("varlen", "packed batches of unequal and of short sequences (`attention_varlen`)", False, ("fa3", "fa4"), "`... varlen`"),
    ("decode", "paged decoding, equal lengths", False, ("fa3",), "`... decode`"),
    ("decode", "paged decoding, unequal lengths", True, ("fa3",), ""),
    ("mixed", "decoding in one batch with chunks of prompts", False, ("fa3",), "`... mixed`"),
    ("models", "packed prompts with the heads and options of real models", False, ("fa3", "fa4"), "`... models`"),
    ("chunk", "chunks of 64 to 2048 tokens behind cached keys", False, ("fa3",), "`... chunk`"),
    ("verify", "2 to 16 queries per sequence over a paged cache", False, ("fa3",), "`... verify`"),
    ("window", "sliding windows of 128 to 4096 keys, sequences of 16k", False, ("fa3",), "`... window`"),
    ("sparse", "block lists with 10 and 25% of the blocks, 16k and 64k tokens", False, ("flex",), "`... sparse`"),
    ("backward", "gradients, head_dim 64 and 128", False, ("cudnn", "flash"), "`... backward`"),
    ("train", "forward and backward of layers of real models", False, ("cudnn", "flash"), "`... train`"),
    ("encoder", "encoders of text and images", False, ("cudnn", "fa3"), "`... encoder`"),
    ("cross", "queries of a decoder or a picture over the keys of an encoder", False, ("cudnn", "flash"), "`... cross`"),
    ("diffusion", "diffusion transformers and U-Nets", False, ("cudnn", "fa3"), "`... diffusion`"),
]
# benchmark, case without its shape, description
ENGINE = [
    ("engine", "A", "256 requests, 512 prompt tokens and 256 output tokens each, tokens/s"),
    ("engine", "B", "256 requests, 100 to 1024 prompt and output tokens each, tokens/s"),
    ("engine", "C", "1 request, 128 prompt tokens and 256 output tokens, tokens/s"),
    ("engine", "D", "64 prompts of 3072 tokens, 1 output token each, tokens/s"),
    ("engine", "shared", "128 requests with a common prefix of 2048 tokens, 64 output tokens each, tokens/s"),
    ("engine", "startup", "from the start of the process to the first token, s"),
    ("serving", "throughput, 256 at once", "over HTTP, 256 concurrent requests, tokens/s"),
    ("serving", "first token, 32 at once", "over HTTP, 32 concurrent requests, time to the first token, ms"),
    ("serving", "between tokens, 32 at once", "over HTTP, 32 concurrent requests, time between tokens, ms"),
]
# ratios between two measurements of fa_serve
OWN = {
    "Rate with temperature 0.7 and top_p 0.9 over the greedy rate:": ("engine", "sampled"),
    "Rate over HTTP over the rate of the offline engine:": ("serving", "throughput, 256 at once, against the engine offline"),
}
OPEN_LOADS = ("cold, 12/s", "warm, 6/s", "warm, 12/s", "warm, 24/s", "warm, 36/s")
OPEN_TIMES = ("first token", "per token", "between tokens")
# load of bench_loads.py, description
LOADS = {
    "long": "60 prompts of 750 to 29,000 tokens at 1.5/s, answers of 256",
    "mixed-80": "150 prompts of 100 to 30,000 tokens at 2.9/s, answers of 64 to 512",
    "mixed-100": "150 others at 3.8/s",
    "prefixes": "512 requests at 40/s over 16 prefixes of 3,000 tokens",
    "answers": "n = 4, prompts of 1,024, answers of 128, 32 requests at once",
    "sampled": "penalties, 128 at once, prompts and answers of 256, the first time",
    "sampled again": "the same again",
    "logprobs": "five log-probabilities, 64 at once",
}
LOAD_TIMES = ("first token", "between tokens")
SHAPES = {"llama8b": "Llama-3.1-8B", "qwen06": "Qwen3-0.6B"}
# case of a model in generate.jsonl, description
GENERATE = {
    "ttft_{}_1024": "first token, prompt of 1k tokens, ms",
    "ttft_{}_8192": "first token, prompt of 8k, ms",
    "ttft_{}_32768": "first token, prompt of 32k, ms",
    "ttft_{}_131072": "first token, prompt of 128k, ms",
    "padded_{}_16x2048_first": "first token, 16 padded prompts of up to 2k, ms",
    "padded_{}_16x2048_token": "each later token of these 16, ms",
    "decode_{}_32768_growing": "a token after 32k, growing cache, ms",
    "decode_{}_32768_static": "a token after 32k, static cache, compiled, ms",
    "generate_{}_32768_128_static": "32k prompt and 128 output tokens, static cache, end to end, ms",
    "batch_{}_256x512+256": "`generate_batch`, 256 requests, tokens/s",
}
GENERATE_MODELS = {"llama-3.1-8b": "sdpa", "qwen3-0.6b": "sdpa", "gemma-3-4b": "sdpa", "gpt-oss-20b": "eager"}
Line = dict[str, Any]


def read(bench: str) -> list[Line]:
    path = ROOT / "benchmarks" / "results" / f"{bench}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _gpu(line: Line) -> str:
    """The model of the GPU: H100 of "NVIDIA H100 80GB HBM3"."""
    words = line["gpu"].removeprefix("NVIDIA ").split()
    return str(words[0])


def prefill_chart(lines: list[Line], name: str) -> None:
    groups: dict[str, list[Line]] = {}
    for line in lines:
        groups.setdefault(line["case"].rsplit("_", 1)[0], []).append(line)
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(11, 5.2), sharex=True)
    for index, (group, cells) in enumerate(
        sorted(groups.items(), key=lambda g: (g[0].endswith("causal"), int(g[0][1:].split("_")[0])))
    ):
        axis = axes[index // 3][index % 3]
        cells.sort(key=lambda line: int(line["case"].rsplit("_", 1)[1]))
        lengths = [cell["case"].rsplit("_", 1)[1] for cell in cells]
        for kind in ("flash", "fa3", "fa4", "cudnn", "ours"):
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


def float8_chart(lines: list[Line], name: str) -> None:
    """A group of bars for each head_dim, full and causal: the rates of our three precisions and of the peers."""
    import matplotlib.pyplot as plt

    groups: dict[str, dict[str, float]] = {}
    for line in lines:
        cell, precision = line["case"].rsplit("_", 1)
        if line["unit"] == "TFLOPS":
            groups.setdefault(cell, dict(line["peers"]))[precision] = line["ours"]
    figure, axis = plt.subplots(figsize=(11, 3.6))
    for index, (kind, (label, colour)) in enumerate(FLOAT8.items()):
        found = [(at, rates[kind]) for at, rates in enumerate(groups.values()) if kind in rates]
        axis.bar([at + 0.16 * (index - 2) for at, _ in found], [rate for _, rate in found], 0.15, color=colour, label=label)
    axis.set_xticks(range(len(groups)), [cell.replace("_", ", ") for cell in groups], fontsize=8)
    axis.set_ylabel("TFLOPS, quantisation included in ours", fontsize=9)
    axis.legend(fontsize=7, ncols=len(FLOAT8), loc="upper left")
    axis.set_ylim(top=1.15 * max(max(rates.values()) for rates in groups.values()))
    axis.grid(axis="y", alpha=0.3)
    _save(figure, name)


def ratio_chart(lines: list[Line], peer: str, name: str) -> None:
    """A bar for each cell: our speed over that of the peer, from times or rates."""
    import matplotlib.pyplot as plt

    lines = [line for line in lines if peer in line["peers"]]
    figure, axis = plt.subplots(figsize=(11, 3.6))
    ratios = [line["peers"][peer] / line["ours"] for line in lines]
    if lines[0]["unit"] == "TFLOPS":
        ratios = [1 / ratio for ratio in ratios]
    axis.bar(range(len(lines)), ratios, color=[COLOURS["ours"] if ratio >= 1 else COLOURS["flash"] for ratio in ratios])
    axis.axhline(1.0, color="black", lw=0.8)
    axis.set_xticks(range(len(lines)), [line["case"] for line in lines], rotation=90, fontsize=6)
    axis.set_ylabel(f"speed on one {_gpu(lines[0])}, {LABELS[peer]} = 1", fontsize=8)
    axis.grid(axis="y", alpha=0.3)
    _save(figure, name)


def front_chart(lines: list[Line], name: str) -> None:
    """The trade of each scheduling policy: first tokens over gaps between tokens, a point for each value of its setting."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), sharex=True)
    for axis, key in zip(axes, ("first token p50", "first token p99"), strict=True):
        for policy, (label, colour) in POLICIES.items():
            own = [line for line in lines if line["case"].startswith(f"front: {policy},")]
            points = [(line["ours"], line["peers"][key] / 1000, line["case"].split(", ")[1]) for line in own]
            points.sort()
            axis.plot(*zip(*[point[:2] for point in points], strict=True), marker="o", ms=4, color=colour, label=label)
            for gap, first, setting in (points[0], points[-1]):
                axis.annotate(setting, (gap, first), fontsize=6, textcoords="offset points", xytext=(4, 4))
        axis.set_ylabel(f"{key}, s", fontsize=9)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    figure.supxlabel("gaps between tokens p99, ms; 60 prompts of 750 to 29,000 tokens at 1.5/s, simulated", fontsize=9)
    _save(figure, name)


def _save(figure: Any, name: str) -> None:
    path = ROOT / "docs" / "images" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def table() -> str:
    """The kernels: a row for each peer of a benchmark, with the geometric mean and the minimum of our speed over its speed."""
    rows = ["| what | against | geometric mean | minimum | command |", "|---|---|---|---|---|"]
    for bench, what, unequal, peers, command in TABLE:
        lines = [
            line for line in read(bench) if line["case"].endswith(("_log", "_20x")) == unequal and peers[0] in line["peers"]
        ]
        if not lines:
            continue
        runs = dict.fromkeys(f"{_gpu(line)}, {line['commit']}" for line in lines)
        what = f"{what}, {len(lines)} cells ({'; '.join(runs)})"
        for peer in peers:
            pairs = [(line["ours"], line["peers"][peer]) for line in lines]
            ratios = [b / a if lines[0]["unit"] in line_tables.TIMES else a / b for a, b in pairs]
            rows.append(
                f"| {what} | {LABELS[peer]} | {statistics.geometric_mean(ratios):.2f} | {min(ratios):.2f} | {command} |"
            )
            what = command = ""
    return "\n".join(rows).replace("|  |", "| |") + "\n"


def engine_table() -> str:
    """The engine and the service: our value, the peer's value, and our speed over its speed, for both model shapes."""
    heads = [f"{name}: fa_serve | vLLM | ratio" for name in SHAPES.values()]
    rows = ["| what | " + " | ".join(heads) + " |", "|---" * (1 + 3 * len(SHAPES)) + "|"]
    for bench, case, what in ENGINE:
        lines = {line["case"]: line for line in read(bench)}
        cells = []
        for shape in SHAPES:
            line = lines.get(f"{shape} {case}", {"ours": None, "peers": {}, "ratio": None})
            numbers = (line["ours"], next(iter(line["peers"].values()), None))
            cells += ["-" if x is None else f"{x:,.0f}" if x >= 100 else f"{x:.1f}" for x in numbers]
            cells.append(f"{line['ratio']:.2f}" if line["ratio"] else "-")
        rows.append(f"| {what} | " + " | ".join(cells) + " |")
    shares = {
        what: [
            f"{line['ratio']:.2f} ({SHAPES[shape]})"
            for shape in SHAPES
            for line in read(bench)
            if line["case"] == f"{shape} {case}"
        ]
        for what, (bench, case) in OWN.items()
    }
    return "\n".join(rows) + "\n\n" + "\n".join(f"{what} {', '.join(each)}." for what, each in shares.items()) + "\n"


def open_table() -> str:
    """Requests that arrive at random: percentiles of ours and, below, of the peer. Ours are bold where the peer is better."""
    lines = {line["case"].removeprefix("llama8b open, "): line for line in read("serving") if "open, " in line["case"]}
    heads = " | ".join(f"{time}, ms: p50, p95, p99" for time in OPEN_TIMES)
    rows = [f"| requests | server | {heads} | goodput, requests/s |", "|---" * (3 + len(OPEN_TIMES)) + "|"]
    for load in OPEN_LOADS:
        ours = []
        theirs = []
        for time in OPEN_TIMES:
            found = [lines[f"{load}, {time} {percentile}"] for percentile in ("p50", "p95", "p99")]
            ours.append(", ".join(_or_bold(line["ours"], line["ratio"] < 1) for line in found))
            theirs.append(", ".join(f"{line['peers']['vllm']:.3g}" for line in found))
        goodput = lines[f"{load}, goodput"]
        ours.append(_or_bold(goodput["ours"], goodput["ratio"] < 1))
        theirs.append(f"{goodput['peers']['vllm']:.3g}")
        rows.append(f"| {load} | fa_serve | {' | '.join(ours)} |")
        rows.append(f"| | vLLM 0.26 | {' | '.join(theirs)} |")
    start = next(line for line in read("serving") if line["case"] == "llama8b start, cold")
    at = f"{', '.join(sorted({line['commit'] for line in lines.values()}))} on one {_gpu(start)}"
    times = f"fa_serve was ready {start['ours']:.0f} s after its start with empty caches, vLLM {start['peers']['vllm']:.0f} s"
    return "\n".join(rows) + f"\n\nMeasured at commit {at}. In this run, {times}.\n"


def loads_table() -> str:
    """Mixed loads over HTTP: ours and, below, those of the peer. Ours are bold where the peer is better."""
    lines = {line["case"].removeprefix("llama8b "): line for line in read("loads")}
    heads = " | ".join(f"{time}, ms: p50, p99" for time in LOAD_TIMES)
    rows = [f"| load | server | requests/s | tokens/s | {heads} |", "|---" * (4 + len(LOAD_TIMES)) + "|"]
    for name, what in LOADS.items():
        found = [[lines[f"{name}, {rate}"]] for rate in ("requests/s", "tokens/s")]
        found += [[lines[f"{name}, {time} {percentile}"] for percentile in ("p50", "p99")] for time in LOAD_TIMES]
        ours = [", ".join(_or_bold(line["ours"], line["ratio"] < 1) for line in cell) for cell in found]
        theirs = [", ".join(_digits(line["peers"]["vllm"]) for line in cell) for cell in found]
        rows.append(f"| {what} | fa_serve | {' | '.join(ours)} |")
        rows.append(f"| | vLLM 0.26 | {' | '.join(theirs)} |")
    runs = dict.fromkeys(line["commit"] for line in lines.values())
    cold, warm = (lines[f"start, {case}"] for case in ("cold", "warm"))
    return "\n".join(rows) + (
        f"\n\nMeasured at {', '.join(runs)} on one {_gpu(cold)}. With empty caches, ours was ready {cold['ours']:.1f} s after "
        f"its start, and vLLM {cold['peers']['vllm']:.1f} s. With the caches that it had filled, ours was ready after "
        f"{warm['ours']:.1f} s.\n"
    )


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _or_bold(value: float, bold: bool) -> str:
    return f"**{_digits(value)}**" if bold else _digits(value)


def generate_table() -> str:
    """`generate`: our value, and our speed over that of the attention that transformers selects by default."""
    lines = {line["case"]: line for line in read("generate")}
    heads = " | ".join(f"{model}: fa_serve, speed over {peer}" for model, peer in GENERATE_MODELS.items())
    rows = [f"| what | {heads} |", "|---" * (1 + len(GENERATE_MODELS)) + "|"]
    for case, what in GENERATE.items():
        cells = []
        for model, peer in GENERATE_MODELS.items():
            line = lines.get(case.format(model))
            if line is None or peer not in line["peers"]:
                cells.append("-")
                continue
            faster = (line["ours"] / line["peers"][peer]) ** (1 if "/" in line["unit"] else -1)
            cells.append(f"{line['ours']:,.{0 if line['ours'] >= 100 else 1}f}, **{faster:.2f}**")
        rows.append(f"| {what} | " + " | ".join(cells) + " |")
    return "\n".join(rows) + f"\n\nMeasured at commit {', '.join(sorted({line['commit'] for line in lines.values()}))}.\n"


def blocks() -> dict[str, str]:
    """The text between each pair of markers in the pages, by the opening marker."""
    return {
        f"<!-- {name} -->\n": f"{text}<!-- end of {name} -->\n"
        for name, text in (
            ("results", table()),
            ("engine", engine_table()),
            ("open", open_table()),
            ("loads", loads_table()),
            ("generate", generate_table()),
        )
    }


def write_tables() -> None:
    for page in PAGES:
        text = page.read_text()
        for begin, block in blocks().items():
            if begin in text:
                before, rest = text.split(begin)
                text = before + begin + block + rest.split(block.splitlines(keepends=True)[-1])[1]
        page.write_text(text)


def main() -> None:
    write_tables()
    line_tables.write()
    overview.write()
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "fa_serve"  # equal results give an equal file
    for bench in ("prefill", "prefill_triton", "backward"):
        if lines := read(bench):
            prefill_chart(lines, f"{bench}.svg")
    if lines := read("fp8"):
        float8_chart(lines, "fp8.svg")
    if lines := [line for line in read("scheduler") if line["case"].startswith("front: ")]:
        front_chart(lines, "scheduler.svg")
    for bench, peer in RATIO_CHARTS:
        if lines := read(bench):
            ratio_chart(lines, peer, f"{bench}.svg")


if __name__ == "__main__":
    main()
