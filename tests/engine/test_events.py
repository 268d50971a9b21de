"""Start-up phases are events: from an engine, and from a thread."""

from __future__ import annotations

import asyncio
import logging
import pickle

from tiny_models import make_model

from fa_serve.engine import AsyncEngine, Engine, EngineConfig, Phase
from fa_serve.engine.events import PhaseClock


def names(phases: list[Phase]) -> list[str]:
    return [phase.name for phase in phases]


def test_an_engine_reports_its_phases_in_order(model_folder) -> None:
    phases: list[Phase] = []
    Engine(EngineConfig(model=model_folder, device="cpu", num_pages=32, eager=True), on_phase=phases.append)
    assert names(phases) == ["weights", "kv cache"]
    assert phases[0].detail == f"{model_folder.name} on cpu"
    assert phases[1].detail == "32 pages of 16 tokens, max_model_len 256"
    assert all(phase.seconds > 0 for phase in phases)
    assert pickle.loads(pickle.dumps(phases)) == phases


def test_a_given_model_needs_no_weights_and_may_be_fused() -> None:
    phases: list[Phase] = []
    Engine(EngineConfig(device="cpu", num_pages=32), model=make_model(), on_phase=phases.append)
    assert names(phases) == ["fusion", "kv cache"]
    assert phases[0].detail == "2 of 2 layers are fused"


def test_an_async_engine_passes_phases_on_and_does_not_log_them(model_folder, caplog) -> None:
    """From a thread. Those of a process are in test_parent.py."""
    phases: list[Phase] = []

    async def main() -> None:
        config = EngineConfig(model=model_folder, device="cpu", num_pages=32)
        engine = AsyncEngine(config, on_phase=phases.append)
        await engine.start()
        await engine.shutdown()

    with caplog.at_level(logging.INFO, "fa_serve.engine"):
        asyncio.run(main())
    assert names(phases) == ["engine", "weights", "fusion", "kv cache"]
    assert "kv cache" not in caplog.text


def test_without_a_callback_phases_are_logged(caplog) -> None:
    with caplog.at_level(logging.INFO, "fa_serve.engine"):
        PhaseClock(None).end("weights", "tiny on cpu")
    assert "weights: tiny on cpu" in caplog.text
