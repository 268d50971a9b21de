"""Forwards that are written here, for modules of transformers whose own code holds a recurrence inline.

    written = written_recurrence(names)          # names: what a module's own forward reads; None for all other modules
    out = written.forward(module, *args, **kwargs, compute=compute)

Most modules call their recurrence as a function, which `PatchedMixer` exchanges by its name (state_modules.py). Some compute it
in a loop of their forward, so that nothing can be exchanged. For these, the table `WRITTEN` has a forward that does what the
module's own one does, and computes the recurrence by `compute`, as an exchanged function would. A module is recognised by the
attributes that its own forward reads, and surgery/states.py proves that the forward written here computes the same.

| recurrence | models | where `generate` keeps the states |
|---|---|---|
| lightning attention | MiniMax | in the cache, by `set_linear_cache` |
| short convolution and RG-LRU | RecurrentGemma | in attributes of the modules |

Left out: modules that call functions (state_modules.py), and the recurrences themselves (ops/linear_attention).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.integrations.accelerate import force_accelerate_hooks

from fa_serve.hf.adapter.packs import packs_of_states
from fa_serve.hf.adapter.releases import CACHE_NAMES
from fa_serve.hf.adapter.step_cache import CONVOLUTION, LIGHTNING_ATTENTION, RG_LRU, Compute, StateCall
from fa_serve.spec import UnsupportedModelError

FORGETS_ALL = -1000.0
"""A log gate whose exponential is 0 in float32 and float64, and that kernels can still add."""


class WrittenRecurrence(NamedTuple):
    """A forward for modules whose own code holds a recurrence inline.

    names:   attributes that the own forward of such a module reads
    forward: (module, *args, compute=..., **kwargs) -> what the module's own forward returns
    widen:   computes tables of a float32 copy of the module again, because its own code multiplies by them, and they may have
             been rounded
    """

    names: frozenset[str]
    forward: Callable[..., Any]
    widen: Callable[[Any], None] | None = None


def written_recurrence(names: Set[str]) -> WrittenRecurrence | None:
    """The forward for a module whose own forward reads these names, or None."""
    return next((written for written in WRITTEN if written.names <= names), None)


def _lightning_attention(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: Any = None,
    attention_mask: Tensor | None = None,
    *,
    compute: Compute,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """MiniMax's lightning attention. hidden_states: (batch, seqlen, hidden); attention_mask: (batch, seqlen), 0 is padding"""
    mixed = module.act_fn(module.qkv_proj(hidden_states))
    if attention_mask is not None:
        mixed = (mixed * attention_mask[:, :, None]).to(mixed.dtype)
    heads = mixed.unflatten(-1, (module.num_attention_heads, 3, module.head_dim))
    # kernels read rows of heads that follow each other: one copy here, instead of one for each of queries, keys and values
    rows = dict(zip("qkv", heads.transpose(-3, -2).contiguous().unbind(-3), strict=True))
    cache = next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)
    before = None if cache is None else cache.get_linear_cache(module.layer_idx)
    rates = module.slope_rate.flatten()
    decay = -rates.to(torch.promote_types(rates.dtype, torch.float32))
    out, state = compute(StateCall(LIGHTNING_ATTENTION, rows, {"log_decay": decay}), before, True)
    out = module.norm(out.flatten(2))
    out = module.out_proj(torch.sigmoid(module.output_gate(hidden_states)) * out)
    if cache is not None:
        cache.set_linear_cache(module.layer_idx, state)
    return out, state


def _widen_decays(module: Any) -> None:
    """Compute the tables of decays again from the rates. A proof on short sequences reads only parts of them, so they are
    compared with what the module had, which bfloat16 may have rounded, also in a checkpoint that is loaded in float32.

    Raises UnsupportedModelError if the module's tables are not those of its rates.
    """
    with module.slope_rate.device:  # the module's code makes its positions on the default device
        factors = module.decay_factors(module.slope_rate)
    for name, table in zip(("query_decay", "key_decay", "diagonal_decay"), factors, strict=True):
        rounded = getattr(module, name)
        if rounded.shape != table.shape or (rounded - table).abs().max() > 2 * torch.finfo(torch.bfloat16).eps:
            raise UnsupportedModelError(f"its {name} is not that of its slope_rate")
        rounded.copy_(table)


@force_accelerate_hooks(["conv_1d", "rg_lru"])  # their weights are read, and they are not called
def _recurrent_block(
    module: Any,
    input_states: Tensor,
    position_ids: Tensor,
    attention_mask: Any = None,
    use_cache: bool = True,
    *,
    compute: Compute,
    **unused: Any,
) -> tuple[Tensor, None]:
    """RecurrentGemma's block: a short convolution, and RG-LRU. A position of 0 begins a sequence.

    As in the module's own code, only a single token goes on with the inputs of the convolution before it.
    """
    unit = module.rg_lru
    decodes = bool(use_cache) and position_ids.shape[1] == 1
    kept = module.conv1d_state
    if not use_cache or kept is None or len(kept) != len(input_states) or packs_of_states() is not None:
        module.conv1d_state = None
        unit.recurrent_states = None
    before = module.conv1d_state.mT if decodes and module.conv1d_state is not None else None
    fixed = {"weight": module.conv_1d.weight[:, 0], "bias": module.conv_1d.bias, "activation": None}
    call = StateCall(CONVOLUTION, {"x": module.linear_x(input_states)}, fixed)
    mixed, conv_state = compute(call, before, bool(use_cache))
    call = StateCall(RG_LRU, _gated_inputs(unit, mixed, position_ids[:, :, None] == 0), {})
    out, state = compute(call, unit.recurrent_states, bool(use_cache))
    if use_cache:
        module.conv1d_state = None if conv_state is None else conv_state.mT
        unit.recurrent_states = state
    return module.linear_out(out * module.act_fn(module.linear_y(input_states))), None


def _gated_inputs(unit: Any, activations: Tensor, begins: Tensor) -> dict[str, Tensor]:
    """The inputs and the log gates of RG-LRU. activations: (batch, seqlen, channels); begins: (batch, seqlen, 1)"""
    blocks = activations.reshape(-1, unit.num_attention_heads, unit.block_width).transpose(0, 1)

    def gate(weight: Tensor, bias: Tensor) -> Tensor:
        product = torch.baddbmm(bias[:, None], blocks, weight)
        return torch.sigmoid(product.transpose(0, 1).reshape(activations.shape))

    inputs = activations * gate(unit.input_gate_weight, unit.input_gate_bias)
    forgets = gate(unit.recurrent_gate_weight, unit.recurrent_gate_bias)
    log_gates = -8.0 * forgets * nn.functional.softplus(unit.recurrent_param)
    # the square root of the module's own code, whose gradient is bounded
    root = inspect.unwrap(type(unit).forward).__globals__["SqrtBoundDerivative"].apply
    factors = torch.where(begins, 1.0, root(1 - torch.exp(2 * log_gates)))
    return {"x": inputs * factors.to(inputs.dtype), "log_a": log_gates.masked_fill(begins, FORGETS_ALL)}


WRITTEN = (
    WrittenRecurrence(
        frozenset({"qkv_proj", "output_gate", "slope_rate", "query_decay", "key_decay", "diagonal_decay", "get_linear_cache"}),
        _lightning_attention,
        _widen_decays,
    ),
    WrittenRecurrence(frozenset({"linear_x", "linear_y", "conv_1d", "conv1d_state", "rg_lru"}), _recurrent_block),
)
"""The forwards that are written here."""
