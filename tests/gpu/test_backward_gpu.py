"""Gradients on the GPU: the forward pass's cases by the 2x rule, equal bits, graphs, checkpointing, and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import DENSE, VARLEN, Case, check_gradients, check_gradients_of_nothing, params
from torch.utils.checkpoint import checkpoint

import fa_serve
from fa_serve.testing import make_qkv

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BACKENDS = ["triton", "hopper"]
"""The backend of the forward pass. With "hopper", gradients may be added in any order, which the Hopper kernel needs."""


def differentiable(cases: list[Case]) -> list[Case]:
    """Cases that the kernels differentiate, and where some row sees more than one key."""
    served = [case for case in cases if not (case.alibi or case.chunk) and case.head_dim <= 256]
    return [case for case in served if max(case.lengths_k, default=0) > 1 and case.window != (0, 0)]


@pytest.fixture
def any_order() -> None:
    """Gradients may be added in any order. The fixture that poisons memory asks for a fixed one, and restores its choice."""
    torch.use_deterministic_algorithms(False)


def _check(case: Case, backend: str, dtype: torch.dtype, layout: str) -> None:
    torch.use_deterministic_algorithms(backend == "triton")
    try:
        check_gradients(case, backend, dtype, "cuda", layout)
    except fa_serve.UnsupportedError as error:
        if backend != "hopper":
            raise
        pytest.skip(str(error).splitlines()[-1].strip())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", params(differentiable(DENSE)))
def test_dense(case: Case, dtype: torch.dtype, backend: str) -> None:
    _check(case, backend, dtype, "dense")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", params(differentiable(VARLEN)))
def test_varlen(case: Case, dtype: torch.dtype, backend: str) -> None:
    _check(case, backend, dtype, "varlen")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_gradients_without_queries_or_keys_are_zeros(backend: str, deterministic: bool, dtype: torch.dtype) -> None:
    torch.use_deterministic_algorithms(deterministic)
    check_gradients_of_nothing(backend, dtype, "cuda")


def _leaves(seqlen: int, dim: int = 128) -> list[torch.Tensor]:
    return [x.requires_grad_() for x in make_qkv(1, seqlen, seqlen, 8, 2, dim, dtype=torch.bfloat16, device="cuda")]


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_equal_calls_have_equal_bits(dim: int) -> None:
    given = _leaves(2000, dim)
    out: Any = fa_serve.attention(*given, causal=True)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, given, dout, retain_graph=True)
    for _ in range(20):
        again = torch.autograd.grad(out, given, dout, retain_graph=True)
        assert all(map(torch.equal, first, again))


@pytest.mark.usefixtures("any_order")
@pytest.mark.parametrize("dim", [64, 128])
def test_hopper_gradients_of_long_calls(dim: int) -> None:
    """Every call is near the portable kernels' gradients, whatever the order of the additions. A race would show in some."""
    given = _leaves(4000, dim)
    out: Any = fa_serve.attention(*given, causal=True)
    dout = torch.randn_like(out)
    torch.use_deterministic_algorithms(True)
    try:
        expected = torch.autograd.grad(out, given, dout, retain_graph=True)
        again = torch.autograd.grad(out, given, dout, retain_graph=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, expected, again)), "deterministic algorithms take the portable kernels"
    for _ in range(20):
        actual = torch.autograd.grad(out, given, dout, retain_graph=True)
        for mine, portable in zip(actual, expected, strict=True):
            worst = (mine.float() - portable.float()).abs().max().item()
            assert worst <= 2e-2 * portable.float().abs().max().item()


def _loss(*given: torch.Tensor) -> torch.Tensor:
    out: Any = fa_serve.attention(*given, causal=True)
    return (out.float() ** 2).sum()


@pytest.mark.parametrize(
    "call",
    [torch.compile(_loss, fullgraph=True), lambda *given: checkpoint(_loss, *given, use_reentrant=False)],
    ids=["compile", "checkpoint"],
)
@pytest.mark.usefixtures("any_order")
def test_gradients_are_those_of_the_plain_call(call: Callable[..., torch.Tensor]) -> None:
    given = _leaves(300)
    expected = torch.autograd.grad(_loss(*given), given)
    actual = torch.autograd.grad(call(*given), given)
    for mine, plain in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, plain, atol=2e-2, rtol=2e-2)


@pytest.mark.usefixtures("any_order")
def test_memory_is_linear_in_the_sequence_length() -> None:
    """A score matrix of 128k rows would need 32 GiB for each head in bfloat16."""
    peaks = []
    for seqlen in (16384, 131072):
        given = _leaves(seqlen, 64)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(fa_serve.attention(*given, causal=True).sum(), given)  # type: ignore[union-attr]
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= 8.5 * peaks[0]
