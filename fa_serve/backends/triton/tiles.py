"""Which tiles the portable kernels use: pure functions of what the host knows. Nothing is tuned on the serving path.

`forward_tiles` chooses for the forward pass, `decode_tiles` for split-KV decoding, `combine_tiles` for combining splits, and
`sparse_tiles` for block-sparse calls; `latent.plan.latent_tiles` is in the folder of its kernel. Each branch cites the
measurement on which it is based. `bench_attention.py tune` and `tune_decode.py` in benchmarks/ repeat the measurements.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

import triton

from fa_serve.launching.launch import power_of_2

DECODE_MIN_ROWS = 8
"""Rows of the shortest decoding tile, a row being one query of one query head. In a batch that mixes decoding with prompts,
sequences with more rows go to the forward kernel. With 16 rows, the next tile, 32 sequences that decode 4096 keys next to a
prompt take 170 us instead of 141 (32/8 heads of 128, one H200) and 197 instead of 142 (64/8 heads)."""


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Tiles of the forward kernel: block_m query rows by block_n keys.

    num_stages: tiles of K and V in flight
    tma:        K and V are read through tensor descriptors
    masks_all:  every tile is masked, without a branch that masks only tiles at the edges. With the branch, Triton does not see
                that the second product takes its operand from the first, and divides the columns of scores of mma.sync among
                warps
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = False
    masks_all: bool = False


@dataclass(frozen=True, slots=True)
class BackwardTiles:
    """Tiles of the backward kernels.

    keys:    the kernel over key blocks, whose programs own block_n keys
    queries: the kernel over query blocks, whose programs own block_m rows
    """

    keys: TileConfig
    queries: TileConfig


_T = TypeVar("_T", bound="DecodeTiles")


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """Tiles of the decoding kernel: block_m packed query rows by block_n keys.

    splits:     splits per sequence or, if balanced, equal shares of the key blocks of the whole batch
    min_blocks: no split is shorter than this many key blocks
    registers:  the most registers per thread, 0 for the compiler's choice. Values that a split needs only once may spill; the
                inner loop does not spill
    mma_sync:   on Hopper, products use mma.sync in every release of Triton. Up to 3.7, products of 8 rows always do; since 3.8
                they use wgmma, which keeps one more block of keys in shared memory and reads float8 keys 16 bits at a time
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    splits: int
    balanced: bool
    min_blocks: int = 1
    registers: int = 0
    mma_sync: bool = False

    @property
    def by_rows(self) -> bool:
        """The rows of the scores are queries; in tiles with fewer query rows, they are keys."""
        return self.block_m >= 64

    def without_splits(self: _T) -> _T:
        """The same tiles for programs that walk over all keys of their rows."""
        return replace(self, splits=1, balanced=False, min_blocks=1)


@dataclass(frozen=True, slots=True)
class SparseTiles:
    """Tiles of the block-sparse kernel: block_m packed query rows by block_n keys, which divide the blocks of the lists.

    splits: splits of the lists of each block of queries
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    splits: int = 1


@dataclass(frozen=True, slots=True)
class CombineTiles:
    """Tiles of the kernel that combines splits: `block_rows` rows, `block_splits` splits at a time."""

    block_splits: int
    block_rows: int
    num_warps: int


def padded_dim(head_dim: int) -> int:
    """The width of a tile for this head size. Tiles of tensor cores are powers of two, at least 16 wide."""
    return max(16, power_of_2(head_dim))


def batch_block(batch: int) -> int:
    """The width of a prefix sum over the batch. It takes few values, so a growing batch compiles few kernels."""
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
    """The tile of one forward call. `arch` is 10 * major + minor, 0 for a GPU that is not NVIDIA's and for the interpreter."""
    width = max(padded_dim(head_dim), padded_dim(head_dim_v))
    if width > 256:
        return _widest_forward_tiles(arch, itemsize, masked)
    if itemsize == 4:
        # float32 keeps its full mantissa: "ieee" products run on the FMA units, and large tiles would spill registers
        if width <= 64:
            return TileConfig(64, 32, 4, 2)
        return TileConfig(32, 32, 8, 1) if width <= 128 else TileConfig(32, 16, 4, 1)
    if arch == 0:
        return TileConfig(64 if width > 128 or max_seqlen_q <= 64 else 128, 64 if width <= 128 else 32, 4, 1)
    if arch in (90, 100, 103) and not paged:
        # Measured on one H200 in bf16. The figures are TFLOPS at seqlen 512 / 2048 / 8192 (16k tokens, hidden size 2048). TMA
        # needs no address registers, so three stages fit next to the accumulator, and two programs of 64 rows share an SM.
        if width <= 64 and causal and max_seqlen_k <= 4096:
            return TileConfig(64, 64, 4, 3)  # causal 238 / 385 / 390, while the next tile reaches 178 / 342 / 437
        if width <= 64 and max_seqlen_k <= 1024:
            return TileConfig(128, 64, 8, 3)  # full 325 / 394 / 399
        if width <= 64:
            return TileConfig(64, 128, 4, 3, tma=True)  # full 290 / 411 / 409
        if width <= 128:
            return TileConfig(64, 64, 4, 3, tma=True)  # full 348 / 438 / 471, causal 247 / 438 / 469
        if max_seqlen_q > 64:
            return TileConfig(128, 64, 8, 2, tma=True)  # full 343 / 462 / 511, causal 240 / 428 / 515
        return TileConfig(64, 64, 4, 2, tma=True)
    # These are compiled but not measured: the largest tiles without spills on sm80 to sm120.
    if width <= 64:
        return TileConfig(64 if paged or masked or max_seqlen_q <= 64 else 128, 64, 4, 2 if paged else 3)
    return TileConfig(64, 64, 4, 2) if width <= 128 else TileConfig(64, 32, 8 if paged else 4, 2)


def _widest_forward_tiles(arch: int, itemsize: int, masked: bool) -> TileConfig:
    """The tiles of heads above 256, padded to 512. They are compiled but not measured: the largest without spills.

    Eight warps share an accumulator of 64 x 512, which is 128 registers per thread, so it needs no division of the head.
    """
    if itemsize == 4:
        return TileConfig(16, 16, 4, 1)
    if arch == 0:
        return TileConfig(32, 32, 4, 1)
    if arch in (80, 90, 100, 103):
        return TileConfig(64, 32, 8, 2)
    return TileConfig(64, 16, 8, 1 if masked else 2)  # 99 KiB of shared memory


def float8_tiles(arch: int, head_dim: int, *, float8_values: bool) -> TileConfig:
    """The tile of one forward call with float8 products, with `arch` as in `forward_tiles`.

    These are the largest tiles without spills; no others have been timed.
    Up to head_dim 128, GPUs that multiply by mma.sync (sm89, sm120) get at least as many rows as columns of V, which together
    with `masks_all` gives each warp whole rows of scores. Then P goes from one product to the other in registers, and a block
    of 64 keys at head_dim 128 takes 610 instructions. Tiles of 64 rows, whose P passes through shared memory, take 690 on four
    warps instead of eight.
    """
    if arch == 0:
        return TileConfig(64, 64, 4, 1)
    if arch in (90, 100, 103):
        if head_dim == 256:
            return TileConfig(128, 64, 8, 2)
        return TileConfig(64, 128 if float8_values or head_dim == 64 else 64, 4, 3)
    if head_dim == 256:
        return TileConfig(64, 64, 8, 2)
    return TileConfig(64, 64, 4, 3, masks_all=True) if head_dim == 64 else TileConfig(128, 64, 8, 3, masks_all=True)


def backward_tiles(arch: int, itemsize: int, head_dim: int, head_dim_v: int) -> BackwardTiles:
    """The tiles of one backward pass, with `arch` as in `forward_tiles`.

    Measured on an H200 in bfloat16 over 16k tokens with sequences of 16k, TFLOPS full / causal. PyTorch's FlashAttention-2 has
    291 / 279 at head_dim 64, 309 / 313 at 128 and 263 / 259 at 256.
    """
    width = max(padded_dim(head_dim), padded_dim(head_dim_v))
    if itemsize == 4:
        rows = 32 if width <= 64 else 16
        tile = TileConfig(rows, 32 if width <= 128 else 16, 4, 1)
        return BackwardTiles(tile, tile)
    if arch in (90, 100, 103):
        if width <= 64:
            # 340 / 326; with atomic additions to dQ 333 / 334, with 64 rows 282 / 287
            return BackwardTiles(TileConfig(128, 128, 8, 2, tma=True), TileConfig(128, 64, 4, 2))
        if width <= 128:
            # 414 / 432; 128 keys and 8 warps 350 / 361, the same with atomic additions to dQ and 3 stages 401 / 391
            return BackwardTiles(TileConfig(64, 64, 4, 2, tma=True), TileConfig(64, 64, 4, 2))
        # 225 / 239; 32 rows of queries and 32 keys for dQ 163 / 176, 64 rows for dQ 148 / 166, atomic additions to dQ 149 / 161
        return BackwardTiles(TileConfig(64, 64, 8, 2, tma=True), TileConfig(128, 64, 8, 1))
    # not measured: the largest tiles that fit the shared memory and the registers of the smaller GPUs
    if width <= 64:
        return BackwardTiles(TileConfig(64, 64, 4, 2), TileConfig(64, 64, 4, 2))
    if width <= 128:
        return BackwardTiles(TileConfig(32, 64, 4, 1), TileConfig(64, 32, 4, 1))
    return BackwardTiles(TileConfig(32, 32, 4, 1), TileConfig(32, 32, 4, 1))


@dataclass(frozen=True, slots=True)
class _Resources:
    """What one decoding program uses. `resident` such programs run on an SM at once."""

    block_n: int
    num_warps: int
    max_stages: int
    registers: int
    resident: int


@lru_cache(maxsize=4096)
def decode_tiles(
    arch: int,
    num_sms: int,
    itemsize: int,
    kv_itemsize: int,
    head_dim: int,
    head_dim_v: int,
    num_heads: int,
    num_kv_heads: int,
    batch: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_splits: int,
) -> DecodeTiles:
    """The tile of one decoding call. With `num_splits` given, neither the batch nor the lengths change the result."""
    groups = num_heads // num_kv_heads
    rows = groups if num_splits else groups * max_seqlen_q
    width = max(padded_dim(head_dim), padded_dim(head_dim_v))
    # With keys as rows, 64 query rows would spill registers.
    block_m = min(32, max(DECODE_MIN_ROWS, 1 << (rows - 1).bit_length()))
    if block_m == 32 and arch == 90 and itemsize == kv_itemsize == 2 and width <= 128:
        block_m = 64
    if width > 256 and arch == 0:
        block_m = max(16, block_m)  # 8 rows spill a kilobyte on gfx942
    one_sequence = batch == 1 and not num_splits
    found = _decode_resources(arch, itemsize, kv_itemsize, width, block_m, one_sequence=one_sequence)
    tile_bytes = found.block_n * (padded_dim(head_dim) + padded_dim(head_dim_v)) * kv_itemsize
    q_bytes = block_m * padded_dim(head_dim) * itemsize
    num_stages = min(found.max_stages, max(2, 1 + (_pipeline_bytes(arch) - q_bytes) // tile_bytes))
    # In 16 bits, heads of 128 and one sequence with heads of 64 leave room for the second block of wgmma and lose no time: with
    # Triton 3.8 and 3.6, 64 x 8192 keys take 496 and 497 us at head_dim 128, and 1 x 16384 keys 13.2 and 14.2 us at 64.
    loses_nothing_by_wgmma = kv_itemsize == 2 and width <= 128 and (width > 64 or one_sequence)
    tiles = DecodeTiles(
        block_m,
        found.block_n,
        found.num_warps,
        num_stages,
        num_splits,
        balanced=False,
        registers=found.registers,
        mma_sync=block_m == 8 and itemsize == 2 and found.num_warps >= 4 and not loses_nothing_by_wgmma,
    )
    if num_splits:
        return tiles
    units = num_kv_heads * triton.cdiv(groups * max_seqlen_q, block_m)
    max_blocks = triton.cdiv(max_seqlen_k, found.block_n)
    if max_blocks <= 1 or (batch * units >= 4 * num_sms and max_blocks * found.block_n <= 1024):
        # Every SM has several programs of a few microseconds, so there is nothing to balance, and one launch suffices
        # (6% at 128 x 1024).
        return replace(tiles, splits=1)
    wave = max(1, found.resident * num_sms // units)  # splits that run at once
    if batch == 1:
        return replace(tiles, splits=min(wave, max_blocks))
    return replace(tiles, splits=wave, balanced=True, min_blocks=2)


def _decode_resources(
    arch: int, itemsize: int, kv_itemsize: int, width: int, block_m: int, *, one_sequence: bool
) -> _Resources:
    """Keys per tile, warps, stages and registers, for tiles of `width` columns. The figures are from one H200."""
    if block_m == 64:
        # A block of 64 keys takes 596 instructions and three barriers. 32 rows with keys as rows take 621 and nine, and reach
        # 3.1 TB/s (8 queries of 32/8 heads, 32 x 4096). With two stages they take 152.8 us, with three 144.5.
        return _Resources(block_n=128 if width <= 64 else 64, num_warps=4, max_stages=3, registers=0, resident=2)
    if width > 256:
        # This is compiled but not measured. With 32 rows, 32 keys spill on sm80 to sm89, and 4 warps on every NVIDIA GPU.
        max_stages = 1 if arch == 0 else 2 if block_m > 16 else 4  # by shared memory
        return _Resources(block_n=16, num_warps=8 if arch else 4, max_stages=max_stages, registers=0, resident=2)
    # With three stages 8 sequences of 8192 keys take 73.4 us, with two 72.4.
    found = _Resources(block_n=64, num_warps=4, max_stages=2, registers=168, resident=3)
    if kv_itemsize == 1:
        # Half the bytes per key allow twice the keys in flight.
        found = replace(found, block_n=128, max_stages=3)
    if width <= 64 and block_m == 8 and not one_sequence:
        # 32 x 4096 with 64/8 heads takes 74.1 us, and 78.5 with the tile of wide heads. In float8 it takes 51.0 and 52.6.
        found = _Resources(128, 4, 2, 128, 4) if kv_itemsize > 1 else _Resources(128, 2, 2, 168, 6)
    elif width <= 64 and kv_itemsize > 1:
        # One sequence of 16384 keys takes 14.8 us, and 16.8 with the tile above.
        found = replace(found, block_n=128, max_stages=3, registers=0, resident=2)
    if width > 128:
        found = replace(found, block_n=32, max_stages=4, registers=0, resident=2)
    if itemsize == 4:
        # float32 products run on the FMA units, and their operands live in registers.
        found = _Resources(32 if width <= 128 else 16, 8, 4, 0, 2)
    if block_m > 16 or arch not in (90, 100):
        found = _Resources(min(found.block_n, 64), max(found.num_warps, 4), 2 if block_m > 16 else 4, 0, 2)
    return found


def _pipeline_bytes(arch: int) -> int:
    """Shared memory for the queries and for keys and values in flight, such that two programs fit on one SM."""
    if arch in (90, 100):
        return 100 << 10
    return 72 << 10 if arch == 80 else 40 << 10 if arch else 24 << 10


def sparse_tiles(
    arch: int,
    num_sms: int,
    itemsize: int,
    head_dim: int,
    head_dim_v: int,
    block_rows: int,
    block_keys: int,
    rows: int,
    lists: int,
    split_keys: int,
    num_splits: int,
) -> SparseTiles:
    """The tile of one block-sparse call.

    Measured in ms in bf16 on one H200, for lists with a quarter of the blocks of 128 in 16k keys: for head_dim 64, 128 x 64
    with 4 warps takes 1.43, and 64 x 64 takes 1.46; for 128, 64 x 64 takes 1.21, and 128 x 64 takes 1.32; for 256, 128 x 64
    with 8 warps takes 0.99, and 64 x 64 with 4 takes 1.70. Other GPUs use the forward kernel's tiles for pointer loads, with
    fewer keys where those tiles spill.

    block_rows: packed rows per block of queries; block_keys: keys per block
    rows:       packed rows of the longest sequence; lists: sequences times heads that have lists
    split_keys: the most keys in a list that may be cut into splits, 0 where there are enough programs without splits
    """
    width = max(padded_dim(head_dim), padded_dim(head_dim_v))
    if arch == 90 and itemsize == 2 and width <= 256:
        measured = {64: TileConfig(128, 64, 4, 3), 128: TileConfig(64, 64, 4, 3), 256: TileConfig(128, 64, 8, 2)}
        found = measured[max(64, width)]
    else:
        found = forward_tiles(arch, itemsize, head_dim, head_dim_v, rows, block_keys, causal=True, paged=True, masked=True)
    block_m = min(found.block_m, max(16, power_of_2(rows)))
    while block_rows % block_m:
        block_m //= 2
    block_n = min(found.block_n, block_keys)
    if arch not in (0, 90) and width > 64:
        block_n = min(block_n, 32 if width <= 256 else 16)  # twice as many keys spill up to 160 bytes on sm80 to sm120
    splits = num_splits
    if not splits:
        programs = lists * triton.cdiv(rows, block_m)
        splits = max(1, min(2 * num_sms // programs, split_keys // (2 * block_n)))
    return SparseTiles(block_m, block_n, found.num_warps, found.num_stages, splits)


def combine_tiles(balanced: bool, splits: int, block_dv: int, rows: int) -> CombineTiles:
    """The tile of the kernel that combines splits. It takes few values, so changing shapes compile few kernels.

    One warp adds up a row in its registers, while four warps pass every sum through shared memory. In us on one H200 with 32/8
    and 64/8 heads of 128, one warp and four: 8 x 8192 keys 72.2 and 74.6, 32 x 4096 keys 131.7 and 134.5, and 134.0 and 141.7.
    The many splits of one sequence are shared by two warps: 1024 keys take 6.8 us, and 7.5 with one warp. Without `balanced`,
    the order in which splits are added depends on their number, and not on the batch.
    """
    if not balanced:
        num_warps = 2 if block_dv <= 128 else 4 if block_dv <= 256 else 8
        return CombineTiles(16 if splits <= 16 else 32 if splits <= 32 else 64, 1, num_warps)
    if rows >= 4096:
        # Fewer programs with few splits each: 256 x 4096 keys with 64/8 heads take 994 us instead of 1004, and of head size 64
        # 539 instead of 550.
        return CombineTiles(4, 2, 1 if block_dv <= 256 else 2)
    return CombineTiles(16 if block_dv <= 128 else 4, 1, 1)
