"""What only a Hopper GPU can show of its kernel: counters across launches, streams and graphs, and races.

Correctness over the options is `test_attention_gpu.py`, for every backend; the tiles that are not chosen are checked by
`benchmarks/tune_hopper.py`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fa_serve
from fa_serve.backends.hopper.forward import launch_forward
from fa_serve.backends.hopper.tiles import Schedule, TileConfig
from fa_serve.backends.reference import attention_reference
from fa_serve.testing import assert_matches_reference, cu_seqlens, eager_attention, make_qkv

if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

OPTIONS = {"softmax_scale": 0.1, "window_size": (-1, 0), "softcap": 0.0, "sinks": None}
DYNAMIC = TileConfig(2, 128, 2, 2, Schedule.DYNAMIC)


def run(q: Tensor, k: Tensor, v: Tensor, tiles: TileConfig | None = DYNAMIC, **lengths: object) -> Tensor:
    return launch_forward(q, k, v, out=None, return_lse=False, tiles=tiles, **OPTIONS, **lengths)[0]


def inputs(seed: int = 0, seqlen: int = 700, batch: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    return make_qkv(batch, seqlen, seqlen, 8, 2, 128, dtype=torch.bfloat16, device="cuda", seed=seed)


def check(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    exact, _ = attention_reference(q.double(), k.double(), v.double(), **OPTIONS)
    assert_matches_reference(out, exact, eager_attention(q, k, v, **OPTIONS))


def test_many_launches_give_the_same_bits() -> None:
    """The dynamic schedule deals tiles differently every time; the result does not depend on it."""
    q, k, v = inputs()
    first = run(q, k, v)
    check(first, q, k, v)
    for _ in range(200):
        assert torch.equal(run(q, k, v), first)


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
    graphs, outs = [], []
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
    """Packed lengths are read on the device: a captured call follows new cu_seqlens within its maxima."""
    q, k, v = (x[0] for x in make_qkv(1, 600, 600, 8, 2, 128, dtype=torch.bfloat16, device="cuda"))
    cu = cu_seqlens([100, 200, 300], "cuda")
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 600, "max_seqlen_k": 600}
    run(q, k, v, **lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(q, k, v, **lengths)
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


@pytest.mark.parametrize("head_dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_long_against_torch(head_dims: tuple[int, int], causal: bool) -> None:
    q, k, v = make_qkv(2, 5000, 5000, 4, 2, *head_dims, dtype=torch.bfloat16, device="cuda")
    out = fa_serve.attention(q, k, v, causal=causal, backend="hopper")
    heads_first = (x.transpose(1, 2).float() for x in (q, k, v))
    theirs = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=True).transpose(1, 2)
    assert (out.float() - theirs).abs().max() <= 2 * 2**-8 * theirs.abs().max()


def test_another_device_is_made_current() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    q, k, v = (x.to("cuda:1") for x in inputs())
    check(run(q, k, v), q, k, v)
