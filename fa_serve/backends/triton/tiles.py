"""Which tile the forward kernel uses: a pure function of what the host knows. No autotuning on the serving path.

A tile is chosen by head size, dtype and architecture. Each branch names the measurement behind it;
`python benchmarks/bench_attention.py tune` prints the table again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TileConfig:
    """block_m query rows by block_n keys; num_stages tiles of K and V in flight; tma: K and V through tensor descriptors."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = False


def power_of_2(n: int) -> int:
    """The least that is no less than n > 0. Triton's own takes microseconds: it serves kernels as well."""
    return 1 << (n - 1).bit_length()


def padded_dim(head_dim: int) -> int:
    """Tensor-core tiles are powers of two, at least 16 wide."""
    return max(16, power_of_2(head_dim))


def batch_block(batch: int) -> int:
    """The width of a prefix sum over the batch. Few steps, so that a growing batch compiles few kernels."""
    block = 32
    while block < batch:
        block *= 8
    return block


def forward_tiles(
    arch: int,
    itemsize: int,
    head_dim: int,
    head_dim_v: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool,
    paged: bool,
    masked: bool,
) -> TileConfig:
    """The tile of one forward call. `arch` is 10 * major + minor, 0 for a GPU that is not NVIDIA's (or the interpreter)."""
    width = max(padded_dim(head_dim), padded_dim(head_dim_v))
    if itemsize == 4:
        # float32 keeps its full mantissa ("ieee" products run on the FMA units): small tiles, or registers spill
        if width <= 64:
            return TileConfig(64, 32, 4, 2)
        return TileConfig(32, 32, 8, 1) if width <= 128 else TileConfig(32, 16, 4, 1)
    if arch == 0:
        return TileConfig(64 if width > 128 or max_seqlen_q <= 64 else 128, 64 if width <= 128 else 32, 4, 1)
    if arch in (90, 100, 103) and not paged:
        # Measured on one H200, bf16, TFLOPS at seqlen 512 / 2048 / 8192 (16k tokens, hidden size 2048). TMA needs no address
        # registers: three stages fit beside the accumulator, and two programs of 64 rows share an SM.
        if width <= 64 and causal and max_seqlen_k <= 4096:
            return TileConfig(64, 64, 4, 3)  # causal 238 / 385 / 390; the next one 178 / 342 / 437
        if width <= 64 and max_seqlen_k <= 1024:
            return TileConfig(128, 64, 8, 3)  # full 325 / 394 / 399
        if width <= 64:
            return TileConfig(64, 128, 4, 3, tma=True)  # full 290 / 411 / 409
        if width <= 128:
            return TileConfig(64, 64, 4, 3, tma=True)  # full 348 / 438 / 471, causal 247 / 438 / 469
        if max_seqlen_q > 64:
            return TileConfig(128, 64, 8, 2, tma=True)  # full 343 / 462 / 511, causal 240 / 428 / 515
        return TileConfig(64, 64, 4, 2, tma=True)
    # compiled, not measured: the largest tiles without spills on sm80 to sm120
    if width <= 64:
        return TileConfig(64 if paged or masked or max_seqlen_q <= 64 else 128, 64, 4, 2 if paged else 3)
    return TileConfig(64, 64, 4, 2) if width <= 128 else TileConfig(64, 32, 8 if paged else 4, 2)


def launch_options(pdl: bool, num_warps: int) -> dict[str, Any]:
    """Triton's options of a launch. pdl: start while the one before drains, see `primitives.wait_for_previous_kernel`."""
    return {"num_warps": num_warps, **({"launch_pdl": True} if pdl else {})}
