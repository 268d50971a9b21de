"""The product of one token on Hopper: what is requested before the kernel waits for the one before it."""

from __future__ import annotations

import pytest
import torch
from cross_compile import compiling_for

from fa_serve.ops.products.problem import Details, Product
from fa_serve.ops.products.row import plan_row
from fa_serve.ops.products.tiles import matrix_row_tile

REQUEST = "cp.async.bulk.prefetch.L2.global"
WAIT = "griddepcontrol.wait"


def ptx(n: int, k: int, *, gated: bool = False) -> str:
    kind = torch.bfloat16
    product = Product(values="float", n=n, k=k, tokens=1, dtype=kind, matrix_dtype=kind, gated=gated, arch=90)
    x = torch.zeros(1, k, dtype=torch.bfloat16)
    weight = torch.zeros(n, k, dtype=torch.bfloat16)
    with compiling_for("sm90") as kernels:
        multiply = plan_row(product, matrix_row_tile(product), Details())
        multiply(x, weight, None, None, None)
    [kernel] = kernels
    assert kernel.spill_bytes == 0
    return str(kernel.binary.asm["ptx"])


@pytest.mark.parametrize(
    ("n", "k", "gated", "requests"), [(1024, 3072, False, 1), (2048, 2048, True, 2), (4096, 4096, False, 0)]
)
def test_a_small_weight_is_requested_while_the_previous_kernel_runs(n: int, k: int, gated: bool, requests: int) -> None:
    text = ptx(n, k, gated=gated)
    before, wait, after = text.partition(WAIT)
    assert wait
    assert before.count(REQUEST) == requests
    assert REQUEST not in after
