"""What runs in a replica: one `AsyncEngine`, and the methods that the front and Ray Serve call."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from ray import serve

from fa_serve.engine import AsyncEngine, EngineConfig, EngineDeadError, EngineStats, QueueFullError
from fa_serve.engine.engine_loop import Add, StepOutputs
from fa_serve.engine.worker import Ready

from ..service import stall_reason
from .replica_load import LOAD, load_of


class EngineReplica:
    """config: the engine's settings; step_timeout: seconds that a step may take before Ray replaces this replica"""

    async def __init__(self, config: EngineConfig, step_timeout: float) -> None:  # type: ignore[misc]
        """Loads the model. Ray awaits it."""
        self._config = config
        self._step_timeout = step_timeout
        self._name = str(serve.get_replica_context().replica_id.unique_id)
        self._engine = AsyncEngine(config)
        await self._engine.start()

    async def generate(self, add: Add) -> AsyncGenerator[StepOutputs, None]:
        """The outputs of one request as they come. Cancelling the call aborts the request.

        Outputs that come while the front is not read are one output (async_engine.py), so a busy replica sends fewer messages.
        """
        generated = self._engine.generate(
            add.prompt,
            add.params,
            add.request_id,
            priority=add.priority,
            timeout=add.timeout,
            client=add.client,
            cache_salt=add.cache_salt,
        )
        try:
            async with aclosing(generated) as outputs:
                async for output in outputs:
                    yield StepOutputs(None, [replace(output, prompt_token_ids=[])])  # the front knows the prompt
        except (ValueError, QueueFullError, EngineDeadError) as error:
            yield StepOutputs(None, [], [(add.request_id, error)])

    async def describe(self) -> tuple[EngineConfig, Ready]:
        """The settings that this replica was started with, and what it made of them."""
        return self._config, replace(self._engine.ready, tokenizer=None)

    async def snapshot(self) -> tuple[str, EngineStats]:
        """The replica's name and its engine's statistics."""
        return self._name, self._engine.stats()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Read by Ray for replica_load.py."""
        return {LOAD: load_of(self._engine.stats(), self._config.max_num_seqs)}

    async def check_health(self) -> None:
        """Read by Ray, which replaces a replica that raises three times in a row."""
        if not (self._engine.is_alive or self._engine.is_restarting):
            raise RuntimeError("the engine has died")
        if not self._engine.is_restarting and (reason := stall_reason(self._engine.pulse(), self._step_timeout)):
            raise RuntimeError(reason)

    def __del__(self) -> None:
        """Called by Ray when the replica has drained, too."""
        self._engine.kill()
