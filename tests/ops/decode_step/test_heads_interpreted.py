"""Attention of one KV head and one split, task by task in any order."""

from __future__ import annotations

import random

import pytest
import torch
import triton
import triton.language as tl
from decode_step_cases import PAGE_SIZE, StepCase, compute_plainly, make_layers, make_step
from interpreter_bounds import reachable

from fa_serve.ops.decode_step.heads import attend_task
from fa_serve.ops.decode_step.layout import StepTile, layout_of
from fa_serve.ops.decode_step.run import DecodeStack

TILE = StepTile(block_keys=16, key_stages=1, num_warps=2)


@triton.jit
def _task(
    task,
    splits,
    qkv_ptr,
    out_ptr,
    parts_ptr,
    pairs_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    used_ptr,
    cu_q_ptr,
    slot_ptr,
    stride_table,
    cos_ptr,
    sin_ptr,
    stride_cos,
    scale,
    stride_page,
    stride_token,
    stride_head,
    var: tl.constexpr,
):
    attend_task(
        task,
        splits,
        qkv_ptr,
        out_ptr,
        parts_ptr,
        pairs_ptr,
        (qkv_ptr, qkv_ptr),
        (k_ptr, v_ptr),
        (table_ptr, used_ptr, cu_q_ptr, slot_ptr, stride_table),
        (cos_ptr, sin_ptr, stride_cos),
        scale,
        (1e-5, 0.0),
        (stride_page, stride_token, stride_head),
        var,
    )


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize(
    "case",
    [
        StepCase(q_lens=(1, 2), kv_lens=(70, 33), layers=1),
        StepCase(q_lens=(1, 3), kv_lens=(1, 3), num_heads=6, layers=1),
        StepCase(q_lens=(1, 1), kv_lens=(20, 1), padded=frozenset({1}), rotary_dim=0, layers=1),
    ],
    ids=["long", "no earlier keys", "padding"],
)
def test_tasks_in_any_order_are_attention(case: StepCase, splits: int) -> None:
    """The output projection is the identity, so a layer whose unit gives zeros adds the outputs of attention to its input."""
    width = case.num_heads * case.head_dim
    case = StepCase(**{**vars(case), "hidden": width})
    (layer,) = make_layers(case)
    layer = layer._replace(o=torch.eye(width), down=torch.zeros_like(layer.down))
    x, step = make_step(case)
    copies = step._replace(caches=[(k.clone(), v.clone()) for k, v in step.caches])
    expected = compute_plainly(case, [layer], x, copies) - x.double()
    norm = layer.before_attention
    h = x.double() * (x.double().square().mean(1, keepdim=True) + norm.eps).rsqrt() * norm.weight.double()
    qkv = (h @ layer.qkv.double().T).float()
    shape = DecodeStack([layer], case.options(), programs=1).shape
    var = layout_of(
        shape, programs=8, arch=90, tokens=case.total, max_seqlen_q=max(case.q_lens), page_size=PAGE_SIZE, kind=0, tile=TILE
    )
    units = len(case.q_lens) * case.num_kv_heads
    out = torch.full((case.total, width), 7.0)
    parts = torch.full((units * var.parts_of_unit,), float("nan"))
    pairs = torch.zeros(units, dtype=torch.int32)
    ((keys, values),) = step.caches
    tasks = list(range(units * splits))
    random.Random(splits).shuffle(tasks)
    with reachable(keys, values):
        for task in tasks:
            _task[(1,)](
                task,
                splits,
                qkv,
                out,
                parts,
                pairs,
                keys,
                values,
                step.block_table,
                step.seqused_k,
                step.cu_seqlens_q,
                step.slot_mapping,
                step.block_table.stride(0),
                step.cos,
                step.sin,
                step.cos.stride(0),
                case.head_dim**-0.5,
                *keys.stride()[:3],
                var,
            )
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert not pairs.any(), "the last split of a head resets its counter"
    for cache, right in zip((keys, values), copies.caches[0], strict=True):
        torch.testing.assert_close(cache, right, rtol=1e-5, atol=1e-5, equal_nan=True)
