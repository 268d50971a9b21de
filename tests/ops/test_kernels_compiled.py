"""The kernels of ops compile for every GPU without spills."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from cross_compile import TARGETS, UNLIKE, Kernel, compiling_for, sm90_and
from products_by_kernel import dequantised_by_kernel, multiply_by, rounded_by_kernel, without_kernels
from quantized import float4_weight, float8_weight, int4_weight
from sampled_cases import each_nth
from torch import Tensor

from fa_serve.ops import ACTIVATIONS, DeltaHeads, ExpertWeights, Gate, LayerNorm, Norm, Pairing, Router, RowTable
from fa_serve.ops.elementwise.activation import launch_act, launch_act_and_mul
from fa_serve.ops.elementwise.addition import launch_add, launch_add_gated
from fa_serve.ops.elementwise.attention_parts import launch_merge_attention
from fa_serve.ops.elementwise.delta_inputs import launch_ungroup_delta_inputs
from fa_serve.ops.elementwise.gates import launch_delta_gates, launch_gate_heads
from fa_serve.ops.elementwise.norm import launch_layer_norm, launch_rms_norm
from fa_serve.ops.elementwise.rotary import launch_rotary_store_kv
from fa_serve.ops.elementwise.rotary_latent import launch_rotary_store_latent
from fa_serve.ops.elementwise.rotary_tables import launch_rotary_tables
from fa_serve.ops.elementwise.row_copies import launch_move_rows
from fa_serve.ops.moe.routing import launch_route
from fa_serve.ops.moe.run import compute_experts
from fa_serve.ops.products.problem import converts_float8
from fa_serve.ops.products.quantised.rounding import MAX_GATED
from fa_serve.ops.products.row_invariant import launch_invariant_sum
from fa_serve.ops.products.run import multiply_invariant
from fa_serve.ops.sampling.kernel import launch_sample_rows


@pytest.fixture(autouse=True)
def unwritten_memory(poisoned_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed here, and the experts of a mixture are gigabytes that need not be written."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)


PROGRAMMATIC = ("sm90", "sm100", "sm120")
"""The targets whose kernels start while the kernel before them drains."""


def waits(kernel: Kernel) -> bool:
    """Whether a kernel lets the next one start and waits for the one before it, once each. `_gated_rows` waits first."""
    order = ["wait", "launch_dependents"] if kernel.name == "_gated_rows" else ["launch_dependents", "wait"]
    assert kernel.programmatic in ([], order)
    return bool(kernel.programmatic)


def bf16(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


@pytest.mark.parametrize("target", sm90_and("gfx942"))
def test_kernels_between_the_products_of_a_layer(target: str) -> None:
    slots = torch.zeros(3, dtype=torch.int64)

    def rotary_store_kv(all_heads: int, num_heads: int, dim: int, rotary_dim: int, norm: Norm | None) -> None:
        """all_heads: with a gate behind each query if they are more than queries, and 8 keys and values each"""
        caches = [bf16(2, 8, 16, dim).transpose(1, 2) for _ in "kv"]
        angles = bf16(3, rotary_dim)[:, : rotary_dim // 2]
        qkv = bf16(3, all_heads * dim)
        launch_rotary_store_kv(qkv, *caches, slots, num_heads, angles, angles, norm, norm, None, None)

    def rotary_store_latent(num_heads: int, pairing: Pairing, cache_dtype: torch.dtype) -> None:
        q = bf16(3, num_heads, 192)[..., 128:]
        cache = torch.zeros(2, 16, 1, 576, dtype=cache_dtype)
        norm = Norm(bf16(512), 1e-6)
        descale = torch.ones(1) if cache_dtype.itemsize == 1 else None
        angles = torch.zeros(3, 64)
        launch_rotary_store_latent(q, bf16(3, 576), cache, slots, norm, angles, angles, pairing, descale, q)

    with compiling_for(target) as kernels:
        launch_rms_norm(bf16(3, 4096), Norm(bf16(4096), 1e-6), None, None)
        launch_rms_norm(bf16(3, 8192), Norm(bf16(8192), 1e-6), bf16(3, 8192), None)
        launch_layer_norm(bf16(3, 768), LayerNorm(bf16(768), bf16(768), 1e-12), bf16(3, 768), False)
        launch_layer_norm(bf16(3, 8192), LayerNorm(bf16(8192), None, 1e-5), bf16(3, 8192), True)
        rotary_store_kv(48, 32, 128, 128, None)
        rotary_store_kv(48, 32, 128, 128, Norm(bf16(128), 1e-6))
        rotary_store_kv(48, 32, 128, 64, None)
        rotary_store_kv(32, 16, 128, 128, Norm(bf16(128), 1e-6))  # 32 heads in a program
        rotary_store_kv(32, 16, 256, 256, Norm(bf16(256), 1e-6, 1.0))
        rotary_store_kv(48, 16, 256, 64, Norm(bf16(256), 1e-6, 1.0))  # with gates
        rotary_store_latent(128, "neighbours", torch.bfloat16)
        rotary_store_latent(16, "halves", torch.bfloat16)
        if converts_float8(TARGETS[target].arch if target != "gfx942" else 0):
            rotary_store_latent(16, "halves", torch.float8_e4m3fn)
        latent = len(kernels) - 10
        for activation in ACTIVATIONS:
            launch_act_and_mul(bf16(3, 2 * 14336), activation)
        for activation in ACTIVATIONS:
            launch_act(bf16(3, 3072), activation)
        launch_add(bf16(3, 4096), bf16(3, 4096), 1.0)
        launch_add_gated(*[bf16(3, 2048)] * 4, bf16(2048), 1.0)
        launch_merge_attention(*[x for _ in range(2) for x in (bf16(3, 32, 128), torch.zeros(32, 3))])
        launch_gate_heads(bf16(3, 32, 128), bf16(3, 96, 128)[:, 64:], "silu", Norm(bf16(128), 1e-6))
        launch_gate_heads(bf16(3, 16, 256), bf16(3, 48, 256)[:, 1:32:2], "sigmoid", None)
        launch_delta_gates(bf16(3, 96)[:, :32], bf16(3, 96)[:, 32:64], bf16(32), bf16(32))
        launch_ungroup_delta_inputs(bf16(3, 12352), DeltaHeads(16, 128, 32, 128), bf16(32), bf16(32))
        for repeats in (1, 2):
            launch_rotary_tables(torch.arange(3), torch.ones(64), 1.0, torch.bfloat16, repeats)
        table = RowTable([bf16(3, 8, 16, 128).transpose(1, 2)])
        for pack in (True, False):
            launch_move_rows(table, torch.arange(2), torch.zeros(2, table.num_words, dtype=torch.int64), pack)
    names = {"_rms_norm": 2, "_layer_norm": 2, "_rotary_store_kv": 6, "_rotary_store_latent": latent, "_act_and_mul": 3}
    names |= {"_act": 3}
    names |= {"_add": 1, "_add_gated": 1, "_merge_parts": 1, "_gate_heads": 2, "_delta_gates": 1}
    names |= {"_ungroup_delta_inputs": 1}
    names |= {"_rotary_tables": 2, "_move_rows": 2}
    assert [kernel.name for kernel in kernels] == [name for name, count in names.items() for _ in range(count)]
    allowed = {"_rotary_tables": 32}  # the cosine of a large angle needs a few words of memory
    assert [kernel.name for kernel in kernels if kernel.spill_bytes > allowed.get(kernel.name, 0)] == []


@pytest.mark.parametrize("target", each_nth(3, UNLIKE))
def test_product_of_one_token(target: str) -> None:
    """The products of an 8B layer, and of a small one."""
    shapes = ((6144, 4096, False), (14336, 4096, True), (4096, 14336, False), (1024, 2048, False), (3072, 1024, True))
    with compiling_for(target) as kernels:
        for n, k, gated in shapes:
            weight = bf16(2 * n if gated else n, k)
            multiply_by("row", bf16(1, k), weight, None, Norm(bf16(k), 1e-6), "silu" if gated else None)
    assert [kernel.spill_bytes for kernel in kernels] == [0] * 5


@pytest.mark.parametrize("target", each_nth(3, UNLIKE))
def test_kernels_of_sampling_and_of_deterministic_mode(target: str) -> None:
    """Only the sampling kernel with every limit spills, and only on sm80: 80 bytes per thread."""
    ints = torch.zeros(3, dtype=torch.int64)
    floats = torch.zeros(3)
    with compiling_for(target) as kernels:
        launch_sample_rows(bf16(3, 151936), None, None, None, None, None, ints, ints, None)
        launch_sample_rows(bf16(3, 151936), ints, floats, ints, floats, floats, ints, ints, None)
        multiply_invariant(bf16(3, 4096), bf16(1024, 4096), bf16(1024))
        launch_invariant_sum(bf16(3, 4096))
    product = "invariant_rows" if target == "sm90" else "_invariant_linear"
    assert [kernel.name for kernel in kernels] == ["_sample_rows", "_sample_rows", product, "_invariant_sum"]
    assert [kernel.spill_bytes for kernel in kernels] == [0, 80 if target == "sm80" else 0, 0, 0]


def test_passes_over_logits_compare_floats() -> None:
    """Integers in the order of the logits would take three more instructions for each. Those that count logits, sum weights and
    reject a draw are the loops of a program that read the row."""
    ints = torch.zeros(3, dtype=torch.int64)
    floats = torch.zeros(3)
    with compiling_for("sm90") as kernels:
        launch_sample_rows(bf16(3, 151936), ints, floats, ints, floats, floats, ints, ints, None)
    bodies = re.findall(r"scf\.for (?:(?!scf\.for|scf\.yield).)*scf\.yield", kernels[0].binary.asm["ttgir"], re.DOTALL)
    passes = [body for body in bodies if "tensor<32x256xf32" in body]
    assert len(passes) >= 4
    for body in passes:
        assert "arith.cmpf" in body
        assert "arith.shrsi" not in body


@pytest.mark.parametrize(
    "target", each_nth(6, ["sm90", "sm80", "sm89", "sm100", "sm120", "gfx942"])
)  # sm86 reads what sm80 reads
def test_products_with_quantised_weights(target: str) -> None:
    """Every format that the target reads. A tile fits into 99 KB of shared memory, and weights reach Hopper's tensor cores."""
    weights = [int4_weight(2048, 1024, group_size=128, zeros=True, act_order=True, dtype=torch.bfloat16)]
    if converts_float8(TARGETS[target].arch if target != "gfx942" else 0):
        weights += [float8_weight(2048, 1024, group_size=1024), float8_weight(2048, 1024, group_size=128)]
    with compiling_for(target) as kernels:
        for weight in weights:
            multiply_by("unpack_row", bf16(1, 1024), weight, None, Norm(bf16(1024), 1e-6), "silu")
            multiply_by("unpack", bf16(2, 1024), weight, residual=bf16(2, 2048))
            multiply_by("unpack", bf16(200, 1024), weight, bf16(2048))
            dequantised_by_kernel(weight, torch.bfloat16)
        if len(weights) > 1:
            rounded_by_kernel(bf16(3, 14336), Norm(bf16(14336), 1e-6))
            rounded_by_kernel(bf16(3, 28672), None, torch.ones(1))
            rounded_by_kernel(bf16(3, 2 * MAX_GATED), activation="silu")
    assert [kernel.spill_bytes for kernel in kernels] == [0] * len(kernels)
    assert max(kernel.shared_bytes for kernel in kernels) <= 99 * 1024
    if target == "sm90":
        assert all(kernel.instructions["HGMMA"] for kernel in kernels if kernel.name == "_quantized_linear")


@pytest.mark.parametrize("group_size", [32, 64])
def test_symmetric_integers_in_small_groups(group_size: int) -> None:
    """A block of 128 columns has several groups and no zero points: few tokens, and many."""
    weight = int4_weight(1024, 1024, group_size=group_size, dtype=torch.bfloat16)
    with compiling_for("sm90") as kernels:
        multiply_by("unpack_wgmma", bf16(16, 1024), weight)
        multiply_by("one_expert", bf16(200, 1024), weight)
    assert [kernel.name for kernel in kernels] == ["_quantized_wgmma", "_grouped_wgmma"]
    few, many = kernels
    assert few.spill_bytes == 0
    assert many.spill_bytes <= 184, "the scales of four groups of 32 columns take more registers than there are"


GPT_OSS = Gate("silu", interleaved=True, slope=1.702, limit=7.0, offset=1.0)
MIXTURES = {
    "qwen3-30b": ((128, 8, 2048, 768), Gate("silu"), (1, 64, 512, 4096)),
    "gpt-oss-20b": ((32, 4, 2880, 2880), GPT_OSS, (1, 64, 512, 4096)),
    "mixtral": ((8, 2, 4096, 14336), Gate("silu"), (2,)),
}
"""(experts, top_k, hidden, width), the gate, and numbers of tokens that take different tiles. gpt-oss has transposed weights
and biases."""
MIXTURES_OF = [
    *((name, target, counts) for name, (_, _, counts) in MIXTURES.items() for target in ("sm90", "gfx942")),
    # the other targets share their tiles
    *(("qwen3-30b", target, (1, 4096)) for target in TARGETS if target not in ("sm90", "gfx942")),
    ("gpt-oss-20b", "sm80", (64,)),
]


@pytest.mark.parametrize(("mixture", "target", "counts"), each_nth(3, MIXTURES_OF), ids=str)
def test_experts(mixture: str, target: str, counts: tuple[int, ...]) -> None:
    """The portable kernels, which Hopper has for many pairs in other dtypes and in deterministic mode."""
    sizes, gate, _ = MIXTURES[mixture]
    num_experts, top_k, hidden, width = sizes
    weights = [torch.empty(num_experts, *shape, dtype=torch.bfloat16) for shape in ((2 * width, hidden), (hidden, width))]
    biases: list[Tensor | None] = [None, None]
    if gate.interleaved:
        biases = [bf16(*w.shape[:2]) for w in weights]
        weights = [w.view(num_experts, w.shape[2], w.shape[1]).transpose(1, 2) for w in weights]
    experts = ExpertWeights(weights[0], biases[0], weights[1], biases[1], gate)
    with compiling_for(target) as kernels, without_kernels("expert_matrices"):
        for tokens in counts:
            x = bf16(tokens, hidden)
            index = torch.zeros(tokens, top_k, dtype=torch.int64)
            compute_experts(x, index, bf16(tokens, top_k), experts, False)
    few = ["_gated_rows", "_mixed_rows"]
    many = ["_sort_pairs", "_grouped_linear", "_grouped_linear", "_sum_experts"]
    by_rows = not gate.interleaved  # transposed weights have no contiguous rows
    assert [x.name for x in kernels] == [name for count in counts for name in (few if count == 1 and by_rows else many)]
    assert [waits(kernel) for kernel in kernels] == [target in PROGRAMMATIC] * len(kernels)
    assert [kernel.spill_bytes for kernel in kernels] == [0] * len(kernels)
    for kernel in kernels:
        if target == "sm90" and kernel.name == "_mixed_rows":
            before_the_wait, _ = kernel.sass.split("ACQBULK")
            assert before_the_wait.count("LDG.E.128") >= 4, "weights are loaded while the previous kernel ends"
    products = [kernel for kernel in kernels if kernel.name == "_grouped_linear"]
    memory = 65536 if target.startswith("gfx") else 232448 if target == "sm90" else 101376
    assert max(kernel.shared_bytes for kernel in products) <= memory
    if target == "sm90" and len(counts) > 1:
        large = products[-2:]
        assert all(kernel.instructions["HGMMA"] and not kernel.instructions["HMMA"] for kernel in large)
        assert all(kernel.instructions["LDGSTS"] >= 9 for kernel in products), "tiles are loaded while others are multiplied"


@pytest.mark.parametrize("target", each_nth(2, ["sm90", "sm80", "gfx942"]))
def test_quantised_experts(target: str) -> None:
    """mxfp4 and float8 in blocks, with gpt-oss' gates and biases, for one token and for many. sm80 reads float8 as bytes."""
    num_experts = 4
    hidden = 1024
    width = 512
    rows = (num_experts * 2 * width, num_experts * hidden)
    biases = (bf16(num_experts, 2 * width), bf16(num_experts, hidden))
    float8 = partial(float8_weight, group_size=128)
    formats = {"sm80": [float8], "sm90": [float4_weight, float8], "gfx942": [float4_weight]}[target]
    with compiling_for(target) as kernels:
        for make in formats:
            gate_up, down = (make(n, k) for n, k in zip(rows, (hidden, width), strict=True))
            experts = ExpertWeights(gate_up, biases[0], down, biases[1], GPT_OSS)
            for tokens in (1, 200):
                index = torch.zeros(tokens, 2, dtype=torch.int64)
                compute_experts(bf16(tokens, hidden), index, bf16(tokens, 2), experts, False)
    few = ["_gated_rows", "_mixed_rows"]
    many = ["_sort_pairs", "_grouped_linear", "_grouped_linear", "_sum_experts"]
    if target == "sm90":
        many = ["_sort_pairs", "_list_tiles", "_grouped_wgmma", "_grouped_wgmma", "_sum_experts"]
    assert [kernel.name for kernel in kernels] == (few + many) * len(formats)
    assert [waits(kernel) for kernel in kernels] == [target in PROGRAMMATIC] * len(kernels)
    assert [kernel.spill_bytes for kernel in kernels] == [0] * len(kernels)
    products = [kernel for kernel in kernels if kernel.name.startswith("_grouped")]
    memory = 65536 if target.startswith("gfx") else 232448 if target == "sm90" else 101376
    assert max(kernel.shared_bytes for kernel in products) <= memory
    if target == "sm90":
        assert all(kernel.instructions["HGMMA"] for kernel in products), "unpacked weights reach the tensor cores"


@pytest.mark.parametrize("target", each_nth(3, UNLIKE))
def test_routers(target: str) -> None:
    """One warp for each token, without shared memory: Qwen3-30B-A3B, gpt-oss, DeepSeek-V3, and 512 experts."""
    deepseek = Router(8, sigmoid=True, renormalise=True, scale=2.5, num_groups=8, top_groups=4)
    with compiling_for(target) as kernels:
        for num_experts, router in ((128, Router(8, renormalise=True)), (32, Router(4)), (256, deepseek), (512, Router(10))):
            bias = torch.zeros(num_experts) if router.sigmoid else None
            launch_route(torch.zeros(3, num_experts), bias, router, torch.bfloat16)
    assert [kernel.name for kernel in kernels] == ["_route"] * 4
    assert [waits(kernel) for kernel in kernels] == [target in PROGRAMMATIC] * 4
    assert [(kernel.spill_bytes, kernel.shared_bytes) for kernel in kernels] == [(0, 0)] * 4
