"""Machine code in which a register is written while a product may still read it, and code in which it is not."""

from __future__ import annotations

import pytest
from registers_in_flight import written_in_flight

LOOP = """
    MOV R8, R4
.L_x_1:
    HGMMA.64x8x16.F32.BF16 R24, R8, gdesc[UR8], R24, gsb0
    LDSM.16.M88.4 {loaded}, [R40]
    WARPGROUP.DEPBAR.LE gsb0, {pending}
    IMAD.MOV.U32 R10, RZ, RZ, {first}
    @P0 BRA `(.L_x_1)
    EXIT
"""
TWO_GROUPS = """
    HGMMA.64x8x16.F32.BF16 R24, R8, gdesc[UR8], R24, gsb0
    HGMMA.64x8x16.F32.BF16 R56, R12, gdesc[UR8], R56, gsb0
    WARPGROUP.DEPBAR.LE gsb0, 0x1
    MOV {written}, R4
    EXIT
"""
APART = """
    HGMMA.64x8x16.F32.BF16 R24, R8, gdesc[UR8], R24, gsb0
    BSSY B0, `(.L_x_2)
    @P0 BRA `(.L_x_1)
    WARPGROUP.DEPBAR.LE gsb0, 0x0
    BSYNC B0
.L_x_1:
    {apart}
    WARPGROUP.DEPBAR.LE gsb0, 0x0
    BSYNC B0
.L_x_2:
    MOV R8, R4
    EXIT
"""


def code(text: str, **values: str) -> str:
    """As the disassembler writes it."""
    lines = text.format(**values).strip("\n").splitlines()
    return "\n".join(line if ":" in line else f"        /*{i:04x}*/       {line.strip()} ;" for i, line in enumerate(lines))


def test_code_that_waits_for_all_products_is_right() -> None:
    assert written_in_flight(code(LOOP, loaded="R12", first="R12", pending="0x0")) == []
    assert written_in_flight(code(TWO_GROUPS, written="R8")) == []
    assert written_in_flight(code(APART, apart="NOP")) == []


@pytest.mark.parametrize(
    ("text", "values", "found"),
    [
        (LOOP, {"loaded": "R12", "first": "R12", "pending": "0x1"}, "IMAD.MOV.U32 R10, RZ, RZ, R12"),
        (LOOP, {"loaded": "R6", "first": "R12", "pending": "0x0"}, "LDSM.16.M88.4 R6, [R40]"),
        (TWO_GROUPS, {"written": "R15"}, "MOV R15, R4"),
        (APART, {"apart": "MOV R11, R4"}, "MOV R11, R4"),
    ],
    ids=["a group runs on", "four registers", "the second group", "a branch"],
)
def test_writes_to_registers_that_are_read_are_found(text: str, values: dict[str, str], found: str) -> None:
    assert written_in_flight(code(text, **values)) == [found]
