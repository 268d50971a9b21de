"""docs/kernels/products.md says which kernel computes a product, as the table of kernels decides it.

To write the tables again: FA_SERVE_WRITE_DOCS=1 pytest tests/docs/test_products.py
"""

from __future__ import annotations

import product_cases
import report_products
from documentation import ROOT, check_generated
from report_products import dense_rows, expert_rows, kernel_rows, tables

from fa_serve.ops.products.table import KERNELS

PAGE = ROOT / "docs" / "kernels" / "products.md"


def test_the_tables_are_those_of_the_table_of_kernels() -> None:
    check_generated(PAGE, "products table", tables())


def test_each_kernel_has_a_row_and_is_the_choice_of_a_cell() -> None:
    """Except PyTorch, which computes what no GPU computes."""
    rows = kernel_rows()
    assert [name for name, _, _ in rows] == [f"`{kernel.name}`" for kernel in KERNELS]
    chosen = " ".join(" ".join(row).replace("`", "") for row in [*dense_rows(), *expert_rows()])
    assert [kernel.name for kernel in KERNELS if kernel.name not in chosen] == []


def test_cells() -> None:
    dense = {row[:2]: row[2:] for row in dense_rows()}
    assert dense["4 bits, groups of 128", "Hopper"] == (
        "`gemv`",
        "`unpack_wgmma`",
        "`unpack_wgmma`",
        "`one_expert`",
        "`dequantise`",
    )
    assert dense["float8 in blocks", "Ampere, AMD"] == ("`torch`",) * 5
    assert dense["mxfp4; 4 bits, groups of 96", "all"] == report_products._names(product_cases.dense(group=96))
    experts = {row[:2]: row[2] for row in expert_rows()}
    assert (
        experts["mxfp4", "Hopper"] == "expert_rows for 1 to 2 tokens, expert_wgmma for 3 to 8192, dequantise_experts for more"
    )
