"""The backend of ops for GPUs: each op is one Triton kernel, except products of several tokens and experts.

Each kernel stands with its launcher in a file `*_kernel.py`. A launcher keeps what it decides about a call (grid, blocks,
strides) in `PLANS`, by those facts of the tensors that decide it; calls that look alike compute it once.
"""

from __future__ import annotations

from torch import Tensor

from fa_serve.ops.elementwise.activation import launch_act_and_mul
from fa_serve.ops.elementwise.addition import launch_add
from fa_serve.ops.elementwise.norm import launch_rms_norm
from fa_serve.ops.elementwise.rotary import launch_rotary_store_kv
from fa_serve.ops.elementwise.rotary_latent import launch_rotary_store_latent
from fa_serve.ops.experts.kernel import launch_experts
from fa_serve.ops.experts.routing import launch_route
from fa_serve.ops.ops_backend import Norm, RoundedRows, Weight
from fa_serve.ops.products.quantised.product import dequantize, gated, quantized_linear
from fa_serve.ops.products.quantised.weight import QuantizedWeight
from fa_serve.ops.products.row import launch_linear_row
from fa_serve.ops.products.row_invariant import launch_invariant_linear, launch_invariant_sum
from fa_serve.ops.sampling.kernel import launch_sample_rows
from fa_serve.ops.torch_ops import product
from fa_serve.spec import OpSpec


class TritonOps:
    """The arguments are documented in `fa_serve.ops`."""

    name = "triton"
    rms_norm = staticmethod(launch_rms_norm)
    rotary_store_kv = staticmethod(launch_rotary_store_kv)
    rotary_store_latent = staticmethod(launch_rotary_store_latent)
    act_and_mul = staticmethod(launch_act_and_mul)
    add = staticmethod(launch_add)
    sample_rows = staticmethod(launch_sample_rows)
    route = staticmethod(launch_route)
    experts = staticmethod(launch_experts)
    invariant_sum = staticmethod(launch_invariant_sum)

    def supports(self, spec: OpSpec) -> str | None:
        return None if spec.device == "cuda" else f"runs on CUDA and ROCm devices only, got {spec.device!r}"

    def linear(
        self,
        x: Tensor | RoundedRows,
        weight: Weight,
        bias: Tensor | None,
        norm: Norm | None,
        activation: str | None,
        residual: Tensor | None,
        alpha: float,
        next_weight: Weight | None,
        /,
    ) -> Tensor | RoundedRows:
        if isinstance(weight, QuantizedWeight):
            return quantized_linear(x, weight, bias, norm, activation, residual, alpha, next_weight)
        assert isinstance(x, Tensor), "only products with float8 weights take rounded rows"
        if x.shape[0] == 1:
            return launch_linear_row(x, weight, bias, norm, activation, residual, alpha)
        if norm is not None:
            x = launch_rms_norm(x, norm, None, None)
        y = product(x, weight, bias, residual, alpha)
        return y if activation is None else gated(y, activation, next_weight)

    def invariant_linear(self, x: Tensor, weight: Weight, bias: Tensor | None, /) -> Tensor:
        matrix = dequantize(weight, x.dtype) if isinstance(weight, QuantizedWeight) else weight
        return launch_invariant_linear(x, matrix, bias)
