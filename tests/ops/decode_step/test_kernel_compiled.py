"""The persistent kernel of a decoding step compiles without spills, and keeps its loads wide."""

from __future__ import annotations

import re

import pytest
import torch
from cross_compile import SHARED_BYTES, Kernel, compiling_for
from torch import Tensor

from fa_serve.ops.decode_step.layout import StepTile
from fa_serve.ops.decode_step.run import DecodeStack
from fa_serve.ops.decode_step.stacked import StackLayer, StackOptions, StackStep
from fa_serve.ops.ops_backend import Norm

MODELS = {"qwen3-0.6b": (1024, 3072, 16, 8, True), "llama-8b": (4096, 14336, 32, 8, False)}
SMALLER = StepTile(block_keys=32)
"""For 99 KiB of shared memory."""


@pytest.fixture(autouse=True)
def unwritten_memory(poisoned_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed here, and the weights are gigabytes that need not be written."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)


def bf16(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16)


def compile_step(model: str, target: str, tokens: int, max_seqlen_q: int = 1, tile: StepTile | None = None) -> Kernel:
    hidden, intermediate, num_heads, num_kv_heads, head_norms = MODELS[model]
    norm = Norm(bf16(hidden), 1e-6)
    head_norm = Norm(bf16(128), 1e-6) if head_norms else None
    layer = StackLayer(
        qkv=bf16((num_heads + 2 * num_kv_heads) * 128, hidden),
        qkv_bias=None,
        o=bf16(hidden, num_heads * 128),
        gate_up=bf16(2 * intermediate, hidden),
        down=bf16(hidden, intermediate),
        before_attention=norm,
        before_mlp=norm,
        q_norm=head_norm,
        k_norm=head_norm,
    )
    batch = tokens // max_seqlen_q
    cache = bf16(4, 16, num_kv_heads, 128)
    step = StackStep(
        cos=bf16(tokens, 128),
        sin=bf16(tokens, 128),
        caches=[(cache, cache)],
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        block_table=torch.zeros(batch, 4, dtype=torch.int32),
        seqused_k=torch.zeros(batch, dtype=torch.int32),
        cu_seqlens_q=torch.zeros(batch + 1, dtype=torch.int32),
        max_seqlen_q=max_seqlen_q,
    )
    with compiling_for(target) as kernels:
        stack = DecodeStack(
            [layer], StackOptions(num_heads, 128, 128, "silu", 1.0, 128**-0.5), programs=132, tile=tile or StepTile()
        )
        stack.compute(bf16(tokens, hidden), step)
    (kernel,) = kernels
    return kernel


@pytest.mark.parametrize(
    ("model", "target", "tokens", "max_seqlen_q"),
    [
        ("qwen3-0.6b", "sm90", 1, 1),
        ("qwen3-0.6b", "sm90", 8, 1),
        ("llama-8b", "sm90", 1, 1),
        ("llama-8b", "sm90", 8, 8),
        ("llama-8b", "sm100", 1, 1),
        ("qwen3-0.6b", "sm120", 1, 1),
        ("qwen3-0.6b", "sm120", 2, 1),
    ],
)
def test_compiles_without_spills(model: str, target: str, tokens: int, max_seqlen_q: int) -> None:
    kernel = compile_step(model, target, tokens, max_seqlen_q, SMALLER if target == "sm120" else None)
    assert kernel.spill_bytes == 0
    assert kernel.shared_bytes <= SHARED_BYTES[target]
    ptx = kernel.binary.asm["ptx"]
    # addresses from a table keep their alignment: weights come 16 bytes at a time
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) >= 40
    # a poll is a load, not an atomic operation that writes
    assert len(re.findall(r"ld\.global\.gpu\.acquire", ptx)) == 5
    assert len(re.findall(r"atom\.global\.gpu\.release", ptx)) == 5
    assert len(re.findall(r"atom\.global\.gpu\.acq_rel", ptx)) == 1
    assert len(re.findall(r"cp\.async\.bulk\.prefetch\.L2", ptx)) == 5
    assert kernel.binary.metadata.launch_cooperative_grid


@pytest.mark.parametrize(
    ("model", "target"), [("qwen3-0.6b", "sm90"), ("llama-8b", "sm90"), ("llama-8b", "sm100"), ("qwen3-0.6b", "sm120")]
)
def test_words_are_waited_for_without_fences_and_once(model: str, target: str) -> None:
    """A poll whose result is wanted in two layouts must not be repeated for each, and none is in a layout of its users."""
    tile = (SMALLER if target == "sm120" else StepTile())._replace(tagged=True)
    kernel = compile_step(model, target, 1, 1, tile)
    assert kernel.spill_bytes == 0
    ptx = kernel.binary.asm["ptx"]
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) >= 40
    assert not re.search(r"\b(atom|red|fence|membar)\b", ptx)
    # of the residual stream twice, of attention, and of gated numbers before the loop and in it
    blocks = {"qwen3-0.6b": 5, "llama-8b": 8}[model]
    merged = {"qwen3-0.6b": 1, "llama-8b": 2}[model]  # outputs and splits for each thread
    assert len(re.findall(r"ld\.relaxed\.gpu\.global\.v4\.b32", ptx)) == 2 * blocks
    assert len(re.findall(r"ld\.relaxed\.gpu\.global\.b64", ptx)) == 3 * merged
    assert kernel.binary.metadata.launch_cooperative_grid
