"""The public functions: defaults, and what `fa_serve.ops` exports."""

from __future__ import annotations

import pytest
import torch
from linear_attention_cases import KINDS_BY_NAME
from state_steps import Part, StateSteps

from fa_serve import ops
from fa_serve.ops.linear_attention import api


@pytest.mark.parametrize("name", [name for name in vars(api) if callable(getattr(ops, name, None)) and name.islower()])
def test_ops_exports_them(name: str) -> None:
    assert getattr(ops, name) is getattr(api, name)


def test_there_is_one_of_each_kind() -> None:
    kinds = ("gated_delta_rule", "lightning_attention", "ssd", "selective_scan", "rg_lru", "causal_conv1d")
    for kind in kinds:
        assert {kind, f"{kind}_paged", f"{kind}_state"} <= set(vars(ops))


def test_the_scale_is_that_of_attention_unless_it_is_given() -> None:
    kind = KINDS_BY_NAME["delta"]
    rows = kind.rows(5, torch.float64)
    dense = {name: x[None] for name, x in rows.items()}
    usual, state = ops.gated_delta_rule(**dense)
    assert state is None
    twice, _ = ops.gated_delta_rule(**dense, softmax_scale=2 * 12**-0.5)
    torch.testing.assert_close(twice, 2 * usual)
    table = StateSteps(kind.spec(rows, {}))
    paged = ops.gated_delta_rule_paged(**rows, states=table.states, batch=table.begin([Part(0, 5)]))
    torch.testing.assert_close(paged, usual[0])
