"""The gradients of one call: their check against float64, PyTorch's kernels beside ours, and the benchmark.

bench_attention.py calls `backward`.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend

import fa_serve
from benchmarks.attention.attention_cells import HIDDEN, TOKENS, tflops
from benchmarks.measure import Results, in_turns, sdpa
from fa_serve.backends.reference import attention_reference
from fa_serve.testing import assert_matches_reference, eager_attention, make_qkv

KINDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
TINY_KINDS = {"math": SDPBackend.MATH}


def check_gradients(head_dim: int, causal: bool, dtype: torch.dtype, device: str) -> None:
    """Compare the gradients of q, k and v with those of the float64 oracle; AssertionError if the 2x rule is broken."""
    case = {"softmax_scale": head_dim**-0.5, "window_size": (-1, 0 if causal else -1)}
    given = make_qkv(2, 333, 333, 4, 2, head_dim, dtype=dtype, device=device)
    dout = torch.randn_like(given[0])
    found = []
    for attend, wide in ((fa_serve.attention, None), (attention_reference, torch.float64), (eager_attention, None)):
        leaves = [x.to(wide or x.dtype).requires_grad_() for x in given]
        result = attend(*leaves, **case)
        out = result[0] if isinstance(result, tuple) else result
        found.append(torch.autograd.grad(out, leaves, dout.to(out.dtype)))
    for name, ours, exact, eager in zip(("dq", "dk", "dv"), *found, strict=True):
        assert_matches_reference(ours, exact, eager, f"{name} D{head_dim}")


def backward(args: argparse.Namespace) -> None:
    """Gradients of q, k and v over the papers' grid. TFLOPS count five products, 2.5 times those of a forward pass.

    Small calls of each head size are compared with float64 first. The gradients of each cell are compared with its peers'.
    """
    kinds = TINY_KINDS if args.tiny else {name: kind for name, kind in KINDS.items() if name in args.peers.split(",")}
    dtype, device = (torch.float32, "cpu") if args.tiny else (torch.bfloat16, "cuda")
    tokens, hidden, seqlens = (256, 128, [64, 256]) if args.tiny else (TOKENS, HIDDEN, args.seqlens)
    results = Results("backward", args.out)
    for head_dim in args.head_dims:
        for causal in (False, True):
            check_gradients(head_dim, causal, dtype, device)
    print(f"the gate holds for head sizes {args.head_dims}")
    print("case                 " + "".join(f"{name:>8}" for name in ["ours", *kinds]) + "   ratio", flush=True)
    # the longest sequences first, because the targets are theirs
    for seqlen in sorted(seqlens, reverse=True):
        for head_dim in args.head_dims:
            for causal in (False, True):
                case = f"d{head_dim}_{'causal' if causal else 'full'}_{seqlen}"
                if not args.cells.takes(case):
                    continue
                shape = (tokens // seqlen, seqlen, hidden // head_dim, head_dim)
                calls = _calls(shape, causal, kinds, dtype, device)
                times = in_turns(calls)
                rates = {name: 2.5 * tflops(seqlen, causal, ms, tokens, hidden) for name, ms in times.items()}
                mine = rates.pop("ours")
                ratio = results.add(case, "TFLOPS", mine, rates)
                shown = "".join(f"{x:8.0f}" for x in [mine, *rates.values()])
                print(f"{case:<21}{shown}{ratio:8.2f}", flush=True)
    results.write()


def _calls(
    shape: tuple[int, ...], causal: bool, kinds: dict[str, SDPBackend], dtype: torch.dtype, device: str
) -> dict[str, partial[Any]]:
    """The backward passes of ours and of the peers, whose gradients must agree with ours."""
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    dout = torch.randn(shape, device=device, dtype=dtype)
    out = fa_serve.attention(q, k, v, causal=causal)
    calls = {"ours": partial(torch.autograd.grad, out, (q, k, v), dout, retain_graph=True)}
    for name, kind in kinds.items():
        theirs = sdpa(kind, q, k, v, causal)().transpose(1, 2)
        calls[name] = partial(torch.autograd.grad, theirs, (q, k, v), dout, retain_graph=True)
        for ours, other in zip(calls["ours"](), calls[name](), strict=True):
            worst = (ours.float() - other.float()).abs().max().item()
            assert worst < 0.02 * other.abs().max().item() + 0.02, f"{name} and ours differ by {worst}"
    return calls
