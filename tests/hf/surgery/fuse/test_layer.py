"""One fused layer against the equation of a decoder layer, for each place where a norm may stand and each kind of MLP.

Whole models are compared in test_fusion.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from rank_threads import run_ranks
from torch import Tensor, nn

from fa_serve import ops
from fa_serve.hf.surgery.fuse.layer import FusedLayer, HeadsAttention, LayerStep, cos_and_sin
from fa_serve.hf.surgery.fuse.parts import FusedProduct

HIDDEN = 24
NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_DIM = 8
TOTAL = 5
WIDTH = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64) / 4


def rms(x: Tensor, norm: ops.Norm | None) -> Tensor:
    if norm is None:
        return x
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + norm.eps) * (norm.weight + norm.offset)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Any function of all three that mixes tokens."""
    groups = q.shape[1] // k.shape[1]
    return q * k.repeat_interleave(groups, dim=1) + v.repeat_interleave(groups, dim=1).cumsum(0)


def make_layer(**fields: object) -> FusedLayer:
    parts: dict[str, object] = dict.fromkeys(("before_attention", "after_attention", "before_mlp", "after_mlp"))
    heads: dict[str, object] = {
        "num_heads": NUM_HEADS,
        "head_dim": HEAD_DIM,
        "qkv": FusedProduct(draw(WIDTH, HIDDEN), draw(WIDTH)),
        "q_norm": None,
        "k_norm": None,
        "tables": "twice",
    }
    heads |= {name: fields.pop(name) for name in heads.keys() & fields.keys()}
    parts |= {
        "original": lambda hidden: hidden + 1,
        "index": 0,
        "options": {},
        "attention": HeadsAttention(**heads),
        "o": FusedProduct(draw(HIDDEN, NUM_HEADS * HEAD_DIM), None),
        "gate_up": FusedProduct(draw(2 * 16, HIDDEN), None),
        "down": FusedProduct(draw(HIDDEN, 16), None),
        "activation": "silu",
        "mlp": nn.Identity(),
        "multiplier": 1.0,
    }
    return FusedLayer(**parts | fields)


def equation(layer: FusedLayer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output, keys and values of a decoder layer."""

    def norm_heads(y: Tensor, norm: ops.Norm | None) -> Tensor:
        if norm is not None and norm.weight.shape[0] != HEAD_DIM:
            y = rms(y, norm)
            norm = None
        return rms(y.view(TOTAL, -1, HEAD_DIM), norm)

    attention = layer.attention
    assert isinstance(attention, HeadsAttention)
    widths = [NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM]
    q, k, v = nn.functional.linear(rms(x, layer.before_attention), *attention.qkv[:2]).split(widths, dim=1)
    q = norm_heads(q, attention.q_norm)
    k = norm_heads(k, attention.k_norm)
    v = v.view(TOTAL, -1, HEAD_DIM)
    if attention.tables is not None:
        q = rotate(q, cos, sin)
        k = rotate(k, cos, sin)
    h = nn.functional.linear(attend(q, k, v).flatten(1), *layer.o[:2])
    x = x + layer.multiplier * rms(h, layer.after_attention)
    if layer.gate_up is None:
        h = layer.mlp(rms(x, layer.before_mlp))
    else:
        gate, up = nn.functional.linear(rms(x, layer.before_mlp), *layer.gate_up[:2]).chunk(2, dim=1)
        h = nn.functional.linear(nn.functional.silu(gate) * up, *layer.down[:2])
    return x + layer.multiplier * rms(h, layer.after_mlp), k, v


def norm(width: int = HIDDEN, offset: float = 0.0) -> ops.Norm:
    return ops.Norm(draw(width), 1e-6, offset)


CASES = {
    "before": lambda: {"before_attention": norm(), "before_mlp": norm()},
    "after": lambda: {"after_attention": norm(), "after_mlp": norm()},
    "both, weights around 0": lambda: {
        name: norm(offset=1.0) for name in ("before_attention", "after_attention", "before_mlp", "after_mlp")
    },
    "norms of each head": lambda: {"q_norm": norm(HEAD_DIM), "k_norm": norm(HEAD_DIM)},
    "norms of all heads": lambda: {"q_norm": norm(NUM_HEADS * HEAD_DIM), "k_norm": norm(NUM_KV_HEADS * HEAD_DIM)},
    "not rotary": lambda: {"tables": None},
    "multiplier": lambda: {"multiplier": 0.25},
    "another mlp": lambda: {"gate_up": None, "down": None, "mlp": nn.Tanh(), "before_mlp": norm()},
    "another mlp, norm after": lambda: {"gate_up": None, "down": None, "mlp": nn.Tanh(), "after_mlp": norm()},
}


def test_tables_may_have_each_angle_once() -> None:
    """As gpt-oss gives them."""
    angles = draw(TOTAL, HEAD_DIM // 2)
    cos = angles.cos()
    sin = angles.sin()
    caches = [torch.zeros(2, 4, NUM_KV_HEADS, HEAD_DIM, dtype=torch.float64) for _ in range(2)]
    x = draw(TOTAL, HIDDEN)
    layer = make_layer(tables="once")
    expected, _, _ = equation(layer, x, cos.repeat(1, 2), sin.repeat(1, 2))
    step = LayerStep(cos, sin, *caches, torch.arange(TOTAL), attend, False, {})
    torch.testing.assert_close(layer.compute(x.clone(), step), expected)


@pytest.mark.parametrize("case", CASES)
def test_a_fused_layer_computes_the_equation(case) -> None:
    torch.manual_seed(0)
    layer = make_layer(**CASES[case]())
    x = draw(TOTAL, HIDDEN)
    angles = draw(TOTAL, HEAD_DIM // 2).repeat(1, 2)
    cos = angles.cos()
    sin = angles.sin()
    k_cache = torch.zeros(2, 4, NUM_KV_HEADS, HEAD_DIM, dtype=torch.float64)
    v_cache = torch.zeros_like(k_cache)
    slots = torch.tensor([7, 0, 3, -1, 4])  # the fourth token is not stored
    expected, k, v = equation(layer, x, cos, sin)
    actual = layer.compute(x.clone(), LayerStep(cos, sin, k_cache, v_cache, slots, attend, False, {}))
    torch.testing.assert_close(actual, expected)
    stored = slots[slots >= 0]
    torch.testing.assert_close(k_cache.flatten(0, 1)[stored], k[slots >= 0])
    torch.testing.assert_close(v_cache.flatten(0, 1)[stored], v[slots >= 0])
    assert not k_cache.flatten(0, 1)[[1, 2, 5, 6]].any()


def test_a_call_without_a_paged_batch_runs_the_layers_own_code() -> None:
    assert torch.equal(make_layer()(torch.zeros(1, 2, HIDDEN)), torch.ones(1, 2, HIDDEN))


def test_complex_embeddings_are_cosines_and_sines() -> None:
    angles = draw(1, TOTAL, HEAD_DIM // 2)
    cos, sin = cos_and_sin(torch.polar(torch.ones_like(angles), angles))
    torch.testing.assert_close(cos, angles[0].cos())
    torch.testing.assert_close(sin, angles[0].sin())
    wide = angles.cos(), angles.sin()
    assert all(torch.equal(x, y[0]) for x, y in zip(cos_and_sin(wide), wide, strict=True))


@pytest.mark.parametrize("case", ["before", "after", "both, weights around 0", "multiplier", "another mlp"])
def test_ranks_that_add_up_compute_the_equation(case) -> None:
    """Each rank has a part of the columns of the output and the down projection; sums over ranks apply norms at once."""
    torch.manual_seed(0)
    layer = make_layer(**CASES[case]())
    x = draw(TOTAL, HIDDEN)
    angles = draw(TOTAL, HEAD_DIM // 2).repeat(1, 2)
    cos = angles.cos()
    sin = angles.sin()
    expected, _, _ = equation(layer, x, cos, sin)

    def share(product: FusedProduct | None, rank: int, all_reduce: Any) -> FusedProduct | None:
        """All inputs, of which this rank's weights take some."""
        if product is None:
            return None
        keep = torch.arange(product.weight.shape[1]) % 2 == rank
        return FusedProduct(product.weight * keep, None, all_reduce)

    def compute(rank: int, all_reduce: Any) -> Tensor:
        caches = [torch.zeros(2, 4, NUM_KV_HEADS, HEAD_DIM, dtype=torch.float64) for _ in range(2)]
        own = replace(layer, o=share(layer.o, rank, all_reduce), down=share(layer.down, rank, all_reduce))
        return own.compute(x.clone(), LayerStep(cos, sin, *caches, torch.arange(TOTAL), attend, False, {}))

    for actual in run_ranks(2, compute):
        torch.testing.assert_close(actual, expected)
