"""The bounds of requests to encoders, their metrics, and what happens to them when they are cut off."""

import asyncio

import numpy as np
import pytest
from encoder_folders import TEXTS
from fa_serve.server import tokenization
from fa_serve.server.bounds.costs import Costs
from fa_serve.server.bounds.deadline_thread import DeadlineThread

from fa_serve.engine.pooling.inputs import InputReader

pytestmark = pytest.mark.anyio
MODEL = {"model": "tiny"}


async def post(client, path: str, body: dict, status: int = 200):
    reply = await client.post(path, json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


async def test_bounds_of_a_request(encoding, encoder_of) -> None:
    """One input of 10 MB, 100,000 inputs and a million documents are refused before an encoder sees them."""
    steps = encoder_of("embed").stats().num_steps
    async with encoding("embed", max_inputs=100) as client:
        huge = await post(client, "/v1/embeddings", MODEL | {"input": "a" * (10 << 20)}, 400)
        assert huge["error"]["code"] == "context_length_exceeded"
        many = await post(client, "/v1/embeddings", MODEL | {"input": ["a"] * 100_000}, 413)
        assert many["error"]["code"] == "too_many_values"
        more = await post(client, "/v1/embeddings", MODEL | {"input": ["a"] * 101}, 400)
        assert "--max-inputs" in more["error"]["message"]
        documents = await post(client, "/v1/rerank", {"query": "a", "documents": ["b"] * 1_000_000}, 413)
        assert documents["error"]["code"] == "too_many_values"
        few = await post(client, "/v1/rerank", {"query": "a", "documents": ["b"] * 101}, 400)
        assert "documents must hold at most 100 inputs" in few["error"]["message"]
        ids = await post(client, "/v1/embeddings", MODEL | {"input": [5] * 10_000}, 400)
        assert ids["error"]["code"] == "context_length_exceeded"
        large = await post(client, "/v1/embeddings", MODEL | {"input": ["a" * (5 << 20)] * 4}, 413)
        assert large["error"]["code"] == "request_too_large"
        assert encoder_of("embed").stats().num_steps == steps
        await post(client, "/v1/embeddings", MODEL | {"input": ["a"] * 100})


async def test_a_large_answer_is_refused_by_its_estimate(encoding) -> None:
    async with encoding("embed", max_answer_bytes=2000) as client:
        error = await post(client, "/v1/embeddings", MODEL | {"input": ["a"] * 10}, 400)
        assert error["error"]["code"] == "answer_too_large"
        await post(client, "/v1/embeddings", MODEL | {"input": ["a"] * 4})


async def test_requests_at_once_share_batches_and_keep_their_answers(encoding, encoder_of) -> None:
    encoder = encoder_of("embed")
    wanted = encoder.encode(TEXTS)
    before = encoder.stats().num_steps
    async with encoding("embed") as client:
        bodies = [MODEL | {"input": [TEXTS[i % len(TEXTS)], TEXTS[(i + 3) % len(TEXTS)]]} for i in range(20)]
        replies = await asyncio.gather(*(post(client, "/v1/embeddings", body) for body in bodies))
        text = (await client.get("/metrics")).text
    for i, reply in enumerate(replies):
        found = [each["embedding"] for each in reply["data"]]
        np.testing.assert_allclose(found, wanted[[i % len(TEXTS), (i + 3) % len(TEXTS)]], atol=1e-5)
    assert encoder.stats().num_steps - before < 40
    assert 'fa_serve:request_success_total{finished_reason="stop",model_name="tiny"} 20.0' in text
    assert "kv_cache_usage_perc" not in text


async def test_metrics_count_requests_by_the_way_they_end(encoding, encoder_of, monkeypatch) -> None:
    """A refused request is not counted, and only a client that leaves is one that aborts."""

    def counts(text: str) -> dict[str, float]:
        names = ("stop", "abort", "error")
        line = 'fa_serve:request_success_total{finished_reason="%s",model_name="tiny"} '
        return {name: float(text.split(line % name)[1].split()[0]) for name in names if line % name in text}

    async with encoding("embed", request_timeout=5) as client:
        await post(client, "/v1/embeddings", MODEL | {"input": "a", "dimensions": 1 << 20}, 400)
        assert counts((await client.get("/metrics")).text) == {}
        monkeypatch.setattr(type(encoder_of("embed")._pipeline), "compute", lambda *_: 1 / 0)
        await post(client, "/v1/embeddings", MODEL | {"input": "a"}, 500)
        assert counts((await client.get("/metrics")).text) == {"error": 1}
        monkeypatch.undo()
        await post(client, "/v1/embeddings", MODEL | {"input": "a"})
        assert counts((await client.get("/metrics")).text) == {"error": 1, "stop": 1}
    async with encoding("embed", request_timeout=0.05) as client:
        monkeypatch.setattr(type(encoder_of("embed")), "step", lambda self: [])
        await post(client, "/v1/embeddings", MODEL | {"input": "a"}, 504)
        assert counts((await client.get("/metrics")).text) == {"abort": 1}


async def test_a_request_that_is_cancelled_leaves_the_queue(encoding, encoder_of, monkeypatch) -> None:
    encoder = encoder_of("embed")
    async with encoding("embed", request_timeout=0.05) as client:
        step = type(encoder).step
        monkeypatch.setattr(type(encoder), "step", lambda self: [])
        error = await post(client, "/v1/embeddings", MODEL | {"input": list(TEXTS)}, 504)
        assert error["error"]["code"] == "request_timeout"
        monkeypatch.setattr(type(encoder), "step", step)
        for _ in range(100):
            if not encoder.has_unfinished():
                break
            await asyncio.sleep(0.01)
        assert not encoder.has_unfinished()
        encoder.check_integrity()
        assert client.service.in_flight == 0


async def test_draining_refuses_new_requests_and_finishes_old_ones(encoding, encoder_of, monkeypatch) -> None:
    encoder = encoder_of("embed")
    step = type(encoder).step
    held = asyncio.Event()
    monkeypatch.setattr(type(encoder), "step", lambda self: step(self) if held.is_set() else [])
    async with encoding("embed") as client:
        running = asyncio.create_task(post(client, "/v1/embeddings", MODEL | {"input": list(TEXTS)}))
        while not client.service.in_flight:
            await asyncio.sleep(0.01)
        drain = asyncio.create_task(client.service.drain())
        await asyncio.sleep(0.05)
        assert (await client.get("/ready")).status_code == 503
        await post(client, "/v1/embeddings", MODEL | {"input": "a"}, 503)
        assert not drain.done()
        held.set()
        assert len((await running)["data"]) == len(TEXTS)
        await asyncio.wait_for(drain, 5)


async def test_a_failed_step_is_a_500_without_internals(encoding, encoder_of, monkeypatch) -> None:
    pipeline = type(encoder_of("embed")._pipeline)
    async with encoding("embed") as client:
        monkeypatch.setattr(pipeline, "compute", lambda *_: 1 / 0)
        error = await post(client, "/v1/embeddings", MODEL | {"input": "a"}, 500)
        assert "division" not in error["error"]["message"]
        monkeypatch.undo()
        await post(client, "/v1/embeddings", MODEL | {"input": "a"})


@pytest.mark.parametrize(("limit", "threads"), [(1 << 12, 0), (1, 1)])
async def test_short_inputs_need_no_thread_and_are_billed(encoding, monkeypatch, limit: int, threads: int) -> None:
    """Each hand-over to a thread waits for the interpreter of a busy event loop."""
    monkeypatch.setattr(tokenization, "SHORT_INPUTS", limit)
    async with encoding("embed") as client:
        used = []
        run = DeadlineThread.run
        monkeypatch.setattr(DeadlineThread, "run", lambda *given, **named: used.append(given) or run(*given, **named))
        billed = []
        charge = client.service.costs._charge
        monkeypatch.setattr(
            client.service.costs, "_charge", lambda bill, seconds: billed.append(seconds) or charge(bill, seconds)
        )
        await post(client, "/v1/embeddings", MODEL | {"input": list(TEXTS)})
    assert len(used) == threads
    assert len(billed) == 3 - threads  # the body, the inputs, the sequence


async def test_on_a_busy_event_loop_a_thread_tokenizes_several_requests(encoding, encoder_of, monkeypatch) -> None:
    """A text that is refused among them has its own error and leaves the others as they are."""
    wanted = encoder_of("embed").encode(TEXTS)
    calls = []
    read_each = InputReader.read_each
    monkeypatch.setattr(Costs, "is_busy", True)
    monkeypatch.setattr(
        InputReader, "read_each", lambda self, given, **more: calls.append(len(given)) or read_each(self, given, **more)
    )
    async with encoding("embed") as client:
        good = [post(client, "/v1/embeddings", MODEL | {"input": text}) for text in TEXTS]
        bad = post(client, "/v1/embeddings", MODEL | {"input": ["a", "a " * 1000]}, 400)
        *replies, error = await asyncio.gather(*good, bad)
    np.testing.assert_allclose([reply["data"][0]["embedding"] for reply in replies], wanted, atol=1e-5)
    assert (error["error"]["code"], error["error"]["param"]) == ("context_length_exceeded", "input[1]")
    assert sum(calls) == len(TEXTS) + 1
    assert len(calls) < len(TEXTS)


async def test_the_limit_of_inputs_is_one_of_documents_and_of_pairs(encoding) -> None:
    """An embedder encodes the query too, and both texts of a pair."""
    texts = ["a", "b", "c"]
    async with encoding("embed", max_inputs=3) as client:
        await post(client, "/v1/rerank", {"query": "q", "documents": texts}, 200)
        await post(client, "/score", {"text_1": ["d", "e", "f"], "text_2": texts}, 200)
        many = await post(client, "/score", {"text_1": "d", "text_2": [*texts, "g"]}, 400)
    assert "at most 3 inputs (--max-inputs), got 4" in many["error"]["message"]
