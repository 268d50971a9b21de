"""The figure of the README is that of the committed results, and the sentences beside it quote them.

tests/docs/test_claims.py has the list of what is slower.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

import pytest
from documentation import ROOT

from benchmarks import overview

NUMBERS = overview.summary()


def test_the_figure_is_that_of_the_results() -> None:
    """To draw it anew: python -m benchmarks.overview"""
    assert overview.FIGURE.read_text(encoding="utf-8") == overview.figure()
    ET.fromstring(overview.figure())


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_a_page_quotes_the_figure(name: str) -> None:
    text = " ".join((ROOT / name).read_text(encoding="utf-8").replace("**", "").split())
    for peer in ("FlashAttention-3", "PyTorch's sdpa, cuDNN"):
        assert f"{NUMBERS[f'prompts, {peer}'][0]:.2f} times as fast as {peer.split(', ')[-1]}" in text
    _, least, most = NUMBERS["dense models, bfloat16, vLLM 0.26"]
    assert f"{least:.2f} to {most:.2f} times as many tokens per second as vLLM 0.26" in text
    assert "slower" in text


def test_ratios_are_above_one_where_fa_serve_is_faster() -> None:
    """Times are divided the other way round than rates."""
    rates = overview.Row("", "prefill", "flash", "")
    times = overview.Row("", "linear", "fla", "", lambda case: case == "decode conv+delta 16/32 64")
    assert min(rates.ratios()) > 1
    lines = (ROOT / "benchmarks" / "results" / "linear.jsonl").read_text().splitlines()
    (line,) = [line for line in map(json.loads, lines) if line["case"] == "decode conv+delta 16/32 64"]
    assert times.ratios() == pytest.approx([line["peers"]["fla"] / line["ours"]], rel=1e-4)
    dots = re.findall(r'<circle cx="([\d.]+)"', overview.figure())
    assert len(dots) == sum(len(row.ratios()) for rows in overview.GROUPS.values() for row in rows)
