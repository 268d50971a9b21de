"""Prometheus metrics: their values, vLLM's names, and a dashboard and alerts that use only metrics that exist."""

import asyncio
import json
import re
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.anyio


async def test_metrics(serving, engine):
    async with serving() as client:
        assert (await client.post("/v1/completions", json={**TEXT, "n": 2})).status_code == 200
        engine.gate.clear()
        leaving = asyncio.create_task(client.post("/v1/completions", json=TEXT))
        while len(engine.seen) < 2:
            await asyncio.sleep(0.001)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        text = (await client.get("/metrics")).text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    label = 'model_name="fake"'
    expected = {
        f"fa_serve:num_requests_running{{{label}}}": 1,
        f"fa_serve:kv_cache_usage_perc{{{label}}}": 0.5,
        f"fa_serve:state_usage_perc{{{label}}}": 0.25,
        f"fa_serve:generation_tokens_total{{{label}}}": 8,
        f"fa_serve:kv_host_bytes{{{label}}}": 100,
        f"fa_serve:kv_host_bytes_used{{{label}}}": 60,
        f"fa_serve:kv_host_hits_total{{{label}}}": 3,
        f"fa_serve:kv_host_misses_total{{{label}}}": 4,
        f"fa_serve:kv_host_bytes_in_total{{{label}}}": 30,
        f"fa_serve:kv_host_wait_seconds_total{{{label}}}": 0.5,
        f"fa_serve:kv_host_folder_bytes{{{label}}}": 900,
        f"fa_serve:kv_host_folder_bytes_used{{{label}}}": 700,
        f"fa_serve:kv_host_folder_hits_total{{{label}}}": 6,
        f"fa_serve:kv_host_folder_bytes_out_total{{{label}}}": 80,
        f"fa_serve:kv_host_folder_bad_files_total{{{label}}}": 1,
        f"fa_serve:late_compilations_total{{{label}}}": 10,
        f"fa_serve:late_captures_total{{{label}}}": 11,
        f"fa_serve:time_to_first_token_seconds_count{{{label}}}": 2,
        f"fa_serve:inter_token_latency_seconds_count{{{label}}}": 4,
        f'fa_serve:engine_step_seconds_bucket{{le="0.002",{label}}}': 0,
        f'fa_serve:engine_step_seconds_bucket{{le="0.004",{label}}}': 1,
        f'fa_serve:engine_step_seconds_bucket{{le="+Inf",{label}}}': 2,
        f"fa_serve:engine_step_seconds_sum{{{label}}}": 99.003,
        f'fa_serve:request_success_total{{finished_reason="stop",{label}}}': 2,
        f'fa_serve:request_success_total{{finished_reason="abort",{label}}}': 1,
    }
    assert {name: float(values.get(name, "nan")) for name in expected} == expected


ROOT = Path(__file__).parents[3]


TEXT = {"model": "fake", "prompt": "a secret"}


def names(text: str) -> set[str]:
    """The names of the series that a page of metrics can have, by the types of its metrics."""
    found = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        found |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    return found


async def test_metrics_have_vllms_names(serving):
    async with serving() as client:
        await client.post("/v1/completions", json=TEXT)
        await client.get("/v1/models/other")
        await client.get("/nowhere")
        text = (await client.get("/metrics")).text
    vllms = {
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "num_preemptions_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "spec_decode_num_drafts_total",
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total",
        "spec_decode_num_accepted_tokens_per_pos_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "request_success_total",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket",
        "request_queue_time_seconds_bucket",
        "request_prefill_time_seconds_bucket",
        "request_decode_time_seconds_bucket",
        "request_prompt_tokens_bucket",
        "request_generation_tokens_bucket",
    }
    assert {f"fa_serve:{name}" for name in vllms} <= names(text)
    assert 'fa_serve:request_queue_time_seconds_sum{model_name="fake"} 0.25' in text
    assert 'fa_serve:request_prefill_time_seconds_sum{model_name="fake"} 0.5' in text
    assert 'fa_serve:request_decode_time_seconds_sum{model_name="fake"} 0.125' in text
    assert 'fa_serve:spec_decode_num_accepted_tokens_total{model_name="fake"} 12.0' in text
    assert 'fa_serve:spec_decode_num_accepted_tokens_per_pos_total{model_name="fake",position="1"} 4.0' in text
    assert 'fa_serve:http_responses_total{path="/v1/completions",status="200"} 1.0' in text
    assert 'fa_serve:http_responses_total{path="/v1/models/{model:path}",status="404"} 1.0' in text
    assert 'fa_serve:http_responses_total{path="other",status="404"} 1.0' in text, "paths are the client's to make up"


async def test_the_dashboard_asks_for_what_there_is(serving):
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "dashboards" / "fa_serve.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    asked = {name for query in queries for name in re.findall(r"fa_serve:\w+", query)}
    async with serving() as client:
        await client.post("/v1/completions", json=TEXT)
        known = names((await client.get("/metrics")).text)
    assert asked - known == set()
    assert {f"fa_serve:{name}" for name in ("kv_cache_usage_perc", "request_queue_time_seconds_bucket")} <= asked
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    rules = (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()
    assert set(re.findall(r"fa_serve:\w+", rules)) - known == set()
    assert "fa_serve:" in rules


async def test_a_blocked_event_loop_is_seen(serving):
    """A look every 50 ms: one that comes late says how long the loop ran something else."""

    def delays(text: str) -> dict[str, float]:
        lines = [line for line in text.splitlines() if line.startswith("fa_serve:event_loop_delay_seconds")]
        return {
            line.split("{")[0].rpartition("_")[2] + line.split('le="')[-1].split('"')[0]: float(line.split()[-1])
            for line in lines
        }

    async with serving() as client:
        await asyncio.sleep(0.12)
        before = (await client.get("/metrics")).text
        time.sleep(0.6)
        await asyncio.sleep(0.12)
        after = (await client.get("/metrics")).text
        loop_delay = client.service._loop_delay
    total = [sum(value for name, value in delays(text).items() if name.startswith("sum")) for text in (before, after)]
    assert 0.55 <= total[1] - total[0] < 5
    assert loop_delay._timer.cancelled(), "nothing goes on when the service has ended"
