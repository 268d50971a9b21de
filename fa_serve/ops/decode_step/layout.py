"""What the persistent kernel of a decoding step is compiled for, and how its work is divided between its programs.

    layout = layout_of(shape, num_programs=132, arch=90, tokens=1, max_seqlen_q=1)
    layout.qkv                                    # the rows, columns and tile of the merged projection

A layer is five phases: the q, k and v projection; attention; the output projection; the gate and up projection; the down
projection. In each phase a program has an equal share of the rows of the weights, and in attention every `num_programs`-th task
of (sequence, KV head, split of the keys). This module imports no Triton; kernel.py reads the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fa_serve.launching.sizes import power_of_2

MOST_STEP_TOKENS = 8
"""Tokens of a step that the kernel computes: the narrow side of a tile of tensor cores."""
PHASES = 5
"""Phases of a layer. Each has one counter."""
PHASE_STRIDE = 32
"""Counters are int64, and so far apart that no two share a line of the L2 cache or its neighbour."""
MOST_STEP_SPLITS = 32
"""Of the keys of a sequence."""


class StepTile(NamedTuple):
    """What is tuned. It changes no result but the order of sums.

    tile_bytes:    of the weights that a program loads at once; as many are in flight while those before are multiplied
    block_k:       columns of a tile at most
    num_warps:     of a program
    block_keys:    keys that attention reads at once; key_stages: such blocks in flight
    ahead_bytes:   of the next phase's weights that a program requests into the L2 cache when a phase begins; 0 for none
    tagged:        a step of one token has numbers that carry their layer (word_kernel.py) instead of counters (kernel.py)
    """

    tile_bytes: int = 32768
    block_k: int = 2048
    num_warps: int = 8
    block_keys: int = 64
    key_stages: int = 2
    ahead_bytes: int = 65536
    tagged: bool = False


DEFAULT_TILE = StepTile()
"""None of the candidates in `benchmarks/tuning/tune_decode_step.py` without tags was faster on an H200, at the shape of
Qwen3-0.6B."""


class StepShape(NamedTuple):
    """Sizes of the layers of a model, all of which are equal.

    hidden:     numbers of a token; intermediate: of the gated unit
    num_heads, num_kv_heads, head_dim, rotary_dim: of attention; rotary_dim of the numbers of a head are rotated
    head_norms: queries and keys have a norm; qkv_bias: their projection has a bias
    itemsize:   bytes of a weight
    """

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    head_norms: bool
    qkv_bias: bool
    itemsize: int

    @property
    def qkv_rows(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def weights(self) -> int:
        """Weights of the products of one layer."""
        attended = self.num_heads * self.head_dim
        return self.hidden * (self.qkv_rows + attended + 3 * self.intermediate)


@dataclass(frozen=True, slots=True)
class StepProduct:
    """One product of a layer: rows outputs of columns inputs, in tiles of block_rows rows by block_k columns.

    gated: an output is the gate of one row of the weights times another row, `rows` rows further. A tile has both, so that
           half of its block_rows are outputs
    k_groups: parts of block_k, each of which a warp sums with tensor cores
    normed: the input is normalised; added: the output is added to the residual stream; biased: it has a bias
    """

    rows: int
    columns: int
    block_rows: int
    block_k: int
    k_groups: int
    gated: bool = False
    normed: bool = False
    added: bool = False
    biased: bool = False

    @property
    def outputs_of_tile(self) -> int:
        return self.block_rows // 2 if self.gated else self.block_rows

    @property
    def blocks_of_row(self) -> int:
        return -(-self.columns // self.block_k)


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Constants of the compiled kernel, passed as one constexpr.

    programs:   of the grid, all of which are resident at once
    block_t:    rows of a tile of tokens: 1 for one token, which is multiplied without tensor cores, else 8
    groups:     query heads of a KV head
    block_m:    rows of a tile of queries; rows_m: power of two that holds the rows of a sequence
    max_splits: power of two that holds the splits of a sequence; merged_splits: splits that are merged at once
    block_new:  power of two that holds the new keys of a sequence
    precision:  of the products
    ptx:        inline PTX is available; bulk: so is the request for the L2 cache of Hopper
    """

    programs: int
    qkv: StepProduct
    o: StepProduct
    gate_up: StepProduct
    down: StepProduct
    block_t: int
    num_heads: int
    num_kv_heads: int
    groups: int
    dim: int
    rotary_dim: int
    head_norms: bool
    block_m: int
    rows_m: int
    block_new: int
    block_keys: int
    key_stages: int
    max_splits: int
    merged_splits: int
    page_size: int
    kind: int
    precision: str
    num_warps: int
    ahead_bytes: int
    bulk: bool

    @property
    def words(self) -> int:
        """Words with tags that the programs of a step of one token share: the residual stream twice, and what products read."""
        return 2 * self.o.rows + self.qkv.rows + self.o.columns + self.gate_up.rows

    @property
    def parts_of_unit(self) -> int:
        """Numbers of float32 that the splits of one KV head of a sequence leave: outputs, then maxima, then sums."""
        return self.max_splits * self.rows_m * (self.dim + 2)


def row_share(program: int, rows: int, programs: int) -> tuple[int, int]:
    """First and last row, excluded, of a program. kernel.py computes the same."""
    return program * rows // programs, (program + 1) * rows // programs


def splits_of(layout: StepLayout, batch: int) -> int:
    """Into how many splits the keys of each sequence are cut: as many tasks as there are programs, if that is possible."""
    return max(1, min(layout.max_splits, layout.programs // (batch * layout.num_kv_heads)))


def takes_words(layout: StepLayout) -> bool:
    """Whether word_kernel.py computes steps of one token. Words are read eight at a time, and a program has a task at most."""
    eights = (layout.rotary_dim // 2, layout.o.rows, layout.o.columns, layout.gate_up.rows)
    return all(size % 8 == 0 for size in eights) and layout.num_kv_heads * layout.max_splits <= layout.programs


def unsupported_shape(shape: StepShape, tokens: int) -> str | None:
    """Why the kernel does not compute layers of these sizes, or None."""
    if tokens > MOST_STEP_TOKENS:
        return f"a step must have at most {MOST_STEP_TOKENS} tokens, got {tokens}"
    if shape.head_dim != power_of_2(shape.head_dim) or not 16 <= shape.head_dim <= 256:
        return f"head_dim must be a power of two from 16 to 256, got {shape.head_dim}"
    if shape.num_heads % shape.num_kv_heads:
        return f"num_heads must be a multiple of num_kv_heads, got {shape.num_heads} and {shape.num_kv_heads}"
    vector = 16 // shape.itemsize
    for name, size in (("hidden", shape.hidden), ("intermediate", shape.intermediate)):
        if size % vector:
            return f"{name} must be a multiple of {vector}, so that rows of weights are aligned, got {size}"
    return None


def layout_of(
    shape: StepShape,
    *,
    programs: int,
    arch: int,
    tokens: int,
    max_seqlen_q: int,
    page_size: int,
    kind: int,
    tile: StepTile = DEFAULT_TILE,
) -> StepLayout:
    """The constants for steps of so many tokens. kind: of the activation, as in `elementwise/activation.py`"""
    rows_m = power_of_2(shape.num_heads // shape.num_kv_heads * max_seqlen_q)
    max_splits = min(MOST_STEP_SPLITS, _power_below(programs // shape.num_kv_heads))
    attended = shape.num_heads * shape.head_dim

    def product(rows: int, columns: int, **options: bool) -> StepProduct:
        return _product(shape, tile, programs, tokens > 1, rows, columns, **options)

    return StepLayout(
        programs=programs,
        qkv=product(shape.qkv_rows, shape.hidden, normed=True, biased=shape.qkv_bias),
        o=product(shape.hidden, attended, added=True),
        gate_up=product(shape.intermediate, shape.hidden, normed=True, gated=True),
        down=product(shape.hidden, shape.intermediate, added=True),
        block_t=1 if tokens == 1 else MOST_STEP_TOKENS,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        groups=shape.num_heads // shape.num_kv_heads,
        dim=shape.head_dim,
        rotary_dim=shape.rotary_dim,
        head_norms=shape.head_norms,
        block_m=max(16, rows_m),
        rows_m=rows_m,
        block_new=16,
        block_keys=tile.block_keys,
        key_stages=tile.key_stages,
        max_splits=max_splits,
        # 8192 numbers are 32 registers of a thread
        merged_splits=max(1, min(max_splits, 8192 // (rows_m * shape.head_dim))),
        page_size=page_size,
        kind=kind,
        precision="ieee" if shape.itemsize == 4 else "tf32",
        num_warps=tile.num_warps,
        ahead_bytes=tile.ahead_bytes if arch >= 90 else 0,
        bulk=arch >= 90,
    )


def _product(
    shape: StepShape, tile: StepTile, programs: int, tensor_cores: bool, rows: int, columns: int, **options: bool
) -> StepProduct:
    """A product with a tile of about `tile_bytes`, which has no more rows than the share of a program."""
    share = power_of_2(-(-rows // programs)) * (2 if options.get("gated") else 1)
    # several tokens take registers for each column as well, so tiles have fewer columns and more rows
    block_k = min(tile.block_k, power_of_2(columns), 512 if tensor_cores else tile.block_k)
    numbers = tile.tile_bytes // shape.itemsize
    block_rows = max(2, min(numbers // block_k, share))
    if tensor_cores:
        block_rows = max(16, block_rows)
    return StepProduct(rows, columns, block_rows, block_k, max(1, min(tile.num_warps, block_k // 16)), **options)


def _power_below(number: int) -> int:
    """The largest power of two that is not above a number, at least 1."""
    return 1 << max(number, 1).bit_length() - 1
