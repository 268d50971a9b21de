"""`hopper.shared_memory`: barriers that wait for arrivals that never come show in the emulator."""

from __future__ import annotations

import pytest
from hopper_cases import Case, run_dense
from hopper_emulator import EmulationError

FAULTS = {
    "V waits for a third warpgroup": ("mbarrier.init(v_empty.index(i), count=GROUPS)", "count=3"),
    "queries that never arrive": ("mbarrier.init(q_full.index(i), count=1)", "count=2"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_sees(fault: str) -> None:
    right, count = FAULTS[fault]
    wrong = right[: right.index("count=")] + count + ")"
    with pytest.raises(EmulationError, match="deadlock"):
        run_dense(Case("", seqlen_q=500, seqlen_k=500), faults={right: wrong})
