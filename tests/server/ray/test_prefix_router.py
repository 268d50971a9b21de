"""The order in which replicas are tried for a request."""

import asyncio
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("ray", reason="the ray extra is not installed")
from fa_serve.server.ray.engine_replica import Front, Listen
from fa_serve.server.ray.prefix_router import PrefixRouter, in_order

from fa_serve.engine import SamplingParams
from fa_serve.engine.pooling.inputs import EncoderInput, EncoderInputs
from fa_serve.engine.process.engine_loop import Add, Encode


def test_holders_come_first_unless_they_are_busier_than_the_others():
    assert in_order({"a": 5, "b": 3, "c": 0}, {"a"}, {"a": 0, "b": 0, "c": 0}) == ["a", "c", "b"]
    assert in_order({"a": 30, "b": 3, "c": 0}, {"a"}, {"a": 0, "b": 0, "c": 0}) == ["c", "b", "a"]
    assert in_order({"a": 104, "b": 100}, {"a"}, {"a": 0, "b": 0}) == ["a", "b"], "a quarter more than the mean is allowed"
    assert in_order({"a": 1, "b": 1}, {"a", "b"}, {"a": 2, "b": 1}) == ["b", "a"], "the one that was chosen before"


def _router() -> PrefixRouter:
    router = PrefixRouter.__new__(PrefixRouter)  # Ray's constructor wants a cluster
    router.initialize_state()
    return router


FRONT = Front("front")


def _request(name: str, prompt: list[int], n: int = 1) -> SimpleNamespace:
    add = Add(name, prompt, SamplingParams(n=n))
    return SimpleNamespace(
        args=[FRONT, add], metadata=SimpleNamespace(internal_request_id=name), routing_context=SimpleNamespace()
    )


def test_what_is_in_flight_is_counted_and_prompts_are_remembered():
    router = _router()
    replicas = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in "ab"]
    a, b = (replica.replica_id for replica in replicas)

    def order(request: SimpleNamespace) -> str:
        ranks = asyncio.run(router.choose_replicas(replicas, request))
        assert request.routing_context.should_backoff, "or Ray would ask again without a pause"
        return "".join(rank[0].replica_id.unique_id for rank in ranks)

    said = list(range(200))
    assert order(_request("early", said)) == "", "the front hears no replica yet"
    for replica in (a, b):
        listen = _request("listen", [])
        listen.args = [Listen("front", replica.unique_id)]
        assert order(listen) == replica.unique_id
        FRONT.heard.add(replica.unique_id)
    first = _request("first", said, n=3)
    router.on_request_routed(first, b, None)
    assert order(_request("again", [*said, 1, 2])) == "ba", "b has seen the beginning"
    assert order(_request("other", [9] * 200)) == "ab", "a has nothing to do"
    router.on_request_routed(_request("large", said, n=20), b, None)
    assert order(_request("again", [*said, 1, 2])) == "ab", "b has 23 sequences and a none"
    router.on_request_completed(b, "large")
    router.on_request_completed(b, "first")
    router.on_request_completed(a, "never routed")
    assert order(_request("again", [*said, 1, 2])) == "ba"
    FRONT.heard.remove("b")
    assert order(_request("again", [*said, 1, 2])) == "a", "b is silent"
    assert pickle.loads(pickle.dumps(FRONT)) == Front("front"), "what a front hears stays in its process"


def test_inputs_of_encoders_go_where_the_fewest_tokens_are_in_flight() -> None:
    router = _router()
    replicas = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in "ab"]
    front = Front("front", {"a", "b"})
    sent = []

    def send(name: str, *lengths: int) -> str:
        inputs = EncoderInputs.of([EncoderInput(np.ones(length, dtype=np.int32)) for length in lengths])
        request = _request(name, [])
        request.args = [front, Encode(name, inputs, None)]
        first = asyncio.run(router.choose_replicas(replicas, request))[0][0].replica_id
        router.on_request_routed(request, first, None)
        sent.append((first, name))
        return first.unique_id

    assert send("long", 500) == "a"
    assert [send(f"short {number}", 40, 40) for number in range(4)] == ["b"] * 4, "320 tokens of eight texts"
    assert send("longer", 600) == "b"
    assert send("same beginning", 500) == "a", "the same beginning has been at b"
    for replica, name in sent:
        router.on_request_completed(replica, name)
    assert set(router._in_flight.values()) == {0}
