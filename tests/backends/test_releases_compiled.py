"""A few kernels with the release of Triton that is installed: `make test-triton` runs this file with each release.

The full matrix of variants and targets is compiled with one release, by the other files of this folder and of tests/ops. With
that release, a sample leaves out here what they compile.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import triton
from cross_compile import compiling_for
from product_cases import dense
from products_by_kernel import multiply_by, product_of_experts
from quantized import float8_weight, int4_weight
from sampled_cases import ALL

from fa_serve.backends.calls import AttentionOptions, AttentionTensors, BackwardTensors
from fa_serve.backends.hopper import HopperBackend
from fa_serve.backends.hopper.backward.plan import plan_hopper_backward
from fa_serve.backends.hopper.backward.tiles import MAX_HEAD_DIM_OF_GRADIENTS
from fa_serve.backends.hopper.forward.plan import plan_hopper_forward
from fa_serve.backends.hopper.latent.plan import plan_latent_decode
from fa_serve.backends.triton.block_sparse.plan import plan_block_sparse
from fa_serve.backends.triton.decode import plan as decode
from fa_serve.backends.triton.prefill.plan import plan_forward as plan_portable
from fa_serve.block_lists import BlockLists
from fa_serve.launching import launch
from fa_serve.ops.moe.matrix_wgmma import plan_matrix_tiles
from fa_serve.ops.moe.tiles import GroupedWgmmaTile, matrix_tile
from fa_serve.ops.moe.unpack_wgmma import plan_tiles
from fa_serve.ops.ops_backend import Gate, RoundedRows
from fa_serve.ops.products.quantised.pairs import product_tensors
from fa_serve.ops.products.quantised.tiles import wgmma_tile
from fa_serve.spec import AttentionSpec, Precision
from fa_serve.testing import cu_seqlens, make_qkv, run_plan

OPTIONS = {"softmax_scale": 0.1, "window_size": (-1, 0), "softcap": 0.0, "sinks": None, "out": None, "return_lse": True}

PINNED = triton.__version__.startswith("3.6.")
compiled_elsewhere = pytest.mark.skipif(PINNED and not ALL, reason="other files compile these kernels with this release")


def test_this_release_is_known() -> None:
    """Both what the kernel is written in, and how a kernel is launched without the JIT."""
    llama = AttentionSpec("varlen", "cuda", 90, torch.bfloat16, torch.bfloat16, 128, 128, 32, 8, (-1, 0))
    assert HopperBackend().supports(llama) is None
    assert launch._HAS_KNOWN_LAUNCHER
    assert PINNED == launch._FLAT_ARGUMENTS


@compiled_elsewhere
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_hopper_kernel(head_dim: int) -> None:
    q, k, v = make_qkv(1, 2048, 2048, 4, 2, head_dim, dtype=torch.bfloat16)
    with compiling_for("sm90") as kernels:
        run_plan(plan_hopper_forward, q, k, v, **OPTIONS)
    [kernel] = kernels
    found = kernel.instructions
    assert min(found["HGMMA"], found["UTMALDG"], found["UTMASTG"]) > 0
    assert found["HMMA"] == 0
    assert kernel.spill_bytes <= 32, "24 bytes in Triton 3.6, 32 in a later release at head_dim 256, outside of the loop"
    assert kernel.wgmma_faults == []


@compiled_elsewhere
@pytest.mark.parametrize("head_dim", [128, 192, 256])
def test_the_hopper_backward_kernels(head_dim: int) -> None:
    """Only ptxas says whether products run on from one block of queries to the next."""
    if head_dim > MAX_HEAD_DIM_OF_GRADIENTS:
        pytest.skip(f"gradients of {head_dim} columns are left to the portable kernels with Triton {triton.__version__}")
    q, k, v = make_qkv(1, 2048, 2048, 4, 2, head_dim, dtype=torch.bfloat16)
    tensors = BackwardTensors(q, k, v, None, None, None, None, q, torch.zeros(1, 4, 2048), q)
    with compiling_for("sm90") as kernels:
        plan_hopper_backward(tensors, AttentionOptions(0.1, (-1, 0), 0.0, 2048, 2048, return_lse=True))(tensors)
    _, kernel, _ = kernels
    assert kernel.instructions["HGMMA"] > 0
    assert "REDG.E.ADD.F32x4" in kernel.sass
    assert kernel.wgmma_faults == []


@compiled_elsewhere
@pytest.mark.parametrize("precision", ["qk8", "fp8"])
def test_the_hopper_kernel_with_float8_products(precision: Precision) -> None:
    q, k, v = make_qkv(1, 2048, 2048, 4, 2, 128, dtype=torch.bfloat16)
    tensors = AttentionTensors(q, k, v)
    with compiling_for("sm90") as kernels:
        plan_hopper_forward(tensors, AttentionOptions(0.1, (-1, 0), 0.0, 2048, 2048, return_lse=True, precision=precision))(
            tensors
        )
    quantize, kernel = kernels
    assert quantize.name == "_quantize_inputs"
    assert "QGMMA" in kernel.sass
    assert kernel.spill_bytes <= 104, "outside of the loop"
    assert kernel.wgmma_faults == []


@compiled_elsewhere
def test_the_hopper_kernel_over_pages() -> None:
    """The rings of shared memory are reinterpreted as boxes of a page."""
    q, k, v = (x.flatten(0, 1) for x in make_qkv(1, 512, 512, 4, 2, 128, dtype=torch.bfloat16))
    k, v = (x.unflatten(0, (32, 16)) for x in (k, v))
    table = torch.zeros(1, 32, dtype=torch.int32)
    lengths = {"cu_seqlens_q": cu_seqlens([512]), "seqused_k": torch.tensor([512], dtype=torch.int32)}
    with compiling_for("sm90") as kernels:
        run_plan(plan_hopper_forward, q, k, v, block_table=table, max_seqlen_q=512, max_seqlen_k=512, **lengths, **OPTIONS)
    table_kernel, kernel = kernels
    assert (table_kernel.name, kernel.name) == ("_tile_table", "attn_fwd_hopper")
    assert kernel.instructions["UTMALDG"] > 0


@compiled_elsewhere
@pytest.mark.parametrize("target", ["sm80", "sm90"])
def test_the_portable_kernels(target: str) -> None:
    q, k, v = make_qkv(2, 256, 256, 8, 2, 128, dtype=torch.bfloat16)
    with compiling_for(target) as kernels:
        run_plan(plan_portable, q, k, v, **OPTIONS)
        run_plan(decode.plan_decode, q[:, :1].contiguous(), k, v, **OPTIONS)
        lists = BlockLists.from_blocks(torch.ones(1, 1, 2, 2, dtype=torch.bool))
        run_plan(plan_block_sparse, q, k, v, blocks=lists, **OPTIONS)
    assert [kernel.name for kernel in kernels][:2] == ["attn_fwd", "attn_decode"]
    assert kernels[-1].name == "attn_block_sparse"
    assert kernels[-1].instructions["LDGSTS"] > 0, "keys and values are not copied ahead of their use"
    assert all(kernel.spill_bytes <= 32 for kernel in kernels)


@compiled_elsewhere
@pytest.mark.parametrize(("head_dim", "fp8", "programs"), [(64, False, 4), (128, True, 3), (256, False, 2)])
def test_decoding_multiplies_8_rows_by_mma_sync(
    head_dim: int, fp8: bool, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By wgmma, fewer programs than are counted on would fit on an SM, or float8 would be read in words of 16 bits."""
    monkeypatch.setattr(decode, "multiprocessors", lambda device, otherwise: 132)
    q = torch.zeros(2, 32, head_dim, dtype=torch.bfloat16)
    cache = torch.zeros(4, 16, 8, head_dim, dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16)
    pages = {"block_table": torch.zeros(2, 256, dtype=torch.int32), "seqused_k": torch.ones(2, dtype=torch.int32)}
    lengths = {"cu_seqlens_q": cu_seqlens([1, 1]), "max_seqlen_q": 1, "max_seqlen_k": 4096}
    descale = torch.ones(8) if fp8 else None
    with compiling_for("sm90") as kernels:
        run_plan(decode.plan_decode, q, cache, cache, k_descale=descale, v_descale=descale, **pages, **lengths, **OPTIONS)
    kernel = kernels[0]
    assert kernel.hot_loop["HGMMA"] == 0
    assert kernel.hot_loop["HMMA"] > 0
    assert kernel.instructions["LDGSTS"] == len(re.findall(r"LDGSTS\.E\.BYPASS\.128", kernel.sass))
    assert programs * (kernel.shared_bytes + 1024) <= 228 << 10
    assert programs * 128 * kernel.registers <= 65536
    assert kernel.spill_bytes <= 64, "the newest release of Triton spills 48 bytes, outside the loop"
    assert kernel.hot_loop["LDL"] == kernel.hot_loop["STL"] == 0
    assert "griddepcontrol.wait" in kernel.binary.asm["ptx"]
    assert ".target sm_90a" in kernel.binary.asm["ptx"]


@compiled_elsewhere
def test_quantised_experts_on_hopper() -> None:
    """The largest and the smallest tile, with a gate: registers suffice and no product is serialised."""
    weight = int4_weight(2 * 256, 1024, group_size=128, zeros=True, dtype=torch.bfloat16)
    x, y = (torch.zeros(64, n, dtype=torch.bfloat16) for n in (1024, 128))
    order = torch.zeros(64, dtype=torch.int32)
    tiles = torch.zeros(4, 3, dtype=torch.int32)
    with compiling_for("sm90") as kernels:
        for block_m in (16, 128):
            product = product_of_experts(x, weight, 2, 2, Gate("silu"), 32)
            launch = plan_tiles(product, GroupedWgmmaTile(block_m, 128), Gate("silu"), 4, 0)
            launch((x, *product_tensors(weight), None, order, tiles, y))
    assert [kernel.name for kernel in kernels] == ["_grouped_wgmma"] * 2
    assert all(kernel.spill_bytes <= 8 and kernel.instructions["HGMMA"] > 0 for kernel in kernels)
    assert [fault for kernel in kernels for fault in kernel.wgmma_faults] == []


@compiled_elsewhere
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_experts_with_matrices_on_hopper(transposed: bool) -> None:
    """Both products, with a gate and biases: no spills, and no product is serialised."""
    k = 2880
    weight = torch.zeros(2, *((k, 5760) if transposed else (5760, k)), dtype=torch.bfloat16)
    weight = weight.transpose(1, 2) if transposed else weight
    x = torch.zeros(512, k, dtype=torch.bfloat16)
    order = torch.zeros(512, dtype=torch.int32)
    tiles = torch.zeros(8, 3, dtype=torch.int32)
    with compiling_for("sm90") as kernels:
        for gate in (Gate("silu", interleaved=transposed, limit=7.0), None):
            bias = torch.zeros(2, 5760, dtype=torch.bfloat16)
            y = torch.zeros(512, 2880 if gate else 5760, dtype=torch.bfloat16)
            product = product_of_experts(x, weight, 2, 4, gate, 128)
            launch = plan_matrix_tiles(product, matrix_tile(product), gate, 8, 5760, transposed)
            launch((weight, x, x, bias, order, tiles, y))
    assert [kernel.name for kernel in kernels] == ["experts_matrix"] * 2
    assert all(kernel.spill_bytes == 0 for kernel in kernels)
    assert all(min(kernel.instructions["HGMMA"], kernel.instructions["UTMALDG"]) > 0 for kernel in kernels)
    assert [kernel.instructions["LDGSTS"] for kernel in kernels] == [9, 0]
    assert [fault for kernel in kernels for fault in kernel.wgmma_faults] == []


def test_products_of_quantised_weights_on_hopper() -> None:
    """All tiles of the kernels for Hopper: they multiply with tensor cores, and registers suffice."""
    n = 512
    k = 2048
    int4 = int4_weight(n, k, group_size=128, zeros=True, dtype=torch.bfloat16)
    float8 = float8_weight(n, k, group_size=k)
    x = torch.zeros(64, k, dtype=torch.bfloat16)
    with compiling_for("sm90") as kernels:
        # with one multiprocessor, a weight gets the tiles of large ones
        for weight in (int4, float8):
            for m in (16, 64):
                multiply_by("unpack_wgmma", x[:m], weight, num_sms=1)
        for weight in (int4, float8):
            multiply_by("gemv", x[:1], weight, num_sms=132)
            for m in (16, 64):
                multiply_by("unpack_wgmma", x[:m], weight, num_sms=132)
    of_weight = ["_quantized_gemv", "_quantized_wgmma", "_sum_splits", "_quantized_wgmma", "_sum_splits"]
    assert [kernel.name for kernel in kernels] == ["_quantized_wgmma"] * 4 + of_weight * 2
    small = dense("int4", n, k, tokens=64)
    assert wgmma_tile(replace(small, num_sms=1)) == wgmma_tile(replace(small, n=28672)) != wgmma_tile(small)
    # 512 threads have 128 registers each
    assert all(kernel.registers <= 128 and kernel.spill_bytes <= 40 for kernel in kernels[:4])
    # Triton 3.9 spills 8 bytes where the number of registers is limited, so that four programs fit
    assert all(kernel.spill_bytes <= 8 * triton.__version__.startswith("3.9.") for kernel in kernels[4:])
    assert all(kernel.instructions["HMMA"] > 0 for kernel in kernels if kernel.name == "_quantized_gemv")
    assert all(kernel.instructions["HGMMA"] > 0 for kernel in kernels if kernel.name == "_quantized_wgmma")
    assert [fault for kernel in kernels for fault in kernel.wgmma_faults] == []


def test_products_in_float8_on_hopper() -> None:
    n = 512
    k = 2048
    weight = float8_weight(n, k, group_size=k)
    with compiling_for("sm90") as kernels:
        for m in (2, 17, 64, 128):
            x = RoundedRows(torch.zeros(m, k).to(torch.float8_e4m3fn), torch.ones(m, 1), torch.bfloat16)
            multiply_by("float8_wgmma", x, weight, num_sms=132)
    assert [kernel.name for kernel in kernels] == ["_scaled_wgmma"] * 4
    assert all(kernel.spill_bytes == 0 for kernel in kernels)
    assert all("QGMMA." in kernel.sass for kernel in kernels)
    assert [fault for kernel in kernels for fault in kernel.wgmma_faults] == []


@compiled_elsewhere
def test_latent_attention_on_hopper() -> None:
    """Three warpgroups and four producer warps share the registers, and no product waits for another warpgroup's."""
    q = torch.zeros(3, 128, 576, dtype=torch.bfloat16)
    cache = torch.zeros(4, 16, 1, 576, dtype=torch.bfloat16)
    pages = {"block_table": torch.zeros(3, 64, dtype=torch.int32), "seqused_k": torch.ones(3, dtype=torch.int32)}
    lengths = {"cu_seqlens_q": cu_seqlens([1, 1, 1]), "max_seqlen_q": 1, "max_seqlen_k": 1024}
    with compiling_for("sm90") as kernels:
        run_plan(plan_latent_decode, q, cache, cache[..., :512], **pages, **lengths, **OPTIONS)
    kernel = kernels[0]
    assert kernel.name == "attn_latent_hopper"
    assert kernel.shared_bytes <= 227 << 10
    assert kernel.spill_bytes <= 160, "none up to Triton 3.8; in 3.9, scores reload three addresses in their loop"
    assert kernel.instructions["UTMALDG"] == 18
    assert kernel.wgmma_faults == []
