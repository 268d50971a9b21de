"""Which kernel computes a product: the decision is a value, so that nothing has to be launched to compare it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from product_cases import dense, of_experts, with_pairs
from torch_processes import after_torch

from fa_serve.ops.products import table, tiles
from fa_serve.ops.products.crossovers import EXPERT_MATRICES_PAIRS, EXPERT_WGMMA_PAIRS, GROUPED_PAIRS
from fa_serve.ops.products.problem import Product
from fa_serve.ops.products.table import ANY_VALUES, KERNELS, changes_of_kernel, kernel_named, kernels_by_tokens, select_kernel

HALF = torch.float16


def names(product: Product, *tokens: int) -> list[str]:
    return [select_kernel(replace(product, tokens=count)).kernel.name for count in tokens]


LIMITS = (1, 2, 128, 129, 512, 513)
ON_HOPPER = ["gemv", "unpack_wgmma", "unpack_wgmma", "one_expert", "one_expert", "dequantise"]
IN_FLOAT16 = ["gemv", "unpack_wgmma", "unpack_wgmma", "dequantise", "dequantise", "dequantise"]
PORTABLE = ["unpack_row", "unpack", "unpack", "dequantise", "dequantise", "dequantise"]
ROUNDED = ["gemv", "float8_wgmma", "float8_wgmma", "scaled_mm", "scaled_mm", "scaled_mm"]
ROUNDED_BY_PYTORCH = ["unpack_row", *["scaled_mm"] * 5]
DETERMINISTIC = ["invariant_rows", "invariant_rows", "invariant", *["invariant_wgmma"] * 3]
FLOAT8_ROWS = {"values": "float8", "n": 6144, "group": 0}


@pytest.mark.parametrize(
    ("product", "kernels"),
    [
        pytest.param(dense("float"), ["row", *["matmul"] * 5], id="matrix"),
        pytest.param(dense("float", arch=0), ["row", *["matmul"] * 5], id="matrix-amd"),
        pytest.param(dense(), ON_HOPPER, id="int4"),
        pytest.param(dense(group=32), ON_HOPPER, id="int4-G32"),
        pytest.param(dense(group=0), ON_HOPPER, id="int4-row"),
        pytest.param(dense(group=96), PORTABLE, id="int4-G96"),
        pytest.param(dense(group=256), ON_HOPPER, id="int4-G256"),
        pytest.param(dense(group=384), ["unpack_row", *ON_HOPPER[1:]], id="int4-G384"),
        pytest.param(dense(dtype=HALF), ["gemv", *PORTABLE[1:]], id="float16-and-bfloat16-scales"),
        pytest.param(dense(dtype=HALF, scales=HALF), IN_FLOAT16, id="float16"),
        pytest.param(dense(n=64, k=4100), ["gemv", *PORTABLE[1:]], id="unaligned-tokens"),
        pytest.param(dense(n=64, k=65536), ["unpack_row", *IN_FLOAT16[1:]], id="wide"),
        pytest.param(dense(n=1 << 18, k=1 << 15), PORTABLE, id="addresses-beyond-32-bits"),
        pytest.param(dense(n=1024), IN_FLOAT16, id="few-rows"),
        pytest.param(dense(n=4096), ON_HOPPER, id="enough-rows"),
        pytest.param(dense(dtype=torch.float32), PORTABLE, id="float32"),
        pytest.param(dense(arch=80), PORTABLE, id="sm80"),
        pytest.param(dense(arch=100), PORTABLE, id="sm100"),
        pytest.param(dense(arch=0), PORTABLE, id="amd"),
        pytest.param(dense(gluon=False), PORTABLE, id="another-release-of-triton"),
        pytest.param(dense(aligned=False), PORTABLE, id="unaligned-weight"),
        pytest.param(dense("float4"), PORTABLE, id="float4"),
        pytest.param(dense(**FLOAT8_ROWS), ROUNDED, id="float8-row"),
        pytest.param(dense(**FLOAT8_ROWS, arch=100), ROUNDED_BY_PYTORCH, id="float8-row-sm100"),
        pytest.param(dense(**FLOAT8_ROWS, aligned=False), ROUNDED_BY_PYTORCH, id="float8-row-unaligned"),
        pytest.param(dense(**FLOAT8_ROWS, arch=120), PORTABLE, id="float8-row-sm120"),
        pytest.param(dense(**FLOAT8_ROWS, dtype=HALF), IN_FLOAT16, id="float8-row-float16"),
        pytest.param(dense(**FLOAT8_ROWS, dtype=torch.float32), PORTABLE, id="float8-row-float32"),
        pytest.param(dense(**FLOAT8_ROWS | {"n": 4104}), IN_FLOAT16, id="float8-rows-that-scaled_mm-does-not-take"),
        pytest.param(dense(**FLOAT8_ROWS, k=4104), PORTABLE, id="float8-odd-row"),
        pytest.param(dense("float8"), ON_HOPPER, id="float8-blocks"),
        pytest.param(dense("float8", dtype=HALF), ["gemv", *PORTABLE[1:]], id="float8-blocks-float16"),
        pytest.param(dense("float8", group=64), ["unpack_row", *ON_HOPPER[1:]], id="float8-G64"),
        pytest.param(dense("float8", n=1 << 18, k=1 << 13), PORTABLE, id="float8-beyond-32-bits"),
        pytest.param(dense("float8", arch=86), ["torch"] * 6, id="float8-sm86"),
        pytest.param(dense("float8", arch=0), ["torch"] * 6, id="float8-amd"),
        pytest.param(dense(triton=False), ["torch"] * 6, id="cpu"),
        pytest.param(dense("float", triton=False), ["matmul"] * 6, id="matrix-cpu"),
        pytest.param(dense("float", invariant=True), ["invariant"] * 3 + DETERMINISTIC[3:], id="matrix-deterministic"),
        pytest.param(dense("float", n=4096, invariant=True), DETERMINISTIC, id="small-matrix-deterministic"),
        pytest.param(dense(invariant=True), ["invariant"] * 6, id="int4-deterministic"),
        pytest.param(dense(invariant=True, triton=False), ["torch"] * 6, id="cpu-deterministic"),
    ],
)
def test_dense_products(product: Product, kernels: list[str]) -> None:
    assert names(product, *LIMITS) == kernels


@pytest.mark.parametrize(
    ("product", "kernel"),
    [
        pytest.param(of_experts(tokens=1), "expert_rows", id="one-token"),
        pytest.param(of_experts("float", tokens=1), "expert_rows", id="one-token-of-matrices"),
        pytest.param(of_experts("float", tokens=1, by_rows=False), "grouped", id="one-token-of-columns"),
        pytest.param(of_experts("float", tokens=4, top_k=8, num_experts=256), "expert_rows", id="few-pairs"),
        pytest.param(of_experts("float", tokens=5, top_k=8, num_experts=256), "grouped", id="not-so-few"),
        pytest.param(of_experts(tokens=1, invariant=True), "grouped", id="deterministic"),
        pytest.param(with_pairs(0.5, "float4"), "expert_wgmma", id="mxfp4-few"),
        pytest.param(with_pairs(8, "float8", group=32), "expert_wgmma", id="float8-G32"),
        pytest.param(with_pairs(EXPERT_WGMMA_PAIRS.limit, "float8", group=0), "expert_wgmma", id="float8-row"),
        pytest.param(with_pairs(513, "float8", group=0), "dequantise_experts", id="float8-row-many"),
        pytest.param(with_pairs(64, "int4"), "expert_wgmma", id="int4"),
        pytest.param(with_pairs(0, "int4"), "grouped", id="int4-deterministic"),
        pytest.param(with_pairs(64, "int4", group=96), "grouped", id="int4-G96"),
        pytest.param(with_pairs(GROUPED_PAIRS.limit + 1, "int4", group=96), "dequantise_experts", id="int4-G96-many"),
        pytest.param(with_pairs(64, "float8", n=64, k=72, group=0), "grouped", id="float8-odd"),
        pytest.param(with_pairs(64, "float8", n=1 << 20, k=1 << 11), "grouped", id="offsets-of-64-bits"),
        pytest.param(with_pairs(64, "float4", dtype=HALF), "grouped", id="float16"),
        pytest.param(with_pairs(GROUPED_PAIRS.limit, "float4", arch=80), "grouped", id="sm80"),
        pytest.param(with_pairs(GROUPED_PAIRS.limit + 1, "float4", arch=80), "dequantise_experts", id="sm80-many"),
        pytest.param(with_pairs(9000, "float4", dtype=torch.float32), "grouped", id="float32-many"),
        pytest.param(with_pairs(9000, "float4", gluon=False), "dequantise_experts", id="other-release-many"),
        pytest.param(with_pairs(64, "float8", arch=80), "grouped", id="float8-read-as-bytes"),
        pytest.param(of_experts(triton=False), "torch", id="cpu"),
    ],
)
def test_experts(product: Product, kernel: str) -> None:
    assert select_kernel(product).kernel.name == kernel


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        pytest.param({}, "expert_matrices", id="rows"),
        pytest.param({"pairs_per_expert": EXPERT_MATRICES_PAIRS.limit - 1}, "grouped", id="few"),
        pytest.param({"invariant": True}, "expert_matrices", id="deterministic"),
        pytest.param({"invariant": True, "pairs_per_expert": 1}, "grouped", id="deterministic-few"),
        pytest.param({"invariant": True, "kept": True}, "grouped", id="with-gradients"),
        pytest.param({"dtype": HALF, "matrix_dtype": HALF}, "grouped", id="float16"),
        pytest.param({"matrix_dtype": torch.float32}, "grouped", id="float32-matrices"),
        pytest.param({"arch": 80}, "grouped", id="Ampere"),
        pytest.param({"aligned": False}, "grouped", id="unaligned"),
        pytest.param({"k": 2080}, "grouped", id="half-a-block"),
        pytest.param({"n": 1544}, "grouped", id="odd-rows"),
        pytest.param({"contiguous": False}, "grouped", id="a-part-of-rows"),
        pytest.param({"num_experts": 1 << 20, "tokens": 1 << 26}, "grouped", id="too-many-rows"),
    ],
)
def test_experts_with_matrices(changes: dict, kernel: str) -> None:
    pairs = changes.pop("pairs_per_expert", EXPERT_MATRICES_PAIRS.limit)
    product = replace(with_pairs(pairs, n=1536, k=2048), **changes)
    assert select_kernel(product).kernel.name == kernel


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        pytest.param({}, "invariant_rows", id="8"),
        pytest.param({"tokens": 9}, "invariant", id="9"),
        pytest.param({"gated": True}, "invariant_rows", id="gated"),
        pytest.param({"dtype": HALF, "matrix_dtype": HALF}, "invariant_rows", id="float16"),
        pytest.param({"k": 4100}, "invariant", id="odd-columns"),
        pytest.param({"gluon": False}, "invariant", id="no-gluon"),
        pytest.param({"n": 1024, "k": 14336}, "invariant", id="many-columns"),
        pytest.param({"n": 1024, "k": 14336, "tokens": 2}, "invariant_rows", id="many-columns-of-2"),
        pytest.param({"n": 4104}, "invariant", id="many-weights"),
        pytest.param({"dtype": torch.float32, "matrix_dtype": torch.float32}, "invariant", id="float32"),
        pytest.param({"matrix_dtype": HALF}, "invariant", id="another-dtype"),
        pytest.param({"k": 512}, "invariant", id="few-columns"),
        pytest.param({"contiguous": False}, "invariant", id="columns"),
        pytest.param({"arch": 100}, "invariant", id="Blackwell"),
        pytest.param({"invariant": False}, "matmul", id="usual"),
    ],
)
def test_few_rows(changes: dict, kernel: str) -> None:
    assert select_kernel(replace(dense("float", n=4096, invariant=True), **changes)).kernel.name == kernel


@pytest.mark.parametrize(("switch", "kernel"), [("FUSES_FEW_ROWS", "invariant"), ("CHOOSES_BY_ROWS", "invariant")])
def test_few_rows_have_no_kernel_where_no_gpu_has_compared_them(
    switch: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, switch, False)
    choice = select_kernel(dense("float", n=4096, invariant=True))
    assert choice.kernel.name == kernel
    assert switch in choice.passed_over["invariant_rows"]


def test_few_rows_in_the_usual_mode_are_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "FEW_ROWS_IN_USUAL_MODE" in select_kernel(dense("float")).passed_over["invariant_rows"]
    monkeypatch.setattr(tiles, "FEW_ROWS_IN_USUAL_MODE", True)
    assert names(dense("float", n=4096), 1, 2, 8, 9) == ["row", "invariant_rows", "invariant_rows", "matmul"]


def test_rows_have_one_kernel_of_experts_where_no_gpu_has_compared_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "CHOOSES_BY_ROWS", False)
    choice = select_kernel(replace(with_pairs(64, n=1536, k=2048), invariant=True))
    assert choice.kernel.name == "grouped"
    assert "CHOOSES_BY_ROWS is off" in choice.passed_over["expert_matrices"]
    assert select_kernel(with_pairs(64, n=1536, k=2048)).kernel.name == "expert_matrices"


def test_a_choice_says_why_the_rows_before_it_were_passed_over() -> None:
    """Each row before the one that is chosen has a reason; a kernel of the right form says what it does not compute."""
    product = dense(n=2048, tokens=200)
    choice = select_kernel(product)
    before = [kernel.name for kernel in KERNELS[: KERNELS.index(choice.kernel)]]
    assert choice.kernel.name == "dequantise"
    assert list(choice.passed_over) == before
    assert choice.passed_over["one_expert"] == "multiplies at least 4096 rows of weights, got 2048"
    assert choice.passed_over["unpack"] == "multiplies up to 128 tokens, got 200"
    assert choice.passed_over["float8_wgmma"] == "multiplies float8 weights, got int4"
    assert all(kernel.fits(product) == choice.passed_over[kernel.name] for kernel in KERNELS if kernel.name in before)


def test_input_in_float8_is_multiplied_in_float8() -> None:
    rounded = dense(**FLOAT8_ROWS, rounded=True)
    assert names(rounded, 2, 128, 129) == ["float8_wgmma", "float8_wgmma", "scaled_mm"]
    assert select_kernel(replace(rounded, tokens=129)).passed_over["gemv"] == "does not multiply input in float8"


def test_names_are_unique_and_the_last_row_computes_everything() -> None:
    assert len({kernel.name for kernel in KERNELS}) == len(KERNELS)
    last = KERNELS[-1]
    assert last is kernel_named("torch")
    for values in ANY_VALUES:
        for product in (dense(values), of_experts(values)):
            assert last.fits(product) is None
            assert last.fits(replace(product, triton=False, invariant=True, tokens=1 << 20)) is None
    assert set(ANY_VALUES) >= {values for kernel in KERNELS for values in kernel.values}


@pytest.mark.parametrize(
    "product",
    [
        dense(),
        dense(**FLOAT8_ROWS),
        dense("float", arch=80),
        of_experts(),
        of_experts("float", num_experts=128, top_k=8, n=1536, k=2048),
        of_experts("int4", num_experts=60, arch=80),
        of_experts("float", by_rows=False),
    ],
    ids=["int4", "float8-row", "matrix", "mxfp4", "qwen", "int4-60-experts", "columns"],
)
def test_changes_are_those_of_all_numbers_of_tokens(product: Product) -> None:
    most = 6000
    found = names(product, *range(1, most + 1))
    changes = [(i + 1, name) for i, name in enumerate(found) if i == 0 or name != found[i - 1]]
    assert [(first, kernel.name) for first, kernel in changes_of_kernel(product, most)] == changes


@pytest.mark.parametrize(
    ("product", "text"),
    [
        (dense(), "gemv for 1 token, unpack_wgmma for 2 to 128, one_expert for 129 to 512, dequantise for more"),
        (dense(arch=80), "unpack_row for 1 token, unpack for 2 to 128, dequantise for more"),
        (dense(n=2048), "gemv for 1 token, unpack_wgmma for 2 to 128, dequantise for more"),
        (dense(**FLOAT8_ROWS), "gemv for 1 token, float8_wgmma for 2 to 128, scaled_mm for more"),
        (of_experts(), "expert_rows for 1 token, expert_wgmma for 2 to 4096, dequantise_experts for more"),
        (
            of_experts(num_experts=128, top_k=4),
            "expert_rows for 1 to 4 tokens, expert_wgmma for 5 to 16384, dequantise_experts for more",
        ),
        (dense(triton=False), "torch"),
    ],
)
def test_people_are_told_by_the_number_of_tokens(product: Product, text: str) -> None:
    assert kernels_by_tokens(product) == text


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None            # importing it raises ImportError, as if it were not installed
import torch
from fa_serve.ops.products.problem import Product, compiles_gluon
from fa_serve.ops.products.table import kernels_by_tokens
product = Product(values="float8", n=4104, k=4096, group=4096, scales=torch.float32, tokens=1, dtype=torch.bfloat16, arch=90)
print(kernels_by_tokens(product), compiles_gluon())
"""


def test_the_table_is_asked_where_triton_is_not_installed() -> None:
    done = after_torch(WITHOUT_TRITON)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "gemv for 1 token, unpack_wgmma for 2 to 128, dequantise for more False\n"


PACKAGES_WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import fa_serve.hf
import fa_serve.engine
import fa_serve.server
"""


@pytest.mark.slow
def test_models_are_served_where_triton_is_not_installed() -> None:
    done = after_torch(PACKAGES_WITHOUT_TRITON)
    assert done.returncode == 0, done.stderr


def test_plans_are_named_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's plan is imported when it is needed first."""
    fake = replace(KERNELS[0], plan=f"{table.__name__}:select_kernel")
    assert fake.load() is select_kernel
