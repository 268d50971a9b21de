"""The Hopper kernel that follows the tree, compiled for sm90: no spills, layouts and products of the portable kernel."""

from __future__ import annotations

import re

import pytest
import torch
from cross_compile import Kernel, compiling_for, main_loops

from fa_serve.backends.calls import AttentionOptions, AttentionTensors
from fa_serve.backends.hopper.forward.plan import plan_hopper_forward
from fa_serve.backends.triton.tree.plan import plan_tree
from fa_serve.spec import TREE_SPLITS

EXPONENTIALS = 32 + 2 + 4
"""For a thread and a block: its scores, and for each of its two rows the factor of a new maximum and two of a fold."""


def call_of(head_dim: int, left: int, sinks: bool) -> tuple[AttentionTensors, AttentionOptions]:
    q = torch.zeros(2048, 4, head_dim, dtype=torch.bfloat16)
    cache = torch.zeros(64, 2, 16, head_dim, dtype=torch.bfloat16).transpose(1, 2)
    numbers = torch.zeros(256, dtype=torch.int32)
    tensors = AttentionTensors(q, cache, cache, cu_seqlens_q=numbers[:2], keys=numbers[:1], block_table=numbers[None])
    options = AttentionOptions(0.1, (left, 0), 0.0, 2048, 4096, True, num_splits=TREE_SPLITS)
    return tensors._replace(sinks=torch.zeros(4) if sinks else None), options


def lowered(kernel: Kernel) -> set[str]:
    """The layouts of products, without the number of warps, and the instructions."""
    asm = kernel.binary.asm
    layouts = re.findall(r"instrShape = \[16, \d+, 16\]", asm["ttgir"])
    return {*layouts, *re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m\d+n\d+k\d+)", asm["ptx"])}


@pytest.mark.parametrize(("head_dim", "left", "sinks"), [(128, -1, False), (96, 500, True)], ids=str)
def test_compiles_to_the_intended_instructions(head_dim: int, left: int, sinks: bool) -> None:
    tensors, options = call_of(head_dim, left, sinks)
    with compiling_for("sm90") as kernels:
        plan_hopper_forward(tensors, options)(tensors)
    kernel = next(each for each in kernels if each.name == "attn_fwd_hopper")
    assert kernel.spill_bytes == 0
    assert kernel.wgmma_faults == []
    loops = main_loops(kernel.sass, EXPONENTIALS)
    assert len(loops) == 2
    assert all(len(loop) < 720 for loop in loops)
    if head_dim == 128:  # one product for each of S and P V, as in the portable kernel
        with compiling_for("sm90") as kernels:
            plan_tree(tensors, options, apart=False)(tensors)
        assert lowered(kernel) == lowered(kernels[0])
