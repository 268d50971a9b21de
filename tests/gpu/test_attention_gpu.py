"""The whole kernel matrix on the GPU: every backend that serves a case, in bfloat16, float16 and float32, all layouts."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from cases import (
    DENSE,
    PAGED,
    VARLEN,
    Case,
    check,
    check_without_keys,
    check_without_queries,
    decoding_head_dims,
    few_queries,
    odd_groups,
    params,
    split_prompts,
    verified_drafts,
)

import fa_serve
from fa_serve import dispatch
from fa_serve.backends import select_backend
from fa_serve.launching import launch
from fa_serve.launching.plans import PlanTable
from fa_serve.spec import AttentionSpec
from fa_serve.testing import cu_seqlens, make_qkv

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def _check(case: Case, backend: str, dtype: torch.dtype, layout: str) -> None:
    try:
        check(case, backend, dtype, "cuda", layout)
    except fa_serve.UnsupportedError as error:
        if backend != "hopper":  # `triton` serves the whole matrix; hopper says which part is its own
            raise
        pytest.skip(str(error).splitlines()[-1].strip())


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", params(DENSE))
def test_dense(case: Case, dtype: torch.dtype, backend: str) -> None:
    _check(case, backend, dtype, "dense")


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", params(VARLEN))
def test_varlen(case: Case, dtype: torch.dtype, backend: str) -> None:
    _check(case, backend, dtype, "varlen")


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", params(PAGED))
def test_paged(case: Case, dtype: torch.dtype, backend: str) -> None:
    _check(case, backend, dtype, "paged")


@pytest.mark.parametrize("case", params([*decoding_head_dims(), *few_queries(), *odd_groups()]))
def test_sizes_of_paged_calls(case: Case) -> None:
    _check(case, "auto", torch.bfloat16, "paged")


@pytest.mark.parametrize("layout", ["dense", "paged"])
@pytest.mark.parametrize("case", params(split_prompts()))
def test_keys_of_prompts_are_split(case: Case, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    if layout == "dense" and len(set(case.lengths_k)) > 1:
        pytest.skip("a dense batch has one length")
    ops: list[str] = []

    def select(spec: AttentionSpec, backend: str) -> Any:
        ops.append(spec.op)
        return select_backend(spec, backend)

    monkeypatch.setattr(dispatch, "select_backend", select)
    monkeypatch.setattr(dispatch, "plan_mixed", None)
    monkeypatch.setattr(dispatch, "PLANS", PlanTable())
    check(case, "auto", torch.bfloat16, "cuda", layout)
    assert ops[-1] == "decode"
    assert layout == "paged" or set(ops) == {"decode"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", params(verified_drafts()))
def test_heads_share_tiles_where_drafts_are_verified(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    served: list[str] = []

    def select(spec: AttentionSpec, backend: str) -> Any:
        chosen = select_backend(spec, backend)
        served.append(chosen.name)
        return chosen

    monkeypatch.setattr(dispatch, "select_backend", select)
    monkeypatch.setattr(dispatch, "PLANS", PlanTable())
    check(case, "auto", dtype, "cuda", "paged")
    assert set(served) == {"hopper"}


@pytest.mark.parametrize("causal", [False, True])
def test_auto_equals_torch_at_length(causal: bool) -> None:
    """8192 keys: many tiles, every stage of the pipeline reused."""
    q, k, v = make_qkv(1, 8192, 8192, 4, 2, 128, dtype=torch.bfloat16, device="cuda")
    out = fa_serve.attention(q, k, v, causal=causal)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2).float() for x in (q, k, v)), is_causal=causal, enable_gqa=True
    ).transpose(1, 2)
    assert (out.float() - theirs).abs().max() <= 2 * 2**-8 * theirs.abs().max()


def test_more_than_two_to_the_31_elements() -> None:
    """int64 addressing: the last sequence of a batch of 2^31 + elements is right."""
    q = torch.randn(70, 8192, 32, 128, device="cuda", dtype=torch.float16)
    assert q.numel() > 2**31
    k = torch.randn(70, 64, 2, 128, device="cuda", dtype=torch.float16)
    out = fa_serve.attention(q, k, k, backend="triton")
    expected = fa_serve.attention(q[-1:].clone(), k[-1:].clone(), k[-1:].clone(), backend="triton")
    torch.testing.assert_close(out[-1:], expected, rtol=0, atol=0)


def test_no_host_synchronisation(no_synchronisation: Callable[[], AbstractContextManager[None]]) -> None:
    q, k, v = make_qkv(2, 100, 100, 4, 2, 64, dtype=torch.float16, device="cuda")
    cu = torch.tensor([0, 100, 200], dtype=torch.int32, device="cuda")
    table = torch.arange(16, dtype=torch.int32, device="cuda").view(2, 8)
    used = torch.tensor([100, 100], dtype=torch.int32, device="cuda")
    cache = torch.zeros(16, 16, 2, 64, dtype=torch.float16, device="cuda")
    slots = torch.arange(200, device="cuda")
    flat = [x.flatten(0, 1) for x in (q, k, v)]

    def everything() -> None:
        fa_serve.attention(q, k, v, causal=True)
        fa_serve.attention_varlen(*flat, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=100, max_seqlen_k=100)
        fa_serve.store_kv(flat[1], flat[2], cache, cache.clone(), slots)
        fa_serve.attention_paged(flat[0], cache, cache, block_table=table, seqused_k=used, cu_seqlens_q=cu, max_seqlen_q=100)

    everything()
    with no_synchronisation():
        everything()


@pytest.mark.parametrize("backend", ["auto", "triton", "sdpa"])
def test_without_keys_or_queries(backend: str) -> None:
    check_without_keys(backend, torch.bfloat16, "cuda")
    check_without_queries(backend, torch.bfloat16, "cuda")


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_calls_in_a_compiled_graph(compiler: str, dynamic: bool) -> None:
    """Each public function is one operator, and the graph computes what the eager calls compute."""

    def step(
        q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cu: torch.Tensor, slots: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        dense = fa_serve.attention(q[None], q[None], q[None], causal=True)[0]
        packed = fa_serve.attention_varlen(
            q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=q.shape[0], max_seqlen_k=q.shape[0], causal=True
        )
        fa_serve.store_kv(q, q, keys, values, slots)
        paged = fa_serve.attention_paged(
            q, keys, values, block_table=table, seqused_k=cu[1:], cu_seqlens_q=cu, max_seqlen_q=q.shape[0]
        )
        return dense + packed + paged

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend=compiler, dynamic=dynamic)
    for length in (48, 80):
        q = torch.randn(length, 4, 64, device="cuda", dtype=torch.bfloat16)
        cache = torch.zeros(8, 16, 4, 64, device="cuda", dtype=torch.bfloat16)
        cu = torch.tensor([0, length], dtype=torch.int32, device="cuda")
        slots = torch.arange(length, device="cuda")
        table = torch.arange(8, dtype=torch.int32, device="cuda")[None]
        expected = step(q, cache.clone(), cache.clone(), cu, slots, table)
        actual = compiled(q, cache.clone(), cache.clone(), cu, slots, table)
        torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.02)


def test_decoding_is_given_shared_memory() -> None:
    """Without it the driver may leave room for two programs of the decoding kernel on a multiprocessor instead of three."""
    q = torch.randn(4, 16, 128, device="cuda", dtype=torch.bfloat16)
    cache = torch.randn(256, 16, 8, 128, device="cuda", dtype=torch.bfloat16)
    table = torch.arange(256, device="cuda", dtype=torch.int32).view(4, 64)
    lengths = torch.full((4,), 1024, device="cuda", dtype=torch.int32)
    ends = {"cu_seqlens_q": cu_seqlens([1] * 4, "cuda"), "max_seqlen_q": 1, "max_seqlen_k": 1024}
    fa_serve.attention_paged(q, cache, cache, block_table=table, seqused_k=lengths, backend="triton", **ends)
    kernels = [compiled for compiled, _ in launch._COMPILED.values() if compiled.name == "attn_decode"]
    assert kernels
    share = ctypes.c_int()
    for kernel in kernels:
        assert ctypes.CDLL("libcuda.so.1").cuFuncGetAttribute(ctypes.byref(share), 9, ctypes.c_void_p(kernel.function)) == 0
        assert share.value == 100
