"""On a GPU: the checks of `fa-serve doctor` that need one, and what an engine says that it has decided."""

import pytest
import torch

from fa_serve.engine import Engine, EngineConfig, Phase

doctor = pytest.importorskip("fa_serve.doctor", reason="the server extra is not installed", exc_type=ImportError)


def test_the_kernels_of_this_gpu_are_within_the_bound():
    assert max(doctor.kernel_errors("cuda")) <= 1.0
    found = doctor.check_kernels()
    assert found.state == "ok", found
    assert "sdpa" not in found.found


def test_driver_card_and_compiler_are_found():
    for check in (doctor.check_driver, doctor.check_gpu, doctor.check_triton):
        found = check()
        assert found.state != "failed", found
    assert torch.cuda.get_device_name(0) in doctor.check_gpu().found


def test_an_engine_says_what_it_has_decided():
    phases: list[Phase] = []
    engine = Engine(EngineConfig(device="cuda", num_pages=256), on_phase=phases.append, ahead=True)
    summary = engine.summary
    ended = [phase.name for phase in phases if phase.done == 1.0]
    engine.close()
    assert summary.device == torch.cuda.get_device_name(0)
    assert summary.graphs
    assert summary.fuses
    assert {*summary.attention["prompts"], *summary.attention["decoding"]} <= {"triton", "hopper"}
    assert ended[-2:] == ["kernels", "captures"]
