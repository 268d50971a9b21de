"""The recurrences of linear attention in float64, token by token, and random inputs of each kind for both forms of the ops.

The oracle of a kind takes the inputs of one sequence and a state, and returns the outputs and the states after 0, 1, ... rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rounded_once import randn
from torch import Tensor

from fa_serve import ops
from fa_serve.ops import StateBatch, StateSpec, StateTensors

Inputs = dict[str, Tensor]
"""Rows of tokens by their names, packed: (total, ...)."""


@dataclass(frozen=True)
class Kind:
    """One op, with options.

    rows:    random rows of so many tokens
    weights: tensors that are no rows
    oracle:  (rows, weights, state) of one sequence -> (out, states)
    dense:   the functional form
    paged:   the form of a step
    spec:    what it keeps
    options: of both forms
    """

    name: str
    rows: Callable[[int, torch.dtype], Inputs]
    weights: Callable[[torch.dtype], Inputs]
    oracle: Callable[..., tuple[Tensor, list[Tensor]]]
    dense: Callable[..., tuple[Tensor, Tensor | None]]
    paged: Callable[..., Tensor]
    spec: Callable[[Inputs, Inputs], StateSpec]
    state: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def exact(self, rows: Inputs, weights: Inputs, state: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """Outputs of one sequence, and its states after 0, 1, ... rows, in float64."""
        wide = {name: x.double() for name, x in rows.items()}
        begin = torch.zeros(self.state, dtype=torch.float64) if state is None else state.double()
        return self.oracle(wide, {name: x.double() for name, x in weights.items()}, begin, **self.options)

    def packed(
        self, rows: Inputs, weights: Inputs, cu_seqlens: Sequence[int], state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The functional form of packed sequences."""
        bounds = torch.tensor(cu_seqlens, dtype=torch.int32)
        dense = {name: x[None] for name, x in rows.items()}
        options = {"initial_state": state, "output_final_state": True, "cu_seqlens": bounds}
        out, final = self.dense(**dense, **weights, **options, **self.options)
        assert final is not None
        return out[0], final

    def step(self, rows: Inputs, weights: Inputs, states: StateTensors, batch: StateBatch) -> Tensor:
        """The form of a step."""
        return self.paged(**rows, **weights, states=states, batch=batch, **self.options)

    def page_of(self, state: Tensor) -> Tensor:
        """A state of the functional form as a page has it."""
        return state.mT if self.name.startswith("ssd") else state


def of_sequence(rows: Inputs, first: int, end: int) -> Inputs:
    return {name: x[first:end] for name, x in rows.items()}


def joined(parts: Sequence[Inputs]) -> Inputs:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _delta(rows: Inputs, weights: Inputs, state: Tensor, use_qk_l2norm: bool = False) -> tuple[Tensor, list[Tensor]]:
    heads = rows["v"].shape[1]
    states = [state]
    outs = []
    for q, k, v, g, beta in zip(*(rows[name] for name in ("q", "k", "v", "g", "beta")), strict=True):
        if use_qk_l2norm:
            q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q, k = (x.repeat_interleave(heads // x.shape[0], 0) for x in (q, k))
        decay = g.exp()[:, None, None] if g.dim() == 1 else g.exp()[:, :, None]
        decayed = decay * states[-1]
        u = beta[:, None] * (v - torch.einsum("hkv,hk->hv", decayed, k))
        states.append(decayed + k[:, :, None] * u[:, None])
        outs.append(torch.einsum("hkv,hk->hv", states[-1], q) * q.shape[-1] ** -0.5)
    return torch.stack(outs), states


def _lightning(rows: Inputs, weights: Inputs, state: Tensor) -> tuple[Tensor, list[Tensor]]:
    states = [state]
    outs = []
    for q, k, v in zip(rows["q"], rows["k"], rows["v"], strict=True):
        states.append(weights["log_decay"].exp()[:, None, None] * states[-1] + k[:, :, None] * v[:, None])
        outs.append(torch.einsum("hkv,hk->hv", states[-1], q))
    return torch.stack(outs), states


def _ssd(
    rows: Inputs, weights: Inputs, state: Tensor, dt_softplus: bool, dt_limit: tuple[float, float]
) -> tuple[Tensor, list[Tensor]]:
    heads = rows["x"].shape[1]
    states = [state]
    outs = []
    for x, dt, b, c in zip(*(rows[name] for name in ("x", "dt", "b", "c")), strict=True):
        b, c = (y.repeat_interleave(heads // y.shape[0], 0) for y in (b, c))
        dt = torch.log1p((dt + weights["dt_bias"]).exp()).clamp(*dt_limit)
        decayed = (dt * weights["a"]).exp()[:, None, None] * states[-1]
        states.append(decayed + dt[:, None, None] * x[:, :, None] * b[:, None])
        outs.append(torch.einsum("hpn,hn->hp", states[-1], c) + weights["d"][:, None] * x)
    return torch.stack(outs), states


def _scan(rows: Inputs, weights: Inputs, state: Tensor, dt_softplus: bool) -> tuple[Tensor, list[Tensor]]:
    states = [state]
    outs = []
    for x, dt, b, c, z in zip(*(rows[name] for name in ("x", "dt", "b", "c", "z")), strict=True):
        dt = torch.log1p((dt + weights["dt_bias"]).exp())
        states.append((dt[:, None] * weights["a"]).exp() * states[-1] + (dt * x)[:, None] * b)
        outs.append(((states[-1] * c).sum(-1) + weights["d"] * x) * z / (1 + (-z).exp()))
    return torch.stack(outs), states


def _lru(rows: Inputs, weights: Inputs, state: Tensor) -> tuple[Tensor, list[Tensor]]:
    states = [state]
    for x, log_a in zip(rows["x"], rows["log_a"], strict=True):
        states.append(log_a.exp() * states[-1] + x)
    return torch.stack(states[1:]), states


def _conv(rows: Inputs, weights: Inputs, state: Tensor, activation: str | None) -> tuple[Tensor, list[Tensor]]:
    weight = weights["weight"]
    width = weight.shape[1]
    inputs = torch.cat((state, rows["x"]))
    states = [inputs[i : i + width - 1] for i in range(len(rows["x"]) + 1)]
    outs = []
    for i in range(len(rows["x"])):
        y = (inputs[i : i + width] * weight.T).sum(0)
        if "bias" in weights:
            y = y + weights["bias"]
        outs.append(y / (1 + (-y).exp()) if activation == "silu" else y)
    return torch.stack(outs), states


def _gates(*shape: int, dtype: torch.dtype, seed: int, strength: float) -> Tensor:
    """Log gates between -strength and 0, in float32 or wider."""
    x = torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return -(strength * x**3).to(torch.promote_types(dtype, torch.float32))


def _delta_rows(key_heads: int, heads: int, channels: bool, strength: float) -> Callable[[int, torch.dtype], Inputs]:
    def rows(tokens: int, dtype: torch.dtype) -> Inputs:
        gate = (heads, 12) if channels else (heads,)
        return {
            "q": randn(tokens, key_heads, 12, dtype=dtype, seed=1),
            "k": randn(tokens, key_heads, 12, dtype=dtype, seed=2) / 4,
            "v": randn(tokens, heads, 10, dtype=dtype, seed=3),
            "g": _gates(tokens, *gate, dtype=dtype, seed=4, strength=strength),
            "beta": randn(tokens, heads, dtype=dtype, seed=5).sigmoid(),
        }

    return rows


def _lightning_rows(tokens: int, dtype: torch.dtype) -> Inputs:
    return {name: randn(tokens, 3, 12, dtype=dtype, seed=i) for i, name in enumerate("qkv")}


def _ssd_rows(tokens: int, dtype: torch.dtype) -> Inputs:
    return {
        "x": randn(tokens, 4, 10, dtype=dtype, seed=1),
        "dt": randn(tokens, 4, dtype=dtype, seed=2),
        "b": randn(tokens, 2, 12, dtype=dtype, seed=3),
        "c": randn(tokens, 2, 12, dtype=dtype, seed=4),
    }


def _ssd_weights(dtype: torch.dtype) -> Inputs:
    a = -torch.tensor([0.1, 1.0, 16.0, 3.0], dtype=torch.promote_types(dtype, torch.float32))
    return {"a": a, "d": randn(4, dtype=dtype, seed=5), "dt_bias": randn(4, dtype=dtype, seed=6)}


def _scan_rows(tokens: int, dtype: torch.dtype) -> Inputs:
    wide = {name: randn(tokens, 20, dtype=dtype, seed=i) for i, name in enumerate(("x", "dt", "z"))}
    return wide | {name: randn(tokens, 6, dtype=dtype, seed=i) for i, name in enumerate("bc", 3)}


def _scan_weights(dtype: torch.dtype) -> Inputs:
    a = -torch.arange(1, 121, dtype=torch.promote_types(dtype, torch.float32)).view(20, 6) / 8
    return {"a": a, "d": randn(20, dtype=dtype, seed=5), "dt_bias": randn(20, dtype=dtype, seed=6)}


def _lru_rows(tokens: int, dtype: torch.dtype) -> Inputs:
    return {"x": randn(tokens, 20, dtype=dtype, seed=1), "log_a": _gates(tokens, 20, dtype=dtype, seed=2, strength=30)}


def _no_weights(dtype: torch.dtype) -> Inputs:
    return {}


def _delta_kind(name: str, key_heads: int, heads: int, *, channels: bool, strength: float, norm: bool) -> Kind:
    return Kind(
        name,
        _delta_rows(key_heads, heads, channels, strength),
        _no_weights,
        _delta,
        ops.gated_delta_rule,
        ops.gated_delta_rule_paged,
        lambda rows, weights: ops.gated_delta_rule_state(rows["k"], rows["v"], rows["g"]),
        (heads, 12, 10),
        {"use_qk_l2norm": norm},
    )


def _conv_kind(name: str, width: int, bias: bool, activation: str | None) -> Kind:
    def weights(dtype: torch.dtype) -> Inputs:
        found = {"weight": randn(20, width, dtype=dtype, seed=2)}
        return found | {"bias": randn(20, dtype=dtype, seed=3)} if bias else found

    return Kind(
        name,
        lambda tokens, dtype: {"x": randn(tokens, 20, dtype=dtype, seed=1)},
        weights,
        _conv,
        ops.causal_conv1d,
        ops.causal_conv1d_paged,
        lambda rows, weights: ops.causal_conv1d_state(rows["x"], weights["weight"]),
        (width - 1, 20),
        {"activation": activation},
    )


KINDS = [
    _delta_kind("delta", 2, 4, channels=False, strength=2, norm=True),
    _delta_kind("delta-strong", 2, 2, channels=False, strength=300, norm=False),
    _delta_kind("kda", 2, 2, channels=True, strength=2, norm=True),
    _delta_kind("kda-strong", 1, 2, channels=True, strength=300, norm=False),
    Kind(
        "lightning",
        _lightning_rows,
        lambda dtype: {"log_decay": -torch.tensor([0.01, 0.5, 90.0], dtype=torch.promote_types(dtype, torch.float32))},
        _lightning,
        ops.lightning_attention,
        ops.lightning_attention_paged,
        lambda rows, weights: ops.lightning_attention_state(rows["k"], rows["v"]),
        (3, 12, 12),
    ),
    Kind(
        "ssd",
        _ssd_rows,
        _ssd_weights,
        _ssd,
        ops.ssd,
        ops.ssd_paged,
        lambda rows, weights: ops.ssd_state(rows["x"], rows["b"]),
        (4, 10, 12),
        {"dt_softplus": True, "dt_limit": (0.1, 4.0)},
    ),
    Kind(
        "selective_scan",
        _scan_rows,
        _scan_weights,
        _scan,
        ops.selective_scan,
        ops.selective_scan_paged,
        lambda rows, weights: ops.selective_scan_state(rows["x"], rows["b"]),
        (20, 6),
        {"dt_softplus": True},
    ),
    Kind(
        "rg_lru",
        _lru_rows,
        _no_weights,
        _lru,
        ops.rg_lru,
        ops.rg_lru_paged,
        lambda rows, weights: ops.rg_lru_state(rows["x"]),
        (20,),
    ),
    _conv_kind("conv", 4, True, "silu"),
    _conv_kind("conv-plain", 3, False, None),
]
KINDS_BY_NAME = {kind.name: kind for kind in KINDS}
