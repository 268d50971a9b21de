"""Keys that are split among tiles of the Hopper kernel, on a Hopper GPU: few queries and chunks behind up to 64k keys.

Each test looks into the table of splits, so that a call whose keys stayed whole does not pass for a split one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import fa_serve
from fa_serve.backends.calls import AttentionOptions, AttentionTensors
from fa_serve.backends.hopper.forward import launches as forward_launches
from fa_serve.backends.hopper.forward.plan import plan_hopper_forward
from fa_serve.backends.hopper.forward.tiles import MAX_SPLITS
from fa_serve.backends.reference import attention_reference
from fa_serve.testing import (
    assert_lse_matches,
    assert_matches_reference,
    cu_seqlens,
    eager_attention,
    make_paged,
    make_qkv,
)

if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

DEVICE = "cuda"
LARGEST_SCORES = 1 << 26
"""Scores that the reference computes at a time, in float64."""


@dataclass(frozen=True)
class Case:
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    heads: tuple[int, int] = (8, 2)
    head_dims: tuple[int, int] = (128, 128)
    window: tuple[int, int] = (-1, 0)
    softcap: float = 0.0
    sinks: bool = False
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        options = [f"W{self.window[0]},{self.window[1]}"] if self.window != (-1, 0) else []
        options += ["softcap"] * bool(self.softcap) + ["sinks"] * self.sinks
        options += ["float16"] * (self.dtype == torch.float16) + [f"P{self.page_size}"] * (self.page_size != 16)
        lengths = f"Q{max(self.lengths_q)}-K{max(self.lengths_k)}-x{len(self.lengths_q)}"
        return "_".join([lengths, "H{}-{}".format(*self.heads), "D{}-{}".format(*self.head_dims), *options])

    @property
    def options(self) -> dict[str, object]:
        """The options of `attention_reference`."""
        sinks = torch.linspace(-1.5, 2.0, self.heads[0], device=DEVICE) if self.sinks else None
        return {"softmax_scale": 0.1, "window_size": self.window, "softcap": self.softcap, "sinks": sinks}


class Call:
    """A packed or paged call of the Hopper kernel. Unused slots of pages, and keys past the last sequence, are NaN."""

    def __init__(self, case: Case, layout: str) -> None:
        self.case = case
        q, k, v = (
            x[0]
            for x in make_qkv(
                1, sum(case.lengths_q), sum(case.lengths_k), *case.heads, *case.head_dims, dtype=case.dtype, device=DEVICE
            )
        )
        self.sequences = list(zip(q.split(case.lengths_q), k.split(case.lengths_k), v.split(case.lengths_k), strict=True))
        sinks = case.options["sinks"]
        if layout == "packed":
            k, v = (torch.cat([x, x.new_full((70, *x.shape[1:]), float("nan"))]) for x in (k, v))
            lengths = {"keys": cu_seqlens(case.lengths_k, DEVICE)}
        else:
            k, v, table, used = make_paged(*(x.split(case.lengths_k) for x in (k, v)), case.page_size)
            lengths = {"keys": used, "block_table": table}
        self.tensors = AttentionTensors(q, k, v, sinks, cu_seqlens_q=cu_seqlens(case.lengths_q, DEVICE), **lengths)

    def plan(self, max_splits: int | None = None) -> Callable[[AttentionTensors], tuple[Tensor, Tensor]]:
        longest = max(self.case.lengths_q), max(self.case.lengths_k)
        options = AttentionOptions(0.1, self.case.window, self.case.softcap, *longest, return_lse=True)
        return plan_hopper_forward(self.tensors, options, max_splits=max_splits)

    def check(self, out: Tensor, lse: Tensor) -> None:
        check(out, lse, self.sequences, self.case)


def check(out: Tensor, lse: Tensor | None, sequences: Sequence[tuple[Tensor, ...]], case: Case) -> None:
    """The 2x rule for all rows of a call. The reference of long sequences is computed for some rows at a time."""
    exacts = []
    eagers = []
    exact_lses = []
    for q, k, v in sequences:
        rows = max(1, LARGEST_SCORES // max(case.heads[0] * len(k), 1))
        if case.window[1] != 0 or len(k) < len(q):  # the last of some rows would not see the last key that is passed
            rows = max(len(q), 1)
        for start in range(0, len(q), rows):
            queries = q[None, start : start + rows]
            seen = len(k) - (len(q) - start - queries.shape[1])
            given = queries, k[None, :seen], v[None, :seen]
            exact, exact_lse = attention_reference(*(x.double() for x in given), **case.options)
            exacts.append(exact[0])
            exact_lses.append(exact_lse[0])
            eagers.append(eager_attention(*given, **case.options)[0])
    assert_matches_reference(out, torch.cat(exacts), torch.cat(eagers))
    if lse is not None:
        assert_lse_matches(lse, torch.cat(exact_lses, 1), case.softcap)


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Tensor]]:
    """The tables of all launches, with the number of records that each has room for."""
    found: list[tuple[int, Tensor]] = []
    compute = forward_launches.tile_table

    def keep(launch: object, max_tiles: int, *lengths: Tensor) -> Tensor:
        found.append((max_tiles, compute(launch, max_tiles, *lengths)))
        return found[-1][1]

    monkeypatch.setattr(forward_launches, "tile_table", keep)
    return found


def most_splits(capacity: int, table: Tensor) -> int:
    """The most splits of a tile in a table of splits."""
    live = int(table[capacity * 8 + 1])
    assert live <= capacity
    return int(table[: live * 8].view(-1, 8)[:, 1].max()) // MAX_SPLITS


def leave_nan_in_free_memory() -> None:
    """What the allocator hands out next is NaN, so a split that is combined and was not written shows."""
    if DEVICE == "cuda":
        torch.full((64 << 20,), float("nan"), device=DEVICE)


KEYS = (20000, 0, 700, 1500, 16, 5000, 64, 3)
FEW = Case((4, 16, 1, 7, 16, 2, 0, 9), KEYS)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
VERIFIED = [
    *[replace(FEW, heads=(2 * group, 2)) for group in GROUPS],
    replace(FEW, heads=(64, 1)),
    replace(FEW, heads=(14, 2), dtype=torch.float16, page_size=48),
    *[replace(FEW, head_dims=dims) for dims in ((64, 64), (80, 80), (96, 96), (72, 40), (192, 128), (256, 256))],
    *[replace(FEW, heads=(14, 2), head_dims=dims) for dims in ((64, 64), (192, 128), (256, 256))],
    *[replace(FEW, heads=heads, window=(6000, 0)) for heads in ((8, 2), (14, 2))],
    *[replace(FEW, heads=heads, softcap=20.0, sinks=True) for heads in ((8, 2), (14, 2), (2, 2))],
    replace(FEW, window=(-1, -1)),
    Case((16,), (20000,), heads=(32, 8)),
    Case((2,) * 16, KEYS * 2, heads=(24, 8)),
]
CHUNKS = [
    Case((64,), (64 + 2048,), heads=(16, 8)),
    Case((256,), (256 + 4096,), heads=(16, 2)),
    Case((300, 65, 17), (8300, 1100, 40), heads=(10, 2), head_dims=(64, 64), sinks=True),
    Case((512, 512), (8704, 2000), heads=(8, 8), softcap=20.0),
    Case((512,), (16896,), heads=(4, 4), head_dims=(96, 96), dtype=torch.float16, page_size=32),
    Case((1024, 100), (5120, 5000), heads=(4, 2), window=(3500, 0)),
    Case((300,), (9000,), heads=(4, 4), window=(5000, 40), sinks=True, softcap=20.0),
    Case((128, 128), (4096, 3000), heads=(6, 2), head_dims=(192, 128)),
    Case((200,), (8000,), heads=(4, 2), head_dims=(256, 256)),
    Case((70,), (7000,), heads=(4, 2), window=(-1, -1)),
    Case((128,), (65536 + 128,), heads=(32, 8)),
    Case((2048,), (65536 + 2048,), heads=(2, 1)),
    Case((2048, 1), (8192 + 2048, 9000), heads=(2, 1), head_dims=(64, 64)),
    Case((300,), (5300,), heads=(16, 8)),
    Case((24,), (9000,), heads=(32, 8), sinks=True),
]
WHOLE = [
    Case((300,), (5300,), heads=(64, 8), head_dims=(64, 64)),
    Case((300,) * 4, (5300,) * 4, heads=(64, 8)),
    Case((300, 1, 160, 700), (5300, 9000, 12000, 3000), heads=(64, 8), head_dims=(64, 64), window=(4000, 0)),
]
"""Chunks whose heads share tiles, of which there are enough to fill the GPU. Without pages heads share no tiles."""


@pytest.mark.parametrize("layout", ["packed", "paged"])
@pytest.mark.parametrize("case", [*VERIFIED, *CHUNKS], ids=str)
def test_split_keys(case: Case, layout: str, tables: list[tuple[int, Tensor]]) -> None:
    """Out and lse are right, and equal in every bit when the call is repeated, whatever the memory holds."""
    call = Call(case, layout)
    run = call.plan()
    leave_nan_in_free_memory()
    out, lse = run(call.tensors)
    assert most_splits(*tables[0]) > 1
    call.check(out, lse)
    for _ in range(20):
        leave_nan_in_free_memory()
        again, again_lse = run(call.tensors)
        assert torch.equal(again, out)
        assert torch.equal(again_lse, lse)


@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_chunks_whose_heads_share_tiles(case: Case, tables: list[tuple[int, Tensor]]) -> None:
    call = Call(case, "paged")
    out, lse = call.plan()(call.tensors)
    call.check(out, lse)


@pytest.mark.parametrize("max_splits", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("heads", [(8, 2), (14, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("queries", [16, 200])
def test_every_limit_of_splits(queries: int, heads: tuple[int, int], max_splits: int, tables: list[tuple[int, Tensor]]) -> None:
    call = Call(Case((queries, 3), (12000, 700), heads=heads), "paged")
    out, lse = call.plan(max_splits)(call.tensors)
    call.check(out, lse)
    if max_splits > 1:
        assert 1 < most_splits(*tables[0]) <= max_splits


def test_many_sequences_of_unequal_lengths(tables: list[tuple[int, Tensor]]) -> None:
    """More sequences than a program of the table reads at a time, and one that is much longer than the others."""
    lengths = [500 + 7 * i % 300 for i in range(300)]
    lengths[170] = 20000
    call = Call(Case((4,) * 300, tuple(lengths), heads=(8, 2)), "paged")
    out, lse = call.plan()(call.tensors)
    assert most_splits(*tables[0]) > 1
    call.check(out, lse)


PAGES = 1250  # of a sequence: 20,000 keys
GRAPHS = {
    "few": (
        (8, 2),
        [
            ([4] * 8, [20000, *[300] * 7]),
            ([1, 16, 0, 2, 5, 3, 4, 1], [3, 20000, 5, 0, 9000, 40, 1000, 64]),
            ([4] * 8, [300] * 8),
        ],
    ),
    "few-seven-heads": ((14, 2), [([4] * 8, [9000] * 8), ([4] * 8, [20, 33, 1, 0, 4, 20000, 64, 65]), ([4] * 8, [99] * 8)]),
    "chunks": ((8, 2), [([200, 100, 20], [20000, 5000, 20]), ([20, 300, 0], [0, 9000, 77]), ([106, 107, 107], [300] * 3)]),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_follows_the_lengths_on_the_device(name: str, tables: list[tuple[int, Tensor]]) -> None:
    """The table of splits is cut on the device: a replay with other lengths has other splits, and is right."""
    heads, steps = GRAPHS[name]
    total = sum(steps[0][0])
    batch = len(steps[0][0])
    longest = max(max(q) for q, _ in steps)
    case = Case((), (), heads=heads)
    q, k, v = (x[0] for x in make_qkv(1, total, 30000, *heads, 128, dtype=torch.bfloat16, device=DEVICE))
    k, v = (x.unflatten(0, (-1, 16)) for x in (k, v))
    generator = torch.Generator().manual_seed(0)
    table = torch.stack([torch.randperm(len(k), generator=generator)[:PAGES] for _ in range(batch)]).to(DEVICE, torch.int32)
    cu = cu_seqlens(steps[0][0], DEVICE)
    used = torch.tensor(steps[0][1], dtype=torch.int32, device=DEVICE)
    tensors = AttentionTensors(q, k, v, cu_seqlens_q=cu, keys=used, block_table=table)
    run = plan_hopper_forward(tensors, AttentionOptions(0.1, (-1, 0), 0.0, longest, 16 * PAGES, return_lse=True))
    run(tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run(tensors)
    captured = tables[-1]
    splits = set()
    for lengths_q, lengths_k in [*steps, *steps[::-1]]:
        assert sum(lengths_q) == total
        cu.copy_(cu_seqlens(lengths_q, DEVICE))
        used.copy_(torch.tensor(lengths_k))
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        splits.add(most_splits(*captured))
        caches = [
            (k[pages.long()].flatten(0, 1)[:n], v[pages.long()].flatten(0, 1)[:n])
            for pages, n in zip(table, lengths_k, strict=True)
        ]
        check(out, lse, [(x, *kv) for x, kv in zip(q.split(lengths_q), caches, strict=True)], case)
        direct, direct_lse = run(tensors)
        assert torch.equal(direct, out)
        assert torch.equal(direct_lse, lse)
    assert max(splits) > 1
    assert len(splits) > 1


def test_prompts_beside_sequences_that_decode(tables: list[tuple[int, Tensor]]) -> None:
    """The public function splits the keys of prompts and leaves the other sequences to the decoding kernel."""
    case = Case((1, 300, 1, 90, 4), (9000, 7000, 33, 12000, 5000), heads=(8, 2), sinks=True, softcap=20.0)
    call = Call(case, "paged")
    q, k, v, sinks = call.tensors[:4]
    out, lse = fa_serve.attention_paged(
        q,
        k,
        v,
        block_table=call.tensors.block_table,
        seqused_k=call.tensors.keys,
        cu_seqlens_q=call.tensors.cu_seqlens_q,
        max_seqlen_q=300,
        max_seqlen_k=12000,
        causal=True,
        softmax_scale=0.1,
        softcap=20.0,
        sinks=sinks,
        return_lse=True,
    )
    assert most_splits(*tables[-1]) > 1
    call.check(out, lse)


@pytest.mark.parametrize("heads", [(8, 2), (14, 2)], ids=str)
def test_rows_of_no_sequence_are_zero(heads: tuple[int, int], tables: list[tuple[int, Tensor]]) -> None:
    """With a strided output, beside which nothing is written."""
    case = Case((16, 9, 3), (9000, 40, 600), heads=heads, head_dims=(80, 80))
    call = Call(case, "paged")
    memory = torch.full((40, heads[0], 96), 7.0, dtype=torch.bfloat16, device=DEVICE)
    q = torch.cat([call.tensors.q, call.tensors.q.new_full((12, heads[0], 80), float("nan"))])
    call.tensors = call.tensors._replace(q=q, out=memory[..., :80])
    out, lse = call.plan()(call.tensors)
    assert most_splits(*tables[0]) > 1
    call.check(out[:28], lse[:, :28])
    assert (memory[28:, :, :80] == 0).all()
    assert (lse[:, 28:] == float("-inf")).all()
    assert (memory[..., 80:] == 7.0).all()


def test_streams_have_buffers_of_their_own() -> None:
    calls = [Call(replace(FEW, heads=heads), "paged") for heads in ((8, 2), (14, 2), (4, 2))]
    runs = [call.plan() for call in calls]
    expected = [run(call.tensors) for run, call in zip(runs, calls, strict=True)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    for _ in range(20):
        outs = []
        for stream, run, call in zip(streams, runs, calls, strict=True):
            with torch.cuda.stream(stream):
                outs.append(run(call.tensors))
        torch.cuda.synchronize()
        for found, right in zip(outs, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
