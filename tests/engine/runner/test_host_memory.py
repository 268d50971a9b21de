"""The host's memory on a CPU: rows go there and back, whatever runs of slots they lie in."""

from __future__ import annotations

import random

import pytest
import torch

from fa_serve.engine.cache.host_tier import CopyError
from fa_serve.engine.runner import host_memory
from fa_serve.engine.runner.host_memory import HostMemory

CPU = torch.device("cpu")


def test_rows_come_back_as_they_went(monkeypatch) -> None:
    """Slots lie in several pieces of memory, in any order."""
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 200)
    tensors = [torch.randn(30, 4, 2), torch.randint(100, (30, 8), dtype=torch.int8)]
    memory = HostMemory(lambda: tensors, 1000, CPU)
    assert (memory.row_bytes, memory.num_slots, [len(piece) for piece in memory._pieces]) == (40, 25, [5] * 5)
    draw = random.Random(0)
    slots = draw.sample(range(25), 20)
    rows = draw.sample(range(30), 20)
    before = [x[rows].clone() for x in tensors]
    assert memory.to_host(rows, slots).is_done()
    others = draw.sample(range(30), 20)
    for x in tensors:
        x.zero_()
    memory.to_device(slots, others).wait()
    for x, expected in zip(tensors, before, strict=True):
        assert torch.equal(x[others], expected)
        assert not x[[row for row in range(30) if row not in others]].any()
    memory.close()


def test_the_budget_is_not_exceeded() -> None:
    for num_bytes in (39, 40, 79, 4096):
        memory = HostMemory(lambda: [torch.zeros(3, 40, dtype=torch.int8)], num_bytes, CPU)
        assert memory.num_slots == num_bytes // 40
        assert sum(piece.nbytes for piece in memory._pieces) <= num_bytes


@pytest.mark.parametrize(("promised", "slots"), [(0, 15), (200, 10), (4000, 0)], ids=["alone", "beside others", "none is left"])
def test_more_than_the_machine_has(monkeypatch, caplog, promised, slots) -> None:
    """The system would hand it out, and end the process when it is written to. 640 bytes can be taken, in pieces of 200."""
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 200)
    monkeypatch.setattr(host_memory, "reclaimable_memory", lambda: host_memory.SPARE_BYTES + 640)
    memory = HostMemory(lambda: [torch.zeros(3, 40, dtype=torch.int8)], 3 << 30, CPU, "pages", promised)
    assert memory.num_slots == slots
    (warning,) = caplog.messages
    assert warning == (
        f"kv_host_memory could not be allocated in full: the host tier of the KV cache has {slots * 40 / 2**30:.4g} GiB for "
        "pages instead of 3 GiB, because 2 GiB of the machine's memory are available, and 2 GiB of them must stay free"
    )


def test_what_others_were_promised_is_not_available(monkeypatch, caplog) -> None:
    """Or the warning would say that 21.5 GiB are available, and that there are none for the tier."""
    monkeypatch.setattr(host_memory, "reclaimable_memory", lambda: 43 << 29)
    HostMemory(lambda: [torch.zeros(3, 40, dtype=torch.int8)], 3 << 30, CPU, "states", 20 << 30)
    assert caplog.messages[0].endswith(
        "has 0 GiB for states instead of 3 GiB, because 1.5 GiB of the machine's memory are available, and 2 GiB of them must "
        "stay free"
    )


def test_what_the_machine_has_is_taken_without_a_warning(monkeypatch, caplog) -> None:
    monkeypatch.setattr(host_memory, "reclaimable_memory", lambda: host_memory.SPARE_BYTES + 640)
    assert HostMemory(lambda: [torch.zeros(3, 40, dtype=torch.int8)], 640, CPU).num_slots == 16
    assert caplog.messages == []


def test_rows_are_found_where_the_cache_lies_now() -> None:
    tensors = [torch.ones(3, 8)]
    memory = HostMemory(lambda: tensors, 96, CPU)
    memory.to_host([1], [2])
    tensors[0] = torch.zeros(5, 8)
    memory.to_device([2], [4])
    assert tensors[0].sum(1).tolist() == [0, 0, 0, 0, 8]


def test_a_failure_is_told_as_one_of_a_copy(monkeypatch) -> None:
    memory = HostMemory(lambda: [torch.ones(3, 8)], 96, CPU)

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(memory, "_copy_at_once", fail)
    with pytest.raises(CopyError, match="RuntimeError: planted"):
        memory.to_host([1], [2])
