"""The product of one token: what is requested before the kernel waits for the one before it."""

from __future__ import annotations

import pytest
import torch
from cross_compile import compiling_for

from fa_serve.ops.products.problem import Details, Product
from fa_serve.ops.products.row import plan_row
from fa_serve.ops.products.tiles import matrix_row_tile

REQUEST = "cp.async.bulk.prefetch.L2.global"
WAIT = "griddepcontrol.wait"


def ptx(n: int, k: int, *, gated: bool = False, target: str = "sm90") -> str:
    kind = torch.bfloat16
    arch = int(target.removeprefix("sm"))
    product = Product(values="float", n=n, k=k, tokens=1, dtype=kind, matrix_dtype=kind, gated=gated, arch=arch)
    x = torch.zeros(1, k, dtype=torch.bfloat16)
    weight = torch.zeros(n, k, dtype=torch.bfloat16)
    with compiling_for(target) as kernels:
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


@pytest.mark.parametrize(("target", "requests"), [("sm80", 0), ("sm100", 1), ("sm120", 1)])
def test_where_launches_are_programmatic_small_weights_are_requested(target: str, requests: int) -> None:
    assert ptx(1024, 3072, target=target).count(REQUEST) == requests
