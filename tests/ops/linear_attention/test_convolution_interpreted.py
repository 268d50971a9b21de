"""The kernel of short convolutions in Triton's interpreter, against float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from linear_attention_cases import KINDS_BY_NAME, Kind, joined, of_sequence
from rounded_once import DTYPES, assert_rounded_once, dtype_id, randn
from state_steps import Part, StateSteps

from fa_serve.ops.linear_attention import convolution, run


@pytest.fixture(autouse=True, params=[False, True], ids=["blocks", "rows"])
def kernels(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Blocks of rows, and rows with their own programs."""
    monkeypatch.setattr(run, "runs_triton", lambda device: True)
    monkeypatch.setattr(convolution, "takes_single_rows", lambda total, arch: request.param)


every_kind = pytest.mark.parametrize(
    "kind", [KINDS_BY_NAME[name] for name in ("conv", "conv-plain")], ids=lambda kind: kind.name
)


@every_kind
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_steps(kind: Kind, dtype: torch.dtype) -> None:
    """A chunk with states within it, a chunk from a page, single tokens over the end of a page, and rejected drafts."""
    rows = kind.rows(130, dtype)
    weights = kind.weights(dtype)
    expected, states = kind.exact(rows, weights)
    table = StateSteps(kind.spec(rows, weights))
    done = 0
    for count, dropped, stores in (
        (64, 0, (16, 48)),
        (31, 0, ()),
        (1, 0, ()),
        (1, 0, ()),
        (16, 15, ()),
        (16, 0, ()),
        (3, 0, ()),
    ):
        batch = table.begin([Part(9, 2, padding=True), Part(0, count, dropped, stores), Part(3, 0, padding=True), Part(4, 1)])
        own = of_sequence(rows, done, done + count)
        out = kind.step(joined([of_sequence(rows, 0, 2), own, of_sequence(rows, 0, 3)]), weights, table.states, batch)
        assert_rounded_once(out[2 : 2 + count], expected[done : done + count])
        assert not out[:2].any(), "padding"
        assert not out[sum(part.rows for part in table.parts) :].any(), "rows behind the last sequence"
        for position, page in table.sequences[0].kept.items():
            assert torch.equal(table.states.pages[page].double(), states[position])
        table.end()
        done += count - dropped


@every_kind
def test_packed_sequences(kind: Kind) -> None:
    """With states, and with sequences that are shorter than the reach of the convolution."""
    bounds = [0, 1, 1, 3, 40]
    rows = kind.rows(42, torch.float32)
    weights = kind.weights(torch.float32)
    begin = randn(4, *kind.state, dtype=torch.float32, seed=9)
    out, final = kind.packed(rows, weights, bounds, begin)
    for i, (first, end) in enumerate(pairwise(bounds)):
        if first == end:
            assert torch.equal(final[i], begin[i])
            continue
        expected, states = kind.exact(of_sequence(rows, first, end), weights, begin[i])
        assert_rounded_once(out[first:end], expected)
        assert torch.equal(final[i].double(), states[-1])


def test_more_sequences_than_are_read_at_once() -> None:
    """140 sequences of one row or none."""
    kind = KINDS_BY_NAME["conv-plain"]
    bounds = [0, *(i // 2 for i in range(1, 141))]
    rows = kind.rows(70, torch.float32)
    weights = kind.weights(torch.float32)
    begin = randn(140, *kind.state, dtype=torch.float32, seed=9)
    out, _ = kind.packed(rows, weights, bounds, begin)
    for i, (first, end) in enumerate(pairwise(bounds)):
        if first < end:
            assert_rounded_once(out[first:end], kind.exact(of_sequence(rows, first, end), weights, begin[i])[0])


def test_a_view_with_channels_first() -> None:
    """transformers' layout, (batch, channels, seqlen), seen as (batch, seqlen, channels); and a batch of it."""
    kind = KINDS_BY_NAME["conv"]
    weights = kind.weights(torch.float32)
    x = randn(2, 20, 9, dtype=torch.float32, seed=3).mT
    out, final = kind.dense(x=x, **weights, output_final_state=True, **kind.options)
    assert final is not None
    for i in range(2):
        expected, states = kind.exact({"x": x[i]}, weights)
        assert_rounded_once(out[i], expected)
        assert torch.equal(final[i].double(), states[-1])


def test_weights_of_any_strides() -> None:
    kind = KINDS_BY_NAME["conv"]
    weights = {name: torch.stack([w, w], -1)[..., 0] for name, w in kind.weights(torch.float32).items()}
    assert not any(w.is_contiguous() for w in weights.values())
    x = kind.rows(9, torch.float32)["x"]
    out, _ = kind.dense(x=x[None], **weights, **kind.options)
    assert_rounded_once(out[0], kind.exact({"x": x}, weights)[0])


def test_gradients() -> None:
    kind = KINDS_BY_NAME["conv"]
    rows = kind.rows(9, torch.float32)
    weights = kind.weights(torch.float32)
    inputs = [*rows.values(), *weights.values()]
    for x in inputs:
        x.requires_grad_()
    out, _ = kind.packed(rows, weights, [0, 4, 9])
    actual = torch.autograd.grad(out.sin().sum(), inputs)
    parts = [kind.exact(of_sequence(rows, first, end), weights)[0] for first, end in ((0, 4), (4, 9))]
    wanted = torch.autograd.grad(torch.cat(parts).sin().sum(), inputs)
    for x, y in zip(actual, wanted, strict=True):
        torch.testing.assert_close(x, y)
