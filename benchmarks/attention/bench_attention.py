"""Attention kernels and their peers on one GPU; each result is checked before it is timed.

    python -m benchmarks.attention.bench_attention prefill  # what `auto` selects; SDPA-flash, cuDNN, FA3, FA4
    python -m benchmarks.attention.bench_attention prefill --backend triton --peers flash,cudnn
    python -m benchmarks.attention.bench_attention varlen                         # unequal lengths, and many short ones
    python -m benchmarks.attention.bench_attention window                         # sliding windows over 16k tokens
    python -m benchmarks.attention.bench_attention decode  # paged: 45 cells, uneven lengths, float8; dense caches
    python -m benchmarks.attention.bench_attention mixed  # 8 to 128 sequences decoding beside 1 to 8 chunks
    python -m benchmarks.attention.bench_attention models  # heads, head sizes and options of 20 models, four batches
    python -m benchmarks.attention.bench_attention chunk  # 64 to 2048 queries behind 1k to 64k keys, paged
    python -m benchmarks.attention.bench_attention verify  # 2 to 16 queries per sequence, as in speculative decoding
    python -m benchmarks.attention.bench_attention latent  # one KV head of 512 + 64 (MLA), also float8; GB/s
    python -m benchmarks.attention.bench_attention latent --ways hopper,portable  # both kernels, whatever `auto` selects
    python -m benchmarks.attention.bench_attention sparse  # block-sparse, beside FlexAttention and dense calls
    python -m benchmarks.attention.bench_attention masks  # masks of elements; cuDNN, FlexAttention with and without blocks
    python -m benchmarks.attention.bench_attention train  # forward and backward; also encoder, cross, diffusion, wide
    python -m benchmarks.attention.bench_attention models --budget 75             # the cells that 75 seconds allow
    python -m benchmarks.attention.bench_attention tune_lists                     # tiles of the Hopper kernel with lists
    python -m benchmarks.attention.bench_attention backward  # gradients over the grid of prefill; SDPA-flash, cuDNN
    python -m benchmarks.attention.bench_attention backward --cells 8192,16384    # the cells whose names contain one of these
    python -m benchmarks.attention.bench_attention fp8  # errors, needles and TFLOPS of float8 products
    python -m benchmarks.attention.bench_attention tune_fp8                       # their tiles
    python -m benchmarks.attention.bench_attention tune --head-dims 128  # tiles of the Triton kernel; decode has tune_decode.py

The prefill grid is that of the FlashAttention papers: 16k tokens in all, hidden size 2048, bfloat16. TFLOPS count 4 * batch *
heads * seqlen^2 * head_dim, and half of it when causal. Decode and mixed use page_size 16 and pages in random order. Their unit
is microseconds of one call inside a CUDA graph, because a captured step runs that way. FA3 makes its scheduling metadata in its
paged call. The peer of a float8 cell is our bfloat16 call, timed once before. Ours and the other peers are measured three times
in turn, after pauses, and the median counts. A wrong result reports no speed. A run replaces the results of the last run.

`--cells` and `--budget` choose what is measured; the last line names the cells that were left out for lack of time. With
`--tiny`, latent, sparse, backward, fp8 and the classes of `attention_cells.DENSE_CLASSES` run small cells on a CPU in float32,
which shows only that they run.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend

import fa_serve
from benchmarks.attention.attention_cells import (
    DENSE_CLASSES,
    HIDDEN,
    MODELS,
    MODELS_WITH_SINKS,
    SEQLENS,
    TOKENS,
    WINDOWS,
    tflops,
)
from benchmarks.attention.backward_problem import backward
from benchmarks.attention.dense_problem import measure_class
from benchmarks.attention.float8_problem import fp8, tune_fp8
from benchmarks.attention.latent_problem import WAYS, latent
from benchmarks.attention.paged_benches import chunk, decode, mixed, verify
from benchmarks.attention.sparse_problem import sparse, tune_lists
from benchmarks.measure import Cells, Results, fa3, flash_peers, host_microseconds, in_turns, milliseconds, sdpa, served
from fa_serve.backends.reference import attention_reference
from fa_serve.testing import assert_matches_reference, cu_seqlens, eager_attention, make_qkv


@functools.cache
def gate(head_dim: int, window: tuple[int, int], backend: str) -> None:
    """Compare with the float64 oracle at lengths that leave a tail in every tile; AssertionError if the 2x rule is broken."""
    for seqlen_q, seqlen_k, heads, kv_heads in ((333, 333, 4, 1), (129, 717, 4, 4)):
        q, k, v = make_qkv(2, seqlen_q, seqlen_k, heads, kv_heads, head_dim, dtype=torch.bfloat16, device="cuda")
        case = {"softmax_scale": head_dim**-0.5, "window_size": window}
        exact, _ = attention_reference(q.double(), k.double(), v.double(), **case)
        out = fa_serve.attention(q, k, v, **case, backend=backend)
        assert_matches_reference(out, exact, eager_attention(q, k, v, **case), f"D{head_dim} {window} {seqlen_q}x{seqlen_k}")


def prefill(args: argparse.Namespace) -> None:
    peers = args.peers.split(",")
    results = Results("prefill" if args.backend == "auto" else f"prefill_{args.backend}", args.out)
    print("case                 " + "".join(f"{name:>8}" for name in ["ours", *peers]) + "   ratio   host us")
    for head_dim in args.head_dims:
        for causal in (False, True):
            for seqlen in args.seqlens:
                case = f"d{head_dim}_{'causal' if causal else 'full'}_{seqlen}"
                if not args.cells.takes(case):
                    continue
                gate(head_dim, (-1, 0 if causal else -1), args.backend)
                batch = TOKENS // seqlen
                heads = HIDDEN // head_dim
                q, k, v = (torch.randn(batch, seqlen, heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))

                def ours(q=q, k=k, v=v, causal=causal):  # type: ignore[no-untyped-def]
                    return fa_serve.attention(q, k, v, causal=causal, backend=args.backend)

                calls = {}
                if "flash" in peers:
                    calls["flash"] = sdpa(SDPBackend.FLASH_ATTENTION, q, k, v, causal)
                if "cudnn" in peers:
                    calls["cudnn"] = sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, causal)
                flat = [x.flatten(0, 1) for x in (q, k, v)]
                calls |= flash_peers(args.peers, *flat, [seqlen] * batch, (-1, 0 if causal else -1))
                for name, call in calls.items():
                    theirs = call()
                    theirs = theirs.view_as(q) if name in ("fa3", "fa4") else theirs.transpose(1, 2)
                    worst = (ours().float() - theirs.float()).abs().max().item()
                    assert worst < 0.05, f"{name} and ours differ by {worst}"
                times = in_turns({"ours": ours} | calls)
                rates = {name: tflops(seqlen, causal, ms) for name, ms in times.items()}
                mine = rates.pop("ours")
                ratio = results.add(case, "TFLOPS", mine, rates)
                cells = "".join(f"{x:8.0f}" for x in [mine, *(rates.get(name, float("nan")) for name in peers)])
                print(f"{case:<21}{cells}{ratio:8.2f}{host_microseconds(ours, 50):10.1f}", flush=True)
    results.write()


def windowed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, width: int, step: int = 2048) -> torch.Tensor:
    """Causal attention over the last `width` keys in float32, some rows at a time; q, k, v are (tokens, heads, dim)."""
    out = []
    for start in range(0, q.shape[0], step):
        first = max(start - width + 1, 0)
        end = start + step
        back = torch.arange(start, end, device=q.device)[:, None] - torch.arange(first, end, device=q.device)
        rows, keys, values = (x.float().transpose(0, 1) for x in (q[start:end], k[first:end], v[first:end]))
        mask = (back >= 0) & (back < width)
        out.append(torch.nn.functional.scaled_dot_product_attention(rows, keys, values, attn_mask=mask).transpose(0, 1))
    return torch.cat(out)


def window(args: argparse.Namespace) -> None:
    """Sliding windows over one sequence of 16k tokens, with FA3 as the peer. TFLOPS count the keys that a row sees.

    Our result at full size must be close to float32. A peer whose result is not reports no speed.
    """
    results = Results("window", args.out)
    flash3 = fa3()
    for head_dim in args.head_dims:
        for width in WINDOWS:
            case = f"d{head_dim}_{width}"
            if not args.cells.takes(case):
                continue
            seen = (width - 1, 0)
            gate(head_dim, seen, args.backend)
            q, k, v = (torch.randn(TOKENS, HIDDEN // head_dim, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
            calls = {"ours": partial(fa_serve.attention, q[None], k[None], v[None], window_size=seen, backend=args.backend)}
            if flash3 is not None:
                cu = cu_seqlens([TOKENS], "cuda")
                calls["fa3"] = partial(
                    flash3, q, k, v, TOKENS, cu, TOKENS, cu_seqlens_k=cu, causal=True, window_size=list(seen), fa_version=3
                )
            exact = windowed(q, k, v, width)
            worst = {name: (call().view_as(exact).float() - exact).abs().max().item() for name, call in calls.items()}
            assert worst["ours"] < 0.05, f"ours is off by {worst['ours']} at head_dim {head_dim}, window {width}"
            if worst.get("fa3", 0.0) >= 0.05:
                print(f"fa3 is off by {worst['fa3']:.3f}", end="  ")
                del calls["fa3"]
            operations = 4 * HIDDEN * (TOKENS * width - width * (width - 1) // 2)
            rates = {name: operations / ms * 1e-9 for name, ms in in_turns(calls).items()}
            mine = rates.pop("ours")
            ratio = results.add(case, "TFLOPS", mine, rates)
            shown = "  ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
            print(f"d{head_dim:<4}window {width:<5} ours {mine:.0f}  {shown}  ratio {ratio:.2f}", flush=True)
    results.write()


def varlen(args: argparse.Namespace) -> None:
    """Packed sequences; the peers are FA3 and FA4 on the same input and cuDNN on the padded batch. TFLOPS count no padding."""
    results = Results("varlen", args.out)
    generator = torch.Generator().manual_seed(0)
    uneven = (torch.rand(64, generator=generator) * math.log(8192 / 32)).exp().mul(32).int().tolist()
    for case, lengths, heads, kv_heads in (("64_log_uniform_32_8192", uneven, 32, 8), ("512_of_64", [64] * 512, 32, 8)):
        if not args.cells.takes(case):
            continue
        total = sum(lengths)
        longest = max(lengths)
        dim = 128
        q = torch.randn(total, heads, dim, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(total, kv_heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        cu = cu_seqlens(lengths, "cuda")
        ends = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest, "causal": True}
        ours = partial(fa_serve.attention_varlen, q, k, v, backend=args.backend, **ends)
        padded = [torch.zeros(len(lengths), longest, x.shape[1], dim, device="cuda", dtype=x.dtype) for x in (q, k, v)]
        start = 0
        for row, length in enumerate(lengths):
            for x, full in zip((q, k, v), padded, strict=True):
                full[row, :length] = x[start : start + length]
            start += length
        calls = {"cudnn": sdpa(SDPBackend.CUDNN_ATTENTION, *padded, True)}
        theirs = calls["cudnn"]().transpose(1, 2)
        packed = torch.cat([theirs[row, :length] for row, length in enumerate(lengths)])
        calls |= flash_peers(args.peers, q, k, v, lengths, (-1, 0))
        for name, out in ({"cudnn": packed} | {name: calls[name]() for name in calls if name != "cudnn"}).items():
            worst = (ours().float() - out.float()).abs().max().item()
            assert worst < 0.05, f"{name} and ours differ by {worst}"
        operations = sum(2 * n * n for n in lengths) * heads * dim
        rates = {name: operations / ms * 1e-9 for name, ms in in_turns({"ours": ours} | calls).items()}
        mine = rates.pop("ours")
        ratio = results.add(case, "TFLOPS", mine, rates)
        shown = "  ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
        print(f"{case:<24} ours {mine:.0f}  {shown}  ratio {ratio:.2f}  host {host_microseconds(ours, 50):.0f} us", flush=True)
    results.write()


def models(args: argparse.Namespace) -> None:
    """Packed prompts of real models; the peers are FA3 and FA4 on the same input and, for equal lengths, cuDNN.

    TFLOPS count the products of visible keys. Each sequence of one batch is compared with float64 first.
    """
    results = Results("models", args.out)
    generator = torch.Generator().manual_seed(0)
    ragged = (torch.rand(32, generator=generator) * math.log(4096 / 64)).exp().mul(64).int().tolist()
    batches = {"64x197": [197] * 64, "8x2048": [2048] * 8, "2x8192": [8192] * 2, "ragged": ragged}
    gated: set[str] = set()
    for name, heads, kv_heads, dim, dim_v, window_size, softcap in MODELS:
        for batch, lengths in batches.items():
            case = f"{name}_{batch}"
            if not args.cells.takes(case):
                continue
            sinks = torch.randn(heads, device="cuda", dtype=torch.bfloat16) if name in MODELS_WITH_SINKS else None
            options = {"window_size": window_size, "softcap": softcap, "sinks": sinks}
            packed = partial(_packed, args.backend, heads, kv_heads, dim, dim_v, options)
            if name not in gated:
                gated.add(name)
                q, k, v, ours = packed([333, 1, 200])
                exact_options = {**options, "softmax_scale": dim**-0.5}
                for out, *one in zip(*(x.split([333, 1, 200]) for x in (ours(), q, k, v)), strict=True):
                    exact, _ = attention_reference(*(x[None].double() for x in one), **exact_options)
                    assert_matches_reference(out[None], exact, eager_attention(*(x[None] for x in one), **exact_options), name)
            q, k, v, ours = packed(lengths)
            calls = flash_peers(args.peers, q, k, v, lengths, window_size, softcap, sinks)
            if len(set(lengths)) == 1 and window_size[0] < 0 and not softcap and sinks is None and "cudnn" in args.peers:
                dense = [x.unflatten(0, (len(lengths), -1)) for x in (q, k, v)]
                calls["cudnn"] = sdpa(SDPBackend.CUDNN_ATTENTION, *dense, window_size[1] == 0)
            operations = 2 * heads * (dim + dim_v) * sum(visible_pairs(n, window_size) for n in lengths)
            rates = {n: operations / ms * 1e-9 for n, ms in in_turns({"ours": ours} | served(calls)).items()}
            mine = rates.pop("ours")
            ratio = results.add(case, "TFLOPS", mine, rates)
            shown = "  ".join(f"{peer} {rate:.0f}" for peer, rate in rates.items())
            print(f"{name + ' ' + batch:<28} ours {mine:.0f}  {shown}  ratio {ratio:.2f}", flush=True)
    results.write()


def _packed(
    backend: str, heads: int, kv_heads: int, dim: int, dim_v: int, options: dict[str, Any], lengths: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Callable[[], torch.Tensor]]:
    """Random q, k and v of packed sequences, and our call."""
    total = sum(lengths)
    q = torch.randn(total, heads, dim, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(total, kv_heads, dim, device="cuda", dtype=torch.bfloat16)
    v = torch.randn(total, kv_heads, dim_v, device="cuda", dtype=torch.bfloat16)
    cu = cu_seqlens(lengths, "cuda")
    ends = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    return q, k, v, partial(fa_serve.attention_varlen, q, k, v, backend=backend, **ends, **options)


def visible_pairs(seqlen: int, window_size: tuple[int, int]) -> int:
    """Pairs of a query and a key that it sees, in one sequence of `seqlen` queries and keys."""
    left, right = (seqlen if side < 0 else min(side, seqlen) for side in window_size)
    hidden = sum((seqlen - side) * (seqlen - side - 1) // 2 for side in (left, right) if side < seqlen)
    return seqlen * seqlen - hidden


def tune(args: argparse.Namespace) -> None:
    """Time every tile that fits over the grid; the branches of `forward_tiles` quote this table."""
    from fa_serve.backends.calls import AttentionOptions, AttentionTensors
    from fa_serve.backends.triton.prefill.plan import TileConfig, plan_forward

    candidates = {
        64: [(64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 8, 3), (128, 64, 4, 3), (64, 128, 4, 2), (64, 128, 4, 3)],
        128: [(64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 4), (64, 32, 4, 4), (128, 32, 8, 4), (128, 64, 4, 3)],
        256: [(128, 64, 8, 2), (128, 32, 8, 4), (64, 64, 4, 2)],
    }
    for head_dim in args.head_dims:
        for causal in (False, True):
            options = {
                "softmax_scale": head_dim**-0.5,
                "window_size": (-1, 0 if causal else -1),
                "softcap": 0.0,
                "return_lse": False,
            }
            print(f"D{head_dim} {'causal' if causal else 'full'}  seqlens {args.seqlens}", flush=True)
            for tile in candidates[head_dim]:
                for tma in (False, True):
                    rates = []
                    for seqlen in args.seqlens:
                        shape = (TOKENS // seqlen, seqlen, HIDDEN // head_dim, head_dim)
                        lengths = {"max_seqlen_q": seqlen, "max_seqlen_k": seqlen}
                        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
                        try:
                            config = TileConfig(*tile, tma)
                            tensors = AttentionTensors(q, k, v)
                            run = plan_forward(tensors, AttentionOptions(**options, **lengths), config)
                            ms = milliseconds(partial(run, tensors), 30)
                            rates.append(f"{tflops(seqlen, causal, ms):5.0f}")
                        except Exception as error:  # a tile that does not fit this GPU has its error in the table
                            rates.append(f"  {type(error).__name__[:12]}")
                            break
                    print(f"  {tile!s:<18}{'tma' if tma else '   '} " + " ".join(rates), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tiny: dict[str, Callable[[argparse.Namespace], None]] = {mode.__name__: mode for mode in (latent, sparse, backward, fp8)}
    tiny |= {name: partial(measure_class, name) for name in DENSE_CLASSES}
    measured = {mode.__name__: mode for mode in (prefill, varlen, window, decode, mixed, models, chunk, verify)} | tiny
    tuned = {mode.__name__: mode for mode in (tune, tune_lists, tune_fp8)}
    parser.add_argument("bench", choices=[*measured, *tuned])
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--ways", default="", help=f"kernels of latent, of {','.join(WAYS)}; default: those of --backend")
    parser.add_argument("--peers", default="flash,cudnn,fa3,fa4", help="peers that are not installed are left out")
    parser.add_argument("--head-dims", type=lambda s: [int(x) for x in s.split(",")], default=[64, 128, 256])
    parser.add_argument("--seqlens", type=lambda s: [int(x) for x in s.split(",")], default=list(SEQLENS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    parser.add_argument("--cells", default="", help="parts of names of cells, separated by commas; default: all cells")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no cell is begun")
    parser.add_argument("--tiny", action="store_true", help=f"small cells on a CPU in float32: {', '.join(tiny)}")
    args = parser.parse_args()
    if args.bench in tuned and (args.cells or args.budget < math.inf):
        parser.error(f"--cells and --budget are for {', '.join(measured)}, got {args.bench}")
    if args.tiny and args.bench not in tiny:
        parser.error(f"--tiny is for {', '.join(tiny)}, got {args.bench}")
    args.ways = args.ways.split(",") if args.ways else []
    if args.ways and (args.bench != "latent" or not set(args.ways) <= set(WAYS)):
        parser.error(f"--ways is for latent, and takes {', '.join(WAYS)}, got {args.bench} and {', '.join(args.ways)}")
    if args.budget > 0 and not args.tiny and not torch.cuda.is_available():
        parser.error(f"{args.bench} needs a GPU; on a CPU, --tiny runs small cells of {', '.join(tiny)}")
    torch.manual_seed(0)
    args.cells = Cells(args.cells, args.budget)
    args.cells.end_at_a_signal()
    (measured | tuned)[args.bench](args)
    args.cells.report()


if __name__ == "__main__":
    main()
