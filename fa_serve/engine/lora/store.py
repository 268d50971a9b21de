"""Adapters by name, their tier on the host, and the thread that loads them into the device's memory.

    store = AdapterStore(memory, host_bytes=4 << 30)
    store.load("french", folder)             # reads it, unless `begin` has started to do so in a thread
    adapter = store.find("french")
    pool = store.pool                        # asks this store to load
    store.remove("french")                   # sequences that have it finish with it

The host tier keeps adapters in its own memory. If it is full, the least recently used adapters are dropped, and read from
their folder again when a sequence needs them. A folder whose files have changed is then refused, because the prefix cache holds
keys and values that were computed with the older files. On a GPU, copies run on a separate stream, where they wait for the
steps that were launched before.

With several ranks, each rank has a store with its own part of each adapter. All stores get the same calls, so that names, slots
and pages are the same. What depends on files and threads is decided by all ranks together: an adapter is served if every rank
has read it, and counts as loaded when every rank has loaded it (`settle`). Left out: who may load what (the server decides).
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fa_serve.engine.cache.identity import content_number
from fa_serve.engine.config import EngineConfig
from fa_serve.engine.lora.pool import Adapter, LoraPool
from fa_serve.engine.parallel.ranks import Alone, Ranks
from fa_serve.hf.lora.format import LoraAdapter, file_facts, is_finite, read_adapter
from fa_serve.hf.lora.memory import LoraMemory
from fa_serve.hf.lora.packed import PackedLora
from fa_serve.named_files import ADAPTER_NAME, ADAPTER_NAME_RULE
from fa_serve.ops import PAGE_RANKS
from fa_serve.spec import ParameterError

log = logging.getLogger("fa_serve.engine")

FileFacts = tuple[tuple[int, int], ...]
"""The state of the files of an adapter (`file_facts`)."""
MAX_ADAPTERS = 4096
"""The most names that an engine knows at once."""
LOAD_SECONDS = 0.01
"""The longest time that a step without work waits for an adapter that is being loaded."""


def _start_thread(name: str) -> ThreadPoolExecutor:
    """A thread in which PyTorch computes without further threads.

    An adapter is hundreds of small tensors. For each of them, PyTorch would wake a thread for each processor and wait for all
    of these threads. While other work runs, that takes milliseconds per tensor, and seconds per adapter.
    """
    before = torch.get_num_threads()
    thread = ThreadPoolExecutor(1, name, initializer=torch.set_num_threads, initargs=(1,))
    thread.submit(torch.get_num_threads).result()
    torch.set_num_threads(before)  # the thread has also changed the number that new threads begin with
    return thread


class _Read(NamedTuple):
    """The result of reading an adapter on one rank.

    refusal: why this rank refuses the adapter; "" if it does not
    content: the number of its content; 0 if adapters are not numbered by content
    """

    refusal: str
    outer_bytes: int = 0
    is_eager: bool = False
    content: int = 0


class AdapterStore:
    """Owner of the names and of the adapters on the host. Only `read` may be called from other threads than the engine's.

    host_bytes: budget of the host tier, which holds at least one adapter whatever its size
    by_content: number adapters by their content, so that a later engine and other ranks recognise what an adapter computes
    ranks:      the ranks that the model is divided among
    """

    def __init__(self, memory: LoraMemory, host_bytes: int, *, by_content: bool = False, ranks: Ranks | None = None) -> None:
        self.memory = memory
        self._ranks: Ranks = ranks or Alone(memory.device)
        self._by_content = by_content or self._ranks.size > 1
        self.pool = LoraPool(memory.num_slots, memory.num_pages, memory.num_pages * memory.bytes_per_page, self)
        self._host_bytes = host_bytes
        self._names: dict[str, Adapter] = {}
        self._folders: dict[Adapter, tuple[Path, FileFacts]] = {}
        self._host: OrderedDict[Adapter, PackedLora] = OrderedDict()  # the least recently used one first
        self._loads: dict[Adapter, Future[PackedLora]] = {}
        self._ended: dict[Adapter, str] = {}  # loads that have ended on every rank, and why they failed; "" if not
        # those on the device that depend on the model's weights: the slot and the pages of each
        self._rescaled: dict[Adapter, tuple[PackedLora, int, list[int]]] = {}
        self._numbers = count(1)
        self._serials = count(1)
        self._readings: dict[int, Future[tuple[PackedLora, FileFacts]]] = {}
        self._reading_numbers = count(1)
        self._thread = _start_thread("fa_serve-adapters")
        self._reader = _start_thread("fa_serve-read-adapters")
        make_stream: Any = torch.cuda.Stream
        self._stream = make_stream(memory.device) if memory.device.type == "cuda" else None
        self._changed = threading.Event()

    @classmethod
    def make(cls, model: Any, config: EngineConfig, ranks: Ranks) -> AdapterStore:
        """The store of a model whose layers are fused, with the adapters that the settings name. Raises as `LoraMemory` and
        `load`."""
        pages = config.max_num_seqs * -(-config.max_lora_rank // PAGE_RANKS)
        memory = LoraMemory(model, budget=config.lora_budget, max_rank=config.max_lora_rank, max_pages=pages)
        store = cls(memory, config.lora_host_bytes, by_content=config.kv_host_folder is not None, ranks=ranks)
        for each in config.lora:
            name, folder = each.split("=", 1)
            try:
                store.load(name, folder)
            except ParameterError as error:  # the error names the layer, but not the adapter
                raise ParameterError("lora", f"name adapters that fit the model: {error}", each) from None
        return store

    def __str__(self) -> str:
        """The size of the adapters' memory, for the report of the start."""
        memory = self.memory
        return f"{memory.num_pages} pages of {PAGE_RANKS} ranks, {memory.bytes_per_page / 2**20:.4g} MiB each"

    @property
    def names(self) -> list[str]:
        """The names that requests may ask for, in the order in which they were added."""
        return [*self._names]

    def check_name(self, name: str) -> None:
        """Raise ParameterError for a name that an adapter cannot have."""
        if not isinstance(name, str) or ADAPTER_NAME.fullmatch(name) is None:
            raise ParameterError("lora_name", ADAPTER_NAME_RULE, name)
        if name not in self._names and len(self._names) >= MAX_ADAPTERS:
            raise ParameterError("lora_name", f"be one of at most {MAX_ADAPTERS} names: unload an adapter first", name)

    def read(self, folder: str | Path) -> PackedLora:
        """Read and check an adapter, after those that are being read. Raises as `read_adapter` and `LoraMemory.pack`."""
        return self._reader.submit(self._read, folder).result()[0]

    def _read(self, folder: str | Path) -> tuple[PackedLora, FileFacts]:
        """Read an adapter. Returns it with the state of its files. Raises ParameterError if they change while they are read."""
        before: FileFacts = ()
        with suppress(OSError, TypeError):  # `read_adapter` says which file is missing, or that this is no path
            before = file_facts(folder)
        packed = self._packed(read_adapter(folder, max_bytes=self._host_bytes))
        after = file_facts(folder)
        if after != before:
            raise ParameterError("adapter", "have files that do not change while they are read: try again", str(folder)[:256])
        return packed, after

    def pack(self, adapter: LoraAdapter) -> PackedLora:
        """Copy and check an adapter that is in memory, such as one in training, as it is now. Raises as `LoraMemory.pack`, and
        ParameterError for numbers that are not finite."""
        packed = self._packed(adapter)
        packed.own()
        if not all(is_finite(each.a) and is_finite(each.b) for parts in packed.parts.values() for each in parts):
            raise ParameterError("adapter", "have finite numbers", "NaN or an infinity")
        return packed

    def _packed(self, adapter: LoraAdapter) -> PackedLora:
        packed = self.memory.pack(adapter)
        packed.content = content_number(adapter) if self._by_content else 0
        return packed

    def begin(self, folder: str | Path) -> int:
        """Begin to read an adapter in a thread. Returns the number by which `load` takes it, the same on all ranks."""
        number = next(self._reading_numbers)
        self._readings[number] = self._reader.submit(self._read, folder)
        return number

    def when_read(self, number: int, then: Callable[[], None]) -> None:
        """Call `then`, in any thread, when this rank has finished the reading with this number."""
        self._readings[number].add_done_callback(lambda _: then())

    def load(self, name: str, folder: str | Path, reading: int | None = None) -> Adapter:
        """Serve the adapter in a folder under a name, unless a rank refuses it. All ranks call it at the same point.

        reading: what `begin` has returned. Raises as `read`, on all ranks if one of them raises.
        """
        failure: Exception | None = None
        try:  # whatever happens on this rank, the others wait for its result in `gather`
            begun = None if reading is None else self._readings.pop(reading)
            self.check_name(name)
            packed, facts = (begun or self._reader.submit(self._read, folder)).result()
            own = _Read("", packed.outer_bytes, packed.is_eager, packed.content)
        except Exception as error:
            failure = error
            own = _Read(str(error) or type(error).__name__)
        found = self._ranks.gather(own)
        if failure is not None:
            raise failure
        if refusal := _refusal([each.refusal for each in found]):
            raise _refused(name, refusal)
        if len({each.content for each in found}) > 1:
            raise ParameterError("adapter", "consist of the same files on every rank and machine", str(folder))
        outer_bytes = max(each.outer_bytes for each in found)
        return self._serve(name, (Path(folder), facts), packed, outer_bytes, any(each.is_eager for each in found))

    def add(self, name: str, packed: PackedLora) -> Adapter:
        """Serve an adapter that is in memory, and keep it on the host. Raises ParameterError with several ranks."""
        self.check_name(name)
        if self._ranks.size > 1:
            raise ParameterError("adapter", "be loaded from a folder when tensor_parallel is above 1", name)
        return self._serve(name, None, packed, packed.outer_bytes, packed.is_eager)

    def _serve(
        self,
        name: str,
        origin: tuple[Path, FileFacts] | None,
        packed: PackedLora,
        outer_bytes: int,
        is_eager: bool,
    ) -> Adapter:
        """Serve an adapter under a name from now on. If another adapter has the name, that one is removed.

        origin: the folder from which it can be read again, and the state of its files; None: the host tier never drops it
        """
        number = packed.content or next(self._numbers)
        adapter = Adapter(name, number, packed.num_pages, outer_bytes, is_eager, next(self._serials))
        if origin is not None:
            self._folders[adapter] = origin
        if name in self._names:
            self.remove(name)
        self._names[name] = adapter
        self._keep(adapter, packed)
        return adapter

    def remove(self, name: str) -> None:
        """Serve no new requests under this name. Requests that have the adapter keep it. Raises as `find`."""
        adapter = self.find(name)
        del self._names[name]
        self.unused(adapter)

    def find(self, name: str) -> Adapter:
        """The adapter of this name. Raises ParameterError if there is none."""
        adapter = self._names.get(name)
        if adapter is None:
            known = ", ".join(self.names[:8]) or "none is loaded"
            raise ParameterError("adapter", f"be the name of a loaded adapter ({known})", name)
        return adapter

    def is_served(self, adapter: Adapter) -> bool:
        """Whether new requests may still ask for the adapter."""
        return self._names.get(adapter.name) == adapter

    def rescale(self) -> None:
        """The weights of the model have changed: compute factors of DoRA and routers again. No step may be in flight.

        Adapters on the device are written again now, and others when they are loaded.
        """
        self.memory.weight_version += 1
        if self._rescaled:  # a load that is not in it yet reads the new version
            self._thread.submit(self._write_rescaled, self._launched()).result()

    def _write_rescaled(self, launched: torch.Event | None) -> None:
        for place in [*self._rescaled.values()]:
            self._write(*place, launched)

    def wait(self) -> None:
        """Wait until an adapter has been loaded, but not for long."""
        self._changed.wait(LOAD_SECONDS)
        self._changed.clear()

    def start(self, adapter: Adapter, slot: int, pages: list[int]) -> None:
        """As in `Loader`: a thread reads the adapter if it is not in the host tier, and copies it to the device."""
        packed = self._host.get(adapter)
        if packed is not None:
            self._host.move_to_end(adapter)
        self._ranks.add_to_digest((adapter.serial, slot, *pages))
        self._loads[adapter] = self._thread.submit(self._load, adapter, packed, slot, pages, self._launched())
        self._loads[adapter].add_done_callback(lambda _: self._changed.set())

    def settle(self) -> None:
        """As in `Loader`: a load has ended when it has ended on every rank, and has failed if it has failed on any rank."""
        pending = [adapter for adapter in self._loads if adapter not in self._ended]
        if not pending:
            return
        ranks = self._ranks.gather([_outcome(self._loads[adapter]) for adapter in pending])
        for adapter, outcomes in zip(pending, zip(*ranks, strict=True), strict=True):
            if None not in outcomes:
                self._ended[adapter] = _refusal(outcomes)

    def is_done(self, adapter: Adapter) -> bool:
        """As in `Loader`."""
        failure = self._ended.get(adapter)
        if failure is None:
            return False
        if failure:
            self._loads[adapter].result()  # raises this rank's own error, if it has one
            raise _refused(adapter.name, failure)
        packed = self._loads.pop(adapter).result()  # the tier keeps the memory, so the load must not
        del self._ended[adapter]
        if adapter not in self._host and (self.is_served(adapter) or self.pool.is_used(adapter)):
            self._keep(adapter, packed)
        return True

    def evicted(self, adapter: Adapter, slot: int) -> None:
        """As in `Loader`."""
        self._loads.pop(adapter, None)
        self._ended.pop(adapter, None)
        self._rescaled.pop(adapter, None)
        self.memory.clear(slot)

    def unused(self, adapter: Adapter) -> None:
        """As in `Loader`: drop everything of an adapter that is not served any more, unless a sequence has it."""
        if not self.is_served(adapter) and not self.pool.is_used(adapter):
            self.pool.drop(adapter)
            self._host.pop(adapter, None)
            self._folders.pop(adapter, None)

    def close(self) -> None:
        """End the threads after their current tasks. Queued tasks are cancelled."""
        self._thread.shutdown(cancel_futures=True)
        self._reader.shutdown(cancel_futures=True)

    def _load(
        self, adapter: Adapter, packed: PackedLora | None, slot: int, pages: list[int], launched: torch.Event | None
    ) -> PackedLora:
        if packed is None:
            if adapter not in self._folders:
                raise ParameterError("adapter", "still be loaded: it was unloaded before this request was served", adapter.name)
            folder, facts = self._folders[adapter]
            packed, found = self._read(folder)
            if found != facts:
                raise _changed(adapter)
        borrows = packed.borrows
        if packed.rescales:
            self._rescaled[adapter] = (packed, slot, pages)
        self._write(packed, slot, pages, launched)
        if borrows and not self._is_unchanged(adapter):
            raise _changed(adapter)
        return packed

    def _launched(self) -> torch.Event | None:
        """An event after what the engine has launched, such as steps that may read memory that is overwritten."""
        if self._stream is None:
            return None
        launched = torch.Event("cuda")
        launched.record(torch.cuda.current_stream(self.memory.device))
        return launched

    def _write(self, packed: PackedLora, slot: int, pages: list[int], launched: torch.Event | None) -> None:
        """Copy an adapter to the device, as the weights are now. Called in the loading thread."""
        if self._stream is None:
            self.memory.rescale(packed)
            self.memory.write(packed, slot, pages)
            return
        with torch.cuda.stream(self._stream):
            assert launched is not None
            launched.wait(self._stream)
            self.memory.rescale(packed)
            self.memory.write(packed, slot, pages)
        self._stream.synchronize()

    def _is_unchanged(self, adapter: Adapter) -> bool:
        """Whether nobody has overwritten the files of an adapter, from which its matrices may be mapped. Removed files count as
        unchanged, because they exist as long as they are mapped."""
        folder, facts = self._folders.get(adapter, (None, ()))
        try:
            return folder is None or file_facts(folder) == facts
        except FileNotFoundError:
            return True

    def _keep(self, adapter: Adapter, packed: PackedLora) -> None:
        """Put an adapter into the host tier. While the tier is above its budget, drop others that can be read again."""
        self._host[adapter] = packed
        if packed.borrows:
            # copied in another thread: the first token can be computed from the mapped file, and need not wait for this
            self._reader.submit(packed.own, partial(self._is_unchanged, adapter))
        total = sum(each.num_bytes for each in self._host.values())
        for other in [*self._host]:
            if total <= self._host_bytes:
                break
            if other is not adapter and other in self._folders:
                total -= self._host.pop(other).num_bytes


def _outcome(load: Future[PackedLora]) -> str | None:
    """The outcome of a load: None while it runs, "" if it has succeeded, and otherwise why it has failed."""
    if not load.done():
        return None
    error = load.exception()
    return "" if error is None else str(error) or type(error).__name__


def _refusal(outcomes: Iterable[str]) -> str:
    """The first rank that has failed, and why; "" if none has."""
    return next((f"rank {rank} refuses it: {why}" for rank, why in enumerate(outcomes) if why), "")


def _changed(adapter: Adapter) -> ParameterError:
    return ParameterError("adapter", "be loaded again, because its files have changed", adapter.name)


def _refused(name: str, refusal: str) -> ParameterError:
    return ParameterError("adapter", f"be one that every rank can load ({refusal})", name)
