"""Attention with float8 products: how accurate it is, beside what it would be without each of its ideas, and how fast.

bench_attention.py calls `fp8` and `tune_fp8`. Errors are measured as in the paper of FlashAttention-3, section 4.3: inputs are
N(0, 1) + N(0, 100) * Bernoulli(0.001), and the result is compared with float64. All times of ours include the quantisation.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

import fa_serve
from benchmarks.attention.attention_cells import HIDDEN, TOKENS, tflops
from benchmarks.attention.paged_problem import Problem
from benchmarks.measure import Results, fa3, in_turns, milliseconds, sdpa, served
from fa_serve.backends.reference import attention_reference

FLOAT8 = torch.float8_e4m3fn
LARGEST_ERROR = {"bf16": 4e-4, "qk8": 8e-3, "fp8": 9.1e-3}
"""The gate: for head_dim 128 what the paper has for float8, and what float64 says that rounding q and k costs."""
PRECISIONS = {64: ("qk8", "fp8"), 128: ("qk8", "fp8"), 256: ("qk8",)}
NEEDLES = 64
PAGED = {
    "prompt": ([8192], [8192]),
    "chunk": ([2048], [32768]),
    "short_chunk": ([256], [32768]),
    "mixed": ([*[1] * 32, 2048], [*[4096] * 32, 8192]),
}
"""Queries and keys of the sequences of a paged call."""
ABLATIONS = {
    "both ideas": {"rows": 128, "rotated": True},
    "no rotation": {"rows": 128, "rotated": False},
    "one scale": {"rows": 0, "rotated": True},
    "neither": {"rows": 0, "rotated": False},
}


def outliers(*shape: int, device: str) -> Tensor:
    rare = torch.bernoulli(torch.full(shape, 0.001, device=device))
    return torch.randn(shape, device=device) + 10 * torch.randn(shape, device=device) * rare


def hadamard(dim: int, device: str) -> Tensor:
    """A random-sign Hadamard matrix, orthogonal, float32."""
    matrix = torch.ones(1, 1)
    while len(matrix) < dim:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.randint(0, 2, (dim, 1), generator=torch.Generator().manual_seed(0)) * 2 - 1
    return (matrix * signs / math.sqrt(dim)).to(device)


def rounded(x: Tensor, rows: int) -> Tensor:
    """x (batch, seqlen, heads, dim) rounded to float8, with a scale for each `rows` rows of a head, or for each head (0)."""
    groups = x.float().unflatten(1, (-1, rows or x.shape[1]))
    scale = groups.abs().amax((2, 4), keepdim=True).clamp(min=1e-30) / 448
    return ((groups / scale).to(FLOAT8).float() * scale).flatten(1, 2)


def ablated(q: Tensor, k: Tensor, v: Tensor, rows: int, rotated: bool) -> Tensor:
    """Attention of rounded inputs in float64: the error that quantisation alone makes."""
    if rotated:
        h = hadamard(q.shape[-1], str(q.device))
        q, k = (x.float() @ h for x in (q, k))
    return attention_reference(*(rounded(x, rows).double() for x in (q, k, v)), softmax_scale=q.shape[-1] ** -0.5)[0]


def rmse(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).pow(2).mean().sqrt())


def errors(head_dim: int, seqlen: int, heads: int, device: str, precisions: tuple[str, ...], backend: str) -> dict[str, float]:
    """The root mean square errors of ours at each precision, and of float64 attention with rounded inputs."""
    q, k, v = (outliers(1, seqlen, heads, head_dim, device=device).bfloat16() for _ in range(3))
    exact = attention_reference(q.double(), k.double(), v.double(), softmax_scale=head_dim**-0.5)[0]
    found = {}
    for name in precisions:
        found[name] = rmse(fa_serve.attention(q, k, v, precision=name, backend=backend), exact)  # type: ignore[call-overload]
    return found | {name: rmse(ablated(q, k, v, **idea), exact) for name, idea in ABLATIONS.items()}


def needles(head_dim: int, keys: int, device: str, precision: str, backend: str) -> float:
    """The part of queries that find their needle: one key among `keys` whose value has the largest weight, 8% of it all.

    What a query finds is the value, of NEEDLES candidates, with the largest inner product with its output.
    """
    generator = torch.Generator(device).manual_seed(1)
    q, k, v = (torch.randn(1, n, 1, head_dim, generator=generator, device=device) for n in (NEEDLES, keys, keys))
    at = torch.randperm(keys, generator=generator, device=device)[:NEEDLES]
    k *= 0.05
    # the score that gives a key 8% of the weight of all others, whose scores are near 0
    k[0, at, 0] = q[0, :, 0] * (math.log(0.08 * keys) * math.sqrt(head_dim) / q[0, :, 0].pow(2).sum(1, keepdim=True))
    q, k, v = (x.bfloat16() for x in (q, k, v))
    out = fa_serve.attention(q, k, v, precision=precision, backend=backend)  # type: ignore[call-overload]
    found = (out[0, :, 0].float() @ v[0, at, 0].float().t()).argmax(1)
    return float((found == torch.arange(NEEDLES, device=device)).float().mean())


def fp8(args: argparse.Namespace) -> None:
    """Errors, the gate, needles, then TFLOPS at 16k tokens of one sequence, with bfloat16 and float8 peers.

    With another --backend than auto, the cells over pages are left out.
    """
    device = "cpu" if args.tiny else "cuda"
    for head_dim in args.head_dims:
        precisions = ("bf16",) if args.tiny else ("bf16", *PRECISIONS[head_dim])
        found = errors(head_dim, 1024 if args.tiny else 8192, 4 if args.tiny else 8, device, precisions, args.backend)
        print(f"D{head_dim} rmse: " + ", ".join(f"{name} {error:.2e}" for name, error in found.items()), flush=True)
        if head_dim == 128:
            assert all(found[name] <= LARGEST_ERROR[name] for name in precisions), "the error is larger than the paper's"
        keys = 1024 if args.tiny else 131072
        shares = {name: needles(head_dim, keys, device, name, args.backend) for name in precisions}
        print(f"D{head_dim} needles found: " + ", ".join(f"{name} {share:.0%}" for name, share in shares.items()), flush=True)
        assert min(shares.values()) == 1.0
    if args.tiny:
        return
    results = Results("fp8", args.out)
    flash3 = fa3() if "fa3" in args.peers.split(",") else None
    for head_dim in args.head_dims:
        for causal in (False, True):
            case = f"d{head_dim}_{'causal' if causal else 'full'}_{TOKENS}"
            if args.cells.takes(case):
                _measure(results, case, head_dim, causal, flash3, args.backend)
    for case, (queries, lengths) in PAGED.items() if args.backend == "auto" else ():
        for dtype in (torch.bfloat16, FLOAT8):
            name = f"paged_{case}{'_float8' if dtype == FLOAT8 else ''}"
            if args.cells.takes(name):
                _measure_pages(results, name, queries, lengths, dtype)
    results.write()


def _measure(results: Results, case: str, head_dim: int, causal: bool, flash3: Any, backend: str) -> None:
    q, k, v = (torch.randn(1, TOKENS, HIDDEN // head_dim, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    peers: dict[str, Any] = {"cudnn": sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, causal)}
    if flash3 is not None:
        cu = torch.tensor([0, TOKENS], device="cuda", dtype=torch.int32)
        scale = torch.ones(1, HIDDEN // head_dim, device="cuda")
        given = {"max_seqlen_q": TOKENS, "cu_seqlens_q": cu, "max_seqlen_k": TOKENS, "cu_seqlens_k": cu, "causal": causal}
        descales = {"q_descale": scale, "k_descale": scale, "v_descale": scale}
        peers["fa3 float8"] = partial(flash3, *(x[0].to(FLOAT8) for x in (q, k, v)), **given, **descales, fa_version=3)
    calls = {}
    for name in ("bf16", *PRECISIONS[head_dim]):
        calls[name] = partial(fa_serve.attention, q, k, v, causal=causal, precision=name, backend=backend)  # type: ignore[call-overload]
    times = in_turns(calls | served(peers))
    rates = {name: tflops(TOKENS, causal, ms) for name, ms in times.items()}
    print(f"{case:<20}" + "".join(f"  {name} {rate:.0f}" for name, rate in rates.items()), flush=True)
    for name in PRECISIONS[head_dim]:
        results.add(
            f"{case}_{name}", "TFLOPS", rates[name], {x: rate for x, rate in rates.items() if x not in PRECISIONS[head_dim]}
        )


def _measure_pages(results: Results, case: str, queries: list[int], keys: list[int], dtype: torch.dtype) -> None:
    """32 heads of 128 with 8 KV heads, as in Llama 8B: a call with each precision, in microseconds."""
    problem = Problem.make(keys, 32, 8, 128, dtype, queries=queries)
    calls = {name: problem.ours(precision=name) for name in ("bf16", *PRECISIONS[128])}  # type: ignore[arg-type]
    expected = calls["bf16"]().clone().float()
    for name in PRECISIONS[128]:
        assert (calls[name]().float() - expected).norm() <= 0.1 * expected.norm(), f"{name} differs from bf16"
    times = {name: 1e3 * ms for name, ms in in_turns(calls).items()}
    print(f"{case:<28}" + "".join(f"  {name} {us:.0f} us" for name, us in times.items()), flush=True)
    for name in PRECISIONS[128]:
        results.add(f"{case}_{name}", "us", times[name], {"bf16": times["bf16"]})


def _hopper_tiles() -> tuple[Any, dict[str, Any]]:
    from fa_serve.backends.hopper.forward.plan import plan_hopper_forward
    from fa_serve.backends.hopper.forward.tiles import HopperTiles, Schedule

    plain = HopperTiles(2, 128, 3, 2, Schedule.DYNAMIC, o_parts=2)
    tiles = {
        "overlap": plain,
        "overlap, exponentials anywhere": replace(plain, softmax_first=False),
        "... ping-pong": replace(plain, softmax_first=False, pingpong=True),
        "... 2 stages": replace(plain, softmax_first=False, stages=2),
        "serial": replace(plain, overlap=False),
        "serial, ping-pong": replace(plain, overlap=False, pingpong=True),
        "64 keys": replace(plain, block_n=64, stages=4),
        "64 keys, ping-pong": replace(plain, block_n=64, stages=4, pingpong=True),
        "3 warpgroups, serial": replace(plain, groups=3, q_stages=1, overlap=False),
        "3 warpgroups, overlap": replace(plain, groups=3, q_stages=1, softmax_first=False),
    }
    return plan_hopper_forward, tiles


def _portable_tiles() -> tuple[Any, dict[str, Any]]:
    """Names say rows x keys, warps and stages."""
    from fa_serve.backends.triton.prefill.plan import plan_forward
    from fa_serve.backends.triton.tiles import TileConfig

    tiles = {}
    for rows, keys, warps, stages in (
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (64, 64, 8, 2),
        (64, 128, 4, 2),
        (64, 128, 4, 3),
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (128, 128, 8, 2),
        (128, 128, 8, 3),
    ):
        for masks_all in (False, True):
            name = f"{rows} x {keys}, {warps}, {stages}{', every tile masked' if masks_all else ''}"
            tiles[name] = TileConfig(rows, keys, warps, stages, masks_all=masks_all)
    return plan_forward, tiles


def tune_fp8(args: argparse.Namespace) -> None:
    """Time the tiles of `float8_tiles` and others; each result is compared with that of the default tile.

    With --backend triton these are the tiles of the portable kernel.
    """
    from fa_serve.backends.calls import AttentionOptions, AttentionTensors
    from fa_serve.backends.layout import TensorLayout
    from fa_serve.backends.triton.float8_inputs import InputQuantizer

    plan_forward, tiles = _portable_tiles() if args.backend == "triton" else _hopper_tiles()
    for head_dim in args.head_dims:
        for precision in PRECISIONS[head_dim]:
            for causal in (True, False):
                shape = (1, TOKENS, HIDDEN // head_dim, head_dim)
                tensors = AttentionTensors(*(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)))
                window = (-1, 0 if causal else -1)
                options = AttentionOptions(head_dim**-0.5, window, 0.0, TOKENS, TOKENS, False, precision=precision)  # type: ignore[arg-type]
                expected = plan_forward(tensors, options)(tensors)[0].float()
                print(f"D{head_dim} {precision} {'causal' if causal else 'full'}", flush=True)
                for name, tile in ({"default": None} | tiles).items():
                    try:
                        run = plan_forward(tensors, options, tile)
                        difference = (run(tensors)[0].float() - expected).abs().max().item()
                        assert difference < 0.02, f"differs by {difference}"
                        rate = f"{tflops(TOKENS, causal, milliseconds(partial(run, tensors), 30)):5.0f}"
                    except Exception as error:  # a tile that does not fit this GPU has its error in the table
                        rate = f"{type(error).__name__}: {error}"[:100]
                    print(f"  {name:<32}{rate}", flush=True)
                layouts = [TensorLayout(x.shape, x.stride(), x.dtype) for x in tensors[:3]]
                ms = milliseconds(partial(InputQuantizer(layouts, "dense", 1, options), tensors), 30)
                print(f"  the quantisation takes {1e3 * ms:.0f} us", flush=True)
