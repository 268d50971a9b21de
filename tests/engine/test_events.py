"""Start-up phases are events: from an engine, and from a thread."""

from __future__ import annotations

import asyncio
import logging
import pickle
from types import SimpleNamespace

from tiny_models import make_model

from fa_serve.engine import AsyncEngine, Engine, EngineConfig, Phase
from fa_serve.engine.events import PROGRESS_SECONDS, PhaseClock, log_phase


def names(phases: list[Phase]) -> list[str]:
    return [phase.name for phase in phases]


def test_an_engine_reports_its_phases_in_order(model_folder) -> None:
    phases: list[Phase] = []
    engine = Engine(EngineConfig(model=model_folder, device="cpu", num_pages=32, eager=True), on_phase=phases.append)
    assert names(phases) == ["weights", "kv cache"]
    assert phases[0].detail == f"{model_folder.name} on cpu"
    assert phases[1].detail == "32 pages of 16 tokens, max_model_len 256"
    assert all(phase.seconds > 0 for phase in phases)
    assert pickle.loads(pickle.dumps(phases)) == phases
    summary = pickle.loads(pickle.dumps(engine.summary))
    assert summary.attention == {"prompts": ("sdpa",), "decoding": ("sdpa",)}
    assert (summary.graphs, summary.fuses, summary.cache_bytes) == (False, False, 32 * engine._runner.bytes_per_page)
    assert "LlamaForCausalLM" in summary.images


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


def test_a_long_phase_is_reported_while_it_goes_on(caplog, monkeypatch) -> None:
    """Not at once, not more often than PROGRESS_SECONDS, and never as if it had ended."""
    now = [0.0]
    monkeypatch.setattr("fa_serve.engine.events.time", SimpleNamespace(perf_counter=lambda: now[0]))
    phases: list[Phase] = []
    clock = PhaseClock(phases.append)
    for seconds, done in ((0.1, 1), (PROGRESS_SECONDS, 2), (PROGRESS_SECONDS + 0.1, 3), (9.0, 4)):
        now[0] = seconds
        clock.progress("weights", done, 4, "tensors")
    clock.end("weights", "loaded")
    clock.progress("kernels", 1, 2, "steps")
    assert phases == [Phase("weights", "2 of 4 tensors", PROGRESS_SECONDS, 0.5), Phase("weights", "loaded", 9.0)]
    with caplog.at_level(logging.INFO, "fa_serve.engine"):
        log_phase(phases[0])
    assert caplog.text == "", "only the ends are logged"
