"""Which products have adapters in their launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lora_cases import LoraCase, make_case

from fa_serve.ops.lora import run


def test_what_is_refused_takes_separate_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MERGED_PRODUCTS", run.EVERY_PRODUCT)
    case = LoraCase((0, 1, -1, 2))
    given = make_case(case, torch.float32)
    _, x, weights, batch, _, _ = given
    weight = torch.zeros(sum(case.widths), case.k)

    def reason(**changes: Any) -> str:
        asked = {"x": x, "weight": weight, "weights": weights, "batch": batch, "activation": None} | changes
        return str(run.refuses_merging(**asked))

    assert "got (48, 16, 16)" in reason(activation="silu")
    assert "got 129 in tiles of 16" in reason(x=x[:1].expand(129, -1))
    assert "got 4 in tiles of 64" in reason(batch=batch._replace(block_rows=64))
    assert "dtype of the input" in reason(weight=weight.half())
    assert "contiguous" in reason(weight=weight.t().contiguous().t())
    monkeypatch.setattr(run, "MERGED_PRODUCTS", frozenset())
    assert "of few tokens (ops/lora/run.py:MERGED_PRODUCTS)" in reason()
    assert "of one token, gated" in reason(x=x[:1], activation="silu")


def test_what_has_no_launch_behind_its_product(monkeypatch: pytest.MonkeyPatch) -> None:
    _, x, weights, batch, _, _ = make_case(LoraCase((0, 1, -1, 2), widths=(16, 16)), torch.float32)
    given = {"x": x, "weights": weights, "batch": batch, "activation": "silu", "residual": None}
    assert "FINISHED_PRODUCTS" in str(run.refuses_finishing(**given))
    monkeypatch.setattr(run, "FINISHED_PRODUCTS", run.EVERY_FINISH)

    def reason(**changes: Any) -> str | None:
        return run.refuses_finishing(**given | changes)

    assert reason() is None
    assert "one token" in str(reason(x=x[:1]))
    assert reason(activation=None, weights=weights._replace(widths=(8, 8, 16))) is None
    assert "dtype of the input" in str(reason(x=x.half()))
    assert "got (8, 24)" in str(reason(weights=weights._replace(widths=(8, 24))))
    assert "contiguous" in str(reason(residual=torch.zeros(64, 4).t()))
