"""Adapters by name, their tier on the host, and the thread that loads them into the device's memory.

    store = AdapterStore(memory, host_bytes=4 << 30)
    store.add("french", folder, store.read(folder))      # `read` takes the time, and runs in any thread
    adapter = store.find("french")
    pool = store.pool                        # asks this store to load
    store.remove("french")                   # sequences that have it finish with it

The tier on the host keeps adapters as they are copied to the device. If it is full, those that were asked for least recently
are dropped, and read from their folder again when a sequence needs them. A folder whose files have changed is refused, because
the prefix cache has what was computed with the older ones. On a GPU, copies have a separate stream, on which they wait
for the steps that were launched before. Left out: who may load what, which is the server's business.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from fa_serve.engine.cache.identity import content_number
from fa_serve.engine.config import EngineConfig
from fa_serve.engine.lora.pool import Adapter, LoraPool
from fa_serve.hf.lora.format import LoraAdapter, file_facts, read_adapter
from fa_serve.hf.lora.memory import LoraMemory, PackedLora
from fa_serve.ops import PAGE_RANKS
from fa_serve.spec import ParameterError

log = logging.getLogger("fa_serve.engine")

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@+-]{0,127}")
MAX_ADAPTERS = 4096
"""Names that an engine knows at once."""


def _start_reader() -> ThreadPoolExecutor:
    """A thread in which PyTorch computes with that thread alone.

    An adapter is hundreds of small tensors. For each, PyTorch would wake a thread of each processor and wait for all of them:
    beside other work that takes milliseconds a tensor, and seconds an adapter.
    """
    before = torch.get_num_threads()
    reader = ThreadPoolExecutor(1, "fa_serve-adapters", initializer=torch.set_num_threads, initargs=(1,))
    reader.submit(torch.get_num_threads).result()
    torch.set_num_threads(before)  # which is what other threads begin with
    return reader


class AdapterStore:
    """Owner of the names and of the adapters on the host. Only `read` may be called from other threads than the engine's.

    host_bytes: of the tier on the host, which holds one adapter at least
    by_content: adapters are numbered by their content, so that a later engine knows what an adapter has computed
    """

    def __init__(self, memory: LoraMemory, host_bytes: int, *, by_content: bool = False) -> None:
        self.memory = memory
        self._by_content = by_content
        self.pool = LoraPool(memory.num_slots, memory.num_pages, memory.num_pages * memory.bytes_per_page, self)
        self._host_bytes = host_bytes
        self._names: dict[str, Adapter] = {}
        self._folders: dict[Adapter, tuple[Path, tuple[tuple[int, int], ...]]] = {}
        self._host: OrderedDict[Adapter, PackedLora] = OrderedDict()  # the least recently used one first
        self._loads: dict[Adapter, Future[PackedLora]] = {}
        self._numbers = count(1)
        self._thread = _start_reader()
        make_stream: Any = torch.cuda.Stream
        self._stream = make_stream(memory.device) if memory.device.type == "cuda" else None
        self._changed = threading.Event()

    @classmethod
    def make(cls, model: Any, config: EngineConfig) -> AdapterStore:
        """The store of a model whose layers are fused. Raises as `LoraMemory`."""
        pages = config.max_num_seqs * -(-config.max_lora_rank // PAGE_RANKS)
        memory = LoraMemory(model, budget=config.lora_budget, max_rank=config.max_lora_rank, max_pages=pages)
        return cls(memory, config.lora_host_bytes, by_content=config.kv_host_folder is not None)

    def __str__(self) -> str:
        """What there is, for the report of the start."""
        memory = self.memory
        return f"{memory.num_pages} pages of {PAGE_RANKS} ranks, {memory.bytes_per_page / 2**20:.4g} MiB each"

    @property
    def names(self) -> list[str]:
        """The names that requests may ask for, in the order in which they were added."""
        return [*self._names]

    def check_name(self, name: str) -> None:
        """Raise ParameterError for a name that an adapter cannot have."""
        if not isinstance(name, str) or NAME.fullmatch(name) is None:
            rule = "be a name of letters, digits and . : @ + - _, without slashes, of at most 128 characters"
            raise ParameterError("lora_name", rule, name)
        if name not in self._names and len(self._names) >= MAX_ADAPTERS:
            raise ParameterError("lora_name", f"be one of {MAX_ADAPTERS} names at most: unload an adapter first", name)

    def read(self, folder: str | Path) -> PackedLora:
        """Read and check an adapter, behind those that are being loaded. Raises as `read_adapter` and `LoraMemory.pack`."""
        return self._thread.submit(self._read, folder).result()

    def _read(self, folder: str | Path) -> PackedLora:
        return self.pack(read_adapter(folder, max_bytes=self._host_bytes))

    def pack(self, adapter: LoraAdapter) -> PackedLora:
        """The same for an adapter that is in memory, such as one in training."""
        packed = self.memory.pack(adapter)
        return replace(packed, content=content_number(adapter)) if self._by_content else packed

    def add(self, name: str, folder: str | Path | None, packed: PackedLora) -> Adapter:
        """Serve an adapter under a name from now on, also if another one has it, which is removed.

        folder: where it can be read again; None keeps it on the host
        """
        self.check_name(name)
        adapter = Adapter(name, packed.content or next(self._numbers), packed.num_pages, packed.outer_bytes, packed.is_eager)
        if folder is not None:
            self._folders[adapter] = (Path(folder), file_facts(folder))
        if name in self._names:
            self.remove(name)
        self._names[name] = adapter
        self._keep(adapter, packed)
        return adapter

    def remove(self, name: str) -> None:
        """Serve no more requests under this name. Those that have the adapter keep it. Raises as `find`."""
        adapter = self.find(name)
        del self._names[name]
        self.unused(adapter)

    def find(self, name: str) -> Adapter:
        """The adapter of this name. Raises ParameterError without one."""
        adapter = self._names.get(name)
        if adapter is None:
            known = ", ".join(self.names[:8]) or "none is loaded"
            raise ParameterError("adapter", f"be the name of a loaded adapter ({known})", name)
        return adapter

    def is_served(self, adapter: Adapter) -> bool:
        """Whether requests may still come for it."""
        return self._names.get(adapter.name) is adapter

    def wait(self, seconds: float) -> None:
        """Wait until an adapter has been loaded, but not longer than that."""
        self._changed.wait(seconds)
        self._changed.clear()

    def start(self, adapter: Adapter, slot: int, pages: list[int]) -> None:
        """As in `Loader`: in the thread, read it if it is not on the host, and copy it."""
        packed = self._host.get(adapter)
        if packed is not None:
            self._host.move_to_end(adapter)
        launched = None
        if self._stream is not None:
            launched = torch.Event("cuda")  # steps in flight may read the memory that is overwritten
            launched.record(torch.cuda.current_stream(self.memory.device))
        self._loads[adapter] = self._thread.submit(self._load, adapter, packed, slot, pages, launched)
        self._loads[adapter].add_done_callback(lambda _: self._changed.set())

    def is_done(self, adapter: Adapter) -> bool:
        """As in `Loader`."""
        load = self._loads[adapter]
        if not load.done():
            return False
        packed = load.result()
        if adapter not in self._host:
            self._keep(adapter, packed)
        return True

    def evicted(self, adapter: Adapter, slot: int) -> None:
        """As in `Loader`."""
        self._loads.pop(adapter, None)
        self.memory.clear(slot)

    def unused(self, adapter: Adapter) -> None:
        """As in `Loader`: drop what is kept of an adapter that nobody may ask for any more."""
        if not self.is_served(adapter) and not self.pool.is_used(adapter):
            self.pool.drop(adapter)
            self._host.pop(adapter, None)
            self._folders.pop(adapter, None)

    def close(self) -> None:
        """End the thread, after what it does."""
        self._thread.shutdown(cancel_futures=True)

    def _load(
        self, adapter: Adapter, packed: PackedLora | None, slot: int, pages: list[int], launched: torch.Event | None
    ) -> PackedLora:
        if packed is None:
            if adapter not in self._folders:
                raise ParameterError("adapter", "be loaded, and it was unloaded before this request came to it", adapter.name)
            folder, facts = self._folders[adapter]
            packed = self._read(folder)
            if file_facts(folder) != facts:
                raise ParameterError(adapter.name, "be loaded again, because its files have changed", str(folder))
        if self._stream is None:
            self.memory.write(packed, slot, pages)
            return packed
        with torch.cuda.stream(self._stream):
            assert launched is not None
            launched.wait(self._stream)
            self.memory.write(packed, slot, pages)
        self._stream.synchronize()
        return packed

    def _keep(self, adapter: Adapter, packed: PackedLora) -> None:
        """Keep an adapter on the host, and drop others that can be read again while they are too many."""
        self._host[adapter] = packed
        total = sum(each.num_bytes for each in self._host.values())
        for other in [*self._host]:
            if total <= self._host_bytes:
                break
            if other is not adapter and other in self._folders:
                total -= self._host.pop(other).num_bytes
