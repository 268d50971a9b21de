"""Tiles of the row-invariant product on Hopper: one instruction and one chain of sums, whatever the number of rows.

A row has the same bits in two tiles if each of its sums is the same chain of the same instructions. This is what the machine
code can show: only wgmma multiplies, and a tile's k has as many links as there are 16s in it. What the instruction itself does
with the size of a tile is compared on a GPU (tests/gpu/test_rollouts_gpu.py).
"""

from __future__ import annotations

import re

import pytest
import torch
from cross_compile import Kernel, compiling_for
from sampled_cases import each_nth

from fa_serve.ops.products.problem import Details, Product
from fa_serve.ops.products.row_invariant import plan_invariant
from fa_serve.ops.products.row_invariant_wgmma import BLOCK_K, plan_invariant_wgmma
from fa_serve.ops.products.tiles import HOPPER_TILES, ONE_TILE, InvariantTile, InvariantWgmmaTile, invariant_tile

SEGMENTED = [HOPPER_TILES[1]._replace(segments=4, apart=apart) for apart in (True, False)]
WGMMA = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m(\d+)n(\d+)k(\d+)\.f32\.bf16\.bf16")


def compiled(tile: InvariantTile, target: str = "sm90", tokens: int = 512, k: int = 4096) -> Kernel:
    x = torch.zeros(tokens, k, dtype=torch.bfloat16)
    weight = torch.zeros(4096, k, dtype=torch.bfloat16)
    product = Product(values="float", n=4096, k=k, tokens=tokens, dtype=torch.bfloat16, arch=90, invariant=True)
    with compiling_for(target) as kernels:
        plan_invariant(product, tile, Details(strides=(*x.stride(), *weight.stride())))(x, weight, None, None, None)
    assert [kernel.name for kernel in kernels] == ["_invariant_linear"] + ["_sum_splits"] * tile.apart
    return kernels[0]


@pytest.mark.parametrize("tile", each_nth(2, [ONE_TILE, *HOPPER_TILES, *SEGMENTED]), ids=lambda tile: "-".join(map(str, tile)))
def test_every_tile_adds_by_one_chain_of_the_same_instruction(tile: InvariantTile) -> None:
    kernel = compiled(tile)
    found = WGMMA.findall(kernel.binary.asm["ptx"])
    assert {(int(m), int(k)) for m, _, k in found} == {(64, 16)}
    assert {int(n) for _, n, _ in found} == {tile.block_n}
    # four warps have 64 rows of the tile each; a loop that is unrolled or peeled has the chain more than once
    warpgroups = tile.num_warps // 4
    links = tile.block_k // 16 * (tile.block_m // (64 * warpgroups))
    assert len(found) % links == 0
    assert not kernel.instructions["HMMA"], "another instruction could add in another order"
    assert not re.search(r"\b(red|atom)\.", kernel.binary.asm["ptx"]), "no sum is divided between programs"
    assert kernel.spill_bytes == 0


@pytest.mark.parametrize("tile", [InvariantWgmmaTile(256, 4, 2), InvariantWgmmaTile(128, 6, 3)], ids=str)
@pytest.mark.parametrize("extras", [False, True], ids=["", "bias-residual"])
def test_the_kernel_of_many_rows_has_the_same_chain(tile: InvariantWgmmaTile, extras: bool) -> None:
    x = torch.zeros(512, 4096, dtype=torch.bfloat16)
    weight = torch.zeros(4096, 4096, dtype=torch.bfloat16)
    product = Product(values="float", n=4096, k=4096, tokens=512, dtype=torch.bfloat16, arch=90, invariant=True)
    bias = weight[0] if extras else None
    with compiling_for("sm90") as kernels:
        multiply = plan_invariant_wgmma(product, tile, Details(strides=(*x.stride(), *weight.stride())))
        multiply(x, weight, bias, None, x if extras else None)
    [kernel] = kernels
    found = WGMMA.findall(kernel.binary.asm["ptx"])
    assert set(found) == {("64", str(tile.block_n), "16")}
    # each consumer has the chain of a block once, the first one twice, before and after the second one begins
    assert len(found) == 3 * BLOCK_K // 16
    assert not kernel.instructions["HMMA"]
    assert kernel.spill_bytes == 0
    assert kernel.shared_bytes <= 227 << 10
    assert kernel.wgmma_faults == []


def test_a_tile_of_fewer_rows_would_be_another_instruction() -> None:
    """The guard of the rule that a tile has 64 rows, also for a single token."""
    kernel = compiled(InvariantTile(16, 64, 128, 3), tokens=1)
    assert not WGMMA.findall(kernel.binary.asm["ptx"])
    assert kernel.instructions["HMMA"]


@pytest.mark.parametrize("arch", [80, 89, 100])
def test_one_tile_serves_every_number_of_rows_where_no_gpu_has_compared_them(arch: int) -> None:
    tiles = {
        invariant_tile(Product(values="float", n=4096, k=4096, tokens=tokens, dtype=torch.bfloat16, arch=arch, invariant=True))
        for tokens in (1, 64, 512, 8192)
    }
    assert tiles == {ONE_TILE}
