"""The figures of the README and of the site's first page are those of benchmarks/results, the losing ones too."""

from __future__ import annotations

import json
import statistics
from fnmatch import fnmatchcase

import pytest
from documentation import ROOT

from benchmarks.line_tables import TIMES
from benchmarks.overview import GROUPS

PAGES = [pytest.param(ROOT / name, id=name) for name in ("README.md", "docs/index.md")]


def ratios(bench: str, peer: str, cases: str = "*") -> list[float]:
    """Our speed over the peer's, of each committed line whose case matches."""
    found = []
    for text in (ROOT / "benchmarks" / "results" / f"{bench}.jsonl").read_text().splitlines():
        line = json.loads(text)
        if peer in line["peers"] and fnmatchcase(line["case"], cases):
            pair = line["ours"], line["peers"][peer]
            found.append(pair[1] / pair[0] if line["unit"] in TIMES else pair[0] / pair[1])
    return found


def claims() -> dict[str, list[str]]:
    """What each page must say, by page."""
    dense = next(row for rows in GROUPS.values() for row in rows if row.what == "dense models, bfloat16").ratios()
    fa4 = ratios("prefill", "fa4")
    train = ratios("train", "cudnn")
    decoding = ratios("linear", "fla", "decode*")
    both = [
        f"{statistics.geometric_mean(ratios('prefill', 'fa3')):.2f} times as fast as FlashAttention-3",
        f"{statistics.geometric_mean(ratios('prefill', 'cudnn')):.2f} times as fast as cuDNN",
        f"processes {min(dense):.2f} to {max(dense):.2f} times as many tokens per second as vLLM 0.26",
        f"one query over 1,500 keys ({min(ratios('cross', 'cudnn')):.2f} of cuDNN)",
        f"in {sum(ratio < 0.995 for ratio in train)} of {len(train)} training cells ({min(train):.2f} of cuDNN)",
        f"with a new mask for each head ({ratios('masks', 'flex', 'blocks_128_of_8192_16_d128')[0]:.2f} of FlexAttention)",
        f"in {sum(ratio < 0.995 for ratio in decoding)} of {len(decoding)} cells of decoding with linear attention"
        f" ({min(decoding):.2f})",
        f"in {sum(ratio < 1 for ratio in fa4)} of {len(fa4)} prompts than FlashAttention-4",
    ]
    readme = [
        f"FlashAttention-4 ({min(fa4):.2f})",
    ]
    assert round(1 - ratios("lora", "base", "llama8b rank 16 1 adapter")[0], 2) == 0.13, "an eighth is what both pages say"
    return {"README.md": both + readme, "index.md": both}


@pytest.mark.parametrize("page", PAGES)
def test_the_first_page_says_what_was_measured(page) -> None:
    text = " ".join(page.read_text(encoding="utf-8").replace("**", "").split())
    for claim in claims()[page.name]:
        assert claim in text, claim
    assert "costs an eighth of the throughput of an 8B" in text
