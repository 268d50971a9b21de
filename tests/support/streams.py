"""What tests of asynchronous engines share: read a whole stream, wait for a condition."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from fa_serve.engine import AsyncEngine, RequestOutput, SamplingParams

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


async def collect(
    engine: AsyncEngine, prompt: str | Sequence[int], params: SamplingParams = GREEDY, name: str = "request"
) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, name)]


async def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    for _ in range(int(200 * seconds)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise TimeoutError
