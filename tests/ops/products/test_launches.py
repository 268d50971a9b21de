"""What the table says is what is launched: for thousands of random products and experts, counted where launches happen.

The facts of a product are drawn first. Tensors without memory are made with them, a call is made as the engine makes it, and
the launches are compared with those of the kernel that the table chooses for the drawn facts, in their order and with its tile.
So a fact that is read wrongly from tensors, a plan that another call should not have taken, and a second place that decides are
found. The calls of one GPU share their plans.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from meta_weights import meta, meta_weight
from products_by_kernel import Launched, a_gpu, counted_launches
from sampled_cases import examples
from torch import Tensor

from fa_serve import ops
from fa_serve.ops.products import problem
from fa_serve.ops.products.problem import Product
from fa_serve.ops.products.table import KERNELS, KernelChoice, select_kernel
from fa_serve.ops.triton_ops import TritonOps

BF16 = torch.bfloat16
GPU = TritonOps()
MACHINES = [
    *((90, True, num_sms) for num_sms in (132, 132, 132, 132, 114)),
    *((arch, True, 108) for arch in (0, 80, 89, 100, 120)),
    (90, False, 132),
]
"""(architecture, whether Gluon can be compiled, multiprocessors)."""
CALLS = examples(10_000)
SILU = ops.Gate("silu")


class Draw:
    """Random facts. Few values are drawn often, so that calls differ in one fact."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def one(self, *values: Any) -> Any:
        return self._random.choice(values)

    def often(self, share: float) -> bool:
        return self._random.random() < share

    def tokens(self) -> int:
        return int(self.one(1, 1, 2, 16, 17, 64, 127, 128, 129, 200, 511, 512, 513, 700, self._random.randint(1, 5000)))

    def stored(self, k: int, dtype: torch.dtype) -> dict[str, Any]:
        """The facts of a quantised weight's values."""
        values = self.one("int4", "int4", "float8", "float8", "float4")
        group = 32 if values == "float4" else self.one(32, 64, 128, 128, 256, 96, 384, k, k)
        scales = {"int4": self.one(BF16, dtype), "float4": torch.uint8, "float8": torch.float32}[values]
        return {"values": values, "group": group, "scales": scales, "aligned": self.often(0.9)}


def draw_product(draw: Draw, machine: dict[str, Any]) -> Product:
    k = draw.one(64, 128, 1024, 2048, 2048, 4096, 4096, 4100, 4104, 14336, 32768, 65536)
    dtype = draw.one(BF16, BF16, BF16, torch.float16, torch.float32)
    asked = {"n": draw.one(16, 64, 100, 1024, 2048, 4094, 4096, 4104, 6144, 28672, 1 << 18), "k": k, "tokens": draw.tokens()}
    stored = {"values": "float", "matrix_dtype": dtype} if draw.often(0.25) else draw.stored(k, dtype)
    gated = draw.often(0.3)
    invariant = not gated and draw.often(0.6 if stored["values"] == "float" else 0.1)
    return Product(**asked, dtype=dtype, **stored, gated=gated, invariant=invariant, **machine)


def vary(product: Product, draw: Draw) -> Product:
    """The same product but for one fact."""
    name, values = draw.one(
        ("aligned", (not product.aligned,)),
        ("tokens", (1, 2, 8, 9, 128, 129, 512, 513)),
        ("n", (16, 4094, 4096, 6144)),
        ("group", (32, 96, 128, product.k)),
    )
    fixed = {"float": ("aligned", "group"), "float4": ("group",)}.get(product.values, ())
    if name in fixed:
        return product
    return replace(product, **{name: draw.one(*values)})


@dataclass(frozen=True)
class Around:
    """What is asked beside a product."""

    norm: bool
    residual: bool
    bias: bool
    activation: str
    alpha: float
    zeros: bool
    act_order: bool
    input_scale: bool

    @classmethod
    def drawn(cls, draw: Draw) -> Around:
        flags = [draw.often(share) for share in (0.5, 0.5, 0.3, 0.5, 0.2, 0.3)]
        return cls(*flags[:3], draw.one(*ops.ACTIVATIONS), draw.one(1.0, 0.5), *flags[3:])


def weight_of(product: Product, around: Around) -> ops.Weight:
    rows = product.n * max(product.num_experts, 1)
    if product.values == "float":
        return meta(rows, product.k, dtype=product.dtype)
    return meta_weight(
        product.values,
        rows,
        product.k,
        product.group,
        scales=product.scales,
        zeros=product.values == "int4" and around.zeros,
        act_order=product.values == "int4" and not product.num_experts and around.act_order,
        input_scale=product.values == "float8" and around.input_scale,
        offset=0 if product.aligned else 4,
    )


NAMES = {"torch.nn.functional.linear": "matmul", "torch._scaled_mm": "scaled_mm"}


def launches_of(product: Product, choice: KernelChoice, *, norm: bool, residual: bool) -> list[str]:
    """Everything that the call of a dense product launches."""
    kernel = choice.kernel
    before = []
    if kernel.in_float8:
        before = ["_quantize_rows"]
    elif norm and not kernel.fused:
        before = ["_rms_norm"]
    multiplies = [NAMES.get(name, name) for name in kernel.launches]
    if kernel.name == "dequantise":
        multiplies.append("matmul")
    if kernel.name == "invariant" and product.values != "float" and product.reads_float8:
        multiplies.insert(0, "_dequantize")
    after = []
    if getattr(choice.tile, "splits", 1) > 1:
        after = ["_sum_splits"]
    elif residual and kernel.name in ("scaled_mm", "one_expert"):
        after = ["_add"]
    if product.gated and not kernel.fused:
        after.append("_act_and_mul")
    return before + multiplies + after


def call_product(product: Product, choice: KernelChoice, around: Around) -> list[str]:
    """Make the call, and return what it must launch."""
    x = meta(product.tokens, product.k, dtype=product.dtype)
    weight = weight_of(product, around)
    bias = meta(product.n, dtype=product.dtype) if around.bias else None
    if product.invariant:
        GPU.invariant_linear(x, weight, bias)
        return launches_of(product, choice, norm=False, residual=False)
    norm = ops.Norm(meta(product.k, dtype=product.dtype), 1e-6) if around.norm else None
    residual = meta(product.tokens, product.n, dtype=product.dtype) if around.residual and not product.gated else None
    activation = around.activation if product.gated else None
    y = GPU.linear(x, weight, bias, norm, activation, residual, around.alpha, None)
    assert isinstance(y, Tensor)
    assert y.shape == (product.tokens, product.outputs)
    assert y.dtype == product.dtype
    return launches_of(product, choice, norm=norm is not None, residual=residual is not None)


def draw_experts(draw: Draw, machine: dict[str, Any]) -> tuple[Product, Product]:
    """Both products of a mixture: their weights are kept alike, but their sizes fit different kernels."""
    hidden, width = draw.one((2048, 768), (2880, 2880), (1024, 512), (1032, 96), (2880, 360), (576, 256))
    dtype = draw.one(BF16, BF16, BF16, torch.float16, torch.float32)
    num_experts, top_k = draw.one((8, 2), (32, 4), (60, 4), (128, 8), (256, 8))
    tokens = draw.one(draw.tokens(), num_experts * 64 // top_k, num_experts * 512 // top_k + draw.one(0, 1))
    asked = {"tokens": tokens, "dtype": dtype, "num_experts": num_experts, "top_k": top_k, "invariant": draw.often(0.1)}
    products = []
    plain = draw.often(0.4)
    layout = draw.one("rows", "rows", "columns", "part")
    group = draw.one(32, 64, 128, 96, 0)
    kept = draw.stored(0, dtype)
    for n, k, gated in ((2 * width, hidden, True), (hidden, width, False)):
        if plain:
            layouts = {"by_rows": layout != "columns", "contiguous": layout != "part"}
            stored = {"values": "float", "matrix_dtype": dtype, **layouts}
        else:
            stored = {**kept, "group": 32 if kept["values"] == "float4" else group or k}
        products.append(Product(n=n, k=k, gated=gated, **asked, **stored, **machine))
    return products[0], products[1]


def matrices_of(product: Product) -> Tensor:
    experts = product.num_experts
    n = product.n
    k = product.k
    if not product.by_rows:
        return meta(experts, k, n, dtype=product.dtype).transpose(1, 2)
    return (
        meta(experts, n, k, dtype=product.dtype)
        if product.contiguous
        else meta(experts, n, 2 * k, dtype=product.dtype)[:, :, :k]
    )


def call_experts(products: tuple[Product, Product], choices: list[KernelChoice], draw: Draw) -> list[str]:
    """Make the call, and return what it must launch."""
    first = products[0]
    around = Around.drawn(draw)
    gate_up, down = (matrices_of(p) if p.values == "float" else weight_of(p, around) for p in products)
    biases = [meta(p.num_experts, p.n, dtype=p.dtype) if draw.often(0.3) else None for p in products]
    experts = ops.ExpertWeights(gate_up, biases[0], down, biases[1], SILU)
    x = meta(first.tokens, first.k, dtype=first.dtype)
    index = meta(first.tokens, first.top_k, dtype=torch.int64)
    scores = meta(first.tokens, first.top_k, dtype=first.dtype)
    assert GPU.experts(x, index, scores, experts, first.invariant).shape == x.shape
    kernels = [choice.kernel for choice in choices]
    if kernels[0].whole:
        return list(kernels[0].launches)
    multiplies = []
    for product, kernel in zip(products, kernels, strict=True):
        names = list(kernel.launches)
        if kernel.name == "dequantise_experts":
            if not product.reads_float8:
                names.remove("_dequantize")
            names *= parts_of(product)
        multiplies += names
    return ["_sort_pairs", *["_list_tiles"] * any(kernel.listed for kernel in kernels), *multiplies, "_sum_experts"]


def parts_of(product: Product) -> int:
    """Into how many parts the experts are divided of which 512 MiB of matrices exist at a time."""
    most = (512 << 20) // (product.n * product.k * product.dtype.itemsize) // 4 * 4
    return -(-product.num_experts // most)


def has_tile(launched: Launched, choice: KernelChoice) -> bool:
    """Whether the sizes of a tile are among the constants of the last launch of its kernel."""
    constants = launched.constants.get(choice.kernel.launches[-1], ())
    if choice.kernel.name in ("expert_matrices", "invariant_wgmma"):
        return constants[0].tile == choice.tile
    if choice.kernel.name == "invariant_rows":  # a norm may need wider tiles
        return constants[0].tile.block_k == choice.tile.block_k
    sizes = [getattr(choice.tile, name, None) for name in ("block_m", "block_n", "splits")]
    return all(size in constants for size in sizes if size is not None)


@pytest.mark.slow
def test_what_the_table_says_is_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Draw(1)
    chosen = Counter[str]()
    for arch, gluon, num_sms in MACHINES:
        machine = {"arch": arch, "gluon": gluon, "num_sms": num_sms}
        monkeypatch.setattr(problem, "compiles_gluon", lambda gluon=gluon: gluon)
        with a_gpu(arch, num_sms), counted_launches() as launched:
            for call in range(CALLS // len(MACHINES) + 1):
                launched.clear()
                if call % 2:
                    if call % 4 == 1:
                        dense = draw_product(draw, machine)
                        around = Around.drawn(draw)
                    else:
                        dense = vary(dense, draw)
                    product = dense
                    choices = [select_kernel(product)]
                    expected = call_product(product, choices[0], around)
                else:
                    products = draw_experts(draw, machine)
                    choices = [select_kernel(each) for each in products]
                    product = products[0]
                    expected = call_experts(products, choices, draw)
                assert launched == expected, f"{product}: {[choice.kernel.name for choice in choices]}"
                assert has_tile(launched, choices[-1]), f"{product}: {choices[-1].tile}"
                chosen.update(choice.kernel.name for choice in choices)
    assert sum(chosen.values()) > CALLS
    assert set(chosen) == {kernel.name for kernel in KERNELS}, "each row of the table is met"
    for rare in ("invariant_wgmma", "invariant_rows"):  # products in deterministic mode on one kind of GPU
        chosen.pop(rare)
    assert min(chosen.values()) >= CALLS // 500, chosen
