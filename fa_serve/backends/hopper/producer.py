"""The producer warp: deals tiles and keeps the copy engine busy.

It asks for the next tile while the loads of this one are in flight, and hands each tile's record to the consumers through
shared memory beside the tile's queries, so that nobody else decodes an index or reads a length.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from fa_serve.backends.hopper.shared import RAGGED, Tile


@gluon.jit
def _field(record, i: gl.constexpr, layout: gl.constexpr, size: gl.constexpr = 8):
    return gl.sum(gl.where(gl.arange(0, size, layout=layout) == i, record, 0), 0)


@gluon.jit
def unpack_tile(record, layout: gl.constexpr):
    return Tile(
        _field(record, 0, layout),
        _field(record, 1, layout),
        _field(record, 2, layout),
        _field(record, 3, layout),
        _field(record, 4, layout),
        _field(record, 5, layout),
        _field(record, 6, layout),
        _field(record, 7, layout),
    )


@gluon.jit
def _pack(tile, layout: gl.constexpr):
    i = gl.arange(0, 8, layout=layout)
    record = gl.where(i == 0, tile.row, tile.head)
    record = gl.where(i == 2, tile.origin, record)
    record = gl.where(i == 3, tile.q_len, record)
    record = gl.where(i == 4, tile.k_origin, record)
    record = gl.where(i == 5, tile.kv_len, record)
    record = gl.where(i == 6, tile.low, record)
    return gl.where(i == 7, tile.high, record)


@gluon.jit
def _deal(index, tiles, heads, work):
    """-> head and number of the tile among those of the head, longest first: tiles of a group of heads together (their keys
    share the L2 cache), neighbours in head order. The last group has `head_tail` heads and what does not fill a group: a short
    one would leave most blocks without work."""
    safe = gl.maximum(gl.minimum(index, tiles * heads - 1), 0)
    per_group = gl.maximum(work.head_group * tiles, 1)
    last = (heads - work.head_tail) // work.head_group
    group = gl.minimum(safe // per_group, last)
    rest = safe - group * per_group
    size = gl.where(group == last, heads - group * work.head_group, work.head_group)
    return group * work.head_group + rest % size, rest // size


@gluon.jit
def _dense_tile(index, work, var: gl.constexpr):
    batch_head, m = _deal(index, work.num_m, work.total // work.num_m, work)
    if var.has_right:
        m = work.num_m - 1 - m
    row = m * var.tiles.block_m
    offset = work.seqlen_k - work.seqlen_q
    end = work.seqlen_k
    if var.has_right:
        end = gl.minimum(end, row + var.tiles.block_m + offset + work.right)
    # a tile that sees nothing still visits one block, wholly masked: every tile then runs the same code
    high = gl.maximum((end + var.tiles.block_n - 1) // var.tiles.block_n, 1)
    low = end * 0
    if var.has_left:
        low = gl.minimum(gl.maximum(row + offset - work.left, 0) // var.tiles.block_n, high - 1)
    batch = batch_head // work.num_heads
    row = gl.where(index < work.total, row, -1)
    return Tile(row, batch_head % work.num_heads, batch, work.seqlen_q, batch, work.seqlen_k, low, high)


@gluon.jit
def _packed_tile(index, work, live, layout: gl.constexpr):
    """A record of `schedule.tile_table`, of which `live` are tiles."""
    head, number = _deal(index, live, work.num_heads, work)
    tile = unpack_tile(gl.load(work.table + number * 8 + gl.arange(0, 8, layout=layout)), layout)
    row = gl.where(index < live * work.num_heads, tile.row, -1)
    return Tile(row, head, tile.origin, tile.q_len, tile.k_origin, tile.kv_len, tile.low, tile.high)


@gluon.jit
def _tile(index, work, live, layout: gl.constexpr, var: gl.constexpr):
    if var.varlen:
        return _packed_tile(index, work, live, layout)
    else:  # noqa: RET505
        return _dense_tile(index, work, var)


@gluon.jit
def _next_index(work, var: gl.constexpr):
    """Which tile this block does next; one past the end when the schedule has no more for it."""
    if var.tiles.schedule == 0:
        index = work.total
    else:
        taken = gl.atomic_add(work.counter, 1, sem="relaxed")
        if not var.varlen:  # noqa: SIM102
            # every tile is followed by one request: the last request of the launch leaves the counter as it was found
            if taken == work.total - 1:
                gl.store(work.counter, 0)
        index = taken + gl.num_programs(0)
    return index


@gluon.jit
def _load(desc, origin, length, row, head, column: gl.constexpr, full, buffer, varlen: gl.constexpr):
    """Start copying rows [row, ...) of one head; rows past `length` arrive as zeros."""
    if varlen:
        tma.async_copy_global_to_shared(desc, [RAGGED, origin + length, RAGGED - length + row, head, column], full, buffer)
    else:
        tma.async_copy_global_to_shared(desc, [origin, row, head, column], full, buffer)


@gluon.jit
def _load_queries(tile, slot, desc, smem, bars, var: gl.constexpr):
    GROUPS: gl.constexpr = var.tiles.groups
    full = bars.q_full.index(slot)
    mbarrier.expect(full, 2 * 64 * GROUPS * (var.d0 + var.d1))
    for g in gl.static_range(GROUPS):
        row = tile.row + 64 * g
        _load(desc.q, tile.origin, tile.q_len, row, tile.head, 0, full, smem.q.index(slot * GROUPS + g), var.varlen)
        if var.d1 > 0:
            _load(desc.q1, tile.origin, tile.q_len, row, tile.head, var.d0, full, smem.q1.index(slot * GROUPS + g), var.varlen)


@gluon.jit
def _pages(tile, block, work, layout: gl.constexpr, var: gl.constexpr):
    """The page of each piece of a block of keys; -1 where all of it is hidden, whose table entry nobody may read."""
    keys = block * var.tiles.block_n + var.page_rows * gl.arange(0, var.tiles.block_n // var.page_rows, layout=layout)
    seen = keys < tile.kv_len
    if var.has_left:
        seen = seen & (keys + var.page_rows > tile.row + tile.kv_len - tile.q_len - work.left)
    entries = work.block_table + tile.k_origin.to(gl.int64) * work.table_stride + keys // var.page_size
    return gl.load(entries, mask=seen, other=-1)


@gluon.jit
def _load_pages(
    pages,
    tile,
    kv_head,
    block,
    slot,
    pitch,
    desc,
    column: gl.constexpr,
    full,
    boxes,
    width: gl.constexpr,
    layout: gl.constexpr,
    var: gl.constexpr,
):
    """Start copying a block of keys page by page. Rows past the sequence's end, and hidden pieces, arrive as zeros: a page is
    addressed as a packed sequence that is as long as what the sequence uses of it. `pitch` is its distance to the next in rows.
    """
    PIECES: gl.constexpr = var.tiles.block_n // var.page_rows
    CHUNKS: gl.constexpr = width // 64
    for i in gl.static_range(PIECES):
        key = block * var.tiles.block_n + var.page_rows * i
        page = _field(pages, i, layout, PIECES)
        row = key % var.page_size
        length = gl.where(page < 0, 0, gl.minimum(gl.maximum(tile.kv_len - key + row, 0), var.page_size))
        for chunk in gl.static_range(CHUNKS):
            target = boxes.index((slot * CHUNKS + chunk) * PIECES + i)
            _load(desc, gl.maximum(page, 0) * pitch, length, row, kv_head, column + 64 * chunk, full, target, True)


@gluon.jit
def _load_keys(tile, kv_head, block, count, desc, smem, bars, work, var: gl.constexpr):
    PAGES_LAYOUT: gl.constexpr = gl.BlockedLayout([16], [32], [1], [0])
    slot = count % var.tiles.stages
    if var.page_size > 0:
        pages = _pages(tile, block, work, PAGES_LAYOUT, var)
    mbarrier.wait(bars.k_empty.index(slot), ((count // var.tiles.stages) & 1) ^ 1)
    full = bars.k_full.index(slot)
    mbarrier.expect(full, 2 * var.tiles.block_n * (var.d0 + var.d1))
    row = block * var.tiles.block_n
    if var.page_size > 0:
        _load_pages(pages, tile, kv_head, block, slot, work.k_pitch, desc.k, 0, full, smem.k_boxes, var.d0, PAGES_LAYOUT, var)
        if var.d1 > 0:
            _load_pages(
                pages, tile, kv_head, block, slot, work.k_pitch, desc.k, var.d0, full, smem.k1_boxes, var.d1, PAGES_LAYOUT, var
            )
    else:
        _load(desc.k, tile.k_origin, tile.kv_len, row, kv_head, 0, full, smem.k.index(slot), var.varlen)
        if var.d1 > 0:
            _load(desc.k1, tile.k_origin, tile.kv_len, row, kv_head, var.d0, full, smem.k1.index(slot), var.varlen)


@gluon.jit
def _load_values(tile, kv_head, block, count, desc, smem, bars, work, var: gl.constexpr):
    PAGES_LAYOUT: gl.constexpr = gl.BlockedLayout([16], [32], [1], [0])
    slot = count % var.tiles.stages
    if var.page_size > 0:
        pages = _pages(tile, block, work, PAGES_LAYOUT, var)
    mbarrier.wait(bars.v_empty.index(slot), ((count // var.tiles.stages) & 1) ^ 1)
    full = bars.v_full.index(slot)
    mbarrier.expect(full, 2 * var.tiles.block_n * var.dv)
    if var.page_size > 0:
        _load_pages(pages, tile, kv_head, block, slot, work.v_pitch, desc.v, 0, full, smem.v_boxes, var.dv, PAGES_LAYOUT, var)
    else:
        _load(desc.v, tile.k_origin, tile.kv_len, block * var.tiles.block_n, kv_head, 0, full, smem.v.index(slot), var.varlen)


@gluon.jit
def producer(desc, smem, bars, work, var: gl.constexpr):
    RECORD_LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    turn = 0
    count = 0
    live = work.total
    if var.varlen:
        live = gl.load(work.counter + 1)
    tile = _tile(gl.program_id(0), work, live, RECORD_LAYOUT, var)
    while tile.row >= 0:
        kv_head = tile.head // work.heads_per_kv
        blocks = tile.high - tile.low
        _load_keys(tile, kv_head, tile.high - 1, count, desc, smem, bars, work, var)
        slot = turn % var.tiles.q_stages
        mbarrier.wait(bars.q_empty.index(slot), ((turn // var.tiles.q_stages) & 1) ^ 1)
        smem.record.index(slot).store(_pack(tile, RECORD_LAYOUT))
        _load_queries(tile, slot, desc, smem, bars, var)
        index = _next_index(work, var)
        for j in range(1, blocks + 1):  # from the last block to the first, K one step ahead of V: the consumers' order
            if j < blocks:
                _load_keys(tile, kv_head, tile.high - 1 - j, count + j, desc, smem, bars, work, var)
            _load_values(tile, kv_head, tile.high - j, count + j - 1, desc, smem, bars, work, var)
        count += blocks
        turn += 1
        tile = _tile(index, work, live, RECORD_LAYOUT, var)
    # a grid's block that had a tile knows that it was the only one
    if var.tiles.schedule != 0 or turn == 0:
        slot = turn % var.tiles.q_stages
        mbarrier.wait(bars.q_empty.index(slot), ((turn // var.tiles.q_stages) & 1) ^ 1)
        smem.record.index(slot).store(_pack(tile, RECORD_LAYOUT))
        mbarrier.arrive(bars.q_full.index(slot), count=1)
