"""The public functions refuse what they cannot mean, before a launch; the text names the argument, the rule and the value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fa_serve
from fa_serve.api import _has_whole_rows
from fa_serve.backends import explain, select_backend
from fa_serve.backends.plan import PlanTable
from fa_serve.spec import AttentionSpec
from fa_serve.testing import cu_seqlens, make_paged, make_qkv

Q, K, V = make_qkv(2, 5, 7, 4, 2, 16)
FLAT = {"q": Q.flatten(0, 1), "k": K.flatten(0, 1), "v": V.flatten(0, 1)}
CU = {"cu_seqlens_q": cu_seqlens([5, 5]), "cu_seqlens_k": cu_seqlens([7, 7]), "max_seqlen_q": 5, "max_seqlen_k": 7}
K_CACHE, V_CACHE, TABLE, USED = make_paged(list(K), list(V), 4)
PAGED = (
    fa_serve.attention_paged,
    {
        "q": FLAT["q"],
        "k_cache": K_CACHE,
        "v_cache": V_CACHE,
        "block_table": TABLE,
        "seqused_k": USED,
        "cu_seqlens_q": CU["cu_seqlens_q"],
        "max_seqlen_q": 5,
    },
)
ROWS = {"k": FLAT["k"][:3], "v": FLAT["v"][:3]}
STORE = (fa_serve.store_kv, ROWS | {"k_cache": K_CACHE, "v_cache": V_CACHE, "slot_mapping": torch.tensor([0, -1, 9])})
DENSE = (fa_serve.attention, {"q": Q, "k": K, "v": V})
VARLEN = (fa_serve.attention_varlen, FLAT | CU)

# function, its good arguments, what is changed, the error, what its text must hold
BAD: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "rank": (*DENSE, {"q": Q[0]}, ValueError, r"q must have 4 dimensions, got float32 \(5, 4, 16\)"),
    "dtype-of-q": (*DENSE, {"q": Q.int()}, TypeError, r"q must be float16.*got torch.int32"),
    "dtype-of-k": (*DENSE, {"k": K.half()}, TypeError, r"k must have q's dtype torch.float32, got torch.float16"),
    "dtype-of-v": (*DENSE, {"v": V.half()}, TypeError, r"v must have k's dtype torch.float32, got torch.float16"),
    "lengths": (*DENSE, {"v": V[:, :6]}, ValueError, r"v must match k .*\(2, 6, 2, 16\)"),
    "head_dim": (*DENSE, {"k": K[..., :8], "v": V}, ValueError, "k must have q's head_dim 16, got 8"),
    "no-head_dim": (*DENSE, {"v": V[..., :0]}, ValueError, "head_dim_v 0"),
    "groups": (*DENSE, {"q": Q[:, :, :3]}, ValueError, "num_heads must be a multiple of num_kv_heads, got 3 and 2"),
    "batch": (*DENSE, {"q": Q[:1]}, ValueError, "k must have q's batch size 1, got 2"),
    "window": (*DENSE, {"window_size": (-2, 0)}, ValueError, r"window_size .* got \(-2, 0\)"),
    "window-float": (*DENSE, {"window_size": (1.5, 0)}, ValueError, r"window_size must be integers .* got \(1.5, 0\)"),
    "window-three": (*DENSE, {"window_size": (1, 0, 0)}, ValueError, r"window_size .* got \(1, 0, 0\)"),
    "softcap-nan": (*DENSE, {"softcap": float("nan")}, ValueError, "softcap must be finite .* got nan"),
    "softcap": (*DENSE, {"softcap": -1.0}, ValueError, "softcap must be .* >= 0 .*got -1.0"),
    "scale": (*DENSE, {"softmax_scale": 0.0}, ValueError, "softmax_scale must be finite and > 0, got 0.0"),
    "sinks": (*DENSE, {"sinks": torch.zeros(3)}, ValueError, r"sinks must be \(4,\).*got float32 \(3,\)"),
    "mask-shape": (*DENSE, {"mask": torch.ones(2, 1, 1, 6) > 0}, ValueError, r"broadcastable .*\(2, 1, 1, 6\)"),
    "mask-dtype": (*DENSE, {"mask": torch.ones(2, 1, 1, 7).int()}, TypeError, "mask must be bool or floating"),
    "out": (*DENSE, {"out": torch.empty(2, 5, 4, 8)}, ValueError, r"out must be float32 \(2, 5, 4, 16\)"),
    "backend": (*DENSE, {"backend": "fast"}, ValueError, "backend must be 'auto' or one of .*'fast'"),
    "cu-dtype": (*VARLEN, {"cu_seqlens_q": CU["cu_seqlens_q"].long()}, ValueError, "cu_seqlens_q must be int32.*int64"),
    "cu-empty": (*VARLEN, {"cu_seqlens_q": cu_seqlens([])[:0]}, ValueError, "cu_seqlens_q must have at least 1"),
    "cu-length": (*VARLEN, {"cu_seqlens_k": cu_seqlens([7])}, ValueError, "cu_seqlens_k must have 3 entries, got 2"),
    "max-length": (*VARLEN, {"max_seqlen_k": -1}, ValueError, "max_seqlen_k must be a non-negative int"),
    "max-on-device": (*VARLEN, {"max_seqlen_q": torch.tensor(5)}, ValueError, "max_seqlen_q .* on the host"),
    "table": (*PAGED, {"block_table": TABLE.long()}, ValueError, "block_table must be int32"),
    "table-rows": (*PAGED, {"block_table": TABLE[:1]}, ValueError, "block_table must have 2 rows.*got 1"),
    "capacity": (*PAGED, {"max_seqlen_k": 9}, ValueError, "max_seqlen_k must be at most .* = 8, got 9"),
    "splits": (*PAGED, {"num_splits": -1}, ValueError, "num_splits must be 0 .*got -1"),
    "descale": (*PAGED, {"k_descale": torch.ones(2)}, ValueError, "k_descale must be None for a cache of"),
    "no-descale": (
        *PAGED,
        {"k_cache": K_CACHE.to(torch.float8_e4m3fn), "v_cache": V_CACHE.to(torch.float8_e4m3fn)},
        ValueError,
        r"k_descale must be float32 \(2,\)",
    ),
    "store-heads": (*STORE, {"k": ROWS["k"][:, :1]}, ValueError, "k must be .* of the same heads and dim"),
    "store-tokens": (*STORE, {"v": ROWS["v"][:2]}, ValueError, "k and v must agree in tokens"),
    "store-slots": (*STORE, {"slot_mapping": torch.tensor([0, 1, 2]).int()}, ValueError, r"slot_mapping must be int64 \(3,\)"),
    "cache-last-dim": (*PAGED, {"k_cache": K_CACHE.mT.contiguous().mT}, ValueError, "k_cache must have a contiguous last"),
    "store-last-dim": (*STORE, {"v_cache": V_CACHE.mT.contiguous().mT}, ValueError, "v_cache must have a contiguous last"),
    "store-device": (*STORE, {"k_cache": K_CACHE.to("meta")}, ValueError, "k_cache .* on k's device cpu, got cpu, meta"),
    "store-v-dtype": (*STORE, {"v": ROWS["v"].half()}, TypeError, "v and v_cache must have the dtypes of k and k_cache"),
    "store-v-cache-dtype": (*STORE, {"v_cache": V_CACHE.half()}, TypeError, "v and v_cache must have the dtypes"),
    "store-dtype": (*STORE, {n: x.half() for n, x in ROWS.items()}, TypeError, "k_cache must have k's dtype"),
}


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> PlanTable:
    """A table of plans for this test alone, so that no earlier test has already had a call checked."""
    table = PlanTable()
    monkeypatch.setattr(fa_serve.api, "PLANS", table)
    return table


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name: str) -> None:
    function, good, change, error, text = BAD[name]
    function(**(good | {"slot_mapping": torch.tensor([-1, -1, -1])} if function is fa_serve.store_kv else good))
    with pytest.raises(error, match=text):
        function(**(good | change))


def test_nothing_is_launched_before_the_arguments_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fa_serve.api.select_backend", lambda *_: pytest.fail("a backend was asked for"))
    for name, (function, good, change, error, _) in BAD.items():
        if name != "backend":
            with pytest.raises(error):
                function(**(good | change))


def test_an_explicit_backend_never_falls_back() -> None:
    with pytest.raises(fa_serve.UnsupportedError, match="hopper: runs on Hopper"):
        fa_serve.attention(Q, K, V, backend="hopper")


def test_no_backend_lists_every_reason() -> None:
    spec = AttentionSpec("paged", "cpu", 0, torch.float32, torch.float32, 64, 64, 4, 4, page_size=16, needs_grad=True)
    assert all(explain(spec).values())
    with pytest.raises(fa_serve.UnsupportedError) as caught:
        select_backend(spec)
    assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]] == ["hopper", "triton", "sdpa"]
    assert "float32, heads 4/4, head_dim 64, needs_grad, page_size 16" in str(caught.value)


def test_out_and_lse() -> None:
    out = torch.full((2, 5, 4, 16), float("nan"))
    returned, lse = fa_serve.attention(Q, K, V, causal=True, out=out, return_lse=True)
    assert returned is out
    assert lse.shape == (2, 4, 5)
    torch.testing.assert_close(out, fa_serve.attention(Q, K, V, causal=True, backend="reference"), rtol=1e-5, atol=1e-5)


def test_store_kv_skips_and_writes() -> None:
    caches = [torch.zeros(3, 4, 2, 16) for _ in range(2)]
    fa_serve.store_kv(**ROWS, **dict(zip(("k_cache", "v_cache"), caches, strict=True)), slot_mapping=torch.tensor([0, -1, 9]))
    for cache, rows in zip(caches, ROWS.values(), strict=True):
        assert torch.equal(cache[0, 0], rows[0])
        assert torch.equal(cache[2, 1], rows[2])
        assert int((cache.abs().sum((2, 3)) > 0).sum()) == 2


ALIKE: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "scale": {"softmax_scale": 2.0},
    "window": {"window_size": (1, 0)},
    "softcap": {"softcap": 0.5},
    "sinks": {"sinks": torch.tensor([3.0, -1.0, 0.5, 2.0])},
    "lse": {"return_lse": True},
    "backend": {"backend": "reference"},
    "out": {"out": torch.zeros(10, 4, 16)},
    "strides": {"q": torch.arange(640.0).sin().view(16, 4, 10).permute(2, 1, 0)},
    "rows": {"q": FLAT["q"][:9]},
}


@pytest.mark.parametrize("change", ALIKE)
@pytest.mark.parametrize("call", [VARLEN, (PAGED[0], PAGED[1] | {"causal": False})], ids=["varlen", "paged"])
def test_a_call_is_not_taken_for_another(
    call: tuple[Callable[..., Any], dict[str, Any]], change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is remembered of a call serves those that differ in addresses and contents alone."""
    function, arguments = call
    monkeypatch.setattr(fa_serve.api, "PLANS", PlanTable())
    changed = function(**(arguments | ALIKE[change]))
    fa_serve.api.PLANS.clear()
    plain = function(**arguments)
    assert torch.equal(function(**(arguments | {"q": arguments["q"].clone()})), plain)
    assert len(fa_serve.api.PLANS) == 1
    after = function(**(arguments | ALIKE[change]))
    assert len(fa_serve.api.PLANS) == 2
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
        for extra in ({}, {"mask": mask}, {"window_size": (20, 0)}):
            expected = fa_serve.attention(**call, **extra, backend="reference")
            torch.testing.assert_close(fa_serve.attention(**call, **extra), expected, rtol=1e-5, atol=1e-5)
    assert len(plans) == 6, "three kinds of calls on two backends, whatever the length"


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
    with pytest.raises(ValueError, match="mask must be broadcastable"):
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
