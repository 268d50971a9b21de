"""Runs the Python source of the Gluon kernels of ops on a CPU, one program after the other.

    with emulated(gemv):
        y = multiply_by("gemv", x, weight, ...)           # CPU tensors; plan and kernel are the product's

Tensors of Gluon are tensors of PyTorch, inline assembly is interpreted, and shared memory holds large numbers until it is
written. An asynchronous copy takes place when its group is waited for, which is as late as the hardware may do it. So a wrong
permutation of columns, a wrong stage or a missing mask is a wrong result. The emulator knows no layouts, registers, threads or
timing.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

from fa_serve.launching.launch import Launch
from fa_serve.launching.plans import PLANS


class _Tensor(torch.Tensor):
    """A tensor whose `to` reinterprets bits as Gluon's does, and that never changes: `x += y` makes another one."""

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Any:
        return self.view(dtype) if bitcast else super().to(dtype)

    def __iadd__(self, other: Any) -> Any:  # type: ignore[misc]
        return self + other

    def __isub__(self, other: Any) -> Any:  # type: ignore[misc]
        return self - other

    def __imul__(self, other: Any) -> Any:  # type: ignore[misc]
        return self * other


def _tensor(x: Any) -> Any:
    return torch.as_tensor(x).as_subclass(_Tensor)


class _Pointer:
    """Addresses inside of one tensor."""

    def __init__(self, data: torch.Tensor, offsets: Any = 0) -> None:
        last = sum((size - 1) * stride for size, stride in zip(data.shape, data.stride(), strict=True))
        self.data = data.as_strided((last + 1,), (1,))  # what lies between its elements too
        self.offsets = offsets
        self.dtype = types.SimpleNamespace(element_ty=data.dtype)

    def __add__(self, offsets: Any) -> _Pointer:
        return _Pointer(self.data, self.offsets + offsets)

    def load(self, mask: Any = None, other: Any = 0) -> Any:
        offsets = torch.as_tensor(self.offsets)
        keep = torch.as_tensor(True if mask is None else mask).expand(offsets.shape)
        data = self.data.view(torch.uint8) if self.data.dtype == torch.float8_e4m3fn else self.data  # torch has few operators
        found = data[torch.where(keep, offsets, 0).long()]
        found = torch.where(keep, found, torch.as_tensor(other, dtype=found.dtype))
        return _tensor(found.view(self.data.dtype))

    def store(self, value: Any, mask: Any) -> None:
        offsets, keep, value = torch.broadcast_tensors(torch.as_tensor(self.offsets), mask, value)
        self.data[offsets[keep].long()] = value[keep].as_subclass(torch.Tensor)


class _Shared:
    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self.shape = data.shape

    def index(self, i: Any) -> _Shared:
        return _Shared(self.data[int(i)])

    def slice(self, start: int, length: int, dim: int) -> _Shared:
        return _Shared(self.data.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> _Shared:
        return _Shared(self.data.permute(order))

    def load(self, layout: object) -> Any:
        return _tensor(self.data.clone())

    def store(self, value: Any) -> None:
        self.data.copy_(value)


class _Copies:
    """The asynchronous copies of a program: those that are not committed, and the groups that were not waited for."""

    def __init__(self) -> None:
        self.open: list[Callable[[], None]] = []
        self.groups: list[list[Callable[[], None]]] = []

    def copy_to_shared(self, target: _Shared, source: _Pointer, mask: Any = None) -> None:
        self.open.append(lambda: target.store(source.load(mask)))

    def commit_group(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait_group(self, pending: int) -> None:
        while len(self.groups) > pending:
            for copy in self.groups.pop(0):
                copy()


def _unsigned(x: Any) -> Any:
    return x.as_subclass(torch.Tensor).long() & 0xFFFFFFFF


def _signed(x: Any) -> Any:
    return _tensor(torch.where(x >= 1 << 31, x - (1 << 32), x).int())


def _permuted_bytes(a: Any, b: Any, selector: int) -> Any:
    """PTX's `prmt`: the bit 8 of a selector replicates the byte's sign."""
    wide = a | (b << 32)
    found = torch.zeros_like(wide)
    for i in range(4):
        select = selector >> 4 * i & 15
        byte = wide >> 8 * (select & 7) & 255
        found |= (torch.where(byte > 127, 255, 0) if select & 8 else byte) << 8 * i
    return found


def _halves(name: str, a: Any, b: Any) -> Any:
    """Arithmetic of two numbers of 16 bits each, which is rounded once."""
    dtype = torch.bfloat16 if name.endswith("bf16x2") else torch.float16
    x, y = (_signed(n).contiguous().as_subclass(torch.Tensor).view(dtype).float() for n in torch.broadcast_tensors(a, b))
    return _unsigned((x - y if name.startswith("sub") else x * y).to(dtype).view(torch.int32))


_PTX = {
    "prmt.b32": lambda a, b, select: _permuted_bytes(a, b, int(select)),
    "shl.b32": lambda a, n: a << n & 0xFFFFFFFF,
    "shr.u32": lambda a, n: a >> n,
    "and.b32": lambda a, b: a & b,
    "lop3.b32": lambda a, b, c, table: a & b | c if int(table) == 0xEA else None,
}


def _inline_assembly(text: str, operands: str, values: list[Any], **options: Any) -> Any:
    registers = {f"${i + 1}": _unsigned(torch.as_tensor(value)) for i, value in enumerate(values)}
    for line in re.sub(r"[{}]|\.reg \.b32 [^;]*;", "", text).split(";"):
        if line.strip():
            name, *names = re.split(r"[\s,]+", line.strip())
            inputs = [registers[n] if n in registers else torch.tensor(int(n, 0)) for n in names[1:]]
            registers[names[0]] = _PTX[name](*inputs) if name in _PTX else _halves(name, *inputs)
    return _signed(registers["$0"])


def _zeros(shape: list[int], dtype: torch.dtype, layout: object = None) -> Any:
    return _tensor(torch.zeros(shape, dtype=dtype))


def _product(a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
    a, b = (x.data if isinstance(x, _Shared) else x for x in (a, b))
    product = _tensor(a.float() @ b.float())
    return acc + product if use_acc else product


def _language(program: int, warps: int) -> types.SimpleNamespace:
    """As much of `gluon.language` as the kernels use."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    layouts = ("BlockedLayout", "SliceLayout", "DotOperandLayout", "NVMMADistributedLayout", "SwizzledSharedLayout")
    dtypes = ("uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32")
    return types.SimpleNamespace(
        **dict.fromkeys((*layouts, "NVMMASharedLayout"), nothing),
        **{name: getattr(torch, name) for name in dtypes},
        constexpr=object,
        program_id=lambda axis: _tensor(torch.tensor(program, dtype=torch.int32)),
        num_programs=lambda axis: 1,
        num_warps=lambda: warps,
        arange=lambda start, end, layout: _tensor(torch.arange(start, end, dtype=torch.int32)),
        zeros=_zeros,
        full=lambda shape, value, dtype, layout: _tensor(torch.full(shape, value, dtype=dtype)),
        allocate_shared_memory=lambda dtype, shape, layout: _Shared(torch.full(shape, 9999).to(dtype)),
        expand_dims=lambda x, dim: x.unsqueeze(dim),
        reshape=lambda x, shape: x.reshape(shape),
        permute=lambda x, order: x.permute(order),
        split=lambda x: (x[..., 0], x[..., 1]),
        join=lambda a, b: torch.stack((a, b), -1),
        broadcast=torch.broadcast_tensors,
        convert_layout=lambda x, layout: x,
        sum=lambda x, dim: x.sum(dim),
        minimum=lambda a, b: torch.minimum(_tensor(a), _tensor(b)),
        where=lambda condition, a, b: torch.where(torch.as_tensor(condition), a, b),
        rsqrt=torch.rsqrt,
        cdiv=lambda a, b: -(-a // b),
        load=lambda pointer, mask=None, other=0: pointer.load(mask, other),
        store=lambda pointer, value, mask: pointer.store(value, mask),
        static_range=range,
        inline_asm_elementwise=_inline_assembly,
    )


_ACTIVATIONS = (
    torch.nn.functional.silu,
    functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    torch.nn.functional.gelu,
)


def gated_values(gate: Any, up: Any, slope: float, limit: float, offset: float, kind: int) -> Any:
    """`experts_primitives.gated_values`, whose source is written in Triton."""
    return _ACTIVATIONS[kind](gate.clamp(max=limit) * slope) / slope * (up.clamp(-limit, limit) + offset)


def _store_product(y: Any, out: _Pointer, residual: _Pointer | None, alpha: float, offsets: Any, keep: Any) -> None:
    """`linear_kernel.store_product`, whose source is written in Triton."""
    if residual is not None:
        y = (residual + offsets).load(keep).to(torch.float32) + alpha * y
    (out + offsets).store(y.to(out.dtype.element_ty), keep)


def _sum_splits(tensors: Any, count: int, alpha: float, *_: Any) -> None:
    """`split_k._sum_splits`, whose source is written in Triton."""
    sums, bias, residual, out = tensors
    y = sums.sum(0) + (0 if bias is None else bias.float())
    out.copy_(y if residual is None else residual.float() + alpha * y)


def _add(tensors: Any, count: int, alpha: float, *_: Any) -> None:
    """`addition._add`, whose source is written in Triton."""
    x, y = tensors
    x.copy_(x.float() + alpha * y.float())


_IN_TRITON: dict[str, Callable[..., None]] = {"_sum_splits": _sum_splits, "_add": _add}
"""Kernels that are launched after those in Gluon, by the names of their functions."""


@contextlib.contextmanager
def _replaced(modules: list[types.ModuleType], names: dict[str, Any]) -> Iterator[None]:
    """Within this context, names that the modules have stand for other things."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            known = {name: x for name, x in names.items() if hasattr(module, name)}
            if known:
                stack.enter_context(mock.patch.multiple(module, **known))
        yield


@contextlib.contextmanager
def emulated(module: types.ModuleType) -> Iterator[None]:
    """Launches of the module's kernels run here, with the functions that they take from other modules in Gluon."""
    modules = [module]
    for part in modules:  # grows: the modules that these take functions in Gluon from
        helpers = {sys.modules[x.fn.__module__] for x in vars(part).values() if isinstance(x, JITFunction)}
        modules += (helper for helper in helpers - {*modules} if hasattr(helper, "gl"))
    others = {
        "activate": lambda x, kind: _ACTIVATIONS[kind](x),
        "fence_async_shared": lambda: None,
        "gated_values": gated_values,
        "mma_v2": _product,
        "store_product": _store_product,
        "sync_threads": lambda: None,
        "wait_for_previous_kernel": lambda *flags: None,
        "warpgroup_mma": _product,
        "warpgroup_mma_init": lambda acc: acc,
        "warpgroup_mma_wait": lambda pending, deps: deps[0] if len(deps) == 1 else tuple(deps),
        "word_layout": lambda *sizes: None,
    }

    def launch(self: Launch, tensors: Any, *late: float) -> None:
        if isinstance(self._kernel, JITFunction):
            _IN_TRITON[self._kernel.fn.__name__](tensors, *self._numbers)
            return
        pointers = [None if x is None else _Pointer(x) for x in tensors]
        for program in range(self._grid[0]):
            copies = _Copies()
            names = {"async_copy": copies, "copy_to_shared": copies.copy_to_shared}
            names["gl"] = _language(program, self._options["num_warps"])
            with _replaced(modules, names):
                self._kernel(*pointers, *late, *self._numbers)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Launch, "__call__", launch))
        for part in modules:
            functions = {name: x.fn for name, x in vars(part).items() if isinstance(x, JITFunction)}
            stack.enter_context(_replaced([part], functions | others))
        PLANS.clear()
        yield
        PLANS.clear()
