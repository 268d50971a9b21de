"""`hopper.kernel_types`: what a variant derives from its tiles and its page size."""

from __future__ import annotations

import pytest

from fa_serve.backends.hopper.forward.tiles import HopperTiles, Schedule
from fa_serve.backends.hopper.forward.types import Variant


def variant(page_size: int = 0, groups: int = 2, o_parts: int = 0, dv: tuple[int, int] = (128, 0)) -> Variant:
    tiles = HopperTiles(groups, 128, 2, 2, Schedule.DYNAMIC, o_parts=o_parts)
    return Variant(tiles, 128, 0, *dv, True, False, True, False, page_size)


@pytest.mark.parametrize(("page_size", "rows"), [(16, 16), (48, 16), (64, 64), (256, 128), (320, 64)])
def test_a_box_lies_in_one_page_and_in_one_block(page_size: int, rows: int) -> None:
    assert variant(page_size).page_rows == rows


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("page_size", [0, 16])
def test_registers_fit_what_the_launch_reserves(page_size: int, groups: int) -> None:
    """setmaxnreg takes multiples of 8, from 24 to 256. The producer's warpgroup has 128 threads, too."""
    found = variant(page_size, groups)
    at_launch, _ = found.tiles.registers
    assert found.registers % 8 == found.producer_registers % 8 == 0
    assert groups * found.registers + found.producer_registers <= (groups + 1) * at_launch


def test_o_leaves_in_parts() -> None:
    assert variant().o_width == 128
    assert variant(o_parts=2).o_width == 64
    assert variant(o_parts=2, dv=(128, 32)).o_width == 64


def test_each_part_of_o_has_a_layout_of_its_width() -> None:
    found = variant(dv=(64, 16))
    assert [layout.instr_shape[1] for layout in (found.output_layout, found.second_output_layout)] == [64, 16]
