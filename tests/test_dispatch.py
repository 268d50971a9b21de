"""Which calls share a plan, and how many plans are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from api_calls import CU, FLAT, PAGED, VARLEN, K, Q, V

import fa_serve
from fa_serve import dispatch
from fa_serve.backends import Backend, select_backend
from fa_serve.dispatch import _has_whole_rows
from fa_serve.launching.plans import PlanTable
from fa_serve.spec import AttentionSpec, Precision
from fa_serve.testing import make_qkv


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> PlanTable:
    """A table of plans for this test alone, so that no earlier test has already had a call checked."""
    table = PlanTable()
    monkeypatch.setattr(dispatch, "PLANS", table)
    return table


ALIKE: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "scale": {"softmax_scale": 2.0},
    "window": {"window_size": (1, 0)},
    "softcap": {"softcap": 0.5},
    "alibi": {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.1, 0.2, 0.3])},
    "chunk": {"causal": True, "attention_chunk": 3},
    "sinks": {"sinks": torch.tensor([3.0, -1.0, 0.5, 2.0])},
    "lse": {"return_lse": True},
    "precision": {"precision": "fp8", "backend": "reference"},
    "blocks": {"block_mask": fa_serve.BlockLists.from_blocks(torch.zeros(1, 1, 1, 1) > 0)},
    "backend": {"backend": "reference"},
    "out": {"out": torch.zeros(10, 4, 16)},
    "strides": {"q": torch.arange(640.0).sin().view(16, 4, 10).permute(2, 1, 0)},
    "rows": {"q": torch.cat([FLAT["q"], FLAT["q"][:1]])},
}


@pytest.mark.every_case
@pytest.mark.parametrize("change", ALIKE)
@pytest.mark.parametrize("call", [VARLEN, (PAGED[0], PAGED[1] | {"causal": False})], ids=["varlen", "paged"])
def test_a_call_is_not_taken_for_another(
    call: tuple[Callable[..., Any], dict[str, Any]], change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is remembered of a call serves those that differ in addresses and contents alone."""
    function, arguments = call
    monkeypatch.setattr(dispatch, "PLANS", PlanTable())
    changed = function(**(arguments | ALIKE[change]))
    dispatch.PLANS.clear()
    plain = function(**arguments)
    assert torch.equal(function(**(arguments | {"q": arguments["q"].clone()})), plain)
    assert len(dispatch.PLANS) == 1
    after = function(**(arguments | ALIKE[change]))
    assert len(dispatch.PLANS) == 2
    for x, y in zip(*((r if isinstance(r, tuple) else (r,)) for r in (changed, after)), strict=True):
        assert torch.equal(x, y)


def test_gaps_between_lengths_are_seen_through_what_is_remembered() -> None:
    """The same key stands for lengths side by side and for every other number of them."""
    wide = torch.stack([CU["cu_seqlens_q"], torch.full((3,), 99, dtype=torch.int32)], 1)[:, 0]
    expected = fa_serve.attention_varlen(**FLAT, **CU)
    assert torch.equal(fa_serve.attention_varlen(**FLAT, **(CU | {"cu_seqlens_q": wide})), expected)


def test_the_number_of_plans_is_limited(plans: PlanTable) -> None:
    plans.max_plans = 3
    for seqlen in range(1, 9):
        fa_serve.attention(Q[:, :1].expand(2, seqlen, 4, 16), K, V)
        assert 1 <= len(plans) <= 3


def growing(keys: int, batch: int = 2, **changes: Any) -> dict[str, torch.Tensor]:
    """One query per sequence behind a cache (batch, heads, keys, dim), as transformers' growing cache holds it."""
    generator = torch.Generator().manual_seed(keys)
    dims = {"dim": 16, "dim_v": 16, "kv_heads": 2} | changes
    q = torch.randn(batch, 4, 1, 16, generator=generator)
    k = torch.randn(batch, dims["kv_heads"], keys, dims["dim"], generator=generator)
    v = torch.randn(batch, dims["kv_heads"], keys, dims["dim_v"], generator=generator)
    return {name: x.transpose(1, 2) for name, x in (("q", q), ("k", k), ("v", v))}


def test_a_growing_cache_is_planned_once(plans: PlanTable) -> None:
    for keys in (40, 41, 50, 63):
        call = growing(keys)
        mask = torch.ones(2, 1, 1, keys, dtype=torch.bool)
        mask[0, ..., :7] = False
        slopes = torch.linspace(0.1, 1.0, 4)
        chunk = {"attention_chunk": 16, "causal": True}
        for extra in ({}, {"mask": mask}, {"window_size": (20, 0)}, chunk, {"alibi_slopes": slopes}):
            expected = fa_serve.attention(**call, **extra, backend="reference")
            torch.testing.assert_close(fa_serve.attention(**call, **extra), expected, rtol=1e-5, atol=1e-5)
    assert len(plans) == 10, "five kinds of calls on two backends, whatever the length"


@pytest.mark.parametrize(
    "change",
    [{"kv_heads": 1}, {"dim_v": 32}, {"batch": 3}, {"keys": 64}],
    ids=["heads", "head_dim_v", "batch", "twice the keys"],
)
def test_a_growing_cache_of_another_kind_is_planned_anew(change: dict[str, int], plans: PlanTable) -> None:
    fa_serve.attention(**growing(40))
    changed = growing(**({"keys": 41} | change))
    out = fa_serve.attention(**changed)
    assert len(plans) == 2
    torch.testing.assert_close(out, fa_serve.attention(**changed, backend="reference"), rtol=1e-5, atol=1e-5)


def test_bad_arguments_of_a_growing_cache_are_named(plans: PlanTable) -> None:
    """A plan for growing lengths must not let pass what its checks would refuse."""
    call = growing(40)
    fa_serve.attention(**call)
    longer = growing(41)
    with pytest.raises(ValueError, match="v must match k"):
        fa_serve.attention(call["q"], longer["k"], call["v"])
    with pytest.raises(ValueError, match="mask must have four dimensions"):
        fa_serve.attention(**longer, mask=torch.ones(2, 1, 1, 40, dtype=torch.bool))
    with pytest.raises(TypeError, match="k must have q's dtype"):
        fa_serve.attention(longer["q"], longer["k"].double(), longer["v"])
    odd = {name: x[..., :15] if name != "v" else x for name, x in longer.items()}
    with pytest.raises(ValueError, match="k must have q's head_dim"):
        fa_serve.attention(longer["q"], odd["k"], longer["v"])


@pytest.mark.parametrize(
    ("strides", "whole"),
    [
        ((2048, 128, 64, 1), True),
        ((4096, 128, 64, 1), True),
        ((2048, 64, 1024, 1), True),
        ((2050, 128, 64, 1), False),
        ((2048, 132, 64, 1), False),
        ((2048, 128, 60, 1), False),
    ],
    ids=str,
)
def test_which_caches_have_whole_rows(strides: tuple[int, ...], whole: bool) -> None:
    cache = torch.zeros(20_000, dtype=torch.bfloat16).as_strided((3, 16, 2, 64), strides)
    assert _has_whole_rows(cache) == whole
    assert not _has_whole_rows(cache.as_strided(cache.shape, strides, storage_offset=4))


@pytest.mark.parametrize(
    ("shape", "token", "whole"),
    [
        ((1 << 12, 1 << 18, 2, 64), 128, True),
        ((1 << 13, 1 << 18, 2, 64), 128, False),  # 2^31 tokens
        ((1, 1 << 30, 2, 64), 128, True),
        ((1, (1 << 30) + 16, 2, 64), 128, False),
        ((1 << 14, 16, 2, 64), 8, False),  # tokens within the rows of others, which nobody should make
    ],
    ids=str,
)
def test_the_copy_engine_counts_tokens_in_32_bits(shape: tuple[int, ...], token: int, whole: bool) -> None:
    class Cache:
        """Strides of memory that this machine does not have."""

        def __init__(self) -> None:
            self.shape = shape

        def stride(self) -> tuple[int, ...]:
            return ((1 << 31) if token == 8 else shape[1] * token, token, 64, 1)

        def element_size(self) -> int:
            return 2

        def data_ptr(self) -> int:
            return 0

    assert _has_whole_rows(Cache()) == whole  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["qk8", "fp8"])
def test_few_queries_keep_the_dtype_of_q_and_many_are_refused_where_nothing_multiplies_float8(precision: Precision) -> None:
    q, k, v = make_qkv(1, 20, 40, 2, 2, 64)
    few = fa_serve.attention(q[:, :1], k, v, causal=True, precision=precision)
    assert torch.equal(few, fa_serve.attention(q[:, :1], k, v, causal=True))
    with pytest.raises(fa_serve.UnsupportedError, match=f"sdpa: computes only in q's dtype, got precision '{precision}'"):
        fa_serve.attention(q, k, v, causal=True, precision=precision)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (2, 3, 64)),
        ({"num_splits": 2}, None),
        ({"causal": False}, (2, 3, 64)),
        ({"max_seqlen_q": 4}, (2, 4, 64)),
        ({"max_seqlen_q": 4, "causal": False}, None),
    ],
)
def test_sizes_decide_unless_bits_may_not_depend_on_them(
    options: dict[str, Any], expected: tuple[int, int, int] | None, plans: PlanTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a fixed number of splits, neither the batch nor the lengths may change who serves a call; and sizes do not tell how
    many groups of sequences have queries."""
    seen: list[AttentionSpec] = []

    def select(spec: AttentionSpec, backend: str) -> Backend:
        seen.append(spec)
        return select_backend(spec, backend)

    monkeypatch.setattr(dispatch, "select_backend", select)
    cache = torch.randn(8, 16, 2, 32)
    fa_serve.attention_paged(
        torch.randn(6, 4, 32),
        cache,
        cache,
        block_table=torch.arange(8, dtype=torch.int32).view(2, 4),
        seqused_k=torch.tensor([50, 60], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 3, 6], dtype=torch.int32),
        **{"max_seqlen_q": 3, "causal": True} | options,
    )
    assert [spec.sizes for spec in seen] == [expected]


def test_an_unknown_precision_is_refused() -> None:
    q, k, v = make_qkv(1, 20, 40, 2, 2, 64)
    with pytest.raises(fa_serve.ParameterError, match="""precision must be "bf16", "qk8" or "fp8", got 'int8'"""):
        fa_serve.attention(q, k, v, precision="int8")  # type: ignore[call-overload]
