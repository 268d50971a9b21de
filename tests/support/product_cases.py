"""Products to ask the table of kernels about, each with a usual one as its default; and products by the cases of benchmarks."""

from __future__ import annotations

from typing import Any

import torch

from fa_serve.ops.products.problem import Product

BF16 = torch.bfloat16
SCALES = {"int4": BF16, "float4": torch.uint8, "float8": torch.float32}
GROUPS = {"int4": 128, "float4": 32, "float8": 128}


def dense(values: str = "int4", n: int = 28672, k: int = 4096, **changes: Any) -> Product:
    """A product of a dense weight on Hopper. group: 0 stands for a scale for each row"""
    kept: dict[str, Any] = {"matrix_dtype": BF16}
    if values != "float":
        group = changes.pop("group", GROUPS[values])
        kept = {"group": group or k, "scales": SCALES[values]}
    return Product(**{"values": values, "n": n, "k": k, "tokens": 8, "dtype": BF16, "arch": 90, **kept, **changes})


def of_experts(values: str = "float4", n: int = 5760, k: int = 2880, **changes: Any) -> Product:
    """A product of gpt-oss-20b's experts on Hopper."""
    return dense(values, n, k, **{"num_experts": 32, "top_k": 4, **changes})


def with_pairs(pairs_per_expert: float, values: str = "float", **changes: Any) -> Product:
    """A product of many experts that have so many pairs on average; 0 for deterministic mode."""
    experts = 1000
    product = {"num_experts": experts, "top_k": 1, "tokens": round(experts * pairs_per_expert) or 1, **changes}
    return of_experts(values, **product, invariant=not pairs_per_expert)


FORMS = {"int4": ("int4", 128), "fp8-row": ("float8", 0), "fp8-block": ("float8", 128), "mxfp4": ("float4", 32)}
MIXTURES = {"qwen30a3b": (128, 8, 2048, 768), "gptoss20b": (32, 4, 2880, 2880)}
"""(experts, top_k, hidden, width). gpt-oss' matrices are transposed."""


def of_case(case: str) -> Product:
    """The product of a case of `bench_ops.py`: "28672x4096 int4 128", or the first product of "gptoss20b mxfp4 1024"."""
    shape, form, tokens, *_ = case.split()
    values, group = FORMS.get(form, ("float", 0))
    asked: dict[str, Any] = {"tokens": int(tokens)} | ({} if values == "float" else {"group": group})
    if shape not in MIXTURES:
        n, k = map(int, shape.split("x"))
        return dense(values, n, k, **asked)
    num_experts, top_k, hidden, width = MIXTURES[shape]
    by_rows = values != "float" or shape != "gptoss20b"
    return of_experts(values, 2 * width, hidden, num_experts=num_experts, top_k=top_k, gated=True, by_rows=by_rows, **asked)
