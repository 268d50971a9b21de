"""Tile shapes and schedules of the Hopper kernel, chosen by pure functions of what the host knows.

`hopper_forward_tiles` chooses the size of a tile, the number of warpgroups that compute it and the schedule. `heads_to_pack`
chooses how many heads share a tile, `key_splits` whether keys may be split, and `head_group` how many heads are computed
together, so that their keys stay in the L2 cache. There is no autotuning, because a serving path must not stall on new lengths.
`benchmarks/tuning/tune_hopper.py` and `tune_cells.py` measure the alternatives; each branch states the figure that chose it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache

from fa_serve.backends.chunks import MIN_SPLIT_KEYS
from fa_serve.launching.launch import power_of_2
from fa_serve.spec import FEW_QUERIES


class Schedule(IntEnum):
    """How tiles reach the thread blocks.

    GRID     one thread block per tile; the hardware starts thread blocks in order, longest tiles first
    DYNAMIC  as many thread blocks as fit the GPU; each takes its next tile from a counter in global memory
    """

    GRID = 0
    DYNAMIC = 1


@dataclass(frozen=True, slots=True)
class HopperTiles:
    """One way to run the kernel.

    groups:    number of consumer warpgroups, each with 64 query rows; block_m = 64 * groups
    block_n:   keys in a block
    stages:    blocks of K in flight, and as many blocks of V
    q_stages:  query tiles in shared memory. With 2, the next tile's queries arrive while this tile computes, and with `overlap`
               the next tile's first QK^T is issued while this tile's last PV runs. With 1, a resident thread block starts each
               tile cold
    pingpong:  warpgroups take turns at issuing products, so that one computes its softmax while the other's products run
    overlap:   QK^T of a block is issued before PV of the previous block, and both run during the softmax (FlashAttention-3,
               section 3.2). With False, the kernel waits for each product; this is an ablation
    softmax_first: all exponentials of a block come before the wait for PV of the previous block; otherwise ptxas places them
    o_parts:   0: O leaves through the buffer of its queries, which is free for new queries when O has left. 2: O leaves in two
               halves through a buffer of half its size, and the queries' buffer is free after the tile's last QK^T
    blocks_per_sm: thread blocks that share a multiprocessor; more than one needs small tiles
    rescale_late: O is rescaled for a new maximum while QK^T of the next block runs, instead of before that product is issued
    """

    groups: int
    block_n: int
    stages: int
    q_stages: int
    schedule: Schedule
    pingpong: bool = False
    overlap: bool = True
    softmax_first: bool = True
    o_parts: int = 0
    blocks_per_sm: int = 1
    rescale_late: bool = False

    @property
    def block_m(self) -> int:
        return 64 * self.groups

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread: (of every thread at launch, of a consumer thread after setmaxnreg).

        The producer keeps 24. With pages or lists it needs 40, for which consumers give it some of theirs, see
        `types.Variant.producer_registers`.
        """
        warpgroups = self.groups + 1
        launch = min(65536 // (128 * warpgroups * self.blocks_per_sm) // 8 * 8, 240)
        consumer = min((launch * warpgroups - 24) // self.groups // 8 * 8, 240)
        return launch, consumer


MAX_HEAD_DIM = 256
MAX_HEAD_DIM_OF_TREE = 128
"""For wider heads, the two outputs that a tree needs do not fit in the registers, see `forward.tree`."""
HALVES_TREE_TILES = False
"""The switch: whether calls that follow the tree have tiles of 64 rows, two on a multiprocessor, if their tiles of 128 rows do
not fill the GPU. It may be switched on once `benchmarks/tuning/tune_tree.py` has found them faster for 512 queries over 8192
keys."""
SHARED_BYTES = 232_448
"""Shared memory of one thread block on Hopper."""


def key_columns(head_dim: int) -> tuple[int, int]:
    """Columns in shared memory of both parts of Q and K."""
    return _columns(head_dim, widest=128)


def value_columns(head_dim_v: int) -> tuple[int, int]:
    """Columns in shared memory of both parts of V and O."""
    return _columns(head_dim_v, widest=256)


def _columns(head_dim: int, widest: int) -> tuple[int, int]:
    """-> columns of the first part, and of the second part or 0, for a head_dim up to 256.

    Columns are powers of two, because the sizes of all tensors of Triton are. The copy engine fills columns past head_dim with
    zeros. Two parts waste little: 80 is computed as 64 + 16, 96 as 64 + 32 and 192 as 128 + 64, while 72 costs as much as 80,
    112 as much as 128 and 224 as much as 256.
    """
    first = min(max(32, 1 << head_dim.bit_length() - 1), widest)
    rest = head_dim - first
    if rest <= 0:
        return first, 0
    second = max(16, power_of_2(rest))
    return (2 * first, 0) if second == first < widest else (first, second)


@lru_cache(maxsize=4096)
def hopper_forward_tiles(
    head_dim: int,
    head_dim_v: int,
    window: tuple[int, int],
    max_seqlen_q: int,
    max_seqlen_k: int,
    varlen: bool,
    paged: bool = False,
) -> HopperTiles:
    """The tiles of one call; a paged call also counts as varlen.

    If the columns of V differ from those of Q, O does not fit in the buffer of its queries and leaves through a separate one.

    Figures in the comments without a unit are TFLOPS on one H200 with bfloat16 and 16k tokens of hidden size 2048, measured by
    `benchmarks/tuning/tune_hopper.py`. Lengths such as 512, 2k and 16k are numbers of keys.
    """
    d0, d1 = key_columns(head_dim)
    dv0, dv1 = value_columns(head_dim_v)
    tiles = _tiles_of_width(d0 + d1, dv0 + dv1, window, max_seqlen_q, max_seqlen_k, varlen, paged)
    if tiles.o_parts == 0 and (dv0 != d0 or dv1 not in (0, d1)):
        tiles = replace(tiles, o_parts=2)
    return tiles


@lru_cache(maxsize=256)
def list_tiles(head_dim: int, head_dim_v: int, block_size: tuple[int, int]) -> HopperTiles:
    """The tiles of a call with lists: the rows of a tile lie in one block of queries, and the keys of each of its blocks in one
    block of the list.

    They follow only from `hopper_forward_tiles` and the size of blocks. None of them has been measured.
    """
    rows, keys = block_size
    d0, d1 = key_columns(head_dim)
    dv0, dv1 = value_columns(head_dim_v)
    width = max(d0 + d1, dv0 + dv1)
    if rows == 64:
        blocks = 3 if width <= 64 else 2 if width <= 128 else 1
        queries = 2 if width <= 128 else 1
        tiles = HopperTiles(1, 64, blocks if blocks > 1 else 2, queries, Schedule.DYNAMIC, blocks_per_sm=blocks)
    elif width > 128:
        wide = keys == 64 or dv0 + dv1 > 160 or d0 + d1 > 192 or d0 + d1 + dv0 + dv1 > 320
        tiles = HopperTiles(2, 64 if wide else 128, 2, 1, Schedule.DYNAMIC, rescale_late=not wide)
    elif keys == 64:
        tiles = HopperTiles(2, 64, 4, 2, Schedule.DYNAMIC, rescale_late=width > 64)
    elif width <= 64:
        tiles = HopperTiles(2, 128, 3, 2, Schedule.DYNAMIC, softmax_first=False)
    else:
        tiles = HopperTiles(2, 128, 2, 2, Schedule.DYNAMIC, rescale_late=True)
    in_halves = width > 128 or dv0 != d0 or dv1 not in (0, d1)
    return replace(tiles, o_parts=2 if in_halves else 0)


def tree_tiles(head_dim: int, head_dim_v: int, count: int) -> HopperTiles:
    """The tiles of a call that follows the tree: its blocks have 64 keys, and a row has two outputs in registers.

    count: the most tiles of 128 rows that the call may have

    Times in us on one H200 (16/8 heads of 128), with the usual tiles and with this tile: 127 and 152 for 4096 queries, 62 and
    63 for 16 x 512.
    """
    d0, d1 = key_columns(head_dim)
    dv0, dv1 = value_columns(head_dim_v)
    o_parts = 2 if dv0 != d0 or dv1 not in (0, d1) else 0
    if HALVES_TREE_TILES and count < FULL_WAVES * 132:
        return HopperTiles(1, 64, 2, 2, Schedule.DYNAMIC, rescale_late=True, o_parts=o_parts, blocks_per_sm=2)
    return HopperTiles(2, 64, 4, 2, Schedule.DYNAMIC, rescale_late=True, o_parts=o_parts)


@lru_cache(maxsize=256)
def hopper_float8_tiles(head_dim: int, head_dim_v: int) -> HopperTiles:
    """The tiles of a call with float8 products. O has more bytes than Q, so it leaves through a separate buffer.

    Measured at head_dim 128 on one H200, 16k tokens, quantisation included, in TFLOPS; "-" was not measured:

                                                  "qk8" full  "qk8" causal  "fp8" full  "fp8" causal
        this tile                                        804           736         810           730
        exponentials after the wait for P V              716           720         800           638
        the same, with ping-pong                         783           658         787           680
        without overlap                                  626           620         788           626
        blocks of 64 keys                                674           624           -           596
        blocks of 256 keys, without overlap                -             -         695           623
    """
    if max(head_dim, head_dim_v) > 128:
        return HopperTiles(2, 64, 2, 1, Schedule.DYNAMIC, o_parts=2)
    return HopperTiles(2, 128, 3, 2, Schedule.DYNAMIC, o_parts=2)


def _tiles_of_width(
    width_k: int, width_v: int, window: tuple[int, int], max_seqlen_q: int, max_seqlen_k: int, varlen: bool, paged: bool
) -> HopperTiles:
    """`hopper_forward_tiles` for Q and K of `width_k` columns and V of `width_v` columns in shared memory."""
    width = max(width_k, width_v)
    left, right = window
    masked = left >= 0 or right >= 0
    seen = max_seqlen_k  # keys that a row sees on average
    if right >= 0:
        seen = min(seen - max_seqlen_q // 2, left + right + 1 if left >= 0 else seen)
    if width <= 128 and (max_seqlen_q <= 64 or _small_are_faster(width, window, max_seqlen_q, seen, varlen, paged)):
        # One warpgroup holds all rows of the call, or a small tile visits fewer keys that its rows do not see. Two or three
        # thread blocks share a multiprocessor and hide each other's start and end.
        # 512 packed sequences of 64 tokens reach 88, and 68 with a plain grid.
        # With 3 thread blocks, 64 causal sequences of 197 tokens take 141 us (32 heads of 96), and 154 with 2. A producer that
        # reads a block table leaves no registers for 3 thread blocks. At D128, 64 such sequences take 132 us (32/8 heads), and
        # 136 with all exponentials before the wait.
        blocks = 3 if width <= 64 or (width <= 96 and not paged) else 2
        stages = 3 if width <= 64 else 2
        return HopperTiles(1, 64, stages, 2, Schedule.DYNAMIC, softmax_first=64 < width <= 96, blocks_per_sm=blocks)
    if max_seqlen_q <= 64:
        return HopperTiles(1, 64, 2, 1, Schedule.GRID, o_parts=2)
    if width_v > 160 or width_k > 192 or (width > 128 and width_k + width_v > 320):
        # Shared memory has room for one query tile only. With a buffer for half of O, the next queries arrive during the last
        # PV: 517 at 512, and 466 without the buffer. Rescaling O before the next QK^T reaches 691 at 4k, and during it 659.
        # At D192 there is room for a third stage. With it, late rescaling and ping-pong, 16k tokens take 0.94 to 0.99 of the
        # time.
        if width <= 192:
            return HopperTiles(2, 64, 3, 1, Schedule.DYNAMIC, pingpong=True, o_parts=2, rescale_late=True)
        return HopperTiles(2, 64, 2, 1, Schedule.DYNAMIC, o_parts=2)
    if width > 128:
        # D192 with values of 128: causal 4k reaches 525 with late rescaling, and 495 without.
        return HopperTiles(2, 128, 2, 1, Schedule.DYNAMIC, o_parts=2, rescale_late=True)
    if width <= 64 and (paged or (masked and max_seqlen_k <= 4096)):
        # Two warpgroups waste less of the diagonal: 402 at 2k, and 368 with three and ping-pong.
        # With three, few registers are left for a producer that reads a block table: 2k queries over 6k keys in pages take
        # 561 us with three and 401 us with two.
        return HopperTiles(2, 128, 3, 2, Schedule.DYNAMIC, softmax_first=False)
    if width <= 64:
        # Exponentials where ptxas puts them reach 409 at 512, and exponentials before the wait 375; at 8k both reach 516.
        # Long causal tiles lose nothing by a cold start: 16k takes 2.18 ms with one query stage and 2.34 ms with two. Packed
        # sequences may be short, so they keep two stages.
        # Late rescaling reaches 501 against 472 at 2k and 543 against 535 at 16k, but 405 against 412 at 512 and 489 against
        # 502 at causal 16k.
        return HopperTiles(
            3,
            128,
            2,
            1 if masked and not varlen else 2,
            Schedule.DYNAMIC,
            pingpong=True,
            softmax_first=False,
            rescale_late=not masked and max_seqlen_k > 1024,
        )
    # Ping-pong helps where tiles are short (625 against 604 at 1k, causal 526 against 482 at 2k) but not at 16k (755 against
    # 757, causal 745 against 747). Late rescaling helps without ping-pong (757 against 745 at 16k, causal 747 against 733),
    # with pages (617 against 602), and together with ping-pong at D72 without a mask (2 packed sequences of 8192 tokens: 1313
    # against 1343 us). Exponentials where ptxas puts them help short tiles: 32 causal sequences of 512 tokens take 187 us, and
    # 195 with exponentials before the wait. Pages do without it, which saves the engine the compilation of one more kernel.
    pingpong = varlen or max_seqlen_k <= (4096 if masked else 1024)
    return HopperTiles(
        2,
        128,
        2,
        2,
        Schedule.DYNAMIC,
        pingpong=pingpong,
        softmax_first=max_seqlen_k > 512 or (masked and paged),
        rescale_late=paged or not pingpong or (width <= 96 and not masked),
    )


def _small_are_faster(width: int, window: tuple[int, int], max_seqlen_q: int, seen: int, varlen: bool, paged: bool) -> bool:
    """Whether tiles of one warpgroup are faster for more than 64 queries that see `seen` keys on average.

    D64 causal reaches 302 at 512, 378 at 1k and 430 at 2k; the larger tile reaches 246, 339 and 409. At 8k it is the other way
    round, 475 and 526. A window of 128 at 16k takes 0.44 of the time of that tile. Wide windows were not compared.

    Times in us on one H100, with this tile and with the larger one. Causal: 71 heads of 64, 32 packed sequences of 64 to 4096
    tokens: 1119 and 1206; 32/32 heads of 96, 64 sequences of 197 tokens: 141 and 152, 32 of 512 tokens: 185 and 196; 32/8 heads
    of 128, the same lengths: 132 and 139, 201 and 187. Without a mask, 16 heads of 64, 16k tokens in sequences of 197: 59 and
    86; of 257: 80 and 101; of 384: 77 and 75; of 577: 126 and 135; of 730: 140 and 131; of 1024: 174 and 173. This tile is
    faster where the last of the tiles of 192 rows would be nearly empty.
    """
    left, right = window
    if left < 0 and right < 0:
        small, large = (-(-max_seqlen_q // rows) * rows for rows in (64, 192))
        return width <= 64 and not paged and max_seqlen_q <= 1024 and 1.15 * small < large
    if width <= 64:
        return seen <= (2048 if varlen and not paged else 1024)
    return seen <= (256 if width <= 96 or left >= 0 else 128)


PACKED_TILES = 0.9
"""The heads of a KV head share the tiles of a chunk if that takes at most this part of the tiles, because the last tile of each
head would be nearly empty. FlashAttention-3 has the same limit."""


def heads_to_pack(heads_per_kv: int, max_seqlen_q: int, keys: int = 0, *, rows: int = 128, may_pad: bool) -> int:
    """How many query heads share a tile, a power of two: all heads of a KV head, or 1; see `pack_gqa`.

    They share tiles if there are few queries, or if the queries are chunks behind many keys in pages, of which shared tiles
    leave fewer rows empty.

    keys:    keys in pages that a row sees; 0 if keys are not in pages
    rows:    of a tile
    may_pad: whether the number may be rounded up to a power of two, because the output of padded tiles can be combined
    """
    pack_gqa = power_of_2(heads_per_kv)
    if pack_gqa > 64:
        return 1
    if max_seqlen_q <= FEW_QUERIES:
        return pack_gqa if may_pad or pack_gqa == heads_per_kv else 1
    if pack_gqa != heads_per_kv or not _may_split_chunks(max_seqlen_q, keys):
        return 1
    shared = -(-max_seqlen_q * pack_gqa // rows)
    return pack_gqa if shared <= PACKED_TILES * pack_gqa * -(-max_seqlen_q // rows) else 1


def _may_split_chunks(max_seqlen_q: int, keys: int) -> bool:
    """Whether the keys of chunks are many enough to be split."""
    return keys >= max(MIN_SPLIT_KEYS, 4 * max_seqlen_q)


MAX_SPLITS = 16
"""The most splits into which the keys of a row are cut."""
MIN_BLOCKS_OF_A_SPLIT = 8
"""With fewer key blocks, a split does not pay for the start and the end of a thread block and its part of the combining."""
MIN_SPLIT_KEYS_OF_FEW = 4096
"""The keys of up to FEW_QUERIES queries are split from this many visible keys on: splitting costs 5 us, in which a thread block
reads about 1000 keys of such a tile."""
FULL_WAVES = 0.85
"""The keys of prompts stay whole if their tiles fill at least this share of one or two waves of thread blocks, and always with
more waves."""
MIN_FILLED = 0.45
"""If tiles of a few queries occupy a smaller share of the thread blocks of an H100, the decoding kernel is faster."""


def key_splits(tiles: int, resident: int, max_seqlen_q: int, keys: int, *, packed_heads: bool = False) -> int:
    """Into how many splits the keys of a row may be cut, 1 if they stay whole; see `split_kv.tile_scheduler`, which cuts them.

    tiles: a lower bound of the tiles of the launch
    resident: thread blocks that run at once
    keys:  how many keys a row of the longest sequence sees
    packed_heads: the heads of a KV head share the tiles of chunks. The device decides whether their keys are split, by waves

    The limit bounds the buffer: about 4 partial outputs for each thread block that runs at once, 16 for a few queries, but at
    least 2 for each tile of a few queries. Prompts whose tiles fill the GPU stay whole. For a few queries the device decides,
    because their sequences may be of very unequal lengths.

    Times in us on one H200 with 16-bit heads of 128, whole and split: 32 tiles 63 and 32 (16 heads, 256 queries over 4096
    keys), 64 tiles 107 and 69 (512 over 8192), 783 and 400 (32 heads, 256 over 65,536); but 128 tiles for 132 thread blocks 113
    and 117, 256 tiles 129 and 137. 4 queries in each of 31 sequences of 500 keys and one of 65,536: 722 whole, 127 with up to 8
    splits, 107 with up to 16. 16 queries in each of 16 sequences of 1024 keys: 29 and 34.
    """
    few = max_seqlen_q <= FEW_QUERIES
    if not (keys >= MIN_SPLIT_KEYS_OF_FEW if few else _may_split_chunks(max_seqlen_q, keys)):
        return 1
    if packed_heads:
        return max(min(MAX_SPLITS, 4 * resident // max(tiles, 1)), 1)
    if few:
        return min(MAX_SPLITS, max(2, 16 * resident // max(tiles, 1)))
    waves = -(-tiles // resident)
    return 1 if waves > 2 or tiles >= FULL_WAVES * waves * resident else min(MAX_SPLITS, 4 * resident // max(tiles, 1))


@lru_cache(maxsize=4096)
def packs_queries(
    head_dim: int, head_dim_v: int, heads_per_kv: int, num_kv_heads: int, batch: int, max_seqlen_q: int, max_seqlen_k: int
) -> bool:
    """Whether this kernel is faster than the decoding kernel for up to FEW_QUERIES queries per sequence over a paged cache.

    Times in us on one H200 with bfloat16 and heads of 128, of the decoding kernel and of this one. If its tiles fill the GPU,
    this one is limited by memory, and the decoding kernel by instructions: 32 sequences of 4096 keys with 8 queries 145 and 137
    (32/8 heads), 152 and 138 (64/8); 128 of 1024 keys with 4 queries 137 and 135, 139 and 137.

    If about half of the thread blocks that could run have a tile, the decoding kernel reads faster, because it cuts the keys
    for more programs: 16 sequences of 8192 keys with 3 queries 136 and 151 (32/8), 143 and 150 (64/8); 32 of 4096 keys with
    28/4 heads, which this kernel pads, 77 and 84 (2 queries), 81 and 86 (8 queries). So do two thirds: 64/8 heads of 64 take 74
    and 84 (2 queries), 77 and 84 (4 queries). Of short sequences with many rows, instructions are the limit again: 16 of 2048
    keys with 16 queries 52 and 43 (32/8), 68 and 45 (64/8). A single sequence has too few tiles: 16 queries over 8192 keys take
    25 and 30, 4 over 1024 take 8 and 16.
    """
    if not 1 < max_seqlen_q <= FEW_QUERIES or max(head_dim, head_dim_v) > 128:
        return False
    pack_gqa = heads_to_pack(heads_per_kv, max_seqlen_q, may_pad=True)
    tiles = hopper_forward_tiles(head_dim, head_dim_v, (-1, 0), max_seqlen_q * pack_gqa, max_seqlen_k, True, True)
    count = batch * num_kv_heads * (heads_per_kv if pack_gqa == 1 else 1) * -(-max_seqlen_q * pack_gqa // tiles.block_m)
    resident = 132 * tiles.blocks_per_sm
    rows = heads_per_kv * max_seqlen_q
    if count <= 0.75 * resident and (rows <= 16 or (rows <= 64 and max_seqlen_k >= 4096)):
        return False
    return count >= MIN_FILLED * resident


@lru_cache(maxsize=4096)
def head_group(
    batch_heads: int, heads_per_kv: int, kv_bytes_per_head: int, tiles_per_head: int, equal: bool = False
) -> tuple[int, int]:
    """-> (query heads computed together, the fewest heads in the last group); see `producer._locate_tile`.

    batch_heads:       query heads of all sequences that the launch computes
    kv_bytes_per_head: size of the keys and values of one KV head
    tiles_per_head:    tiles of one query head
    equal:             all tiles visit the same number of key blocks

    Heads are computed together as long as their keys and values fit a third of the L2 cache, which has 50 MiB in two halves
    that may both hold a line. At D128 and 16k keys, groups of 4 heads read 645 MB of memory, where 207 MB is the least.
    The last group has enough heads for about three tiles per multiprocessor, so that the thread blocks finish at about the same
    time: D256 causal at 4k loses 19% with 1 head and 13% with 4. If these are at least half of all heads, all heads are
    computed together: D256 causal at 16k reaches 805 TFLOPS, and 786 with the last 4 of 8 apart.
    Equal tiles finish evenly in any order, so KV heads are computed one by one: D256 reaches 806 against 789 TFLOPS at 4k and
    696 against 678 at 1k. At 16k this is no faster: D64 reaches 600 against 610.
    """
    if equal and tiles_per_head <= 64:
        return heads_per_kv, heads_per_kv
    cached = max((16 << 20) // max(kv_bytes_per_head, 1), 1) * heads_per_kv
    even = min(-(-3 * 132 // max(tiles_per_head, 1)), 32)
    if batch_heads <= 2 * even and not equal:
        return batch_heads, batch_heads
    return min(cached, batch_heads), min(-(-even // heads_per_kv) * heads_per_kv, batch_heads)
