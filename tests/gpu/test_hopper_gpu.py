"""What only a Hopper GPU can show of the Hopper kernel: counters across launches, streams and graphs, and races.

`test_attention_gpu.py` checks all options for every backend, and `benchmarks/tuning/tune_hopper.py` the tiles that are never
chosen.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import fa_serve
from fa_serve.backends.calls import AttentionOptions, AttentionTensors
from fa_serve.backends.hopper.forward.plan import plan_hopper_forward
from fa_serve.backends.hopper.forward.tiles import HopperTiles, Schedule, hopper_forward_tiles
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

OPTIONS = {"softmax_scale": 0.1, "window_size": (-1, 0), "softcap": 0.0, "sinks": None}
DYNAMIC = HopperTiles(2, 128, 2, 2, Schedule.DYNAMIC)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: HopperTiles | None = DYNAMIC,
    softmax_scale: float = OPTIONS["softmax_scale"],
    cu: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Causal attention of a dense batch, or of packed sequences with `cu` for queries and keys."""
    longest_q, longest_k = (x.shape[1] if max_seqlen is None else max_seqlen for x in (q, k))
    tensors = AttentionTensors(q, k, v, cu_seqlens_q=cu, keys=cu)
    options = AttentionOptions(softmax_scale, (-1, 0), 0.0, longest_q, longest_k, return_lse=False)
    return plan_hopper_forward(tensors, options, tiles)(tensors)[0]


def inputs(seed: int = 0, seqlen: int = 700, batch: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    return make_qkv(batch, seqlen, seqlen, 8, 2, 128, dtype=torch.bfloat16, device="cuda", seed=seed)


def check(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    exact, _ = attention_reference(q.double(), k.double(), v.double(), **OPTIONS)
    assert_matches_reference(out, exact, eager_attention(q, k, v, **OPTIONS))


def test_many_launches_give_the_same_bits() -> None:
    """The dynamic schedule assigns tiles differently every time, and the result does not depend on it."""
    q, k, v = inputs()
    first = run(q, k, v)
    check(first, q, k, v)
    for _ in range(200):
        assert torch.equal(run(q, k, v), first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("late", [False, True])
def test_maxima_that_grow(late: bool, dim: int, dtype: torch.dtype) -> None:
    """Keys that grow from block to block or shrink: maxima change by less and by more than the growth that is ignored."""
    q, k, v = make_qkv(2, 700, 700, 4, 2, dim, dtype=dtype, device="cuda")
    tiles = replace(hopper_forward_tiles(dim, dim, (-1, 0), 700, 700, False), rescale_late=late)
    options = OPTIONS | {"softmax_scale": 3 * dim**-0.5}
    for first, last in ((0.1, 4.0), (4.0, 0.1)):
        keys = k * torch.linspace(first, last, 700, device="cuda", dtype=dtype)[:, None, None]
        out = run(q, keys, v, tiles, options["softmax_scale"])
        exact, _ = attention_reference(q.double(), keys.double(), v.double(), **options)
        assert_matches_reference(out, exact, eager_attention(q, keys, v, **options))


def test_streams_do_not_share_counters() -> None:
    streams = [torch.cuda.Stream() for _ in range(4)]
    cases = [inputs(seed) for seed in range(4)]
    expected = [run(*case) for case in cases]
    torch.cuda.synchronize()
    for _ in range(20):
        outs = []
        for stream, case in zip(streams, cases, strict=True):
            with torch.cuda.stream(stream):
                outs.append(run(*case))
        torch.cuda.synchronize()
        for out, right in zip(outs, expected, strict=True):
            assert torch.equal(out, right)


def test_graphs_replayed_side_by_side() -> None:
    cases = [inputs(seed) for seed in range(3)]
    expected = [run(*case) for case in cases]
    graphs = []
    outs = []
    for case in cases:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append(run(*case))
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(20):
        for out in outs:
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for out, right in zip(outs, expected, strict=True):
            assert torch.equal(out, right)


def test_one_graph_for_all_lengths() -> None:
    """Packed lengths are read on the device, so a captured call follows new cu_seqlens within its maxima."""
    q, k, v = (x[0] for x in make_qkv(1, 600, 600, 8, 2, 128, dtype=torch.bfloat16, device="cuda"))
    cu = cu_seqlens([100, 200, 300], "cuda")
    run(q, k, v, cu=cu, max_seqlen=600)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(q, k, v, cu=cu, max_seqlen=600)
    for split in ([600, 0, 0], [1, 598, 1], [0, 0, 0], [300, 150, 150]):
        cu.copy_(cu_seqlens(split, "cuda"))
        out.fill_(float("nan"))
        graph.replay()
        start = 0
        for length in split:
            rows = slice(start, start + length)
            if length:
                check(out[None, rows], q[None, rows], k[None, rows], v[None, rows])
            start += length


LONG_DIMS = [(64, 64), (72, 72), (80, 80), (96, 96), (112, 112), (128, 128), (160, 160), (192, 128), (192, 192), (256, 256)]


@pytest.mark.parametrize("head_dims", LONG_DIMS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_long_against_torch(head_dims: tuple[int, int], causal: bool) -> None:
    q, k, v = make_qkv(2, 5000, 5000, 4, 2, *head_dims, dtype=torch.bfloat16, device="cuda")
    out = fa_serve.attention(q, k, v, causal=causal, backend="hopper")
    heads_first = (x.transpose(1, 2).float() for x in (q, k, v))
    theirs = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=True).transpose(1, 2)
    assert (out.float() - theirs).abs().max() <= 2 * 2**-8 * theirs.abs().max()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_head_dim(head_dim: int, causal: bool) -> None:
    """Columns past head_dim arrive as zeros and are not written: what lies beside O keeps its value."""
    q, k, v = make_qkv(2, 300, 300, 4, 2, head_dim, dtype=torch.bfloat16, device="cuda")
    memory = torch.full((2, 300, 4, head_dim + 8), 7.0, dtype=torch.bfloat16, device="cuda")
    out = memory[..., :head_dim]
    options = OPTIONS | {"window_size": (-1, 0) if causal else (-1, -1)}
    call = AttentionTensors(q, k, v, out=out)
    found, lse = plan_hopper_forward(call, AttentionOptions(0.1, options["window_size"], 0.0, 300, 300, return_lse=True))(call)
    exact, exact_lse = attention_reference(q.double(), k.double(), v.double(), **options)
    assert_matches_reference(found, exact, eager_attention(q, k, v, **options))
    assert_lse_matches(lse, exact_lse)
    assert found.data_ptr() == out.data_ptr()
    assert (memory[..., head_dim:] == 7.0).all()


@pytest.mark.parametrize("head_dims", [(80, 24), (64, 256), (256, 64), (16, 80)], ids=str)
def test_values_of_another_width(head_dims: tuple[int, int]) -> None:
    q, k, v = make_qkv(2, 300, 400, 4, 2, *head_dims, dtype=torch.bfloat16, device="cuda")
    check(run(q, k, v, tiles=None), q, k, v)


def test_another_device_is_made_current() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    q, k, v = (x.to("cuda:1") for x in inputs())
    check(run(q, k, v), q, k, v)


PAGED_CASES = [  # page size, head dims, window, heads
    pytest.param(16, (128, 128), (-1, 0), (8, 2), id="16-d128"),
    pytest.param(32, (64, 64), (-1, 0), (8, 8), id="32-d64"),
    pytest.param(48, (128, 128), (-1, -1), (8, 1), id="48-d128-full"),
    pytest.param(64, (256, 256), (-1, 0), (4, 2), id="64-d256"),
    pytest.param(128, (192, 128), (-1, 0), (4, 4), id="128-d192"),
    pytest.param(256, (128, 128), (200, 0), (8, 2), id="256-d128-window"),
    pytest.param(16, (256, 256), (100, 20), (4, 1), id="16-d256-window"),
    pytest.param(16, (96, 96), (-1, 0), (8, 2), id="16-d96"),
    pytest.param(16, (80, 80), (-1, 0), (8, 2), id="16-d80"),
    pytest.param(64, (192, 192), (200, 0), (4, 2), id="64-d192-window"),
    pytest.param(48, (72, 96), (-1, -1), (4, 4), id="48-d72-dv96-full"),
]


def paged_call(lengths_q: list[int], lengths_k: list[int], page_size: int, head_dims: tuple[int, int], heads: tuple[int, int]):
    """-> q and the caches, the lengths of one call, and q, k and v of each sequence. Slots that no sequence uses are NaN."""
    q, k, v = (
        x[0] for x in make_qkv(1, sum(lengths_q), sum(lengths_k), *heads, *head_dims, dtype=torch.bfloat16, device="cuda")
    )
    keys = k.split(lengths_k)
    values = v.split(lengths_k)
    k_cache, v_cache, block_table, seqused_k = make_paged(keys, values, page_size)
    lengths = {
        "block_table": block_table,
        "seqused_k": seqused_k,
        "cu_seqlens_q": cu_seqlens(lengths_q, "cuda"),
        "max_seqlen_q": max(lengths_q),
        "max_seqlen_k": max(lengths_k),
    }
    return (q, k_cache, v_cache), lengths, list(zip(q.split(lengths_q), keys, values, strict=True))


@pytest.mark.parametrize("longest", [500, 64])
@pytest.mark.parametrize(("page_size", "head_dims", "window", "heads"), PAGED_CASES)
def test_paged(
    page_size: int, head_dims: tuple[int, int], window: tuple[int, int], heads: tuple[int, int], longest: int
) -> None:
    """Both with the usual tiles and with those for up to 64 queries."""
    lengths_q = [min(n, longest) for n in (500, 1, 70, 0, 128, 17)]
    lengths_k = [500, 300, 333, 40, 1000, 17]
    tensors, lengths, sequences = paged_call(lengths_q, lengths_k, page_size, head_dims, heads)
    options = OPTIONS | {"window_size": window}
    call = AttentionTensors(
        *tensors, cu_seqlens_q=lengths["cu_seqlens_q"], keys=lengths["seqused_k"], block_table=lengths["block_table"]
    )
    planned = plan_hopper_forward(
        call, AttentionOptions(0.1, window, 0.0, lengths["max_seqlen_q"], lengths["max_seqlen_k"], return_lse=True)
    )
    runs = [planned(call) for _ in range(20)]
    assert all(torch.equal(out, runs[0][0]) for out, _ in runs)
    out, lse = runs[0]
    for part, part_lse, (q, k, v) in zip(out.split(lengths_q), lse.split(lengths_q, dim=1), sequences, strict=True):
        if len(q):
            one = [x[None] for x in (q, k, v)]
            exact, exact_lse = attention_reference(*(x.double() for x in one), **options)
            assert_matches_reference(part[None], exact, eager_attention(*one, **options))
            assert_lse_matches(part_lse[None], exact_lse)


def test_a_mixed_batch_in_a_graph_follows_its_lengths() -> None:
    """The public function computes prompts by this kernel and decoding sequences by split-KV, and one graph captures both."""
    heads = (8, 2)
    few = 4  # 16 packed rows
    tensors, lengths, _ = paged_call([1, 300, 1, 20], [900, 700, 33, 500], 16, (128, 128), heads)
    lengths |= {"max_seqlen_q": 322, "max_seqlen_k": 900}
    lengths["block_table"] = torch.randperm(len(tensors[1]), device="cuda", dtype=torch.int32)[: 4 * 30].view(4, 30)
    lengths["max_seqlen_k"] = 480
    for cache in tensors[1:]:
        cache.nan_to_num_(0.5)

    def call() -> Tensor:
        return fa_serve.attention_paged(*tensors, causal=True, softmax_scale=0.1, **lengths)

    lengths["seqused_k"].copy_(torch.tensor([400, 480, 33, 400]))
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for lengths_q, lengths_k in (([1, 300, 1, 20], [480, 470, 33, 300]), ([few, few + 1, 1, 312], [90, 80, 1, 400])):
        lengths["cu_seqlens_q"].copy_(cu_seqlens(lengths_q, "cuda"))
        lengths["seqused_k"].copy_(torch.tensor(lengths_k))
        out.fill_(float("nan"))
        graph.replay()
        for b, (part, q) in enumerate(zip(out.split(lengths_q), tensors[0].split(lengths_q), strict=True)):
            k, v = (x[lengths["block_table"][b].long()].flatten(0, 1)[: lengths_k[b]] for x in tensors[1:])
            check(part[None], q[None], k[None], v[None])
