"""The kernels for chunks of prompts in Triton's interpreter, against the recurrences in float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from linear_attention_cases import KINDS_BY_NAME, Kind, joined, of_sequence
from rounded_once import randn
from state_steps import Part, StateSteps

from fa_serve.ops.linear_attention import pieces, run, table


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "runs_triton", lambda device: True)


NAMES = ("delta", "delta-strong", "kda", "kda-strong", "lightning", "ssd")
every_kind = pytest.mark.parametrize("kind", [KINDS_BY_NAME[name] for name in NAMES], ids=lambda kind: kind.name)


def bound(expected: torch.Tensor, dtype: torch.dtype) -> float:
    """Some roundings of the operands of products. Strong gates sum up to -5000 in a piece, whose rounding is 3e-4."""
    return float(expected.abs().max() * (1e-4 + 4 * torch.finfo(dtype).eps))


CASES = [(name, torch.float32) for name in NAMES] + [("delta", torch.float16), ("ssd", torch.float16)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_chunks_and_what_follows_them(name: str, dtype: torch.dtype) -> None:
    """A chunk with states within it beside padding and few rows, a second chunk from a page, then single tokens by the other
    kernel, which reads the tail that the chunk has left."""
    kind = KINDS_BY_NAME[name]
    rows = kind.rows(125, dtype)
    weights = kind.weights(dtype)
    expected, states = kind.exact(rows, weights)
    steps = StateSteps(kind.spec(rows, weights))
    done = 0
    for count, stores in ((80, (16, 48)), (39, ()), (1, ()), (5, ())):
        batch = steps.begin([Part(9, 2, padding=True), Part(0, count, stores=stores), Part(3, 0, padding=True), Part(4, 1)])
        parts = joined([of_sequence(rows, 0, 2), of_sequence(rows, done, done + count), of_sequence(rows, 0, 4)])
        out = kind.step(parts, weights, steps.states, batch)
        assert out.dtype == dtype
        assert (out[2 : 2 + count].double() - expected[done : done + count]).abs().max() <= bound(expected, dtype)
        assert not torch.cat((out[:2], out[3 + count :])).any(), "padding, and rows behind the last sequence"
        for position, page in steps.sequences[0].kept.items():
            state = kind.page_of(states[position])
            assert (steps.states.pages[page].double() - state).abs().max() <= bound(state, dtype)
        steps.end()
        done += count
    assert done == 125


@every_kind
def test_packed_sequences(kind: Kind) -> None:
    """Among them one of no rows, which keeps its state."""
    bounds = [0, 5, 5, 75]
    rows = kind.rows(77, torch.float32)
    weights = kind.weights(torch.float32)
    begin = randn(3, *kind.state, dtype=torch.float32, seed=9)
    out, final = kind.packed(rows, weights, bounds, begin)
    assert not out[75:].any(), "rows behind the last sequence"
    for i, (first, end) in enumerate(pairwise(bounds)):
        if first == end:
            assert torch.equal(final[i], begin[i])
            continue
        expected, states = kind.exact(of_sequence(rows, first, end), weights, begin[i])
        assert (out[first:end].double() - expected).abs().max() <= bound(expected, torch.float32)
        assert (final[i].double() - states[-1]).abs().max() <= bound(states[-1], torch.float32)


@pytest.mark.parametrize("fault", ["gate", "state"])
def test_the_bound_tells_faults(fault: str) -> None:
    """A gate that is not applied and a state of another sequence are far from the recurrence."""
    kind = KINDS_BY_NAME["delta"]
    rows = kind.rows(75, torch.float32)
    begin = randn(2, *kind.state, dtype=torch.float32, seed=9)
    wrong = rows | {"g": rows["g"].clone()}
    if fault == "gate":
        wrong["g"][69] = 0
    out, _ = kind.packed(wrong, {}, [0, 70, 75], begin.flip(0) if fault == "state" else begin)
    expected, _ = kind.exact(of_sequence(rows, 0, 70), {}, begin[0])
    assert (out[:70].double() - expected).abs().max() > 10 * bound(expected, torch.float32)


def change_tile(monkeypatch: pytest.MonkeyPatch, **change: int) -> None:
    chosen = table.pieces_tile
    rows = [
        replace(row, tile=lambda asked: chosen(asked)._replace(**change)) if row.name == "pieces" else row
        for row in table.RECURRENCE_KERNELS
    ]
    monkeypatch.setattr(table, "RECURRENCE_KERNELS", tuple(rows))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["delta", "kda"])
def test_outputs_in_the_loop_of_packed_prompts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that begin, a chunk behind a page, few rows and padding in a step: the outputs are those of the kernel behind the
    loop up to rounding, and states and tails, which both forms compute alike, have the same bits."""
    kind = KINDS_BY_NAME[name]
    rows = kind.rows(150, torch.float16)
    expected, _ = kind.exact(rows, {})
    parts = [Part(0, 70, stores=(32,)), Part(1, 17), Part(2, 1), Part(3, 100, stores=(64,)), Part(9, 2, padding=True)]
    bounds = [0, 70, 87, 88, 188]
    found = []
    for outputs_in_loop in (False, True):
        with monkeypatch.context() as patch:
            change_tile(patch, outputs_in_loop=outputs_in_loop)
            steps = StateSteps(kind.spec(rows, {}))
            kind.step(of_sequence(rows, 0, 48), {}, steps.states, steps.begin([Part(3, 48)]))
            steps.end()
            firsts = [48 if part.sequence == 3 else 0 for part in parts]
            given = [of_sequence(rows, first, first + part.rows) for part, first in zip(parts, firsts, strict=True)]
            out = kind.step(joined(given), {}, steps.states, steps.begin(parts))
            for first, (begin, end) in zip(firsts, pairwise(bounds), strict=False):
                wanted = expected[first : first + end - begin]
                assert (out[begin:end].double() - wanted).abs().max() <= bound(wanted, torch.float16)
            assert not out[188:].any()
            found.append((out, steps.states.pages, *steps.states.tails))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=2e-3, atol=2e-3)
    for behind, in_loop in zip(found[0][1:], found[1][1:], strict=True):
        torch.testing.assert_close(in_loop, behind, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("change", [{"outputs_in_loop": True}, {"slabs": 3}], ids=str)
@pytest.mark.parametrize("name", ["delta", "kda", "ssd"])
def test_other_tiles(name: str, change: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Other forms of the same kernels: equal up to rounding, whatever tile is chosen. A slab ends within a sequence."""
    change_tile(monkeypatch, **change)
    monkeypatch.setattr(pieces, "MIN_SLAB", 1)
    kind = KINDS_BY_NAME[name]
    inputs = kind.rows(75, torch.float32)
    weights = kind.weights(torch.float32)
    begin = randn(2, *kind.state, dtype=torch.float32, seed=9)
    out, final = kind.packed(inputs, weights, [0, 70, 75], begin)
    for i, (first, end) in enumerate(((0, 70), (70, 75))):
        expected, states = kind.exact(of_sequence(inputs, first, end), weights, begin[i])
        assert (out[first:end].double() - expected).abs().max() <= bound(expected, torch.float32)
        assert (final[i].double() - states[-1]).abs().max() <= bound(states[-1], torch.float32)


@pytest.mark.parametrize("name", ["delta", "selective_scan", "conv"])
def test_no_rows(name: str) -> None:
    """Nothing is launched, and sequences keep their states."""
    kind = KINDS_BY_NAME[name]
    begin = randn(2, *kind.state, dtype=torch.float32, seed=9)
    out, final = kind.packed(kind.rows(0, torch.float32), kind.weights(torch.float32), [0, 0, 0], begin)
    assert len(out) == 0
    assert torch.equal(final, begin)


@pytest.mark.slow
def test_more_pieces_than_are_read_at_once() -> None:
    """Two sequences of 70 rows in pieces of one row: the second one's begin behind 70 of the first, and end behind 128."""
    kind = KINDS_BY_NAME["lightning"]
    rows = {name: x[:, :1].contiguous() for name, x in kind.rows(140, torch.float32).items()}
    weights = {"log_decay": kind.weights(torch.float32)["log_decay"][:1]}
    steps = StateSteps(kind.spec(rows, weights))
    batch = steps.begin([Part(0, 70), Part(1, 70)])
    listed = [[row, 1, row // 70, -1] for row in range(140)]
    out = kind.step(rows, weights, steps.states, batch._replace(chunks=torch.tensor(listed, dtype=torch.int32)))
    for first in (0, 70):
        expected, _ = kind.exact(of_sequence(rows, first, first + 70), weights, torch.zeros(1, 12, 12))
        assert (out[first : first + 70].double() - expected).abs().max() <= bound(expected, torch.float32)


def test_keys_that_repeat() -> None:
    """The triangular system of equal keys with beta 1 is all ones below the diagonal. Its powers have entries of 1e18, so that
    its inverse by powers would be noise."""
    kind = KINDS_BY_NAME["delta"]
    rows = kind.rows(64, torch.float32)
    rows["k"] = rows["k"][:1].expand(64, -1, -1).contiguous()
    rows["beta"] = torch.ones_like(rows["beta"])
    rows["g"] = torch.zeros_like(rows["g"])
    expected, _ = kind.exact(rows, {})
    out, _ = kind.packed(rows, {}, [0, 64])
    assert (out.double() - expected).abs().max() <= bound(expected, torch.float32)


def test_gradients_of_gates_by_channel() -> None:
    """They are those of PyTorch's form."""
    kind = KINDS_BY_NAME["kda"]
    rows = kind.rows(70, torch.float32)
    begin = randn(1, *kind.state, dtype=torch.float32, seed=9)
    inputs = [*rows.values(), begin]
    for x in inputs:
        x.requires_grad_()
    out, final = kind.packed(rows, {}, [0, 70], begin)
    actual = torch.autograd.grad(out.sin().sum() + final.cos().sum(), inputs)
    expected, states = kind.exact(rows, {}, begin[0])
    wanted = torch.autograd.grad(expected.sin().sum() + states[-1].cos().sum(), inputs)
    for x, y in zip(actual, wanted, strict=True):
        assert (x - y).abs().max() <= 1e-4 * y.abs().max()
