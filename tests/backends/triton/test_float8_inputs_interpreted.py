"""The kernel that quantises q, k and v in Triton's interpreter, against PyTorch. The interpreter multiplies no bfloat16."""

from __future__ import annotations

import pytest
import torch
from float8_cases import quantize_inputs
from torch import Tensor

from fa_serve.backends.calls import AttentionOptions, AttentionTensors
from fa_serve.backends.layout import TensorLayout
from fa_serve.backends.triton import float8_inputs
from fa_serve.backends.triton.float8_inputs import InputQuantizer, _rotation
from fa_serve.spec import Precision
from fa_serve.testing import cu_seqlens, make_paged, make_qkv


def layout(x: Tensor) -> TensorLayout:
    return TensorLayout(x.shape, x.stride(), x.dtype)


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
    options = AttentionOptions(1.0, (-1, 0), 0.0, 130, max(lengths), return_lse=False, precision=precision)
    form = "packed" if packed else "dense"
    quantizer = InputQuantizer([layout(q), layout(k), layout(v)], form, sequences, options)
    found = quantizer(AttentionTensors(q, k, v, cu_seqlens_q=cu, keys=cu))
    expected = [None if x is None else torch.empty_like(x) for x in found]
    q8, k8, copy, *scales = expected
    rotation = _rotation(dim, q.dtype, q.device)
    quantize_inputs(q, k, v, cu, None, None, None, None, rotation, q8, k8, None if found[2] is v else copy, *scales)
    for actual, wanted in zip(found, expected, strict=True):
        if actual is not v and actual is not None:
            assert_same_numbers(actual, wanted)
    assert (found[2] is v) == (precision == "qk8" and not packed)
    assert (found[5] is None) == (precision == "qk8")


@pytest.mark.parametrize("precision", ["qk8", "fp8"])
@pytest.mark.parametrize(
    ("dim", "page_size", "left", "float8"),
    [(64, 16, -1, False), (128, 48, 40, False), (64, 16, 150, True), (128, 8, -1, True)],
    ids=["d64", "d128-window", "float8-window", "d128-float8"],
)
def test_copies_of_pages(dim: int, page_size: int, left: int, float8: bool, precision: Precision) -> None:
    """Pages in any order, also with all tokens of a head together; slots of no sequence are NaN, and entries of the block table
    that must not be read point outside. Some sequences are left to another kernel, one has no key, and one has no query."""
    lengths_q = [20, 1, 70, 5, 0, 9]
    lengths_k = [300, 200, 129, 0, 50, 128]
    q, k, v = (x[0] for x in make_qkv(1, sum(lengths_q), sum(lengths_k), 2, 2, dim, dtype=torch.float16))
    k *= torch.linspace(0.01, 30, len(k))[:, None, None].to(torch.float16)
    v[:300] *= 1e-2
    k_cache, v_cache, table, seqused_k = make_paged(k.split(lengths_k), v.split(lengths_k), page_size)
    descales = {}
    if float8:
        k_cache, v_cache = (x.to(torch.float8_e4m3fn) for x in (k_cache, v_cache))
        descales = {"k_descale": torch.tensor([0.3, 2.0]), "v_descale": torch.tensor([0.01, 0.07])}
    if left >= 0:
        for b, (num_queries, length) in enumerate(zip(lengths_q, lengths_k, strict=True)):
            table[b, : max(length - num_queries - left, 0) // page_size] = 2**28
    if not float8:
        k_cache, v_cache = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k_cache, v_cache))
    cu = cu_seqlens(lengths_q)
    options = AttentionOptions(1.0, (left, 0), 0.0, 70, 310, return_lse=False, skip_q=1, precision=precision)
    layouts = [layout(x) for x in (q, k_cache, v_cache)]
    quantizer = InputQuantizer(layouts, "paged", len(lengths_q), options, table.stride(0))
    tensors = AttentionTensors(q, k_cache, v_cache, cu_seqlens_q=cu, keys=seqused_k, block_table=table, **descales)
    found = quantizer(tensors)
    assert quantizer.groups == 3
    expected = [None if x is None else torch.empty_like(x) for x in found]
    pages = (cu, table, tensors.k_descale, tensors.v_descale, _rotation(dim, q.dtype, q.device))
    quantize_inputs(q, k_cache, v_cache, seqused_k, *pages, *expected, skip_q=1, left=left)
    for actual, wanted in zip(found, expected, strict=True):
        if actual is not None:
            assert_same_numbers(actual, wanted)
    written = expected[4].isfinite()
    assert written[:, 0].tolist() == [
        [left < 0, True, True],
        [False] * 3,
        [True, True, False],
        [True, False, False],
        [False] * 3,
        [True, False, False],
    ]


def test_the_rotation_is_kept_unless_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8_inputs, "_ROTATIONS", {})
    cpu = torch.device("cpu")
    first = _rotation(64, torch.float32, cpu)
    assert _rotation(64, torch.float32, cpu) is first
    monkeypatch.setattr(float8_inputs, "_make_rotation", lambda *_: torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    captured = _rotation(64, torch.float32, torch.device("cuda"))
    assert _rotation(64, torch.float32, torch.device("cuda")) is not captured, "its numbers come with the replay"
    for dim in range(float8_inputs._MAX_ROTATIONS + 5):
        _rotation(dim, torch.float32, cpu)
    assert len(float8_inputs._ROTATIONS) <= float8_inputs._MAX_ROTATIONS
