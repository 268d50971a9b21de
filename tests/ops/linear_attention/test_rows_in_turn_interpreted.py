"""Programs that compute heads in turn, in Triton's interpreter, against float64 and against programs of one head."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from linear_attention_cases import KINDS_BY_NAME, joined, of_sequence
from state_steps import Part, StateSteps

from fa_serve.launching.plans import PLANS
from fa_serve.ops.linear_attention import few_rows, run, table
from fa_serve.ops.linear_attention.problem import Recurrence
from fa_serve.ops.linear_attention.rows_in_turn import programs_of_sequence
from fa_serve.ops.linear_attention.tiles import FewRowsTile, few_rows_tile


def with_resident(resident: int, asked: Recurrence) -> FewRowsTile:
    return few_rows_tile(asked)._replace(resident=resident)


@pytest.mark.parametrize("name", ["delta", "kda", "lightning", "ssd"])
@pytest.mark.parametrize("programs", [1, 3])
def test_heads_in_turn(name: str, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows one by one over two pages, beside padding: outputs, tails and the next state."""
    monkeypatch.setattr(run, "runs_triton", lambda device: True)
    monkeypatch.setattr(few_rows, "programs_of_sequence", lambda num_seqs, blocks, slots: min(programs, blocks - 1))
    kind = KINDS_BY_NAME[name]
    rows = kind.rows(34, torch.float32)
    weights = kind.weights(torch.float32)
    expected, _ = kind.exact(rows, weights)
    found = []
    for resident in (0, 2):
        in_turn = partial(with_resident, resident)
        kernels = [replace(row, tile=in_turn) if row.name == "few_rows" else row for row in table.RECURRENCE_KERNELS]
        with monkeypatch.context() as patch:
            patch.setattr(table, "RECURRENCE_KERNELS", tuple(kernels))
            PLANS.clear()
            steps = StateSteps(kind.spec(rows, weights))
            outs = []
            for done in range(34):
                batch = steps.begin([Part(9, 1, padding=True), Part(0, 1)])
                assert batch.most_rows == 1
                parts = joined([of_sequence(rows, 0, 1), of_sequence(rows, done, done + 1), of_sequence(rows, 0, 2)])
                out = kind.step(parts, weights, steps.states, batch)
                assert not out[[0, 2, 3]].any(), "padding, and two rows behind the last sequence"
                outs.append(out[1:2])
                steps.end()
            found.append([torch.cat(outs), steps.states.pages[steps.sequences[0].source], *[x[0] for x in steps.states.tails]])
    torch.testing.assert_close(found[0][0].double(), expected, rtol=1e-4, atol=1e-4)
    for one, turns in zip(*found, strict=True):
        torch.testing.assert_close(turns, one, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("num_seqs", "blocks", "slots", "programs"), [(1, 64, 396, 64), (64, 128, 528, 8), (256, 128, 528, 2), (16, 128, 528, 32)]
)
def test_programs_end_together(num_seqs: int, blocks: int, slots: int, programs: int) -> None:
    assert programs_of_sequence(num_seqs, blocks, slots) == programs
