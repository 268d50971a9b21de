"""The kernel that quantises q, k and v in Triton's interpreter, against PyTorch. The interpreter multiplies no bfloat16."""

from __future__ import annotations

import pytest
import torch
from float8_cases import quantize_inputs
from torch import Tensor

from fa_serve.backends.hopper.descriptors import Layout
from fa_serve.backends.hopper.float8_inputs import Quantizer
from fa_serve.spec import Precision
from fa_serve.testing import cu_seqlens, make_qkv


def layout(x: Tensor) -> Layout:
    return Layout(x.shape, x.stride(), x.dtype)


def assert_same_numbers(actual: Tensor, expected: Tensor) -> None:
    """Equal but for two things: a number may have been rounded from a sum in another order, and the interpreter of Triton 3.6
    halves a number that it rounds up to a power of two."""
    written = ~expected.float().isnan()
    found, wanted = (x.float()[written] for x in (actual, expected))
    if actual.dtype == torch.float8_e4m3fn:
        halved = (2 * found == wanted) & (wanted.abs().frexp().mantissa == 0.5)
        assert ((found - wanted).abs() <= wanted.abs() / 8 + 2**-9)[~halved].all()
        assert (found != wanted)[~halved].float().mean() < 0.02
        assert halved.float().mean() < 0.04
    else:
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("precision", ["qk8", "fp8"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_copies_and_scales(packed: bool, dim: int, precision: Precision) -> None:
    """Rows of unlike sizes, a row and a group of zeros, sequences with few keys and without any, heads that are slices."""
    lengths = [70, 0, 300, 129, 1] if packed else [200]
    q, k, v = make_qkv(1 if packed else 2, 130, sum(lengths), 2, 1, dim + 8, dtype=torch.float16)
    q, k, v = (x[..., :dim] for x in (q, k, v))
    k *= torch.linspace(0.01, 30, k.shape[1]).to(torch.float16)[None, :, None, None]
    q[:, 3] = 0
    v[:, :128] *= 1e-4
    cu = None
    if packed:
        q, k, v = (x[0] for x in (q, k, v))
        cu = cu_seqlens(lengths)
        k[370:] = 0
    sequences = len(lengths) if packed else 2
    quantizer = Quantizer([layout(q), layout(k), layout(v)], sequences, packed, precision)
    found = quantizer(q, k, v, cu)
    expected = [None if x is None else torch.empty_like(x) for x in found]
    q8, k8, copy, *scales = expected
    quantize_inputs(q, k, v, cu, q8, k8, None if found[2] is v else copy, *scales)
    for actual, wanted in zip(found, expected, strict=True):
        if actual is not v and actual is not None:
            assert_same_numbers(actual, wanted)
    assert (found[2] is v) == (precision == "qk8" and not packed)
    assert (found[5] is None) == (precision == "qk8")
