"""Decode and the cache write compile for every target, from the launchers' own arguments, within the budgets stated here."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
from cross_compile import SHARED_BYTES, TARGETS, Kernel, compiling_for, with_targets
from sampled_cases import each_nth

import fa_serve
from fa_serve.backends.calls import StoreTensors
from fa_serve.backends.triton import TritonBackend
from fa_serve.backends.triton.decode import plan as decode
from fa_serve.backends.triton.decode.plan import plan_decode
from fa_serve.backends.triton.store_kv import plan_store_kv
from fa_serve.backends.triton.tiles import decode_tiles
from fa_serve.launching.plans import PlanTable
from fa_serve.testing import run_plan

SPILL_BUDGET = 32  # bytes per thread, none of them in the inner loop: 24 on sm120, else none
SHARED_BUDGET = SHARED_BYTES | {"sm90": 113 << 10, "sm100": 113 << 10}  # two programs fit on an SM there
FP8_TARGETS = ("sm90", "sm89", "sm100", "sm120", "gfx942")


@dataclass(frozen=True)
class Shape:
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    head_dim_v: int = 128
    dtype: torch.dtype = torch.bfloat16
    fp8: bool = False
    max_seqlen_q: int = 1
    page_size: int = 16
    every_option: bool = False
    num_splits: int = 0

    def __str__(self) -> str:
        name = (
            f"HQ{self.heads[0]}-HKV{self.heads[1]}-D{self.head_dim}-DV{self.head_dim_v}-Q{self.max_seqlen_q}-P{self.page_size}"
        )
        return name + ("-fp8" if self.fp8 else f"-{str(self.dtype)[6:]}") + ("-every-option" if self.every_option else "")


SHAPES = [
    Shape(),
    Shape(heads=(64, 8), head_dim=64, head_dim_v=64, max_seqlen_q=4, dtype=torch.float16, every_option=True),
    Shape(heads=(8, 2), head_dim=512, head_dim_v=512),
    Shape(heads=(16, 2), head_dim=512, head_dim_v=512, max_seqlen_q=16, every_option=True),
    Shape(heads=(8, 4), head_dim=512, head_dim_v=512, num_splits=40),
    Shape(heads=(8, 4), head_dim=512, head_dim_v=512, dtype=torch.float32),
]
ON_HOPPER = [
    Shape(heads=(32, 32), head_dim=64, head_dim_v=64),
    Shape(heads=(16, 8), head_dim=256, head_dim_v=256),
    Shape(heads=(128, 128), head_dim=192, head_dim_v=128, page_size=64),
    Shape(max_seqlen_q=16, page_size=33),
    Shape(max_seqlen_q=16, head_dim=256, head_dim_v=256),
    Shape(dtype=torch.float32),
    Shape(num_splits=4, every_option=True),
]


@pytest.fixture(autouse=True)
def many_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "multiprocessors", lambda device, otherwise: 132)


def compile_decode(target: str, shape: Shape) -> list[Kernel]:
    batch = 3
    num_heads, num_kv_heads = shape.heads
    cache_dtype = torch.float8_e4m3fn if shape.fp8 else shape.dtype
    k_cache, v_cache = (
        torch.zeros(4, shape.page_size, num_kv_heads, dim, dtype=cache_dtype) for dim in (shape.head_dim, shape.head_dim_v)
    )
    descale = torch.ones(num_kv_heads) if shape.fp8 else None
    with compiling_for(target) as kernels:
        run_plan(
            plan_decode,
            torch.zeros(batch * shape.max_seqlen_q, num_heads, shape.head_dim, dtype=shape.dtype),
            k_cache,
            v_cache,
            block_table=torch.zeros(batch, 64, dtype=torch.int32),
            seqused_k=torch.zeros(batch, dtype=torch.int32),
            cu_seqlens_q=torch.zeros(batch + 1, dtype=torch.int32),
            max_seqlen_q=shape.max_seqlen_q,
            max_seqlen_k=1024,
            softmax_scale=0.1,
            window_size=(256, 0) if shape.every_option else (-1, 0),
            softcap=30.0 * shape.every_option,
            sinks=torch.zeros(num_heads, dtype=shape.dtype) if shape.every_option else None,
            k_descale=descale,
            v_descale=descale,
            num_splits=shape.num_splits,
            out=None,
            return_lse=shape.every_option,
        )
    return kernels


def compile_store(target: str, fp8: bool) -> list[Kernel]:
    cache = torch.zeros(4, 16, 8, 128, dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16)
    x = torch.zeros(5, 8, 128, dtype=torch.bfloat16)
    descale = torch.ones(8) if fp8 else None
    with compiling_for(target) as kernels:
        tensors = StoreTensors(x, x, cache, cache, torch.zeros(5, dtype=torch.int64), descale, descale)
        plan_store_kv(tensors)(tensors)
    return kernels


def assert_within_budgets(kernels: list[Kernel], names: list[str]) -> None:
    assert [kernel.name for kernel in kernels] == names
    for kernel in kernels:
        assert kernel.spill_bytes <= SPILL_BUDGET, f"{kernel.name} spills {kernel.spill_bytes} bytes per thread"
        if kernel.spill_bytes:
            assert kernel.hot_loop["LDL"] == kernel.hot_loop["STL"] == 0, f"{kernel.name} spills in its inner loop"
        assert kernel.shared_bytes <= SHARED_BUDGET[kernel.target], f"{kernel.name} wants {kernel.shared_bytes} bytes"


@pytest.mark.parametrize(("shape", "target"), with_targets(SHAPES, [SHAPES[0], SHAPES[3]]), ids=str)
def test_decode(shape: Shape, target: str) -> None:
    assert_within_budgets(compile_decode(target, shape), ["attn_decode", "_combine"])


@pytest.mark.parametrize("shape", each_nth(2, ON_HOPPER), ids=str)
def test_decode_on_hopper(shape: Shape) -> None:
    assert_within_budgets(compile_decode("sm90", shape), ["attn_decode", "_combine"])


@pytest.mark.parametrize("target", each_nth(4, FP8_TARGETS))
def test_decode_fp8(target: str) -> None:
    assert_within_budgets(compile_decode(target, Shape(fp8=True)), ["attn_decode", "_combine"])
    assert_within_budgets(compile_store(target, fp8=True), ["_store_kv"])


@pytest.mark.parametrize("target", each_nth(3, list(TARGETS)))
def test_store_kv(target: str) -> None:
    assert_within_budgets(compile_store(target, fp8=False), ["_store_kv"])


def test_hopper_keeps_a_block_in_flight_and_waits_programmatically() -> None:
    """Loads are 16-byte asynchronous copies: 128 threads issue 16 each for a block; one ahead of the loop and one in it.

    With keys as rows, 16 by 8 tiles of the tensor cores are filled by 8 query rows: 64 of them for a block, 16 per warp.
    """
    kernel, combine = compile_decode("sm90", Shape())[:2]
    block_bytes = 64 * (128 + 128) * 2
    assert kernel.shared_bytes >= block_bytes
    assert kernel.instructions["LDGSTS"] == 2 * block_bytes // (128 * 16)
    assert kernel.hot_loop["HMMA"] == 16
    assert kernel.hot_loop["LDL"] == kernel.hot_loop["STL"] == 0
    assert kernel.programmatic == ["wait", "launch_dependents"], "_combine reads lengths before it waits"
    assert combine.programmatic == ["launch_dependents", "wait"]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_verify_steps_have_queries_as_rows(head_dim: int) -> None:
    """A row's maximum and sum are exchanged within four threads, two values each, so no barrier separates the two products."""
    kernel = compile_decode("sm90", Shape(max_seqlen_q=8, head_dim=head_dim, head_dim_v=head_dim))[0]
    assert kernel.hot_loop["HGMMA"] == 12
    assert kernel.hot_loop["SHFL"] == 8
    assert kernel.hot_loop["BAR"] <= 3
    assert kernel.hot_loop["LDL"] == kernel.hot_loop["STL"] == 0
    assert 2 * (kernel.shared_bytes + 1024) <= 228 << 10
    assert 2 * 128 * kernel.registers <= 65536


@pytest.mark.parametrize("fp8", [False, True], ids=["bfloat16", "fp8"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_as_many_programs_live_on_an_sm_as_are_counted_on(head_dim: int, fp8: bool) -> None:
    """A wave of `splits` is what runs at once, or the last of them run alone."""
    kernel = compile_decode("sm90", Shape(heads=(64, 8), head_dim=head_dim, head_dim_v=head_dim, fp8=fp8))[0]
    programs, threads = {128: (3, 128), 64: (6, 64) if fp8 else (4, 128)}[head_dim]
    tiles = decode_tiles(90, 132, 2, 1 if fp8 else 2, head_dim, head_dim, 64, 8, 32, 1, 4096, 0)
    assert (tiles.splits, 32 * tiles.num_warps) == (programs * 132 // 8, threads)
    assert programs * (kernel.shared_bytes + 1024) <= 228 << 10
    assert programs * threads * kernel.registers <= 65536


def test_float8_is_copied_by_16_bytes_and_widened_to_float16() -> None:
    kernel = compile_decode("sm90", Shape(fp8=True))[0]
    assert kernel.instructions["LDGSTS"] == len(re.findall(r"LDGSTS\.E\.BYPASS\.128", kernel.sass))
    assert "LDS.U8" not in kernel.sass
    assert "F2FP.F16.E4M3.UNPACK_B" in kernel.sass
    assert 2 * (kernel.shared_bytes + 1024) <= 228 << 10


def test_older_gpus_do_without_programmatic_launch() -> None:
    assert "griddepcontrol" not in compile_decode("sm89", Shape())[0].binary.asm["ptx"]


def test_a_changing_batch_compiles_nothing_new() -> None:
    """`launch` looks at strides and constexprs; what it takes for varying must not be specialised by the JIT."""
    signatures = set()
    attributes = set()
    for batch, max_k in ((1, 1024), (2, 1024), (16, 4096)):
        cache = torch.zeros(4, 16, 8, 128, dtype=torch.bfloat16)
        with compiling_for("sm90") as kernels:
            run_plan(
                plan_decode,
                torch.zeros(batch, 32, 128, dtype=torch.bfloat16),
                cache,
                cache,
                block_table=torch.zeros(batch, max_k // 16, dtype=torch.int32),
                seqused_k=torch.zeros(batch, dtype=torch.int32),
                cu_seqlens_q=torch.zeros(batch + 1, dtype=torch.int32),
                max_seqlen_q=1,
                max_seqlen_k=max_k,
                softmax_scale=1,
                window_size=(-1, 0),
                softcap=0.0,
                sinks=None,
                k_descale=None,
                v_descale=None,
                num_splits=3,
                out=None,
                return_lse=True,
            )
        signatures.add(tuple(str(kernel.binary.src.signature) for kernel in kernels))
        attributes.add(tuple(str(kernel.binary.src.attrs) for kernel in kernels))
    assert len(signatures) == len(attributes) == 1


def test_mixed_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonBackend, "supports", lambda self, spec: None)  # which refuses the CPU tensors
    monkeypatch.setattr("fa_serve.dispatch.PLANS", PlanTable())
    cache = torch.zeros(4, 16, 8, 128, dtype=torch.bfloat16)
    with compiling_for("sm90") as kernels:
        fa_serve.attention_paged(
            torch.zeros(300, 32, 128, dtype=torch.bfloat16),
            cache,
            cache,
            block_table=torch.zeros(3, 64, dtype=torch.int32),
            seqused_k=torch.zeros(3, dtype=torch.int32),
            cu_seqlens_q=torch.zeros(4, dtype=torch.int32),
            max_seqlen_q=298,
            max_seqlen_k=1024,
            softmax_scale=0.1,
            return_lse=True,
            backend="triton",
        )
    assert [kernel.name for kernel in kernels] == ["attn_fwd", "attn_decode", "_combine"]
    assert_within_budgets(kernels[1:], ["attn_decode", "_combine"])
    assert kernels[0].spill_bytes == 0
    assert kernels[0].instructions["HGMMA"] > 0
