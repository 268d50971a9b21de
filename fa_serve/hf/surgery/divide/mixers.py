"""How a module with a recurrent or convolution state is divided between ranks: by its heads, or by its channels.

    parts = divide_mixer(module, size=2)      # None for a module whose form is not known

transformers' plans leave such modules whole, or gather their outputs. Here a rank keeps the projections, the convolution and
the recurrence of some heads, with their states, and the outputs of the output projection are added up over the ranks. A head
has its own decay, state and output, so ranks exchange nothing before that sum, with two exceptions: the time steps, B and C of
Mamba are sums over all channels, and a gated norm over all heads needs the sum of the squares of all ranks.

The form of a module is recognised by its attributes. The proof in weights.py checks that the division is right. Left out:
attention and all other modules (plan.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fa_serve.hf.surgery.divide.sections import Section, equal_sections

Sections = tuple[Section, ...]


@dataclass(frozen=True, slots=True)
class MixerParts:
    """How a module is divided. Names are relative to the module. Names that it does not have are ignored.

    rows:    sections of the outputs of linear layers and convolutions, and of parameters and buffers
    columns: sections of the inputs of linear layers whose outputs are parts of a sum
    numbers: attributes that count heads or channels, with their values on a rank, by submodule ("" is the module itself)
    norms:   norms over the features of all ranks, with the number of these features
    """

    rows: dict[str, Sections]
    columns: dict[str, Sections]
    numbers: dict[str, dict[str, int]]
    norms: dict[str, int] = field(default_factory=dict)


def divide_mixer(module: nn.Module, size: int) -> MixerParts | None:
    """How a module of `find_state_modules` is divided between `size` ranks; None if its form is not known."""
    for names, form in FORMS.items():
        if all(hasattr(module, name) for name in names):
            parts: MixerParts = form(module, size)
            return parts
    return None


def _delta_net(module: Any, size: int) -> MixerParts:
    """A gated delta net (Qwen3-Next, Qwen 3.5, OLMo hybrid): values may have more heads than queries and keys.

    If there are fewer key heads than ranks, several ranks keep the same head. This is not possible if a projection groups its
    features by key head.
    """
    keys = Section(module.num_k_heads * module.head_k_dim, module.num_k_heads, shared=True)
    values = Section(module.num_v_heads * module.head_v_dim, module.num_v_heads)
    heads = Section(module.num_v_heads, module.num_v_heads)
    by_key_head = Section(2 * (keys.size + values.size), module.num_k_heads)
    mixed = (keys, keys, values)
    rows: dict[str, Sections] = {
        **dict.fromkeys(("in_proj_qkv", "conv1d"), mixed),
        **dict.fromkeys(("q_proj", "k_proj"), (keys,)),
        **dict.fromkeys(("v_proj", "g_proj", "in_proj_z"), (values,)),
        **dict.fromkeys(("a_proj", "b_proj", "in_proj_a", "in_proj_b", "A_log", "dt_bias"), (heads,)),
        "in_proj_qkvz": (by_key_head,),
        "in_proj_ba": (Section(2 * heads.size, module.num_k_heads),),
    }
    key_dim = keys.count(size) * module.head_k_dim
    value_dim = values.count(size) * module.head_v_dim
    numbers = {
        "num_k_heads": keys.count(size),
        "num_v_heads": values.count(size),
        "key_dim": key_dim,
        "value_dim": value_dim,
        "conv_dim": 2 * key_dim + value_dim,
    }
    return MixerParts(rows, dict.fromkeys(("out_proj", "o_proj"), (values,)), {"": numbers})


def _kimi_delta_attention(module: Any, size: int) -> MixerParts:
    """Kimi delta attention, with a gate for each channel. The first products of both gates are small and stay whole."""
    features = Section(module.num_heads * module.head_dim, module.num_heads)
    heads = Section(module.num_heads, module.num_heads)
    rows: dict[str, Sections] = {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "g_b_proj"), (features,)),
        **dict.fromkeys(("forget_gate.f_b_proj", "forget_gate.dt_bias"), (features,)),
        **dict.fromkeys(("b_proj", "forget_gate.A_log"), (heads,)),
        "conv1d": (features,) * 3,
    }
    qkv_dim = heads.count(size) * module.head_dim
    numbers = {"num_heads": heads.count(size), "qkv_dim": qkv_dim}
    return MixerParts(rows, {"o_proj": (features,)}, {"": numbers | {"conv_dim": 3 * qkv_dim}, "forget_gate": numbers})


def _mamba2(module: Any, size: int) -> MixerParts:
    """Mamba2: heads in groups that share B and C. If there are fewer groups than ranks, several ranks keep the same group."""
    inner = Section(module.num_heads * module.head_dim, module.num_heads)
    groups = Section(module.n_groups * module.ssm_state_size, module.n_groups, shared=True)
    heads = Section(module.num_heads, module.num_heads)
    merged = (inner, inner, groups, groups, heads)
    rows: dict[str, Sections] = {
        **dict.fromkeys(("in_proj", "mup_vector"), merged),
        **dict.fromkeys(("A_log", "D", "dt_bias"), (heads,)),
        "conv1d": (inner, groups, groups),
        "norm.weight": (inner,),
    }
    intermediate = heads.count(size) * module.head_dim
    states = groups.count(size) * module.ssm_state_size
    numbers = {
        "num_heads": heads.count(size),
        "n_groups": groups.count(size),
        "intermediate_size": intermediate,
        "conv_dim": intermediate + 2 * states,
        "groups_time_state_size": states,
    }
    norm_groups = _norm_groups(module)
    parts = MixerParts(rows, {"out_proj": (inner,)}, {"": numbers})
    if norm_groups == 1:
        parts.norms["norm"] = inner.size
    elif norm_groups:
        # each group belongs to one rank; otherwise planning the cut fails
        rows["norm.weight"] = (Section(inner.size, norm_groups),)
        parts.numbers["norm"] = {"n_groups": norm_groups // size}
    return parts


def _norm_groups(module: Any) -> int:
    """The number of groups of features that the gated norm of Mamba2 normalises separately; 0 without a norm."""
    norm = module.norm
    if getattr(norm, "weight", None) is None:
        return 0
    if hasattr(norm, "group_size"):
        return int(module.intermediate_size // norm.group_size)
    return int(getattr(norm, "n_groups", 1))


def _mamba(module: Any, size: int) -> MixerParts:
    """Mamba, in which each channel has its own state."""
    (inner,) = equal_sections(module.intermediate_size)
    rows: dict[str, Sections] = {
        **dict.fromkeys(("conv1d", "dt_proj", "A_log", "D"), (inner,)),
        "in_proj": (inner, inner),
    }
    numbers = {"intermediate_size": inner.count(size)}
    return MixerParts(rows, dict.fromkeys(("x_proj", "out_proj"), (inner,)), {"": numbers})


def _short_convolution(module: Any, size: int) -> MixerParts:
    """A gated convolution (LFM2), whose channels are independent."""
    (channels,) = equal_sections(module.conv.out_channels)
    return MixerParts({"in_proj": (channels,) * 3, "conv": (channels,)}, {"out_proj": (channels,)}, {})


def _lightning_attention(module: Any, size: int) -> MixerParts:
    """Lightning attention (MiniMax). A head's queries, keys and values are neighbours in one projection."""
    heads = Section(module.num_attention_heads, module.num_attention_heads)
    features = Section(module.num_attention_heads * module.head_dim, module.num_attention_heads)
    rows: dict[str, Sections] = {
        "qkv_proj": (features._replace(size=3 * features.size),),
        **dict.fromkeys(("output_gate", "norm.weight"), (features,)),
        **dict.fromkeys(("slope_rate", "query_decay", "key_decay", "diagonal_decay"), (heads,)),
    }
    numbers = {"num_attention_heads": heads.count(size)}
    return MixerParts(rows, {"out_proj": (features,)}, {"": numbers}, {"norm": features.size})


def _gated_linear_unit(module: Any, size: int) -> MixerParts:
    """A convolution and RG-LRU (RecurrentGemma), whose gates are products within heads."""
    unit = module.rg_lru
    heads = Section(unit.num_attention_heads, unit.num_attention_heads)
    channels = Section(module.lru_width, unit.num_attention_heads)
    gates = [f"rg_lru.{gate}_gate_{kind}" for gate in ("input", "recurrent") for kind in ("weight", "bias")]
    rows: dict[str, Sections] = {
        **dict.fromkeys(("linear_x", "linear_y", "conv_1d", "rg_lru.recurrent_param"), (channels,)),
        **dict.fromkeys(gates, (heads,)),
    }
    numbers = {"num_attention_heads": heads.count(size)}
    width = {"lru_width": heads.count(size) * unit.block_width}
    return MixerParts(rows, {"linear_out": (channels,)}, {"": width, "rg_lru": numbers})


FORMS = {
    ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim"): _delta_net,
    ("num_heads", "head_dim", "qkv_dim", "forget_gate"): _kimi_delta_attention,
    ("num_heads", "head_dim", "n_groups", "ssm_state_size", "in_proj", "norm"): _mamba2,
    ("intermediate_size", "in_proj", "x_proj", "dt_proj"): _mamba,
    ("conv", "in_proj", "out_proj"): _short_convolution,
    ("qkv_proj", "output_gate", "slope_rate"): _lightning_attention,
    ("conv_1d", "linear_x", "linear_y", "rg_lru"): _gated_linear_unit,
}
"""The functions that divide a module, by the attributes that the module must have."""
