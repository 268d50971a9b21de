"""The kernels for chunks of prompts, in pieces of up to 64 rows, for recurrences whose state is a matrix.

There are up to four launches: those of prepare.py, and then

1. `_pass_states`, a program for each sequence, head and block of columns of the values. It keeps the state in registers and
   goes through the pieces of the sequence in order. It only multiplies prepared operands by the state, so that its loads do not
   wait for each other. It stores the state after a piece if the table of pieces names a page for it.
2. `_compute_outputs`, a program for each piece, head and block of columns. It computes the outputs from the states before the
   pieces. If the tile has `outputs_in_loop`, which is for many sequences, `_pass_states` computes the outputs instead and does
   not store the states before the pieces.

The state is held transposed, columns of the values by keys. The accumulator of a product is then the first operand of the next
product, and Hopper's tensor cores read a first operand from registers. docs/kernels/linear-attention.md derives the forms.
Left out: sequences with few rows (few_rows.py).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.launching.launch import Launch, mma_sync_on_sm100, power_of_2, with_unit_stride
from fa_serve.launching.plans import PLANS
from fa_serve.ops.linear_attention.few_rows import with_contiguous_heads
from fa_serve.ops.linear_attention.prepare import _prepare_pieces, _sum_gates
from fa_serve.ops.linear_attention.problem import PIECE_ROWS, MatrixInputs, StateAccess
from fa_serve.ops.linear_attention.tiles import MIN_COLUMNS, PiecesTile

MIN_SLAB = 64
"""The fewest pieces of a slab: with fewer, the host takes longer to launch the kernels than the device to run them."""


class PieceOperands(NamedTuple):
    """The operands of the products with the state, for each piece of the table, in the dtype of k unless stated otherwise.

    Padding is 0: rows past the end of a piece, keys padded to BLOCK_K numbers, and values padded to a multiple of a block of
    columns. With gates by head, "key heads" are the heads of k; with gates by channel they are all heads.

    keys:    (pieces, key heads, 64, BLOCK_K); with gates by channel, each row is decayed to the end of the piece
    queries: (pieces, key heads, 64, BLOCK_K), scaled; with gates by channel, decayed from the beginning of the piece
    attn:    (pieces, heads, 64, 64): products of queries and keys, decayed by the gates between them, and times the weights
             except for the delta rule
    w:       (pieces, heads, 64, BLOCK_K) for the delta rule, else None
    u:       (pieces, heads, columns, 64): the rows add u - (w S)^T for the delta rule, else u, which holds the values
    fades:   float32 decay factors. By head, (pieces, heads, 2, 64): from the beginning of the piece to each row, and from each
             row to the end, the latter times the weights except for the delta rule. By channel, (pieces, heads, BLOCK_K): from
             the beginning of the piece to its end
    states:  (pieces, heads, columns, BLOCK_K): the states before the pieces; None with outputs in the loop
    """

    keys: Tensor
    queries: Tensor
    attn: Tensor
    w: Tensor | None
    u: Tensor
    decays: Tensor
    states: Tensor | None


@triton.jit
def pieces_of_sequence(chunk_ptr, begin, stop, num_chunks):
    """-> the number of a sequence's first piece, and how many pieces it has. They are adjacent in the table."""
    first_piece = 0
    count = 0
    entry = tl.arange(0, 128)
    for low in range(0, num_chunks, 128):
        listed = low + entry < num_chunks
        first_row = tl.load(chunk_ptr + 4 * (low + entry), mask=listed, other=0)
        filled = tl.load(chunk_ptr + 4 * (low + entry) + 1, mask=listed, other=0) > 0
        first_piece += tl.sum((filled & (first_row < begin)).to(tl.int32), 0)
        count += tl.sum((filled & (first_row >= begin) & (first_row < stop)).to(tl.int32), 0)
    return first_piece, count


@triton.jit(do_not_specialize=["num_chunks"])
def _pass_states(
    keys_ptr,
    queries_ptr,
    attn_ptr,
    w_ptr,
    u_ptr,
    decays_ptr,
    states_ptr,
    d_ptr,
    read_ptr,
    write_ptr,
    tail_u_ptr,
    source_ptr,
    slot_ptr,
    cu_ptr,
    seqused_ptr,
    chunk_ptr,
    out_ptr,
    carry_ptr,
    num_chunks,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    RING: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Stores the states that are kept and u of the tail, and either the outputs or what `_compute_outputs` needs for them: the
    states before all pieces, and u of their rows.

    u_ptr:      input; for the delta rule it is overwritten with u of the rows, if the outputs are computed later
    states_ptr: the states before the pieces; None if the outputs are computed here
    carry_ptr:  (num_seqs, HEADS, DIM, DIM_V) float32: carries the states of sequences from one slab to the next; None without
                slabs
    KEY_HEADS:  key heads of `PieceOperands`
    COLUMNS:    number of blocks of BLOCK_V columns of the values
    """
    DELTA: tl.constexpr = w_ptr is not None
    program = tl.program_id(0)
    block = program % COLUMNS
    head = (program // COLUMNS) % HEADS
    seq = program // (COLUMNS * HEADS)
    key_head = head // (HEADS // KEY_HEADS)

    begin = tl.load(cu_ptr + seq)
    stop = tl.load(cu_ptr + seq + 1)
    first_piece, count = pieces_of_sequence(chunk_ptr, begin, stop, num_chunks)
    if count == 0:
        return
    end = tl.load(seqused_ptr + seq)

    i = tl.arange(0, 64)
    c = tl.arange(0, BLOCK_K)
    of_block = tl.arange(0, BLOCK_V)
    x = block * BLOCK_V + of_block
    square = head * (DIM * DIM_V) + c[None, :] * DIM_V + x[:, None]
    in_square = (c < DIM)[None, :] & (x < DIM_V)[:, None]
    source = tl.load(source_ptr + seq).to(tl.int64)
    begins = True
    if carry_ptr is not None:
        begins = tl.load(chunk_ptr + 4 * first_piece) == begin
    page = read_ptr + source * (HEADS * DIM * DIM_V)
    state = tl.load(page + square, mask=in_square & (source >= 0) & begins, other=0.0).to(tl.float32)  # [BLOCK_V, BLOCK_K]
    if carry_ptr is not None:
        carried = carry_ptr + seq.to(tl.int64) * (HEADS * DIM * DIM_V) + square
        state += tl.load(carried, mask=in_square & (begins == 0), other=0.0)

    rows_of_keys = i[:, None] * BLOCK_K + c[None, :]
    rows_of_u = of_block[:, None] * 64 + i[None, :]
    for n in tl.range(0, count, num_stages=STAGES):
        piece = (first_piece + n).to(tl.int64)
        of_head = piece * HEADS + head
        of_key_head = (piece * KEY_HEADS + key_head) * (64 * BLOCK_K)
        of_columns = of_head * COLUMNS + block
        first = tl.load(chunk_ptr + 4 * piece)
        rows = tl.load(chunk_ptr + 4 * piece + 1)
        target = tl.load(chunk_ptr + 4 * piece + 3).to(tl.int64)
        u = tl.load(u_ptr + of_columns * (BLOCK_V * 64) + rows_of_u)
        kind = u.dtype
        u = u.to(tl.float32)
        rounded = state.to(kind)
        if DELTA:
            w = tl.load(w_ptr + of_head * (64 * BLOCK_K) + rows_of_keys)
            u -= tl.dot(rounded, tl.trans(w), input_precision=PRECISION)
        if states_ptr is not None:
            tl.store(states_ptr + of_columns * (BLOCK_V * BLOCK_K) + of_block[:, None] * BLOCK_K + c[None, :], rounded)
            if DELTA:
                tl.store(u_ptr + of_columns * (BLOCK_V * 64) + rows_of_u, u.to(kind))
        else:
            queries = tl.load(queries_ptr + of_key_head + rows_of_keys)
            attn = tl.load(attn_ptr + of_head * 4096 + i[:, None] * 64 + i[None, :])
            y = tl.dot(rounded, tl.trans(queries), input_precision=PRECISION)
            if not BY_CHANNEL:
                y *= tl.load(decays_ptr + of_head * 128 + i)[None, :]
            y = tl.dot(u.to(kind), tl.trans(attn), y, input_precision=PRECISION)
            if d_ptr is not None:
                y += tl.load(d_ptr + head).to(tl.float32) * u
            place = ((first + i).to(tl.int64) * HEADS + head)[None, :] * DIM_V + x[:, None]
            here = (i < rows)[None, :] & (x < DIM_V)[:, None]
            tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=here)
        keys = tl.load(keys_ptr + of_key_head + rows_of_keys)
        added = u
        if BY_CHANNEL:
            state *= tl.load(decays_ptr + of_head * BLOCK_K + c)[None, :]
        else:
            state *= tl.load(decays_ptr + of_head * 128 + 63)
            added = u * tl.load(decays_ptr + of_head * 128 + 64 + i)[None, :]
        state = tl.dot(added.to(kind), keys, state, input_precision=PRECISION)

        if DELTA and tail_u_ptr is not None:
            first_position = end - stop + first
            if first_position + rows > end - RING:
                position = first_position + i
                ring = tl.load(slot_ptr + seq).to(tl.int64) * RING + position % RING
                last = ((i < rows) & (position >= end - RING))[None, :] & (x < DIM_V)[:, None]
                row_of_tail = tail_u_ptr + (ring * HEADS + head)[None, :] * DIM_V + x[:, None]
                tl.store(row_of_tail, u.to(tail_u_ptr.dtype.element_ty), mask=last)
        if target >= 0:
            tl.store(write_ptr + target * (HEADS * DIM * DIM_V) + square, state, mask=in_square)
    if carry_ptr is not None:
        tl.store(carried, state, mask=in_square)


@triton.jit
def _compute_outputs(
    queries_ptr,
    attn_ptr,
    u_ptr,
    decays_ptr,
    states_ptr,
    v_ptr,
    d_ptr,
    chunk_ptr,
    out_ptr,
    stride_v,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DIM_V: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The outputs of one piece, for some columns of one head."""
    program = tl.program_id(0)
    block = program % COLUMNS
    head = (program // COLUMNS) % HEADS
    piece = (program // (COLUMNS * HEADS)).to(tl.int64)
    first = tl.load(chunk_ptr + 4 * piece)
    rows = tl.load(chunk_ptr + 4 * piece + 1)
    if rows == 0:
        return
    i = tl.arange(0, 64)
    c = tl.arange(0, BLOCK_K)
    of_block = tl.arange(0, BLOCK_V)
    x = block * BLOCK_V + of_block
    of_head = piece * HEADS + head
    of_columns = of_head * COLUMNS + block
    of_key_head = (piece * KEY_HEADS + head // (HEADS // KEY_HEADS)) * (64 * BLOCK_K)
    queries = tl.load(queries_ptr + of_key_head + i[:, None] * BLOCK_K + c[None, :])
    state = tl.load(states_ptr + of_columns * (BLOCK_V * BLOCK_K) + of_block[:, None] * BLOCK_K + c[None, :])
    attn = tl.load(attn_ptr + of_head * 4096 + i[:, None] * 64 + i[None, :])
    u = tl.load(u_ptr + of_columns * (BLOCK_V * 64) + of_block[:, None] * 64 + i[None, :])
    y = tl.dot(queries, tl.trans(state), input_precision=PRECISION)  # [64, BLOCK_V]
    if not BY_CHANNEL:
        y *= tl.load(decays_ptr + of_head * 128 + i)[:, None]
    y = tl.dot(attn, tl.trans(u), y, input_precision=PRECISION)
    row = (first + i).to(tl.int64)
    here = (i < rows)[:, None] & (x < DIM_V)[None, :]
    if d_ptr is not None:
        values = tl.load(v_ptr + row[:, None] * stride_v + head * DIM_V + x[None, :], mask=here, other=0.0)
        y += tl.load(d_ptr + head).to(tl.float32) * values.to(tl.float32)
    place = (row * HEADS + head)[:, None] * DIM_V + x[None, :]
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=here)


def launch_pieces(inputs: MatrixInputs, access: StateAccess, out: Tensor, tile: PiecesTile) -> None:
    """Compute the rows of all pieces of `access.batch.chunks`, and write them to `out`, a contiguous tensor like v."""
    prepare_and_pass(inputs, access, out, tile, None)


def prepare_and_pass(
    inputs: MatrixInputs, access: StateAccess, out: Tensor, tile: PiecesTile, inverse: Tensor | None
) -> PieceOperands:
    """Like `launch_pieces`; returns the operands that its kernels have stored.

    inverse: (pieces, heads, 64, 64): if given, it gets the inverses of the triangular systems, and `out` is not written
    """
    q, k, v, g = (x if x is None else with_contiguous_heads(x) for x in inputs[:4])
    weight = None if inputs.weight is None else with_unit_stride(inputs.weight)
    assert q is not None
    assert k is not None
    assert v is not None
    tail_k, tail_u, tail_g = (*access.tails, None, None, None)[:3]
    sums = None if g is None or g.dim() < 3 else torch.empty_like(g, dtype=torch.float32, memory_format=torch.contiguous_format)
    pieces = len(access.batch.chunks)
    if inverse is not None:
        tile = tile._replace(outputs_in_loop=False)
    operands = _allocate_operands(k, v, g, pieces, tile)
    slab = min(max(-(-pieces // tile.slabs), MIN_SLAB), pieces)
    carry = None if slab == pieces else torch.empty(len(access.batch.sources), *access.write.shape[1:], device=v.device)
    strides = tuple(0 if x is None else x.stride(0) for x in (q, k, v, g, weight))
    ring = 1 if tail_k is None else tail_k.shape[1]
    slabs: list[tuple[Any, tuple[Any, ...]]] = []
    for first in range(0, pieces, slab):
        own = PieceOperands(*[None if x is None else x[first : first + slab] for x in operands])
        own_inverse = None if inverse is None else inverse[first : first + slab]
        batch = access.batch._replace(chunks=access.batch.chunks[first : first + slab])
        rows = (batch.cu_seqlens, batch.seqused_k, batch.chunks)
        tail = (tail_k, tail_u, tail_g, batch.slots)
        prepare = (q, k, v, g, weight, inputs.a, inputs.steps.bias, sums, *tail, *rows, *own[:6], own_inverse)
        passing = (*own, inputs.d, access.read, access.write, tail_u, batch.sources, batch.slots, *rows, out, carry)
        outputs = (own.queries, own.attn, *own[4:], v, inputs.d, batch.chunks, out)
        key = (
            "pieces",
            len(batch.sources),
            len(batch.chunks),
            k.shape[1:],
            v.shape[1:],
            strides,
            ring,
            (inputs.softmax_scale, inputs.use_qk_l2norm, inputs.steps.softplus, inputs.steps.limit),
            tile,
            tuple([None if x is None else x.dtype for x in (*prepare, *passing)]),
            v.get_device(),
        )
        run = PLANS.get(key)
        if run is None:
            run = PLANS.add(key, _plan(inputs, len(batch.sources), len(batch.chunks), ring, strides, tile))
        slabs.append((run, ((g, sums, batch.chunks), prepare, passing, outputs if inverse is None else None)))
    _run_slabs(slabs, v.device)
    return operands


def _run_slabs(slabs: list[tuple[Any, tuple[Any, ...]]], device: torch.device) -> None:
    """Run the stages of all slabs. On a GPU, the loop over the pieces of a slab runs on a second stream, at the same time as
    the preparation and the outputs of other slabs.

    slabs: (plan, tensors of its stages)
    """
    if len(slabs) == 1 or device.type != "cuda":
        for run, tensors in slabs:
            for stage, given in enumerate(tensors):
                run(stage, given)
        return
    main = torch.cuda.current_stream(device)
    beside = _side_stream(device)
    passed = []
    for run, tensors in slabs:
        run(0, tensors[0])
        run(1, tensors[1])
        beside.wait_stream(main)
        with torch.cuda.stream(beside):
            run(2, tensors[2])
            passed.append(beside.record_event())
    for (run, tensors), event in zip(slabs, passed, strict=True):
        main.wait_event(event)  # after the last wait, the main stream may reuse the memory of the second stream's work
        run(3, tensors[3])


@lru_cache(maxsize=16)
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The second stream. It has a higher priority; programs of the main stream fill the multiprocessors that it leaves free."""
    return torch.cuda.Stream(device, priority=-1)


def _allocate_operands(k: Tensor, v: Tensor, g: Tensor | None, pieces: int, tile: PiecesTile) -> PieceOperands:
    by_channel = g is not None and g.dim() == 3
    heads = v.shape[1]
    key_heads = heads if by_channel else k.shape[1]
    block_k = power_of_2(max(k.shape[2], MIN_COLUMNS))
    columns = -(-v.shape[2] // tile.filled_columns) * tile.filled_columns
    return PieceOperands(
        keys=k.new_empty(pieces, key_heads, PIECE_ROWS, block_k),
        queries=k.new_empty(pieces, key_heads, PIECE_ROWS, block_k),
        attn=k.new_empty(pieces, heads, PIECE_ROWS, PIECE_ROWS),
        w=None if g is None else k.new_empty(pieces, heads, PIECE_ROWS, block_k),
        u=k.new_empty(pieces, heads, columns, PIECE_ROWS),
        decays=k.new_empty(pieces, heads, block_k if by_channel else 2 * PIECE_ROWS, dtype=torch.float32),
        states=None if tile.outputs_in_loop else k.new_empty(pieces, heads, columns, block_k),
    )


def _plan(inputs: MatrixInputs, num_seqs: int, num_chunks: int, ring: int, strides: tuple[int, ...], tile: PiecesTile) -> Any:
    key_heads, dim = inputs.k.shape[1:]
    heads, dim_v = inputs.v.shape[1:]
    by_channel = inputs.g is not None and inputs.g.dim() == 3
    block_k = power_of_2(max(dim, MIN_COLUMNS))
    columns = -(-dim_v // tile.filled_columns) * tile.filled_columns
    arch = spec.arch_of(inputs.v.device)
    passes = mma_sync_on_sm100(arch) if by_channel else {}
    registers = {"maxnreg": tile.prepare_registers} if tile.prepare_registers else {}
    precision = "tf32" if arch and inputs.v.dtype != torch.float32 else "ieee"
    low, high = inputs.steps.limit
    operand_heads = heads if by_channel else key_heads
    sum_gates = None
    if by_channel:
        sum_gates = Launch(
            _sum_gates,
            num_chunks * heads,
            varying=(),
            strides=strides[3:4],
            fixed=(heads, dim, block_k),
            options={"num_warps": 4},
        )
    asked = (heads, key_heads, dim, dim_v, ring, by_channel, inputs.use_qk_l2norm, inputs.steps.softplus)
    prepare = Launch(
        _prepare_pieces,
        num_chunks * heads,
        varying=(float(inputs.softmax_scale), float(low), float(high)),
        strides=strides,
        fixed=(*asked, block_k, columns // MIN_COLUMNS, MIN_COLUMNS, precision),
        options={"num_warps": tile.prepare_warps, **registers, **passes},
    )
    blocks = columns // tile.block_v
    pass_states = Launch(
        _pass_states,
        num_seqs * heads * blocks,
        varying=(num_chunks,),
        fixed=(heads, operand_heads, dim, dim_v, ring, by_channel, block_k, blocks, tile.block_v, tile.stages, precision),
        options={"num_warps": tile.pass_warps},
    )
    outputs = None
    if not tile.outputs_in_loop:
        # the blocks of columns must be those of the loop, because both address `states` and `u` by them
        outputs = Launch(
            _compute_outputs,
            num_chunks * heads * blocks,
            varying=(),
            strides=strides[2:3],
            fixed=(heads, operand_heads, dim_v, by_channel, block_k, blocks, tile.block_v, precision),
            options={"num_warps": tile.output_warps},
        )

    stages = (sum_gates, prepare, pass_states, outputs)

    def run(stage: int, tensors: Any) -> None:
        launch = stages[stage]
        if launch is not None and tensors is not None:
            launch(tensors)

    return run
