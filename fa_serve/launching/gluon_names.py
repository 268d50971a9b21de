"""Functions of Gluon whose names depend on the release of Triton, under one name each.

Gluon is Triton's experimental layer, and its names change from release to release. Modules with kernels import from here what
has had more than one name in the releases of `hopper.RELEASES`; everything else they import from Gluon itself.

    sync_threads    3.6 `thread_barrier`, since 3.7 `barrier`: all threads of the partition wait for each other
    async_load      up to 3.7 `tma.async_copy_global_to_shared`: the copy engine starts a copy to shared memory
    copy_to_shared  up to 3.7 `async_copy.async_copy_global_to_shared`: threads start copies of 4 to 16 bytes to shared memory
    async_store     up to 3.7 `tma.async_copy_shared_to_global`: the copy engine starts a copy to global memory
    HAS_REINTERPRET whether the method of shared memory is called `reinterpret`; up to 3.8 it is `_reinterpret`
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

sync_threads = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
copy_to_shared = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
