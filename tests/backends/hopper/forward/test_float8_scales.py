"""Float8 products of the Hopper kernel, emulated: against attention of the numbers that the float8 inputs stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from float8_cases import dequantized
from hopper_cases import CAUSAL, FULL
from hopper_emulator import EmulationError, emulated
from torch import Tensor

from fa_serve.backends.calls import AttentionOptions, AttentionTensors
from fa_serve.backends.hopper.forward.plan import plan_hopper_forward
from fa_serve.backends.hopper.forward.tiles import HopperTiles, Schedule
from fa_serve.backends.reference import attention_reference
from fa_serve.spec import Precision
from fa_serve.testing import cu_seqlens, make_paged, make_qkv

SERIAL = HopperTiles(2, 64, 3, 2, Schedule.DYNAMIC, overlap=False, o_parts=2)


def error_of(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, precision: Precision, **options: Any) -> float:
    """The norm of the error, relative to that of the exact result, of one sequence (1, seqlen, heads, dim)."""
    exact, exact_lse = attention_reference(*dequantized(q, k, v, precision), **options)
    torch.testing.assert_close(lse, exact_lse.float(), atol=2e-3, rtol=2e-3)  # tanh.approx has an error of 2^-11
    assert torch.isfinite(out).all()
    if not k.shape[1]:
        assert not out.any()
        return 0.0
    return float((out.double() - exact).norm() / exact.norm())


# P has 3 bits of mantissa: an error of up to 2^-4, of 2^-5.3 in the mean, that many keys average. O has 8 bits.
BOUND = {"qk8": 0.004, "fp8": 0.03}


@pytest.mark.parametrize("precision", ["qk8", "fp8"])
@pytest.mark.parametrize(
    ("dim", "window", "softcap", "sinks", "tiles"),
    [
        pytest.param(64, CAUSAL, 0.0, False, None, id="d64-causal"),
        pytest.param(128, FULL, 0.0, True, None, id="d128-sinks"),
        pytest.param(128, (100, 0), 20.0, False, None, id="d128-window-softcap"),
        pytest.param(64, CAUSAL, 0.0, True, SERIAL, id="d64-blocks-of-64-without-overlap"),
    ],
)
def test_dense(
    dim: int, window: tuple[int, int], softcap: float, sinks: bool, tiles: HopperTiles | None, precision: Precision
) -> None:
    """Values change their size from one group of keys to the next, which changes the unit of O."""
    q, k, v = make_qkv(2, 150, 300, 2, 1, dim, dtype=torch.bfloat16)
    v[:, :128] *= 100
    v[:, 256:] *= 0.01
    bias = torch.tensor([0.5, 3.0]) if sinks else None
    options = AttentionOptions(dim**-0.5, window, softcap, 150, 300, return_lse=True, precision=precision)
    tensors = AttentionTensors(q, k, v, bias)
    with emulated():
        out, lse = plan_hopper_forward(tensors, options, tiles)(tensors)
    given = {"softmax_scale": dim**-0.5, "window_size": window, "softcap": softcap, "sinks": bias}
    for b in range(2):
        one = (x[b : b + 1] for x in (out, lse, q, k, v))
        assert error_of(*one, precision, **given) < BOUND[precision]


@pytest.mark.parametrize("precision", ["qk8", "fp8"])
def test_packed(precision: Precision) -> None:
    """Sequences without keys, without queries, shorter than a group of keys and longer than two."""
    lengths_q = [70, 0, 1, 150, 90]
    lengths_k = [70, 30, 9, 310, 0]
    q, k, v = (x[0] for x in make_qkv(1, sum(lengths_q), sum(lengths_k), 2, 1, 64, dtype=torch.float16))
    cu_q, cu_k = (cu_seqlens(lengths) for lengths in (lengths_q, lengths_k))
    tensors = AttentionTensors(q, k, v, cu_seqlens_q=cu_q, keys=cu_k)
    options = AttentionOptions(0.125, CAUSAL, 0.0, max(lengths_q), max(lengths_k), return_lse=True, precision=precision)
    with emulated():
        out, lse = plan_hopper_forward(tensors, options)(tensors)
    for b, length in enumerate(lengths_q):
        rows = slice(cu_q[b], cu_q[b + 1])
        keys = slice(cu_k[b], cu_k[b + 1])
        if length:
            one = (out[None, rows], lse[None, :, rows], q[None, rows], k[None, keys], v[None, keys])
            assert error_of(*one, precision, softmax_scale=0.125, window_size=CAUSAL) < BOUND[precision]


@pytest.mark.parametrize("precision", ["qk8", "fp8"])
@pytest.mark.parametrize(
    ("window", "float8"), [(CAUSAL, False), ((40, 0), False), (CAUSAL, True)], ids=["", "window", "float8"]
)
def test_pages(window: tuple[int, int], float8: bool, precision: Precision) -> None:
    """Sequences without keys, without queries, left to another kernel, and longer than two groups of keys; the address of the
    cache is not a multiple of 16 bytes."""
    lengths_q = [70, 0, 1, 150, 90, 20]
    lengths_k = [70, 30, 200, 310, 0, 129]
    q, k, v = (x[0] for x in make_qkv(1, sum(lengths_q), sum(lengths_k), 2, 1, 64, dtype=torch.bfloat16))
    v[:300] *= 100
    descales: dict[str, Tensor] = {}
    if float8:
        descales = {"k_descale": torch.tensor([0.3]), "v_descale": torch.tensor([0.7])}
        k, v = (x.to(torch.float8_e4m3fn) for x in (k, v / 100))
    caches = make_paged([x.float() for x in k.split(lengths_k)], [x.float() for x in v.split(lengths_k)], 24)
    k_cache, v_cache = (torch.empty(x.numel() + 1, dtype=k.dtype)[1:].view(x.shape).copy_(x) for x in caches[:2])
    if window[0] >= 0:
        for b, (num_queries, length) in enumerate(zip(lengths_q, lengths_k, strict=True)):
            caches[2][b, : max(length - num_queries - window[0], 0) // 24] = 2**28
    cu = cu_seqlens(lengths_q)
    out = torch.full_like(q, 7.0)
    tensors = AttentionTensors(q, k_cache, v_cache, cu_seqlens_q=cu, keys=caches[3], block_table=caches[2], out=out, **descales)
    options = AttentionOptions(0.125, window, 0.0, 150, 310, return_lse=True, skip_q=1, precision=precision)
    with emulated():
        _, lse = plan_hopper_forward(tensors, options)(tensors)
    for b, length in enumerate(lengths_q):
        rows = slice(cu[b], cu[b + 1])
        if length <= 1:
            assert (out[rows] == 7.0).all()
            continue
        keys, values = (x.split(lengths_k)[b].double()[None] for x in (k, v))
        if float8:
            keys, values = keys * 0.3, values * 0.7
        elif window[0] >= 0:  # the copies are zero before the first query's window
            hidden = max(lengths_k[b] - length - window[0], 0)
            keys[:, :hidden] = values[:, :hidden] = 0
        one = (out[None, rows], lse[None, :, rows], q[None, rows], keys, values)
        assert error_of(*one, "qk8" if float8 else precision, softmax_scale=0.125, window_size=window) < BOUND[precision]


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(("before / after", "1.0"), id="units"),
        pytest.param((".permute((0, 1, 3, 2, 4))", ".permute((0, 1, 2, 3, 4))"), id="order of P"),
        pytest.param(("logarithm - FLOAT8_SHIFT", "logarithm"), id="lse"),
        pytest.param(("k0 = (k0 // GROUP + b) * GROUP", "k0 = k0 // GROUP * GROUP"), id="gaps"),
        pytest.param(("args.scale * gl.load(q + rows", "args.scale * gl.load(q"), id="rows"),
    ],
)
def test_a_fault_is_found(fault: tuple[str, str]) -> None:
    lengths = [140, 300]
    q, k, v = (x[0] for x in make_qkv(1, 440, 440, 1, 1, 64, dtype=torch.bfloat16))
    v[:300] *= 10
    q[::3] *= 4
    cu = cu_seqlens(lengths)
    tensors = AttentionTensors(q, k, v, cu_seqlens_q=cu, keys=cu)
    options = AttentionOptions(0.125, CAUSAL, 0.0, 300, 300, return_lse=True, precision="fp8")
    try:
        with emulated(faults=dict([fault])):
            out, lse = plan_hopper_forward(tensors, options)(tensors)
    except EmulationError:
        return

    def check() -> None:
        for rows in (slice(0, 140), slice(140, 440)):
            one = (out[None, rows], lse[None, :, rows], q[None, rows], k[None, rows], v[None, rows])
            assert error_of(*one, "fp8", softmax_scale=0.125, window_size=CAUSAL) < BOUND["fp8"]

    with pytest.raises(AssertionError):
        check()
