"""What becomes of requests that are aborted, over replicas that never answer. A cluster is in tests/server/test_ray.py."""

import asyncio

import pytest

pytest.importorskip("ray", reason="the ray extra is not installed")
from types import SimpleNamespace

from fa_serve.server.ray.replicated_engine import ReplicaWorker

from fa_serve.engine import EngineConfig, SamplingParams
from fa_serve.engine.engine_loop import Abort, Add


async def _aborted(iterations: int) -> None:
    steps = []
    sent = []
    worker = ReplicaWorker(SimpleNamespace(), EngineConfig(device="cpu"), steps.append, None)

    def remote(front, add):
        sent.append(asyncio.get_running_loop().create_future())
        return sent[-1]

    worker._add = SimpleNamespace(remote=remote)
    worker.send(Add("one", [1], SamplingParams(n=2)))
    for _ in range(iterations):
        await asyncio.sleep(0)
    worker.send(Abort("one", 2))
    for _ in range(3):
        await asyncio.sleep(0)
    ends = [(output.request_id, output.index, output.finish_reason) for step in steps for output in step.outputs]
    assert ends == [("one", 0, "abort"), ("one", 1, "abort")]
    assert [future.cancelled() for future in sent] == [True] * (iterations > 0)
    assert worker._requests == {}, "nothing of it keeps a listener alive"


@pytest.mark.parametrize("iterations", [0, 2], ids=["before it is sent", "afterwards"])
def test_an_aborted_request_ends_and_is_forgotten(iterations: int) -> None:
    asyncio.run(_aborted(iterations))
