"""Whole mixtures with the kernels of experts and routers in Triton's interpreter: proven, taken, and right."""

from __future__ import annotations

import pytest
import torch
from hf_families import BY_NAME, assert_same, tokens

from fa_serve import ops
from fa_serve.hf import expert_modules, take_experts
from fa_serve.hf.surgery.fuse import router as fused_router
from fa_serve.hf.surgery.fuse.router import fuse_routers
from fa_serve.hf.surgery.fuse.unit import fuse_units
from fa_serve.ops.triton_ops import TritonOps


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "deepseek-v3"])
@torch.no_grad()
def test_the_kernels_compute_what_the_model_computes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = BY_NAME[name].build()
    ours = BY_NAME[name].build()
    monkeypatch.setattr(ops, "select_ops", lambda device: TritonOps())
    monkeypatch.setattr(fused_router, "_ROWS", 32)  # the interpreter is slow
    assert take_experts(ours) == len(expert_modules(ours)) > 0
    assert fuse_routers(ours) > 0
    assert fuse_units(ours) == (name == "deepseek-v3")
    for ids in (tokens(2, 6), tokens(1, 1)):
        assert_same(ours(ids).logits, eager(ids).logits)
