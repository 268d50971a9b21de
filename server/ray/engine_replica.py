"""What runs in a replica: one `AsyncEngine`, for a generating model or an encoder, and the methods that fronts and Ray call.

A front is a process that speaks HTTP. It calls `listen` once and `add` for each request. `add` returns when the request has
ended, so Ray knows how many requests a replica has, waits for them before it takes a replica down, and can cancel them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from ray import serve

from fa_serve.engine import AsyncEngine, EngineConfig, EngineDeadError, EngineStats, QueueFullError
from fa_serve.engine.process.engine_loop import Add, Encode
from fa_serve.engine.process.pipe import Ready
from fa_serve.sandbox.trials import TrialProcessError

from ..service import stall_reason
from .output_channel import Gains, OutputChannel
from .replica_load import LOAD, load_of

log = logging.getLogger("fa_serve.server")
FRONT_SECONDS = 30.0
"""A front counts as gone if it has not asked for a snapshot for this time. It normally asks each second."""
BEAT_SECONDS = 1.0
"""The time between two signs of life that a replica sends to each front."""
FAREWELL_SECONDS = 0.5
"""How long a replica stays alive after its engine has ended, so that fronts learn why."""


@dataclass(slots=True)
class Front:
    """A process that speaks HTTP.

    heard: the replicas to which this front listens. Only these get its requests. PrefixRouter reads the set in the process of
           the front, so it is not pickled.
    """

    name: str
    heard: set[str] = field(default_factory=set)

    def __reduce__(self) -> tuple[type[Front], tuple[str]]:
        return Front, (self.name,)


@dataclass(frozen=True, slots=True)
class Listen:
    """The argument of `listen`. front: the name of the front that listens; replica: the name of the replica to listen to"""

    front: str
    replica: str


class EngineReplica:
    """config: the engine's settings; step_timeout: seconds that a step may take before Ray replaces this replica"""

    async def __init__(self, config: EngineConfig, step_timeout: float) -> None:  # type: ignore[misc]
        """Loads the model. Ray awaits it."""
        self._config = config
        self._step_timeout = step_timeout
        self._name = str(serve.get_replica_context().replica_id.unique_id)
        self._channels: dict[str, OutputChannel] = {}  # by front
        self._engine = AsyncEngine(replace(config, max_restarts=0))  # Ray starts another replica instead
        await self._engine.start()
        self._tasks = [asyncio.create_task(self._end_with_engine()), asyncio.create_task(self._beat())]

    async def _end_with_engine(self) -> None:
        """End this process when its engine has ended. Ray notices that at once, but a failed health check only later."""
        log.error("this replica is stopping: %s", await self._engine.ended())
        await asyncio.sleep(FAREWELL_SECONDS)
        os._exit(1)

    async def _beat(self) -> None:
        """Give each front a sign of life every second."""
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            for channel in self._channels.values():
                channel.beat()

    async def add(self, front: Front, add: Add | Encode) -> Exception | None:
        """Compute a request. Returns the engine's refusal, or None at the end. Cancelling the call aborts the request.

        EngineDeadError means that nothing of the request has been computed here, and another replica may compute it. So a
        request that arrives while the engine dies, before this process knows about it, is not lost.
        """
        if not self._engine.is_alive:
            return EngineDeadError("the engine has stopped, so its replica is stopping, too")
        channel = self._channels.setdefault(front.name, OutputChannel())
        task = asyncio.current_task()
        assert task is not None
        channel.tasks.add(task)
        channel.accept(add.request_id)
        try:
            return await (self._encode(channel, add) if isinstance(add, Encode) else self._generate(channel, add))
        except (ValueError, QueueFullError, EngineDeadError, TrialProcessError) as error:
            return error
        finally:
            channel.tasks.discard(task)

    async def _generate(self, channel: OutputChannel, add: Add) -> Exception | None:
        """Generate, and put the outputs of each step into the channel."""
        generated = self._engine.generate(
            add.prompt,
            add.params,
            add.request_id,
            priority=add.priority,
            timeout=add.timeout,
            client=add.client,
            cache_salt=add.cache_salt,
            adapter=add.adapter,
        )
        begun = False
        async with aclosing(generated) as outputs:
            async for output in outputs:
                if not begun and output.error is not None and output.error.code == "engine_dead":
                    return EngineDeadError(output.error.message)
                begun = True
                channel.put(replace(output, prompt_token_ids=[]))  # the front knows the prompt
        return None

    async def _encode(self, channel: OutputChannel, add: Encode) -> Exception | None:
        """Encode, and put the outputs for all inputs into the channel at once, because the client gets one answer."""
        outputs = await self._engine.encode(
            add.inputs, add.params, add.request_id, priority=add.priority, timeout=add.timeout, client=add.client
        )
        error = outputs[-1].error
        if len(outputs) == 1 and error is not None and error.code == "engine_dead":
            return EngineDeadError(error.message)
        for output in outputs:
            channel.put(replace(output, request_id=add.request_id))
        return None

    async def listen(self, who: Listen) -> AsyncGenerator[Gains, None]:
        """Yield the outputs of a front's requests, step by step, without end. Without outputs, it yields empty `Gains` every
        BEAT_SECONDS as a sign of life."""
        channel = self._channels.setdefault(who.front, OutputChannel())
        task = asyncio.current_task()
        assert task is not None
        channel.tasks.add(task)
        try:
            while True:
                yield await channel.take()
        finally:
            channel.tasks.discard(task)

    async def snapshot(self, front: str) -> tuple[str, EngineStats]:
        """The replica's name and its engine's statistics. The call is also a sign of life of the front."""
        now = time.monotonic()
        if front in self._channels:
            self._channels[front].heard = now
        for gone in [name for name, channel in self._channels.items() if now - channel.heard > FRONT_SECONDS]:
            for task in self._channels.pop(gone).tasks:
                task.cancel()  # otherwise a replica that is to be removed would wait for them
        return self._name, self._engine.stats()

    async def describe(self) -> tuple[EngineConfig, Ready]:
        """The settings that this replica was started with, and what is known about its loaded engine."""
        return self._config, replace(self._engine.ready, tokenizer=None)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The load of this replica. Ray calls this, and passes the load to replica_load.py."""
        return {LOAD: load_of(self._engine.stats(), self._config.max_num_seqs)}

    async def check_health(self) -> None:
        """Raise RuntimeError if the engine is dead or stalled. Ray replaces a replica that raises three times in a row."""
        if not (self._engine.is_alive or self._engine.is_restarting):
            raise RuntimeError("the engine has died")
        if not self._engine.is_restarting and (reason := stall_reason(self._engine.pulse(), self._step_timeout)):
            raise RuntimeError(reason)

    def __del__(self) -> None:
        """Kill the engine. Ray also calls this when the replica has drained."""
        self._engine.kill()
