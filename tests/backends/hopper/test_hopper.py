"""`backends.hopper`: which specs the backend supports, its reasons for refusing others, and its plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
from hopper_backward_cases import GradientCall, GradientCase
from hopper_cases import Case
from hopper_emulator import emulated

from fa_serve.backends import hopper
from fa_serve.backends.calls import AttentionTensors
from fa_serve.backends.hopper import HopperBackend
from fa_serve.spec import AttentionSpec, Precision
from fa_serve.testing import make_qkv

H200 = AttentionSpec("varlen", "cuda", 90, torch.bfloat16, torch.bfloat16, 128, 128, 32, 8, window_size=(-1, 0))


@pytest.mark.parametrize("dims", [*[(d, d) for d in range(8, 257, 8)], (192, 128), (64, 256), (256, 8)])
@pytest.mark.parametrize("layout", ["dense", "varlen", "paged"])
def test_supports(dims: tuple[int, int], layout: str) -> None:
    spec = replace(
        H200,
        layout=layout,
        page_size=48 if layout == "paged" else 0,
        head_dim=dims[0],
        head_dim_v=dims[1],
        softcap=True,
        sinks=True,
        window_size=(100, 20),
    )
    assert HopperBackend().supports(spec) is None
    assert HopperBackend().supports(replace(spec, dtype=torch.float16, kv_dtype=torch.float16)) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": "cpu", "arch": 0}, "got cpu"),
        ({"arch": 100}, "got compute capability 10.0"),
        ({"dtype": torch.float32, "kv_dtype": torch.float32}, "got float32"),
        ({"op": "decode"}, "of a paged cache"),
        (
            {"layout": "paged", "page_size": 16, "op": "decode"},
            "chooses the splits itself; the portable kernel serves one query and a given num_splits",
        ),
        (
            {"layout": "paged", "page_size": 16, "op": "decode", "sizes": (1, 8, 2048)},
            "got heads of 128, 1 sequence of up to 8 queries",
        ),
        (
            {"layout": "paged", "page_size": 16, "op": "decode", "sizes": (64, 1, 99)},
            "got heads of 128, 64 sequences of up to 1 queries and 99 keys",
        ),
        ({"layout": "paged", "page_size": 16, "op": "store_kv"}, "got op 'store_kv'"),
        ({"layout": "paged", "page_size": 16, "kv_dtype": torch.float8_e4m3fn}, "got float8_e4m3fn"),
        ({"layout": "paged", "page_size": 8}, "got 8"),
        ({"layout": "paged", "page_size": 16, "whole_rows": False}, "page stride is a multiple of the token stride"),
        ({"head_dim": 84, "head_dim_v": 84}, "got 84"),
        ({"head_dim": 128, "head_dim_v": 60}, "got 128/60"),
        ({"head_dim": 264, "head_dim_v": 128}, "got 264/128"),
        (
            {"mask": "bool", "layout": "dense", "sizes": (1, 512, 100)},
            "masks of at least 256 queries and keys, got 512 and 100",
        ),
        ({"mask": "bool", "layout": "dense", "sizes": (1, 512, 512), "precision": "qk8"}, "without an explicit mask"),
        ({"alibi": True}, "does not support alibi, which the call uses"),
        ({"block_mask": True, "needs_grad": True}, "no backward pass for block_mask"),
        ({"attention_chunk": True}, "does not support attention_chunk"),
        ({"layout": "paged", "page_size": 16, "needs_grad": True}, "gradients"),
        ({"precision": "qk8", "block_mask": True}, "without a block_mask"),
        ({"precision": "fp8", "layout": "paged", "page_size": 16, "kv_dtype": torch.float16}, "got float16"),
        ({"precision": "fp8", "layout": "paged", "page_size": 16, "needs_grad": True}, "gradients"),
        ({"precision": "fp8", "needs_grad": True}, "no backward pass with precision 'fp8'"),
        (
            {"precision": "fp8", "head_dim": 256, "head_dim_v": 256},
            "supports head sizes 64 and 128 with precision 'fp8', got 256",
        ),
        (
            {"precision": "qk8", "head_dim": 96, "head_dim_v": 96},
            "supports head sizes 64, 128 and 256 with precision 'qk8', got 96",
        ),
        ({"precision": "qk8", "head_dim": 128, "head_dim_v": 64}, "got 128/64"),
    ],
)
def test_gives_a_reason_for_what_it_does_not_support(change: dict, words: str) -> None:
    reason = HopperBackend().supports(replace(H200, **change))
    assert reason is not None
    assert words in reason


def test_serves_few_queries_of_many_sequences() -> None:
    spec = replace(H200, layout="paged", page_size=16, op="decode", sizes=(16, 16, 2048))
    assert HopperBackend().supports(spec) is None
    assert "got float8" in str(HopperBackend().supports(replace(spec, kv_dtype=torch.float8_e4m3fn)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"sizes": (1, 512, 900)}, None),
        ({"sizes": (1, 128, 9000)}, "got 1 sequence of up to 128 queries and 9000 keys"),
        ({"sizes": (300, 16, 900)}, "got 300 sequences of up to 16 queries"),
        ({"sizes": None}, "for prompts"),
        ({"head_dim": 192}, "without softcap, got 192"),
        ({"softcap": True}, "got softcap"),
        ({"block_mask": True}, "without a block_mask"),
        ({"attention_chunk": True}, "does not support attention_chunk"),
    ],
)
def test_follows_the_tree_for_prompts(change: dict, words: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(H200, **{"layout": "paged", "page_size": 16, "op": "tree", "sinks": True, "sizes": (8, 512, 4096)} | change)
    monkeypatch.setattr(hopper, "FOLLOWS_TREE", True)
    reason = HopperBackend().supports(spec)
    assert reason is None if words is None else words in str(reason)
    monkeypatch.setattr(hopper, "FOLLOWS_TREE", False)
    assert "got op 'tree'" in str(HopperBackend().supports(spec))


@pytest.mark.parametrize(("precision", "dim"), [("qk8", 64), ("qk8", 128), ("qk8", 256), ("fp8", 64), ("fp8", 128)])
def test_serves_float8_products(precision: Precision, dim: int) -> None:
    spec = replace(H200, head_dim=dim, head_dim_v=dim, precision=precision, softcap=True, sinks=True)
    for layout in ("dense", "varlen"):
        assert HopperBackend().supports(replace(spec, layout=layout)) is None
    for page_size in (1, 16, 24):
        paged = replace(spec, layout="paged", page_size=page_size, whole_rows=False)
        assert HopperBackend().supports(paged) is None
        assert HopperBackend().supports(replace(paged, kv_dtype=torch.float8_e4m3fn)) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"layout": "dense", "softcap": True, "sinks": True, "window_size": (100, 20), "head_dim": 40, "head_dim_v": 24}, None),
        ({"head_dim": 136}, None),
        ({"head_dim": 192, "head_dim_v": 128, "softcap": True, "sinks": True}, None),
        ({"head_dim": 64, "head_dim_v": 192}, None),
        ({"head_dim_v": 84}, "got 128/84"),
        ({"dtype": torch.float32}, "got float32"),
        ({"mask": "float"}, "explicit mask"),
        ({"alibi": True}, "does not support alibi, which the call uses"),
        ({"deterministic": True}, "deterministic gradients"),
    ],
)
def test_gradients(change: dict, words: str | None) -> None:
    reason = HopperBackend().supports(replace(H200, op="backward", **change))
    assert reason is None if words is None else words in str(reason)


def test_gradients_of_256_columns_are_left_to_others_with_triton_3_9() -> None:
    reason = HopperBackend().supports(replace(H200, op="backward", head_dim=256, head_dim_v=256))
    if triton.__version__.startswith("3.9."):
        assert "gradients for head sizes up to 192, got 256" in str(reason)
    else:
        assert reason is None


def test_the_forward_pass_of_gradients_that_repeat() -> None:
    assert HopperBackend().supports(replace(H200, deterministic=True, needs_grad=True)) is None


def test_serves_lists_of_blocks() -> None:
    assert HopperBackend().supports(replace(H200, block_mask=True)) is None


def test_refuses_another_release_of_gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.10.0")
    assert "3.10.0" in str(HopperBackend().supports(H200))


@pytest.mark.parametrize("release", ["3.6.0", "3.7.1", "3.8.0", "3.9.0"])
def test_knows_the_releases_of_gluon(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", release)
    assert HopperBackend().supports(H200) is None


def test_refuses_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert "TRITON_INTERPRET" in str(HopperBackend().supports(H200))


def test_plan_of_gradients() -> None:
    call = GradientCall(GradientCase(""))
    spec = replace(H200, op="backward", layout="dense", head_dim=64, head_dim_v=64, num_heads=2, num_kv_heads=1)
    with emulated():
        found = HopperBackend().plan(spec, call.tensors, call.case.options)(call.tensors)
    call.check(found, 0)


def test_plan() -> None:
    case = Case("")
    tensors = AttentionTensors(*make_qkv(1, 200, 200, 2, 1, 64, dtype=torch.bfloat16))
    spec = replace(H200, layout="dense", head_dim=64, head_dim_v=64, num_heads=2, num_kv_heads=1)
    with emulated():
        out, lse = HopperBackend().plan(spec, tensors, case.options(200, 200))(tensors)
    case.check(out, lse, *tensors[:3])
