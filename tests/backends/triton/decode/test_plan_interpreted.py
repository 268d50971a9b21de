"""Split-KV decode in Triton's interpreter against the float64 oracle: every option, odd shapes, poisoned pages.

Lengths on the device decide how the work is cut, so most cases mix lengths: none, one, odd ones, 20 times the others.
The interpreter computes in NumPy, which has no bfloat16: that is left to the GPU suite.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import triton
import triton.language as tl

import fa_serve
from fa_serve.backends import triton as backend
from fa_serve.backends.reference import attention_reference
from fa_serve.backends.triton.decode import plan as decode_module
from fa_serve.backends.triton.decode.plan import plan_decode
from fa_serve.backends.triton.float8_conversions import fit_float16
from fa_serve.backends.triton.prefill.plan import plan_forward
from fa_serve.backends.triton.tiles import DecodeTiles, TileConfig, batch_block, decode_tiles
from fa_serve.launching.plans import PLANS
from fa_serve.testing import (
    assert_lse_matches,
    assert_matches_reference,
    cu_seqlens,
    eager_attention,
    make_paged,
    run_plan,
)


@dataclass(frozen=True)
class Case:
    q_lens: tuple[int, ...] = (1, 1, 1)
    kv_lens: tuple[int, ...] = (17, 1, 150)
    heads: tuple[int, int] = (8, 2)
    head_dim: int = 32
    head_dim_v: int = 0
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    window_size: tuple[int, int] = (-1, 0)
    softcap: float = 0.0
    sinks: bool = False
    num_splits: int = 0
    fp8: bool = False
    head_major: bool = False


def make(case: Case):
    """Everything one call needs, and the dense keys and values of each sequence in float64 (dequantised)."""
    generator = torch.Generator().manual_seed(sum(case.kv_lens))
    dim_v = case.head_dim_v or case.head_dim
    num_heads, num_kv_heads = case.heads

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    q = draw(sum(case.q_lens), num_heads, case.head_dim)
    keys = [draw(n, num_kv_heads, case.head_dim) for n in case.kv_lens]
    values = [draw(n, num_kv_heads, dim_v) for n in case.kv_lens]
    descales = (None, None)
    if case.fp8:
        descales = tuple(torch.rand(num_kv_heads, generator=generator) * 0.02 + 0.005 for _ in range(2))
        keys = [(k.float() / descales[0][:, None]).clamp(-448, 448).to(torch.float8_e4m3fn) for k in keys]
        values = [(v.float() / descales[1][:, None]).clamp(-448, 448).to(torch.float8_e4m3fn) for v in values]
    k_cache, v_cache, block_table, seqused_k = make_paged(keys, values, case.page_size)
    if case.head_major:
        k_cache, v_cache = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k_cache, v_cache))
    dense = [
        tuple(x.double() if d is None else x.double() * d.double()[:, None] for x, d in zip(pair, descales, strict=True))
        for pair in zip(keys, values, strict=True)
    ]
    options = {
        "block_table": block_table,
        "seqused_k": seqused_k,
        "cu_seqlens_q": cu_seqlens(case.q_lens),
        "max_seqlen_q": max(case.q_lens),
        "max_seqlen_k": max(*case.kv_lens, 1),
        "softmax_scale": case.head_dim**-0.5,
        "window_size": case.window_size,
        "softcap": case.softcap,
        "sinks": draw(num_heads) if case.sinks else None,
        "k_descale": descales[0],
        "v_descale": descales[1],
        "num_splits": case.num_splits,
        "out": None,
        "return_lse": True,
    }
    return q, k_cache, v_cache, dense, options


def decode(q, k_cache, v_cache, **options) -> tuple[torch.Tensor, torch.Tensor]:
    return run_plan(plan_decode, q, k_cache, v_cache, **options)


def through_the_api(q, k_cache, v_cache, **options) -> tuple[torch.Tensor, torch.Tensor]:
    return fa_serve.attention_paged(q, k_cache, v_cache, causal=False, backend="triton", **options)


def check(case: Case, run=decode, **overrides) -> tuple[torch.Tensor, torch.Tensor]:
    q, k_cache, v_cache, dense, options = make(case)
    actual, lse = run(q, k_cache, v_cache, **(options | overrides))
    exact_options = {name: options[name] for name in ("softmax_scale", "window_size", "softcap", "sinks")}
    exact = torch.zeros(*actual.shape, dtype=torch.float64)
    exact_lse = torch.full(lse.shape, float("-inf"), dtype=torch.float64)
    eager = torch.zeros_like(actual)
    row = 0
    for n, (k, v) in zip(case.q_lens, dense, strict=True):
        if n:
            out, out_lse = attention_reference(q[row : row + n][None].double(), k[None], v[None], **exact_options)
            exact[row : row + n] = out[0]
            exact_lse[:, row : row + n] = out_lse[0]
        if n and len(k):
            eager[row : row + n] = eager_attention(
                q[row : row + n][None], k.to(q.dtype)[None], v.to(q.dtype)[None], **exact_options
            )[0]
        row += n
    assert_matches_reference(actual, exact, eager)
    assert_lse_matches(lse, exact_lse)
    return actual, lse


OPTIONS = [
    pytest.param(Case(), id="plain"),
    pytest.param(Case(q_lens=(1, 0, 1, 1), kv_lens=(0, 9, 63, 0)), id="empty-sequences"),
    pytest.param(Case(q_lens=(2, 0, 1, 1), kv_lens=(0, 9, 63, 1), sinks=True, num_splits=3), id="empty-sequences-sinks-splits"),
    pytest.param(Case(q_lens=(1,), kv_lens=(1000,)), id="one-sequence"),
    pytest.param(Case(q_lens=(1,) * 6, kv_lens=(30, 31, 600, 33, 1, 32)), id="20-times-longer"),
    pytest.param(Case(q_lens=(4, 1, 16), kv_lens=(64, 90, 128)), id="speculative-causal"),
    pytest.param(Case(q_lens=(4, 2, 6), kv_lens=(64, 90, 33), window_size=(-1, -1)), id="speculative-full"),
    pytest.param(Case(q_lens=(5, 3), kv_lens=(3, 1)), id="more-queries-than-keys"),
    pytest.param(Case(q_lens=(40,), kv_lens=(70,), heads=(4, 1)), id="a-short-prompt"),
    pytest.param(Case(q_lens=(3, 1), kv_lens=(200, 90), window_size=(20, 0), sinks=True), id="left-window"),
    pytest.param(Case(q_lens=(3, 1), kv_lens=(200, 90), window_size=(0, 0)), id="window-of-itself"),
    pytest.param(Case(q_lens=(6, 9), kv_lens=(150, 90), window_size=(9, 2), num_splits=2), id="both-windows-splits"),
    pytest.param(Case(q_lens=(6, 9), kv_lens=(150, 90), window_size=(-1, 2)), id="right-window"),
    pytest.param(Case(softcap=8.0), id="softcap"),
    pytest.param(Case(q_lens=(2, 1, 3), softcap=3.0, sinks=True, window_size=(70, 0)), id="softcap-sinks-window"),
    pytest.param(Case(sinks=True, num_splits=1), id="sinks-one-split"),
    pytest.param(Case(num_splits=40), id="more-splits-than-blocks"),
]


@pytest.mark.parametrize("case", OPTIONS)
def test_options(case: Case):
    check(case)


SHAPES = [
    Case(heads=(4, 4), head_dim=64, page_size=1, dtype=torch.float16),
    Case(heads=(7, 1), head_dim=80, num_splits=2, dtype=torch.float16),
    Case(heads=(8, 1), head_dim=128, page_size=256),
    Case(heads=(6, 2), head_dim=96, page_size=33, dtype=torch.float16),
    Case(heads=(4, 2), head_dim=192, head_dim_v=128, page_size=64, num_splits=3, dtype=torch.float16),
    Case(heads=(2, 1), head_dim=256, page_size=32, dtype=torch.float16),
    Case(heads=(4, 1), head_dim=512, num_splits=2, dtype=torch.float16),
    Case(heads=(2, 2), head_dim=512, head_dim_v=288, page_size=7),
    Case(heads=(71, 1), head_dim=64),
    Case(heads=(2, 2), head_dim=5, head_dim_v=9),
]


def shape_id(case: Case) -> str:
    heads = case.heads
    dims = f"D{case.head_dim}-DV{case.head_dim_v or case.head_dim}"
    return f"HQ{heads[0]}-HKV{heads[1]}-{dims}-P{case.page_size}-{str(case.dtype)[6:]}-S{case.num_splits}"


@pytest.mark.parametrize("case", SHAPES, ids=shape_id)
def test_shapes(case: Case):
    check(case)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
@pytest.mark.parametrize("splits", [0, 2], ids=["balanced", "splits"])
def test_fp8_cache(dtype: torch.dtype, splits: int):
    check(Case(q_lens=(1, 2, 1), fp8=True, dtype=dtype, num_splits=splits, sinks=True, page_size=8))


def test_head_major_cache_and_strided_inputs():
    case = Case(q_lens=(2, 1), kv_lens=(40, 90), head_major=True)
    expected, _ = check(case)
    q, k_cache, v_cache, _, options = make(case)
    wide = torch.full((3, 8, 64), float("nan"))
    wide[..., :32] = q
    out = torch.full((3, 8, 96), float("nan"))[:, :, ::3]
    assert run_plan(plan_decode, wide[..., :32], k_cache, v_cache, **(options | {"out": out}))[0] is out
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_pages_before_the_window_are_never_read():
    case = Case(q_lens=(2, 1), kv_lens=(200, 90), window_size=(20, 0))
    q, k_cache, v_cache, _, options = make(case)
    expected, _ = run_plan(plan_decode, q, k_cache, v_cache, **options)
    options["block_table"][0, : (200 - 2 - 20) // 16] = 2**28
    actual, _ = run_plan(plan_decode, q, k_cache, v_cache, **options)
    assert torch.equal(actual, expected)


def test_without_lse_and_without_queries():
    q, k_cache, v_cache, _, options = make(Case(kv_lens=(40, 9, 90)))
    out, lse = run_plan(plan_decode, q, k_cache, v_cache, **(options | {"return_lse": False}))
    assert lse is None
    assert torch.equal(out, run_plan(plan_decode, q, k_cache, v_cache, **options)[0])
    nothing = options | {"cu_seqlens_q": cu_seqlens((0, 0, 0)), "max_seqlen_q": 0}
    assert run_plan(plan_decode, q[:0], k_cache, v_cache, **nothing)[0].shape == (0, 8, 32)


@pytest.mark.parametrize("scale", [1e-30, 3e-5, 1.0, 1e30])
def test_queries_of_any_size_fit_float16(scale: float):
    """Powers of two are taken out row by row, so nothing is rounded and no row touches another."""
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)) * scale
    x = (x.view(torch.int32) & -65536).view(torch.float32)
    x[3] = 0.0
    x[4, 5] = float("nan")
    half = torch.empty(16, 32, dtype=torch.float16)
    power = torch.empty(16)
    _fit[(1,)](x, half, power)
    torch.testing.assert_close(half.float() * power[:, None], x, rtol=0, atol=2**-24 * 4 * scale, equal_nan=True)
    assert torch.isfinite(half).sum() == x.numel() - 1


@triton.jit
def _fit(x_ptr, half_ptr, power_ptr):
    rows = tl.arange(0, 16)
    cols = tl.arange(0, 32)
    at = rows[:, None] * 32 + cols[None, :]
    half, power = fit_float16(tl.load(x_ptr + at))
    tl.store(half_ptr + at, half)
    tl.store(power_ptr + rows, power)


@pytest.mark.parametrize("balanced", [True, False], ids=["balanced", "fixed"])
@pytest.mark.parametrize("splits", [1, 2, 7, 40])
def test_every_cut_gives_the_same_answer(splits: int, balanced: bool):
    tiles = DecodeTiles(16, 16, 2, 2, splits, balanced, min_blocks=1 + splits % 2)
    check(Case(q_lens=(1, 2, 0, 1), kv_lens=(300, 17, 40, 2), sinks=True), tiles=tiles)


BY_ROWS = [
    pytest.param(Case(q_lens=(8, 8), kv_lens=(300, 170)), 3, id="verify"),
    pytest.param(Case(q_lens=(70, 40), kv_lens=(90, 40), heads=(2, 1)), 3, id="chunks-in-three-and-two-tiles"),
    pytest.param(Case(q_lens=(4, 0, 16, 1), kv_lens=(40, 9, 64, 0), heads=(6, 1), sinks=True), 5, id="unequal-sinks"),
    pytest.param(Case(q_lens=(9, 3), kv_lens=(3, 1)), 2, id="more-queries-than-keys"),
    pytest.param(Case(q_lens=(6, 9), kv_lens=(150, 90), window_size=(9, 2)), 3, id="both-windows"),
    pytest.param(Case(q_lens=(6, 9), kv_lens=(150, 90), window_size=(-1, -1), softcap=4.0), 3, id="full-softcap"),
    pytest.param(Case(q_lens=(6, 9), kv_lens=(150, 90), dtype=torch.float16, head_dim=40, head_dim_v=24), 3, id="float16"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "splits"), BY_ROWS)
def test_tiles_of_64_rows_have_queries_as_rows(case: Case, splits: int):
    check(case, tiles=DecodeTiles(64, 16, 4, 2, splits, balanced=True))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "splits"), BY_ROWS[:4])  # the others differ in their masks and their dtype
def test_tiles_of_64_rows_with_splits_of_one_length(case: Case, splits: int):
    check(case, tiles=DecodeTiles(64, 16, 4, 2, splits, balanced=False))


DENSE = [
    pytest.param((2, 1, 150), (-1, 0), False, id="one-query"),
    pytest.param((1, 3, 90), (20, 0), False, id="one-sequence-window"),
    pytest.param((3, 2, 70), (-1, -1), True, id="padding"),
]


@pytest.mark.parametrize("by_rows", [False, True], ids=["", "by-rows"])
@pytest.mark.parametrize(("shape", "window_size", "padded"), DENSE)
def test_dense_cache(
    shape: tuple[int, int, int], window_size: tuple[int, int], padded: bool, by_rows: bool, monkeypatch: pytest.MonkeyPatch
):
    """A cache of (batch, heads, room, dim), as transformers' are; the room behind the keys is NaN."""
    PLANS.clear()
    if by_rows:
        monkeypatch.setattr(decode_module, "decode_tiles", lambda *_: DecodeTiles(64, 16, 4, 2, 3, balanced=True))
    batch, seqlen_q, seqlen_k = shape
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(batch, 8, seqlen_q, 32, generator=generator).transpose(1, 2)
    k, v = (torch.randn(batch, 2, seqlen_k + 9, 32, generator=generator) for _ in range(2))
    mask = None
    if padded:
        mask = torch.rand(batch, 1, 1, seqlen_k, generator=generator) > 0.3
        mask[1] = False
    options = {"softmax_scale": 0.2, "window_size": window_size, "softcap": 0.0, "sinks": None, "mask": mask}
    for x in (k, v):
        x[:, :, seqlen_k:] = float("nan")
        x.masked_fill_(torch.zeros(()).bool() if mask is None else ~torch.cat([mask, mask[..., :9]], -1).transpose(2, 3), 7.0)
    k, v = (x[:, :, :seqlen_k].transpose(1, 2) for x in (k, v))
    exact, exact_lse = attention_reference(q.double(), k.double(), v.double(), **options)
    # splits are combined by weights exp(lse_i - lse), and float32 rounds each lse
    merging = torch.finfo(torch.float32).eps * exact_lse.nan_to_num(neginf=0.0).transpose(1, 2)[..., None]
    eager = eager_attention(q, k, v, **options) * (1 + merging).float()
    if padded:  # what a mask hides is not read
        k, v = (x.masked_fill(~mask.permute(0, 3, 1, 2), float("nan")) for x in (k, v))
    options |= {"backend": "triton"}
    actual, lse = fa_serve.attention(q, k, v, **options, return_lse=True)
    assert_matches_reference(actual, exact, eager)
    assert_lse_matches(lse, exact_lse)
    out = torch.empty(batch, seqlen_q, 8, 64)[..., ::2]
    assert fa_serve.attention(q, k, v, **options, out=out) is out
    assert torch.equal(out, actual)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_a_growing_cache_has_one_plan(batch: int, masked: bool) -> None:
    """One query per sequence behind 65 to 127 keys, as `generate` calls it: lengths and strides change, the plan does not."""
    generator = torch.Generator().manual_seed(0)
    PLANS.clear()
    for keys in (65, 66, 90, 127):
        q = torch.randn(batch, 8, 1, 32, generator=generator).transpose(1, 2)
        k, v = (torch.randn(batch, 2, keys, 32, generator=generator).transpose(1, 2) for _ in range(2))
        mask = torch.rand(batch, 1, 1, keys, generator=generator) > 0.3 if masked else None
        options = {"softmax_scale": 0.2, "window_size": (40, 0), "softcap": 0.0, "sinks": None, "mask": mask}
        exact, exact_lse = attention_reference(q.double(), k.double(), v.double(), **options)
        actual, lse = fa_serve.attention(q, k, v, **options, return_lse=True, backend="triton")
        assert_matches_reference(actual, exact, eager_attention(q, k, v, **options))
        assert_lse_matches(lse, exact_lse)
        assert len(PLANS) == 1
    fa_serve.attention(q, *(torch.randn(batch, 128, 2, 32) for _ in range(2)), backend="triton")
    assert len(PLANS) == 2, "twice the keys have other tiles"


def test_a_mask_of_one_key_is_that_of_all():
    """(batch, 1, 1, 1): broadcast over the keys, as the API says."""
    torch.manual_seed(0)
    q = torch.randn(2, 1, 8, 32)
    k = torch.randn(2, 40, 2, 32)
    v = torch.randn(2, 40, 2, 32)
    every = torch.tensor([True, False, True, False])
    mask = every[:2].view(2, 1, 1, 1)  # in memory, what follows it differs
    options = {"softmax_scale": 0.2, "window_size": (-1, -1), "softcap": 0.0, "sinks": None, "mask": mask}
    actual = fa_serve.attention(q, k, v, **options, backend="triton")
    exact, _ = attention_reference(q.double(), k.double(), v.double(), **options)
    assert_matches_reference(actual, exact, eager_attention(q, k, v, **options))


def test_a_captured_graph_would_serve_shorter_lengths():
    """The plan comes from max_seqlen_k on the host; the cut, from the lengths on the device."""
    for splits in (0, 4):
        check(Case(kv_lens=(17, 1, 150), num_splits=splits), max_seqlen_k=160 * 16)


@pytest.mark.slow
def test_batch_invariance():
    """With num_splits given, a row is bitwise the same alone and in any company."""
    case = Case(q_lens=(1, 5, 3), kv_lens=(150, 100, 20), num_splits=3, dtype=torch.float16)
    q, k_cache, v_cache, _, options = make(case)
    together, lse = run_plan(plan_decode, q, k_cache, v_cache, **options)
    row = 0
    for index, n in enumerate(case.q_lens):
        alone = options | {
            "block_table": options["block_table"][index : index + 1],
            "seqused_k": options["seqused_k"][index : index + 1],
            "cu_seqlens_q": cu_seqlens([n]),
            "max_seqlen_q": n,
            "max_seqlen_k": case.kv_lens[index],
        }
        out, alone_lse = run_plan(plan_decode, q[row : row + n], k_cache, v_cache, **alone)
        assert torch.equal(out, together[row : row + n])
        assert torch.equal(alone_lse, lse[:, row : row + n])
        row += n


def test_tiles_depend_on_the_heads_alone_when_splits_are_given():
    def tiles(batch: int, max_q: int, max_k: int, splits: int) -> DecodeTiles:
        return decode_tiles(90, 132, 2, 2, 128, 128, 32, 8, batch, max_q, max_k, splits)

    assert tiles(1, 1, 100, 4) == tiles(256, 16, 100_000, 4)
    assert tiles(1, 1, 1024, 0) == replace(tiles(1, 1, 1024, 4), splits=16)
    assert tiles(1, 1, 64, 0).splits == 1
    assert tiles(64, 1, 8192, 0).balanced


def test_splits_fill_one_wave():
    """3 programs live on an SM: 396 on 132 of them, 49 for each of 8 heads."""
    for batch in (1, 8, 32, 200):
        assert decode_tiles(90, 132, 2, 2, 128, 128, 32, 8, batch, 1, 131072, 0).splits == 49
    assert decode_tiles(80, 132, 2, 2, 128, 128, 32, 8, 200, 1, 131072, 0).splits == 33, "2 programs on an SM"


def test_batch_block_covers_the_batch():
    for batch in (1, 32, 33, 256, 257, 5000):
        assert batch_block(batch) >= batch


MIXED = [
    pytest.param(Case(q_lens=(1, 40, 1), kv_lens=(90, 70, 33)), id="one-prompt"),
    pytest.param(Case(q_lens=(17, 0, 3, 1, 5, 19), kv_lens=(17, 7, 90, 65, 66, 70), heads=(4, 1), sinks=True), id="every-kind"),
    pytest.param(Case(q_lens=(18, 33), kv_lens=(18, 40), window_size=(12, 0), softcap=9.0), id="no-one-decodes"),
    pytest.param(Case(q_lens=(17, 1), kv_lens=(64, 64), heads=(20, 1), dtype=torch.float16), id="wide-group"),
]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which kernels were planned; the plans are the real ones."""
    names: list[str] = []
    for room, make_plan in (("decode", plan_decode), ("prefill", plan_forward)):
        monkeypatch.setitem(backend._PLANS, room, lambda *args, made=make_plan: names.append(made.__name__) or made(*args))
    PLANS.clear()
    return names


@pytest.mark.parametrize("case", MIXED)
def test_mixed(case: Case, planned: list[str]) -> None:
    check(case, run=through_the_api)
    assert sorted(planned) == ["plan_decode", "plan_forward"]


def test_equal_prompts_are_not_mixed(planned: list[str]) -> None:
    check(Case(q_lens=(18, 18), kv_lens=(40, 18)), run=through_the_api)
    assert planned == ["plan_forward"]


def test_each_kernel_leaves_the_others_rows_alone() -> None:
    """Decode with a limit of 4 queries, forward from 5 on: together every row is written once."""
    q, k_cache, v_cache, _, options = make(Case(q_lens=(1, 40, 4, 5), kv_lens=(90, 70, 33, 9)))
    rows = torch.repeat_interleave(torch.tensor([True, False, True, False]), torch.tensor([1, 40, 4, 5]))
    forward_options = {name: options[name] for name in options if name not in ("k_descale", "v_descale", "num_splits")}
    for few in (True, False):
        out = torch.full_like(q, 7.0)
        lse = torch.full((8, 50), 7.0)
        written = {"out": out, "lse": lse}
        if few:
            run_plan(plan_decode, q, k_cache, v_cache, **(options | written | {"max_seqlen_q": 4}))
        else:
            run_plan(plan_forward, q, k_cache, v_cache, skip_q=4, tiles=TileConfig(16, 16, 4, 2), **(forward_options | written))
        assert torch.equal((out == 7.0).all(-1).all(-1), ~rows if few else rows)
        assert torch.equal((lse == 7.0).all(0), ~rows if few else rows)


def test_strided_out() -> None:
    q, k_cache, v_cache, _, options = make(Case(q_lens=(1, 40), kv_lens=(90, 70)))
    expected, _ = through_the_api(q, k_cache, v_cache, **options)
    out = torch.full((41, 8, 96), float("nan"))[:, :, ::3]
    assert through_the_api(q, k_cache, v_cache, **(options | {"out": out, "return_lse": False})) is out
    assert torch.equal(out, expected)
