"""The script that times variants in cells: names of tiles are read back, each variant has a process, and failures are shown."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.tuning import tune_cells
from benchmarks.tuning.tune_cells import Variant, make_call, parse_tiles, variants
from benchmarks.tuning.tune_hopper import CAUSAL, FULL, label
from fa_serve import dispatch
from fa_serve.backends.calls import AttentionOptions
from fa_serve.backends.sdpa import SdpaBackend
from fa_serve.launching.plans import PlanTable, Run


def test_names_of_tiles_are_read_back() -> None:
    every = [tiles for table in (CAUSAL, FULL) for each in table.values() for tiles in each]
    assert len(every) > 20
    for tiles in every:
        assert parse_tiles(label(tiles)) == tiles
    with pytest.raises(ValueError, match="--tiles must be names such as 1x64s2q2D/3 or 2x128s2q2DPbl, got '2x128'"):
        parse_tiles("2x128")


def test_a_cell_is_what_its_name_says() -> None:
    call = make_call("gemma-2-9b_3x50", "cpu")
    assert call.tensors.q.shape == (150, 16, 256)
    assert call.tensors.k.shape == (150, 8, 256)
    assert (call.options.window_size, call.options.softcap, call.options.max_seqlen_q) == ((-1, 0), 50.0, 50)
    for name in ("gemma-2-9b_ragged", "nobody_3x50"):
        with pytest.raises(ValueError, match="--cells must be names such as"):
            make_call(name, "cpu")


@pytest.mark.parametrize("cell", ["gemma-2-9b-local_2x20", "gpt-oss-20b_2x20", "d256_causal_16", "d256_full_16"])
def test_the_public_function_and_the_plan_compute_the_same_call(cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_cells, "TOKENS", 48)
    call = make_call(cell, "cpu")
    planned = []

    class Recorder(SdpaBackend):
        def plan(self, spec: Any, tensors: Any, options: AttentionOptions) -> Run:
            planned.append((tensors, options))
            return super().plan(spec, tensors, options)

    monkeypatch.setattr(dispatch, "select_backend", lambda spec, backend: Recorder())
    monkeypatch.setattr(dispatch, "PLANS", PlanTable())
    call.public("sdpa")
    [(tensors, options)] = planned
    assert options == call.options
    assert (tensors.sinks is None) == ("gpt-oss" not in cell)
    for given, own in zip(tensors, call.tensors, strict=True):
        assert (given is None) == (own is None)
        assert own is None or torch.equal(given, own)


def test_variants_are_the_backends_and_all_tiles_with_all_splits() -> None:
    asked = argparse.Namespace(backends=["auto"], tiles=["1x64s2q2D"], splits=[1, 2])
    assert variants(asked) == [Variant("auto"), Variant("", "1x64s2q2D", 1), Variant("", "1x64s2q2D", 2)]
    assert variants(argparse.Namespace(backends=["auto"], tiles=[], splits=[])) == [Variant("auto")]
    assert [str(v) for v in variants(asked)] == ["auto", "1x64s2q2D up to 1 splits", "1x64s2q2D up to 2 splits"]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="no variant would fail")
def test_a_variant_that_fails_is_shown_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a GPU each process fails, and says why."""
    monkeypatch.setattr(sys, "argv", ["tune_cells.py", "--cells", "phi-3-mini_2x20", "--out", str(tmp_path / "out.jsonl")])
    tune_cells.main()
    [line] = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert (line["cell"], line["variant"], line["us"]) == ("phi-3-mini_2x20", "auto", None)
    assert "CUDA" in line["reason"] or "NVIDIA" in line["reason"]
    assert line["reason"] in capsys.readouterr().out
