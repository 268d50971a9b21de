"""The persistent kernel of a decoding step: all decoder layers of a model for up to eight tokens in one launch.

One program runs on each multiprocessor, and a layer is five phases (`layout`). Between two phases a program tells that it is
done, requests its first weights of the next phase, which depend on nothing, and then waits until all programs are done. So the
memory is kept busy across what would be the launches of a layer.

What is written twice is safe without further waiting, because each phase waits for all programs of the phase before it: a
program that writes the queries, the outputs of attention or the gated numbers of the next layer knows that all programs have
read those of this one. A row of the residual stream is read and written by one program, between phases that read all of it.

The tables of addresses have a row for each layer. Left out: the embedding, the last norm and the head, which are separate
launches, and how many programs are resident (run.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from fa_serve.ops.decode_step.heads import attend_task
from fa_serve.ops.decode_step.rows import multiply_share, share_of, weight_tile
from fa_serve.ops.decode_step.waiting import arrive, request_ahead, wait_for_phase

ADDRESSES = (
    "qkv",
    "o",
    "gate_up",
    "down",
    "qkv_bias",
    "before_attention",
    "before_mlp",
    "q_norm",
    "k_norm",
    "k_cache",
    "v_cache",
)
"""What a row of the table has, in this order; 0 for what a layer does not have."""
_ADDRESSES = tl.constexpr(len(ADDRESSES))


@triton.jit
def _address(table_ptr, layer, which: tl.constexpr, like_ptr):
    """A pointer to what `like_ptr` points to, from the table. Tensors are aligned to 16 bytes.

    It is that pointer and an offset, because the compiler forgets the alignment of a number that becomes a pointer.
    """
    BYTES: tl.constexpr = like_ptr.dtype.element_ty.primitive_bitwidth // 8
    address = tl.load(table_ptr + layer * _ADDRESSES + which)
    return like_ptr + tl.multiple_of((address - like_ptr.to(tl.int64)) // BYTES, 16 // BYTES)


@triton.jit
def _first_tile(w_ptr, program, product: tl.constexpr, var: tl.constexpr):
    ROWS: tl.constexpr = product.rows
    PROGRAMS: tl.constexpr = var.programs
    begin, end = share_of(program, ROWS, PROGRAMS)
    return weight_tile(w_ptr, 0, begin, end, product)


@triton.jit
def _request_share(w_ptr, program, product: tl.constexpr, var: tl.constexpr):
    """Request the weights of a program's share of a product, so that they arrive while this phase ends."""
    ROWS: tl.constexpr = product.rows
    PROGRAMS: tl.constexpr = var.programs
    begin, end = share_of(program, ROWS, PROGRAMS)
    numbers = (end - begin) * product.columns
    request_ahead(w_ptr + begin.to(tl.int64) * product.columns, numbers, var)
    if product.gated:
        request_ahead(w_ptr + (begin + product.rows).to(tl.int64) * product.columns, numbers, var)


@triton.jit(do_not_specialize=["first_layer", "num_layers", "total", "num_sequences", "splits", "stride_table", "stride_cos"])
def decode_layers(
    x_ptr,
    qkv_ptr,
    attended_ptr,
    gated_ptr,
    parts_ptr,
    counters_ptr,
    pairs_ptr,
    done_ptr,
    table_ptr,
    cos_ptr,
    sin_ptr,
    slot_ptr,
    pages_ptr,
    used_ptr,
    cu_q_ptr,
    first_layer,
    num_layers,
    total,
    num_sequences,
    splits,
    stride_table,
    stride_cos,
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
    """x (total, hidden) is overwritten with the output of the last layer."""
    QKV: tl.constexpr = var.qkv
    OUTPUT: tl.constexpr = var.o
    GATE_UP: tl.constexpr = var.gate_up
    DOWN: tl.constexpr = var.down
    program = tl.program_id(0)
    done = tl.load(done_ptr + program)
    batch = (pages_ptr, used_ptr, cu_q_ptr, slot_ptr, stride_table)
    angles = (cos_ptr, sin_ptr, stride_cos)
    strides = (stride_page, stride_token, stride_head)
    tasks = num_sequences * var.num_kv_heads * splits
    w_qkv = _first_tile(_address(table_ptr, first_layer, 0, x_ptr), program, QKV, var)
    for step in tl.range(0, num_layers, num_stages=1, disable_licm=True):
        layer = first_layer + step
        qkv_w = _address(table_ptr, layer, 0, x_ptr)
        o_w = _address(table_ptr, layer, 1, x_ptr)
        gate_up_w = _address(table_ptr, layer, 2, x_ptr)
        down_w = _address(table_ptr, layer, 3, x_ptr)
        next_w = _address(table_ptr, tl.minimum(layer + 1, first_layer + num_layers - 1), 0, x_ptr)
        target = (done + step + 1) * var.programs

        if step > 0:
            wait_for_phase(counters_ptr, 4, target - var.programs)
        _request_share(o_w, program, OUTPUT, var)
        multiply_share(
            x_ptr,
            qkv_w,
            _address(table_ptr, layer, 5, x_ptr),
            _address(table_ptr, layer, 4, x_ptr),
            qkv_ptr,
            w_qkv,
            program,
            total,
            eps,
            offset,
            1.0,
            QKV,
            var,
        )
        arrive(counters_ptr, 0)

        wait_for_phase(counters_ptr, 0, target)
        weights = (_address(table_ptr, layer, 7, x_ptr), _address(table_ptr, layer, 8, x_ptr))
        caches = (_address(table_ptr, layer, 9, x_ptr), _address(table_ptr, layer, 10, x_ptr))
        for task in tl.range(program, tasks, var.programs, num_stages=1, disable_licm=True):
            attend_task(
                task,
                splits,
                qkv_ptr,
                attended_ptr,
                parts_ptr,
                pairs_ptr,
                weights,
                caches,
                batch,
                angles,
                scale,
                (head_eps, head_offset),
                strides,
                var,
            )
        arrive(counters_ptr, 1)
        w_o = _first_tile(o_w, program, OUTPUT, var)

        wait_for_phase(counters_ptr, 1, target)
        _request_share(gate_up_w, program, GATE_UP, var)
        multiply_share(attended_ptr, o_w, x_ptr, x_ptr, x_ptr, w_o, program, total, eps, offset, alpha, OUTPUT, var)
        arrive(counters_ptr, 2)
        w_gate_up = _first_tile(gate_up_w, program, GATE_UP, var)

        wait_for_phase(counters_ptr, 2, target)
        _request_share(down_w, program, DOWN, var)
        multiply_share(
            x_ptr,
            gate_up_w,
            _address(table_ptr, layer, 6, x_ptr),
            x_ptr,
            gated_ptr,
            w_gate_up,
            program,
            total,
            eps,
            offset,
            1.0,
            GATE_UP,
            var,
        )
        arrive(counters_ptr, 3)
        w_down = _first_tile(down_w, program, DOWN, var)

        wait_for_phase(counters_ptr, 3, target)
        _request_share(next_w, program, QKV, var)
        multiply_share(gated_ptr, down_w, x_ptr, x_ptr, x_ptr, w_down, program, total, eps, offset, alpha, DOWN, var)
        arrive(counters_ptr, 4)
        w_qkv = _first_tile(next_w, program, QKV, var)
    tl.store(done_ptr + program, done + num_layers)
