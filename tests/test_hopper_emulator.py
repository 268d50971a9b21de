"""The Hopper kernel, launcher and tile table in the emulator: right on every schedule and option, and wrong when broken."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hopper_emulator import EmulationError, _namespace, emulated

from fa_serve import api
from fa_serve.backends.hopper import HopperBackend
from fa_serve.backends.hopper.forward import launch_forward
from fa_serve.backends.hopper.schedule import RECORD, table_launch, tile_slots, tile_table
from fa_serve.backends.hopper.tiles import Schedule, TileConfig
from fa_serve.backends.reference import attention_reference
from fa_serve.testing import (
    assert_lse_matches,
    assert_matches_reference,
    cu_seqlens,
    eager_attention,
    make_paged,
    make_qkv,
)

GRID = Schedule.GRID
DYNAMIC = Schedule.DYNAMIC
CAUSAL = (-1, 0)
FULL = (-1, -1)


@dataclass(frozen=True)
class Case:
    id: str
    seqlen_q: int = 200
    seqlen_k: int = 200
    heads: tuple[int, int] = (2, 1)
    head_dim: tuple[int, int] = (64, 64)
    batch: int = 1
    window: tuple[int, int] = CAUSAL
    softcap: float = 0.0
    sinks: bool = False
    scale: float = 0.125
    dtype: torch.dtype = torch.bfloat16
    tiles: TileConfig | None = None


CASES = [
    Case("default"),
    Case("full", window=FULL, batch=2),
    Case("d96", head_dim=(96, 96), seqlen_q=65),
    Case("d128-float16", head_dim=(128, 128), dtype=torch.float16),
    Case("d192-dv128", head_dim=(192, 128), heads=(3, 3)),
    Case("d256", head_dim=(256, 256), seqlen_q=130, seqlen_k=260),
    Case("one-query", seqlen_q=1, seqlen_k=300, heads=(4, 1)),
    Case("one-key", seqlen_q=70, seqlen_k=1, window=FULL),
    Case("rows-without-keys", seqlen_q=300, seqlen_k=100),
    Case("window-both", window=(30, 10), seqlen_q=150, seqlen_k=310),
    Case("d256-window", head_dim=(256, 256), window=(200, 0), seqlen_q=500, seqlen_k=500, heads=(4, 2)),
    Case("window-left", window=(70, -1), seqlen_q=150, seqlen_k=310),
    Case("softcap", softcap=5.0, scale=1.0),
    Case("sinks", sinks=True),
    Case("sinks-rows-without-keys", sinks=True, seqlen_q=200, seqlen_k=64),
    Case("grid-one-group", tiles=TileConfig(1, 64, 2, 1, GRID, blocks_per_sm=2)),
    Case("dynamic-pingpong", tiles=TileConfig(2, 64, 2, 2, DYNAMIC, pingpong=True), seqlen_q=500, seqlen_k=500),
    Case("dynamic-pingpong-three", tiles=TileConfig(3, 64, 3, 1, DYNAMIC, pingpong=True), seqlen_q=500, seqlen_k=500),
    Case("grid-pingpong-three", tiles=TileConfig(3, 128, 2, 1, GRID, pingpong=True), seqlen_q=400, seqlen_k=400),
    Case("no-overlap", tiles=TileConfig(2, 64, 2, 2, DYNAMIC, overlap=False), seqlen_q=300, seqlen_k=300),
    Case("out-in-halves", head_dim=(128, 128), tiles=TileConfig(2, 64, 2, 1, DYNAMIC, o_parts=2), seqlen_q=400, seqlen_k=400),
    Case("out-in-halves-ahead", head_dim=(128, 128), tiles=TileConfig(2, 64, 2, 2, DYNAMIC, o_parts=2), seqlen_q=400),
    Case("growing-maxima", scale=3.0, seqlen_q=500, seqlen_k=500),
    Case("late", tiles=TileConfig(2, 64, 2, 2, DYNAMIC, rescale_late=True), scale=3.0, seqlen_q=500, seqlen_k=500),
    Case("late-one-q-stage", tiles=TileConfig(2, 64, 2, 1, GRID, rescale_late=True), scale=3.0, seqlen_q=500, seqlen_k=500),
    Case("late-sinks-window", tiles=TileConfig(2, 64, 2, 2, DYNAMIC, rescale_late=True), scale=3.0, sinks=True, window=(70, 0)),
    Case("one-stage", tiles=TileConfig(2, 64, 1, 2, DYNAMIC), seqlen_q=300, seqlen_k=300),
]


def inputs(case: Case):
    q, k, v = make_qkv(case.batch, case.seqlen_q, case.seqlen_k, *case.heads, *case.head_dim, dtype=case.dtype)
    sinks = torch.randn(case.heads[0], generator=torch.Generator().manual_seed(1)) if case.sinks else None
    options = {"softmax_scale": case.scale, "window_size": case.window, "softcap": case.softcap, "sinks": sinks}
    return q, k, v, options


def check(out, lse, q, k, v, options) -> None:
    exact, exact_lse = attention_reference(q.double(), k.double(), v.double(), **options)
    assert_matches_reference(out, exact, eager_attention(q, k, v, **options))
    assert_lse_matches(lse, exact_lse)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_dense(case: Case) -> None:
    q, k, v, options = inputs(case)
    with emulated():
        out, lse = launch_forward(q, k, v, out=None, return_lse=True, tiles=case.tiles, **options)
    check(out, lse, q, k, v, options)


@pytest.mark.parametrize("schedule", list(Schedule), ids=lambda schedule: schedule.name)
@pytest.mark.parametrize("window", [FULL, CAUSAL, (40, 0)], ids=str)
def test_packed_sequences_do_not_see_their_neighbours(schedule: Schedule, window: tuple[int, int]) -> None:
    """Odd sequences are NaN as a whole, others must come out right; empty ones and rows behind the last are left alone."""
    lengths_q = [70, 33, 0, 1, 150, 20, 130, 5]
    lengths_k = [70, 33, 40, 9, 150, 20, 260, 0]
    q, k, v = make_qkv(1, sum(lengths_q) + 7, sum(lengths_k) + 7, 2, 1, 64, dtype=torch.bfloat16)
    cu_q = cu_seqlens(lengths_q)
    cu_k = cu_seqlens(lengths_k)
    for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k)):
        x[:, cu[-1] :] = float("nan")
        for b in (1, 3, 5):
            x[:, cu[b] : cu[b + 1]] = float("nan")
    q = q[0]
    k = k[0]
    v = v[0]
    options = {"softmax_scale": 0.125, "window_size": window, "softcap": 0.0, "sinks": None}
    out = torch.full_like(q, 7.0)
    with emulated():
        _, lse = launch_forward(
            q,
            k,
            v,
            out=out,
            return_lse=True,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            max_seqlen_q=150,
            max_seqlen_k=260,
            tiles=TileConfig(2, 64, 2, 2, schedule),
            **options,
        )
    assert (out[cu_q[-1] :] == 7.0).all()
    for b in (0, 4, 6, 7):
        rows = slice(cu_q[b], cu_q[b + 1])
        keys = slice(cu_k[b], cu_k[b + 1])
        check(out[None, rows], lse[None, :, rows], q[None, rows], k[None, keys], v[None, keys], options)


PAGED = [
    Case("page-of-16"),
    Case("two-groups-of-heads", heads=(4, 2)),
    Case("page-larger-than-a-block", seqlen_q=256),
    Case("page-of-48", seqlen_q=48, window=FULL),
    Case("window", window=(40, 0)),
    Case("window-both-page-of-32", window=(30, 10), seqlen_q=32, softcap=5.0, sinks=True),
    Case("d128-float16", head_dim=(128, 128), dtype=torch.float16, seqlen_q=64),
    Case("d192-dv128", head_dim=(192, 128)),
    Case("d256-short", head_dim=(256, 256), tiles=TileConfig(2, 64, 2, 1, DYNAMIC, o_parts=2), seqlen_q=32),
    Case("grid-one-group", tiles=TileConfig(1, 64, 2, 1, GRID)),
]


def paged_inputs(case: Case, lengths_q: list[int], lengths_k: list[int]):
    """`seqlen_q` is the page size, 16 if it is the default. -> arguments, and per sequence its rows, keys and values."""
    page_size = 16 if case.seqlen_q == 200 else case.seqlen_q
    q, k, v = (x[0] for x in make_qkv(1, sum(lengths_q), sum(lengths_k), *case.heads, *case.head_dim, dtype=case.dtype))
    keys = k.split(lengths_k)
    values = v.split(lengths_k)
    k_cache, v_cache, block_table, seqused_k = make_paged(keys, values, page_size)
    sinks = torch.randn(case.heads[0], generator=torch.Generator().manual_seed(1)) if case.sinks else None
    options = {"softmax_scale": case.scale, "window_size": case.window, "softcap": case.softcap, "sinks": sinks}
    cu_q = cu_seqlens(lengths_q)
    paging = {
        "block_table": block_table,
        "seqused_k": seqused_k,
        "cu_seqlens_q": cu_q,
        "max_seqlen_q": max(lengths_q),
        "max_seqlen_k": max(lengths_k),
        "tiles": case.tiles,
    }
    rows = [slice(a, b) for a, b in pairwise(cu_q.tolist())]
    return (q, k_cache, v_cache), paging, options, list(zip(rows, keys, values, strict=True))


def paged_is_right(case: Case, faults: dict[str, str] | None = None) -> None:
    tensors, paging, options, sequences = paged_inputs(case, [70, 0, 1, 150, 90], [70, 30, 9, 310, 0])
    with emulated(faults=faults, patience=2.0 if faults else 20.0):
        out, lse = launch_forward(*tensors, out=None, return_lse=True, **paging, **options)
    for rows, k, v in sequences:
        if rows.start < rows.stop and len(k):
            check(out[None, rows], lse[None, :, rows], tensors[0][None, rows], k[None], v[None], options)
    assert (out[-90:] == 0).all()


@pytest.mark.parametrize("case", PAGED, ids=lambda case: case.id)
def test_paged(case: Case) -> None:
    """Pages in any order; every slot that no sequence owns is NaN, and table entries behind the last page point outside."""
    paged_is_right(case)


def test_pages_before_a_window_are_not_read() -> None:
    """They may belong to another sequence by now: their table entries point outside of the cache."""
    (q, k_cache, v_cache), paging, options, [(_, k, v)] = paged_inputs(Case("", window=(30, 0)), [100], [300])
    first_seen = 300 - 100 - 30
    paging["block_table"][0, : first_seen // 16] = 2**28
    with emulated():
        out, lse = launch_forward(q, k_cache, v_cache, out=None, return_lse=True, **paging, **options)
    check(out[None], lse[None], q[None], k[None], v[None], options)


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (2, 0, 1, 3)], ids=["heads-first", "heads-outermost"])
def test_strided_caches(order: tuple[int, ...]) -> None:
    """A cache that is a view: heads before tokens, and K and V side by side in one tensor."""
    (q, k_cache, v_cache), paging, options, [(_, k, v)] = paged_inputs(Case("", heads=(4, 2)), [100], [130])
    both = torch.stack([k_cache, v_cache], dim=1)
    back = [order.index(i) for i in range(4)]
    moved = k_cache.permute(order).contiguous().permute(back)
    with emulated():
        for keys, values in ((both[:, 0], both[:, 1]), (moved, v_cache)):
            out, lse = launch_forward(q, keys, values, out=None, return_lse=True, **paging, **options)
            check(out[None], lse[None], q[None], k[None], v[None], options)


def few_queries_are_left_alone(faults: dict[str, str] | None = None) -> None:
    tensors, paging, options, sequences = paged_inputs(Case(""), [1, 70, 16, 17, 0], [90, 70, 33, 40, 5])
    out = torch.full_like(tensors[0], 7.0)
    lse = torch.full((2, 104), 7.0)
    with emulated(faults=faults):
        launch_forward(*tensors, out=out, lse=lse, return_lse=True, skip_q=16, **paging, **options)
    for index, (rows, k, v) in enumerate(sequences):
        if index in (1, 3):
            check(out[None, rows], lse[None, :, rows], tensors[0][None, rows], k[None], v[None], options)
        else:
            assert (out[rows] == 7.0).all()
            assert (lse[:, rows] == 7.0).all()


def test_sequences_with_few_queries_are_left_alone() -> None:
    few_queries_are_left_alone()


def test_a_mixed_batch_is_shared_with_who_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the public function: this kernel has the longer sequences, the backend for few queries the others."""
    tensors, paging, options, sequences = paged_inputs(Case(""), [1, 70, 16, 17, 3], [90, 70, 33, 40, 5])

    class Decoder:
        def forward_paged(self, q, k_cache, v_cache, *, max_seqlen_q, out, lse, **_: object) -> None:
            assert max_seqlen_q == 4  # of a group of 2 heads fill 8 rows
            for rows, k, v in sequences:
                if rows.stop - rows.start <= max_seqlen_q:
                    exact, exact_lse = attention_reference(*(x[None].float() for x in (q[rows], k, v)), **options)
                    out[rows], lse[:, rows] = exact[0].to(out.dtype), exact_lse[0]

    monkeypatch.setattr(api, "select_backend", lambda spec, name: Decoder() if spec.few_queries else HopperBackend())
    monkeypatch.setattr(api, "_PLANS", {})
    paging.pop("tiles")
    with emulated():
        out, lse = api.attention_paged(*tensors, return_lse=True, **paging, **options)
    for rows, k, v in sequences:
        check(out[None, rows], lse[None, :, rows], tensors[0][None, rows], k[None], v[None], options)


def test_dense_batches_do_not_see_their_neighbours() -> None:
    """K and V are views into NaN: rows behind seqlen_k, and other batches, must not be read."""
    q, k, v, options = inputs(Case("", batch=2, seqlen_q=100, seqlen_k=90))
    wide = [torch.full((2, 128, 1, 64), float("nan"), dtype=torch.bfloat16) for _ in range(2)]
    for x, data in zip(wide, (k, v), strict=True):
        x[:, :90] = data
    with emulated():
        out, lse = launch_forward(q, wide[0][:, :90], wide[1][:, :90], out=None, return_lse=True, **options)
    check(out, lse, q, k, v, options)


def test_strides() -> None:
    """Head-first memory goes to the copy engine as it is; a transposed last dimension, an odd stride and an expanded batch are
    copied; an output that cannot be addressed is written through a copy."""
    q, k, v, options = inputs(Case("", batch=2, heads=(4, 2)))
    head_first = q.transpose(1, 2).contiguous().transpose(1, 2)
    transposed = k.transpose(2, 3).contiguous().transpose(2, 3)
    odd = torch.zeros(2, 200, 2, 67, dtype=torch.bfloat16)[..., 1:65].copy_(v)
    out = torch.zeros(2, 200, 4, 66, dtype=torch.bfloat16)[..., 1:65]
    with emulated():
        result, lse = launch_forward(head_first, transposed, odd, out=out, return_lse=True, **options)
        assert result is out
        check(out, lse, q, k, v, options)
        same_keys = k[:1].expand(2, -1, -1, -1)
        same_values = v[:1].expand(2, -1, -1, -1)
        result, lse = launch_forward(q, same_keys, same_values, out=None, return_lse=True, **options)
    check(result, lse, q, same_keys, same_values, options)


@pytest.mark.parametrize("changes", [{"batch": 2}, {"seqlen_q": 70, "window": (30, 0), "softcap": 5.0, "scale": 1.0}], ids=str)
def test_a_step_computes_what_a_launch_computes(changes: dict) -> None:
    """Of other tensors that are laid out alike, and only of such as the copy engine can address."""
    q, k, v, options = inputs(Case("", **({"heads": (4, 2), "head_dim": (192, 128)} | changes)))
    make_step = HopperBackend().step
    options.pop("sinks")
    later = [torch.roll(x, 1, dims=1).transpose(1, 2).contiguous() for x in (q, k, v)]
    q, k, v = (x.transpose(1, 2) for x in later)
    first = [x.flip(1) for x in later]
    with emulated():
        step = make_step(*(x.transpose(1, 2) for x in first), None, **options)
        out = step(*later, None)
        for i, x in enumerate(later):
            odd = x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
            assert step(*later[:i], odd, *later[i + 1 :], None) is None
        assert make_step(q, k, v.repeat(1, 1, 1, 2)[..., ::2], None, **options)(*later, None) is None
        assert make_step(q, k[:, :0], v[:, :0], None, **options)(*later, None) is None
        expected, lse = launch_forward(q, k, v, out=None, return_lse=True, sinks=None, **options)
    assert torch.equal(out, expected)
    check(out, lse, q, k, v, options | {"sinks": None})


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0])], ids=["plain", "sinks"])
def test_nothing_to_attend_to(sinks: torch.Tensor | None) -> None:
    q, k, v, options = inputs(Case(""))
    options["sinks"] = sinks
    with emulated():
        out, lse = launch_forward(q, k[:, :0], v[:, :0], out=None, return_lse=True, **options)
        assert launch_forward(q[:, :0], k, v, out=None, return_lse=False, **options)[0].shape == (1, 0, 2, 64)
    assert (out == 0).all()
    expected = torch.full((2,), float("-inf")) if sinks is None else sinks
    assert torch.equal(lse, expected[None, :, None].expand(1, 2, 200))


def test_the_counter_is_as_it_was_found() -> None:
    """Two launches in a row: the second starts from the counter that the first put back."""
    q, k, v, options = inputs(Case("", seqlen_q=300, seqlen_k=300))
    counter = torch.zeros(1, dtype=torch.int32)
    with emulated(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("fa_serve.backends.hopper.forward._counter", lambda device: counter)
        for _ in range(2):
            tiles = TileConfig(1, 64, 2, 2, DYNAMIC)
            out, lse = launch_forward(q, k, v, out=None, return_lse=True, tiles=tiles, **options)
            assert counter.item() == 0
            check(out, lse, q, k, v, options)


@pytest.mark.parametrize("heads", [1, 5, 32])
@pytest.mark.parametrize(("group", "tail"), [(1, 1), (4, 1), (4, 13), (8, 32), (32, 32)])
def test_every_tile_of_every_head_is_dealt_once(heads: int, group: int, tail: int) -> None:
    """Group after group, longest tiles of a group first; the last group is at least the tail."""
    deal = _namespace({})["_deal"]
    tiles = 7
    work = SimpleNamespace(head_group=min(group, heads), head_tail=min(tail, heads))
    dealt = [tuple(map(int, deal(torch.tensor(i), tiles, heads, work))) for i in range(tiles * heads)]
    assert sorted(dealt) == [(head, tile) for head in range(heads) for tile in range(tiles)]
    in_last = heads - (heads - work.head_tail) // work.head_group * work.head_group
    ends = [*range(work.head_group, heads - in_last + 1, work.head_group), heads]
    order = [(next(g for g, end in enumerate(ends) if head < end), tile, head) for head, tile in dealt]
    assert order == sorted(order)


@pytest.mark.parametrize("window", [FULL, CAUSAL, (-1, 50), (100, 0)], ids=str)
def test_tile_table_is_every_tile_longest_first(window: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(3)
    lengths_q = torch.randint(0, 300, (300,), generator=generator).tolist()
    lengths_k = torch.randint(0, 300, (300,), generator=generator).tolist()
    cu_q = cu_seqlens(lengths_q)
    cu_k = cu_seqlens(lengths_k)
    with emulated(resident_blocks=64):
        slots = tile_slots(sum(lengths_q), len(lengths_q), max(lengths_q), 128)
        launch = table_launch(slots, len(lengths_q), window, 128, 64, 0, paged=False)
        *records, behind = tile_table(launch, slots, cu_q, cu_k).view(-1, RECORD).tolist()
    live = [r for r in records if r[0] >= 0]
    assert records[: len(live)] == live
    assert behind[:2] == [0, len(live)]
    assert len(records) == slots
    tiles = {(b, m) for b, n in enumerate(lengths_q) for m in range(0, n, 128)}
    starts = {start: b for b, start in enumerate(cu_q[:-1].tolist()) if lengths_q[b]}
    assert {(starts[r[2]], r[0]) for r in live} == tiles
    assert len(live) == len(tiles)

    def reach(r: list[int]) -> int:
        end = r[5] if window[1] < 0 else min(r[5], r[0] + 128 + r[5] - r[3] + window[1])
        return -(-max(end, 0) // 64)

    assert [reach(r) for r in live] == sorted((reach(r) for r in live), reverse=True)
    for row, _, q0, q_len, k0, kv_len, low, high in live:
        b = starts[q0]
        assert (q_len, k0, kv_len) == (lengths_q[b], cu_k[b], lengths_k[b])
        first = max(row + kv_len - q_len - window[0], 0) // 64 if window[0] >= 0 else 0
        assert high == max(reach([row, 0, q0, q_len, k0, kv_len]), 1)
        assert low == min(first, high - 1)


FAULTS = {
    "a wrong phase": {
        "(count // var.tiles.stages) & 1) ^ 1)\n    full = bars.k_full": "(count // var.tiles.stages) & 1))\n    full = bars.k_full"  # noqa: E501
    },
    "V released before its product is done": {
        "o_token = _issue_values(p, acc, state.alpha, count - 1, smem, bars, var)\n        _pass_turn": "o_token = _issue_values(p, acc, state.alpha, count - 1, smem, bars, var)\n"  # noqa: E501
        "        mbarrier.arrive(bars.v_empty.index((count - 1) % var.tiles.stages), count=1)\n        _pass_turn",
        "        acc = warpgroup_mma_wait(0, deps=[o_token])\n"
        "    mbarrier.arrive(bars.v_empty.index((count - 1) % var.tiles.stages), count=1)": "        acc = warpgroup_mma_wait(0, deps=[o_token])",  # noqa: E501
    },
    "K released before its product is done": {
        "    _take_turn(group, var)\n    if": "    _take_turn(group, var)\n"
        "    mbarrier.arrive(bars.k_empty.index(count % var.tiles.stages), count=1)\n    if",
        "    mbarrier.arrive(bars.k_empty.index(count % var.tiles.stages), count=1)\n    p, state": "    p, state",
    },
    "queries released before O has left their place": {"    tma.store_wait(0)\n    gl.thread_barrier()\n": ""},
    "no mask": {"keep = columns < gl.expand_dims(limits.last, 1)": "keep = columns >= 0"},
    "a mask that begins one block late": {"if (block >= limits.high)": "if (block > limits.high)"},
    "the wrong tile's output": {"_write(acc, state, tile, turn - 1,": "_write(acc, state, upcoming, turn - 1,"},
    "O that keeps an old maximum": {"    if not var.tiles.rescale_late:": "    if False:"},
    "late: O that keeps an old maximum": {"    if var.tiles.rescale_late:": "    if False:"},
    "a sum that keeps an old maximum": {"state.l * gl.expand_dims(rescale, 1)": "state.l"},
    "a turn that is never passed": {"    if group == var.tiles.groups - 1:\n        _pass_turn(group, var)\n": ""},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_sees(fault: str) -> None:
    q, k, v, options = inputs(Case("", scale=3.0, seqlen_q=500, seqlen_k=500))
    tiles = TileConfig(2, 64, 2, 2, DYNAMIC, pingpong=True, rescale_late="late" in fault)

    def run() -> None:
        for seed in range(4):  # a race need not be lost every time
            with emulated(seed=seed, faults=FAULTS[fault], patience=1.0, delay=5e-3):
                out, lse = launch_forward(q, k, v, out=None, return_lse=True, tiles=tiles, **options)
            check(out, lse, q, k, v, options)

    with pytest.raises((EmulationError, AssertionError)):
        run()


PAGE_FAULTS = {
    "a page read past its owner's end": ("gl.minimum(gl.maximum(tile.kv_len - key + row, 0), var.page_size)", "var.page_size"),
    "the pieces of a block in another order": (
        "(slot * CHUNKS + chunk) * PIECES + i",
        "(slot * CHUNKS + chunk) * PIECES + (i ^ 1)",
    ),
    "the table's row of another sequence": ("tl.store(record + 4, k_start)", "tl.store(record + 4, k_start * 0)"),
    "a sequence that somebody else computes": ("tl.where(q_len > skip_q, q_len, 0)", "q_len"),
}


@pytest.mark.parametrize("fault", PAGE_FAULTS)
def test_the_emulator_sees_in_pages(fault: str) -> None:
    faults = dict([PAGE_FAULTS[fault]])
    check_it = partial(paged_is_right, Case("", window=FULL))
    if "somebody" in fault:
        check_it = few_queries_are_left_alone
    with pytest.raises((EmulationError, AssertionError)):
        check_it(faults)


def test_the_emulator_sees_a_bound_past_the_sequence() -> None:
    q, k, v = (x[0] for x in make_qkv(1, 96, 96, 2, 1, 64, dtype=torch.bfloat16))
    v[48:] = float("nan")
    cu = cu_seqlens([48, 30])
    faults = {"[RAGGED, origin + length, RAGGED - length + row": "[RAGGED, origin + length + 9, RAGGED - length - 9 + row"}
    options = {"softmax_scale": 0.125, "window_size": FULL, "softcap": 0.0, "sinks": None}
    for expected, fault in ((True, {}), (False, faults)):
        with emulated(faults=fault):
            out, _ = launch_forward(
                q,
                k,
                v,
                out=None,
                return_lse=False,
                cu_seqlens_q=cu,
                cu_seqlens_k=cu,
                max_seqlen_q=48,
                max_seqlen_k=48,
                **options,
            )
        assert bool(torch.isfinite(out[:48]).all()) == expected
