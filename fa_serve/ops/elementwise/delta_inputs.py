"""The kernel behind the projection of a gated delta net, if the projection groups its columns by key head.

A group has the columns of one key head: its query, its key, then the values and the output's gates of its heads. Behind all
groups come b and a, grouped as well. The kernel copies queries, keys, values and gates to the order in which they are used, and
computes the gates of the delta rule. On Hopper and later GPUs it is launched programmatically, see
`primitives.wait_for_previous_kernel`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.launching.launch import Launch, launch_options, power_of_2, with_unit_stride
from fa_serve.launching.plans import PLANS
from fa_serve.ops.elementwise.gates import delta_rule_gates
from fa_serve.ops.ops_backend import DeltaHeads


@triton.jit(do_not_specialize=["total"])
def _ungroup_delta_inputs(
    x_ptr,
    a_log_ptr,
    bias_ptr,
    out_ptr,
    gates_ptr,
    total,
    stride_x,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    SHARE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_SHARE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes one group of one token. SHARE: heads of values that share a key head

    out:   (total, columns): all queries, keys, values, and gates of the output
    gates: (2, total, heads) float32: the log gates, then beta
    """
    wait_for_previous_kernel(PDL)
    token = (tl.program_id(0) // KEY_HEADS).to(tl.int64)
    group = tl.program_id(0) % KEY_HEADS
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUES: tl.constexpr = SHARE * DIM
    COLUMNS: tl.constexpr = 2 * KEYS + 2 * KEY_HEADS * VALUES
    row_ptr = x_ptr + token * stride_x
    in_ptr = row_ptr + group * (2 * KEY_DIM + 2 * VALUES)
    out_row = out_ptr + token * COLUMNS
    part = tl.arange(0, 2)[:, None]
    cols = tl.arange(0, BLOCK_KEY)[None, :]
    queries = tl.load(in_ptr + part * KEY_DIM + cols, mask=cols < KEY_DIM, other=0.0)

    values = tl.arange(0, 2 * BLOCK_SHARE)
    is_gate = values // BLOCK_SHARE
    head = values % BLOCK_SHARE
    dims = tl.arange(0, BLOCK_DIM)[None, :]
    keep = (head < SHARE)[:, None] & (dims < DIM)
    values_in = (2 * KEY_DIM + is_gate * VALUES + head * DIM)[:, None] + dims
    both = tl.load(in_ptr + values_in, mask=keep, other=0.0)

    heads = tl.arange(0, BLOCK_SHARE)
    own = heads < SHARE
    number = group * SHARE + heads
    b_ptrs = row_ptr + COLUMNS + group * (2 * SHARE) + heads
    g, beta = delta_rule_gates(b_ptrs + SHARE, b_ptrs, a_log_ptr, bias_ptr, number, own)

    tl.store(out_row + group * KEY_DIM + part * KEYS + cols, queries, mask=cols < KEY_DIM)
    values_out = (2 * KEYS + is_gate * (KEY_HEADS * VALUES) + group * VALUES + head * DIM)[:, None] + dims
    tl.store(out_row + values_out, both, mask=keep)
    place = token * (KEY_HEADS * SHARE) + number
    tl.store(gates_ptr + place, g, mask=own)
    tl.store(gates_ptr + total.to(tl.int64) * (KEY_HEADS * SHARE) + place, beta, mask=own)


def launch_ungroup_delta_inputs(
    x: Tensor, heads: DeltaHeads, a_log: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Arguments and result are those of `fa_serve.ops.ungroup_delta_inputs`. One launch."""
    x = with_unit_stride(x)
    total = len(x)
    out = x.new_empty(total, heads.columns)
    gates = torch.empty(2, total, heads.values, dtype=torch.float32, device=x.device)
    tensors = (x, a_log, dt_bias, out, gates)
    key = ("ungroup_delta_inputs", x.shape, x.stride(0), heads, *[each.dtype for each in tensors], x.get_device())
    run = PLANS.get(key)
    if run is None and total:
        run = PLANS.add(key, plan_ungroup_delta_inputs(x, heads))
    if run is not None:
        run(tensors)
    split = heads.columns - heads.values * heads.dim
    return out[:, :split], out[:, split:], gates[0], gates[1]


def plan_ungroup_delta_inputs(x: Tensor, heads: DeltaHeads) -> Launch:
    """The launch on (x, a_log, dt_bias, out, gates)."""
    share = heads.values // heads.keys
    pdl = spec.has_programmatic_launch(spec.arch_of(x.device))
    blocks = (power_of_2(heads.key_dim), power_of_2(share), power_of_2(heads.dim))
    return Launch(
        _ungroup_delta_inputs,
        len(x) * heads.keys,
        varying=(len(x),),
        strides=(x.stride(0),),
        fixed=(heads.keys, heads.key_dim, share, heads.dim, *blocks, pdl),
        options=launch_options(pdl, 1),
    )
