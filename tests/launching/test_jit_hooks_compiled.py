"""A program that watches Triton's compilations gets those of kernels whose constants JSON cannot represent."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cross_compile import compiling_for
from triton import knobs

from fa_serve.backends.calls import AttentionOptions, BackwardTensors
from fa_serve.backends.hopper.forward import kernel as forward_partitions
from fa_serve.backends.hopper.forward.plan import plan_hopper_forward
from fa_serve.backends.triton.backward import kernels as backward_kernels
from fa_serve.backends.triton.backward.plan import plan_backward
from fa_serve.backends.triton.prefill import kernel as forward_kernel
from fa_serve.backends.triton.prefill.plan import plan_forward
from fa_serve.launching.jit_hooks import HOOK_CALL, show_constants_as_text
from fa_serve.testing import make_qkv, run_plan

KERNELS = {
    forward_partitions: ["attn_fwd_hopper"],
    forward_kernel: ["attn_fwd"],
    backward_kernels: ["attn_bwd_q", "attn_bwd_kv"],
}


def forward(plan: Callable[..., Any], dim: int) -> None:
    q, k, v = make_qkv(1, 64, 64, 2, 2, dim, dtype=torch.bfloat16)
    run_plan(plan, q, k, v, softmax_scale=0.1, window_size=(-1, 0), softcap=0.0, sinks=None, out=None, return_lse=False)


def backward(dim: int) -> None:
    q, k, v = make_qkv(1, 64, 64, 2, 2, dim, dtype=torch.bfloat16)
    lse = torch.zeros(1, 2, 64)
    tensors = BackwardTensors(
        q, k, v, None, None, None, None, torch.empty_like(q), lse, torch.empty_like(q), None, False, False
    )
    plan_backward(tensors, AttentionOptions(0.1, (-1, 0), 0.0, 64, 64, True))(tensors)


@pytest.mark.parametrize(
    ("call", "constants"),
    [
        pytest.param(partial(forward, plan_hopper_forward, 64), ["Variant(", "tiles="], id="hopper"),
        pytest.param(partial(forward, plan_forward, 64), ["ForwardVariant(", "tma=False"], id="portable"),
        pytest.param(partial(forward, plan_forward, 128), ["ForwardVariant(", "tma=True"], id="portable-tma"),
        pytest.param(partial(backward, 128), ["BackwardVariant(", "tma="], id="backward"),
    ],
)
def test_hooks_get_the_text_of_constants(
    call: Callable[[], None], constants: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, names in KERNELS.items():
        for name in names:
            vars(getattr(module, name)).pop(HOOK_CALL, None)  # an earlier test has launched it
    seen: list[dict[str, Any]] = []
    with compiling_for("sm90"):
        monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **described: seen.append(described["compile"]))
        call()
    described = [value for each in seen for value in json.loads(each["specialization_data"])["constant_vals"]]
    assert any(isinstance(value, str) and all(part in value for part in constants) for value in described), described


def test_other_constants_stay_as_they_are() -> None:
    class Kernel:
        def _call_hook(self, hook: Any, key: str, constants: dict[str, Any], *, warmup: bool) -> None:
            hook(key, constants, warmup)

    seen: list[Any] = []
    kernel = Kernel()
    show_constants_as_text(kernel)
    first = vars(kernel)[HOOK_CALL]
    show_constants_as_text(kernel)
    assert vars(kernel)[HOOK_CALL] is first
    kernel._call_hook(None, "a", {"x": 1}, warmup=False)
    kernel._call_hook(lambda *described: seen.append(described), "a", {"x": 1, "y": None, "z": {3}, "w": (1, 2)}, warmup=True)
    assert seen == [("a", {"x": 1, "y": None, "z": "{3}", "w": (1, 2)}, True)]
