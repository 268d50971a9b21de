"""The kernel for few rows on Hopper: code that computes what the separate launches compute, in the same order.

A float32 result depends on the order of its sums, and on which products and sums the compiler fuses. So the instructions of the
norm, of the chain of products and of the gate are compared with those of `_rms_norm`, `_invariant_linear` and `_act_and_mul`.
tests/gpu/test_rollouts_gpu.py compares the bits.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from cross_compile import Kernel, compiling_for
from product_cases import BF16, dense
from sampled_cases import each_nth

from fa_serve.ops.elementwise.activation import plan_act_and_mul
from fa_serve.ops.elementwise.norm import plan_rms_norm
from fa_serve.ops.products.problem import Details, Product
from fa_serve.ops.products.row_invariant_few import plan_invariant_rows
from fa_serve.ops.products.tiles import invariant_rows_tile

ACTIVATIONS = ["silu", "gelu_tanh", "gelu"]
ARITHMETIC = re.compile(
    r"^\s*(?:@\S+ )?((?:mul|fma|add|sub|div|rcp|rsqrt|ex2|min|max|abs|neg)\.(?:\w+\.)*f32|shfl\.sync\.bfly\.b32)\s"
)
REDUCTION = re.compile(r'"tt\.reduce"\(%\w+\).*?\}\) : \(tensor<(\w+), (#\w+)>\)', re.DOTALL)
SHAPES = {
    "qkv-0.6B": (4096, 1024, False),
    "down-0.6B": (1024, 3072, False),
    "gate-0.6B": (6144, 1024, True),
    "qkv-8B": (6144, 4096, False),
    "gate-8B": (28672, 4096, True),
    "down-8B": (4096, 14336, False),
    "odd": (1000, 3000, False),
    "odd-gate": (2000, 2560, True),
}


def few(n: int, k: int, gated: bool = False, tokens: int = 8) -> Product:
    return dense("float", n, k, tokens=tokens, gated=gated, invariant=True)


def compiled(product: Product, *, norm: bool = False, extras: bool = False, activation: str = "silu") -> Kernel:
    """extras: a bias, and a residual if there is no gate and no norm"""
    n = product.n
    k = product.k
    x = torch.zeros(product.tokens, k, dtype=BF16)
    residual = torch.zeros(product.tokens, n, dtype=BF16) if extras and not product.gated and not norm else None
    details = Details(1e-6, 0.0, activation if product.gated else None, 1.0, (k, 1, k, 1))
    with compiling_for("sm90") as kernels:
        multiply = plan_invariant_rows(product, invariant_rows_tile(product), details)
        multiply(x, torch.zeros(n, k, dtype=BF16), x.new_zeros(n) if extras else None, x[0] if norm else None, residual)
    [kernel] = kernels
    assert kernel.name == "invariant_rows"
    return kernel


def compiled_norm(k: int) -> Kernel:
    x = torch.zeros(8, k, dtype=BF16)
    with compiling_for("sm90") as kernels:
        plan_rms_norm(x, None, torch.empty_like(x), 1e-6, 0.0)((x, x[0], None, torch.empty_like(x)))
    return kernels[0]


def arithmetic(kernel: Kernel) -> list[str]:
    """The instructions in float32 and the exchanges between lanes, in their order."""
    return [found[1] for line in kernel.binary.asm["ptx"].splitlines() if (found := ARITHMETIC.match(line))]


def reductions(kernel: Kernel) -> list[tuple[str, str]]:
    """The type and the layout of every tensor that is summed."""
    text = kernel.binary.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (#ttg.*)$", text, re.MULTILINE))
    return [(kind, layouts[layout]) for kind, layout in REDUCTION.findall(text)]


@pytest.mark.parametrize("extras", [False, True], ids=["", "bias-residual"])
@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("shape", each_nth(2, list(SHAPES)))
def test_every_product_is_one_chain_of_wgmma(shape: str, norm: bool, extras: bool) -> None:
    product = few(*SHAPES[shape])
    tile = invariant_rows_tile(product)
    kernel = compiled(product, norm=norm, extras=extras)
    found = re.findall(r"wgmma\.mma_async\.sync\.aligned\.m(\d+)n\d+k(\d+)\.f32\.bf16\.bf16", kernel.binary.asm["ptx"])
    assert Counter(found) == {("64", "16"): tile.block_k // 16 * (2 if product.gated else 1)}
    assert not kernel.instructions["HMMA"]
    assert not re.search(r"\b(red|atom)\.", kernel.binary.asm["ptx"])
    assert kernel.wgmma_faults == []
    assert kernel.spill_bytes == 0


@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("shape", each_nth(2, list(SHAPES)))
@pytest.mark.parametrize("tokens", [1, 8])
def test_two_programs_fit_on_a_multiprocessor(shape: str, norm: bool, tokens: int) -> None:
    """So that a program of the next launch may start while one of this launch runs."""
    kernel = compiled(few(*SHAPES[shape], tokens=tokens), norm=norm)
    assert 2 * (kernel.shared_bytes + (1 << 10)) <= 228 << 10
    assert 2 * kernel.registers * 32 * kernel.binary.metadata.num_warps <= 1 << 16
    assert kernel.spill_bytes == 0


@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("shape", each_nth(2, list(SHAPES)))
def test_tokens_are_repeated_in_registers(shape: str, norm: bool) -> None:
    """Each thread loads four bytes for four rows and two columns of a block, and nothing else but weights is read."""
    product = few(*SHAPES[shape])
    loop = compiled(product, norm=norm).hot_loop
    assert sum(loop[name] for name in ("LDS", "LDSM")) <= invariant_rows_tile(product).block_k // 8 + 8
    assert not loop["LDG"]
    assert not loop["STS"]
    assert not loop["STSM"]


@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("shape", ["qkv-0.6B", "gate-8B"])
def test_weights_are_read_while_the_previous_kernel_runs(shape: str, norm: bool) -> None:
    kernel = compiled(few(*SHAPES[shape]), norm=norm)
    before, wait, _ = kernel.binary.asm["ptx"].partition("griddepcontrol.wait")
    assert wait
    assert before.count("cp.async.bulk.tensor.2d.shared") > 0
    assert bool(re.search(r"\bld\.global", before)) == norm, "the previous kernel may write all but the weight of the norm"
    assert kernel.programmatic == ["wait", "launch_dependents"]


@pytest.mark.parametrize("tokens", [1, 2, 8])
@pytest.mark.parametrize("k", [768, 1024, 2048, 2560, 4096])
def test_the_norm_sums_squares_as_its_kernel_does(k: int, tokens: int) -> None:
    """A tile has one row or several, and each row has the layout that it has alone."""
    [(kind, layout)] = reductions(compiled_norm(k))
    found = reductions(compiled(few(4096, k, tokens=tokens), norm=True))
    rows = [int(kind.partition("x")[0]) for kind, _ in found]
    assert sum(rows) == tokens
    assert {kind.partition("x")[2] for kind, _ in found} == {kind}
    alone = re.findall(r"(\w+(?<!order)) = \[(\d+)\]", layout)
    assert len(alone) == 3
    for _, of_rows in found:
        assert re.findall(r"(\w+(?<!order)) = \[1, (\d+)\]", of_rows) == alone


@pytest.mark.parametrize("k", [1024, 2560, 4096])
def test_the_norm_has_the_instructions_of_its_kernel(k: int) -> None:
    """Which squares are fused with which sums is decided in PTX, where each is a fused multiply-add but the first. Behind the
    factor there are products alone, and the sum of the weight and the offset, which cannot be fused."""
    found = []
    for kernel in (compiled_norm(k), compiled(few(4096, k, tokens=1), norm=True)):
        instructions = arithmetic(kernel)
        end = next(i for i, name in enumerate(instructions) if name.startswith("rsqrt"))
        assert {name.partition(".")[0] for name in instructions[end + 1 :]} <= {"mul", "add", "shfl"}
        # ptxas fuses the mean and eps, because a division by a constant is a product
        mean = re.search(
            r"FFMA (R\d+), R\d+, ([\d.e-]+), R\d+(?:\.reuse)? ;(?:(?!FFMA).)*?MUFU\.RSQ R\d+, \1 ;", kernel.sass, re.DOTALL
        )
        assert mean
        found.append((instructions[: end + 1], mean[2]))
    assert found[0] == found[1]
    names = Counter(found[0][0])
    assert names["mul.f32"] == 1, "a second one could be fused with a sum by ptxas"
    assert names["fma.rn.f32"] > 0


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gate_has_the_instructions_of_its_kernel(activation: str) -> None:
    """Of each number: both kernels call `activate`, and no other instruction of this launch is in float32."""
    with compiling_for("sm90") as kernels:
        x = torch.zeros(8, 6144, dtype=BF16)
        plan_act_and_mul(8, 3072, 6144, activation, True)((x, x[:, :3072]))
    [alone] = kernels
    kernel = compiled(few(6144, 1024, True), activation=activation)
    tile = invariant_rows_tile(few(6144, 1024, True))
    threads = 32 * kernel.binary.metadata.num_warps
    of_alone = Counter(arithmetic(alone))
    of_kernel = Counter(arithmetic(kernel))
    numbers = 1024 // 128
    assert of_kernel == {name: count * 64 * tile.block_n // threads // numbers for name, count in of_alone.items()}


def test_other_numbers_of_warps_would_be_another_sum() -> None:
    """The guard of the rule that the norm decides the number of warps."""
    product = few(4096, 1024)
    other = compiled(replace(product, k=2048), norm=True)
    assert reductions(other)[0][1] != reductions(compiled_norm(1024))[0][1]
