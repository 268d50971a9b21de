"""Transforms of `torch.func` around the public functions, with a backend that autograd cannot follow, and with PyTorch's.

The kernels themselves are transformed in tests/test_transforms_interpreted.py and on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from opaque_backend import Opaque, opaque_backend
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, vmap
from transform_cases import Attend, check_other_calls, check_refusals, check_transform, inputs, loss, of_sample, params

import fa_serve
from fa_serve.backends.calls import AttentionTensors, CallOptions
from fa_serve.dispatch import decide_dense
from fa_serve.launching.plans import PLANS
from fa_serve.spec import UnsupportedError

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # of PyTorch's operator, whose samples are expected
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),  # PyTorch compiles its forward mode with it
]


@pytest.fixture
def opaque() -> Iterator[Opaque]:
    with opaque_backend() as backend:
        yield backend


@pytest.mark.parametrize("case", params())
def test_results_are_those_of_pytorch(case: Attend, opaque: Opaque) -> None:
    check_transform(case, "triton", torch.float32)


def test_calls_without_gradients(opaque: Opaque) -> None:
    check_other_calls("triton")


def test_refusals(opaque: Opaque) -> None:
    check_refusals("triton")


def test_samples_of_a_dense_batch_are_one_call(opaque: Opaque) -> None:
    given = inputs("cpu", torch.float32)
    vmap(grad(loss), in_dims=(0, None))({name: given[name] for name in "qkv"}, "triton")
    assert [spec.op for spec, _ in opaque.planned] == ["attention", "backward"]


def test_pytorchs_operators_keep_what_they_have() -> None:
    """Second derivatives and forward mode, which kernels refuse."""
    sample = of_sample(inputs("cpu", torch.float32), 0, "q k v")
    assert grad(lambda some: grad(loss)(some, "sdpa")["q"].sum())(sample)["k"].abs().max() > 0
    _, tangent = torch.func.jvp(
        lambda q: fa_serve.attention(q, sample["k"], sample["v"], backend="reference"), (sample["q"],), (sample["q"],)
    )
    assert tangent.abs().max() > 0


@pytest.mark.parametrize("packed", [False, True])
def test_operators_without_a_forward_mode_say_what_has_one(packed: bool) -> None:
    """PyTorch's own message asks for an issue at its repository."""
    q, k, v = of_sample(inputs("cpu", torch.float32), 0, "q k v").values()
    cu_seqlens = torch.tensor([0, 1, q.shape[1]], dtype=torch.int32)
    lengths = {f"cu_seqlens_{x}": cu_seqlens for x in "qk"} | {f"max_seqlen_{x}": q.shape[1] for x in "qk"}

    def call(x: Tensor) -> Tensor:
        if packed:
            return cast(Tensor, fa_serve.attention_varlen(x[0], k[0], k[0], **lengths))  # type: ignore[arg-type]
        return cast(Tensor, fa_serve.attention(x, k, v))

    with pytest.raises(UnsupportedError, match="choose backend='reference'"):
        torch.func.jvp(call, (q,), (q,))
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="choose backend='reference'"):
        call(forward_ad.make_dual(q, q))  # type: ignore[no-untyped-call]


def test_plain_tensors_inside_of_a_transform_are_a_plain_call(opaque: Opaque) -> None:
    """A call whose tensors a transform does not wrap keeps its plan, and leaves none for others."""
    q, k, v = of_sample(inputs("cpu", torch.float32), 0, "q k v").values()
    plain = fa_serve.attention(q, k, v, backend="triton")
    plans = len(PLANS)
    found: list[Any] = []
    grad(lambda x: found.append(fa_serve.attention(q, k, v, backend="triton")) or x.sum())(q)
    assert torch.equal(found[0], plain)
    assert len(PLANS) == plans
    assert found[0].grad_fn is None


def test_the_backend_is_asked_for_gradients_below_a_batch() -> None:
    """A batch of vmap does not show that its numbers are differentiated; float8 products, for example, have no gradients."""
    q, k, v = (given[:, 0] for given in list(inputs("cpu", torch.float32).values())[:3])
    options = CallOptions(causal=True)
    seen: list[bool] = []

    def attend(q: torch.Tensor) -> torch.Tensor:
        seen.append(decide_dense(AttentionTensors(q[None], k[:1], v[:1]), options).spec.needs_grad)
        return q.sum()

    vmap(attend)(q)
    grad(lambda q: vmap(attend)(q).sum())(q)
    grad(attend)(q[0])
    assert seen == [False, True, True]
