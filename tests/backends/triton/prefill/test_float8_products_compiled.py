"""Float8 products of the portable forward kernel, compiled for each GPU that has them: the instructions, no spills."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
from cross_compile import SHARED_BYTES, Kernel, compiling_for
from float8_cases import paged_call
from sampled_cases import each_nth

from fa_serve.backends.triton.prefill.plan import plan_forward
from fa_serve.spec import Precision
from fa_serve.testing import cu_seqlens, make_qkv, run_plan

PRODUCT = {"sm89": "QMMA", "sm90": "QGMMA", "sm100": "UTCQMMA", "sm120": "QMMA"}
"""The instruction that multiplies float8, by target."""
SIZES: list[tuple[int, Precision]] = [(64, "fp8"), (64, "qk8"), (128, "fp8"), (128, "qk8"), (256, "qk8")]
OPTIONS = {"softmax_scale": 0.1, "window_size": (-1, 0), "softcap": 0.0, "sinks": None, "out": None, "return_lse": True}
EVERYTHING = {"window_size": (500, 0), "softcap": 30.0, "sinks": torch.zeros(4)}


def compiled(target: str, dim: int, precision: Precision, layout: str = "dense", **given: Any) -> Kernel:
    options = {**OPTIONS, "precision": precision, **given}
    q, k, v = make_qkv(1, 2048, 2048, 4, 2, dim, dtype=torch.bfloat16)
    cu = cu_seqlens([2048])
    if layout == "packed":
        q, k, v = (x[0] for x in (q, k, v))
        options |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 2048, "max_seqlen_k": 2048}
    elif layout != "dense":
        call, _ = paged_call([300, 1], [400, 400], dim, False, options["window_size"])
        q, k, v = (call.pop(name) for name in ("q", "k_cache", "v_cache"))
        options |= call | {"skip_q": 1}
    with compiling_for(target) as kernels:
        run_plan(plan_forward, q, k, v, **options)
    quantize, attend = kernels
    assert (quantize.name, attend.name) == ("_quantize_inputs", "attn_fwd")
    assert quantize.spill_bytes <= (16 if target == "sm89" and dim == 256 else 0)
    return attend


def check(kernel: Kernel, precision: Precision) -> None:
    found = Counter(re.findall(r"\b[A-Z]+MMA\b", kernel.sass))
    assert found.pop(PRODUCT[kernel.target]) > 0
    assert bool(found) == (precision == "qk8"), "only the product with V has 16 bits"
    assert kernel.spill_bytes == 0
    assert kernel.shared_bytes <= SHARED_BYTES[kernel.target]


@pytest.mark.parametrize("target", ["sm89", "sm90"])
@pytest.mark.parametrize(("dim", "precision"), SIZES)
def test_dense(dim: int, precision: Precision, target: str) -> None:
    check(compiled(target, dim, precision), precision)


@pytest.mark.parametrize("target", ["sm89", "sm90"])
@pytest.mark.parametrize(("dim", "precision"), each_nth(2, SIZES))
def test_everything(dim: int, precision: Precision, target: str) -> None:
    check(compiled(target, dim, precision, **EVERYTHING), precision)


@pytest.mark.parametrize("target", PRODUCT)
@pytest.mark.parametrize("layout", ["packed", "pages"])
def test_layouts(layout: str, target: str) -> None:
    """Each target has its instruction for float8 products."""
    check(compiled(target, 128, "fp8", layout, alibi_slopes=torch.zeros(4)), "fp8")


@pytest.mark.parametrize("target", ["sm89", "sm120"])
def test_probabilities_stay_in_their_threads(target: str) -> None:
    """Where mma.sync multiplies: the shuffles of the loop are those of the maxima and sums of two rows, over four threads."""
    loop = compiled(target, 128, "fp8").hot_loop
    assert loop["QMMA"] == 64
    assert loop["SHFL"] == 8
    assert loop["STS"] == 0, "P passes through shared memory"
