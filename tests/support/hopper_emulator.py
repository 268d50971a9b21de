"""Runs the Python source of the Hopper kernel on a CPU, with threads for its warps.

On a GPU a wrong barrier shows only as a kernel that hangs; here it shows as an error.

    with emulated():
        out, lse = plan_forward(tensors, options)(tensors)      # CPU tensors; plan, tile table and kernel are the product's

Each partition of each resident thread block is a thread. Barriers count arrivals and bytes as mbarriers do. Matrix products
and copies to global memory read shared memory only when they are waited for, which is as late as the hardware may read it.
A copy from global memory first fills its destination with NaN. So a wrong phase is a deadlock or a wrong result, a stage that
is released too early is NaN, and a missing mask is a wrong value. Copies use the descriptors' real addresses, modulo 2^64
bytes, and the hardware's bounds. The emulator knows no layouts, registers or timing.

`faults` edits the source before it runs, because tests of the kernel are worth what they catch.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from float8_cases import quantize_inputs
from gluon_emulator import gated_values
from hopper_threads import (
    Barrier,
    Barriers,
    Block,
    EmulationError,
    Machine,
    NamedBarrier,
    ThreadCopies,
    current,
    start_product,
    wait_products,
    wait_stores,
)

from fa_serve.backends.hopper import block_sparse, shared_memory
from fa_serve.backends.hopper.backward import consumer as backward_consumer
from fa_serve.backends.hopper.backward import dq_accumulator as dq_accum
from fa_serve.backends.hopper.backward import plan as backward
from fa_serve.backends.hopper.backward import producer as backward_producer
from fa_serve.backends.hopper.backward import types as backward_types
from fa_serve.backends.hopper.backward.wide import kernel as wide_backward
from fa_serve.backends.hopper.backward.wide import types as wide_types
from fa_serve.backends.hopper.backward.wide import warps as wide_warps
from fa_serve.backends.hopper.forward import (
    consumer,
    float8_probabilities,
    float8_scales,
    pack_gqa,
    producer,
    tile_scheduler,
    tiles,
    tree,
)
from fa_serve.backends.hopper.forward import kernel as forward_kernel
from fa_serve.backends.hopper.forward import output as forward_output
from fa_serve.backends.hopper.forward import plan as forward
from fa_serve.backends.hopper.forward import types as kernel_types
from fa_serve.backends.hopper.latent import (
    plan as latent_decode,
)
from fa_serve.backends.hopper.latent import (
    tiles as latent_tiles,
)
from fa_serve.backends.hopper.latent import (
    types as latent_types,
)
from fa_serve.backends.hopper.latent import (
    warps as latent_warps,
)
from fa_serve.backends.hopper.split_kv import combine as combine
from fa_serve.backends.hopper.split_kv import split as split_kv
from fa_serve.backends.hopper.split_kv import tile_scheduler as split_tile_scheduler
from fa_serve.backends.triton import mask_blocks, primitives, row_statistics, splits
from fa_serve.backends.triton.float8_inputs import BLOCK_KEYS
from fa_serve.launching.launch import Launch, View
from fa_serve.ops.elementwise import activation
from fa_serve.ops.moe import matrix_wgmma
from fa_serve.ops.products import row_invariant_few, row_invariant_wgmma
from fa_serve.ops.selected_keys import attention as selected_keys
from fa_serve.ops.selected_keys import gather_wgmma


def _as_tensor(x: Any) -> torch.Tensor:
    """torch.as_tensor, which takes a microsecond for a tensor as well."""
    return x if isinstance(x, torch.Tensor) else torch.as_tensor(x)


class _Shared:
    """A view of shared memory."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self.dtype = data.dtype

    def index(self, i: Any) -> _Shared:
        return _Shared(self.data[int(i)])

    def reshape(self, shape: list[int]) -> _Shared:
        return _Shared(self.data.view(shape))

    def permute(self, order: tuple[int, ...]) -> _Shared:
        return _Shared(self.data.permute(order))

    def slice(self, start: int, length: int, dim: int) -> _Shared:
        return _Shared(self.data.narrow(dim, start, length))

    def reinterpret(self, dtype: torch.dtype, shape: list[int], layout: object) -> _Boxes:
        return _Boxes(self.data, shape)

    def store(self, value: torch.Tensor) -> None:
        self.data.copy_(value)

    def load(self, layout: object) -> torch.Tensor:
        return self.data.clone()


class _Boxes:
    """A ring (stages, rows, columns), with any dimensions of size 1, as boxes of some rows by up to 64 columns. All rows of the
    first 64 columns come first."""

    def __init__(self, ring: torch.Tensor, shape: list[int]) -> None:
        self.ring = ring.view(ring.shape[0], -1, ring.shape[-1])
        self.count = shape[0]
        self.box = shape[1:]
        self.rows = shape[1] if len(shape) == 3 else shape[-3]
        self.columns = shape[-1]
        if ring.numel() != torch.Size(shape).numel():
            raise EmulationError(f"{shape} is not the memory of {tuple(ring.shape)}")

    def index(self, i: Any) -> _Shared:
        stage, rest = divmod(int(i), self.count // self.ring.shape[0])
        chunk, box = divmod(rest, self.ring.shape[1] // self.rows)
        data = self.ring[stage, box * self.rows : (box + 1) * self.rows].chunk(self.ring.shape[2] // self.columns, 1)[chunk]
        return _Shared(data if len(self.box) == 2 else data[None, None, :, None, :])


class _Pointer:
    """memory: what lies from the tensor's first element on, whatever its strides are"""

    def __init__(self, data: torch.Tensor, offset: Any = 0, memory: torch.Tensor | None = None) -> None:
        self.data = data
        self.offset = offset
        if memory is None:
            memory = torch.empty(0, dtype=data.dtype).set_(data.untyped_storage())[data.storage_offset() :]
        self.memory = memory
        self.dtype = types.SimpleNamespace(element_ty=data.dtype)

    def __add__(self, offset: Any) -> _Pointer:
        return _Pointer(self.data, self.offset + offset, self.memory)

    def load(self, mask: Any = None, other: Any = 0) -> torch.Tensor:
        offset = _as_tensor(self.offset)
        if mask is None:
            return self.memory[offset].clone()
        return torch.where(mask, self.memory[torch.where(mask, offset, 0)], other)

    def store(self, value: Any, mask: Any = None) -> None:
        offset = _as_tensor(self.offset)
        value = torch.as_tensor(value).to(self.memory.dtype)
        if mask is None:
            self.memory[offset] = value
        else:
            offset, value, mask = torch.broadcast_tensors(offset, value, mask)
            self.memory[offset[mask].long()] = value[mask]

    def add(self, value: Any) -> torch.Tensor:
        old = self.load()
        self.memory.index_put_((_as_tensor(self.offset),), torch.as_tensor(value, dtype=self.memory.dtype), accumulate=True)
        return old


class _Copy:
    """A tensor descriptor: 64-bit addresses, and a bound for each coordinate, as in the copy engine."""

    def __init__(self, base: torch.Tensor, view: View) -> None:
        self.base = base
        self.view = view
        self.dtype = base.dtype
        self.layout = None
        self.block_type = types.SimpleNamespace(shape=list(self.view.block_shape))
        storage = base.untyped_storage()
        self.memory = torch.empty(0, dtype=self.dtype).set_(storage)

    def _start(self, corner: list[Any]) -> int:
        """Where the corner lies in memory, which need not have it."""
        d = self.view
        itemsize = self.base.element_size()
        for size, stride in zip(d.shape, d.strides, strict=True):
            if size <= 0 or not 0 <= stride * itemsize < 1 << 40:
                raise EmulationError(f"a descriptor cannot have {size} and stride {stride}")
        if self.base.data_ptr() % 16:
            raise EmulationError("an address must be a multiple of 16 bytes")
        if any(stride * itemsize % 16 for stride in d.strides[:-1]):
            raise EmulationError(f"strides must be multiples of 16 bytes, got {d.strides}")
        start = self.base.storage_offset() + sum(int(at) * stride for at, stride in zip(corner, d.strides, strict=True))
        return start % ((1 << 64) // itemsize)

    def _whole(self, corner: list[Any]) -> torch.Tensor | None:
        """The numbers of a copy as a view, if its bounds cut nothing off."""
        d = self.view
        start = self._start(corner)
        if not all(0 <= int(at) <= size - extent for at, extent, size in zip(corner, d.block_shape, d.shape, strict=True)):
            return None
        last = start + sum((extent - 1) * stride for extent, stride in zip(d.block_shape, d.strides, strict=True))
        if last >= self.memory.numel():
            raise EmulationError("a copy inside its bounds reaches outside of the tensor")
        return self.memory.as_strided(d.block_shape, d.strides, start)

    def _cells(self, corner: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        d = self.view
        offset = torch.zeros((), dtype=torch.int64)
        inside = torch.tensor(True)
        for at, extent, size, stride in zip(corner, d.block_shape, d.shape, d.strides, strict=True):
            steps = torch.arange(extent)
            offset = offset[..., None] + steps * stride
            inside = inside[..., None] & (int(at) + steps >= 0) & (int(at) + steps < size)
        cells = offset + self._start(corner)
        if inside.any() and (int(cells[inside].min()) < 0 or int(cells[inside].max()) >= self.memory.numel()):
            raise EmulationError("a copy inside its bounds reaches outside of the tensor")
        return cells, inside

    def load(self, corner: list[Any], barrier: Barrier, target: _Shared) -> None:
        target.data.fill_(float("nan"))
        current.block.machine.jitter()
        whole = self._whole(corner)
        if whole is None:
            cells, inside = self._cells(corner)
            whole = torch.where(inside, self.memory[torch.where(inside, cells, 0)], 0)
        target.data.copy_(whole)
        barrier.complete(target.data.numel() * target.data.element_size())

    def store(self, corner: list[Any], source: _Shared) -> None:
        whole = self._whole(corner)
        cells, inside = self._cells(corner) if whole is None else (None, None)

        def run() -> None:
            if whole is None:
                self.memory[cells[inside]] = source.data[inside]
            else:
                whole.copy_(source.data)

        current.stores.append(run)


def _inline_assembly(text: str, operands: str, values: list[Any], **options: Any) -> Any:
    if "mul.f32" in text:  # rescales O for a new maximum
        assert (values[1] <= 1).all(), "a maximum that falls"
        return values[0] * values[1]
    if text.startswith("mov.b32"):
        return values[0]
    if "rcp.approx" in text:
        return 1 / values[0]
    if "tanh.approx" in text:  # with a relative error of up to 2^-11 of any sign
        return torch.tanh(values[0]) * (1 + 2**-11 * torch.sin(1e4 * values[0]))
    if "cvt.rn.satfinite.e4m3x2" in text:  # four numbers to an integer, the second pair in its lower half
        quarters = torch.stack([values[i].clamp(-448, 448).to(torch.float8_e4m3fn) for i in (2, 3, 0, 1)], -1)
        return quarters.view(torch.int32).squeeze(-1)
    if "prmt" in text:
        return values[0].view(torch.int16).unflatten(-1, (-1, 2)).flip(-1).flatten(-2).view(torch.int32)
    kind, number = re.match(r"bar\.(sync|arrive) (\d+), 256;", text).groups()  # type: ignore[union-attr]
    barrier = current.block.named.setdefault(int(number), NamedBarrier())
    getattr(barrier, kind)()
    return None


def _specialize(partitions: list[tuple[Callable[..., None], tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
    _run_threads([(current.block, function, args) for function, args in partitions], [4, *warps])


def _run_threads(work: list[tuple[Block, Callable[..., None], tuple[Any, ...]]], warps: list[int] | None = None) -> None:
    machine = work[0][0].machine

    def run(warps: int, block: Block, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        current.block = block
        current.warps = warps
        current.copies = []
        current.products = []
        current.stores = []
        function(*args)
        wait_stores(0)

    counted = zip(warps or [4] * len(work), work, strict=True)
    machine.run([functools.partial(run, count, *item) for count, item in counted])
    if machine.failures:
        raise EmulationError(str(machine.failures[0])) from machine.failures[0]


def _atomic_add(pointer: _Pointer, value: Any, sem: str = "") -> torch.Tensor:
    return pointer.add(value)


def _tensors(function: Callable[..., torch.Tensor], scalars: Callable[..., Any]) -> Callable[..., Any]:
    def apply(a: Any, b: Any, propagate_nan: None = None) -> Any:
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
            return function(_as_tensor(a), _as_tensor(b))
        return scalars(a, b)

    return apply


def _language() -> types.SimpleNamespace:
    """The parts of `gl` and `tl` that the kernels use."""
    anything = lambda *args, **options: None  # noqa: E731
    return types.SimpleNamespace(
        constexpr=lambda x: x,
        PropagateNan=types.SimpleNamespace(ALL=None),  # as PyTorch does
        tensor=object,
        int8=torch.int8,
        int16=torch.int16,
        bfloat16=torch.bfloat16,
        int32=torch.int32,
        int64=torch.int64,
        float8e4nv=torch.float8_e4m3fn,
        float32=torch.float32,
        BlockedLayout=anything,
        SliceLayout=anything,
        NVMMADistributedLayout=anything,
        DotOperandLayout=anything,
        SwizzledSharedLayout=anything,
        NVMMASharedLayout=anything,
        DistributedLinearLayout=anything,
        zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype),
        full=lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype),
        arange=lambda a, b, layout=None: torch.arange(a, b, dtype=torch.int32),
        maximum=_tensors(torch.maximum, max),
        minimum=_tensors(torch.minimum, min),
        max=lambda x, axis: x.amax(axis),
        min=lambda x, axis: x.amin(axis),
        argmin=lambda x, axis: (x == x.amin(axis, keepdim=True)).int().argmax(axis).int(),
        sum=lambda x, axis: x.sum(axis, dtype=x.dtype),
        cumsum=lambda x, axis: x.cumsum(axis),
        reduce=lambda x, axis, combine: functools.reduce(combine, functools.reduce(combine, x)),
        exp=torch.exp,
        exp2=torch.exp2,
        fma=lambda x, y, z: (x.double() * y + z).float(),
        log2=torch.log2,
        rsqrt=torch.rsqrt,
        abs=torch.abs,
        expand_dims=lambda x, axis: x.unsqueeze(axis),
        convert_layout=lambda x, layout, assert_trivial=False: x,
        where=lambda c, a, b: torch.where(_as_tensor(c), _as_tensor(a), _as_tensor(b)),
        split=lambda x: x.unbind(-1),
        join=lambda a, b: torch.stack([a, b], -1),
        cast=lambda x, dtype, bitcast=False: x.view(dtype) if bitcast else _as_tensor(x).to(dtype),
        reshape=lambda x, shape: x.reshape(shape),
        permute=lambda x, order: x.permute(order),
        range=range,
        static_range=range,
        # launches follow one another
        extra=types.SimpleNamespace(cuda=types.SimpleNamespace(gdc_wait=anything, gdc_launch_dependents=anything)),
        load=lambda pointer, mask=None, other=0: pointer.load(mask, other),
        store=lambda pointer, value, mask=None: pointer.store(value, mask),
        atomic_add=_atomic_add,
        program_id=lambda axis: torch.tensor(current.block.index),
        num_programs=lambda axis: current.block.grid,
        **dict.fromkeys(("multiple_of", "max_contiguous", "max_constancy"), lambda x, values: x),
        inline_asm_elementwise=_inline_assembly,
        warp_specialize=_specialize,
        allocate_shared_memory=lambda dtype, shape, layout: (
            Barriers(shape[0])
            if dtype == torch.int64
            else _Shared(torch.full(shape, float("nan") if dtype.is_floating_point else 2**30, dtype=dtype))
        ),
    )


_MODULES = (
    primitives,
    mask_blocks,
    splits,
    tile_scheduler,
    block_sparse,
    float8_probabilities,
    float8_scales,
    split_kv,
    pack_gqa,
    tree,
    producer,
    consumer,
    shared_memory,
    forward_output,
    forward_kernel,
    split_tile_scheduler,
    combine,
    row_statistics,
    dq_accum,
    backward_types,
    backward_producer,
    backward_consumer,
    backward,
    wide_types,
    wide_warps,
    wide_backward,
    latent_types,
    latent_warps,
    latent_decode,
    matrix_wgmma,
    row_invariant_wgmma,
    activation,
    row_invariant_few,
    selected_keys,
    gather_wgmma,
)
"""Their functions share one name space, so no two of them have the same name."""


def kernel_definitions(faults: dict[str, str]) -> dict[str, Any]:
    """The kernels' definitions, executed against the emulated language. A fault replaces source text, which must be there."""
    return _define(tuple(faults.items()))


@functools.lru_cache(maxsize=2)
def _define(faults: tuple[tuple[str, str], ...]) -> dict[str, Any]:

    def jit(function: Any = None, **options: Any) -> Any:
        return function if function is not None else lambda f: f

    barrier = types.SimpleNamespace(
        MBarrierLayout=lambda: None,
        init=lambda b, count: b.init(count),
        arrive=lambda b, count=1, pred=True: b.arrive(count) if pred else None,
        expect=lambda b, count: b.arrive(1, count),
        wait=lambda b, phase, pred=True: b.wait(int(phase)) if pred else None,
    )
    tma = types.SimpleNamespace(store_wait=wait_stores)
    language = _language()
    names: dict[str, Any] = {
        "__name__": "emulated",
        "gl": language,
        "tl": language,
        "gluon": types.SimpleNamespace(jit=jit),
        "triton": types.SimpleNamespace(jit=jit),
        "mbarrier": barrier,
        "tma": tma,
        "async_copy": ThreadCopies,
        "copy_to_shared": ThreadCopies.copy_to_shared,
        "gated_values": gated_values,
        "async_load": lambda desc, corner, bar, target: desc.load(corner, bar, target),
        "async_store": lambda desc, corner, source: desc.store(corner, source),
        "sync_threads": lambda: None,
        "HAS_REINTERPRET": True,
        "fence_async_shared": lambda: None,
        "MAX_SPLITS": tiles.MAX_SPLITS,
        "warpgroup_mma": start_product,
        "warpgroup_mma_wait": wait_products,
        "BLOCK_KEYS": BLOCK_KEYS.value,
        "RAGGED": kernel_types.RAGGED.value,
        "COUNTS": splits.COUNTS,
        "OUTPUT": tile_scheduler.OUTPUT,
        "P_STAGES": latent_tiles.P_STAGES,
        "ROPE_COLUMNS": latent_tiles.ROPE_COLUMNS,
        "VALUE_PARTS": latent_tiles.VALUE_PARTS,
        **{
            name: value
            for module in (kernel_types, backward_types, wide_types, latent_types)
            for name, value in vars(module).items()
            if hasattr(value, "_fields")
        },
    }
    unused = dict(faults)
    for module in _MODULES:
        source = inspect.getsource(module)
        for old, new in faults:
            if old in source:
                source = source.replace(old, new)
                unused.pop(old, None)
        exec(_definitions(module.__name__, source), names)
    if unused:
        raise ValueError(f"the source no longer contains {sorted(unused)}")
    return names


@functools.lru_cache(maxsize=2 * len(_MODULES))
def _definitions(name: str, source: str) -> types.CodeType:
    """What kernels need of a module's source. A fault changes one module, so the others are not parsed again."""
    wanted = [
        node
        for node in ast.parse(source).body
        if (isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list))
        or (isinstance(node, ast.FunctionDef) and node.name.endswith(("_assembly", "_operands")))
        or (isinstance(node, ast.ClassDef) and any("NamedTuple" in ast.unparse(b) for b in node.bases))
        or (isinstance(node, ast.Assign) and "constexpr" in ast.unparse(node.value))
    ]
    future = ast.parse("from __future__ import annotations\nfrom typing import NamedTuple").body
    return compile(ast.Module(future + wanted, type_ignores=[]), name, "exec")


def run_in_block(function: Callable[..., Any], data: torch.Tensor, offset: int, *args: Any) -> None:
    """Run one device function of `kernel_definitions` in a thread block by itself, with a pointer into `data` first."""
    block = Block(0, 1, Machine(0))
    _run_threads([(block, function, (_Pointer(data, offset), *args))])


def _on_device(arg: Any) -> Any:
    return _Pointer(arg) if isinstance(arg, torch.Tensor) else arg


@contextlib.contextmanager
def emulated(resident_blocks: int = 3, seed: int = 0, faults: dict[str, str] | None = None) -> Iterator[None]:
    """Launches inside the `with` block run on the CPU, up to `resident_blocks` thread blocks at a time, as on a small GPU."""
    names = kernel_definitions(faults or {})

    def launch(self: Launch, tensors: Any, *late: float) -> None:
        if self._kernel.__name__ == "_quantize_inputs":  # a kernel of Triton, which has its own test in Triton's interpreter
            *_, skip_q, left = self._numbers[:11]
            quantize_inputs(*tensors, skip_q=skip_q, left=left)
            return
        machine = Machine(seed)
        function = names[self._kernel.__name__]
        grid = self._grid[0]
        wrapped = [None if view is None else _Copy(base, view) for base, view in zip(tensors, self._views, strict=False)]
        wrapped += [_on_device(arg) for arg in (*tensors[len(wrapped) :], *late, *self._numbers)]
        for first in range(0, grid, resident_blocks):
            blocks = [Block(i, grid, machine) for i in range(first, min(first + resident_blocks, grid))]
            _run_threads([(block, function, tuple(wrapped)) for block in blocks])

    with (
        mock.patch.object(Launch, "__call__", launch),
        # Triton checks what a layout is made of, which takes a third of the time
        mock.patch.object(kernel_types, "gl", names["gl"]),
        mock.patch.object(backward_types, "gl", names["gl"]),
        mock.patch.object(forward, "multiprocessors", return_value=resident_blocks),
        mock.patch.object(latent_decode, "multiprocessors", return_value=resident_blocks),
    ):
        yield
