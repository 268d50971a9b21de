"""Measures tiles for the Hopper backward kernel: checks every variant, then times it and its peers over the papers' grid.

    python3 -m benchmarks.tuning.tune_backward [--budget 400] [--head-dims 64,128] [--seqlens 2048,8192,16384] [--skip-check]

Every check and every timing is a job in a child process with a time limit, as in tune_hopper.py. A variant that fails any check
is not timed. Checks compare the gradients of dense calls with GQA, causality, windows and softcap, and of packed sequences with
NaN between them, with float64 by the 2x rule. The table gives TFLOPS of 5 products, 16k tokens of hidden size 2048 in bfloat16:
PyTorch's FlashAttention-2 and cuDNN, the portable kernels, and every variant with all kernels of a backward pass. The last
column, `around`, is the time in milliseconds of what surrounds the main kernel: statistics of rows, zeros for the sum of
dQ, and its conversion.

The name of a variant: block_m, q stages of Q, d stages of dO, s staggered, b both warpgroups compute dQ. Head sizes of 192 and
256 are those of the kernel for wide heads.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

from benchmarks.tuning.tune_hopper import run_jobs
from fa_serve.backends.hopper.backward.tiles import BackwardTileConfig

Contender = BackwardTileConfig | str
PEERS = ("flash", "cudnn", "portable")
AROUND = "around"
VARIANTS: dict[int, list[BackwardTileConfig]] = {
    64: [
        BackwardTileConfig(128, 2),
        BackwardTileConfig(128, 2, stagger=True),
        BackwardTileConfig(128, 4),
        BackwardTileConfig(128, 2, 4),
    ],
    128: [
        BackwardTileConfig(64, 2),
        BackwardTileConfig(64, 2, stagger=True),
        BackwardTileConfig(64, 4),
        BackwardTileConfig(64, 2, 4),
        BackwardTileConfig(64, 1, 1),
    ],
    192: [
        BackwardTileConfig(64, 2),
        BackwardTileConfig(64, 2, stagger=True),
        BackwardTileConfig(64, 2, shares_dq=True),
        BackwardTileConfig(64, 2, stagger=True, shares_dq=True),
        BackwardTileConfig(64, 3, 3),
        BackwardTileConfig(64, 1, 1),
    ],
    256: [
        BackwardTileConfig(64, 2),
        BackwardTileConfig(64, 2, stagger=True),
        BackwardTileConfig(64, 2, shares_dq=True),
        BackwardTileConfig(64, 2, stagger=True, shares_dq=True),
        BackwardTileConfig(64, 2, 1),
        BackwardTileConfig(64, 1, 2),
    ],
}
SHAPES = [  # batch, seqlen_q, seqlen_k, heads, kv heads
    (2, 333, 333, 4, 2),
    (1, 129, 700, 4, 1),
    (1, 1500, 1500, 3, 3),
    (1, 300, 100, 2, 1),
    (2, 1, 900, 4, 4),
]
WINDOWS = ((-1, -1), (-1, 0), (100, 0), (60, 30))


def label(who: Contender) -> str:
    if isinstance(who, str):
        return who
    return f"{who.block_m}q{who.q_stages}d{who.do_stages}" + "s" * who.stagger + "b" * who.shares_dq


def _by_autograd(attend: Any, given: list[Any], dout: Any, options: dict[str, Any]) -> list[Any]:
    import torch

    leaves = [x.detach().requires_grad_() for x in given]
    found = attend(*leaves, **options)
    out = found[0] if isinstance(found, tuple) else found
    return list(torch.autograd.grad(out, leaves, dout.to(out.dtype)))


def check(head_dim: int, tiles: BackwardTileConfig) -> None:
    """Raise AssertionError if a gradient of a small call breaks the 2x rule."""
    import torch

    from fa_serve.backends.calls import AttentionOptions, BackwardTensors
    from fa_serve.backends.hopper.backward.plan import plan_hopper_backward
    from fa_serve.backends.reference import attention_reference
    from fa_serve.testing import assert_matches_reference, cu_seqlens, eager_attention, make_qkv

    def compare(found: Any, given: list[Any], dout: Any, options: dict[str, Any], what: str) -> None:
        exact = _by_autograd(attention_reference, [x.double() for x in given], dout, options)
        eager = _by_autograd(eager_attention, given, dout, options)
        for name, *three in zip(("dq", "dk", "dv"), found, exact, eager, strict=True):
            assert_matches_reference(*three, f"{what} {name}")

    for number, window in enumerate(WINDOWS):
        for batch, rows, keys, heads, kv_heads in SHAPES:
            softcap = 8.0 if number == 2 else 0.0
            dtype = torch.float16 if number == 3 else torch.bfloat16
            given = list(make_qkv(batch, rows, keys, heads, kv_heads, head_dim, dtype=dtype, device="cuda"))
            options = {"softmax_scale": head_dim**-0.5, "window_size": window, "softcap": softcap}
            out, lse = attention_reference(*(x.double() for x in given), **options)
            dout = torch.randn_like(given[0])
            tensors = BackwardTensors(*given, None, None, None, None, out.to(dtype), lse.float(), dout)
            asked = AttentionOptions(head_dim**-0.5, window, softcap, rows, keys, return_lse=True)
            found = plan_hopper_backward(tensors, asked, tiles)(tensors)
            compare(found[:3], given, dout, options, f"{(batch, rows, keys, heads, kv_heads)} {window}")
    lengths = [70, 33, 40, 1, 450, 20, 130]
    cu = cu_seqlens(lengths, "cuda")
    given = [x[0] for x in make_qkv(1, sum(lengths), sum(lengths), 4, 2, head_dim, dtype=torch.bfloat16, device="cuda")]
    options = {"softmax_scale": head_dim**-0.5, "window_size": (-1, 0)}
    dout = torch.randn_like(given[0])
    out = torch.full_like(given[0], float("nan"))
    lse = torch.zeros(4, sum(lengths), device="cuda")
    spans = [slice(sum(lengths[:i]), sum(lengths[: i + 1])) for i in range(len(lengths))]
    for i, span in enumerate(spans):
        if i % 2:
            for x in (*given, dout):
                x[span] = float("nan")
        else:
            one = attention_reference(*(x[None, span].double() for x in given), **options)
            out[span] = one[0][0].to(out.dtype)
            lse[:, span] = one[1][0].float()
    tensors = BackwardTensors(*given, None, None, cu, cu, out, lse, dout)
    found = plan_hopper_backward(tensors, AttentionOptions(head_dim**-0.5, (-1, 0), 0.0, 450, 450, return_lse=True), tiles)(
        tensors
    )
    for i, span in enumerate(spans[::2]):
        compare([x[None, span] for x in found[:3]], [x[None, span] for x in given], dout[None, span], options, f"packed {i}")


def measure(head_dim: int, causal: bool, seqlen: int, everyone: list[Contender]) -> list[float]:
    """TFLOPS of each contender, but milliseconds of AROUND."""
    import torch

    from benchmarks.attention.backward_problem import KINDS
    from benchmarks.measure import in_turns, sdpa
    from fa_serve.backends.calls import AttentionOptions, AttentionTensors, BackwardTensors
    from fa_serve.backends.hopper.backward.plan import plan_hopper_backward
    from fa_serve.backends.hopper.forward.plan import plan_hopper_forward
    from fa_serve.backends.triton.backward.plan import plan_backward as plan_portable

    heads = 2048 // head_dim
    batch = max(1, 16384 // seqlen)
    q, k, v, dout = (torch.randn(batch, seqlen, heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    options = AttentionOptions(head_dim**-0.5, (-1, 0 if causal else -1), 0.0, seqlen, seqlen, return_lse=True)
    forward = AttentionTensors(q, k, v)
    out, lse = plan_hopper_forward(forward, options)(forward)
    tensors = BackwardTensors(q, k, v, None, None, None, None, out, lse, dout)

    def call_of(who: Contender) -> Any:
        if who in KINDS:
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            theirs = sdpa(KINDS[who], *leaves, causal)().transpose(1, 2)
            return partial(torch.autograd.grad, theirs, leaves, dout, retain_graph=True)
        run: Any = plan_portable(tensors, options)
        if who == AROUND:
            run = plan_hopper_backward(tensors, options)
            run._main = lambda tensors: None
        elif isinstance(who, BackwardTileConfig):
            run = plan_hopper_backward(tensors, options, who)
        return partial(run, tensors)

    times = in_turns({label(who): call_of(who) for who in everyone})
    flops = 5 * 2 * batch * heads * seqlen * seqlen * head_dim * (0.5 if causal else 1.0)
    return [times[label(who)] if who == AROUND else flops / times[label(who)] * 1e-9 for who in everyone]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=400, help="seconds for everything")
    parser.add_argument("--head-dims", default="128,64")
    parser.add_argument("--seqlens", default="8192,16384,2048")
    parser.add_argument("--processes", type=int, default=8, help="for the checks")
    parser.add_argument("--skip-check", action="store_true")
    args = parser.parse_args()
    deadline = time.monotonic() + args.budget
    head_dims = [int(d) for d in args.head_dims.split(",")]
    checks: list[tuple[Any, tuple[Any, ...]]] = [(check, (d, tiles)) for d in head_dims for tiles in VARIANTS[d]]
    bad = set()
    if not args.skip_check:
        for (_, (d, tiles)), result in zip(checks, run_jobs(checks, args.processes, 120, deadline - 60), strict=True):
            if isinstance(result, Exception):
                bad.add((d, tiles))
                print(f"BAD d{d} {label(tiles)}: {result}", flush=True)
        print(f"checks: {len(checks)} variants, {len(bad)} bad", flush=True)
    cells = [(d, causal, int(n)) for d in head_dims for n in args.seqlens.split(",") for causal in (False, True)]
    jobs: list[tuple[Any, tuple[Any, ...]]] = []
    for d, causal, n in cells:
        everyone: list[Contender] = [*PEERS, *(tiles for tiles in VARIANTS[d] if (d, tiles) not in bad), AROUND]
        jobs.append((measure, (d, causal, n, everyone)))
    shown = 0
    for (_, (d, causal, n, everyone)), result in zip(jobs, run_jobs(jobs, 1, 60, deadline), strict=True):
        if shown != d:
            print(f"{'d' + str(d):<20}" + "".join(f"{label(who):>10}" for who in everyone))
            shown = d
        cell = f"{'causal' if causal else 'full'} {n}"
        numbers = str(result)
        if not isinstance(result, Exception):
            numbers = "".join(f"{x:10.0f}" for x in result[:-1]) + f"{result[-1]:10.3f}"
        print(f"{cell:<20}{numbers}", flush=True)


if __name__ == "__main__":
    main()
