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
    assert "have the input's dtype" in reason(weight=weight.half())
    assert "contiguous" in reason(weight=weight.t().contiguous().t())
    monkeypatch.setattr(run, "MERGED_PRODUCTS", frozenset())
    assert "for few tokens (ops/lora/run.py:MERGED_PRODUCTS)" in reason()
    assert "for one token, gated" in reason(x=x[:1], activation="silu")


def test_few_tokens_with_a_gate_take_separate_launches() -> None:
    case = LoraCase((0, 1, -1, 2), widths=(40, 40))
    _, x, weights, batch, _, _ = make_case(case, torch.float32)
    weight = torch.zeros(sum(case.widths), case.k)
    refused = {
        (len(each), activation): run.refuses_merging(each, weight, weights, batch, activation) is not None
        for each in (x[:1], x)
        for activation in (None, "silu")
    }
    assert refused == {(1, None): False, (1, "silu"): False, (4, None): False, (4, "silu"): True}
