"""One rank has nobody to tell anything, and the devices that several need are counted before a process starts."""

from __future__ import annotations

import pytest
import torch

from fa_serve.engine import EngineConfig, EngineDeadError
from fa_serve.engine.parallel.ranks import Alone, Ranks, check_devices
from fa_serve.spec import ParameterError


def test_one_rank_decides_by_itself() -> None:
    ranks: Ranks = Alone(torch.device("cpu"))
    assert (ranks.rank, ranks.size, ranks.local_rank, ranks.all_reduce) == (0, 1, 0, None)
    ranks.tell("step")
    ranks.tell("step")  # there is nobody to be out of step with
    ranks.end_step()
    assert ranks.broadcast("clock", lambda: 3.5) == 3.5
    assert ranks.gather(7) == [7]
    ranks.add_to_digest(iter([1, 2]))
    ranks.escalate(ValueError("of a step"))
    ranks.check_lost()
    with pytest.raises(ValueError, match="no such model"), ranks.starting():
        raise ValueError("no such model")
    ranks.tell("abort", "request-1")


def test_calls_of_a_closed_engine_fail() -> None:
    ranks = Alone(torch.device("cpu"))
    ranks.close()
    for call in ("submit", "step", "abort"):
        with pytest.raises(EngineDeadError, match="the engine was closed"):
            ranks.tell(call)


def test_each_rank_of_a_machine_needs_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_devices(EngineConfig(device="cpu", tensor_parallel=8), 8)
    check_devices(EngineConfig(device="cuda", tensor_parallel=2), 2)
    with pytest.raises(ParameterError, match="tensor_parallel must be at most 2, the number of GPUs, got 4"):
        check_devices(EngineConfig(device="cuda", tensor_parallel=4), 4)
    with pytest.raises(ParameterError, match="must leave a GPU for each rank on this machine, which has only 2, got 8"):
        check_devices(EngineConfig(device="cuda", tensor_parallel=8), 4)
