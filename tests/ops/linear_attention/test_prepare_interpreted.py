"""What is prepared of a piece before its state is known, in Triton's interpreter, against PyTorch in float64."""

from __future__ import annotations

import pytest
import torch
from linear_attention_cases import KINDS_BY_NAME

from fa_serve.ops.linear_attention import pieces, run
from fa_serve.ops.linear_attention.pieces import PieceOperands


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[PieceOperands]:
    """The operands of each launch. Their memory holds NaN at first."""
    found: list[PieceOperands] = []
    allocate = pieces._allocate_operands

    def keeping(*args: object) -> PieceOperands:
        found.append(allocate(*args))  # type: ignore[arg-type]
        for x in found[-1]:
            if x is not None:
                x.fill_(torch.nan)
        return found[-1]

    monkeypatch.setattr(run, "runs_triton", lambda device: True)
    monkeypatch.setattr(pieces, "_allocate_operands", keeping)
    return found


def test_delta_rule(prepared: list[PieceOperands]) -> None:
    """20 rows, of which the triangular system is solved; behind them, and behind keys of 12 and values of 10 numbers, zeros."""
    kind = KINDS_BY_NAME["delta-strong"]
    rows = kind.rows(20, torch.float32)
    rows["g"] /= 300
    kind.packed(rows, {}, [0, 20])
    (operands,) = prepared
    assert operands.w is not None
    head = 1
    q, k, v, g, beta = (rows[name][:, head].double() for name in ("q", "k", "v", "g", "beta"))
    sums = g.cumsum(0)
    between = (sums[:, None] - sums).clamp(max=0).exp()
    inverse = torch.linalg.inv(torch.eye(20, dtype=torch.float64) + (beta[:, None] * (k @ k.T) * between).tril(-1))
    for actual, expected in (
        (operands.keys[0, head], k),
        (operands.queries[0, head], q * 12**-0.5),
        (operands.attn[0, head], (q @ k.T * 12**-0.5 * between).tril()),
        (operands.w[0, head], inverse @ ((beta * sums.exp())[:, None] * k)),
        (operands.u[0, head].T, inverse @ (beta[:, None] * v)),
    ):
        n, m = expected.shape
        assert (actual[:n, :m] - expected).abs().max() <= 1e-4 * expected.abs().max()
        assert not actual[n:].any()
        assert not actual[:n, m:].any()
    decays = operands.decays[0, head].view(2, 64)[:, :20]
    assert (decays - torch.stack((sums, sums[-1] - sums)).exp()).abs().max() <= 1e-4


def test_weights_of_ssd(prepared: list[PieceOperands]) -> None:
    """They are in the products and the decays, so that values stay as they are."""
    kind = KINDS_BY_NAME["ssd"]
    rows = kind.rows(20, torch.float16)
    weights = kind.weights(torch.float16)
    kind.packed(rows, weights, [0, 20])
    (operands,) = prepared
    head = 3
    assert torch.equal(operands.u[0, head, :10, :20].T, rows["x"][:, head])
    dt = torch.nn.functional.softplus(rows["dt"][:, head].double() + weights["dt_bias"][head]).clamp(0.1, 4.0)
    sums = (dt * weights["a"][head]).cumsum(0)
    b, c = (rows[name][:, 1].double() for name in ("b", "c"))
    expected = (c @ b.T * (sums[:, None] - sums).clamp(max=0).exp() * dt).tril()
    assert (operands.attn[0, head, :20, :20] - expected).abs().max() <= 1e-3 * expected.abs().max()
    decays = operands.decays[0, head].view(2, 64)[:, :20]
    assert (decays - torch.stack((sums.exp(), (sums[-1] - sums).exp() * dt))).abs().max() <= 1e-5


def test_gates_by_channel(prepared: list[PieceOperands]) -> None:
    """Keys fade to the end of the piece and queries from its begin, channel by channel."""
    kind = KINDS_BY_NAME["kda-strong"]
    rows = kind.rows(20, torch.float32)
    kind.packed(rows, {}, [0, 20])
    (operands,) = prepared
    sums = rows["g"][:, 1].double().cumsum(0)
    for actual, expected in (
        (operands.keys[0, 1], rows["k"][:, 0] * (sums[-1] - sums).exp()),
        (operands.queries[0, 1], rows["q"][:, 0] * 12**-0.5 * sums.exp()),
    ):
        assert (actual[:20, :12] - expected).abs().max() <= 1e-4 * expected.abs().max()
        assert not actual[20:].any()
    assert (operands.decays[0, 1, :12] - sums[-1].exp()).abs().max() <= 1e-5
