"""Why a kernel does not compute a product: one function for each row of table.py, which returns the reason or None.

The table has already checked that the kernel reads weights of this kind, and that Triton runs on the device if the kernel needs
it. A reason says what the kernel computes and what was asked for. Limits that were measured are in crossovers.py; the limits
here follow from how kernels are written.
"""

from __future__ import annotations

from typing import Any

import torch

from fa_serve.ops.products import tiles
from fa_serve.ops.products.crossovers import (
    EXPERT_MATRICES_PAIRS,
    EXPERT_ROWS,
    EXPERT_WGMMA_PAIRS,
    FLOAT8_TOKENS,
    GROUPED_PAIRS,
    ONE_EXPERT_ROWS,
    ONE_EXPERT_TOKENS,
    UNPACK_TOKENS,
)
from fa_serve.ops.products.problem import Product
from fa_serve.spec import dtype_name

SCALED_MM_ARCHS = (89, 90, 100, 103)
"""Compute capabilities, times ten, for which PyTorch has a product of float8 with a scale for each row and column."""
HALVES = (torch.float16, torch.bfloat16)
"""Dtypes that tensor cores multiply with unpacked weights."""
GEMV_COLUMNS = 32768
"""The most columns of a weight that is multiplied with one token on Hopper: the token is kept in shared memory."""
FEW_ROWS_COLUMNS = 512
"""The kernel for few rows takes only more columns than this."""
MOST_WEIGHTS = {"int4": 1 << 33, "float4": 1 << 33, "float8": 1 << 31}
"""Kernels for Hopper multiply fewer weights (n * k) than this, because they count words and bytes in 32 bits."""
MOST_VALUES = 1 << 31
"""An expert must have fewer values than this, because their offsets are counted in 32 bits."""
MOST_ROWS = 1 << 31
"""The matrices of all experts must have fewer rows than this, because the copy engine counts rows in 32 bits."""


def _listed(names: tuple[Any, ...]) -> str:
    return " and ".join([", ".join(map(str, names[:-1])), str(names[-1])] if len(names) > 1 else [str(names[0])])


def _unless(condition: bool, reason: str) -> str | None:
    return None if condition else reason


def refuses_nothing(product: Product) -> str | None:
    return None


def _other_gpu(product: Product) -> str | None:
    """Why a kernel in Gluon cannot run: the device, the release of Triton, or the address of the weight."""
    if product.arch != 90:
        got = f"compute capability {product.arch / 10}" if product.arch else "another device"
        return f"runs on Hopper (compute capability 9.0) only, got {got}"
    if not product.gluon:
        return "needs a supported release of Triton, and TRITON_INTERPRET off"
    return _unless(product.aligned, "copies 16 bytes at a time, and the weight's address is not a multiple of 16")


def _other_dtype(product: Product, *dtypes: torch.dtype) -> str | None:
    names = _listed(tuple(map(dtype_name, dtypes)))
    return _unless(product.dtype in dtypes, f"multiplies input in {names}, got {dtype_name(product.dtype)}")


def _other_matrix_dtype(product: Product) -> str | None:
    return _unless(product.matrix_dtype == product.dtype, "multiplies only matrices that have the input's dtype")


def _other_tokens(product: Product, least: int, most: int) -> str | None:
    if least == most == 1:
        return _unless(product.tokens == 1, f"multiplies one token, got {product.tokens}")
    return _unless(least <= product.tokens <= most, f"multiplies {least} to {most} tokens, got {product.tokens}")


def _other_groups(product: Product, sizes: tuple[int, ...], multiple: int) -> str | None:
    fits = product.has_row_scales or product.group in sizes or product.group % multiple == 0
    of_sizes = "".join(f"{size}, " for size in sizes if size % multiple)
    return _unless(fits, f"takes groups of {of_sizes}any multiple of {multiple}, or whole rows, got {product.group}")


def _too_large(product: Product) -> str | None:
    most = MOST_WEIGHTS[product.values]
    return _unless(product.n * product.k < most, f"supports fewer than {most} weights (n * k), got {product.n} x {product.k}")


def _part_of_16_bytes(product: Product) -> str | None:
    multiple = 8 if product.is_packed else 16
    return _unless(product.k % multiple == 0, f"takes a multiple of {multiple} columns, got {product.k}")


def _cannot_read_float8(product: Product) -> str | None:
    return _unless(product.reads_float8, f"Triton has no float8 for compute capability {product.arch / 10}")


def refuses_invariant(product: Product) -> str | None:
    return _unless(product.invariant, "is used only if results must not depend on the number of rows, because it is slower")


def _refuses_a_choice_by_rows(product: Product) -> str | None:
    """Why the product may not have another kernel for another number of rows, if its rows must not depend on it."""
    chosen = tiles.CHOOSES_BY_ROWS or not product.invariant
    return _unless(chosen, "tiles are not chosen by the number of rows (products/tiles.py:CHOOSES_BY_ROWS is off)")


def refuses_invariant_rows(product: Product) -> str | None:
    """The kernel for few rows has the bits of `invariant` with the norm and the gate in separate launches."""
    usual = tiles.FEW_ROWS_IN_USUAL_MODE
    return (
        _unless(tiles.FUSES_FEW_ROWS, "is switched off (products/tiles.py:FUSES_FEW_ROWS)")
        or _unless(product.invariant or usual, "is used in deterministic mode only (products/tiles.py:FEW_ROWS_IN_USUAL_MODE)")
        or _refuses_a_choice_by_rows(product)
        or _other_gpu(product)
        or _other_dtype(product, *HALVES)
        or _other_matrix_dtype(product)
        or _other_tokens(product, 1, tiles.MOST_FEW_ROWS)
        or _unless(
            product.n * product.k <= tiles.MOST_FEW_ROWS_WEIGHTS,
            f"multiplies up to {tiles.MOST_FEW_ROWS_WEIGHTS} weights, got {product.n * product.k}",
        )
        or _unless(product.contiguous, "takes contiguous weights, and tokens whose numbers are contiguous")
        or _unless(product.k % 8 == 0, f"takes a multiple of 8 columns, got {product.k}")
        or _unless(
            tiles.few_rows_bytes(product) <= tiles.MOST_TOKEN_BYTES,
            f"keeps up to {tiles.MOST_TOKEN_BYTES} bytes of tokens in shared memory, got {tiles.few_rows_bytes(product)}",
        )
        # the norm of shorter rows has fewer than the four warps of a wgmma
        or _unless(product.k > FEW_ROWS_COLUMNS, f"takes more than {FEW_ROWS_COLUMNS} columns, got {product.k}")
    )


def refuses_invariant_wgmma(product: Product) -> str | None:
    """The kernel for many rows has the bits of `invariant`, as if it were one more of its tiles."""
    refused = refuses_invariant(product) or _refuses_a_choice_by_rows(product)
    refused = refused or _other_gpu(product) or _other_dtype(product, *HALVES) or _other_matrix_dtype(product)
    refused = refused or _other_tokens(product, tiles.LEAST_WGMMA_ROWS, MOST_ROWS)
    # 256 rows and 4,096 columns (64 tiles) took 28.2 us on one H200, and 33.8 with `invariant`, which loads by pointers
    least = product.num_sms * 2 // 5
    found = -(-product.tokens // 128) * -(-product.n // 128)
    refused = refused or _unless(found >= least, f"needs at least {least} tiles of 128 x 128, got {found}")
    return refused or _unless(product.k % 8 == 0, f"takes a multiple of 8 columns, got {product.k}")


def refuses_dequantise(product: Product) -> str | None:
    return _cannot_read_float8(product)


def refuses_row(product: Product) -> str | None:
    return _other_tokens(product, 1, 1)


def refuses_gemv(product: Product) -> str | None:
    refused = _other_tokens(product, 1, 1) or _other_gpu(product) or _other_dtype(product, *HALVES) or _too_large(product)
    if refused is None and product.values == "float8":
        refused = _unless(product.k % 128 == 0, f"takes a multiple of 128 columns of float8, got {product.k}")
        refused = refused or _other_groups(product, (), 128)
    elif refused is None:
        # a block of 256 columns consists of equal parts that lie in one group each
        refused = _other_groups(product, (32, 64, 128), 256)
    reason = f"supports up to {GEMV_COLUMNS} columns, because the token is kept in shared memory, got {product.k}"
    return refused or _unless(product.k <= GEMV_COLUMNS, reason)


def refuses_unpack_row(product: Product) -> str | None:
    return _other_tokens(product, 1, 1) or _cannot_read_float8(product)


def refuses_scaled_mm(product: Product) -> str | None:
    return (
        _unless(product.has_row_scales, f"takes one scale per row, got groups of {product.group}")
        or _other_dtype(product, torch.bfloat16)
        or _unless(product.arch in SCALED_MM_ARCHS, "PyTorch has it for compute capabilities 8.9, 9.0, 10.0 and 10.3 only")
        or _unless(
            product.n % 16 == 0 and product.k % 16 == 0,
            f"takes multiples of 16 rows and columns, got {product.n} x {product.k}",
        )
    )


def refuses_float8_wgmma(product: Product) -> str | None:
    return (
        refuses_scaled_mm(product)
        or _other_gpu(product)
        or _other_tokens(product, 2, FLOAT8_TOKENS.limit)
        or _too_large(product)
    )


def _refuses_unpacking_on_hopper(product: Product) -> str | None:
    """The conditions that `unpack_wgmma` and `one_expert` share, because both copy and unpack words in the same way."""
    return (
        _other_gpu(product)
        or _other_dtype(product, *HALVES)
        # 128 columns consist of equal parts that lie in one group each
        or _other_groups(product, (32, 64), 128)
        or _part_of_16_bytes(product)
        or _too_large(product)
    )


def refuses_unpack_wgmma(product: Product) -> str | None:
    # scales of groups are rounded to the input's dtype, and float16 may not hold scales of another dtype
    by_row = product.values == "float8" and product.has_row_scales
    holds_scales = product.dtype == torch.bfloat16 or product.scales == product.dtype or by_row
    return (
        _other_tokens(product, 2, UNPACK_TOKENS.limit)
        or _refuses_unpacking_on_hopper(product)
        or _unless(holds_scales, "rounds scales to the input's dtype, and these scales may not fit into float16")
    )


def refuses_one_expert(product: Product) -> str | None:
    rows = ONE_EXPERT_ROWS.limit
    return (
        _other_tokens(product, 2, ONE_EXPERT_TOKENS.limit)
        or _unless(product.n >= rows, f"multiplies at least {rows} rows of weights, got {product.n}")
        or _other_dtype(product, torch.bfloat16)
        or _unless(
            product.is_packed or not product.has_row_scales, "takes float8 weights only with scales for groups of columns"
        )
        or _refuses_unpacking_on_hopper(product)
        or _unless(
            product.n * product.k < MOST_VALUES,
            f"supports fewer than {MOST_VALUES} values (32-bit offsets), got {product.n} x {product.k}",
        )
    )


def refuses_unpack(product: Product) -> str | None:
    most = UNPACK_TOKENS.limit
    too_many = _unless(product.tokens <= most, f"multiplies up to {most} tokens, got {product.tokens}")
    return too_many or _cannot_read_float8(product)


def _average(product: Product) -> str:
    return f"{product.pairs_per_expert:.4g} on average"


def refuses_expert_rows(product: Product) -> str | None:
    experts = EXPERT_ROWS.limit
    few = product.tokens == 1 or experts * product.pairs <= product.num_experts
    got = f"got {product.pairs} pairs and {product.num_experts} experts"
    return _unless(product.by_rows, "needs contiguous rows in the weights of both products") or _unless(
        few, f"needs a single token, or at least {experts} experts per pair, {got}"
    )


def refuses_expert_matrices(product: Product) -> str | None:
    least = EXPERT_MATRICES_PAIRS.limit
    return (
        _other_gpu(product)
        or _refuses_a_choice_by_rows(product)
        or _unless(not product.kept, "does not store the results before the gate")
        or _other_dtype(product, torch.bfloat16)
        or _unless(
            product.matrix_dtype == product.dtype,
            f"multiplies only weights that have the input's dtype, got {product.matrix_dtype}",
        )
        or _unless(product.pairs_per_expert >= least, f"takes at least {least} pairs per expert, got {_average(product)}")
        or _unless(product.contiguous, "takes contiguous matrices, by rows or by columns")
        # it copies 64 columns at a time, in units of 8 numbers along a row or, if transposed, along a column
        or _unless(
            product.k % 64 == 0 and product.n % 16 == 0,
            f"takes a multiple of 16 rows and of 64 columns, got {product.n} x {product.k}",
        )
        or _unless(
            product.num_experts * max(product.n, product.k) < MOST_ROWS,
            f"supports fewer than {MOST_ROWS} rows over all experts",
        )
    )


def refuses_expert_wgmma(product: Product) -> str | None:
    most = EXPERT_WGMMA_PAIRS.limit
    return (
        _other_gpu(product)
        or _other_dtype(product, torch.bfloat16)
        # a block of 256 columns consists of equal parts that lie in one group each
        or _other_groups(product, (32, 64, 128), 256)
        or _part_of_16_bytes(product)
        or _unless(product.n * product.k < MOST_VALUES, f"supports fewer than {MOST_VALUES} values per expert (32-bit offsets)")
        or _unless(product.pairs_per_expert <= most, f"takes up to {most} pairs per expert, got {_average(product)}")
    )


def refuses_dequantise_experts(product: Product) -> str | None:
    more = GROUPED_PAIRS.limit
    # tensor cores do not multiply float32, and without them a product takes longer than unpacking
    many = product.pairs_per_expert > more
    return _other_dtype(product, *HALVES) or _unless(many, f"takes more than {more} pairs per expert, got {_average(product)}")
