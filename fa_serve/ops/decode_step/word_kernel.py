"""The persistent kernel of a decoding step of one token, whose programs wait for words with tags (`words`).

It has the phases of kernel.py and neither counters nor fences. A program that needs numbers of others reads them until they
are those of its layer. What is written twice is safe: a program that writes a word of the next layer has read numbers that
depend on all numbers for which the word of this layer was read. It needs the rows of all programs that take part in the phase
before, and a program that has no rows in a phase does not read for it.

The residual stream is kept twice: in x, where each program reads and writes its own rows, and as words for all others. The
first phase of a launch needs it as words as well, so that each program begins with those of its rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fa_serve.ops.decode_step.kernel import _address, _request_share
from fa_serve.ops.decode_step.rows import _finish, _sums_of_lanes, share_of, weight_tile
from fa_serve.ops.decode_step.word_heads import attend_words, keys_of_places, places_of_keys, request_keys
from fa_serve.ops.decode_step.words import poll_eights, store_words
from fa_serve.ops.elementwise.activation import activate


@triton.jit
def _tile_ahead(w_ptr, index, program, product: tl.constexpr, var: tl.constexpr):
    """Tile `index` of a program's share, which is loaded before the program waits for the input."""
    ROWS: tl.constexpr = product.rows
    PROGRAMS: tl.constexpr = var.programs
    begin, end = share_of(program, ROWS, PROGRAMS)
    return weight_tile(w_ptr, index, begin, end, product)


@triton.jit
def _poll_tile(words_ptr, index, tag, product: tl.constexpr, var: tl.constexpr):
    """[1, block_k]: the input of tile `index` in float32, and the sums of eight squares."""
    BLOCKS: tl.constexpr = (product.columns + product.block_k - 1) // product.block_k
    places = index % BLOCKS * product.block_k + tl.arange(0, product.block_k // 8)[None, :] * 8
    return poll_eights(words_ptr, places, tag, places < product.columns, var)


@triton.jit
def _norm_tile(norm_ptr, index, product: tl.constexpr):
    BLOCKS: tl.constexpr = (product.columns + product.block_k - 1) // product.block_k
    k = index % BLOCKS * product.block_k + tl.arange(0, product.block_k)
    return tl.load(norm_ptr + k, mask=k < product.columns, other=0.0)


@triton.jit
def _own_rows(x_ptr, index, begin, end, product: tl.constexpr):
    """The residual stream of the outputs of tile `index`, which no other program writes."""
    BLOCKS: tl.constexpr = (product.columns + product.block_k - 1) // product.block_k
    OUTPUTS: tl.constexpr = product.block_rows // 2 if product.gated else product.block_rows
    rows = begin + index // BLOCKS * OUTPUTS + tl.arange(0, OUTPUTS)
    return tl.load(x_ptr + rows, mask=rows < end, other=0.0, cache_modifier=".cg")


@triton.jit
def _multiply_words(
    in_ptr,
    in_tag,
    out_ptr,
    out_tag,
    x_ptr,
    w_ptr,
    norm_ptr,
    bias_ptr,
    w,
    next_w,
    norm,
    program,
    eps,
    offset,
    alpha,
    product: tl.constexpr,
    var: tl.constexpr,
):
    """The rows of a program of a product. w, next_w: its first two tiles, and norm: of the first, which were loaded before."""
    BLOCKS: tl.constexpr = (product.columns + product.block_k - 1) // product.block_k
    OUTPUTS: tl.constexpr = product.block_rows // 2 if product.gated else product.block_rows
    ROWS: tl.constexpr = product.rows
    TILE: tl.constexpr = product.block_rows
    COLUMNS: tl.constexpr = product.block_k
    LANES: tl.constexpr = product.block_k // 8
    PROGRAMS: tl.constexpr = var.programs
    KIND: tl.constexpr = var.kind
    DTYPE: tl.constexpr = w_ptr.dtype.element_ty
    # the whole share is one tile
    ALONE: tl.constexpr = BLOCKS == 1 and (ROWS + PROGRAMS - 1) // PROGRAMS <= OUTPUTS
    begin, end = share_of(program, ROWS, PROGRAMS)
    tiles = (end - begin + OUTPUTS - 1) // OUTPUTS * BLOCKS
    if tiles > 0:
        if product.added:
            tl.debug_barrier()  # other threads of this program may have stored them, if it had nothing to do since
            own = _own_rows(x_ptr, 0, begin, end, product)
        x, sums = _poll_tile(in_ptr, 0, in_tag, product, var)
        acc = tl.zeros([TILE, LANES], tl.float32)
        squares = tl.zeros([1, LANES], tl.float32)
        for index in tl.range(0, tiles, num_stages=1, disable_licm=True):
            scaled = x
            if product.normed:
                squares += sums
                scaled = x * (norm.to(tl.float32) + offset)[None, :]
            acc += _sums_of_lanes(w.to(tl.float32) * scaled, TILE, COLUMNS)
            if not ALONE:
                w = next_w
                next_w = weight_tile(w_ptr, index + 2, begin, end, product)
            if BLOCKS > 1:  # noqa: SIM102 - a constant, and a number of the run
                # behind the last tile the words may be those of the next layer already
                if index + 1 < tiles:
                    x, sums = _poll_tile(in_ptr, index + 1, in_tag, product, var)
                    if product.normed:
                        norm = _norm_tile(norm_ptr, index + 1, product)
            if index % BLOCKS == BLOCKS - 1:
                y = _finish(acc, squares, product, 1, eps)
                if product.gated:
                    gate, up = tl.split(tl.permute(tl.reshape(y, [1, 2, OUTPUTS]), [0, 2, 1]))
                    y = activate(gate, KIND) * up
                y = tl.reshape(y, [OUTPUTS])
                rows = begin + index // BLOCKS * OUTPUTS + tl.arange(0, OUTPUTS)
                if product.biased:
                    y += tl.load(bias_ptr + rows, mask=rows < end, other=0.0).to(tl.float32)
                if product.added:
                    y = own.to(tl.float32) + alpha * y
                store_words(out_ptr + rows, y, out_tag, rows < end, DTYPE)
                if product.added:
                    tl.store(x_ptr + rows, y.to(DTYPE), mask=rows < end)
                    own = _own_rows(x_ptr, index + 1, begin, end, product)
                acc = tl.zeros([TILE, LANES], tl.float32)
                squares = tl.zeros([1, LANES], tl.float32)


@triton.jit(do_not_specialize=["first_layer", "num_layers"])
def decode_words(
    x_ptr,
    words_ptr,
    parts_ptr,
    done_ptr,
    table_ptr,
    cos_ptr,
    sin_ptr,
    slot_ptr,
    pages_ptr,
    used_ptr,
    first_layer,
    num_layers,
    eps,
    offset,
    head_eps,
    head_offset,
    alpha,
    scale,
    stride_page,
    stride_token,
    stride_head,
    var: tl.constexpr,
):
    """x (1, hidden) is overwritten with the output of the last layer.

    words: of the residual stream before attention, that before the gated unit, q, k and v, attention, gated numbers
    """
    QKV: tl.constexpr = var.qkv
    OUTPUT: tl.constexpr = var.o
    GATE_UP: tl.constexpr = var.gate_up
    DOWN: tl.constexpr = var.down
    HIDDEN: tl.constexpr = var.o.rows
    PROGRAMS: tl.constexpr = var.programs
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    mid_ptr = words_ptr + HIDDEN
    qkv_ptr = mid_ptr + HIDDEN
    attended_ptr = qkv_ptr + var.qkv.rows
    gated_ptr = attended_ptr + var.o.columns
    program = tl.program_id(0)
    done = tl.load(done_ptr + program)

    ROWS: tl.constexpr = triton.next_power_of_2((var.o.rows + var.programs - 1) // var.programs)
    begin_row, end_row = share_of(program, HIDDEN, PROGRAMS)
    rows = begin_row + tl.arange(0, ROWS)
    begun = tl.load(x_ptr + rows, mask=rows < end_row, other=0.0)
    store_words(words_ptr + rows, begun, ((done + 1) & 0xFFFF).to(tl.int32), rows < end_row, DTYPE)

    strides = (stride_page, stride_token, stride_head)
    kv_len = tl.load(used_ptr)
    old_len = tl.maximum(kv_len - 1, 0)
    head = (program // var.max_splits).to(tl.int64)
    blocks = (old_len + var.block_keys - 1) // var.block_keys
    share = (blocks + var.max_splits - 1) // var.max_splits
    begin = tl.minimum(program % var.max_splits * share, blocks)
    end = tl.minimum(begin + share, blocks)
    takes = program < var.num_kv_heads * var.max_splits
    end = tl.where(takes, end, begin)
    places, live = places_of_keys(begin, end, old_len, pages_ptr, strides, head, var)
    columns = tl.arange(0, var.dim)
    for step in tl.range(0, num_layers, num_stages=1, disable_licm=True):
        layer = first_layer + step
        in_tag = ((done + step + 1) & 0xFFFF).to(tl.int32)
        tag = ((done + step + 2) & 0xFFFF).to(tl.int32)
        next_layer = tl.minimum(layer + 1, first_layer + num_layers - 1)
        qkv_w = _address(table_ptr, layer, 0, x_ptr)
        norm_ptr = _address(table_ptr, layer, 5, x_ptr)
        w_qkv = _tile_ahead(qkv_w, 0, program, QKV, var)
        later_qkv = _tile_ahead(qkv_w, 1, program, QKV, var)
        norm = _norm_tile(norm_ptr, 0, QKV)
        k_ptr = _address(table_ptr, layer, 9, x_ptr)
        v_ptr = _address(table_ptr, layer, 10, x_ptr)
        request_keys(k_ptr, places, live, var)
        request_keys(v_ptr, places, live, var)
        o_w = _address(table_ptr, layer, 1, x_ptr)
        _request_share(o_w, program, OUTPUT, var)
        _multiply_words(
            words_ptr,
            in_tag,
            qkv_ptr,
            tag,
            x_ptr,
            qkv_w,
            norm_ptr,
            _address(table_ptr, layer, 4, x_ptr),
            w_qkv,
            later_qkv,
            norm,
            program,
            eps,
            offset,
            1.0,
            QKV,
            var,
        )

        gate_up_w = _address(table_ptr, layer, 2, x_ptr)
        _request_share(gate_up_w, program, GATE_UP, var)
        if takes:
            weights = (_address(table_ptr, layer, 7, x_ptr), _address(table_ptr, layer, 8, x_ptr))
            k = keys_of_places(k_ptr, places, live, columns)
            v = keys_of_places(v_ptr, places, live, columns)
            attend_words(
                program,
                k,
                v,
                places,
                live,
                (qkv_ptr, attended_ptr, parts_ptr),
                tag,
                weights,
                (k_ptr, v_ptr),
                (pages_ptr, slot_ptr, kv_len, begin, end),
                (cos_ptr, sin_ptr),
                scale,
                (head_eps, head_offset),
                strides,
                var,
            )

        w_o = _tile_ahead(o_w, 0, program, OUTPUT, var)
        later_o = _tile_ahead(o_w, 1, program, OUTPUT, var)
        down_w = _address(table_ptr, layer, 3, x_ptr)
        _request_share(down_w, program, DOWN, var)
        _multiply_words(
            attended_ptr,
            tag,
            mid_ptr,
            tag,
            x_ptr,
            o_w,
            x_ptr,
            x_ptr,
            w_o,
            later_o,
            norm,
            program,
            eps,
            offset,
            alpha,
            OUTPUT,
            var,
        )

        norm_ptr = _address(table_ptr, layer, 6, x_ptr)
        w_gate_up = _tile_ahead(gate_up_w, 0, program, GATE_UP, var)
        later_gate_up = _tile_ahead(gate_up_w, 1, program, GATE_UP, var)
        norm = _norm_tile(norm_ptr, 0, GATE_UP)
        next_w = _address(table_ptr, next_layer, 0, x_ptr)
        _request_share(next_w, program, QKV, var)
        _multiply_words(
            mid_ptr,
            tag,
            gated_ptr,
            tag,
            x_ptr,
            gate_up_w,
            norm_ptr,
            x_ptr,
            w_gate_up,
            later_gate_up,
            norm,
            program,
            eps,
            offset,
            1.0,
            GATE_UP,
            var,
        )

        w_down = _tile_ahead(down_w, 0, program, DOWN, var)
        later_down = _tile_ahead(down_w, 1, program, DOWN, var)
        _multiply_words(
            gated_ptr,
            tag,
            words_ptr,
            tag,
            x_ptr,
            down_w,
            x_ptr,
            x_ptr,
            w_down,
            later_down,
            norm,
            program,
            eps,
            offset,
            alpha,
            DOWN,
            var,
        )
    tl.store(done_ptr + program, done + num_layers + 1)
