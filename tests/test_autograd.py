"""Gradients of the public functions: who computes them, what is refused, and what a call without gradients pays.

The kernels are stood in for by a backend that autograd cannot follow and whose op "backward" is the reference's. The kernels
themselves are tested in tests/backends/triton/backward/test_plan_interpreted.py and on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import data_parallel
import pytest
import torch
from opaque_backend import Opaque, opaque_backend
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fa_serve
from fa_serve.backends.reference import attention_reference
from fa_serve.testing import cu_seqlens, make_paged, make_qkv


@pytest.fixture
def opaque() -> Iterator[Opaque]:
    with opaque_backend() as backend:
        yield backend


def leaves() -> list[Tensor]:
    given = [*make_qkv(2, 9, 11, 4, 2, 16), torch.linspace(-1, 1, 4), torch.randn(1, 4, 9, 11)]
    return [x.requires_grad_() for x in given]


def call(given: list[Tensor], backend: str, **options: Any) -> Any:
    q, k, v, sinks, mask = given
    return fa_serve.attention(q, k, v, sinks=sinks, mask=mask, softcap=4.0, causal=True, backend=backend, **options)


@pytest.mark.parametrize("uses", ["out", "lse", "both"])
def test_dense(opaque: Opaque, uses: str) -> None:
    given = leaves()
    found = []
    for backend in ("auto", "reference"):
        out, lse = call(given, backend, return_lse=True)
        loss = (out * out).sum() * (uses != "lse") + (lse * lse).sum() * (uses != "out")
        found.append(torch.autograd.grad(loss, given))
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert [spec.op for spec, _ in opaque.planned] == ["attention", "backward"]
    assert not any(spec.needs_grad for spec, _ in opaque.planned)


def test_varlen_and_out(opaque: Opaque) -> None:
    q, k, v = (x.requires_grad_() for x in (x[0] for x in make_qkv(1, 12, 12, 4, 2, 16)))
    ends = {"cu_seqlens_q": cu_seqlens([5, 7]), "cu_seqlens_k": cu_seqlens([5, 7]), "max_seqlen_q": 7, "max_seqlen_k": 7}
    found = []
    for backend in ("auto", "reference"):
        room = torch.zeros(12, 4, 16)
        out: Any = fa_serve.attention_varlen(q, k, v, **ends, causal=True, out=room, backend=backend)
        assert out is room
        found.append(torch.autograd.grad((out * out).sum(), (q, k, v)))
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_one_token_with_gradients_is_no_decoding(opaque: Opaque) -> None:
    """Decoding kernels merge parts of the keys, and have no backward pass."""
    q, k, v = make_qkv(1, 1, 40, 4, 2, 16)
    fa_serve.attention(q.requires_grad_(), k, v).sum().backward()
    assert [spec.op for spec, _ in opaque.planned] == ["attention", "backward"]


def test_without_gradients_nothing_is_kept(opaque: Opaque) -> None:
    given = leaves()
    with torch.no_grad():
        out = call(given, "auto")
    assert out.grad_fn is None
    assert [(spec.op, options.return_lse) for spec, options in opaque.planned] == [("attention", False)]
    assert call([x.detach() for x in given], "auto").grad_fn is None


def test_second_derivatives_are_refused(opaque: Opaque) -> None:
    given = leaves()
    out = call(given, "auto")
    first = torch.autograd.grad(out.sum(), given, create_graph=True)
    plain = torch.autograd.grad(call(given, "auto").sum(), given)
    assert all(torch.equal(x, y) for x, y in zip(first, plain, strict=True))
    with pytest.raises(fa_serve.UnsupportedError, match="cannot be differentiated again"):
        torch.autograd.grad(first[0].sum(), given[:3])
    out = call(given, "sdpa")
    first = torch.autograd.grad((out * out).sum(), given, create_graph=True)
    torch.autograd.grad(first[0].sum(), given[:3])


def test_gradients_through_pages_are_refused(opaque: Opaque) -> None:
    q, k, v = make_qkv(1, 5, 7, 4, 2, 16)
    k_cache, v_cache, table, used = make_paged(list(k), list(v), 4)
    pages = {"block_table": table, "seqused_k": used, "cu_seqlens_q": cu_seqlens([5]), "max_seqlen_q": 5}
    with pytest.raises(fa_serve.UnsupportedError, match="sdpa: cannot differentiate through a paged cache"):
        fa_serve.attention_paged(q[0].requires_grad_(), k_cache, v_cache, **pages)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(opaque: Opaque, use_reentrant: bool) -> None:
    given = leaves()
    plain = torch.autograd.grad((call(given, "auto") ** 2).sum(), given)
    out: Any = checkpoint(lambda *xs: call(list(xs), "auto"), *given, use_reentrant=use_reentrant)
    (out**2).sum().backward()
    assert all(torch.equal(x.grad, expected) for x, expected in zip(given, plain, strict=True) if x.grad is not None)
    assert all(x.grad is not None for x in given)


@pytest.mark.slow
def test_data_parallel_training(tmp_path: Path) -> None:
    """Two processes with a row each end with the gradients that one process has of both rows."""
    meeting_point = str(tmp_path / "ranks")
    path = os.pathsep.join([str(Path(data_parallel.__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "data_parallel", "1", meeting_point]
    other = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    try:
        actual = data_parallel.gradients(0, meeting_point)
        assert other.wait(60) == 0
    finally:
        other.kill()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    alone = data_parallel.Layer()
    sum(alone(row[None]) / data_parallel.RANKS for row in data_parallel.batch()).backward()
    assert len(actual) == 5
    for mine, expected in zip(actual, alone.parameters(), strict=True):
        torch.testing.assert_close(mine, expected.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("deterministic", [False, True])
def test_determinism_is_passed_on_for_masks(opaque: Opaque, deterministic: bool) -> None:
    given = leaves()
    torch.use_deterministic_algorithms(deterministic)
    call(given, "auto").sum().backward()
    call([*given[:4], given[4].detach()], "auto").sum().backward()
    planned = [(spec.deterministic, options.deterministic) for spec, options in opaque.planned if spec.op == "backward"]
    assert planned == [(deterministic, deterministic)] * 2


def test_a_plan_is_made_again_for_deterministic_algorithms(opaque: Opaque) -> None:
    """Another backend may compute the gradients then."""
    given = leaves()
    for deterministic in (False, True, False):
        torch.use_deterministic_algorithms(deterministic)
        call([*given[:4], given[4].detach()], "auto").sum().backward()
    assert [spec.deterministic for spec, _ in opaque.planned if spec.op == "backward"] == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_one_call_asks_for_gradients_that_repeat(opaque: Opaque, packed: bool, compiled: bool) -> None:
    """Other calls keep the fastest gradients."""
    torch.use_deterministic_algorithms(False)
    given = [x.requires_grad_() for x in make_qkv(1, 5, 5, 4, 2, 16)]
    ends: dict[str, Any] = {
        "cu_seqlens_q": cu_seqlens([5]),
        "cu_seqlens_k": cu_seqlens([5]),
        "max_seqlen_q": 5,
        "max_seqlen_k": 5,
    }

    def attend(*tensors: Tensor, deterministic: bool) -> Tensor:
        if not packed:
            return fa_serve.attention(*tensors, deterministic=deterministic)
        return fa_serve.attention_varlen(*(x[0] for x in tensors), **ends, deterministic=deterministic)

    if compiled:
        attend = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for deterministic in (False, True):
        attend(*given, deterministic=deterministic).sum().backward()
    planned = [spec.deterministic for spec, _ in opaque.planned if spec.op == "backward"]
    assert planned == [False, True]


def test_a_call_without_gradients_needs_none_that_repeat(opaque: Opaque) -> None:
    """Whether they would repeat does not matter then, so no backend may refuse the call for it."""
    q, k, v = make_qkv(1, 5, 5, 4, 2, 16)
    fa_serve.attention(q, k, v, deterministic=True)
    assert [spec.deterministic for spec, _ in opaque.planned] == [False]


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_the_op_backward_of_differentiable_backends(backend: str) -> None:
    """What custom operators use: gradients of tensors alone, here where autograd would find them, too."""
    given = leaves()
    out, lse = call(given, backend, return_lse=True)
    dout = torch.randn_like(out)
    dlse = torch.randn_like(lse)
    expected = torch.autograd.grad((out, lse), given, (dout, dlse))
    options = (True, None, -1, -1, 4.0, 0, "bf16", False, True, backend)
    detached = [x.detach() for x in given]
    rest = (None, None, out.detach(), lse.detach(), dout, dlse, True, True, None, 9, 11)
    actual = torch.ops.fa_serve.attention_gradients(*detached, *rest, *options)
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "window_size": (2, 1)}, {"window_size": (-1, 0)}], ids=str)
def test_gradcheck_of_the_reference(options: dict[str, Any]) -> None:
    """The gradients that all others are compared with are those of finite differences."""
    q, k, v = (x.double().requires_grad_() for x in make_qkv(1, 4, 5, 2, 1, 3))
    sinks = torch.tensor([0.3, -0.7], dtype=torch.float64, requires_grad=True)
    mask = torch.randn(1, 2, 4, 5, dtype=torch.float64, requires_grad=True)

    def compute(*given: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, sinks, mask = given
        return attention_reference(q, k, v, softmax_scale=0.6, sinks=sinks, mask=mask, **options)

    assert torch.autograd.gradcheck(compute, (q, k, v, sinks, mask))
