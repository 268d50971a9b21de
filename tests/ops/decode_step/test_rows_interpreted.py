"""The share of one program of a product, without any other program."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve import ops
from fa_serve.ops.decode_step.layout import StepLayout, StepShape, StepTile, layout_of, row_share
from fa_serve.ops.decode_step.rows import multiply_share, share_of, weight_tile

PROGRAMS = 5
SHAPE = StepShape(40, 56, 4, 2, 16, 16, False, True, 4)
TILE = StepTile(tile_bytes=512, block_k=32, num_warps=2)


def layout(tokens: int) -> StepLayout:
    return layout_of(SHAPE, programs=PROGRAMS, arch=90, tokens=tokens, max_seqlen_q=1, page_size=16, kind=0, tile=TILE)


@triton.jit
def _shares(out_ptr, ROWS: tl.constexpr, PROGRAMS: tl.constexpr):
    for program in range(PROGRAMS):
        begin, end = share_of(program, ROWS, PROGRAMS)
        tl.store(out_ptr + 2 * program, begin)
        tl.store(out_ptr + 2 * program + 1, end)


@triton.jit
def _tiles(w_ptr, out_ptr, begin, end, count, product: tl.constexpr):
    ROWS: tl.constexpr = product.block_rows
    COLUMNS: tl.constexpr = product.block_k
    places = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    for index in range(0, count):
        tl.store(out_ptr + index * ROWS * COLUMNS + places, weight_tile(w_ptr, index, begin, end, product))


@triton.jit
def _share(
    x_ptr, w_ptr, norm_ptr, bias_ptr, out_ptr, program, total, eps, offset, alpha, product: tl.constexpr, var: tl.constexpr
):
    begin, end = share_of(program, product.rows, var.programs)
    w = weight_tile(w_ptr, 0, begin, end, product)
    multiply_share(x_ptr, w_ptr, norm_ptr, bias_ptr, out_ptr, w, program, total, eps, offset, alpha, product, var)


def test_shares_are_those_of_the_layout() -> None:
    for rows in (1, 7, 40):
        out = torch.zeros(PROGRAMS, 2, dtype=torch.int32)
        _shares[(1,)](out, rows, PROGRAMS)
        assert [tuple(pair) for pair in out.tolist()] == [row_share(program, rows, PROGRAMS) for program in range(PROGRAMS)]


def test_a_tile_has_gates_and_what_they_multiply_and_zeros_behind_the_share() -> None:
    product = layout(1).gate_up
    w = torch.randn(2 * 56, 40)
    outputs = product.outputs_of_tile
    begin = 3
    end = begin + outputs + 1  # the second tile of rows has one output
    count = 3 * product.blocks_of_row
    out = torch.full((count, product.block_rows, product.block_k), 7.0)
    _tiles[(1,)](w, out, begin, end, count, product)
    padded = torch.nn.functional.pad(w, (0, 64 - 40))
    for index in range(count):
        first = begin + index // product.blocks_of_row * outputs
        columns = slice(index % product.blocks_of_row * 32, index % product.blocks_of_row * 32 + 32)
        expected = torch.zeros(2, outputs, 32)
        for place in range(max(0, min(outputs, end - first))):
            expected[0, place] = padded[first + place, columns]
            expected[1, place] = padded[56 + first + place, columns]
        assert torch.equal(out[index], expected.flatten(0, 1)), index


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("name", ["qkv", "o", "gate_up", "down"])
def test_all_shares_are_the_product(name: str, tokens: int) -> None:
    """And no row of another share is written."""
    var = layout(tokens)
    product = getattr(var, name)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x = draw(tokens, product.columns)
    w = draw(product.rows * (2 if product.gated else 1), product.columns)
    norm = draw(product.columns)
    bias = draw(product.rows)
    before = draw(tokens, product.rows)
    h = x.double()
    if product.normed:
        h = h * (h.square().mean(1, keepdim=True) + 1e-3).rsqrt() * (norm.double() + 1)
    y = h @ w.double().T
    if product.gated:
        y = ops.act_and_mul(y, "silu")
    if product.biased:
        y = y + bias.double()
    y = before.double() + 0.5 * y if product.added else y
    out = before.clone()
    for program in (4, 0, 2, 1, 3):
        begin, end = row_share(program, product.rows, PROGRAMS)
        others = out.clone()
        _share[(1,)](x, w, norm, bias, out, program, tokens, 1e-3, 1.0, 0.5, product, var)
        others[:, begin:end] = out[:, begin:end]
        assert torch.equal(out, others)
    torch.testing.assert_close(out.double(), y, rtol=1e-5, atol=1e-5)
