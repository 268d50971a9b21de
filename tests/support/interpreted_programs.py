"""Runs the programs of one launch side by side in Triton's interpreter, in any order, and finds what they do not wait for.

    with programs_together(seed, x, counters, buffers):     # the memory that programs share and write
        launch(...)

The interpreter runs one program after the other, so that a program which waits for a later one never ends. Here each program is
a thread, and one of them runs at a time: at each atomic operation the next one is drawn by the seed. So a run can be repeated,
and many seeds are many orders of arrival.

An error does not depend on the order in which it would show. Each access is compared with those of other programs by vector
clocks (Lamport 1978; FastTrack, Flanagan and Freund 2009): an atomic operation with release semantics hands the clock of its
program on, one with acquire semantics takes it over. Two accesses to an address of which one writes, and which no such chain
orders, raise DataRaceError, even if they came in the right order by chance. If every program polls and nobody writes any more,
DeadlockError is raised.

A load that is volatile is a poll as well, of words that say themselves whether they are there (`words.py`). It hands
nothing on, and such words are not among the memory that is given here.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from triton.runtime import interpreter

_GRANULE = 2
"""Bytes of the smallest number that programs share."""
_LOOKS = 3
"""How often a program may read the same words without waiting: queries, those that they are rotated with, and again."""


class DataRaceError(Exception):
    """Two programs access an address, one of them writes, and neither waits for the other."""


class DeadlockError(Exception):
    """All programs that have not ended wait."""


class _Clocks:
    """The vector clocks of programs and atomics, and who has accessed each address when."""

    def __init__(self, programs: int, shared: tuple[torch.Tensor, ...]) -> None:
        self.programs = programs
        self.of = numpy.zeros((programs, programs), numpy.int64)
        numpy.fill_diagonal(self.of, 1)
        self.handed_on: dict[int, numpy.ndarray] = {}
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in shared}
        self.starts = numpy.array(sorted(storages), numpy.int64)
        sizes = numpy.array([storages[start] for start in self.starts.tolist()], numpy.int64)
        self.ends = self.starts + sizes
        self.firsts = numpy.concatenate([[0], numpy.cumsum(-(-sizes // _GRANULE))])
        cells = int(self.firsts[-1])
        # when each program has read, written and changed each cell last; 0 for never
        self.seen = {kind: numpy.zeros((programs, cells), numpy.int64) for kind in ("read", "write", "atomic")}

    def cells(self, addresses: Any) -> Any:
        """The numbers of the cells of these addresses that are shared."""
        addresses = addresses.astype(numpy.int64).ravel()
        owner = numpy.searchsorted(self.starts, addresses, side="right") - 1
        inside = (owner >= 0) & (addresses < self.ends[owner])
        owner = owner[inside]
        return self.firsts[owner] + (addresses[inside] - self.starts[owner]) // _GRANULE

    def access(self, program: int, kind: str, addresses: Any) -> None:
        """Note an access, and raise DataRaceError unless all accesses that it conflicts with are known to this program."""
        cells = self.cells(addresses)
        conflicts = {"read": ("write", "atomic"), "write": ("read", "write", "atomic"), "atomic": ("read", "write")}[kind]
        for other in conflicts:
            late = self.seen[other][:, cells] > self.of[program][:, None]
            late[program] = False
            if late.any():
                who = int(late.any(1).argmax())
                raise DataRaceError(f"a {kind} of program {program} meets a {other} of program {who}")
        self.seen[kind][program, cells] = self.of[program, program]

    def synchronise(self, program: int, address: int, sem: str) -> None:
        if sem in ("acquire", "acq_rel") and address in self.handed_on:
            self.of[program] = numpy.maximum(self.of[program], self.handed_on[address])
        if sem in ("release", "acq_rel"):
            before = self.handed_on.get(address, numpy.zeros(self.programs, numpy.int64))
            self.handed_on[address] = numpy.maximum(before, self.of[program])
            self.of[program, program] += 1


class _Turns:
    """Which program runs. The others wait until they are drawn."""

    def __init__(self, programs: int, seed: int) -> None:
        self._draw = random.Random(seed)
        self._condition = threading.Condition()
        self._live = set(range(programs))
        self._polled: Counter[tuple[int, int]] = Counter()
        self._stuck: set[int] = set()
        self._running = self._draw.choice(sorted(self._live))
        self.error: Exception | None = None

    def begin(self, program: int) -> None:
        with self._condition:
            self._wait(program)

    def _wait(self, program: int) -> None:
        self._condition.wait_for(lambda: self._running == program or self.error is not None, timeout=120)
        if self.error is not None:
            raise self.error

    def progress(self) -> None:
        """Something was written, for which others may have waited."""
        self._polled.clear()
        self._stuck.clear()

    def poll(self, program: int, address: int) -> None:
        """A program looks at a counter. If it does so again and again and nobody has written since, it waits for others."""
        self._polled[program, address] += 1
        if self._polled[program, address] > _LOOKS:
            self._stuck.add(program)
        if self._stuck >= self._live:
            raise DeadlockError(f"programs {sorted(self._live)} wait, and nobody writes")
        self.switch(program)

    def switch(self, program: int) -> None:
        with self._condition:
            self._running = self._draw.choice(sorted(self._live - self._stuck) or sorted(self._live))
            self._condition.notify_all()
            self._wait(program)

    def end(self, program: int, error: Exception | None) -> None:
        with self._condition:
            self._live.discard(program)
            if error is not None and self.error is None:
                self.error = error
            if self._live:
                self._running = self._draw.choice(sorted(self._live - self._stuck) or sorted(self._live))
            self._condition.notify_all()


class _Together:
    """What replaces the methods of the interpreter, for one context."""

    def __init__(self, seed: int, shared: tuple[torch.Tensor, ...], weakened: dict[str, str]) -> None:
        self.seed = seed
        self.shared = shared
        self.weakened = weakened
        self.local = threading.local()
        self.clocks: _Clocks | None = None
        self.turns: _Turns | None = None

    def launch(self, executor: Any, *arguments: Any, **options: Any) -> None:
        """Takes the place of GridExecutor.__call__, for tensors of the host and grids of one dimension."""
        names = inspect.getfullargspec(executor.fn).args
        options = {key: value for key, value in options.items() if key in names}
        host, keywords = executor._init_args_hst(arguments, options)
        scope = interpreter._patch_lang(executor.fn)
        try:
            given = inspect.getcallargs(executor.fn, *host, **keywords)
            given = {
                name: value if name in executor.constexprs else interpreter._implicit_cvt(value)
                for name, value in given.items()
            }
            programs = executor.grid[0]
            interpreter.interpreter_builder.set_grid_dim(programs, 1, 1)
            interpreter.interpreter_builder.set_grid_idx(0, 0, 0)
            self.clocks = _Clocks(programs, self.shared)
            self.turns = _Turns(programs, self.seed)
            threads = [threading.Thread(target=self._run, args=(program, executor.fn, given)) for program in range(programs)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if self.turns.error is not None:
                raise self.turns.error
        finally:
            self.clocks = None
            scope.restore()

    def _run(self, program: int, function: Any, given: dict[str, Any]) -> None:
        assert self.turns is not None
        self.local.program = program
        try:
            self.turns.begin(program)
            function(**given)
        except Exception as error:
            self.turns.end(program, _cause_of(error))
        else:
            self.turns.end(program, None)

    def replace(self, patch: pytest.MonkeyPatch) -> None:
        builder = interpreter.InterpreterBuilder
        load = builder.create_masked_load
        store = builder.create_masked_store
        change = builder.create_atomic_rmw

        def program_id(_: Any, axis: int) -> Any:
            number = self.local.program if axis == 0 else 0
            return interpreter.TensorHandle(numpy.array([number], dtype=numpy.int32), interpreter.tl.int32)

        def masked_load(own: Any, ptrs: Any, mask: Any, *others: Any) -> Any:
            assert self.clocks is not None
            assert self.turns is not None
            read = ptrs.data[numpy.asarray(mask.data, bool)]
            volatile = others[-1]
            if volatile and read.size:
                self.turns.poll(self.local.program, int(read.min()))
            self.clocks.access(self.local.program, "read", read)
            return load(own, ptrs, mask, *others)

        def masked_store(own: Any, ptrs: Any, value: Any, mask: Any, *others: Any) -> Any:
            assert self.clocks is not None
            assert self.turns is not None
            self.clocks.access(self.local.program, "write", ptrs.data[numpy.asarray(mask.data, bool)])
            self.turns.progress()
            return store(own, ptrs, value, mask, *others)

        def atomic(own: Any, kind: Any, ptr: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
            assert self.clocks is not None
            assert self.turns is not None
            program = self.local.program
            polls = not numpy.any(value.data)
            if polls:
                self.turns.poll(program, int(ptr.data.ravel()[0]))
            else:
                self.turns.switch(program)  # others may come first
            assert ptr.data.size == 1
            name = sem.name.lower()
            name = {"acquire_release": "acq_rel"}.get(name, name)
            self.clocks.access(program, "atomic", ptr.data)
            self.clocks.synchronise(program, int(ptr.data.ravel()[0]), self.weakened.get(name, name))
            result = change(own, kind, ptr, value, mask, sem, scope)
            if not polls:
                self.turns.progress()
            return result

        patch.setattr(builder, "create_get_program_id", program_id)
        patch.setattr(builder, "create_masked_load", masked_load)
        patch.setattr(builder, "create_masked_store", masked_store)
        patch.setattr(builder, "create_atomic_rmw", atomic)
        patch.setattr(interpreter.GridExecutor, "__call__", lambda grid, *args, **options: self.launch(grid, *args, **options))


def _cause_of(error: Exception) -> Exception:
    """The first error of a chain: the interpreter wraps what a kernel raises, once for each call."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


@contextlib.contextmanager
def programs_together(seed: int, *shared: torch.Tensor, weakened: dict[str, str] | None = None) -> Iterator[None]:
    """Launches inside run their programs side by side.

    shared:   what programs write
    weakened: a planted fault: semantics of atomic operations, and those that take their place, such as {"acq_rel": "relaxed"}
    """
    with pytest.MonkeyPatch.context() as patch:
        _Together(seed, shared, weakened or {}).replace(patch)
        yield
