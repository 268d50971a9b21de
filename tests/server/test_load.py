"""A server process under load: many streams, bursts over a small queue, clients that disconnect, SIGTERM.

The default is a small load. `make test-load` runs the full load and prints what it measured.
"""

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter

import httpx
import pytest
from server_process import one_layer

from fa_serve.client.bench import Load, run

FULL = os.environ.get("FA_SERVE_LOAD") == "full"


def eventually(condition, seconds: float = 10.0) -> float:
    """Wait until the condition holds. Returns the seconds that it took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, "it never came true"
        time.sleep(0.02)
    return time.monotonic() - begin


def tell(what: str, **figures) -> None:
    print(f"\n{what}: {json.dumps(figures)}")


@pytest.mark.slow
def test_many_streams(served):
    streams, tokens = (500, 64) if FULL else (200, 8)
    load = Load(url=served.url, requests=streams, concurrency=streams, prompt_tokens=8, output_tokens=tokens)
    report = asyncio.run(run(load))
    assert (report["failed"], report["errors"]) == (0, [])
    assert report["output_tokens_per_s"] * report["seconds"] > 0.99 * streams * tokens
    assert 0 < report["itl_ms"]["p50"] <= report["itl_ms"]["p99"] < 60_000
    assert served.metric("kv_cache_usage_perc") == 0
    tell(
        f"{streams} streams at once", **{name: report[name] for name in ("seconds", "output_tokens_per_s", "ttft_ms", "itl_ms")}
    )


@pytest.mark.slow
def test_a_small_queue(start_server, tmp_path):
    """A small queue with bursts, clients that disconnect, and SIGTERM under load, with API keys and a settings file."""
    running = 32 if FULL else 8
    names = f'served_model_name = "org/name"\nmax_num_seqs = {running}\nmax_waiting = {2 * running}\n'
    (tmp_path / "fa-serve.toml").write_text(names)
    settings = ("--config", str(tmp_path / "fa-serve.toml"), "--log-level", "warning", "--public-metrics")
    served = start_server(one_layer(), *settings, FA_SERVE_API_KEYS="key-1,key-2")
    crowd = 90 if FULL else 10  # more than run at once
    try:
        assert httpx.get(f"{served.url}/v1/models").status_code == 401
        asyncio.run(bursts(served, 10 if FULL else 2, 200 if FULL else 24))
        asyncio.run(with_client(served, some_disconnect, crowd))
        asyncio.run(with_client(served, drain, crowd))
        assert served.process.wait(30) == 0
    finally:
        served.end()


async def bursts(served, number, size):
    """`number` bursts, half a second apart, whether or not the burst before has been answered."""
    load = Load(
        url=served.url,
        model="org/name",
        key="key-1",
        requests=size,
        concurrency=size,
        warmup=0,
        prompt_tokens=8,
        output_tokens=32,
    )

    async def burst(index):
        await asyncio.sleep(0.5 * index)
        return await run(load)

    begin = time.monotonic()
    reports = await asyncio.wait_for(asyncio.gather(*map(burst, range(number))), 240)
    failed = sum(report["failed"] for report in reports)
    assert 0 < failed < number * size, "some requests must find room and some must not"
    assert all(error.startswith("status 429") for report in reports for error in report["errors"])
    eventually(lambda: served.metric("num_requests_running") == 0)
    assert served.metric("kv_cache_usage_perc") == 0
    answered = number * size - failed
    assert served.metric("request_success_total", 'finished_reason="length"') == answered
    tell(f"{number * size} requests in bursts of {size}", answered=answered, refused=failed, seconds=time.monotonic() - begin)


async def with_client(served, what, crowd):
    headers = {"authorization": "Bearer key-2"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=served.url, headers=headers, timeout=120, limits=limits) as client:
        await what(served, client, crowd)


def ask(client, tokens):
    body = {"model": "org/name", "prompt": "x", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    return client.stream("POST", "/v1/completions", json=body)


async def some_disconnect(served, client, crowd):
    """Three of ten clients disconnect in the middle of their streams."""
    draw = random.Random(0)
    gone = crowd * 3 // 10

    async def one(number):
        lines = []
        leaves_after = draw.randrange(1, 60) if number < gone else None
        async with ask(client, 300 if number < gone else 80) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                lines += [line] if line else []
                if len(lines) == leaves_after:
                    break
        return lines[-1] == "data: [DONE]"

    aborted = served.aborted()
    ended = Counter(await asyncio.gather(*map(one, range(crowd))))
    assert ended == {True: crowd - gone, False: gone}
    seconds = eventually(lambda: served.metric("num_requests_running") + served.metric("num_requests_waiting") == 0)
    assert served.metric("kv_cache_usage_perc") == 0
    assert served.aborted() - aborted == gone
    tell(f"{gone} of {crowd} clients disconnect", seconds_until_idle=seconds)


async def drain(served, client, crowd):
    """SIGTERM while all streams run or wait: all of them complete, and new requests are refused."""

    def arrived():
        # the three are read in the reverse order of a request's life, so that no request is counted twice
        return sum(map(served.metric, ("e2e_request_latency_seconds_count", "num_requests_running", "num_requests_waiting")))

    async def one():
        async with ask(client, 300) as response:
            return [line async for line in response.aiter_lines() if line]

    before = arrived()
    streams = [asyncio.create_task(one()) for _ in range(crowd)]
    while arrived() < before + crowd:
        await asyncio.sleep(0.01)
    served.process.send_signal(signal.SIGTERM)
    begin = time.monotonic()
    while (await client.get("/ready")).status_code != 503:
        await asyncio.sleep(0.01)
    assert (await client.get("/health")).status_code == 200
    refused = await client.post("/v1/completions", json={"model": "org/name", "prompt": "x"})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    lines = await asyncio.gather(*streams)
    assert [stream[-1] for stream in lines] == ["data: [DONE]"] * crowd
    assert all(json.loads(stream[-2][6:])["choices"][0]["finish_reason"] == "length" for stream in lines)
    tell(f"SIGTERM with {crowd} in flight", lost=0, seconds=time.monotonic() - begin)
