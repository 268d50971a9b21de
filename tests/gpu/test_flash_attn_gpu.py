"""flash-attn's names on a GPU: the grid of the cache in 16 bits, CUDA graphs, no host synchronisation, and dense calls."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cache_checks import GRID, OTHERS, Case, check
from torch import Tensor

from fa_serve.backends.reference import attention_reference
from fa_serve.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, interface
from fa_serve.testing import assert_matches_reference, cu_seqlens, eager_attention, make_qkv

FAMILIES = Path(__file__).parents[1] / "upstream" / "run_flash_families.py"


@pytest.fixture(autouse=True)
def on_the_gpu() -> Iterator[None]:
    torch.set_default_device("cuda")
    with torch.no_grad():
        yield
    torch.set_default_device(None)


@pytest.mark.parametrize("case", GRID[::5] + OTHERS, ids=repr)
@pytest.mark.parametrize("fa3", [False, True], ids=["fa2", "fa3"])
def test_cache(case: Case, fa3: bool) -> None:
    check(case, fa3, torch.float16, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 147), (113, 203), (128, 217), (512, 256), (1024, 1023)])
@pytest.mark.parametrize("words", [{}, {"causal": True}, {"window_size": (50, 20)}, {"softcap": 50.0}], ids=repr)
def test_dense_and_packed(dim: int, seqlen_q: int, seqlen_k: int, words: dict[str, object]) -> None:
    q, k, v = make_qkv(2, seqlen_q, seqlen_k, 6, 3, dim, dtype=torch.bfloat16, device="cuda")
    left, right = words.get("window_size", (-1, -1))
    options = {
        "softmax_scale": dim**-0.5,
        "window_size": (left, 0 if words.get("causal") else right),
        "softcap": words.get("softcap", 0.0),
    }
    exact, _ = attention_reference(q.double(), k.double(), v.double(), **options)
    eager = eager_attention(q, k, v, **options)
    assert_matches_reference(flash_attn_func(q, k, v, **words), exact, eager)
    ends = (cu_seqlens([seqlen_q] * 2, "cuda"), cu_seqlens([seqlen_k] * 2, "cuda"), seqlen_q, seqlen_k)
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    packed = flash_attn_varlen_func(*rows, *ends, **words).view(q.shape)
    assert_matches_reference(packed, exact, eager)
    used = torch.full((2,), seqlen_k, dtype=torch.int32)
    assert_matches_reference(interface.flash_attn_varlen_func(*rows, *ends, None, used, **words).view(q.shape), exact, eager)


@pytest.mark.parametrize("alibi", [False, True], ids=["plain", "alibi"])
@pytest.mark.parametrize("dim", [40, 64, 128, 264])
def test_gradients_that_repeat(dim: int, alibi: bool) -> None:
    """Of the portable kernels, and of PyTorch's operators, which compute them for ALiBi and for wide heads."""
    torch.use_deterministic_algorithms(False)
    q, k, v = (x.requires_grad_() for x in make_qkv(2, 513, 1023, 6, 6, dim, dtype=torch.bfloat16, device="cuda"))
    words = {"alibi_slopes": torch.rand(6)} if alibi else {}
    with torch.enable_grad():
        out = flash_attn_func(q, k, v, causal=True, deterministic=True, **words)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    for _ in range(20):
        again = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def decode_inputs() -> tuple[list[Tensor], dict[str, object], Tensor]:
    q = torch.randn(4, 1, 8, 64, dtype=torch.bfloat16)
    k_cache, v_cache = torch.randn(2, 4, 256, 2, 64, dtype=torch.bfloat16)
    k, v = torch.randn(2, 4, 1, 2, 64, dtype=torch.bfloat16)
    angle = torch.randn(300, 32)
    lengths = torch.tensor([3, 0, 100, 255], dtype=torch.int32)
    pads = torch.tensor([1, 0, 7, 0], dtype=torch.int32)
    words = {"rotary_cos": angle.cos(), "rotary_sin": angle.sin(), "cache_leftpad": pads, "causal": True}
    return [q, k_cache, v_cache, k, v], words, lengths


def test_a_captured_call_follows_its_lengths() -> None:
    tensors, words, lengths = decode_inputs()

    def call(cache_seqlens: Tensor) -> Tensor:
        return flash_attn_with_kvcache(*tensors, cache_seqlens=cache_seqlens, **words)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(lengths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(lengths)
    lengths += 0
    for step in (0, 1):
        lengths.copy_(torch.tensor([3, 0, 100, 254], dtype=torch.int32) + step)
        graph.replay()
        assert torch.equal(captured, call(lengths.clone()))


def test_the_host_does_not_wait() -> None:
    tensors, words, lengths = decode_inputs()
    flash_attn_with_kvcache(*tensors, cache_seqlens=lengths, **words)
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns that this mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        flash_attn_with_kvcache(*tensors, cache_seqlens=lengths, **words)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.timeout(400)
def test_families_of_transformers() -> None:
    names = "llama,qwen3,mistral,gemma2,gemma3,deepseek-v3,olmo3,starcoder2,bert,modernbert,vit,clip"
    ended = subprocess.run(
        [sys.executable, str(FAMILIES), "--families", names], capture_output=True, text=True, timeout=380, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
    assert "12 families agree" in ended.stdout
