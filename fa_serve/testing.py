"""Helpers for tests of an attention backend: inputs, a paged cache with poisoned memory, and the tolerance rule.

    exact = attention_reference(q.double(), ...)[0]          # float64 oracle
    eager = eager_attention(q, k, v, ...)                    # the same equation in the dtype of the inputs
    assert_matches_reference(actual, exact, eager)

The module also serves tests of backends outside this package. The tolerance rule is the one of FlashAttention's tests: the
error may be at most twice the sum of plain PyTorch's error in the same dtype and one rounding of the largest value. The
tolerance is measured for each input, so a test needs no absolute tolerance. Left out: fixtures and pytest itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fa_serve.backends.calls import AttentionOptions, AttentionTensors
from fa_serve.backends.reference import modified_scores
from fa_serve.launching.plans import Run


def make_qkv(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q (batch, seqlen_q, num_heads, head_dim), k and v (batch, seqlen_k, num_kv_heads, head_dim or head_dim_v).

    They are drawn in float32 and then cast, so that all dtypes start from the same values.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu").to(device=device, dtype=dtype)

    keys = (batch, seqlen_k, num_kv_heads)
    return draw(batch, seqlen_q, num_heads, head_dim), draw(*keys, head_dim), draw(*keys, head_dim_v or head_dim)


def cu_seqlens(lengths: Sequence[int], device: str | torch.device = "cpu") -> Tensor:
    """Offsets of packed sequences: lengths [3, 0, 5] give int32 [0, 3, 3, 8]."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def make_paged(
    keys: Sequence[Tensor], values: Sequence[Tensor], page_size: int, *, spare_pages: int = 3, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A paged cache with these sequences: returns k_cache, v_cache, block_table and seqused_k.

    keys, values: one (length, heads, dim) tensor for each sequence; spare_pages: number of pages that no sequence owns

    Pages are assigned in random order. All memory that no sequence owns is NaN, including the rest of each last page. Table
    entries past the last page of a sequence point far outside the cache, so that a test fails if one is read.
    """
    counts = [-(-len(k) // page_size) for k in keys]
    total = sum(counts) + spare_pages
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()
    sample_k = keys[0]
    sample_v = values[0]
    k_cache = sample_k.new_full((total, page_size, *sample_k.shape[1:]), float("nan"))
    v_cache = sample_v.new_full((total, page_size, *sample_v.shape[1:]), float("nan"))
    table = torch.full((len(keys), max(max(counts, default=0), 1)), 2**28, dtype=torch.int32)
    for row, (k, v, count) in enumerate(zip(keys, values, counts, strict=True)):
        pages = [order.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(pages, dtype=torch.int32)
        for index, page in enumerate(pages):
            tokens = slice(index * page_size, min((index + 1) * page_size, len(k)))
            k_cache[page, : tokens.stop - tokens.start] = k[tokens]
            v_cache[page, : tokens.stop - tokens.start] = v[tokens]
    lengths = torch.tensor([len(k) for k in keys], dtype=torch.int32, device=sample_k.device)
    return k_cache, v_cache, table.to(sample_k.device), lengths


def eager_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    sinks: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Attention as the eager implementation of transformers computes it: in the dtype of the inputs, softmax in float32.

    q: (batch, seqlen_q, num_heads, head_dim); k, v: (batch, seqlen_k, num_kv_heads, head_dim); options: as
    `attention_reference` takes them, so a bool mask keeps where True, and a float mask is added to the scores. Returns
    (batch, seqlen_q, num_heads, head_dim).
    """
    groups = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k = k.repeat_interleave(groups, dim=1)
    v = v.repeat_interleave(groups, dim=1)
    s = modified_scores((q @ k.transpose(-1, -2)) * softmax_scale, **options)
    if sinks is not None:
        s = torch.cat([s, sinks.to(s.dtype)[None, :, None, None].expand(*s.shape[:-1], 1)], dim=-1)
    p = torch.softmax(s, dim=-1, dtype=torch.promote_types(s.dtype, torch.float32)).nan_to_num(0.0).to(v.dtype)
    return (p[..., : k.shape[2]] @ v).transpose(1, 2)


def assert_matches_reference(actual: Tensor, exact: Tensor, eager: Tensor, what: str = "out", roundings: int = 1) -> None:
    """Assert max|actual - exact| <= 2 * (max|eager - exact| + roundings * eps * max|exact|).

    eps belongs to the dtype of `actual`. Gradients in float32 need more than one rounding: eager's dP - delta is exactly 0 in a
    row that sees one key, while a kernel subtracts two sums of head_dim products.
    """
    assert actual.shape == exact.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    assert torch.isfinite(actual).all(), f"{what}: {int((~torch.isfinite(actual)).sum())} values are not finite"
    if actual.numel() == 0:
        return
    exact = exact.double()
    band = roundings * torch.finfo(actual.dtype).eps * exact.abs().max().item()
    error = (actual.double() - exact).abs().max().item()
    allowed = 2 * ((eager.double() - exact).abs().max().item() + band)
    assert error <= allowed, f"{what}: error {error:.3e}, allowed {allowed:.3e}"


def assert_lse_matches(actual: Tensor, exact: Tensor, softcap: float = 0.0) -> None:
    """Assert that two log-sum-exps have the same infinities and differ by at most 2e-3 and 2^-11 of the softcap.

    They are float32 numbers of order 10, and 2e-3 covers scores that are computed from float16 products. A score that is capped
    by the hardware's tanh has a relative error of 2^-11.
    """
    allowed = 2e-3 + 2**-11 * softcap
    exact = exact.to(actual.dtype)
    assert torch.equal(torch.isinf(actual), torch.isinf(exact)), "lse: -inf in other rows than in the reference"
    finite = torch.isfinite(exact)
    if finite.any():
        error = (actual[finite] - exact[finite]).abs().max().item()
        assert error <= allowed, f"lse: error {error:.3e}, allowed {allowed:.3e}"


def run_plan(make: Callable[..., Run], q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor | None]:
    """Plan one attention call with `plan_forward`, `plan_decode` or another maker of plans, and run it.

    given: fields of AttentionTensors and AttentionOptions by name, `cu_seqlens_k` or `seqused_k` for `keys`, and `tiles`.
           Lengths default to those of a dense batch.
    """
    names = {"cu_seqlens_k": "keys", "seqused_k": "keys"}
    tensors = {names.get(name, name): x for name, x in given.items() if names.get(name, name) in AttentionTensors._fields}
    rest = {name: x for name, x in given.items() if names.get(name, name) not in AttentionTensors._fields}
    tiles = {"tiles": rest.pop("tiles")} if "tiles" in rest else {}
    lengths = {"max_seqlen_q": q.shape[1], "max_seqlen_k": k.shape[1]}
    call = AttentionTensors(q, k, v, **tensors)
    result: tuple[Tensor, Tensor | None] = make(call, AttentionOptions(**lengths | rest), **tiles)(call)
    return result
