"""A weight matrix of 4-bit or float8 numbers with scales: one layout for every format of a checkpoint.

    weight = QuantizedWeight(pack_int4(values), scales, group_size=128, zeros=zeros, width=4096)
    weight = quantize_float8(matrix)              # a scale for each row
    matrix = weight.dequantize(torch.bfloat16)

`ops.linear` takes such a weight instead of a matrix. Kernels unpack 4-bit numbers in runs of 32 columns: in each block of 256
columns, word j of 32 holds the column 32i + j in its bits 4i to 4i + 3. So a shift of 32 neighbouring words gives 32
neighbouring columns, and a product needs no other order. Scales of float8 weights in blocks of 128 x 128 are repeated for each
row, so that any number of rows of several matrices can be merged. The matrices of a mixture's experts are one weight, in which
the rows of each expert follow those of the previous expert. Left out: the formats of checkpoints (fa_serve.hf.weights.formats)
and products (../run.py, moe/run.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fa_serve.spec import FLOAT8 as FLOAT8

LARGEST_FLOAT8 = 448.0
BLOCK_COLUMNS = 256
"""Columns of a row that lie in the same 32 words."""
RUN = 32
"""Neighbouring columns that lie in the same bits of neighbouring words. A group is a whole number of runs."""
SYMMETRIC_ZERO = 8
"""The 4-bit integer that stands for 0 in a weight without zero points."""
FLOAT4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The number that each pattern of 4 bits is in e2m1: a sign, two bits of exponent, one of mantissa."""

Values = Literal["int4", "float4", "float8"]
"""Kinds of values: integers of 4 bits, e2m1 numbers, and float8_e4m3fn numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A matrix of (n, k): weight[i, columns[j]] = (value[i, j] - zeros[i, j // group_size]) * scales[i, j // group_size].

    data:        the values: (n, words) int32 as `pack_int4` makes them, or (n, k) float8_e4m3fn
    scales:      (n, groups), contiguous: floating, or uint8 for scales of e8m0, where e stands for 2^(e - 127), with
                 which 4-bit values are e2m1 numbers (mxfp4: OCP Microscaling Formats 1.0)
    group_size:  columns that share a scale: a multiple of 32, or k
    width:       k
    zeros:       (n, groups) uint8; None is 8 for 4-bit integers, and 0 for other values
    columns:     (k,) int32, a permutation; None is 0, 1, 2, ... Checkpoints that were quantised in the order of the activations
                 (GPTQ's act-order) have one
    input_scale: (1,) float32, by which activations are divided where they are quantised too; None: each row is measured
    """

    data: Tensor
    scales: Tensor
    group_size: int
    width: int
    zeros: Tensor | None = None
    columns: Tensor | None = None
    input_scale: Tensor | None = None

    @property
    def is_packed(self) -> bool:
        """Whether the values have 4 bits."""
        return self.data.dtype == torch.int32

    @property
    def values(self) -> Values:
        """The kind of the values."""
        if not self.is_packed:
            return "float8"
        return "float4" if self.scales.dtype == torch.uint8 else "int4"

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.data.shape[0], self.width))

    @property
    def device(self) -> torch.device:
        return self.data.device

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The matrix, (n, k), computed in float32 (float64 for float64) and rounded once to `dtype`."""
        wide = torch.promote_types(dtype, torch.float32)
        matrix = (self._unscaled(wide) * self._of_columns(self._wide_scales())).to(dtype)
        if self.columns is not None:
            ordered = torch.empty_like(matrix)
            ordered[:, self.columns.long()] = matrix
            return ordered
        return matrix

    def _unscaled(self, dtype: torch.dtype) -> Tensor:
        """The values minus their zero points, (n, k)."""
        if self.values == "float8":
            return self.data.to(dtype)
        bits = unpack_int4(self.data, self.width)
        if self.values == "float4":
            return torch.tensor(FLOAT4_VALUES, dtype=dtype, device=self.device)[bits.long()]
        return bits.to(dtype) - (SYMMETRIC_ZERO if self.zeros is None else self._of_columns(self.zeros))

    def _wide_scales(self) -> Tensor:
        """The scales as floats. e8m0 is the exponent of a float32, except that 2^-127 is subnormal. 255 becomes infinite."""
        if self.scales.is_floating_point():
            return self.scales
        exponents = self.scales.int()
        return torch.where(exponents == 0, 1 << 22, exponents << 23).view(torch.float32)

    def _of_columns(self, groups: Tensor) -> Tensor:
        """(n, groups) -> (n, k), or (n, 1) if each row has one group."""
        return groups if groups.shape[1] == 1 else groups.repeat_interleave(self.group_size, dim=1)[:, : self.width]

    def rows(self, start: int, stop: int) -> QuantizedWeight:
        """Rows of the matrix, without a copy."""
        zeros = None if self.zeros is None else self.zeros[start:stop]
        return replace(self, data=self.data[start:stop], scales=self.scales[start:stop], zeros=zeros)

    def columns_between(self, start: int, stop: int) -> QuantizedWeight:
        """Columns of the matrix, as a copy. `start` and `stop` must be borders of groups, unless a row is one group.

        Raises ValueError for other borders, and for a weight whose `columns` are permuted.
        """
        one_group = self.scales.shape[1] == 1
        fits = start % self.group_size == 0 and (stop % self.group_size == 0 or stop == self.width)
        if self.columns is not None or not (one_group or fits):
            raise ValueError(f"columns {start} to {stop} must be whole groups of {self.group_size} neighbouring columns")

        def of_groups(x: Tensor) -> Tensor:
            return x.clone() if one_group else x[:, start // self.group_size : -(-stop // self.group_size)].contiguous()

        if self.is_packed:
            data = pack_int4(unpack_int4(self.data, self.width)[:, start:stop])
        else:
            data = self.data[:, start:stop].contiguous()
        return replace(
            self,
            data=data,
            scales=of_groups(self.scales),
            group_size=stop - start if one_group else self.group_size,
            width=stop - start,
            zeros=None if self.zeros is None else of_groups(self.zeros),
        )


def merge_rows(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """One matrix with the rows of several, and with the largest of their input scales.

    Raises ValueError, which says what differs, for weights that one product cannot compute.
    """
    first = weights[0]
    for name, facts in (
        ("data", [weight.data.dtype for weight in weights]),
        ("widths", [weight.width for weight in weights]),
        ("group sizes", [weight.group_size for weight in weights]),
        ("scales", [weight.scales.dtype for weight in weights]),
        ("input scales", [weight.input_scale is None for weight in weights]),
        ("column orders", [weight.columns is None for weight in weights]),
    ):
        if len(set(facts)) > 1:
            raise ValueError(f"quantised projections can be merged only if they agree, but their {name} differ")
    if first.columns is not None and any(not torch.equal(first.columns, w.columns) for w in weights if w.columns is not None):
        raise ValueError("quantised projections can be merged only if they agree, but their column orders differ")
    input_scales = [weight.input_scale for weight in weights if weight.input_scale is not None]
    zeros = None
    if any(weight.zeros is not None for weight in weights):
        zeros = torch.cat([_zeros(weight) for weight in weights])
    return replace(
        first,
        data=torch.cat([weight.data for weight in weights]),
        scales=torch.cat([weight.scales for weight in weights]),
        zeros=zeros,
        input_scale=torch.stack(input_scales).amax(0) if input_scales else None,
    )


def _zeros(weight: QuantizedWeight) -> Tensor:
    """The zero points of a weight of 4-bit values, (n, groups) uint8."""
    return torch.full_like(weight.scales, SYMMETRIC_ZERO, dtype=torch.uint8) if weight.zeros is None else weight.zeros


def pack_int4(values: Tensor) -> Tensor:
    """(n, k) integers from 0 to 15 -> (n, 32 * ceil(k / 256)) int32. Columns from k on are 0."""
    n, k = values.shape
    runs = torch.nn.functional.pad(values, (0, -k % BLOCK_COLUMNS)).reshape(n, -1, BLOCK_COLUMNS // RUN, RUN)
    words = torch.zeros(n, runs.shape[1], RUN, dtype=torch.int32, device=values.device)
    for i in range(BLOCK_COLUMNS // RUN):
        words |= runs[:, :, i].int() << 4 * i
    return words.view(n, -1)


def unpack_int4(words: Tensor, width: int) -> Tensor:
    """The inverse of `pack_int4`: (n, width) uint8."""
    n = words.shape[0]
    blocks = words.view(n, -1, RUN)
    runs = [((blocks >> 4 * i) & 15).to(torch.uint8) for i in range(BLOCK_COLUMNS // RUN)]
    return torch.stack(runs, dim=2).view(n, -1)[:, :width]


def quantize_float8(matrix: Tensor) -> QuantizedWeight:
    """Round a matrix (n, k) to float8 with a scale for each row, with which the row's largest number becomes 448."""
    scales = (matrix.float().abs().amax(dim=1, keepdim=True) / LARGEST_FLOAT8).clamp(min=torch.finfo(torch.float32).tiny)
    data = (matrix.float() / scales).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(FLOAT8)
    return QuantizedWeight(data, scales, group_size=matrix.shape[1], width=matrix.shape[1])
