"""Layers, steps and a plain computation of them, for the persistent kernel of a decoding step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fa_serve import ops
from fa_serve.ops.decode_step.stacked import StackLayer, StackOptions, StackStep

PAGE_SIZE = 4


@dataclass(frozen=True)
class StepCase:
    """A small model and a step: q_lens and kv_lens of each sequence, kv_lens with the tokens of the step."""

    q_lens: Sequence[int] = (1,)
    kv_lens: Sequence[int] = (9,)
    hidden: int = 48
    intermediate: int = 72
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    rotary_dim: int = 16
    head_norms: bool = False
    qkv_bias: bool = False
    layers: int = 2
    dtype: torch.dtype = torch.float32
    activation: str = "silu"
    multiplier: float = 1.0
    padded: frozenset[int] = field(default_factory=frozenset)

    @property
    def total(self) -> int:
        return sum(self.q_lens)

    def options(self) -> StackOptions:
        return StackOptions(
            self.num_heads, self.head_dim, self.rotary_dim, self.activation, self.multiplier, self.head_dim**-0.5
        )


def random(case: StepCase, *shape: int, generator: torch.Generator, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=generator) * scale).to(case.dtype)


def make_layers(case: StepCase, seed: int = 0) -> list[StackLayer]:
    generator = torch.Generator().manual_seed(seed)

    def weights(rows: int, columns: int) -> Tensor:
        return random(case, rows, columns, generator=generator, scale=columns**-0.5)

    def norm(width: int) -> ops.Norm:
        return ops.Norm(1 + random(case, width, generator=generator, scale=0.1), 1e-5)

    rows = (case.num_heads + 2 * case.num_kv_heads) * case.head_dim
    return [
        StackLayer(
            qkv=weights(rows, case.hidden),
            qkv_bias=random(case, rows, generator=generator) if case.qkv_bias else None,
            o=weights(case.hidden, case.num_heads * case.head_dim),
            gate_up=weights(2 * case.intermediate, case.hidden),
            down=weights(case.hidden, case.intermediate),
            before_attention=norm(case.hidden),
            before_mlp=norm(case.hidden),
            q_norm=norm(case.head_dim) if case.head_norms else None,
            k_norm=norm(case.head_dim) if case.head_norms else None,
        )
        for _ in range(case.layers)
    ]


def make_step(case: StepCase, seed: int = 1) -> tuple[Tensor, StackStep]:
    """The residual stream and the step. Pages are shuffled, and what no sequence has written is NaN."""
    generator = torch.Generator().manual_seed(seed)
    widest = max(1, *(-(-length // PAGE_SIZE) for length in case.kv_lens))
    pages = torch.randperm(widest * len(case.q_lens) + 1, generator=generator).to(torch.int32)
    table = pages[1:].view(len(case.q_lens), widest).contiguous()
    slots: list[int] = []
    written = torch.zeros(len(pages) * PAGE_SIZE, dtype=torch.bool)
    for sequence, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        places = [int(table[sequence, i // PAGE_SIZE]) * PAGE_SIZE + i % PAGE_SIZE for i in range(kv_len)]
        if sequence in case.padded:
            slots += [-1] * q_len
            continue
        written[places[: kv_len - q_len]] = True
        slots += places[kv_len - q_len :]
    caches = []
    for _ in range(case.layers):
        pair = []
        for _ in range(2):
            cache = random(case, len(pages), PAGE_SIZE, case.num_kv_heads, case.head_dim, generator=generator)
            cache.view(-1, case.num_kv_heads, case.head_dim)[~written] = float("nan")
            pair.append(cache)
        caches.append((pair[0], pair[1]))
    angles = torch.rand(case.total, max(case.rotary_dim // 2, 1), generator=generator) * 6
    step = StackStep(
        cos=angles.cos().to(case.dtype).repeat(1, 2),
        sin=angles.sin().to(case.dtype).repeat(1, 2),
        caches=caches,
        slot_mapping=torch.tensor(slots),
        block_table=table,
        seqused_k=torch.tensor([0 if i in case.padded else n for i, n in enumerate(case.kv_lens)], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, *case.q_lens]).cumsum(0).to(torch.int32),
        max_seqlen_q=max(case.q_lens),
    )
    return random(case, case.total, case.hidden, generator=generator), step


def _normed(x: Tensor, norm: ops.Norm) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * (norm.weight.double() + norm.offset)


def _rotated(x: Tensor, step: StackStep, rotary_dim: int) -> Tensor:
    """x: (total, heads, dim)"""
    if not rotary_dim:
        return x
    half = rotary_dim // 2
    cos, sin = (table[:, None, :half].double() for table in (step.cos, step.sin))
    first = x[..., :half]
    second = x[..., half:rotary_dim]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., rotary_dim:]], -1)


def compute_plainly(case: StepCase, layers: Sequence[StackLayer], x: Tensor, step: StackStep) -> Tensor:
    """The output in float64, with keys and values of this step written to the caches."""
    x = x.double()
    for layer, caches in zip(layers, step.caches, strict=True):
        h = _normed(x, layer.before_attention) @ layer.qkv.double().T
        h = h if layer.qkv_bias is None else h + layer.qkv_bias.double()
        parts = [case.num_heads, case.num_kv_heads, case.num_kv_heads]
        q, k, v = h.view(case.total, -1, case.head_dim).split(parts, 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = _normed(q, layer.q_norm), _normed(k, layer.k_norm)
        q, k = (_rotated(part, step, case.rotary_dim) for part in (q, k))
        out = torch.cat([_attended(case, i, q, k, v, caches, step) for i in range(len(case.q_lens))])
        x = x + case.multiplier * (out.flatten(1) @ layer.o.double().T)
        gate, up = (_normed(x, layer.before_mlp) @ layer.gate_up.double().T).chunk(2, 1)
        x = x + case.multiplier * (ops.act_and_mul(torch.cat([gate, up], 1), case.activation) @ layer.down.double().T)
    return x


def _attended(
    case: StepCase, sequence: int, q: Tensor, k: Tensor, v: Tensor, caches: tuple[Tensor, Tensor], step: StackStep
) -> Tensor:
    """(q_len, num_heads, head_dim) of one sequence, zeros for padding."""
    first = sum(case.q_lens[:sequence])
    rows = slice(first, first + case.q_lens[sequence])
    if sequence in case.padded:
        return torch.zeros_like(q[rows])
    kv_len = case.kv_lens[sequence]
    old = kv_len - case.q_lens[sequence]
    places = torch.arange(kv_len)
    slots = step.block_table[sequence, places // PAGE_SIZE].long() * PAGE_SIZE + places % PAGE_SIZE
    whole = []
    for new, cache in ((k, caches[0]), (v, caches[1])):
        flat = cache.view(-1, *cache.shape[2:])
        flat[slots[old:]] = new[rows].to(cache.dtype)
        whole.append(flat[slots].double().repeat_interleave(case.num_heads // case.num_kv_heads, 1))
    scores = torch.einsum("qhd,khd->hqk", q[rows], whole[0]) * case.head_dim**-0.5
    hidden = places[None, :] > places[old:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), whole[1])


def tensors_of(layers: Sequence[StackLayer], step: StackStep) -> list[Tensor]:
    """All that the kernel finds by the addresses of its table."""
    weights = [x for layer in layers for x in layer.weights().values() if x is not None]
    return weights + [cache for pair in step.caches for cache in pair]
