"""Opens the host tier of an engine: its memory for pages, and for states if the model has some.

    tier = open_host_tier(config, runner, pages, states)                # None without `kv_host_memory`

The budget is divided as the memory of the device is: as many states for each page. Left out: what is copied when
(cache/host_tier.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from fa_serve.engine.cache.host_tier import HostTier, Lane
from fa_serve.engine.cache.pages import PageTable
from fa_serve.engine.cache.states import StateTable
from fa_serve.engine.config import EngineConfig
from fa_serve.engine.runner.host_memory import HostMemory
from fa_serve.engine.runner.model_runner import ModelRunner
from fa_serve.spec import ParameterError

log = logging.getLogger("fa_serve.engine")

STEPS_AHEAD = 2
"""Pages are copied before they are evicted: as many as so many of the largest steps and the longest prompt take."""
SHARE_AHEAD = 4
"""A part of the host's memory, one in so many, may hold copies of what the device still has, if the longest prompt is long."""


def open_host_tier(config: EngineConfig, runner: ModelRunner, pages: PageTable, states: StateTable | None) -> HostTier | None:
    """The tier of a runner whose cache is allocated; None without one, or if there is no memory for its buffers.

    Raises ParameterError for a model whose cache cannot be copied.
    """
    if not config.kv_host_memory:
        return None

    def page_tensors() -> list[Tensor]:
        caches = [
            (*runner.kv_caches[index], layer.values_in_keys) for index, layer in (runner.layers | runner.indexers).items()
        ]
        return [x for keys, values, shared in caches for x in ((keys,) if shared else (keys, values))]

    def state_tensors() -> list[Tensor]:
        return [each.pages for each in runner.states.values()]

    if not page_tensors():
        raise ParameterError("kv_host_memory", "be 0 for a model without attention layers", config.kv_host_memory)
    opened: list[HostMemory] = []
    try:
        num_bytes = _shares(config.kv_host_memory, page_tensors(), state_tensors())
        opened.append(HostMemory(page_tensors, num_bytes[0], runner.device, "pages"))
        batch = pages.pages_for(config.max_num_batched_tokens)
        longest = min(pages.pages_for(config.max_model_len or 0), num_bytes[0] // opened[0].row_bytes // SHARE_AHEAD)
        lanes = [Lane(pages, opened[0], min(STEPS_AHEAD * batch + longest, pages.num_pages), STEPS_AHEAD * batch)]
        if states is not None:
            opened.append(HostMemory(state_tensors, num_bytes[1], runner.device, "states"))
            lanes.append(Lane(states, opened[1], max(states.num_states // 8, min(8, states.num_states))))
    except ValueError as error:
        raise ParameterError("kv_host_memory", f"be 0 for such a KV cache: {error}", config.kv_host_memory) from error
    except torch.OutOfMemoryError:
        log.warning("there is no host tier of the KV cache, because the GPU has no memory for its buffers")
        for memory in opened:
            memory.close()
        return None
    return HostTier(*lanes)


def _shares(num_bytes: int, pages: Sequence[Tensor], states: Sequence[Tensor]) -> tuple[int, int]:
    """What pages and states get of the host's memory: in proportion to the device's."""
    of_pages = sum(x.nbytes for x in pages)
    of_states = sum(x.nbytes for x in states)
    share = num_bytes * of_pages // (of_pages + of_states)
    return share, num_bytes - share
