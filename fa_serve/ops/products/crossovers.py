"""Where another kernel becomes the faster one, and the committed lines of benchmarks/results that show it.

    UNPACK_TOKENS.limit                    # 128
    UNPACK_TOKENS.lines                    # {"ops_quantized: 28672x4096 mxfp4 128": "unpack", ...}

`benchmarks/bench_ops.py` writes the lines. A test finds each line, makes the product that its case names, and checks that the
table chooses the kernel that is named here; where two kernels were timed in the same run, it checks which one is faster. A
limit is only as exact as the timed sizes on both sides of it. Left out: limits that follow from how a kernel is written
(conditions.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Crossover:
    """A limit that was measured.

    kernels: the kernels that the limit is for; `side` says on which side of it they compute
    side:    "up to" if they compute `limit` and less, "from" if they compute `limit` and more
    limit:   the last number of `unit` that they compute, or the first one with "from"
    unit:    what is counted
    lines:   from "file: case" of benchmarks/results, on both sides of the limit, to the kernel that computed it
    faster:  pairs of "file: case" of one run, in which two kernels computed the same product: the faster, then the slower
    """

    kernels: tuple[str, ...]
    side: Literal["up to", "from"]
    limit: int
    unit: str
    lines: Mapping[str, str]
    faster: tuple[tuple[str, str], ...] = field(default=())


UNPACK_TOKENS = Crossover(
    ("unpack", "unpack_wgmma"),
    "up to",
    128,
    "tokens",
    {
        "ops_quantized: 28672x4096 mxfp4 128": "unpack",
        "ops_quantized: 28672x4096 mxfp4 256": "dequantise",
        "ops_quantized: 28672x4096 int4 128": "unpack_wgmma",
        "ops_quantized: 28672x4096 int4 256": "one_expert",
    },
)
"""The most tokens that the kernels for 2 or more tokens multiply with weights that they unpack themselves. With more tokens,
the whole matrix is unpacked first, unless `one_expert` multiplies."""

FLOAT8_TOKENS = Crossover(
    ("float8_wgmma",),
    "up to",
    128,
    "tokens",
    {
        "ops_quantized: 28672x4096 fp8-row 128": "float8_wgmma",
        "ops_quantized: 28672x4096 fp8-row 256": "scaled_mm",
        "ops_quantized: 4096x4096 fp8-row 128": "float8_wgmma",
        "ops_quantized: 4096x4096 fp8-row 256": "scaled_mm",
    },
)
"""The most tokens that the Hopper kernel multiplies in float8. With more, `torch._scaled_mm` does."""

ONE_EXPERT_TOKENS = Crossover(
    ("one_expert",),
    "up to",
    512,
    "tokens",
    {
        "ops_quantized: 28672x4096 int4 512": "one_expert",
        "ops_quantized: 28672x4096 int4 2048": "dequantise",
        "ops_quantized: 28672x4096 fp8-block 512": "one_expert",
        "ops_quantized: 28672x4096 fp8-block 2048": "dequantise",
    },
)
"""The most tokens that the Hopper kernel of experts multiplies with a dense weight."""

ONE_EXPERT_ROWS = Crossover(
    ("one_expert",),
    "from",
    4096,
    "rows",
    {"ops_quantized: 4096x14336 int4 256": "one_expert", "ops_quantized: 4096x4096 int4 256": "one_expert"},
)
"""The fewest rows of a dense weight that the Hopper kernel of experts multiplies: 4096. With fewer rows, most multiprocessors
would have no tile, and no such weights were timed."""

EXPERT_ROWS = Crossover(
    ("expert_rows",),
    "from",
    8,
    "experts for each pair",
    {"ops_experts: qwen30a3b matrices 1": "expert_rows", "ops_experts: qwen30a3b matrices 4": "grouped"},
)
"""The fewest experts for each pair with which every pair reads its expert's weights by itself: 8. If two tokens take the same
expert, its weights are then read twice. A single token takes each expert at most once, so it has no such limit."""

EXPERT_MATRICES_PAIRS = Crossover(
    ("expert_matrices",),
    "from",
    64,
    "pairs for each expert",
    {"ops_experts: qwen30a3b matrices 256": "grouped", "ops_experts: qwen30a3b matrices 1024": "expert_matrices"},
)
"""The fewest pairs for each expert, on average, that the Hopper kernel for matrices multiplies: 64. Its tiles have 128 pairs,
and fewer than 64 were not timed."""

EXPERT_WGMMA_PAIRS = Crossover(
    ("expert_wgmma",),
    "up to",
    512,
    "pairs for each expert",
    {"ops_experts: gptoss20b mxfp4 1024": "expert_wgmma", "ops_experts: gptoss20b mxfp4 8192": "dequantise_experts"},
    (
        ("ops_experts_ways: gptoss20b mxfp4 1024 wgmma", "ops_experts_ways: gptoss20b mxfp4 1024 dequantized"),
        ("ops_experts_ways: gptoss20b mxfp4 8192 dequantized", "ops_experts_ways: gptoss20b mxfp4 8192 wgmma"),
    ),
)
"""The most pairs for each expert, on average, that the Hopper kernel multiplies with quantised experts. With more, some experts
at a time are dequantised and multiplied as matrices. Linear interpolation between both timed sizes gives 517."""

GROUPED_PAIRS = Crossover(
    ("grouped",),
    "up to",
    192,
    "pairs for each expert",
    {},
    (
        ("ops_experts_ways: gptoss20b mxfp4 1024 portable", "ops_experts_ways: gptoss20b mxfp4 1024 dequantized"),
        ("ops_experts_ways: gptoss20b mxfp4 8192 dequantized", "ops_experts_ways: gptoss20b mxfp4 8192 portable"),
    ),
)
"""The same limit for the portable kernel. Linear interpolation between both timed sizes, 128 and 1,024 pairs, gives 171."""

CROSSOVERS = {
    "UNPACK_TOKENS": UNPACK_TOKENS,
    "FLOAT8_TOKENS": FLOAT8_TOKENS,
    "ONE_EXPERT_TOKENS": ONE_EXPERT_TOKENS,
    "ONE_EXPERT_ROWS": ONE_EXPERT_ROWS,
    "EXPERT_ROWS": EXPERT_ROWS,
    "EXPERT_MATRICES_PAIRS": EXPERT_MATRICES_PAIRS,
    "EXPERT_WGMMA_PAIRS": EXPERT_WGMMA_PAIRS,
    "GROUPED_PAIRS": GROUPED_PAIRS,
}
