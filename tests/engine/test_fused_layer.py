"""A fused layer computes the equations of its layer, with every place of a norm, every kind of MLP and every multiplier."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import greedy, make_model
from torch import Tensor, nn

from fa_serve.engine import SamplingParams
from fa_serve.engine.fused_layer import FusedLayer, Product
from fa_serve.engine.fusion import fuse
from fa_serve.hf import patch
from fa_serve.ops import Norm

TOKENS = 5
HIDDEN = 12
HEADS = 4
KV_HEADS = 2
DIM = 6
PROMPT = [5, 6, 7, 8, 9, 10, 11]


class Experts(nn.Module):
    """Any MLP that is not a gated unit. It returns the router's choice as well."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.7

    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        assert x.shape == (1, TOKENS, HIDDEN), "modules of transformers take a batch"
        return torch.sin(x) * self.scale, "the router's choice"


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def norm(width: int, seed: int) -> Norm:
    return Norm(draw(width, seed=seed), 1e-6, 1.0)


def make_layer(**changes: Any) -> FusedLayer:
    """A layer of Llama's kind with random weights."""
    rows = (HEADS + 2 * KV_HEADS) * DIM
    parts = {
        "original": lambda *args, **kwargs: ("original", args, kwargs),
        "index": 0,
        "num_heads": HEADS,
        "head_dim": DIM,
        "options": {},
        "before_attention": norm(HIDDEN, 1),
        "after_attention": None,
        "before_mlp": norm(HIDDEN, 2),
        "after_mlp": None,
        "q_norm": None,
        "k_norm": None,
        "qkv": Product(draw(rows, HIDDEN, seed=3), draw(rows, seed=4)),
        "o": Product(draw(HIDDEN, HEADS * DIM, seed=5), None),
        "gate_up": Product(draw(2 * 8, HIDDEN, seed=6), None),
        "down": Product(draw(HIDDEN, 8, seed=7), draw(HIDDEN, seed=8)),
        "activation": "silu",
        "mlp": Experts(),
        "rotary": True,
        "multiplier": 1.0,
    }
    return FusedLayer(**(parts | changes))


def normed(x: Tensor, norm: Norm | None) -> Tensor:
    if norm is None:
        return x
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * (norm.weight + norm.offset)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Not attention, but it depends on each of its inputs."""
    groups = q.shape[1] // k.shape[1]
    return q * k.repeat_interleave(groups, 1).sum(0, keepdim=True) + v.repeat_interleave(groups, 1)


def expected(layer: FusedLayer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The equations of a layer, step by step: -> its output, keys and values."""
    projected = nn.functional.linear(normed(x, layer.before_attention), *layer.qkv)
    q, k, v = projected.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=1)
    if layer.q_norm is not None and layer.q_norm.weight.shape[0] != DIM:
        q = normed(q, layer.q_norm)
        k = normed(k, layer.k_norm)
    q, k, v = (part.reshape(TOKENS, -1, DIM) for part in (q, k, v))
    if layer.q_norm is not None and layer.q_norm.weight.shape[0] == DIM:
        q = normed(q, layer.q_norm)
        k = normed(k, layer.k_norm)
    if layer.rotary:
        q = rotated(q, cos, sin)
        k = rotated(k, cos, sin)
    h = nn.functional.linear(attend(q, k, v).flatten(1), *layer.o)
    x = x + layer.multiplier * normed(h, layer.after_attention)
    h = normed(x, layer.before_mlp)
    if layer.gate_up is None:
        h = torch.sin(h) * 0.7
    else:
        gate, up = nn.functional.linear(h, *layer.gate_up).chunk(2, dim=1)
        h = nn.functional.linear(nn.functional.silu(gate) * up, *layer.down)
    return x + layer.multiplier * normed(h, layer.after_mlp), k, v


AFTER = {"after_attention": norm(HIDDEN, 9), "after_mlp": norm(HIDDEN, 10)}
NO_GATE = {"gate_up": None, "down": None}
LAYERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "no-rotary": {"rotary": False},
    "multiplier": {"multiplier": 0.22},
    "norms-after": AFTER | {"before_attention": None, "before_mlp": None},
    "norms-before-and-after": AFTER,
    "norms-of-heads": {"q_norm": norm(DIM, 11), "k_norm": norm(DIM, 12)},
    "norms-of-all-heads": {"q_norm": norm(HEADS * DIM, 11), "k_norm": norm(KV_HEADS * DIM, 12)},
    "experts": NO_GATE,
    "experts-multiplier": NO_GATE | {"multiplier": 0.22},
    "experts-norms-after": NO_GATE | AFTER | {"before_attention": None, "before_mlp": None},
}


@pytest.mark.parametrize("kind", LAYERS)
def test_a_fused_layer_computes_its_equations(kind: str) -> None:
    layer = make_layer(**LAYERS[kind])
    x = draw(TOKENS, HIDDEN, seed=13)
    angles = draw(TOKENS, DIM // 2, seed=14).repeat(1, 2)
    k_cache = torch.zeros(2, 4, KV_HEADS, DIM, dtype=torch.float64)
    v_cache = torch.zeros_like(k_cache)
    slots = torch.tensor([6, 0, -1, 3, 7])
    wanted, keys, values = expected(layer, x, angles.cos(), angles.sin())
    out = layer.compute(x.clone(), angles.cos(), angles.sin(), k_cache, v_cache, slots, attend)
    torch.testing.assert_close(out, wanted)
    written = slots >= 0
    for cache, rows in ((k_cache, keys), (v_cache, values)):
        flat = cache.flatten(0, 1)
        torch.testing.assert_close(flat[slots[written]], rows[written])
        assert int((flat.abs().sum((1, 2)) > 0).sum()) == 4, "-1 skips a token"


def test_without_a_paged_batch_the_layer_runs_its_own_code() -> None:
    x = draw(1, TOKENS, HIDDEN, seed=13)
    for batch in ({}, {"fa_serve_batch": None}):
        name, args, kwargs = make_layer()(x, "mask", position_embeddings="positions", **batch)
        assert name == "original"
        assert args == (x, "mask")
        assert kwargs == {"position_embeddings": "positions"} | batch


def test_the_model_still_generates_and_so_does_the_engine(make_engine) -> None:
    model = make_model("qwen3")
    reference = make_model("qwen3")
    patch(model)
    fuse(model)
    tokens = greedy(reference, PROMPT, 12)
    engine = make_engine(model=model, max_num_batched_tokens=5)
    params = SamplingParams(max_tokens=12, temperature=0.0)
    assert [c.token_ids for c in engine.generate([PROMPT, PROMPT[::-1]], params)] == [
        tokens,
        greedy(reference, PROMPT[::-1], 12),
    ]
    assert greedy(model, PROMPT, 12) == tokens
