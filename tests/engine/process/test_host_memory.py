"""Freed memory goes back to the system, and caches are bounded: separate processes allocate, free, and look."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from warm_processes import warm_program

from fa_serve.engine.process import host_memory
from fa_serve.engine.process.host_memory import GROWTH, MemoryTrimmer

BURST = """
import ctypes, runpy, sys, threading
module = runpy.run_path(sys.argv[1])  # without the rest of the engine
resident_bytes = module["resident_bytes"]
if "arenas" in sys.argv:
    module["limit_host_memory"]()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
trimmer = module["MemoryTrimmer"]()
trimmer.look()
calm = resident_bytes()
barrier = threading.Barrier(8)
def burst():
    barrier.wait()
    blocks = [libc.malloc(4096) for _ in range(2000)]
    for block in blocks:
        ctypes.memset(block, 1, 4096)
    barrier.wait()
    kept = blocks[-1]  # the end of the arena stays in use, so free() returns nothing
    for block in blocks[:-1]:
        libc.free(block)
threads = [threading.Thread(target=burst) for _ in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
peak = resident_bytes()
if "trim" in sys.argv:
    assert trimmer.look()
print(calm >> 20, peak >> 20, resident_bytes() >> 20, open("/proc/self/maps").read().count(" ---p 00000000 00:00 0"))
"""


def burst(*arguments: str) -> list[int]:
    """MiB that are resident before a burst of 62 MiB on eight threads, after it, and after a trim; and the reserved ranges."""
    command = [sys.executable, "-c", BURST, host_memory.__file__, *arguments]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [int(each) for each in printed.split()]


CYCLE = """
import gc, runpy, sys
module = runpy.run_path(sys.argv[1])
trimmer = module["MemoryTrimmer"]()
trimmer.look()
calm = module["resident_bytes"]()
gc.disable()  # as between two full collections
def refuse(body):
    try:
        raise ValueError("too long")
    except ValueError as error:
        body.append(error)  # its traceback refers to this frame, and so to the body
refuse([b"x" * (64 << 20)])
peak = module["resident_bytes"]()
assert trimmer.look()
print(calm >> 20, peak >> 20, module["resident_bytes"]() >> 20)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc and /proc")
def test_a_body_that_an_exception_refers_to_is_given_back() -> None:
    command = [sys.executable, "-c", CYCLE, host_memory.__file__]
    calm, peak, kept = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert peak >= calm + 60
    assert kept < calm + 12


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc and /proc")
def test_a_burst_is_given_back() -> None:
    _, peak, kept, _ = burst()
    assert kept > peak - 8, "malloc keeps what is freed"
    calm, peak, kept, _ = burst("trim")
    assert peak > calm + 50
    assert kept < calm + 12


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc and /proc")
def test_threads_share_few_arenas() -> None:
    assert burst("arenas")[3] < burst()[3]


def test_what_an_operator_has_set_is_kept(monkeypatch) -> None:
    monkeypatch.setattr(host_memory.os, "environ", environ := {"MALLOC_ARENA_MAX": "7", "LRU_CACHE_CAPACITY": "5"})
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda _: pytest.fail("mallopt must not be called"))
    host_memory.limit_host_memory()
    assert environ == {"MALLOC_ARENA_MAX": "7", "LRU_CACHE_CAPACITY": "5", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}


PRODUCTS = """
import runpy, sys
import torch
module = runpy.run_path(sys.argv[1])
if "limit" in sys.argv:
    module["limit_host_memory"]()
weights = [torch.ones(256, columns, dtype=torch.bfloat16) for columns in (64, 128, 192, 256)]
with torch.inference_mode():
    for weight in weights:
        torch.nn.functional.linear(torch.ones(1, weight.shape[1], dtype=torch.bfloat16), weight)
    calm = module["resident_bytes"]()
    for rows in range(2, 100):
        for weight in weights:
            torch.nn.functional.linear(torch.ones(rows, weight.shape[1], dtype=torch.bfloat16), weight)
module["MemoryTrimmer"]().look()
print(module["resident_bytes"]() - calm >> 20)
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs a torch with oneDNN")
def test_batches_of_many_sizes_do_not_fill_the_memory(monkeypatch) -> None:
    """392 shapes. Without the bound they took 100 to 210 MB."""
    for name in host_memory.SHAPE_CACHES:
        monkeypatch.delenv(name, raising=False)
    kept = []
    for arguments in ([], ["limit"]):
        with warm_program(PRODUCTS, host_memory.__file__, *arguments) as process:
            kept.append(int(process.stdout.read()))
    print(kept)
    if kept[0] < 60:
        pytest.skip("this processor needs no prepared products")
    assert kept[1] < kept[0] / 2


def test_only_a_process_that_has_grown_is_trimmed(monkeypatch) -> None:
    collected = []
    monkeypatch.setattr(host_memory, "gc", SimpleNamespace(collect=lambda: collected.append(resident)))
    resident = 100 << 20
    monkeypatch.setattr(host_memory, "resident_bytes", lambda: resident)
    trimmer = MemoryTrimmer()
    assert trimmer.look(), "the first look finds out the least"
    assert not trimmer.look()
    resident += GROWTH
    assert trimmer.look()
    assert trimmer.look(), "what is in use now may be free at the next look"
    resident -= 50 << 20
    assert not trimmer.look()
    resident += GROWTH
    assert trimmer.look(), "the least is that of the last look"
    assert len(collected) == 4


def test_a_process_has_one_trimmer(monkeypatch) -> None:
    """Each looks by itself and collects all garbage. With one for each server that a process has had, nothing else runs.

    The one of this test ends with it: it would collect the garbage of all later tests, every few seconds.
    """
    ended = threading.Event()
    monkeypatch.setattr(MemoryTrimmer, "_runs", threading.Event())
    monkeypatch.setattr(MemoryTrimmer, "_run", lambda _: ended.wait())
    before = [thread.name for thread in threading.enumerate()].count("fa_serve-trim")
    for _ in range(3):
        MemoryTrimmer().start()
    [own] = [thread for thread in threading.enumerate() if thread.name == "fa_serve-trim"][before:]
    assert MemoryTrimmer._runs.is_set()
    ended.set()
    own.join(10)


def test_no_collection_runs_while_modules_are_imported():
    """In a process of fa_serve, the modules stay out of later collections as well."""
    with host_memory.importing(freeze=True):
        assert not gc.isenabled()
        imported = []
    assert gc.isenabled()
    assert not visited(imported)
    gc.disable()
    try:
        with host_memory.importing(freeze=False):
            made = []
        assert not gc.isenabled(), "the caller's choice stays"
        assert visited(made), "what a program has made itself can be freed"
    finally:
        gc.enable()


def visited(made: list) -> bool:
    """Whether the garbage collector visits an object. The number of frozen ones says nothing: other threads free some."""
    return any(each is made for each in gc.get_objects())
