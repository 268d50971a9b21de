"""Tiles of the grouped product in deterministic mode on Hopper: one instruction and one chain of sums in each of them.

tests/ops/products/test_row_invariant_compiled.py has the same for dense weights, and says what machine code can show. A GPU
compares the bits (tests/gpu/test_ops_gpu.py).
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from cross_compile import Kernel, compiling_for
from products_by_kernel import product_of_experts

from fa_serve import ops
from fa_serve.ops.moe.grouped import plan_grouped
from fa_serve.ops.moe.matrix_wgmma import BLOCK_K, plan_matrix_tiles
from fa_serve.ops.moe.order import Places
from fa_serve.ops.moe.tiles import HOPPER_INVARIANT_TILES, GroupedTile, matrix_tile

SILU = ops.Gate("silu")
WGMMA = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m(\d+)n(\d+)k(\d+)\.f32\.bf16\.bf16")
BF16 = torch.bfloat16


def compiled(tile: GroupedTile | None, gate: ops.Gate | None) -> Kernel:
    """The kernel of 512 pairs and 8 experts. tile: None for the Hopper kernel for matrices"""
    x = torch.zeros(512, 2048, dtype=BF16)
    weight = torch.zeros(8, 1536, 2048, dtype=BF16)
    order = torch.zeros(512, dtype=torch.int32)
    out = torch.zeros(512, 768 if gate else 1536, dtype=BF16)
    product = replace(product_of_experts(x, weight, 8, 1, gate, 512), invariant=True)
    with compiling_for("sm90") as kernels:
        if tile is None:
            launch = plan_matrix_tiles(product, matrix_tile(product), gate, 12, 0, False)
            launch((weight, x, x, None, order, torch.zeros(12, 3, dtype=torch.int32), out))
        else:
            starts = torch.zeros(9, dtype=torch.int32)
            plan_grouped(product, tile, weight, None, gate)(x, weight, None, Places(order, starts, None), out)
    [kernel] = kernels
    return kernel


@pytest.mark.parametrize("gate", [SILU, None], ids=["gated", "down"])
@pytest.mark.parametrize("tile", HOPPER_INVARIANT_TILES, ids=lambda tile: "-".join(map(str, tile)))
def test_every_tile_adds_by_one_chain_of_the_same_instruction(tile: GroupedTile, gate: ops.Gate | None) -> None:
    kernel = compiled(tile, gate)
    found = WGMMA.findall(kernel.binary.asm["ptx"])
    assert {(int(m), int(k)) for m, _, k in found} == {(64, 16)}
    links = tile.block_k // 16 * (tile.block_m // (64 * (tile.num_warps // 4)))
    assert len(found) % links == 0
    assert not kernel.instructions["HMMA"], "another instruction could add in another order"
    assert kernel.spill_bytes == 0


@pytest.mark.parametrize("gate", [SILU, None], ids=["gated", "down"])
def test_the_kernel_of_many_pairs_has_the_same_chain(gate: ops.Gate | None) -> None:
    kernel = compiled(None, gate)
    found = WGMMA.findall(kernel.binary.asm["ptx"])
    assert {(int(m), int(k)) for m, _, k in found} == {(64, 16)}
    # each consumer has the chain of a block once, the first one twice, before and after the second one begins
    assert len(found) == 3 * BLOCK_K // 16
    assert not kernel.instructions["HMMA"]


def test_a_tile_of_fewer_rows_would_be_another_instruction() -> None:
    kernel = compiled(GroupedTile(16, 128, 128, 4, 4), None)
    assert not WGMMA.findall(kernel.binary.asm["ptx"])
    assert kernel.instructions["HMMA"]
