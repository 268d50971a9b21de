"""`hopper.forward` in the emulator: the plan and the kernel are right with every option, schedule, layout and address."""

from __future__ import annotations

import pytest
import torch
from hopper_cases import CAUSAL, DYNAMIC, FULL, GRID, Case, PagedCall, run_dense, run_paged, run_with_skipped_sequences
from hopper_emulator import emulated
from sampled_cases import each_nth

from fa_serve.backends.calls import AttentionTensors
from fa_serve.backends.hopper.forward import plan as forward
from fa_serve.backends.hopper.forward.plan import plan_hopper_forward
from fa_serve.backends.hopper.forward.tiles import HopperTiles, Schedule
from fa_serve.testing import cu_seqlens, make_qkv

DENSE = [
    Case("default"),
    Case("full", window=FULL, batch=2),
    Case("d96", head_dim=(96, 96), seqlen_q=65),
    Case("d128-float16", head_dim=(128, 128), dtype=torch.float16),
    Case("d192-dv128", head_dim=(192, 128), heads=(3, 3)),
    Case("d256", head_dim=(256, 256), seqlen_q=130, seqlen_k=260),
    *[
        Case(f"d{d}", head_dim=(d, d), seqlen_q=130, seqlen_k=150)
        for d in each_nth(4, (8, 40, 72, 80, 112, 144, 160, 192, 224))
    ],
    *[
        Case(f"d{d}-dv{dv}", head_dim=(d, dv), seqlen_q=130, seqlen_k=150)
        for d, dv in each_nth(3, ((80, 24), (64, 128), (128, 64), (64, 256), (256, 64), (192, 144), (16, 80)))
    ],
    Case("d80-full-sinks", head_dim=(80, 80), window=FULL, sinks=True, seqlen_q=500, seqlen_k=500),
    Case("d192-window", head_dim=(192, 192), window=(200, 0), seqlen_q=500, seqlen_k=500, heads=(4, 2)),
    Case("d80-late", head_dim=(80, 80), tiles=HopperTiles(2, 64, 2, 2, DYNAMIC, rescale_late=True), scale=3.0, seqlen_q=300),
    Case("d192-late", head_dim=(192, 192), tiles=HopperTiles(2, 64, 2, 1, DYNAMIC, o_parts=2, rescale_late=True), scale=3.0),
    Case(
        "d80-three-pingpong",
        head_dim=(80, 80),
        tiles=HopperTiles(3, 128, 2, 1, DYNAMIC, pingpong=True),
        seqlen_q=400,
        seqlen_k=400,
    ),
    Case("d80-one-group", head_dim=(80, 80), seqlen_q=60, seqlen_k=300),
    Case("d192-one-group", head_dim=(192, 192), seqlen_q=60, seqlen_k=300),
    Case(
        "d96-no-overlap",
        head_dim=(96, 96),
        tiles=HopperTiles(2, 64, 2, 2, DYNAMIC, overlap=False),
        seqlen_q=300,
        seqlen_k=300,
    ),
    Case("one-query", seqlen_q=1, seqlen_k=300, heads=(4, 1)),
    Case("one-key", seqlen_q=70, seqlen_k=1, window=FULL),
    Case("rows-without-keys", seqlen_q=300, seqlen_k=100),
    Case("window-both", window=(30, 10), seqlen_q=150, seqlen_k=310),
    Case("d256-window", head_dim=(256, 256), window=(200, 0), seqlen_q=500, seqlen_k=500, heads=(4, 2)),
    Case("window-left", window=(70, -1), seqlen_q=150, seqlen_k=310),
    Case("softcap", softcap=5.0, scale=1.0),
    Case("sinks", sinks=True),
    Case("sinks-rows-without-keys", sinks=True, seqlen_q=200, seqlen_k=64),
    Case("grid-one-group", tiles=HopperTiles(1, 64, 2, 1, GRID, blocks_per_sm=2)),
    Case("dynamic-pingpong", tiles=HopperTiles(2, 64, 2, 2, DYNAMIC, pingpong=True), seqlen_q=500, seqlen_k=500),
    Case("dynamic-pingpong-three", tiles=HopperTiles(3, 64, 3, 1, DYNAMIC, pingpong=True), seqlen_q=500, seqlen_k=500),
    Case("grid-pingpong-three", tiles=HopperTiles(3, 128, 2, 1, GRID, pingpong=True), seqlen_q=400, seqlen_k=400),
    Case("no-overlap", tiles=HopperTiles(2, 64, 2, 2, DYNAMIC, overlap=False), seqlen_q=300, seqlen_k=300),
    Case(
        "out-in-halves",
        head_dim=(128, 128),
        tiles=HopperTiles(2, 64, 2, 1, DYNAMIC, o_parts=2),
        seqlen_q=400,
        seqlen_k=400,
    ),
    Case("out-in-halves-ahead", head_dim=(128, 128), tiles=HopperTiles(2, 64, 2, 2, DYNAMIC, o_parts=2), seqlen_q=400),
    Case("growing-maxima", scale=3.0, seqlen_q=500, seqlen_k=500),
    Case("late", tiles=HopperTiles(2, 64, 2, 2, DYNAMIC, rescale_late=True), scale=3.0, seqlen_q=500, seqlen_k=500),
    Case("late-one-q-stage", tiles=HopperTiles(2, 64, 2, 1, GRID, rescale_late=True), scale=3.0, seqlen_q=500, seqlen_k=500),
    Case(
        "late-sinks-window",
        tiles=HopperTiles(2, 64, 2, 2, DYNAMIC, rescale_late=True),
        scale=3.0,
        sinks=True,
        window=(70, 0),
    ),
    Case("one-stage", tiles=HopperTiles(2, 64, 1, 2, DYNAMIC), seqlen_q=300, seqlen_k=300),
]


@pytest.mark.parametrize("case", DENSE, ids=lambda case: case.id)
def test_dense(case: Case) -> None:
    run_dense(case)


@pytest.mark.parametrize("schedule", list(Schedule), ids=lambda schedule: schedule.name)
@pytest.mark.parametrize("window", [FULL, CAUSAL, (40, 0)], ids=str)
def test_packed_sequences_do_not_see_their_neighbours(schedule: Schedule, window: tuple[int, int]) -> None:
    """Every other sequence is NaN, and its neighbours must be right; rows after the last sequence are 0."""
    lengths_q = [70, 33, 0, 1, 150, 20, 130, 5]
    lengths_k = [70, 33, 40, 9, 150, 20, 260, 0]
    q, k, v = make_qkv(1, sum(lengths_q) + 7, sum(lengths_k) + 7, 2, 1, 64, dtype=torch.bfloat16)
    cu_q = cu_seqlens(lengths_q)
    cu_k = cu_seqlens(lengths_k)
    for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k)):
        x[:, cu[-1] :] = float("nan")
        for b in (1, 3, 5):
            x[:, cu[b] : cu[b + 1]] = float("nan")
    q, k, v = (x[0] for x in (q, k, v))
    case = Case("", window=window, tiles=HopperTiles(2, 64, 2, 2, schedule))
    tensors = AttentionTensors(q, k, v, cu_seqlens_q=cu_q, keys=cu_k, out=torch.full_like(q, 7.0))
    with emulated():
        out, lse = plan_hopper_forward(tensors, case.options(150, 260), case.tiles)(tensors)
    assert out is tensors.out
    assert (out[cu_q[-1] :] == 0).all()
    assert (lse[:, cu_q[-1] :] == float("-inf")).all()
    for b in (0, 4, 6, 7):
        rows = slice(cu_q[b], cu_q[b + 1])
        keys = slice(cu_k[b], cu_k[b + 1])
        case.check(out[None, rows], lse[None, :, rows], q[None, rows], k[None, keys], v[None, keys])


PAGED = [
    Case("two-groups-of-heads", heads=(4, 2)),
    Case("page-of-16"),
    Case("page-larger-than-a-block", page_size=256),
    Case("window", window=(40, 0)),
    Case("page-of-48", page_size=48, window=FULL),
    Case("d128-float16", head_dim=(128, 128), dtype=torch.float16, page_size=64),
    Case("window-both-page-of-32", window=(30, 10), page_size=32, softcap=5.0, sinks=True),
    Case("d80", head_dim=(80, 80)),
    Case("d192-dv128", head_dim=(192, 128)),
    Case("d192", head_dim=(192, 192), page_size=32),
    Case("d72-dv96", head_dim=(72, 96), page_size=64),
    Case("d256-short", head_dim=(256, 256), tiles=HopperTiles(2, 64, 2, 1, DYNAMIC, o_parts=2), page_size=32),
    Case("grid-one-group", tiles=HopperTiles(1, 64, 2, 1, GRID)),
]


@pytest.mark.parametrize("case", each_nth(2, PAGED), ids=lambda case: case.id)
def test_paged(case: Case) -> None:
    run_paged(case)


def test_pages_before_a_window_are_not_read() -> None:
    """Such pages may belong to another sequence by now. Here their entries of the block table point outside of the cache."""
    call = PagedCall.of(Case("", window=(30, 0)), [100], [300])
    first_seen = 300 - 100 - 30
    call.tensors.block_table[0, : first_seen // 16] = 2**28
    call.check(*call.run(), 0)


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (2, 0, 1, 3)], ids=["heads-first", "heads-outermost"])
def test_strided_caches(order: tuple[int, ...]) -> None:
    """Caches may be views: K and V side by side in one tensor, or heads before tokens."""
    call = PagedCall.of(Case("", heads=(4, 2)), [100], [130])
    _, k_cache, v_cache = call.tensors[:3]
    both = torch.stack([k_cache, v_cache], dim=1)
    back = [order.index(i) for i in range(4)]
    moved = k_cache.permute(order).contiguous().permute(back)
    for keys, values in ((both[:, 0], both[:, 1]), (moved, v_cache)):
        call.tensors = call.tensors._replace(k=keys, v=values)
        call.check(*call.run(), 0)


def test_sequences_with_few_queries_are_left_out() -> None:
    run_with_skipped_sequences()


@pytest.mark.parametrize(
    ("lengths", "window", "sequences"), [([64] * 16, CAUSAL, 16), ([64] * 15 + [63], CAUSAL, 4), ([64] * 16, FULL, 4)]
)
def test_keys_of_all_tiles_that_follow_one_another_fit_the_cache(
    lengths: list[int], window: tuple[int, int], sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Causal tiles are in the order of their lengths, so a pass over all sequences computes one tile of each."""
    kv_bytes: list[int] = []

    def head_group(heads: int, per_kv: int, bytes_of_head: int, tiles: int) -> tuple[int, int]:
        kv_bytes.append(bytes_of_head)
        return 1, 1

    monkeypatch.setattr(forward, "head_group", head_group)
    case = Case("", window=window, heads=(4, 2))
    ends = cu_seqlens(lengths)
    q, k, v = (x[0] for x in make_qkv(1, sum(lengths), sum(lengths), 4, 2, 64, dtype=torch.bfloat16))
    plan_hopper_forward(AttentionTensors(q, k, v, cu_seqlens_q=ends, keys=ends), case.options(64, 64))
    assert kv_bytes == [sequences * 64 * (64 + 64) * 2]


def test_dense_batches_do_not_see_their_neighbours() -> None:
    """K and V are views of NaN: rows from seqlen_k on must not be read."""
    case = Case("", batch=2)
    q, k, v = make_qkv(2, 100, 90, 2, 1, 64, dtype=torch.bfloat16)
    wide = [torch.full((2, 128, 1, 64), float("nan"), dtype=torch.bfloat16) for _ in range(2)]
    for x, data in zip(wide, (k, v), strict=True):
        x[:, :90] = data
    tensors = AttentionTensors(q, wide[0][:, :90], wide[1][:, :90])
    with emulated():
        out, lse = plan_hopper_forward(tensors, case.options(100, 90))(tensors)
    case.check(out, lse, q, k, v)


def test_strides() -> None:
    """Heads before tokens are addressed directly; a transposed last dimension, odd strides and an expanded batch are copied."""
    case = Case("", batch=2, heads=(4, 2))
    options = case.options(200, 200)
    q, k, v = make_qkv(2, 200, 200, 4, 2, 64, dtype=torch.bfloat16)
    transposed = k.transpose(2, 3).contiguous().transpose(2, 3)
    odd = torch.zeros(2, 200, 2, 67, dtype=torch.bfloat16)[..., 1:65].copy_(v)
    out = torch.zeros(2, 200, 4, 66, dtype=torch.bfloat16)[..., 1:65]
    tensors = AttentionTensors(q.transpose(1, 2).contiguous().transpose(1, 2), transposed, odd, out=out)
    with emulated():
        run = plan_hopper_forward(tensors, options)
        for _ in range(2):
            result, lse = run(tensors)
            assert result is out
            case.check(out, lse, q, k, v)
            out.zero_()
        expanded = AttentionTensors(q, k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1))
        result, lse = plan_hopper_forward(expanded, options)(expanded)
    case.check(result, lse, *expanded[:3])
