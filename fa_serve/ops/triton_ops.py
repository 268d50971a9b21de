"""The backend of ops for GPUs: most ops are one Triton kernel; products of several tokens, adapters and experts may take more.

Each kernel is next to its launcher. The launcher keeps what it decides about a call (grid, blocks, strides) in `PLANS`, under
the facts about the tensors on which this depends, so that calls that look alike decide only once. Products and experts have a
table of kernels (products/table.py), and one launcher each (products/run.py, moe/run.py).
"""

from __future__ import annotations

from torch import Tensor

from fa_serve.ops.elementwise.activation import launch_act, launch_act_and_mul
from fa_serve.ops.elementwise.addition import launch_add, launch_add_gated
from fa_serve.ops.elementwise.attention_parts import launch_merge_attention
from fa_serve.ops.elementwise.delta_inputs import launch_ungroup_delta_inputs
from fa_serve.ops.elementwise.gates import launch_delta_gates, launch_gate_heads
from fa_serve.ops.elementwise.gradients import (
    launch_act_and_mul_backward,
    launch_rms_norm_backward,
    launch_rotary_backward,
)
from fa_serve.ops.elementwise.norm import launch_layer_norm, launch_rms_norm
from fa_serve.ops.elementwise.rotary import launch_rotary_store_kv
from fa_serve.ops.elementwise.rotary_latent import launch_rotary_store_latent
from fa_serve.ops.elementwise.rotary_tables import launch_rotary_tables
from fa_serve.ops.elementwise.row_copies import launch_move_rows
from fa_serve.ops.lora.kernel import launch_add_lora
from fa_serve.ops.lora.problem import LoraBatch, LoraWeights
from fa_serve.ops.lora.run import merged_linear_lora
from fa_serve.ops.lora.separate import separate_linear_lora
from fa_serve.ops.moe.routing import launch_route
from fa_serve.ops.moe.run import compute_experts
from fa_serve.ops.ops_backend import Norm, Weight
from fa_serve.ops.products.row_invariant import launch_invariant_sum
from fa_serve.ops.products.run import multiply, multiply_invariant
from fa_serve.ops.sampling.kernel import launch_sample_rows
from fa_serve.ops.selected_keys.attention import launch_sparse_attention
from fa_serve.ops.selected_keys.scores import launch_select_slots
from fa_serve.spec import OpSpec


class TritonOps:
    """The arguments are documented in `fa_serve.ops`."""

    name = "triton"
    rms_norm = staticmethod(launch_rms_norm)
    layer_norm = staticmethod(launch_layer_norm)
    rotary_store_kv = staticmethod(launch_rotary_store_kv)
    rotary_store_latent = staticmethod(launch_rotary_store_latent)
    act = staticmethod(launch_act)
    act_and_mul = staticmethod(launch_act_and_mul)
    rotary_tables = staticmethod(launch_rotary_tables)
    gate_heads = staticmethod(launch_gate_heads)
    delta_gates = staticmethod(launch_delta_gates)
    ungroup_delta_inputs = staticmethod(launch_ungroup_delta_inputs)
    add = staticmethod(launch_add)
    add_gated = staticmethod(launch_add_gated)
    merge_attention = staticmethod(launch_merge_attention)
    move_rows = staticmethod(launch_move_rows)
    sample_rows = staticmethod(launch_sample_rows)
    route = staticmethod(launch_route)
    experts = staticmethod(compute_experts)
    add_lora = staticmethod(launch_add_lora)
    linear = staticmethod(multiply)
    invariant_linear = staticmethod(multiply_invariant)
    invariant_sum = staticmethod(launch_invariant_sum)
    sparse_attention = staticmethod(launch_sparse_attention)
    select_slots = staticmethod(launch_select_slots)
    rms_norm_backward = staticmethod(launch_rms_norm_backward)
    act_and_mul_backward = staticmethod(launch_act_and_mul_backward)
    rotary_backward = staticmethod(launch_rotary_backward)

    def linear_lora(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        weights: LoraWeights,
        batch: LoraBatch,
        norm: Norm | None,
        activation: str | None,
        residual: Tensor | None,
        alpha: float,
        /,
    ) -> Tensor:
        y = merged_linear_lora(x, weight, bias, weights, batch, norm, activation, residual, alpha)
        if y is not None:
            return y
        return separate_linear_lora(self, x, weight, bias, weights, batch, norm, activation, residual, alpha)

    def supports(self, spec: OpSpec) -> str | None:
        return None if spec.device == "cuda" else f"runs on CUDA and ROCm devices only, got {spec.device!r}"
