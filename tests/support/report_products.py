"""Which kernel computes a product, as docs/kernels/products.md shows it: the table of kernels is asked for each cell.

FA_SERVE_WRITE_DOCS=1 pytest tests/docs/test_products.py       # writes the tables on the page again
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from product_cases import dense, of_experts

from fa_serve.ops.products.crossovers import CROSSOVERS
from fa_serve.ops.products.problem import Product
from fa_serve.ops.products.table import KERNELS, changes_of_kernel, kernels_of_experts, select_kernel

GPUS = {"Ampere": 80, "Ada": 89, "Hopper": 90, "Blackwell (10.0)": 100, "Blackwell (12.0)": 120, "AMD": 0}
"""Architectures that have separate kernels, and those that share the others."""
TOKENS = {"1 token": 1, "2 to 8": 2, "9 to 128": 9, "129 to 512": 129, "more": 513}
DENSE = {
    "bfloat16": dense("float"),
    "4 bits, groups of 128": dense(),
    "... of fewer than 4096 rows": dense(n=4000),
    "mxfp4; 4 bits, groups of 96": dense("float4"),
    "float8, a scale for each row": dense("float8", group=0),
    "... whose rows are no multiple of 16": dense("float8", n=28680, group=0),
    "float8 in blocks": dense("float8"),
    "bfloat16, deterministic mode": dense("float", invariant=True),
    "... of up to 16 million weights": dense("float", n=4096, invariant=True),
    "others, deterministic mode": dense(invariant=True),
}
MIXTURE = {"num_experts": 128, "top_k": 8}
EXPERTS = {
    "bfloat16, contiguous rows": of_experts("float", 1536, 2048, **MIXTURE),
    "bfloat16, contiguous columns": of_experts("float", 1536, 2048, by_rows=False, **MIXTURE),
    "mxfp4": of_experts("float4", 1536, 2048, **MIXTURE),
    "bfloat16, deterministic mode": of_experts("float", 1536, 2048, invariant=True, **MIXTURE),
    "mxfp4, deterministic mode": of_experts("float4", 1536, 2048, invariant=True, **MIXTURE),
}


def tables() -> str:
    """The part of the page that is generated."""
    return "\n".join(
        [
            "The first row of one table that fits computes a product: `select_kernel` in `fa_serve/ops/products/table.py`,",
            "which `fa-serve info`, the warm-up and this page ask. In bfloat16, by the number of tokens:",
            "",
            *_table(("weight", "GPU", *TOKENS), dense_rows()),
            "",
            "For experts, of which a token takes 8 of 128:",
            "",
            *_table(("weights", "GPU", "kernels"), expert_rows()),
            "",
            "The rows of the table:",
            "",
            *_table(("row", "computes", "launches"), kernel_rows()),
            "",
            "Limits that were measured, and lines of `benchmarks/results` on both sides of them:",
            "",
            *crossover_lines(),
        ]
    )


def dense_rows() -> list[tuple[str, ...]]:
    rows = []
    for weight, product in DENSE.items():
        for arch in GPUS.values():
            changes = {first for first, _ in changes_of_kernel(replace(product, arch=arch))}
            assert changes <= {*TOKENS.values()}, f"the columns hide that the kernel of {weight} changes at {sorted(changes)}"
        rows += [(weight, gpus, *names) for gpus, names in _by_gpu(product, _names)]
    return rows


def _names(product: Product) -> tuple[str, ...]:
    return tuple(f"`{select_kernel(replace(product, tokens=tokens)).kernel.name}`" for tokens in TOKENS.values())


def expert_rows() -> list[tuple[str, ...]]:
    rows = []
    for weight, product in EXPERTS.items():
        rows += [(weight, gpus, *names) for gpus, names in _by_gpu(product, _of_both)]
    return rows


def _of_both(product: Product) -> tuple[str, ...]:
    """product: the gated one; the other one has the exchanged sizes"""
    return (kernels_of_experts((replace(product, gated=True), replace(product, n=product.k, k=product.n // 2))),)


def _by_gpu(product: Product, cells: Callable[[Product], tuple[str, ...]]) -> list[tuple[str, tuple[str, ...]]]:
    """What a product has on each GPU, with equal GPUs together."""
    found: dict[tuple[str, ...], list[str]] = {}
    for gpu, arch in GPUS.items():
        found.setdefault(cells(replace(product, arch=arch)), []).append(gpu)
    if len(found) == 1:
        return [("all", each) for each in found]
    smallest_first = sorted(found.items(), key=lambda item: len(item[1]))
    *some, (others, _) = smallest_first
    return [*((", ".join(gpus), each) for each, gpus in some), ("others", others)]


def kernel_rows() -> list[tuple[str, ...]]:
    return [(f"`{x.name}`", x.about, ", ".join(f"`{name}`" for name in x.launches)) for x in KERNELS]


def crossover_lines() -> list[str]:
    lines = []
    for name, crossover in CROSSOVERS.items():
        keys = [line for pair in crossover.faster for line in pair] or crossover.lines
        cases = dict.fromkeys(key.partition(": ")[2] for key in keys)
        kernels = " and ".join(f"`{kernel}`" for kernel in crossover.kernels)
        limit = f"{kernels} {crossover.side} {crossover.limit:,} {crossover.unit} (`{name}`)"
        lines.append(f"- {limit}: {', '.join(f'`{case}`' for case in cases)}")
    return lines


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """A table in Markdown. The first cell of a row is empty if it is that of the row before."""
    names = ["", *(row[0] for row in rows)]
    shown = [("" if row[0] == before else row[0], *row[1:]) for row, before in zip(rows, names, strict=False)]
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(row) + " |" for row in shown)]
