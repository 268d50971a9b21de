"""The Hopper kernel follows the tree: in the emulator its bits are those of the tree, and faults in its source change them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hopper_cases import DYNAMIC, Case, PagedCall
from hopper_emulator import EmulationError, kernel_definitions
from torch import Tensor

from fa_serve.backends.hopper.forward import plan as forward
from fa_serve.backends.hopper.forward.tiles import HopperTiles
from fa_serve.backends.hopper.forward.types import Variant
from fa_serve.spec import TREE_SPLITS

BLOCK = 64
GROUP = 2 * BLOCK
LENGTHS = ([70, 1, 140], [70, 300, 330])
"""Queries and keys of each sequence: a prompt, a token behind two groups, and a chunk whose tiles end in the third one."""
CASES = {
    "causal": Case("infinite"),
    "full": Case("", window=(-1, -1)),
    "window": Case("", window=(100, 0), sinks=True),
    "rows-of-one-warpgroup": Case("", tiles=HopperTiles(1, 64, 2, 2, DYNAMIC, rescale_late=True, blocks_per_sm=2)),
    "turns": Case("", tiles=HopperTiles(2, 64, 4, 2, DYNAMIC, pingpong=True)),
    "d96": Case("", head_dim=(96, 96), scale=3.0),
}


def multiply(a: Tensor, b: Tensor, columns: int) -> Tensor:
    """a (rows, n) by b (n, columns), in the parts that the kernel has; both are padded with zeros."""
    parts = [min(64, columns), columns - 64] if columns > 64 else [columns]
    return torch.cat([a.float() @ part.float() for part in b.split(parts, 1)], 1)


def tree_of(q: Tensor, first_row: int, k: Tensor, v: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    """64 queries of one head from the position `first_row` on, by the definition in `triton.tree.plan` -> out, lse."""
    steps = kernel_definitions({})
    rows = torch.arange(first_row, first_row + BLOCK)[:, None]
    left, right = case.window
    factor = forward.base_2_scales(case.scale, 0.0)[0]
    nothing = (torch.full((BLOCK,), -torch.inf), torch.zeros(BLOCK), torch.zeros(BLOCK, v.shape[1]))
    m, l, out = nothing  # noqa: E741
    if case.sinks:
        m = torch.full_like(m, float(case.make_sinks()[0])) * steps["LOG2E"]
        l = l + 1.0  # noqa: E741
    for first in range(0, len(k), GROUP):
        group_m, group_l, group_out = nothing
        for begin in range(first, min(first + GROUP, len(k)), BLOCK):
            keys = torch.arange(begin, begin + BLOCK)
            k_block, v_block = (torch.nn.functional.pad(x[begin : begin + BLOCK], (0, 0, 0, BLOCK))[:BLOCK] for x in (k, v))
            halves = [(0, 64), (64, 96)][: 1 + (q.shape[1] > 64)]
            s = sum(q[:, a:b].float() @ k_block[:, a:b].float().T for a, b in halves)
            seen = (keys < len(k)) & ((keys <= rows + right) | (right < 0)) & ((keys >= rows - left) | (left < 0))
            p, group_m, group_l, alpha = steps["group_softmax"](s.where(seen, -torch.inf), factor, group_m, group_l)
            group_out = group_out * alpha[:, None] + multiply(p.to(v.dtype), v_block, v.shape[1])
        m, l, before, added = steps["fold_rows"](m, l, group_m, group_l)  # noqa: E741
        out = steps["fold_outputs"](out, group_out, before[:, None], added[:, None])
    return (out * (1.0 / l)[:, None]).to(v.dtype), (m + l.log2()) * steps["LN2"]


def run_tree(case: Case, **emulation: object) -> None:
    """Emulate a call, and raise AssertionError unless its bits are those of the definition."""
    call = PagedCall.of(case, *LENGTHS)
    if case.id == "infinite":  # a value in a group before the last one of a token
        assert call.tensors.block_table is not None
        call.tensors.v[call.tensors.block_table[1, 0], 5] = torch.inf
        call.sequences[1][2][5] = torch.inf
    call.options = replace(call.options, num_splits=TREE_SPLITS)
    out, lse = call.run(**emulation)
    for rows, k, v in call.sequences:
        q = call.tensors.q[rows, 0]
        filled = torch.nn.functional.pad(q, (0, 0, 0, -len(q) % BLOCK))
        for i, tile in enumerate(filled.split(BLOCK)):
            expected, expected_lse = tree_of(tile, len(k) - len(q) + BLOCK * i, k[:, 0], v[:, 0], case)
            own = slice(rows.start + BLOCK * i, min(rows.start + BLOCK * (i + 1), rows.stop))
            assert torch.equal(out[own, 0], expected[: own.stop - own.start])
            assert torch.equal(lse[0, own], expected_lse[: own.stop - own.start])


@pytest.fixture(autouse=True)
def short_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "GROUP_KEYS", GROUP)


@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_the_tree(name: str) -> None:
    run_tree(CASES[name])


FAULTS = {
    "groups that begin one block late": {"begins = block % var.tree_blocks == 0": "begins = block % var.tree_blocks == 1"},
    "a group that goes on with the softmax of the one before": {
        "state = Softmax(gl.where(begins, float(": "Softmax(gl.where(begins, float("
    },
    "a group that goes on with the output of the one before": {"            acc = _no_output(block, var)\n": ""},
    "a group folded by the maxima of the next one": {"fold_group(folded, last, ": "fold_group(folded, state, "},
    "a last group that is not folded": {"        folded = fold_group(folded, state, acc, var)\n": ""},
    "blocks from the last one to the first": {"return tile.low + j": "return tile.high - 1 - j"},
    "no sink": {"            l = l + 1.0  # noqa: E741\n": ""},
    "a maximum that follows at once": {"row_max + SCORE_GROWTH, new_max": "row_max, new_max"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_changes_bits(fault: str) -> None:
    """The definition takes the steps of the softmax from the source without the fault."""
    with pytest.raises((AssertionError, EmulationError)):
        run_tree(CASES["window" if fault == "no sink" else "causal"], faults=FAULTS[fault])


def test_keys_past_the_end_are_masked_without_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks come in their order, so the last one, which may end early, is not the first that a tile visits."""
    monkeypatch.setattr(Variant, "masked", False)
    with pytest.raises(AssertionError):
        run_tree(CASES["full"])
