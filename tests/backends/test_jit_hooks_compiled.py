"""A program that watches Triton's compilations gets those of kernels whose constants are objects of ours."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from cross_compile import compiling_for
from triton import knobs

from fa_serve.backends.hopper import forward as hopper
from fa_serve.backends.jit_hooks import HOOK_CALL, show_constants_as_text
from fa_serve.backends.triton import forward as portable
from fa_serve.testing import make_qkv, run_plan


@pytest.mark.parametrize(
    ("plan", "constants"),
    [(hopper.plan_forward, "Variant("), (portable.plan_forward, "ForwardVariant(")],
    ids=["hopper", "triton"],
)
def test_hooks_get_the_text_of_constants(plan: Any, constants: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    q, k, v = make_qkv(1, 64, 64, 2, 2, 64, dtype=torch.bfloat16)
    with compiling_for("sm90"):
        monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **described: seen.append(described["compile"]))
        run_plan(plan, q, k, v, softmax_scale=0.1, window_size=(-1, 0), softcap=0.0, sinks=None, out=None, return_lse=False)
    described = [value for each in seen for value in json.loads(each["specialization_data"])["constant_vals"]]
    assert any(isinstance(value, str) and value.startswith(constants) for value in described)


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
