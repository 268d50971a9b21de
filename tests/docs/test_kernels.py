"""docs/kernels/: measurements are lines of benchmarks/results, drawings are those of docs/drawings.py, kernels exist."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest
from documentation import ROOT, Block, blocks, prose

from benchmarks import line_tables

FIRST_PAGE = ROOT / "docs" / "kernels" / "index.md"
SCRIPTS = [pytest.param(block, id=block.name) for block in blocks(FIRST_PAGE) if block.language == "py"]
PAGES = [pytest.param(page, id=page.stem) for page in sorted((ROOT / "docs" / "kernels").glob("*.md"))]
DRAWINGS = ROOT / "docs" / "images" / "kernels"
MEASURED = re.compile(
    r"\d(?:\.\d+)? ?(?:us|µs|ms|s|TFLOPS|TB/s|GB/s|tokens/s|%)(?![\w/])|\d(?:\.\d+)? times as|\d instructions|\d\.\d+ of "
)
"""What only a measurement says: times, rates, shares and ratios."""


def drawings() -> ModuleType:
    spec = importlib.util.spec_from_file_location("drawings", ROOT / "docs" / "drawings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_no_measurement_but_committed_lines(page: Path) -> None:
    """To name a measurement: a comment `lines of FILE.jsonl: case; case`; see benchmarks/line_tables.py."""
    text = line_tables.TABLE.sub("", page.read_text())
    assert [found[0] for found in MEASURED.finditer(re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL))] == []


def test_a_measurement_is_noticed() -> None:
    """The test above can fail."""
    for text in ("31 us", "740 TFLOPS", "gains 3%", "1.4 times as fast", "579 instructions", "0.98 of FlashAttention-3"):
        assert MEASURED.search(text), text
    for text in ("64 rows of Q", "Triton 3.6 to 3.9", "232,448 bytes", "with 2 to 16 queries"):
        assert not MEASURED.search(text), text


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_short_and_has_a_drawing(page: Path) -> None:
    text = re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL)
    assert len(text.split()) <= 3000
    assert "](../images/kernels/" in text


def test_the_tables_are_those_of_the_results() -> None:
    """To write them anew: python -m benchmarks.report"""
    pages = line_tables.pages()
    assert sum(len(line_tables.TABLE.findall(page.read_text())) for page in pages) > 10
    for page in pages:
        assert page.read_text() == line_tables.with_tables(page.read_text()), page


def test_a_table_of_lines() -> None:
    head, _, *rows = line_tables.table("varlen", ["512_of_*"]).splitlines()
    assert head == "| `varlen.jsonl`, TFLOPS, H200 at 273e7c2 | fa_serve | cuDNN | FlashAttention-3 | FlashAttention-4 |"
    assert rows == ["| `512_of_64` | 86.1 | 45.3 | 57.4 | 52.8 |"]
    # with one peer, the speed over the peer's: of rates, and of times
    assert line_tables.table("window", ["d64_128"]).endswith("| `d64_128` | 183 | 85.8 | 2.13 |")
    assert line_tables.table("chunk", ["32_8_d128_256_of_4352x1"]).endswith("| 43.8 | 45.4 | 1.04 |")
    # lines of several runs say of which each is
    head, _, *rows = line_tables.table("lora", ["llama8b rank 16 1 adapter", "llama8b rank 16 base"]).splitlines()
    assert head.startswith("| `lora.jsonl`, tokens/s, H200 at 9b690ee7¹; H200 at ed131504² | fa_serve |")
    assert [row.split(" | ")[0] for row in rows] == ["| `llama8b rank 16 1 adapter`¹", "| `llama8b rank 16 base`²"]
    with pytest.raises(ValueError, match=r"decode.jsonl must have a line of the case that a page names, got 'd96'"):
        line_tables.table("decode", ["d96"])
    with pytest.raises(ValueError, match="must have one unit, got TB/s, us"):
        line_tables.table("decode", ["read_bandwidth", "32_8_d128_1x1024"])


def test_the_drawings_are_those_of_the_script() -> None:
    """To draw them anew: python docs/drawings.py"""
    module = drawings()
    drawn = {f"{draw.__name__}.svg": draw().svg() for draw in module.DRAWINGS}
    assert {path.name: path.read_text(encoding="utf-8") for path in DRAWINGS.glob("*.svg")} == drawn
    used = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    for name, text in drawn.items():
        assert f"images/kernels/{name}" in used, f"no page shows {name}"
        root = ET.fromstring(text)
        width, height = (float(root.attrib[side]) for side in ("width", "height"))
        for element in root.iter("{http://www.w3.org/2000/svg}rect"):
            x, y, right, bottom = (float(element.get(key, 0)) for key in ("x", "y", "width", "height"))
            assert 0 <= x <= x + right <= width, f"{name}: a box leaves the canvas"
            assert 0 <= y <= y + bottom <= height, f"{name}: a box leaves the canvas"


def test_kernels_that_the_first_page_names_exist() -> None:
    page = prose(FIRST_PAGE)
    table = next(block for block in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE) if "kernels" in block.splitlines()[0])
    named = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[3])]
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "fa_serve").rglob("*.py"))
    assert len(named) > 10
    assert [name for name in named if not re.search(rf"^def {name}\(", source, re.MULTILINE)] == []


@pytest.mark.slow
@pytest.mark.parametrize("block", SCRIPTS)
def test_scripts_of_the_first_page_run(block: Block) -> None:
    """Each in a new process: one is interpreted, which Triton decides when it is imported, and the other compiles."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/support'}"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", block.text], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    if "compiling_for" in block.text:
        name, registers, spilled, *_ = done.stdout.split()
        assert (name, spilled) == ("attn_fwd", "0")
        assert 0 < int(registers) <= 255
    else:
        assert float(done.stdout.removeprefix("tensor(").rstrip(")\n")) < 1e-5


def test_the_first_page_has_both_scripts() -> None:
    """The test above runs something."""
    assert sorted("compiling_for" in param.values[0].text for param in SCRIPTS) == [False, True]
