"""How checkpoints keep the quantised weights of a linear layer or of one expert: in which tensors, and what their bits mean.

    scheme = Awq(group_size=128)
    scheme.tensors(n, k, torch.float16)                    # what to load: names, shapes and dtypes
    weight = scheme.read(tensors, n, k)                    # a QuantizedWeight

A scheme names the tensors of one layer with their shapes, and turns them into the one layout that `fa_serve.ops` takes for
products. Sources of the layouts: AutoAWQ (`awq/modules/linear/gemm.py`), AutoGPTQ (`nn_modules/qlinear`), compressed-tensors
(`compressors/pack_quantized`, `naive_quantized`), DeepSeek-V3 (`inference/kernel.py`), gpt-oss (`gpt_oss/torch/weights.py`).
Left out: which layers have which scheme (quantization_plan.py), how tensors of experts are stacked
(surgery/quantised/experts.py), and integers of more or fewer than 4 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from fa_serve.ops.products.quantised.weight import FLOAT8, RUN, SYMMETRIC_ZERO, QuantizedWeight, Values, pack_int4
from fa_serve.spec import ParameterError, dtype_name


class Scheme(Protocol):
    """How the weights (n, k) of one linear layer are kept: n outputs (rows), k inputs (columns)."""

    @property
    def description(self) -> str:
        """The format for people, such as "4 bits in groups of 128 (GPTQ)"."""
        ...

    @property
    def values(self) -> Values:
        """The kind of the weights' values."""
        ...

    @property
    def columns_of_group(self) -> int:
        """The number of neighbouring columns that share a scale; 0 stands for all columns."""
        ...

    @property
    def ordered(self) -> bool:
        """Whether the columns of a group need not be neighbours (act-order)."""
        ...

    @property
    def row_axis(self) -> int:
        """The axis of a tensor that holds the rows of the weights. Tensors with fewer axes hold the rows in their last axis."""
        ...

    def of_experts(self) -> Scheme | None:
        """The scheme for experts in this format, without scales of activations; None if fa_serve computes no such experts."""
        ...

    def tensors(self, n: int, k: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors of a layer by their names in the checkpoint, without content, on the device "meta".

        dtype: the dtype of the model, which the scales of 4-bit integers have too
        """
        ...

    def read(self, tensors: Mapping[str, Tensor], n: int, k: int) -> QuantizedWeight:
        """The weight that tensors with these names and shapes hold. Raises ParameterError for impossible content."""
        ...


def _meta(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def check_loaded(module: nn.Module, expected: Mapping[str, Tensor], layer: str) -> dict[str, Tensor]:
    """Take the parameters `expected` out of a module and return them. Scales have the expected dtype then.

    Raises ParameterError that names a parameter with another shape, with integers instead of floats or the reverse, or with
    floats that should be float8.
    """
    found = {}
    for name, wanted in expected.items():
        tensor = module._parameters.pop(name)
        assert tensor is not None
        if tensor.shape != wanted.shape and not tensor.numel() == wanted.numel() == 1:
            raise ParameterError(f"{layer}.{name}", f"have the shape {list(wanted.shape)}", list(tensor.shape))
        of_other_kind = tensor.is_floating_point() != wanted.is_floating_point()
        if of_other_kind or (wanted.dtype == FLOAT8 and tensor.dtype != FLOAT8):
            raise ParameterError(f"{layer}.{name}", f"have the dtype {dtype_name(wanted.dtype)}", dtype_name(tensor.dtype))
        # weights that were rounded while they were read are float8 already
        is_scale = tensor.is_floating_point() and tensor.dtype != FLOAT8
        found[name] = tensor.detach().to(wanted.dtype) if is_scale else tensor.detach()
    return found


def _nibbles(words: Tensor) -> Tensor:
    """(rows, m) int32 -> (rows, 8 * m) uint8: the numbers in bits 0 to 3, 4 to 7 and so on of each word."""
    return torch.stack([((words >> 4 * i) & 15).to(torch.uint8) for i in range(8)], dim=2).flatten(1)


@dataclass(frozen=True)
class _Int4:
    """What the layouts of 4-bit integers have in common. group_size: number of columns that share a scale; -1: all columns."""

    group_size: int

    @property
    def values(self) -> Values:
        return "int4"

    @property
    def columns_of_group(self) -> int:
        return max(self.group_size, 0)


@dataclass(frozen=True)
class Awq(_Int4):
    """AutoAWQ's layout "gemm": a word holds the numbers of 8 outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7."""

    @property
    def ordered(self) -> bool:
        return False

    @property
    def row_axis(self) -> int:
        return 1

    def of_experts(self) -> Scheme | None:
        return self

    @property
    def description(self) -> str:
        return f"4 bits {_in_groups(self.group_size)} with zero points (AWQ)"

    def tensors(self, n: int, k: int, dtype: torch.dtype) -> dict[str, Tensor]:
        groups = _groups(k, self.group_size)
        return {
            "qweight": _meta(torch.int32, k, n // 8),
            "qzeros": _meta(torch.int32, groups, n // 8),
            "scales": _meta(dtype, groups, n),
        }

    def read(self, tensors: Mapping[str, Tensor], n: int, k: int) -> QuantizedWeight:
        order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], device=tensors["qweight"].device)

        def ordered(words: Tensor) -> Tensor:
            return _nibbles(words).view(len(words), -1, 8)[:, :, order].flatten(1)

        return QuantizedWeight(
            data=pack_int4(ordered(tensors["qweight"]).t()),
            scales=tensors["scales"].t().contiguous(),
            group_size=_size(k, self.group_size),
            width=k,
            zeros=ordered(tensors["qzeros"]).t().contiguous(),
        )


@dataclass(frozen=True)
class Gptq(_Int4):
    """AutoGPTQ's layout: a word holds the numbers of 8 inputs. Column i is in group g_idx[i].

    subtracted: whether zero points are stored minus 1 ("gptq", not "gptq_v2")
    ordered:    whether columns were put into groups in the order of their activations (act-order)
    """

    subtracted: bool
    ordered: bool = False

    @property
    def row_axis(self) -> int:
        return 1

    def of_experts(self) -> Scheme | None:
        return None if self.ordered else self

    @property
    def description(self) -> str:
        return f"4 bits {_in_groups(self.group_size)} (GPTQ)"

    def tensors(self, n: int, k: int, dtype: torch.dtype) -> dict[str, Tensor]:
        groups = _groups(k, self.group_size)
        return {
            "qweight": _meta(torch.int32, k // 8, n),
            "qzeros": _meta(torch.int32, groups, n // 8),
            "scales": _meta(dtype, groups, n),
            "g_idx": _meta(torch.int32, k),
        }

    def read(self, tensors: Mapping[str, Tensor], n: int, k: int) -> QuantizedWeight:
        size = _size(k, self.group_size)
        zeros = (_nibbles(tensors["qzeros"]) + int(self.subtracted)) & 15
        values = _nibbles(tensors["qweight"].t().contiguous())
        columns = _columns("g_idx", tensors["g_idx"], size)
        return QuantizedWeight(
            data=pack_int4(values if columns is None else values[:, columns.long()]),
            scales=tensors["scales"].t().contiguous(),
            group_size=size,
            width=k,
            zeros=None if bool((zeros == SYMMETRIC_ZERO).all()) else zeros.t().contiguous(),
            columns=columns,
        )


@dataclass(frozen=True)
class PackQuantized(_Int4):
    """compressed-tensors' layout "pack-quantized": a word holds the numbers of 8 inputs, or the zero points of 8 outputs."""

    symmetric: bool
    ordered: bool

    @property
    def row_axis(self) -> int:
        return 0

    def of_experts(self) -> Scheme | None:
        return None if self.ordered else self

    @property
    def description(self) -> str:
        zeros = "" if self.symmetric else " with zero points"
        return f"4 bits {_in_groups(self.group_size)}{zeros} (compressed-tensors)"

    def tensors(self, n: int, k: int, dtype: torch.dtype) -> dict[str, Tensor]:
        groups = _groups(k, self.group_size)
        found = {
            "weight_packed": _meta(torch.int32, n, -(-k // 8)),
            "weight_scale": _meta(dtype, n, groups),
            "weight_shape": _meta(torch.int64, 2),
        }
        if not self.symmetric:
            found["weight_zero_point"] = _meta(torch.int32, -(-n // 8), groups)
        if self.ordered:
            found["weight_g_idx"] = _meta(torch.int32, k)
        return found

    def read(self, tensors: Mapping[str, Tensor], n: int, k: int) -> QuantizedWeight:
        if tensors["weight_shape"].tolist() != [n, k]:
            raise ParameterError("weight_shape", f"be {[n, k]}, the shape of the layer", tensors["weight_shape"].tolist())
        size = _size(k, self.group_size)
        values = _nibbles(tensors["weight_packed"])[:, :k]
        columns = _columns("weight_g_idx", tensors["weight_g_idx"], size) if self.ordered else None
        zeros = None
        if not self.symmetric:
            zeros = _nibbles(tensors["weight_zero_point"].t().contiguous())[:, :n].t().contiguous()
        return QuantizedWeight(
            data=pack_int4(values if columns is None else values[:, columns.long()]),
            scales=tensors["weight_scale"].contiguous(),
            group_size=size,
            width=k,
            zeros=zeros,
            columns=columns,
        )


@dataclass(frozen=True)
class Float8:
    """float8_e4m3fn numbers with a scale for the matrix, for each row, or for each block of rows and columns.

    scale:       name of the tensor of scales
    block:       the numbers of rows and columns that share a scale; 0 stands for all of them
    input_scale: name of the tensor by which activations are divided; None: scales are computed from the activations
    """

    scale: str
    block: tuple[int, int]
    input_scale: str | None = None

    @property
    def values(self) -> Values:
        return "float8"

    @property
    def columns_of_group(self) -> int:
        return self.block[1]

    @property
    def ordered(self) -> bool:
        return False

    @property
    def row_axis(self) -> int:
        return 0

    def of_experts(self) -> Scheme | None:
        return self if self.input_scale is None else replace(self, input_scale=None)

    @property
    def description(self) -> str:
        rows, columns = self.block
        shared = "the matrix" if not rows else "each row" if not columns else f"each {rows} x {columns}"
        return f"float8 with a scale for {shared}"

    def tensors(self, n: int, k: int, dtype: torch.dtype) -> dict[str, Tensor]:
        rows, columns = self.block
        shape = (1,) if not rows else (-(-n // rows), -(-k // columns) if columns else 1)
        found = {"weight": _meta(FLOAT8, n, k), self.scale: _meta(torch.float32, *shape)}
        return found | ({} if self.input_scale is None else {self.input_scale: _meta(torch.float32, 1)})

    def read(self, tensors: Mapping[str, Tensor], n: int, k: int) -> QuantizedWeight:
        rows, columns = self.block
        scales = tensors[self.scale].view(-1, 1) if not rows else tensors[self.scale]
        input_scale = None if self.input_scale is None else tensors[self.input_scale].view(1).float()
        return QuantizedWeight(
            data=tensors["weight"].contiguous(),
            scales=scales.float().repeat_interleave(rows or n, dim=0)[:n].contiguous(),
            group_size=columns or k,
            width=k,
            input_scale=input_scale,
        )


@dataclass(frozen=True)
class Rounded(Float8):
    """Unquantised weights that are rounded to float8, with a scale for each row, while the checkpoint is read."""

    scale: str = "weight_scale"
    block: tuple[int, int] = (1, 0)

    def tensors(self, n: int, k: int, dtype: torch.dtype) -> dict[str, Tensor]:
        # transformers reads a weight in the model's dtype, before it is rounded
        return super().tensors(n, k, dtype) | {"weight": _meta(dtype, n, k)}


@dataclass(frozen=True)
class Mxfp4:
    """gpt-oss' layout: blocks of 32 e2m1 numbers in 16 bytes, the first of two in the lower bits, and e8m0 scales."""

    values: Values = "float4"
    columns_of_group: int = RUN
    ordered: bool = False
    row_axis: int = 0

    def of_experts(self) -> Scheme | None:
        return self

    @property
    def description(self) -> str:
        return "4-bit floats in groups of 32 (mxfp4)"

    def tensors(self, n: int, k: int, dtype: torch.dtype) -> dict[str, Tensor]:
        blocks = k // RUN
        return {"weight_blocks": _meta(torch.uint8, n, blocks, RUN // 2), "weight_scales": _meta(torch.uint8, n, blocks)}

    def read(self, tensors: Mapping[str, Tensor], n: int, k: int) -> QuantizedWeight:
        scales = tensors["weight_scales"]
        if bool((scales == 255).any()):
            raise ParameterError("weight_scales", "be at most 254, because 255 stands for NaN", 255)
        blocks = tensors["weight_blocks"].flatten(1)
        values = torch.stack([blocks & 15, blocks >> 4], dim=2).flatten(1)
        return QuantizedWeight(pack_int4(values), scales.contiguous(), group_size=RUN, width=k)


def _in_groups(group_size: int) -> str:
    return "in rows" if group_size == -1 else f"in groups of {group_size}"


def _size(k: int, group_size: int) -> int:
    return k if group_size == -1 else group_size


def _groups(k: int, group_size: int) -> int:
    return -(-k // _size(k, group_size))


def _columns(name: str, group_of: Tensor, group_size: int) -> Tensor | None:
    """The indices of the columns, group by group, (k,) int32; None if the columns are already in this order.

    group_of: (k,): the group of each column
    """
    in_order = torch.arange(len(group_of), device=group_of.device) // group_size
    if torch.equal(group_of.long(), in_order):
        return None
    columns = torch.argsort(group_of, stable=True)
    if not torch.equal(group_of[columns].long(), in_order):
        raise ParameterError(name, f"put {group_size} columns into each group", group_of.tolist())
    return columns.int()
