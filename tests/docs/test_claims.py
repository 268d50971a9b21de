"""The figures of the README and of the site's first page are those of benchmarks/results, the losing ones too."""

from __future__ import annotations

import json
import re
import statistics
from fnmatch import fnmatchcase
from typing import Any

import pytest
from documentation import ROOT

from benchmarks import overview
from benchmarks.line_tables import TIMES
from benchmarks.overview import GROUPS

PAGES = [pytest.param(ROOT / name, id=name) for name in ("README.md", "docs/index.md")]
H100S = 0.96
"""Workload A on two H100s beside vLLM, of docs/scale.md."""
BETTER_RUN = 17590
"""Tokens per second of vLLM's better run with 4-bit weights and 256 requests, of docs/performance-engine.md."""


def lines(bench: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (ROOT / "benchmarks" / "results" / f"{bench}.jsonl").read_text().splitlines()]


SERVED = (("transformers serve", "1 at once"), ("transformers serve --continuous-batching", "64 at once"))
OF_BETTER_RUN = next(line["ours"] for line in lines("engine") if line["case"] == "llama8b-w4 C256") / BETTER_RUN
OF_HYBRIDS = [
    line["ratio"]
    for line in lines("engine")
    if line["case"].startswith(("qwen3next ", "qwen35-9b ")) and line["unit"] == "tok/s" and "vllm" in line["peers"]
]


def ratios(bench: str, peers: str, cases: str = "*") -> list[float]:
    """Our speed over that of the fastest of the named peers, of each committed line whose case matches."""
    found = []
    for line in lines(bench):
        theirs = [line["peers"][peer] for peer in peers.split(",") if peer in line["peers"]]
        if theirs and fnmatchcase(line["case"], cases):
            found.append(min(theirs) / line["ours"] if line["unit"] in TIMES else line["ours"] / max(theirs))
    return found


def slower(bench: str, peers: str, cases: str = "*", what: str = "") -> str:
    """As the pages write it: in how many of how many cells we are slower, and the ratio of the worst."""
    found = ratios(bench, peers, cases)
    return f"in {sum(ratio < 1 for ratio in found)} of {len(found)} {what}({min(found):.2f})"


def claims() -> list[str]:
    """What both pages must say."""
    dense = next(row for rows in GROUPS.values() for row in rows if row.what == "dense models, bfloat16").ratios()
    texts = ratios("embeddings", "vllm", "* http *")
    (images,) = ratios("images", "vllm", "* http requests")
    one_text, many_texts = (ratios("transformers_serve", peers, f"qwen06, {load}")[0] for peers, load in SERVED)
    one, many = (ratios("lora", "base", f"llama8b rank 16 {case}")[0] for case in ("1 adapter", "32 adapters"))
    return [
        f"{statistics.geometric_mean(ratios('prefill', 'fa3')):.2f} times as fast as FlashAttention-3",
        f"{statistics.geometric_mean(ratios('prefill', 'cudnn')):.2f} times as fast as cuDNN",
        f"processes {min(dense):.2f} to {max(dense):.2f} times as many tokens per second as vLLM 0.26",
        f"Over HTTP it answers {images:.2f} times as many requests with images, and {min(texts):.2f} to {max(texts):.2f} times "
        "as many with texts to embed, as vLLM 0.26",
        f"generates {one_text:.1f} times as many tokens per second as `transformers serve`, and with 64 requests "
        f"{many_texts:.1f} times as many as its continuous batching",
        f"- FlexAttention with a new mask for each head ({ratios('masks', 'flex', 'blocks_128_of_8192_16_d128')[0]:.2f});",
        f"- cuDNN in four cases: a new bias in each call, as in T5 ({min(ratios('masks', 'cudnn', 't5*')):.2f}); "
        f"one query over 1,500 keys ({min(ratios('cross', 'cudnn')):.2f}); "
        f"training, {slower('train', 'cudnn', what='cells ')}; and gradients alone, "
        f"{slower('backward', 'cudnn', what='cells ')};",
        f"- FlashAttention-3 {slower('decode', 'fa3', what='cells of paged decoding ')}, "
        f"with 2 to 16 queries in each sequence {slower('verify', 'fa3', what='cells ')}, "
        f"and FlashAttention-3 or -4 {slower('models', 'fa3,fa4', what='of real models ')};",
        f"- FlashAttention-4 {slower('prefill', 'fa4', what='cells of prompts ')}, and flash-linear-attention "
        f"{slower('linear', 'fla', 'prefill*', what='cells of prompts ')} and "
        f"{slower('linear', 'fla', 'decode*', what='cells of decoding ').removeprefix('in ')};",
        f"- vLLM on two H100s in one of five workloads ({H100S:.2f}), with 4-bit weights and 256 requests "
        f"({OF_BETTER_RUN:.2f}, of the faster of two runs of vLLM), and with hybrids in "
        f"{sum(ratio < 1 for ratio in OF_HYBRIDS)} of {len(OF_HYBRIDS)} workloads ({min(OF_HYBRIDS):.2f}).",
        f"of rank 16 costs {1 - one:.0%} of the rate of an 8B with 64 requests",
        f"32 adapters {1 - many:.0%}",
    ]


@pytest.mark.parametrize("page", PAGES)
def test_the_first_page_says_what_was_measured(page) -> None:
    text = " ".join(page.read_text(encoding="utf-8").replace("**", "").split())
    for claim in claims():
        assert claim in text, claim


def test_figures_without_result_lines_are_those_of_their_pages() -> None:
    scale = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert f"| {H100S:.2f} |\n" in scale
    better = re.search(r"`llama8b-w4` all of them \(([^)]*) before\)", (ROOT / "docs" / "performance-engine.md").read_text())
    assert better
    assert better[1].split(", ")[-1] == f"{BETTER_RUN:,}"


def test_the_list_names_each_row_of_the_figure_that_loses() -> None:
    """A row in which a peer is more than 2% faster somewhere is in the list with its worst cell."""
    losing = {row: f"({least:.2f})" for row, (_, least, _) in overview.summary().items() if least < 0.98}
    text = " ".join(claims())
    assert "prompts, FlashAttention-4" in losing
    for row, least in losing.items():
        assert f"{row.split(', ')[-1]} " in text, row
        assert least in text, row


def ahead(bench: str, peers: str, cases: str = "*") -> str:
    """How many times as fast the peer is, in the cell in which it is furthest ahead."""
    return f"{1 / min(ratios(bench, peers, cases)):.2f} times"


def behind(bench: str, peers: str, cases: str = "*") -> str:
    """In how many of how many cells a peer is faster."""
    found = ratios(bench, peers, cases)
    return f"{sum(ratio < 1 for ratio in found)} of {len(found)}"


def by_at_most(bench: str, peers: str, cases: str = "*") -> str:
    """By how many percent the peer is faster where it is furthest ahead."""
    return f"by at most {100 / min(ratios(bench, peers, cases)) - 100:.1f}%"


def peers_that_are_faster() -> list[str]:
    """What the list of docs/performance.md says."""
    scanned = [case for case in {line["case"] for line in lines("masks")} if not case.endswith("_kept")]
    losing = [case for case in scanned if min(ratios("masks", "flex,cudnn", case)) < 1]
    t5 = "t5_bias_of_2048_x4_16_d64"
    delta = ratios("linear", "fla", "decode conv+delta*")
    return [
        f"**Prefill: {behind('prefill', 'fa4')} cells.**",
        f"**Paged decoding: {behind('decode', 'fa3')} cells,** {by_at_most('decode', 'fa3')}.",
        f"**Decoding mixed with prompts: {behind('mixed', 'fa3')} batches.**",
        f"**Real models: {behind('models', 'fa3,fa4')} cells,** {by_at_most('models', 'fa3,fa4')}.",
        f"**Chunks of prompts: {behind('chunk', 'fa3')} cells,** {by_at_most('chunk', 'fa3')}:",
        f"**Few queries: {behind('verify', 'fa3')} cells.**",
        f"**Masks: {len(losing)} of {len(scanned)} masks that are scanned in the call.**",
        f"FlexAttention is {ahead('masks', 'flex', 'documents_300_of_16384_16_d64')} as fast with documents of 300 in 16,384",
        f"{ahead('masks', 'flex', 'blocks_128_of_8192_16_d128')} with a mask for each of 16 heads",
        f"cuDNN is {ahead('masks', 'cudnn', t5).removesuffix(' times')} and "
        f"{ahead('masks', 'cudnn', 't5_bias_of_512_x16_12_d64')} as fast with biases of T5",
        f"cuDNN is {ahead('masks', 'cudnn', f'{t5}_kept')} as fast with the larger of these biases",
        f"cuDNN is {ahead('cross', 'cudnn', '*x16')} as fast with 16 sequences and {ahead('cross', 'cudnn', '*x64')} with 64",
        f"**Training: {behind('train', 'cudnn')} cells.** cuDNN is {ahead('train', 'cudnn')} as fast with 32/8 heads of 128 "
        f"and two sequences of 4k tokens, {ahead('train', 'cudnn', 'phi*')} with heads of 96",
        f"**Gradients at head_dim 64: {behind('backward', 'cudnn', 'd64*')} cells** (H200). cuDNN is faster "
        f"{by_at_most('backward', 'cudnn')}",
        f"**Linear attention: {behind('linear', 'fla', 'prefill*')} prompts**",
        f"**Linear attention: decoding, {behind('linear', 'fla', 'decode*')} cells.**",
        f"cells of delta nets are {statistics.geometric_mean(delta):.2f} times as fast in the geometric mean",
    ]


def elsewhere() -> dict[str, list[str]]:
    """What pages other than the first ones say of result lines."""
    starts = [1 / ratio for ratio in ratios("engine", "vllm", "*startup*")]
    times = {line["case"]: (line["ours"], line["peers"]["sdpa"]) for line in lines("generate") if "sdpa" in line["peers"]}
    static, growing = (times[f"decode_llama-3.1-8b_32768_{kind}"] for kind in ("static", "growing"))
    long = times["ttft_gemma-3-4b_131072"]
    costs = {kind: [1 - ratio for ratio in ratios("deterministic", "usual", f"* {kind} *")] for kind in ("prompt", "decode")}
    loads = {line["case"].removeprefix("llama8b "): line for line in lines("lora")}
    p99 = loads["p99 between tokens in 100 loads"]
    first = loads["load of 42 MB to the first token"]
    read = loads["load of 42 MB"]["peers"]["reading"]
    token = f"generates a token after 32k others in {static[0]:.1f} ms instead of {static[1]:.1f} ms"
    return {
        "README.md": [token, f"with the default cache the gain is {growing[1] / growing[0] - 1:.0%}"],
        "docs/performance.md": peers_that_are_faster(),
        "docs/plugin.md": [token, f"of 128k in {long[0] / 1000:.1f} s instead of {long[1] / 1000:.1f} s"],
        "docs/faq.md": [
            f"its start takes {min(starts):.2f} to {max(starts):.2f} of the time",
            f"higher in every workload measured on H200s except one with 4-bit weights "
            f"({OF_BETTER_RUN:.2f}) and two of hybrid models ({min(OF_HYBRIDS):.2f})",
        ],
        "docs/index.md": [f"are at {min(OF_HYBRIDS):.2f} to {max(OF_HYBRIDS):.2f} of vLLM's rate"],
        "docs/lora.md": [
            f"it is {p99['ours'] / p99['peers']['calm']:.2f} times its value without loads, and "
            f"{p99['ours'] / p99['peers']['asked']:.2f} times its value during as many requests",
            f"came after {first['ours']:.0f} ms: {read:.0f} to read it, {first['peers']['in memory']:.0f} for the token",
        ],
        "docs/settings.md": [
            f"Costs up to {max(costs['prompt']):.0%} in prompts and up to {max(costs['decode']):.0%} in decoding."
        ],
    }


@pytest.mark.parametrize("page", elsewhere())
def test_other_pages_say_what_was_measured(page) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    for claim in elsewhere()[page]:
        assert claim in text, claim


def test_images_over_http_are_slower_than_vllms_in_no_measure() -> None:
    """The list on the first page does not name them."""
    found = ratios("images", "vllm", "* http *")
    assert len(found) == 4
    assert min(found) >= 1


def test_no_other_workload_of_text_on_h200s_is_slower_than_vllms() -> None:
    """The faq says so, and the first pages name the three that are."""
    rates = [line for line in lines("engine") if line["unit"] == "tok/s" and "vllm" in line["peers"]]
    assert len(rates) > 20
    assert all("H200" in line["gpu"] for line in rates)
    assert [line["case"] for line in rates if line["ours"] < line["peers"]["vllm"]] == ["qwen3next D", "qwen35-9b B"]
    assert OF_BETTER_RUN < 1
