"""What the form that reads the tail again adds to test_few_rows_interpreted.py: a kernel for steps of one row, and tiles."""

from __future__ import annotations

import pytest
import torch
from linear_attention_cases import KINDS_BY_NAME, joined, of_sequence
from reread_form import reread_rows
from state_steps import Part, StateSteps

from fa_serve.launching.plans import PLANS
from fa_serve.ops import FEW_ROWS
from fa_serve.ops.linear_attention import few_rows, run


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "runs_triton", lambda device: True)
    reread_rows(monkeypatch)


@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize("name", ["delta", "kda", "lightning", "ssd"])
def test_single_rows_have_the_bits_of_many(name: str, page_size: int) -> None:
    """Rows one by one, which the host knows or does not know, and in steps of many: outputs, tails and pages."""
    kind = KINDS_BY_NAME[name]
    rows = kind.rows(34, torch.float32)
    weights = kind.weights(torch.float32)
    expected, _ = kind.exact(rows, weights)
    found = []
    for counts, known in (([16, 16, 2], True), ([16] + [1] * 18, True), ([16] + [1] * 18, False)):
        table = StateSteps(kind.spec(rows, weights), page_size)
        outs = []
        for count in counts:
            done = sum(map(len, outs))
            batch = table.begin([Part(0, count)])
            assert batch.most_rows == (1 if count == 1 else FEW_ROWS)
            batch = batch if known else batch._replace(most_rows=FEW_ROWS)
            outs.append(kind.step(of_sequence(rows, done, done + count), weights, table.states, batch))
            table.end()
        found.append([torch.cat(outs), table.states.pages[table.sequences[0].source], *[x[0] for x in table.states.tails]])
    torch.testing.assert_close(found[0][0].double(), expected, rtol=1e-4, atol=1e-4)
    for whole, single, unknown in zip(*found, strict=True):  # rows of a ring that are not written are NaN
        torch.testing.assert_close(single, whole, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(unknown, whole, rtol=0, atol=0, equal_nan=True)


def test_steps_of_one_row_have_their_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes at most one row of a sequence, and clears the rows of padding, of which there may be more."""
    kind = KINDS_BY_NAME["delta"]
    rows = kind.rows(8, torch.float32)
    PLANS.clear()  # those of other tests too
    planned = []
    plan = few_rows._plan
    monkeypatch.setattr(few_rows, "_plan", lambda *args: planned.append(args[-1]) or plan(*args))
    table = StateSteps(kind.spec(rows, {}))
    for count in (5, 1):
        batch = table.begin([Part(0, count), Part(3, 2, padding=True)])
        done = 0 if count == 5 else 5
        out = kind.step(joined([of_sequence(rows, done, done + count), of_sequence(rows, 0, 2)]), {}, table.states, batch)
        assert not out[count:].any()
        table.end()
    expected, _ = kind.exact(rows, {})
    torch.testing.assert_close(out[:1].double(), expected[5:6], rtol=1e-4, atol=1e-4)
    assert planned == [False, True]
