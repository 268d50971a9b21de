"""Tables of committed lines of benchmarks/results/*.jsonl in docs/kernels/*.md and the pages of `pages`.

A page names the file and the cases, and the table follows from them. `*` stands for any part of a case. With one peer, the last
column is our speed over that of the peer. Where lines come from several runs, raised numbers say which line is of which run:

    <!-- lines of prefill.jsonl: d64_causal_16384; d128_*_16384 -->
    (the table)
    <!-- end of lines -->

`python -m benchmarks.report` writes the tables anew. Other tables of these pages are written by hand and name their run. This
module leaves out charts, and tables that summarise a file (report.py).
"""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TABLE = re.compile(r"(<!-- lines of (\w+)\.jsonl: ([^>]+?) -->\n).*?(<!-- end of lines -->)", re.DOTALL)
PEERS = {
    "cudnn": "cuDNN",
    "fa3": "FlashAttention-3",
    "fa3 float8": "FlashAttention-3, float8",
    "fa4": "FlashAttention-4",
    "flash": "PyTorch's FlashAttention-2",
    "flex": "FlexAttention",
    "flex_scores": "FlexAttention, `score_mod`",
    "efficient": "PyTorch's efficient attention",
    "base": "without adapters",
    "calm": "without loads",
    "asked": "adapters in memory",
    "in memory": "in memory already",
    "each": "each sequence read",
    "usual": "the usual mode",
    "fla": "flash-linear-attention",
    "dense": "the dense call",
    "bf16": "fa_serve in bfloat16",
    "own_bf16": "fa_serve, bfloat16 cache",
    "own_plain": "without speculation",
    "plain": "without speculation",
    "bound": "bound",
    "linear": "PyTorch in bfloat16",
    "grouped_mm": "`grouped_mm`",
    "batched_mm": "`batched_mm`",
    "first": "a new image",
    "alone": "alone",
    "prompts": "beside prompts of text",
    "max_images=0": "an engine without images",
    "vllm": "vLLM 0.26",
    "generate_batch": "`generate_batch`",
    "plain forward": "the model's own forward",
    "no cache": "without the prefix cache",
    "copy": "one copy of as many bytes",
    "computed": "computed",
    "device": "in the prefix cache",
    "without": "without a host tier",
    "st_sdpa": "sentence-transformers, sdpa",
    "st_fa_serve": "sentence-transformers, fa_serve",
    "transformers serve": "`transformers serve`",
    "transformers serve --continuous-batching": "with `--continuous-batching`",
}
"""Names of peers in the heads of tables."""
PAGES = ("performance", "performance-engine", "lora", "images", "embeddings", "rollouts", "moving/transformers-serve")
"""Pages with tables, beside those of the engine and of the kernels."""
TIMES = ("us", "ms", "s")
"""Units of which less is better."""
Line = dict[str, Any]


def pages() -> list[Path]:
    return [
        *(ROOT / "docs" / f"{name}.md" for name in PAGES),
        *sorted((ROOT / "docs" / "engine").glob("*.md")),
        *sorted((ROOT / "docs" / "kernels").glob("*.md")),
    ]


def _machine(line: Line) -> str:
    return "a CPU" if line["gpu"] == "none" else str(line["gpu"].split()[1])


def _run(line: Line) -> str:
    return f"{_machine(line)} at {line['commit']}"


def _raised(number: int) -> str:
    return str(number).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))


def with_tables(text: str) -> str:
    """The text of a page with the tables that it asks for."""
    return TABLE.sub(lambda found: f"{found[1]}\n{table(found[2], found[3].split('; '))}\n\n{found[4]}", text)


def table(bench: str, cases: list[str]) -> str:
    """A row for each line of the file whose case is asked for, in the order of `cases`."""
    path = ROOT / "benchmarks" / "results" / f"{bench}.jsonl"
    known = [json.loads(line) for line in path.read_text().splitlines()]
    lines: list[Line] = []
    for case in cases:
        found = [line for line in known if fnmatchcase(line["case"], case) and line not in lines]
        if not found:
            raise ValueError(f"{path.name} must have a line of the case that a page names, got {case!r}")
        lines += found
    units = {line["unit"] for line in lines}
    if len(units) > 1:
        raise ValueError(f"the lines of a table must have one unit, got {', '.join(sorted(units))} for {', '.join(cases)}")
    runs = list(dict.fromkeys(_run(line) for line in lines))
    peers = list(dict.fromkeys(peer for line in lines for peer in line["peers"]))
    unit = units.pop()
    marks = dict.fromkeys(runs, "") if len(runs) == 1 else {run: _raised(number) for number, run in enumerate(runs, 1)}
    named = "; ".join(f"{run}{marks[run]}" for run in runs)
    heads = [f"`{path.name}`, {unit}, {named}", "fa_serve", *(PEERS[peer] for peer in peers)]
    if len(peers) == 1:
        heads.append("ratio")
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for line in lines:
        cells = [_number(value) for value in (line["ours"], *(line["peers"].get(peer) for peer in peers))]
        if len(peers) == 1:
            cells.append(_ratio(line["ours"], line["peers"].get(peers[0]), unit in TIMES))
        rows.append(f"| `{line['case']}`{marks[_run(line)]} | {' | '.join(cells)} |")
    return "\n".join(rows).replace("|  |", "| |")


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(ours: float, peer: float | None, is_time: bool) -> str:
    if peer is None:
        return ""
    return f"{peer / ours if is_time else ours / peer:.2f}"


def write() -> None:
    for page in pages():
        page.write_text(with_tables(page.read_text()))
