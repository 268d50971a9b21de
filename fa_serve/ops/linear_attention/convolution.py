"""The kernel of the short convolution, with its activation: chunks, few rows and the functional form.

A program computes some channels of some rows, whichever sequences these belong to. In calls with few rows, each row has its own
programs. Each row finds its sequence, and each input that it needs is a row of the step, of the tail or of the state page. Rows
of the step are written to the tail, at places that no program of this launch reads. Two programs never write the same state,
because the state before position p + 1 is written by the row at p.

The states that chunks keep are listed in the table of pieces. A second launch copies them from the rows of the step.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.launching.launch import Launch, power_of_2, with_unit_stride
from fa_serve.launching.plans import PLANS
from fa_serve.ops.linear_attention.primitives import sequences_of_rows, silu
from fa_serve.ops.linear_attention.problem import FEW_ROWS, StateAccess

BLOCK_M = 16
"""Rows of a program."""
BLOCK_C = 128
"""Channels of a program."""
MOST_SINGLE_ROWS = 512
"""Up to this many rows, each row has its own programs. More rows share weights and inputs in blocks of BLOCK_M."""
SINGLE_ROW_CHANNELS = 256
"""Channels of a program of a single row."""


@triton.jit(do_not_specialize=["total", "num_seqs"])
def _causal_conv(
    x_ptr,
    weight_ptr,
    bias_ptr,
    read_ptr,
    write_ptr,
    tail_ptr,
    source_ptr,
    target_ptr,
    slot_ptr,
    cu_ptr,
    seqused_ptr,
    out_ptr,
    total,
    num_seqs,
    stride_x,
    stride_w,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    RING: tl.constexpr,
    MOST: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    COLUMNS: tl.constexpr = (CHANNELS + BLOCK_C - 1) // BLOCK_C
    row = tl.program_id(0) // COLUMNS * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(0) % COLUMNS * BLOCK_C + tl.arange(0, BLOCK_C)
    in_c = c < CHANNELS

    seq = sequences_of_rows(row, cu_ptr, num_seqs, BLOCK_SEQS)
    stop = tl.load(cu_ptr + seq + 1, mask=seq >= 0, other=0)
    end = tl.load(seqused_ptr + seq, mask=(seq >= 0) & (row < stop), other=0)
    live = (end > 0) & (row < total)
    begin = tl.load(cu_ptr + seq, mask=live, other=0)
    first = end - (stop - begin)
    start = first // PAGE * PAGE
    position = first + row - begin
    source = tl.load(source_ptr + seq, mask=live, other=-1).to(tl.int64)
    slot = tl.zeros([BLOCK_M], tl.int64)
    if tail_ptr is not None:
        slot = tl.load(slot_ptr + seq, mask=live, other=0).to(tl.int64)
    target = tl.zeros([BLOCK_M], tl.int64) - 1
    if target_ptr is not None:
        filled = live & (stop - begin <= MOST) & (position + 1 == end // PAGE * PAGE) & (position >= start)
        target = tl.load(target_ptr + seq, mask=filled, other=-1).to(tl.int64)

    acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + c, mask=in_c, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(WIDTH):
        at = position - (WIDTH - 1) + tap
        new = live & (at >= first)
        place = (row - (WIDTH - 1) + tap).to(tl.int64)
        y = tl.load(x_ptr + place[:, None] * stride_x + c[None, :], mask=new[:, None] & in_c[None, :], other=0.0)
        if tap < WIDTH - 1:
            paged = live & (at < start) & (source >= 0)
            place = source * (WIDTH - 1) + at - start + (WIDTH - 1)
            y += tl.load(read_ptr + place[:, None] * CHANNELS + c[None, :], mask=paged[:, None] & in_c[None, :], other=0.0)
            if tail_ptr is not None:
                old = live & (at >= start) & (at < first)
                place = slot * RING + (at + RING) % RING
                y += tl.load(tail_ptr + place[:, None] * CHANNELS + c[None, :], mask=old[:, None] & in_c[None, :], other=0.0)
        if target_ptr is not None and tap > 0:
            place = target * (WIDTH - 1) + tap - 1
            tl.store(write_ptr + place[:, None] * CHANNELS + c[None, :], y, mask=(target >= 0)[:, None] & in_c[None, :])
        weight = tl.load(weight_ptr + c * stride_w + tap, mask=in_c, other=0.0).to(tl.float32)
        acc += y.to(tl.float32) * weight[None, :]
        if tap == WIDTH - 1 and tail_ptr is not None:
            place = slot * RING + position % RING
            kept = live & (position >= end - RING)
            tl.store(tail_ptr + place[:, None] * CHANNELS + c[None, :], y, mask=kept[:, None] & in_c[None, :])
    if SILU:
        acc = silu(acc)
    acc = tl.where(live[:, None], acc, 0.0)  # the rest of the model reads padding rows too
    place = row.to(tl.int64)[:, None] * CHANNELS + c[None, :]
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=(row < total)[:, None] & in_c[None, :])


@triton.jit(do_not_specialize=["total", "num_seqs"])
def _causal_conv_of_row(
    x_ptr,
    weight_ptr,
    bias_ptr,
    read_ptr,
    write_ptr,
    tail_ptr,
    source_ptr,
    target_ptr,
    slot_ptr,
    cu_ptr,
    seqused_ptr,
    out_ptr,
    total,
    num_seqs,
    stride_x,
    stride_w,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    RING: tl.constexpr,
    MOST: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes what `_causal_conv` computes, for one row, such as a row of a decode step. The addresses of its inputs are
    scalars of the program, so no thread waits for another, and all inputs are in flight at once. The next kernel may start
    meanwhile (programmatic launch)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    COLUMNS: tl.constexpr = (CHANNELS + BLOCK_C - 1) // BLOCK_C
    row = tl.program_id(0) // COLUMNS
    c = tl.program_id(0) % COLUMNS * BLOCK_C + tl.arange(0, BLOCK_C)
    in_c = c < CHANNELS

    # if all sequences up to this row have one row, the number of the row is that of its sequence
    seq = tl.minimum(row, num_seqs - 1)
    begin = tl.load(cu_ptr + seq)
    stop = tl.load(cu_ptr + seq + 1)
    end = tl.load(seqused_ptr + seq)
    source = tl.load(source_ptr + seq)
    slot = tl.zeros([], tl.int64)
    if tail_ptr is not None:
        slot = tl.load(slot_ptr + seq).to(tl.int64)
    if (begin > row) | (stop <= row):
        begins = tl.zeros([BLOCK_SEQS], tl.int32)
        for low in range(0, num_seqs, BLOCK_SEQS):
            b = low + tl.arange(0, BLOCK_SEQS)
            begins += (tl.load(cu_ptr + b, mask=b < num_seqs, other=0x7FFFFFFF) <= row).to(tl.int32)
        seq = tl.sum(begins, 0) - 1
        begin = tl.load(cu_ptr + seq, mask=seq >= 0, other=0)
        stop = tl.load(cu_ptr + seq + 1, mask=seq >= 0, other=0)
        end = tl.load(seqused_ptr + seq, mask=seq >= 0, other=0)
        source = tl.load(source_ptr + seq, mask=seq >= 0, other=-1)
        if tail_ptr is not None:
            slot = tl.load(slot_ptr + seq, mask=seq >= 0, other=0).to(tl.int64)
    live = (row < stop) & (end > 0)
    first = end - (stop - begin)
    start = first // PAGE * PAGE
    position = first + row - begin
    acc = tl.zeros([BLOCK_C], tl.float32)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + c, mask=in_c, other=0.0).to(tl.float32)
    y = tl.zeros([BLOCK_C], x_ptr.dtype.element_ty)
    for tap in tl.static_range(WIDTH):
        y = _input_of_row(
            x_ptr,
            read_ptr,
            tail_ptr,
            c,
            in_c & live,
            row,
            position,
            first,
            start,
            source,
            slot,
            stride_x,
            tap,
            CHANNELS,
            WIDTH,
            RING,
        )
        weight = tl.load(weight_ptr + c * stride_w + tap, mask=in_c, other=0.0).to(tl.float32)
        acc += y.to(tl.float32) * weight
    if SILU:
        acc = silu(acc)
    acc = tl.where(live, acc, 0.0)  # the rest of the model reads padding rows too
    tl.store(out_ptr + row.to(tl.int64) * CHANNELS + c, acc.to(out_ptr.dtype.element_ty), mask=in_c)
    if tail_ptr is not None:
        keep = in_c & live & (position >= end - RING)
        tl.store(tail_ptr + (slot * RING + position % RING) * CHANNELS + c, y, mask=keep)
    if live & (stop - begin <= MOST) & (position + 1 == end // PAGE * PAGE) & (position >= start):
        target = tl.load(target_ptr + seq).to(tl.int64)
        for tap in tl.static_range(1, WIDTH):
            y = _input_of_row(
                x_ptr,
                read_ptr,
                tail_ptr,
                c,
                in_c,
                row,
                position,
                first,
                start,
                source,
                slot,
                stride_x,
                tap,
                CHANNELS,
                WIDTH,
                RING,
            )
            place = target * (WIDTH - 1) + tap - 1
            tl.store(write_ptr + place * CHANNELS + c, y, mask=in_c & (target >= 0))


@triton.jit
def _input_of_row(
    x_ptr,
    read_ptr,
    tail_ptr,
    c,
    keep,
    row,
    position,
    first,
    start,
    source,
    slot,
    stride_x,
    tap: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
):
    """Channels c of the input that one tap of a row sees. It is in the step, in the tail or in the state page."""
    at = position - (WIDTH - 1) + tap
    place = x_ptr + (row - (WIDTH - 1) + tap).to(tl.int64) * stride_x
    if tap < WIDTH - 1:
        paged = read_ptr + (source.to(tl.int64) * (WIDTH - 1) + at - start + (WIDTH - 1)) * CHANNELS
        if tail_ptr is not None:
            paged = tl.where(at >= start, tail_ptr + (slot * RING + (at + RING) % RING) * CHANNELS, paged)
        place = tl.where(at >= first, place, paged)
        keep = keep & ((at >= start) | (source >= 0))
    return tl.load(place + c, mask=keep, other=0.0)


@triton.jit
def _store_conv_states(
    x_ptr,
    read_ptr,
    write_ptr,
    source_ptr,
    cu_ptr,
    chunk_ptr,
    stride_x,
    CHANNELS: tl.constexpr,
    REACH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Stores the last REACH inputs up to the end of a piece whose state is kept. A chunk begins without a tail, so these inputs
    are rows of the step, or of the page that the sequence begins with."""
    COLUMNS: tl.constexpr = (CHANNELS + BLOCK_C - 1) // BLOCK_C
    piece = tl.program_id(0) // COLUMNS
    target = tl.load(chunk_ptr + 4 * piece + 3).to(tl.int64)
    rows = tl.load(chunk_ptr + 4 * piece + 1)
    if (target < 0) | (rows == 0):
        return
    seq = tl.load(chunk_ptr + 4 * piece + 2)
    begin = tl.load(cu_ptr + seq)
    source = tl.load(source_ptr + seq).to(tl.int64)
    r = tl.arange(0, BLOCK_R)
    c = tl.program_id(0) % COLUMNS * BLOCK_C + tl.arange(0, BLOCK_C)
    row = tl.load(chunk_ptr + 4 * piece) + rows - REACH + r
    keep = (r < REACH)[:, None] & (c < CHANNELS)[None, :]
    new = keep & (row >= begin)[:, None]
    y = tl.load(x_ptr + row.to(tl.int64)[:, None] * stride_x + c[None, :], mask=new, other=0.0)
    old = keep & (row < begin)[:, None] & (source >= 0)
    place = source * REACH + row - begin + REACH
    y += tl.load(read_ptr + place[:, None] * CHANNELS + c[None, :], mask=old, other=0.0)
    tl.store(write_ptr + (target * REACH + r)[:, None] * CHANNELS + c[None, :], y, mask=keep)


def launch_causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, access: StateAccess, few_rows: int = FEW_ROWS
) -> Tensor:
    """The outputs of packed rows (total, channels).

    few_rows: the state of a sequence with at most this many rows goes to its page in `targets`; for longer sequences, the
              table of pieces lists the states to store
    """
    x = with_unit_stride(x)
    weight = with_unit_stride(weight)
    bias = None if bias is None else bias.contiguous()
    total, channels = x.shape
    width = weight.shape[1]
    batch = access.batch
    tail = access.tails[0] if access.tails else None
    out = x.new_empty(total, channels)
    around = (access.read, access.write, tail, batch.sources, batch.targets, batch.slots, batch.cu_seqlens, batch.seqused_k)
    arch = spec.arch_of(x.device)
    single = takes_single_rows(total, arch)
    key = (
        "causal_conv",
        single,
        x.shape,
        x.stride(0),
        weight.shape,
        weight.stride(0),
        len(batch.sources),
        len(batch.chunks),
        (batch.page_size, few_rows, activation),
        None if tail is None else tail.shape[1],
        tuple([None if y is None else y.dtype for y in (x, weight, bias, *around)]),
        x.get_device(),
    )
    run = PLANS.get(key)
    if run is None:
        ring = 1 if tail is None else tail.shape[1]
        sizes = (total, len(batch.sources), len(batch.chunks))
        pdl = spec.has_programmatic_launch(arch)
        fixed = (channels, width, batch.page_size, ring, few_rows, activation == "silu")
        run = PLANS.add(key, _plan(sizes, fixed, (x.stride(0), weight.stride(0)), single, pdl))
    run((x, weight, bias, *around, out), (x, access.read, access.write, batch.sources, batch.cu_seqlens, batch.chunks))
    return out


def takes_single_rows(total: int, arch: int) -> bool:
    """Whether each row has its own programs. Triton 3.6 does not compile them for AMD GPUs: a compiler pass fails at addresses
    that are selected by `tl.where`."""
    return total <= MOST_SINGLE_ROWS and arch > 0


def _plan(
    sizes: tuple[int, int, int], fixed: tuple[int, ...], strides: tuple[int, int], single: bool, lets_next_start: bool
) -> Any:
    total, num_seqs, num_chunks = sizes
    channels, width = fixed[:2]
    columns = -(-channels // BLOCK_C)
    if single:
        convolve = Launch(
            _causal_conv_of_row,
            total * -(-channels // SINGLE_ROW_CHANNELS),
            varying=(total, num_seqs),
            strides=strides,
            fixed=(*fixed, min(128, power_of_2(max(num_seqs, 16))), SINGLE_ROW_CHANNELS, lets_next_start),
            options={"num_warps": 4},
        )
    else:
        convolve = Launch(
            _causal_conv,
            -(-total // BLOCK_M) * columns,
            varying=(total, num_seqs),
            strides=strides,
            fixed=(*fixed, min(128, power_of_2(max(num_seqs, 16))), BLOCK_M, BLOCK_C),
            options={"num_warps": 4},
        )
    store = None
    if num_chunks:
        store = Launch(
            _store_conv_states,
            num_chunks * columns,
            varying=(),
            strides=strides[:1],
            fixed=(channels, width - 1, power_of_2(width - 1), BLOCK_C),
            options={"num_warps": 1},
        )

    def run(rows: Any, states: Any) -> None:
        convolve(rows)
        if store is not None:
            store(states)

    return run
