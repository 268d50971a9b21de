"""The functional forms compute what the functions of transformers' models compute, in their layouts."""

from __future__ import annotations

import torch
from linear_attention_cases import KINDS_BY_NAME
from rounded_once import randn
from transformers.models.jamba.modeling_jamba import mamba_selective_scan
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, torch_chunk_gated_delta_rule

from fa_serve import ops


def rows_of(name: str, tokens: int) -> dict[str, torch.Tensor]:
    """Two equal sequences of a kind's inputs, (2, tokens, ...)."""
    return {key: x.view(2, tokens, *x.shape[1:]) for key, x in KINDS_BY_NAME[name].rows(2 * tokens, torch.float32).items()}


def close(ours: tuple[torch.Tensor, torch.Tensor | None], theirs: tuple[torch.Tensor, torch.Tensor]) -> None:
    for x, y in zip(ours, theirs, strict=True):
        assert x is not None
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def test_gated_delta_rule() -> None:
    rows = rows_of("delta", 70)
    repeated = {key: x.repeat_interleave(2, 2) if key in "qk" else x for key, x in rows.items()}
    state = randn(2, 4, 12, 10, dtype=torch.float32, seed=8)
    theirs = torch_chunk_gated_delta_rule(
        *repeated.values(), initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    close(ops.gated_delta_rule(**rows, use_qk_l2norm=True, initial_state=state, output_final_state=True), theirs)


def test_kimi_delta_attention() -> None:
    rows = rows_of("kda", 70)
    state = randn(2, 2, 12, 10, dtype=torch.float32, seed=8)
    theirs = chunk_kimi_delta_attention(
        *rows.values(), initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    close(ops.gated_delta_rule(**rows, use_qk_l2norm=True, initial_state=state, output_final_state=True), theirs)


def test_mamba2() -> None:
    rows = rows_of("ssd", 70)
    weights = KINDS_BY_NAME["ssd"].weights(torch.float32)
    state = randn(2, 4, 10, 12, dtype=torch.float32, seed=8)
    x, dt, b, c = rows.values()
    theirs = mamba2_chunk_scan(
        x,
        dt,
        weights["a"],
        b,
        c,
        chunk_size=32,
        D=weights["d"],
        dt_bias=weights["dt_bias"],
        initial_states=state,
        dt_softplus=True,
        dt_limit=(0.1, 4.0),
        return_final_states=True,
    )
    options = {"dt_softplus": True, "dt_limit": (0.1, 4.0), "initial_state": state, "output_final_state": True}
    close(ops.ssd(**rows, **weights, **options), theirs)  # type: ignore[arg-type]


def test_mamba() -> None:
    """transformers' scan begins without a state."""
    rows = rows_of("selective_scan", 30)
    weights = KINDS_BY_NAME["selective_scan"].weights(torch.float32)
    x, dt, z, b, c = (y.mT for y in rows.values())
    theirs = mamba_selective_scan(
        x, dt, weights["a"], b, c, weights["d"], z, weights["dt_bias"], delta_softplus=True, return_last_state=True
    )
    out, state = ops.selective_scan(**rows, **weights, dt_softplus=True, output_final_state=True)
    close((out.mT, state), theirs)


def test_short_convolution() -> None:
    rows = rows_of("conv", 9)
    weights = KINDS_BY_NAME["conv"].weights(torch.float32)
    theirs = causal_conv1d_fn(rows["x"].mT, weights["weight"], weights["bias"], activation="silu")
    out, _ = ops.causal_conv1d(**rows, **weights, activation="silu")
    torch.testing.assert_close(out.mT, theirs, rtol=1e-5, atol=1e-5)
