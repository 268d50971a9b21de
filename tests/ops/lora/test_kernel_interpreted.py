"""The kernels of adapters in Triton's interpreter, against float64 token by token."""

from __future__ import annotations

import pytest
import torch
from lora_cases import LoraCase, exact_result, make_case
from rounded_once import dtype_id

from fa_serve.ops.lora.kernel import choose_lora_tile, expanding_lanes, launch_add_lora

CASES = [
    pytest.param(LoraCase((0, 1, -1, 2, 1, 0, 0)), id="mixed"),
    pytest.param(LoraCase((2,), k=1024), id="one token, several splits"),
    pytest.param(LoraCase((1, 0), norm=True, k=1100), id="norm"),
    pytest.param(LoraCase((-1, 0, 2), bias=True), id="bias"),
    pytest.param(LoraCase((-1, 0, 2, 2), dora=True), id="dora"),
    pytest.param(LoraCase((0, 1), dora=True, bias=True, norm=True), id="everything"),
    pytest.param(LoraCase((1,) * 35 + (0,) * 3, widths=(140,)), id="several tiles"),
    pytest.param(LoraCase(tuple(range(35)), ranks=(4,) * 35, widths=(24, 40)), id="more tiles than programs"),
    pytest.param(LoraCase((1,) * 70 + (0, -1), widths=(24, 24), block_rows=64), id="prompts"),
    pytest.param(
        LoraCase((0,) * 130 + tuple(range(1, 50)), ranks=(4,) * 50, widths=(24,), k=2100, block_rows=64),
        id="prompts, several splits, more tiles than programs",
    ),
    pytest.param(LoraCase((1, 0, -1, 2), widths=(140, 9, 3, 5), norm=True, dora=True, bias=True), id="four parts"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=dtype_id)  # its products take no bfloat16
@pytest.mark.parametrize("case", CASES)
def test_adapters_are_added_to_their_tokens(case: LoraCase, dtype: torch.dtype) -> None:
    y, x, weights, batch, norm, bias = make_case(case, dtype)
    exact = exact_result(case, y, x, weights, batch, norm, bias)
    before = y.clone()
    assert launch_add_lora(y, x, weights, batch, norm, bias) is y
    untouched = [slot < 0 for slot in case.slots]
    assert torch.equal(y[untouched], before[untouched])
    # tensor cores take x A^T, and a normalised x, rounded to the dtype of the weights
    eps = torch.finfo(dtype).eps
    bound = eps * exact.abs() + (4e-6 if dtype == torch.float32 else 2 * eps) * exact.abs().max()
    assert bool(((y.double() - exact).abs() <= bound).all())


def test_splits_fill_a_gpu_and_leave_long_enough_parts() -> None:
    assert choose_lora_tile(4096, 1, 16, num_tiles=1, parts=3, num_sms=132).splits == 8
    assert choose_lora_tile(4096, 64, 16, num_tiles=68, parts=1, num_sms=132)[::2] == (32, 8), "most tiles are empty"
    assert choose_lora_tile(900, 1, 16, num_tiles=1, parts=1, num_sms=132).splits == 1
    # a prompt of 512 tokens with one adapter has 8 tiles, and the graph room for 65 more
    assert choose_lora_tile(4096, 512, 64, num_tiles=73, parts=1, num_sms=132)[::2] == (40, 4)
    assert choose_lora_tile(14336, 512, 64, num_tiles=73, parts=1, num_sms=132).splits == 8
    assert choose_lora_tile(4096, 6400, 64, num_tiles=165, parts=1, num_sms=132)[::2] == (132, 2)
    assert choose_lora_tile(4096, 8448, 64, num_tiles=197, parts=1, num_sms=132).splits == 1


def test_empty_tiles_take_few_programs() -> None:
    """Of the gate of an 8B model: 384 blocks of columns for each tile of a prompt, and 224 for one of few rows."""
    few = choose_lora_tile(4096, 64, 16, num_tiles=69, parts=2, num_sms=132)
    assert expanding_lanes(few, 64, 16, blocks=224) == 9
    assert expanding_lanes(few, 64, 16, blocks=32) == 32
    prompt = choose_lora_tile(4096, 512, 64, num_tiles=73, parts=2, num_sms=132)
    assert expanding_lanes(prompt, 512, 64, blocks=384) == 16
    assert expanding_lanes(prompt, 512, 64, blocks=64) == 32
    long = choose_lora_tile(4096, 8192, 64, num_tiles=193, parts=2, num_sms=132)
    assert expanding_lanes(long, 8192, 64, blocks=384) == 136
