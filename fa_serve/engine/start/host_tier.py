"""Opens the host tier of an engine: its memory for pages, and for states if the model has any.

    tier = open_host_tier(config, runner, pages, states, files)         # None without `kv_host_memory`

The budget is divided in the same proportion as the device's memory: as many states for each page. The files of `kv_host_folder`
are opened before the tables are made, because the hashes in the tables are keyed with the folder's secret. Left out: what is
copied, and when (cache/host_tier.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fa_serve.engine.cache.folder_files import FolderFiles
from fa_serve.engine.cache.folder_tier import FolderTier
from fa_serve.engine.cache.host_tier import HostTier, Lane
from fa_serve.engine.cache.identity import cache_facts, identity_of
from fa_serve.engine.cache.pages import PageTable
from fa_serve.engine.cache.states import StateTable
from fa_serve.engine.config import EngineConfig
from fa_serve.engine.runner.host_memory import HostMemory
from fa_serve.engine.runner.model_runner import ModelRunner
from fa_serve.spec import ParameterError

log = logging.getLogger("fa_serve.engine")

STEPS_AHEAD = 2
"""Pages are copied before they are evicted: as many pages as this many of the largest steps and the longest prompt take."""
SHARE_AHEAD = 4
"""One part in SHARE_AHEAD of the tier's memory may hold copies of items that the device still has."""


def open_folder_files(config: EngineConfig, runner: ModelRunner) -> FolderFiles | None:
    """The files for a runner whose cache is allocated; None without a folder. Raises ParameterError if it is not usable."""
    if config.kv_host_folder is None:
        return None
    about = cache_facts(config, runner.model, _page_tensors(runner), _state_tensors(runner))
    try:
        return FolderFiles(Path(config.kv_host_folder), identity_of(about), about)
    except OSError as error:
        rule = f"be a folder that can be read and written ({error})"
        raise ParameterError("kv_host_folder", rule, str(config.kv_host_folder)) from error


def open_host_tier(
    config: EngineConfig,
    runner: ModelRunner,
    pages: PageTable,
    states: StateTable | None,
    files: FolderFiles | None = None,
) -> HostTier | None:
    """The tier of a runner whose cache is allocated; None without `kv_host_memory`, or if the GPU has no room for its buffers.

    Raises ParameterError for a model whose cache cannot be copied.
    """
    if not config.kv_host_memory:
        return None
    page_tensors = partial(_page_tensors, runner)
    state_tensors = partial(_state_tensors, runner)
    if not page_tensors():
        raise ParameterError("kv_host_memory", "be 0 for a model without attention layers", config.kv_host_memory)
    opened: list[HostMemory] = []
    try:
        num_bytes = _shares(config.kv_host_memory, page_tensors(), state_tensors())
        promised = sum(x.nbytes for x in page_tensors() + state_tensors()) if runner.device.type == "cpu" else 0
        opened.append(HostMemory(page_tensors, num_bytes[0], runner.device, "pages", promised))
        num_slots = num_bytes[0] // opened[0].row_bytes
        batch = pages.pages_for(config.max_num_batched_tokens)
        ahead = STEPS_AHEAD * batch + pages.pages_for(config.max_model_len or 0)
        lanes = [Lane(pages, opened[0], look_ahead(ahead, pages.num_pages, num_slots), STEPS_AHEAD * batch)]
        if states is not None:
            promised += opened[0].num_slots * opened[0].row_bytes
            opened.append(HostMemory(state_tensors, num_bytes[1], runner.device, "states", promised))
            num_slots = num_bytes[1] // opened[1].row_bytes
            ahead = max(states.num_states // 8, 8)
            lanes.append(Lane(states, opened[1], look_ahead(ahead, states.num_states, num_slots)))
    except ValueError as error:
        raise ParameterError("kv_host_memory", f"be 0 for this KV cache: {error}", config.kv_host_memory) from error
    except torch.OutOfMemoryError:
        log.warning("there is no host tier of the KV cache, because the GPU has no memory for its buffers")
        for memory in opened:
            memory.close()
        return None
    folder = None if files is None else FolderTier(files, config.kv_host_folder_bytes)
    return HostTier(lanes[0], lanes[1] if states is not None else None, folder)


def look_ahead(wanted: int, num_items: int, num_slots: int) -> int:
    """How many of the items that are evicted next should have copies ahead of time.

    Copies of items that the device still has take room from copies of evicted items, so they get only a part of a small memory.
    """
    return min(wanted, num_items, max(num_slots // SHARE_AHEAD, 1))


def _page_tensors(runner: ModelRunner) -> list[Tensor]:
    caches = [(*runner.kv_caches[index], layer.values_in_keys) for index, layer in (runner.layers | runner.indexers).items()]
    return [x for keys, values, shared in caches for x in ((keys,) if shared else (keys, values))]


def _state_tensors(runner: ModelRunner) -> list[Tensor]:
    return [each.pages for each in runner.states.values()]


def _shares(num_bytes: int, pages: Sequence[Tensor], states: Sequence[Tensor]) -> tuple[int, int]:
    """The bytes of host memory for pages and for states, in the same proportion as on the device."""
    of_pages = sum(x.nbytes for x in pages)
    of_states = sum(x.nbytes for x in states)
    share = num_bytes * of_pages // (of_pages + of_states)
    return share, num_bytes - share
