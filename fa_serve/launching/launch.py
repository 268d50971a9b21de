"""Launching a compiled kernel without asking Triton's JIT again, to save most of the time that a launch takes on the host.

`kernel[grid](...)` derives a key from every argument at each call. With thirty arguments or with tensor descriptors this takes
tens of microseconds. Here the caller states what may change the machine code, and a plan keeps a `Launch`, which knows
everything except addresses and goes straight to the driver. Addresses are passed as numbers, so Triton's launcher does not ask
the driver about them, and a tensor descriptor is encoded once for each address.

The first launch of each kind goes through the JIT, which compiles, specialises and checks as usual. When a profiler has asked
Triton to report launches, a launch goes through Triton's own launcher, which makes the report. Within `compiling_in_threads` a
first launch does not wait for the compiler: it raises, and a thread compiles. This module leaves out what a kernel's arguments
are and when they may be reused; see `plans`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from math import gcd
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.driver import driver

from fa_serve.launching.carveout import prefer_shared_memory
from fa_serve.launching.compilers import CompilerProcesses, CompilerThreads
from fa_serve.launching.jit_hooks import show_constants_as_text
from fa_serve.launching.sizes import power_of_2 as power_of_2

# The arguments of Triton's compiled launcher are private to Triton. They were read in the source of these releases; with other
# releases, kernels are launched through the documented interface.
_FLAT_ARGUMENTS = triton.__version__.startswith("3.6.")
_HAS_KNOWN_LAUNCHER = _FLAT_ARGUMENTS or triton.__version__.startswith(("3.7.", "3.8.", "3.9."))
WGMMA_OF_8_COLUMNS = not triton.__version__.startswith(("3.6.", "3.7."))
"""Whether Triton computes products of 8 columns by wgmma on Hopper. Earlier releases do so from 16 columns on."""
MMA_SYNC: dict[str, Any] = {"arch": "sm89"}
"""An option of a launch: Triton runs its passes for sm89, whose products are mma.sync. PTX and machine code are nevertheless
made for the GPU itself."""
_RUNTIME = triton.knobs.runtime
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""`torch.cuda.current_device` without the three calls that first initialise CUDA: a process that has a tensor on a GPU has done
that already. PyTorch for CPUs lacks this function."""
FUSED = {"enable_fp_fusion": True}
"""An option of every launch: a product and a sum become one instruction. Triton 3.9 warns that its default will change."""
_MAX_ENCODED = 256  # addresses that a view keeps descriptors for
_MAX_COMPILED = 4096
_UNCHANGED = nullcontext()


@lru_cache(maxsize=64)
def multiprocessors(device: torch.device, otherwise: int) -> int:
    """Multiprocessors of a GPU (compute units on ROCm). On a CPU, where a kernel is interpreted or compiled for another
    machine, `otherwise`."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else otherwise


def launch_options(pdl: bool, num_warps: int) -> dict[str, Any]:
    """Triton's options of a launch. With `pdl` the kernel starts while the previous kernel drains, and waits for the results
    of that kernel with `primitives.wait_for_previous_kernel`."""
    return {"num_warps": num_warps, **({"launch_pdl": True} if pdl else {})}


def mma_sync_on_sm100(arch: int) -> dict[str, Any]:
    """Options of a kernel that Triton 3.6 does not compile for sm100, where its passes for tensor memory fail. 3.7 and 3.8 were
    not tried."""
    return MMA_SYNC if arch in (100, 103) and triton.__version__.startswith(("3.6.", "3.7.", "3.8.")) else {}


def with_unit_stride(x: Tensor) -> Tensor:
    """A tensor whose last dimension is contiguous, as kernels read it: x itself, or a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def row_strides(x: Tensor) -> tuple[int, ...]:
    """Strides of (batch or page, token, head); 0 for the first if the tensor is packed."""
    return (0, *x.stride()[:2]) if x.dim() == 3 else x.stride()[:3]


def broadcast_strides(x: Tensor | None) -> tuple[int, ...]:
    """Strides of a tensor of 4 dimensions that is broadcast along those of size 1; zeros for None."""
    if x is None:
        return (0, 0, 0, 0)
    return tuple([0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)])


class View(dict[int, tuple[Any, ...]]):
    """How a kernel sees a tensor through the copy engine: everything that Gluon's TensorDescriptor holds besides `base`.

    As a dictionary it maps an address to what a launch passes for it: the encoded descriptor, the shape and the strides.
    """

    def __init__(self, shape: Sequence[int], strides: Sequence[int], block_shape: Sequence[int], layout: Any) -> None:
        self.shape = shape
        self.strides = strides
        self.block_shape = block_shape
        self.layout = layout
        self.metadata: dict[str, Any] = {}  # how to encode it; all kernels that take this view agree on it

    def __missing__(self, address: int) -> tuple[Any, ...]:
        """Encode as Triton's `make_tensordesc_arg` does, with its order of arguments: rows out of bounds read as zero."""
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

        if len(self) >= _MAX_ENCODED:
            self.clear()
        utils = driver.active.utils
        encode = utils.fill_tma_descriptor if _FLAT_ARGUMENTS else utils.fill_tma_descriptor_tiled
        encoded = encode(
            address,
            self.metadata["swizzle"],
            self.metadata["elem_size"],
            TMA_DTYPE_DEVICE_TO_HOST[self.metadata["elem_type"]],
            self.metadata["block_size"],
            self.shape,
            self.strides,
            0,
        )
        return self.setdefault(address, (encoded, *self.shape, *self.strides))


class _Driver:
    """A compiled kernel on one device, in the form that Triton's launcher takes after its checks.

    native:    the compiled launcher: (grid, stream, *fixed, *arguments) in release 3.6, which has one for each kernel;
               (grid, stream, *fixed, arguments) since 3.7, which has one for all kernels
    fixed:     the arguments that do not belong to the kernel: its function, two switches, scratch memory, metadata, hooks, and
               since 3.7 the types of its arguments
    metadata:  how each tensor descriptor is encoded
    stream_of: returns the current stream of a device
    """

    __slots__ = ("device", "fixed", "metadata", "native", "stream_of")

    def __init__(
        self,
        native: Callable[..., None],
        fixed: tuple[Any, ...],
        metadata: Sequence[dict[str, Any]],
        stream_of: Callable[[int], int],
        device: int,
    ) -> None:
        self.native = native
        self.fixed = fixed
        self.metadata = metadata
        self.stream_of = stream_of
        self.device = device


_COMPILED: dict[tuple[Any, ...], tuple[Any, _Driver | None]] = {}
"""Compiled kernels by everything that their machine code depends on. Launches of different plans share them, so a new plan for
other lengths does not go through the JIT."""

_COMPILING: dict[tuple[Any, ...], triton.FutureKernel] | None = None
"""The kernels that threads compile, by the same keys; None outside of `compiling_in_threads`."""


class NotCompiledError(BaseException):
    """A launch did not take place, because a thread is still compiling its kernel.

    It is not an Exception, so that no handler on its way, such as one in a model's code, mistakes it for a failure.

    compiled: is done when the kernel exists or could not be compiled
    """

    def __init__(self, compiled: Future[Any]) -> None:
        super().__init__("the kernel of a launch is being compiled")
        self.compiled = compiled


@contextmanager
def compiling_in_threads(count: int, processes: CompilerProcesses | None = None) -> Iterator[None]:
    """Within this context the launch of a kernel that is not compiled yet raises NotCompiledError, and one of `count` threads
    compiles the kernel, or has one of the processes do it.

    Because the launch raises, no later work reads what the kernel would have written. The caller repeats its computation from
    the beginning. At the end of the context, compilations that have not begun are cancelled, and the others are waited for.
    Left out: launches that go through the JIT each time, which wait for the compiler.
    """
    global _COMPILING
    threads = CompilerThreads(count, processes, finish=_make_launcher)
    # a launch raises the error of its kernel, so the mode need not raise it once more
    with threads, triton.AsyncCompileMode(threads, ignore_errors=True):
        _COMPILING = {}
        try:
            yield
        finally:
            _COMPILING = None
            threads.cancel()


def _make_launcher(kernel: Any) -> None:
    """Triton 3.6 builds a kernel's launcher in C, and keeps it on disk."""
    if _HAS_KNOWN_LAUNCHER:
        driver.active.launcher_cls(kernel.src, kernel.metadata)


class Launch:
    """`kernel(*tensors, *late, *varying, *strides, *fixed)` in a grid of one dimension, for calls that differ only in
    addresses.

    late:    integers that are given at each call; the kernel declares them `do_not_specialize`, or the JIT puts them into the
             same classes at each call (see `strides`)
    varying: integers that the kernel declares `do_not_specialize`, and floats: always of the same type, below 2^31
    strides: integers that the JIT classes by whether they are 1 or multiples of 16, and by their width
    fixed:   everything else that the machine code may depend on: other integers by value, then constexprs
    views:   one for each of the first tensors, which the kernel takes as descriptors, or None where the kernel takes None;
             their addresses are aligned
    prefers_shared_memory: several programs run on a multiprocessor at once, for whose shared memory it should make room (see
             `carveout`)
    """

    __slots__ = (
        "_driver",
        "_fixed",
        "_grid",
        "_kernel",
        "_numbers",
        "_options",
        "_prefers_shared_memory",
        "_strides",
        "_views",
    )

    def __init__(
        self,
        kernel: Any,
        grid: int,
        varying: Sequence[float],
        fixed: Sequence[Any],
        options: dict[str, Any],
        strides: Sequence[int] = (),
        views: Sequence[View | None] = (),
        *,
        prefers_shared_memory: bool = False,
    ) -> None:
        show_constants_as_text(kernel)
        self._kernel = kernel
        self._prefers_shared_memory = prefers_shared_memory
        self._grid = (grid, 1, 1)
        self._options = {**FUSED, **options}
        self._views = views
        self._numbers = (*varying, *strides, *fixed)
        self._strides = strides
        self._fixed = fixed
        self._driver: _Driver | None = None

    def __call__(self, tensors: Sequence[Tensor | None], *late: int) -> None:
        """Run on the tensors' device and its current stream. The first tensor is never None.

        The JIT classes a tensor by its dtype, its presence and whether its address is a multiple of 16, which allocations are.
        A call with any other address goes through the JIT each time. Presence and dtypes are those of this launch's first call.
        """
        known = self._driver
        first: Any = tensors[0]
        if known is None or not first.get_device() == known.device == current_device() or is_watched():
            self._launch_first(tensors, late)
            return
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        if gcd(16, *addresses) == 16:
            self._send(known, addresses, late)
        else:
            self._jit(tensors, late)

    def _launch_first(self, tensors: Sequence[Tensor | None], late: tuple[int, ...]) -> None:
        """Every launch that does not go straight to the driver: on a CPU, on another device, unaligned, watched, or the
        first."""
        first: Any = tensors[0]
        if not first.is_cuda:
            self._jit(tensors, late)
            return
        device = first.get_device()
        if device != current_device():
            with torch.cuda.device(device):
                self._launch_first(tensors, late)
            return
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        if gcd(16, *addresses) < 16:
            self._jit(tensors, late)
            return
        key = self._compiled_key(device, tensors, late)
        compiled, known = _COMPILED.get(key, (None, None))
        if compiled is None and _COMPILING is not None:
            compiled = self._compile_in_thread(_COMPILING, key, tensors, late)
            known = self._remember(key, compiled, device)
        if compiled is None:
            self._remember(key, self._jit(tensors, late), device)
        elif known is None or is_watched():
            compiled[self._grid](*self._arguments(tensors, late))
        else:
            for view, metadata in zip((view for view in self._views if view is not None), known.metadata, strict=True):
                view.metadata = metadata
            self._driver = known  # another thread may use it from here on, so the views are complete
            self._send(known, addresses, late)

    def _compile_in_thread(
        self,
        compiling: dict[tuple[Any, ...], triton.FutureKernel],
        key: tuple[Any, ...],
        tensors: Sequence[Tensor | None],
        late: tuple[int, ...],
    ) -> Any:
        """The compiled kernel. Raises NotCompiledError while a thread compiles it, and later what its compilation raised."""
        kernel = compiling.get(key)
        if kernel is None:
            kernel = self._kernel.warmup(*self._arguments(tensors, late), grid=self._grid, **self._options)
            if not isinstance(kernel, triton.FutureKernel):
                return kernel  # the JIT has it
            compiling[key] = kernel
        future = kernel.future  # Triton 3.9 sets it to None when another launch has taken the result
        if future is not None and not future.done():
            raise NotCompiledError(future)
        return kernel.result()

    def _remember(self, key: tuple[Any, ...], compiled: Any, device: int) -> _Driver | None:
        if len(_COMPILED) >= _MAX_COMPILED:
            _COMPILED.clear()
        known = _driver_of(compiled, device)
        if self._prefers_shared_memory:
            prefer_shared_memory(compiled.function)
        _COMPILED[key] = compiled, known
        return known

    def _compiled_key(self, device: int, tensors: Sequence[Tensor | None], late: tuple[int, ...]) -> tuple[Any, ...]:
        """Everything that the machine code depends on."""
        dtypes = tuple([None if x is None else x.dtype for x in tensors])
        classes = tuple([1 if n == 1 else (n % 16 == 0, n >= 1 << 31) for n in (*late, *self._strides)])
        return (id(self._kernel), device, dtypes, classes, tuple(self._fixed), tuple(self._options.values()))

    def _jit(self, tensors: Sequence[Tensor | None], late: tuple[int, ...]) -> Any:
        return self._kernel[self._grid](*self._arguments(tensors, late), **self._options)

    def _arguments(self, tensors: Sequence[Tensor | None], late: tuple[int, ...]) -> list[Any]:
        arguments = [*tensors, *late, *self._numbers]
        if self._views:
            from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

            for i, view in enumerate(self._views):
                arguments[i] = None
                if view is not None:
                    arguments[i] = TensorDescriptor(tensors[i], view.shape, view.strides, view.block_shape, view.layout)
        return arguments

    def _send_flat(self, known: _Driver, addresses: list[Any], late: tuple[int, ...]) -> None:
        """Send as Triton 3.6 does: the arguments of the kernel follow those of the launcher."""
        if self._views:
            addresses = self._encode(addresses)
        known.native(*self._grid, known.stream_of(known.device), *known.fixed, *addresses, *late, *self._numbers)

    def _send_packed(self, known: _Driver, addresses: list[Any], late: tuple[int, ...]) -> None:
        """Send as Triton 3.7 and later do: the arguments of the kernel are one argument of the launcher."""
        if self._views:
            addresses = self._encode(addresses)
        known.native(*self._grid, known.stream_of(known.device), *known.fixed, (*addresses, *late, *self._numbers))

    _send = _send_flat if _FLAT_ARGUMENTS else _send_packed

    def _encode(self, addresses: list[Any]) -> list[Any]:
        """The addresses, the first of them replaced by encoded descriptors where the kernel takes tensor descriptors."""
        flat: list[Any] = []
        for view, address in zip(self._views, addresses, strict=False):
            flat += (None,) if view is None else view[address]
        return flat + addresses[len(self._views) :]


def _driver_of(compiled: Any, device: int) -> _Driver | None:
    """What Triton does after its checks, without the encoding and the hooks; None if its launcher is not a known one."""
    run = compiled.run
    if getattr(run, "gsan_enabled", False):
        return None  # Triton's sanitizer adds arguments
    if not _HAS_KNOWN_LAUNCHER or not hasattr(run, "launch_pdl") or run.global_scratch_size or run.profile_scratch_size:
        return None
    native = run.launch
    metadata: Sequence[dict[str, Any]] = ()
    if getattr(native, "__closure__", None):
        inner = dict(zip(native.__code__.co_freevars, (cell.cell_contents for cell in native.__closure__), strict=True))
        if not {"launcher", "tensordesc_meta"} <= inner.keys() or None in inner["tensordesc_meta"]:
            return None
        native = inner["launcher"]
        metadata = inner["tensordesc_meta"]
    switches = (compiled.function, run.launch_cooperative_grid, run.launch_pdl)
    no_scratch = (None, None)
    no_hooks = (None, None, None)  # no hooks, and no metadata for them
    fixed: tuple[Any, ...]
    if _FLAT_ARGUMENTS:
        fixed = (*switches, *no_scratch, compiled.packed_metadata, *no_hooks)
    else:
        fixed = (*switches, compiled.packed_metadata, *no_hooks, *no_scratch, run.arg_annotations, run.kernel_signature)
    return _Driver(native, fixed, metadata, driver.active.get_current_stream, device)


def is_watched() -> bool:
    """Whether a profiler has asked Triton to report launches."""
    enter = _RUNTIME.launch_enter_hook
    leave = _RUNTIME.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class DescriptorLaunch:
    """`kernel(*arguments, *numbers)` through the JIT at each call, because its tensor descriptors hold addresses."""

    __slots__ = ("_grid", "_kernel", "_numbers", "_options")

    def __init__(self, kernel: Any, grid: int, numbers: tuple[Any, ...], options: dict[str, Any]) -> None:
        show_constants_as_text(kernel)
        self._kernel = kernel
        self._grid = grid
        self._numbers = numbers
        self._options = {**FUSED, **options}

    def __call__(self, arguments: Sequence[Any]) -> None:
        with on_device_of(arguments[0]):
            self._kernel[self._grid,](*arguments, *self._numbers, **self._options)


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """A context in which the device of x is current. Triton launches on the current device, wherever the tensors are, and the
    layers of a model may be spread over several devices."""
    return torch.cuda.device(x.device) if x.is_cuda and x.get_device() != current_device() else _UNCHANGED
