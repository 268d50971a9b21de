"""`backends.triton`: which specs with float8 products the backend supports, and its reasons for refusing others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fa_serve.backends import explain
from fa_serve.backends.triton import TritonBackend
from fa_serve.spec import AttentionSpec, Precision

FLOAT8 = torch.float8_e4m3fn
ADA = AttentionSpec("varlen", "cuda", 89, torch.bfloat16, torch.bfloat16, 128, 128, 32, 8, window_size=(-1, 0), precision="fp8")


@pytest.mark.parametrize(("precision", "dim"), [("qk8", 64), ("qk8", 128), ("qk8", 256), ("fp8", 64), ("fp8", 128)])
@pytest.mark.parametrize("arch", [89, 90, 100, 103, 120])
def test_serves_float8_products(arch: int, precision: Precision, dim: int) -> None:
    spec = replace(ADA, arch=arch, head_dim=dim, head_dim_v=dim, precision=precision, softcap=True, sinks=True, alibi=True)
    for layout in ("dense", "varlen"):
        assert TritonBackend().supports(replace(spec, layout=layout)) is None
    for page_size in (1, 16, 24):
        paged = replace(
            spec, layout="paged", page_size=page_size, whole_rows=False, dtype=torch.float16, kv_dtype=torch.float16
        )
        assert TritonBackend().supports(paged) is None
        assert TritonBackend().supports(replace(paged, kv_dtype=FLOAT8)) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"arch": 86}, "on compute capability 8.9 or newer, got 8.6"),
        ({"arch": 0}, "on compute capability 8.9 or newer, got a ROCm device"),
        ({"dtype": torch.float32, "kv_dtype": torch.float32}, "for float16 and bfloat16, got float32"),
        ({"mask": "bool", "layout": "dense"}, "only without an explicit mask, got a bool mask"),
        ({"attention_chunk": True}, "only without an attention_chunk"),
        ({"block_mask": True}, "only without a block_mask"),
        ({"layout": "paged", "page_size": 16, "needs_grad": True}, "gradients"),
        ({"needs_grad": True}, "no backward pass with precision 'fp8'"),
        ({"head_dim": 256, "head_dim_v": 256}, "supports head sizes 64 and 128 with precision 'fp8', got 256"),
        (
            {"precision": "qk8", "head_dim": 96, "head_dim_v": 96},
            "supports head sizes 64, 128 and 256 with precision 'qk8', got 96",
        ),
        ({"head_dim_v": 64}, "got 128/64"),
    ],
)
def test_gives_a_reason_for_float8_products_that_it_does_not_have(change: dict, words: str) -> None:
    reason = TritonBackend().supports(replace(ADA, **change))
    assert reason is not None
    assert words in reason


def test_hopper_comes_first_where_both_have_float8_products() -> None:
    assert [name for name, reason in explain(replace(ADA, arch=90)).items() if reason is None] == ["hopper", "triton"]
    assert [name for name, reason in explain(ADA).items() if reason is None] == ["triton"]
