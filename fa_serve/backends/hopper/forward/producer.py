"""The producer warp: it assigns tiles to its thread block and starts every copy from global to shared memory.

The producer asks for the next tile while the copies of the current one are in flight. It writes each tile's record to shared
memory next to the tile's queries, so that the consumers need not decode indices or read lengths.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from fa_serve.backends.hopper.block_sparse import KeyBlock, announce_key_block, list_of, listed_key_block
from fa_serve.backends.hopper.forward.pack_gqa import heads_of
from fa_serve.backends.hopper.forward.tree import block_at
from fa_serve.backends.hopper.forward.types import RAGGED, Tile
from fa_serve.launching.gluon_names import async_load

TILE_LAYOUT = gl.constexpr(gl.BlockedLayout([8], [32], [1], [0]))
"""A tile's record [8] in the producer's one warp: each thread has all of it."""
PAGES_LAYOUT = gl.constexpr(gl.BlockedLayout([16], [32], [1], [0]))
"""The pages of a block of keys [block_n / page_rows] in the producer's one warp."""


class PagedOperand(NamedTuple):
    """K or V in a paged cache: its descriptor, its boxes in shared memory, and the distance from page to page in rows."""

    desc: gl.tensor
    boxes: gl.tensor
    pitch: gl.tensor


@gluon.jit
def field_of(record, i: gl.constexpr, layout: gl.constexpr, size: gl.constexpr = 8):
    """Element `i` of a small tensor of integers, as a scalar. Each thread has all elements, so the sum needs no exchange."""
    return gl.sum(gl.where(gl.arange(0, size, layout=layout) == i, record, 0), 0)


@gluon.jit
def unpack_tile(record, layout: gl.constexpr):
    """The tile of a record [8], int32, which holds the fields of the tile in their order."""
    return Tile(
        field_of(record, 0, layout),
        field_of(record, 1, layout),
        field_of(record, 2, layout),
        field_of(record, 3, layout),
        field_of(record, 4, layout),
        field_of(record, 5, layout),
        field_of(record, 6, layout),
        field_of(record, 7, layout),
    )


@gluon.jit
def _pack(tile):
    """The record [8], int32, of a tile."""
    i = gl.arange(0, 8, layout=TILE_LAYOUT)
    record = gl.where(i == 0, tile.row, tile.head)
    record = gl.where(i == 2, tile.origin, record)
    record = gl.where(i == 3, tile.q_len, record)
    record = gl.where(i == 4, tile.k_origin, record)
    record = gl.where(i == 5, tile.kv_len, record)
    record = gl.where(i == 6, tile.low, record)
    return gl.where(i == 7, tile.high, record)


@gluon.jit
def _locate_tile(index, tiles, heads, args):
    """The `index`-th tile of the launch -> (head, number of the tile among the `tiles` of this head).

    Tiles of `head_group` heads follow one another, because these heads' keys share the L2 cache. Within a group the longest
    tiles come first, and tiles of the same length are in the order of heads. The last group has `head_tail` heads, and also the
    heads that would not fill another group: a shorter last group would leave most thread blocks without work.
    """
    safe = gl.maximum(gl.minimum(index, tiles * heads - 1), 0)
    per_group = gl.maximum(args.head_group * tiles, 1)
    last = (heads - args.head_tail) // args.head_group
    group = gl.minimum(safe // per_group, last)
    rest = safe - group * per_group
    size = gl.where(group == last, heads - group * args.head_group, args.head_group)
    return group * args.head_group + rest % size, rest // size


@gluon.jit
def _dense_tile(index, args, var: gl.constexpr):
    """-> the `index`-th tile of a dense batch, and its sequence. Past the last tile, the row is -1."""
    batch_head, m = _locate_tile(index, args.num_m, args.total // args.num_m, args)
    if var.has_right or var.mask != "none":  # the last rows of most masks see the most keys, too
        m = args.num_m - 1 - m
    row = m * var.queries
    offset = args.seqlen_k - args.seqlen_q
    end = args.seqlen_k
    if var.has_right:
        end = gl.minimum(end, row + var.queries + offset + args.right)
    # a tile whose rows see no key still visits one block, which is wholly masked, so that all tiles run the same code
    high = gl.maximum((end + var.tiles.block_n - 1) // var.tiles.block_n, 1)
    low = end * 0
    if var.has_left:
        low = gl.minimum(gl.maximum(row + offset - args.left, 0) // var.tiles.block_n, high - 1)
    batch = batch_head // args.num_heads
    head = batch_head % args.num_heads
    if var.sequences_first:
        sequences = gl.maximum(args.total // args.num_m // args.num_heads, 1)
        batch = batch_head % sequences
        head = batch_head // sequences
    row = gl.where(index < args.total, row, -1)
    return Tile(row, head, batch, args.seqlen_q, batch, args.seqlen_k, low, high), batch


@gluon.jit
def _packed_tile(index, args, live, var: gl.constexpr):
    """Read a record of `tile_scheduler.tile_table`, whose first `live` records are tiles."""
    head, number = _locate_tile(index, live, args.num_heads, args)
    tile = unpack_tile(gl.load(args.table + number * 8 + gl.arange(0, 8, layout=TILE_LAYOUT)), TILE_LAYOUT)
    row = gl.where(index < live * args.num_heads, tile.row, -1)
    if var.split_kv:
        head = tile.head * args.num_heads + head
    return Tile(row, head, tile.origin, tile.q_len, tile.k_origin, tile.kv_len, tile.low, tile.high), tile.head


@gluon.jit
def _tile(index, args, live, var: gl.constexpr):
    """-> the tile, and its list or, without lists, the number of its sequence."""
    if var.varlen:
        tile, sequence = _packed_tile(index, args, live, var)
    else:
        tile, sequence = _dense_tile(index, args, var)
    if var.block_k > 0:
        of = list_of(tile, sequence, args.lists, var)
        # a tile with an empty list still visits one key block, which no row sees
        end = gl.maximum(of.total, 1)
        return Tile(tile.row, tile.head, tile.origin, tile.q_len, tile.k_origin, tile.kv_len, end * 0, end), of
    else:  # noqa: RET505
        return tile, sequence


@gluon.jit
def _next_index(args, var: gl.constexpr):
    """The index of this thread block's next tile; it is past the last tile when the schedule has no more."""
    if var.tiles.schedule == 0:
        index = args.total
    else:
        taken = gl.atomic_add(args.counter, 1, sem="relaxed")
        if not var.varlen:  # noqa: SIM102
            # one request follows each tile, so the launch's last request can reset the counter to zero
            if taken == args.total - 1:
                gl.store(args.counter, 0)
        index = taken + gl.num_programs(0)
    return index


@gluon.jit
def copy_rows(desc, origin, length, row, head, column: gl.constexpr, full, buffer, varlen: gl.constexpr):
    """Start copying rows [row, ...) of one head. Rows from `length` on arrive as zeros."""
    if varlen:
        async_load(desc, [RAGGED, origin + length, RAGGED - length + row, head, column], full, buffer)
    else:
        async_load(desc, [origin, row, head, column], full, buffer)


@gluon.jit
def _load_queries(tile, head, stage, desc, smem, bars, var: gl.constexpr):
    """Start copying the queries of a tile, 64 rows for each warpgroup. The consumers have freed the stage."""
    GROUPS: gl.constexpr = var.tiles.groups
    full = bars.q_full.index(stage)
    mbarrier.expect(full, var.key_bytes * 64 * GROUPS * (var.d0 + var.d1))
    for g in gl.static_range(GROUPS):
        row = tile.row + 64 * g // var.pack_gqa
        copy_rows(desc.q, tile.origin, tile.q_len, row, head, 0, full, smem.q.index(stage * GROUPS + g), var.varlen)
        if var.d1 > 0:
            copy_rows(desc.q1, tile.origin, tile.q_len, row, head, var.d0, full, smem.q1.index(stage * GROUPS + g), var.varlen)


@gluon.jit
def pages_of(tile, block, args, var: gl.constexpr):
    """The page of each box of a block of keys, or -1 for a wholly hidden box, whose entry of the block table is not read."""
    keys = block * var.tiles.block_n + var.page_rows * gl.arange(0, var.tiles.block_n // var.page_rows, layout=PAGES_LAYOUT)
    seen = keys < tile.kv_len
    if var.has_left:
        seen = seen & (keys + var.page_rows > tile.row + tile.kv_len - tile.q_len - args.left)
    entries = args.block_table + tile.k_origin.to(gl.int64) * args.table_stride + keys // var.page_size
    return gl.load(entries, mask=seen, other=-1)


@gluon.jit
def load_pages(operand, pages, tile, kv_head, block, stage, column: gl.constexpr, full, width: gl.constexpr, var: gl.constexpr):
    """Start copying `width` columns of a block of keys, box by box.

    Rows past the sequence's end and hidden boxes arrive as zeros, because a page is addressed as a packed sequence whose length
    is the number of rows that this sequence uses.
    """
    BOXES: gl.constexpr = var.tiles.block_n // var.page_rows
    CHUNK: gl.constexpr = 64 if width > 64 else width
    CHUNKS: gl.constexpr = width // CHUNK
    desc = operand.desc
    for i in gl.static_range(BOXES):
        key = block * var.tiles.block_n + var.page_rows * i
        page = field_of(pages, i, PAGES_LAYOUT, BOXES)
        row = key % var.page_size
        length = gl.where(page < 0, 0, gl.minimum(gl.maximum(tile.kv_len - key + row, 0), var.page_size))
        for chunk in gl.static_range(CHUNKS):
            box = operand.boxes.index((stage * CHUNKS + chunk) * BOXES + i)
            copy_rows(desc, gl.maximum(page, 0) * operand.pitch, length, row, kv_head, column + CHUNK * chunk, full, box, True)


@gluon.jit
def _float8_rows(tile, block, var: gl.constexpr):
    """The coordinates in the copies that `triton.float8_inputs` makes: the batch index and the first row of a block of keys."""
    if var.gaps:
        return 0, tile.k_origin + block * var.tiles.block_n
    else:  # noqa: RET505
        return tile.k_origin, block * var.tiles.block_n


@gluon.jit
def _load_keys(tile, kv_head, key_block, block_count, desc, smem, bars, args, var: gl.constexpr):
    """Start copying a key block of K, the `block_count`-th of this thread block, once the consumers have freed its stage."""
    stage = block_count % var.tiles.stages
    block = key_block.number
    if var.page_size > 0:
        pages = pages_of(tile, block, args, var)
    mbarrier.wait(bars.k_empty.index(stage), ((block_count // var.tiles.stages) & 1) ^ 1)
    if var.block_k > 0:
        announce_key_block(key_block, smem.key_blocks.index(stage))
    full = bars.k_full.index(stage)
    mbarrier.expect(full, var.key_bytes * var.tiles.block_n * (var.d0 + var.d1))
    row = block * var.tiles.block_n
    if var.page_size > 0:
        k = PagedOperand(desc.k, smem.k_boxes, args.k_pitch)
        load_pages(k, pages, tile, kv_head, block, stage, 0, full, var.d0, var)
        if var.d1 > 0:
            k1 = PagedOperand(desc.k1, smem.k1_boxes, args.k_pitch)
            load_pages(k1, pages, tile, kv_head, block, stage, var.d0, full, var.d1, var)
    elif var.float8_keys:
        # the copies that `triton.float8_inputs` makes are zero past a sequence's end, so nothing has to bound them
        batch, row = _float8_rows(tile, block, var)
        async_load(desc.k, [batch, row, kv_head, 0], full, smem.k.index(stage))
        if var.d1 > 0:
            async_load(desc.k1, [batch, row, kv_head, var.d0], full, smem.k1.index(stage))
    else:
        copy_rows(desc.k, tile.k_origin, tile.kv_len, row, kv_head, 0, full, smem.k.index(stage), var.varlen)
        if var.d1 > 0:
            copy_rows(desc.k1, tile.k_origin, tile.kv_len, row, kv_head, var.d0, full, smem.k1.index(stage), var.varlen)


@gluon.jit
def _load_values(tile, kv_head, key_block, block_count, desc, smem, bars, args, var: gl.constexpr):
    """Start copying a key block of V, the `block_count`-th of this thread block, once the consumers have freed its stage."""
    stage = block_count % var.tiles.stages
    block = key_block.number
    if var.page_size > 0:
        pages = pages_of(tile, block, args, var)
    mbarrier.wait(bars.v_empty.index(stage), ((block_count // var.tiles.stages) & 1) ^ 1)
    full = bars.v_full.index(stage)
    mbarrier.expect(full, var.value_bytes * var.tiles.block_n * (var.dv0 + var.dv1))
    row = block * var.tiles.block_n
    if var.page_size > 0:
        v = PagedOperand(desc.v, smem.v_boxes, args.v_pitch)
        load_pages(v, pages, tile, kv_head, block, stage, 0, full, var.dv0, var)
        if var.dv1 > 0:
            v1 = PagedOperand(desc.v1, smem.v1_boxes, args.v_pitch)
            load_pages(v1, pages, tile, kv_head, block, stage, var.dv0, full, var.dv1, var)
    elif var.float8_keys:
        batch, row = _float8_rows(tile, block, var)
        if var.float8_values:
            async_load(desc.v, [batch, 0, kv_head, row], full, smem.v.index(stage))
        else:
            async_load(desc.v, [batch, row, kv_head, 0], full, smem.v.index(stage))
    else:
        copy_rows(desc.v, tile.k_origin, tile.kv_len, row, kv_head, 0, full, smem.v.index(stage), var.varlen)
        if var.dv1 > 0:
            copy_rows(desc.v1, tile.k_origin, tile.kv_len, row, kv_head, var.dv0, full, smem.v1.index(stage), var.varlen)


@gluon.jit
def producer(desc, smem, bars, args, var: gl.constexpr):
    """Copy tile after tile. `tile_count` and `block_count` count the tiles and key blocks so far; they give stage and phase."""
    tile_count = 0
    block_count = 0
    live = args.total
    if var.varlen:
        live = gl.load(args.counter + 1)
    tile, of = _tile(gl.program_id(0), args, live, var)
    while tile.row >= 0:
        head, kv_head = heads_of(tile, args.num_heads, args.heads_per_kv, var)
        blocks = tile.high - tile.low
        key_block = listed_key_block(0, of, args.lists, var) if var.block_k > 0 else KeyBlock(block_at(tile, 0, var), 0)
        _load_keys(tile, kv_head, key_block, block_count, desc, smem, bars, args, var)
        stage = tile_count % var.tiles.q_stages
        mbarrier.wait(bars.q_empty.index(stage), ((tile_count // var.tiles.q_stages) & 1) ^ 1)
        smem.record.index(stage).store(_pack(tile))
        _load_queries(tile, head, stage, desc, smem, bars, var)
        index = _next_index(args, var)
        # blocks in the order of the consumers, which is that of `block_at` or of the list; K is one block ahead of V
        if var.block_k > 0:
            upcoming = listed_key_block(1, of, args.lists, var)
            for j in range(1, blocks + 1):
                after = listed_key_block(j + 1, of, args.lists, var)
                if j < blocks:
                    _load_keys(tile, kv_head, upcoming, block_count + j, desc, smem, bars, args, var)
                _load_values(tile, kv_head, key_block, block_count + j - 1, desc, smem, bars, args, var)
                key_block = upcoming
                upcoming = after
        else:
            for j in range(1, blocks + 1):
                if j < blocks:
                    ahead = KeyBlock(block_at(tile, j, var), 0)
                    _load_keys(tile, kv_head, ahead, block_count + j, desc, smem, bars, args, var)
                key_block = KeyBlock(block_at(tile, j - 1, var), 0)
                _load_values(tile, kv_head, key_block, block_count + j - 1, desc, smem, bars, args, var)
        block_count += blocks
        tile_count += 1
        tile, of = _tile(index, args, live, var)
    # The last record says that no tile is left. With a plain grid a thread block has at most one tile, and its consumers only
    # need this record if it has none.
    if var.tiles.schedule != 0 or tile_count == 0:
        stage = tile_count % var.tiles.q_stages
        mbarrier.wait(bars.q_empty.index(stage), ((tile_count // var.tiles.q_stages) & 1) ^ 1)
        smem.record.index(stage).store(_pack(tile))
        mbarrier.arrive(bars.q_full.index(stage), count=1)
