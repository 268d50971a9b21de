"""`hopper.forward_launches` in the emulator: calls that need copies, and calls that launch nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cross_compile import compiling_for
from hopper_cases import Case, PagedCall
from hopper_emulator import emulated

from fa_serve.backends.calls import AttentionTensors
from fa_serve.backends.hopper.forward.plan import plan_hopper_forward
from fa_serve.testing import cu_seqlens, make_qkv


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_an_unaligned_address_is_right_with_a_plan_for_aligned_ones(name: str) -> None:
    """The strides are the same, so the plan is: the copy engine cannot read or write at this address, and a copy is used."""
    case = Case("")
    q, k, v = make_qkv(1, 200, 200, 2, 1, 64, dtype=torch.bfloat16)
    wide = AttentionTensors(*(torch.zeros(*x.shape[:-1], 72, dtype=x.dtype) for x in (q, k, v)), out=q.new_zeros(1, 200, 2, 72))
    example = wide._replace(**{key: getattr(wide, key)[..., :64] for key in ("q", "k", "v", "out")})
    for x, data in zip(example[:3], (q, k, v), strict=True):
        x.copy_(data)
    unaligned = getattr(wide, name)[..., 1:65].copy_(getattr(example, name).clone())
    with emulated():
        run = plan_hopper_forward(example, case.options(200, 200))
        tensors = example._replace(**{name: unaligned})
        out, lse = run(tensors)
    assert out is tensors.out
    case.check(out, lse, q, k, v)


def test_rows_of_an_unaligned_out_that_belong_to_no_sequence_are_zero() -> None:
    q, k, v = (x[0] for x in make_qkv(1, 70, 70, 2, 1, 64, dtype=torch.bfloat16))
    cu = cu_seqlens([40, 20])
    out = torch.full((70 * 2 * 64 + 1,), 7.0, dtype=torch.bfloat16)[1:].view(70, 2, 64)
    tensors = AttentionTensors(q, k, v, cu_seqlens_q=cu, keys=cu, out=out)
    with emulated():
        plan_hopper_forward(tensors, Case("").options(40, 40))(tensors)
    assert (out[60:] == 0).all()
    assert not (out[:60] == 7.0).any()


def test_a_plan_computes_calls_with_other_addresses_and_contents() -> None:
    case = Case("", batch=2, heads=(4, 2), head_dim=(192, 128))
    options = replace(case.options(200, 200), return_lse=False)
    example, later = (
        AttentionTensors(*make_qkv(2, 200, 200, 4, 2, 192, 128, dtype=torch.bfloat16, seed=seed)) for seed in (0, 1)
    )
    with emulated():
        run = plan_hopper_forward(example, options)
        run(example)
        out, lse = run(later)
        assert lse is None
        _, lse = plan_hopper_forward(later, case.options(200, 200))(later)
    case.check(out, lse, *later[:3])


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0])], ids=["plain", "sinks"])
def test_nothing_to_attend_to(sinks: torch.Tensor | None) -> None:
    q, k, v = make_qkv(1, 200, 200, 2, 1, 64, dtype=torch.bfloat16)
    tensors = AttentionTensors(q, k[:, :0], v[:, :0], sinks)
    no_queries = AttentionTensors(q[:, :0], k, v, sinks)
    with emulated():
        out, lse = plan_hopper_forward(tensors, Case("").options(200, 0))(tensors)
        nothing, _ = plan_hopper_forward(no_queries, Case("").options(0, 200))(no_queries)
    assert nothing.shape == (1, 0, 2, 64)
    assert (out == 0).all()
    expected = torch.full((2,), float("-inf")) if sinks is None else sinks
    assert torch.equal(lse, expected[None, :, None].expand(1, 2, 200))


def test_nothing_is_launched_if_no_sequence_can_have_a_tile() -> None:
    call = PagedCall.of(Case(""), [3, 3], [40, 40], skip_q=6)
    tensors = call.tensors._replace(out=torch.full_like(call.tensors.q, 7.0))
    with compiling_for("sm90") as kernels:
        out, _ = plan_hopper_forward(tensors, call.options)(tensors)
    assert kernels == []
    assert (out == 7.0).all()
