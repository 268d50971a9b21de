"""`backends.chunks`: which prompts have their keys split, and that the public functions then plan decoding."""

from __future__ import annotations

from dataclasses import replace
from functools import partialmethod
from typing import Any

import pytest
import torch

import fa_serve
from fa_serve import dispatch
from fa_serve.backends.chunks import decodes_chunks
from fa_serve.backends.reference import ReferenceBackend
from fa_serve.backends.sdpa import SdpaBackend
from fa_serve.launching.plans import PlanTable
from fa_serve.spec import AttentionSpec
from fa_serve.testing import make_qkv

H200 = AttentionSpec("paged", "cuda", 90, torch.bfloat16, torch.bfloat16, 128, 128, 16, 8, window_size=(-1, 0), page_size=16)


@pytest.mark.parametrize(
    ("batch", "heads", "seqlen_q", "seqlen_k", "expected"),
    [
        (1, 16, 256, 4096, True),
        (1, 16, 512, 8192, False),
        (1, 16, 128, 32768, True),
        (1, 32, 256, 4096, False),
        (1, 32, 128, 32768, True),
        (1, 32, 512, 8192, False),
        (2, 16, 512, 8192, False),
        (1, 16, 1024, 8192, False),
        (1, 16, 64, 1000, False),
        (1, 4, 1024, 1024, False),
    ],
)
def test_few_tiles_behind_many_keys(batch: int, heads: int, seqlen_q: int, seqlen_k: int, expected: bool) -> None:
    assert decodes_chunks(replace(H200, num_heads=heads), batch, seqlen_q, seqlen_k, 132) == expected


def test_only_what_has_tiles_of_64_rows() -> None:
    for change in (
        {"arch": 80},
        {"arch": 100},
        {"dtype": torch.float32},
        {"head_dim": 256},
        {"head_dim_v": 192},
        {"needs_grad": True},
        {"attention_chunk": True},
    ):
        changed: dict[str, Any] = change
        assert not decodes_chunks(replace(H200, **changed), 1, 256, 4096, 132)
    assert not decodes_chunks(H200, 1, 256, 4096, 0), "not on a CPU"
    assert not decodes_chunks(H200, 2, 0, 4096, 132), "not without queries"
    assert not decodes_chunks(H200, 0, 256, 4096, 132), "not without sequences"


def test_narrow_heads_fill_more_of_the_gpu_before_the_prompt_kernel_is_faster() -> None:
    heads = replace(H200, num_heads=64)
    assert decodes_chunks(replace(heads, head_dim=64, head_dim_v=64), 1, 128, 32768, 132)
    assert not decodes_chunks(heads, 1, 128, 32768, 132)


def test_a_prompt_kernel_that_splits_keys_takes_many_keys_of_wide_heads() -> None:
    assert not decodes_chunks(H200, 1, 256, 4096, 132, splits_keys=True)
    assert not decodes_chunks(H200, 1, 128, 32768, 132, splits_keys=True)
    assert not decodes_chunks(H200, 1, 256, 2048, 132, splits_keys=True)
    assert decodes_chunks(H200, 1, 256, 2047, 132, splits_keys=True)
    assert decodes_chunks(H200, 1, 64, 4096, 132, splits_keys=True), "its tiles would be half empty"
    narrow = replace(H200, num_heads=64, head_dim=64, head_dim_v=64)
    assert decodes_chunks(narrow, 1, 128, 32768, 132, splits_keys=True)


def test_keys_outside_of_a_window_do_not_count() -> None:
    assert not decodes_chunks(replace(H200, window_size=(511, 0)), 1, 256, 32768, 132)
    assert decodes_chunks(replace(H200, window_size=(4095, 0)), 1, 256, 32768, 132)


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops that were planned, on a machine where every call has its keys split."""
    names: list[str] = []

    def note(backend: Any, spec: AttentionSpec, *given: Any, plan: Any) -> Any:
        names.append(spec.op)
        return plan(backend, spec, *given)

    for each in (SdpaBackend, ReferenceBackend):
        monkeypatch.setattr(each, "plan", partialmethod(note, plan=each.plan))
    monkeypatch.setattr(dispatch, "decodes_chunks", lambda *_, **__: True)
    monkeypatch.setattr(dispatch, "PLANS", PlanTable())
    return names


def test_dense_prompts(ops: list[str]) -> None:
    q, k, v = make_qkv(1, 40, 90, 4, 2, 32)
    out = fa_serve.attention(q, k, v, causal=True)
    torch.testing.assert_close(out, fa_serve.attention(q, k, v, causal=True, backend="reference"))
    assert ops == ["decode", "attention"], "a backend that is named gets the call as it is"
    fa_serve.attention(q, k, v, mask=torch.ones(1, 1, 40, 90, dtype=torch.bool))
    assert ops[-1] == "attention", "decoding takes no mask over queries"


@pytest.mark.parametrize(("lengths", "expected"), [([20, 20], ["decode"]), ([20, 30], ["attention"])])
def test_paged_prompts_of_equal_length(ops: list[str], lengths: list[int], expected: list[str]) -> None:
    q = torch.randn(sum(lengths), 4, 32)
    cache = torch.randn(8, 16, 2, 32)
    fa_serve.attention_paged(
        q,
        cache,
        cache,
        block_table=torch.arange(8, dtype=torch.int32).view(2, 4),
        seqused_k=torch.tensor([50, 60], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32),
        max_seqlen_q=max(lengths),
        causal=True,
    )
    assert ops == expected
