"""What the warps of the Hopper kernel agree on: the compiled variant, and what its partitions hand to one another.

Gluon functions pass a named tuple on as the values that it holds; the tuple itself does not exist at run time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from triton.experimental.gluon import language as gl

from fa_serve.backends.hopper.block_sparse import AddedMask, Lists
from fa_serve.backends.hopper.forward.tiles import HopperTiles
from fa_serve.spec import Precision

RAGGED = gl.constexpr(1 << 30)
"""Bound of the row coordinate of a ragged descriptor, see `descriptors.ragged_view`."""


@dataclass(frozen=True)
class Variant:
    """Everything that is fixed when the kernel is compiled, passed as one constexpr.

    tiles:      shape of a tile, stages, schedule
    d0, d1:     columns in shared memory of the first and of the second part of Q and K, see `tiles.key_columns`
    dv0, dv1:   columns of the first and of the second part of V and O, see `tiles.value_columns`
    varlen:     sequences are packed, or their keys are in pages; else the batch is dense
    has_left, has_right, softcap: whether the options have a left bound, a right bound, a softcap; their values are arguments
    page_size:  tokens per page of the KV cache, 0 if keys are not in pages
    block_q, block_k: queries and keys per block of the lists, 0 without lists; bits: partial blocks have bits
    mask:       the mask that the lists were scanned from, "bool" or "float", or "none"; mask_words: see `plan.has_mask_words`
    sequences_first: (dense) tiles of the same head and rows of all sequences follow one another, see `plan.SHARE_BIAS`
    precision:  the option of the call. "bf16": Q, K, V and P have 16 bits; "qk8": Q and K are float8 with scales; "fp8": V and
                P are float8 as well. See `triton.float8_inputs`
    gaps:       (float8 keys, varlen) the copies of keys are packed with gaps; else they are a dense batch. See
                `triton.float8_inputs`
    pack_gqa:   query heads that share a tile, see `pack_gqa`; padded: a KV head has fewer query heads than this
    split_kv:   keys may be split among tiles, see `split_kv.split`; dim_v: head_dim_v of its buffer
    tree_blocks: key blocks per group of the tree that the kernel follows, see `forward.tree`; 0 without a tree
    """

    tiles: HopperTiles
    d0: int
    d1: int
    dv0: int
    dv1: int
    varlen: bool
    has_left: bool
    has_right: bool
    softcap: bool
    page_size: int = 0
    block_q: int = 0
    block_k: int = 0
    bits: bool = False
    mask: str = "none"
    mask_words: bool = False
    sequences_first: bool = False
    precision: Precision = "bf16"
    gaps: bool = False
    pack_gqa: int = 1
    padded: bool = False
    split_kv: bool = False
    dim_v: int = 0
    tree_blocks: int = 0

    @property
    def queries(self) -> int:
        """Queries of one head in a tile."""
        return self.tiles.block_m // self.pack_gqa

    @property
    def float8_keys(self) -> bool:
        """Whether Q and K are float8 with scales."""
        return self.precision != "bf16"

    @property
    def float8_values(self) -> bool:
        """Whether V and P are float8; V is then transposed."""
        return self.precision == "fp8"

    @property
    def key_bytes(self) -> int:
        """Bytes of a number of Q and K in shared memory."""
        return 1 if self.float8_keys else 2

    @property
    def value_bytes(self) -> int:
        """Bytes of a number of V in shared memory."""
        return 1 if self.float8_values else 2

    @property
    def masked(self) -> bool:
        """Whether a block after a tile's first one may hold keys that some row does not see. With lists and with a tree, the
        block that the end of the sequence cuts need not be the first one."""
        return self.has_left or self.has_right or self.block_k > 0 or self.tree_blocks > 0

    @property
    def page_rows(self) -> int:
        """The rows of one copy from a paged cache: the largest number of keys that divides both a page and a block."""
        return math.gcd(self.page_size, self.tiles.block_n)

    @property
    def registers(self) -> int:
        """Registers of a consumer thread. If the producer reads a block table or lists, each consumer thread gives up 8."""
        return self.tiles.registers[1] - (8 if self.page_size or self.block_k else 0)

    @property
    def producer_registers(self) -> int:
        """Registers of a producer thread. Without a block table or lists it needs 24, the fewest that the hardware allows."""
        return 40 if self.page_size or self.block_k else 24

    @property
    def o_width(self) -> int:
        """Columns of the first part of O that one copy writes."""
        return self.dv0 // max(self.tiles.o_parts, 1)

    @property
    def score_layout(self) -> gl.NVMMADistributedLayout:
        """Layout of a warpgroup's scores [64, block_n] as wgmma leaves them."""
        return gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, self.tiles.block_n, 32 // self.key_bytes]
        )

    @property
    def bits_layout(self) -> gl.DistributedLinearLayout:
        """Layout of the bits [64, block_n / 32, 32] of a key block: `score_layout` with its columns in words of 32."""
        in_registers = [[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0]]
        in_lanes = [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
        words = self.tiles.block_n // 32
        count = 4 + words.bit_length() - 1
        return gl.DistributedLinearLayout(in_registers[:count], in_lanes, [[16, 0, 0], [32, 0, 0]], [], [64, words, 32])

    @property
    def word_layout(self) -> gl.DistributedLinearLayout:
        """`score_layout` with its columns in words of two: four threads of a warp have neighbouring words of a row."""
        in_registers = [[8, 0], [0, 4], [0, 8], [0, 16], [0, 32]]
        return self._layout_of_words(in_registers, [[0, 1], [0, 2]])

    @property
    def mask_layout(self) -> gl.DistributedLinearLayout:
        """Layout in which words [64, block_n / 2] of a mask are loaded: a thread has four neighbouring words of a row. The four
        threads that share rows in `word_layout` have the same words here."""
        in_registers = [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]]
        return self._layout_of_words(in_registers, [[0, 4], [0, 8]])

    def _layout_of_words(self, in_registers: list[list[int]], in_lanes: list[list[int]]) -> gl.DistributedLinearLayout:
        words = self.tiles.block_n // 2
        kept = [basis for basis in in_registers if basis[1] < words]
        return gl.DistributedLinearLayout(kept, [*in_lanes, [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, words])

    @property
    def probability_layout(self) -> gl.DotOperandLayout:
        """Layout of P [64, block_n] as wgmma takes it from registers: a thread's neighbours in a row fill 32 bits."""
        return gl.DotOperandLayout(operand_index=0, parent=self.output_layout, k_width=4 // self.value_bytes)

    @property
    def second_probability_layout(self) -> gl.DotOperandLayout:
        """`probability_layout` for the product with the second part of V. The registers are the same."""
        return gl.DotOperandLayout(operand_index=0, parent=self.second_output_layout, k_width=4 // self.value_bytes)

    @property
    def output_layout(self) -> gl.NVMMADistributedLayout:
        """Layout of the first part of a warpgroup's output [64, dv0] as wgmma leaves it."""
        return gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, self.dv0, 32 // self.value_bytes]
        )

    @property
    def second_output_layout(self) -> gl.NVMMADistributedLayout:
        """Layout of the second part of a warpgroup's output [64, dv1]."""
        return gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, max(self.dv1, 8), 32 // self.value_bytes]
        )


class Descriptors(NamedTuple):
    """How the copy engine sees each tensor; q1, k1, v1 and o1 are second parts, or the first parts again if there are none."""

    q: gl.tensor
    q1: gl.tensor
    k: gl.tensor
    k1: gl.tensor
    v: gl.tensor
    v1: gl.tensor
    o: gl.tensor
    o1: gl.tensor


class SharedMemory(NamedTuple):
    """The buffers of a thread block.

    q, q1:    (q_stages * groups, 64 rows, d0 or d1)
    k, k1, v, v1: (stages, block_n, columns of the part)
    o, o1:    (groups, 64 rows, o_width or dv1), or q and q1 if O has no buffer
    record:   (q_stages, 8), int32: the tile of each stage of q
    k_boxes, k1_boxes, v_boxes, v1_boxes: the memory of k, k1, v and v1 as boxes of page_rows keys by up to 64 columns, in the
              order of the swizzled layout; without pages k, k1, v and v1
    key_blocks: (stages, 2), int32: the `block_sparse.KeyBlock` in each stage of k; without lists, the buffer `record`
    """

    q: gl.tensor
    q1: gl.tensor
    k: gl.tensor
    k1: gl.tensor
    v: gl.tensor
    v1: gl.tensor
    o: gl.tensor
    o1: gl.tensor
    record: gl.tensor
    k_boxes: gl.tensor
    k1_boxes: gl.tensor
    v_boxes: gl.tensor
    v1_boxes: gl.tensor
    key_blocks: gl.tensor


class Barriers(NamedTuple):
    """Two mbarriers for each stage: the producer waits for `empty`, the consumers for `full`."""

    q_full: gl.tensor
    q_empty: gl.tensor
    k_full: gl.tensor
    k_empty: gl.tensor
    v_full: gl.tensor
    v_empty: gl.tensor


class ProducerArgs(NamedTuple):
    """The kernel's arguments that the producer needs to assign tiles and to find pages; see `kernel.Numbers`."""

    table: gl.tensor
    counter: gl.tensor
    total: gl.tensor
    num_m: gl.tensor
    num_heads: gl.tensor
    heads_per_kv: gl.tensor
    head_group: gl.tensor
    head_tail: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    left: gl.tensor
    right: gl.tensor
    block_table: gl.tensor
    table_stride: gl.tensor
    k_pitch: gl.tensor
    v_pitch: gl.tensor
    lists: Lists


class Scales(NamedTuple):
    """The factors of float8 numbers, see `triton.float8_inputs`; None or 0 without float8 products.

    q:      one for each row, in the shape of lse
    k, v:   one for each BLOCK_KEYS keys, (batch, num_kv_heads, stride), or (num_kv_heads, stride) if keys are packed with gaps
    stride: groups of BLOCK_KEYS keys per head
    """

    q: gl.tensor
    k: gl.tensor
    v: gl.tensor
    stride: gl.tensor
    heads_per_kv: gl.tensor


class ConsumerArgs(NamedTuple):
    """The kernel's arguments that the consumers need besides tiles; see `kernel.Numbers`."""

    lse: gl.tensor
    sinks: gl.tensor
    lse_stride: gl.tensor
    num_heads: gl.tensor
    heads_per_kv: gl.tensor
    scale: gl.tensor
    softcap: gl.tensor
    left: gl.tensor
    right: gl.tensor
    bits: gl.tensor
    added: AddedMask
    scales: Scales
    buffer: gl.tensor
    logs: gl.tensor
    tokens: gl.tensor


class Tile(NamedTuple):
    """One tile: 64 * groups query rows of one head of one sequence, or of the heads that share it (see `pack_gqa`).

    row:       first row in the sequence; negative: there is no tile, and the work ends
    head:      query head, or the KV head of the heads that share the tile; with split keys see `split_kv.split`
    origin:    batch index (dense), or the sequence's first row in q (packed)
    q_len:     queries of the sequence
    k_origin:  batch index (dense), the sequence's first row in k (packed), or its row of the block table (paged). Packed float8
               keys have gaps: each sequence begins at a multiple of BLOCK_KEYS rows
    kv_len:    keys of the sequence
    low, high: the tile visits key blocks [low, high); with lists, it visits high - low blocks
    """

    row: gl.tensor
    head: gl.tensor
    origin: gl.tensor
    q_len: gl.tensor
    k_origin: gl.tensor
    kv_len: gl.tensor
    low: gl.tensor
    high: gl.tensor
