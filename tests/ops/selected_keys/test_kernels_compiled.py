"""The kernels of token-sparse attention compile for every GPU within its shared memory, and without spills but on Hopper."""

from __future__ import annotations

import pytest
import torch
from cross_compile import SHARED_BYTES, UNLIKE, compiling_for
from sampled_cases import each_nth
from torch import Tensor

from fa_serve.ops.selected_keys import attention
from fa_serve.ops.selected_keys.attention import launch_sparse_attention, run_sparse_attention
from fa_serve.ops.selected_keys.gather_wgmma import GATHER_RING
from fa_serve.ops.selected_keys.scores import launch_select_slots


def bf16(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


@pytest.mark.parametrize("target", each_nth(3, UNLIKE))
def test_attention_to_slots(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek V3.2 on latent keys with the slots of a query in parts and whole, GLM with 64 heads, and keys for each head. On
    Hopper with a release of Triton whose Gluon is not known; with others `attn_selected_hopper` gathers latent keys."""
    monkeypatch.setattr(attention, "compiles_gluon", lambda: False)
    slots = torch.zeros(4, 2048, dtype=torch.int32)
    latent = bf16(40, 64, 1, 576)
    with compiling_for(target) as kernels:
        launch_sparse_attention(bf16(4, 128, 576), latent, latent[..., :512], slots, None, 0.1, 8)
        launch_sparse_attention(bf16(4, 128, 576), latent, latent[..., :512], slots, None, 0.1, 1)
        launch_sparse_attention(bf16(4, 16, 192), bf16(4, 64, 16, 192), bf16(4, 64, 16, 128), slots, torch.zeros(16), 0.1, 1)
    assert [kernel.name for kernel in kernels] == ["attn_selected", "_combine_parts", "attn_selected", "attn_selected"]
    # 64 keys of 576 elements in two stages are 1.3 times as fast as 32 keys without these spills
    assert [kernel.spill_bytes for kernel in kernels] == ([32, 0, 32, 0] if target == "sm90" else [0] * 4)
    assert max(kernel.shared_bytes for kernel in kernels) <= SHARED_BYTES[target]
    if target == "sm90":
        assert kernels[0].instructions["HGMMA"] > 0


@pytest.mark.parametrize("num_splits", [1, 8])
def test_attention_to_slots_on_hopper(num_splits: int) -> None:
    """The kernel for Hopper."""
    latent = bf16(40, 64, 1, 576)
    slots = torch.zeros(4, 2048, dtype=torch.int32)
    sinks = torch.zeros(128) if num_splits > 1 else None
    with compiling_for("sm90") as kernels:
        run_sparse_attention(bf16(4, 128, 576), latent, latent[..., :512], slots, sinks, 0.1, num_splits, GATHER_RING)
    kernel = kernels[0]
    assert kernel.name == "attn_selected_hopper"
    assert kernel.registers <= 128
    assert kernel.spill_bytes == 0
    assert kernel.shared_bytes <= SHARED_BYTES["sm90"]
    assert kernel.wgmma_faults == []
    # S of the first block and of the others, 36 steps of 16 columns each, and 2 steps of 16 keys for each part of the values
    assert kernel.instructions["HGMMA"] == 2 * 36 + 2 * 4
    # a thread copies 2 x 9 times 16 bytes of a block of keys, and 37 times of the queries
    assert kernel.instructions["LDGSTS"] == 18 + 37


@pytest.mark.parametrize("target", each_nth(3, UNLIKE))
def test_choice_of_keys(target: str) -> None:
    step = (torch.zeros(2, 1024, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32))
    with compiling_for(target) as kernels:
        launch_select_slots(bf16(4, 64, 128), bf16(40, 64, 1, 128), torch.zeros(4, 64), *step, 2, 5000, 2048)
        launch_select_slots(bf16(4, 64, 128), bf16(40, 64, 1, 128), torch.zeros(4, 64), *step, 2, 2000, 2048)
    assert [kernel.name for kernel in kernels] == ["_index_scores", "_slots_of_keys", "_slots_of_keys"]
    assert [kernel.spill_bytes for kernel in kernels] == [0] * 3
    assert max(kernel.shared_bytes for kernel in kernels) <= SHARED_BYTES[target]
