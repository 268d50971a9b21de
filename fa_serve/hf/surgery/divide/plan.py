"""How the layers of a model are divided between the ranks of tensor parallelism: a plan, made only from shapes.

    division = plan_division(model, size=2)     # raises UnsupportedModelError, which names the layer and the rule
    for path, layer in division.layers.items():
        for name, cut in layer.cuts.items(): ...    # which rows or columns of the parameter a rank keeps

transformers' own plan (`base_model_tp_plan`) says which projections are divided by rows and which by columns. A product that is
divided by rows gives some of the features. The next product, divided by columns, takes these features and gives one part of a
sum, which is added up over the ranks. Where transformers gathers features because its code splits them afterwards (merged
projections, norms over all heads), they are divided by heads here, so ranks exchange no features. If there are fewer key and
value heads than ranks, several ranks keep the same head. If the size of the vocabulary is a multiple of the number of ranks,
each rank looks up some of the embeddings and computes some of the logits.

Modules that keep a recurrent or convolution state are divided by their own heads or channels (mixers.py). transformers has no
plan for most models with such modules. Other projections of these models are found by names that are usual in transformers.

Left out: dividing weights, and the proof that the plan is right for a kind of layer (weights.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from fa_serve.hf.adapter.probe import model_layers
from fa_serve.hf.adapter.state_modules import find_state_modules
from fa_serve.hf.surgery.divide.mixers import divide_mixer
from fa_serve.hf.surgery.divide.sections import Cut, Section, equal_sections
from fa_serve.hf.surgery.quantised.experts import QuantizedExperts
from fa_serve.hf.surgery.quantised.linear import QuantizedLinear
from fa_serve.spec import AttentionSpec, UnsupportedModelError

BY_ROWS = ("colwise", "colwise_gather_output", "colwise_rep", "packed_colwise")
"""Rules of transformers for weights whose rows (output features) are divided. Their names refer to columns of the transpose."""
BY_COLUMNS = ("rowwise", "rowwise_split_input", "rowwise_rep")
"""Rules for weights whose columns (input features) are divided, so that their products are parts of a sum."""
SUMMED = ("moe_tp_experts",)
"""Rules for modules, such as all experts of a layer, whose outputs are parts of a sum."""
WHOLE = ("replicated_with_grad_allreduce", "mla_kv_a_proj")
"""Rules for modules that every rank keeps whole. Among them is the projection to latent keys, which all heads share."""
USUAL = (
    {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"},
    {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "out_proj": "rowwise"},
    {"q_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"},
    {"q_b_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"},
    {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"},
    {"up_proj": "colwise", "down_proj": "rowwise"},
    {"w1": "colwise", "w3": "colwise", "w2": "rowwise"},
    {"input_linear": "packed_colwise", "output_linear": "rowwise"},
)
"""Rules for linear layers of modules without a plan. The first entry whose names all occur in the module is taken."""
USUAL_OF_EXPERTS = (
    {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"},
    {"up_proj": "colwise", "down_proj": "rowwise"},
)
"""Rules for modules of experts without a plan, whose matrices are parameters. From 5.25 on, transformers' plans have none."""


@dataclass(slots=True)
class LayerDivision:
    """How one decoder layer is divided. Names are relative to the layer.

    cuts:      cuts of parameters and buffers
    sums:      modules whose outputs are added up over the ranks
    once:      biases of such modules, which only rank 0 adds
    narrowed:  modules that need the features of all ranks: they are computed whole, and then their output is cut
    attention: attention modules, with the number of query heads and the number of key and value heads of a rank
    numbers:   other attributes of modules that count heads or channels, with their values on a rank
    norms:     norms that add up squares over all ranks, with the number of features of all ranks
    """

    cuts: dict[str, Cut] = field(default_factory=dict)
    sums: list[str] = field(default_factory=list)
    once: list[str] = field(default_factory=list)
    narrowed: dict[str, Cut] = field(default_factory=dict)
    attention: dict[str, tuple[int, int]] = field(default_factory=dict)
    numbers: dict[str, dict[str, int]] = field(default_factory=dict)
    norms: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Division:
    """How a model is divided.

    layers:     how each decoder layer is divided, by the path of the layer
    vocabulary: the cut of the embeddings and of the head; None if every rank keeps them whole
    """

    size: int
    layers: dict[str, LayerDivision]
    vocabulary: Cut | None


def plan_division(model: PreTrainedModel, size: int) -> Division:
    """How a causal model is divided between `size` ranks. The model may be on the meta device.

    Raises UnsupportedModelError, which names the layer and the rule, if it cannot be divided.
    """
    attention, states, indexers = model_layers(model.config)
    if indexers and size > 1:
        raise _refusal(model, size, "its queries choose keys by indexers, which cannot be divided")
    rules: dict[str, str] = model.tp_plan or {}
    if states:
        rules = usual_rules(model, rules) | rules
    elif rules:
        rules = rules_of_experts(model, rules) | rules
    mixers = set(find_state_modules(model)) if states else set()
    inside = {part for mixer in mixers for part in mixer.modules()}
    towers = _outside_of_language_model(model)
    # with states, layers are those of stacks with mixers: also layers that keep nothing of a sequence, but no layers of towers
    named = [_LAYER.match(name) for name, module in model.named_modules() if module in mixers]
    stacks = {found["stack"] for found in named if found is not None}
    specs = attention if states else dict(enumerate(attention.values()))
    layers: dict[str, LayerDivision] = {}
    try:
        for name, module in model.named_modules():
            found = _LAYER.match(name)
            if (
                found is None
                or module in towers
                or not (found["stack"] in stacks if states else int(found["number"]) < len(specs))
            ):
                continue  # not in a decoder layer: embeddings, the last norm, the head
            division = layers.setdefault(found["layer"], LayerDivision())
            planner = _Planner(model, division, specs.get(int(found["number"])), size)
            if module in mixers:
                planner.plan_mixer(name, found["rest"], module)
            elif module not in inside:
                planner.plan(name, found["rest"], module, rules)
        for path, layer in layers.items():
            _keep_normalised(layer, model.get_submodule(path))
    except _NotDivisible as error:
        raise _refusal(model, size, str(error)) from None
    if not any(layer.sums for layer in layers.values()):
        raise _refusal(model, size, "transformers has no tensor-parallel plan for its layers (base_model_tp_plan)")
    return Division(size, layers, _vocabulary(model, size))


def _outside_of_language_model(model: PreTrainedModel) -> set[nn.Module]:
    """The modules of a composite model outside of its language model, such as towers, which only rank 0 runs."""
    decoder = cast(Any, model).get_decoder()
    if not isinstance(decoder, nn.Module) or decoder is model:
        return set()
    return {*model.modules()} - {*decoder.modules()}


def usual_rules(model: PreTrainedModel, known: Mapping[str, str]) -> dict[str, str]:
    """Rules in the form of transformers' plans for modules that the plan does not mention, from the names of linear layers and
    experts. known: the plan"""
    rules: dict[str, str] = {}
    planned = {rule.rpartition(".")[0] for rule in known}
    for name, module in model.named_modules():
        general = _general(name)
        if general in planned:
            continue
        linears = {child for child, each in module.named_children() if isinstance(each, nn.Linear | QuantizedLinear)}
        found = next((usual for usual in USUAL if usual.keys() <= linears), {})
        rules |= {f"{general}.{child}": rule for child, rule in found.items()}
    return rules | rules_of_experts(model, known)


def rules_of_experts(model: PreTrainedModel, known: Mapping[str, str]) -> dict[str, str]:
    """Rules in the form of transformers' plans for modules of experts that the plan does not mention. known: the plan

    Experts that transformers' plan leaves whole in every release have other forms: matrices that are transposed, biases, or
    experts beside the matrices, whose outputs would be added up as well.
    """
    rules: dict[str, str] = {}
    planned = {rule.rpartition(".")[0] for rule in known}
    for name, module in model.named_modules():
        general = _general(name)
        usual = {} if general in planned or general in known else _usual_of_experts(module)
        if usual:
            rules |= {f"{general}.{child}": rule for child, rule in usual.items()} | {general: "moe_tp_experts"}
    return rules


def _usual_of_experts(module: nn.Module) -> dict[str, str]:
    """The rules for the matrices of a module of experts; none for other modules, and for experts in another form."""
    if isinstance(module, QuantizedExperts):
        return {} if module.gate_up_proj_bias is not None or module.is_transposed else USUAL_OF_EXPERTS[0]
    stacked = {name: each.shape for name, each in module.named_parameters(recurse=False) if each.dim() == 3}
    usual = next((usual for usual in USUAL_OF_EXPERTS if usual.keys() == stacked.keys()), {})
    if not usual or any(isinstance(each, nn.Identity) for each in module.children()):
        return {}
    first, down = (stacked[name] for name in usual)
    halves = 2 if "gate_up_proj" in usual else 1
    if (first[1], first[2]) != (halves * down[2], down[1]) or len([*module.parameters(recurse=False)]) > len(stacked):
        return {}
    if getattr(module, "is_concatenated", True):
        return usual
    return usual | {"gate_up_proj": "colwise"}  # rows of gate and of up in turns, so that any even part has whole pairs


def _vocabulary(model: PreTrainedModel, size: int) -> Cut | None:
    """How embeddings and head are divided; None unless both are plain, of the same size, and divisible."""
    embeddings: Any = model.get_input_embeddings()
    head: Any = cast(Any, model).get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None or not isinstance(embeddings, nn.Embedding):
        return None
    rows = head.out_features
    if embeddings.num_embeddings != rows or rows % size or not head.weight.is_floating_point():
        return None
    return Cut(0, equal_sections(rows))


def _refusal(model: PreTrainedModel, size: int, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{type(model).__name__} cannot be divided between {size} ranks: {reason}")


_LAYER = re.compile(r"(?P<layer>(?P<stack>.*?)\.(?P<number>\d+))\.(?P<rest>.+)")
"""Matches the name of a module in a layer, such as model.layers.3.mlp.up_proj, whose stack is model.layers."""


class _NotDivisible(Exception):
    """Why a layer cannot be divided."""


@dataclass(frozen=True, slots=True)
class _Planner:
    """Plans the modules of one layer. spec: the spec of the layer's attention; None for a layer without attention"""

    model: PreTrainedModel
    layer: LayerDivision
    spec: AttentionSpec | None
    size: int

    def plan(self, name: str, path: str, module: nn.Module, rules: dict[str, str]) -> None:
        """Plan one module. name: its full name; path: its name in the layer"""
        if isinstance(module, QuantizedExperts):
            self._plan_experts(name, path, module, rules)
            return
        rule = rules.get(_general(name))
        if rule in SUMMED:
            self.layer.sums.append(path)
        elif rule is not None and rule not in WHOLE:
            self._plan_linear(name, path, module, rule)
        for own, parameter in module.named_parameters(recurse=False):
            own_rule = rules.get(_general(f"{name}.{own}"))
            if own_rule in BY_ROWS and parameter.dim() > 1:
                rows = equal_sections(parameter.shape[-2], 2 if own_rule == "packed_colwise" else 1)
                self._cut(f"{name}.{own}", f"{path}.{own}", own_rule, parameter.dim() - 2, rows)
            elif own_rule in BY_ROWS:
                self._cut(f"{name}.{own}", f"{path}.{own}", own_rule, 0, self._rows(name, path, own_rule, len(parameter)))
            elif own_rule in BY_COLUMNS:
                self._cut(f"{name}.{own}", f"{path}.{own}", own_rule, parameter.dim() - 1, equal_sections(parameter.shape[-1]))
                if rule is None:  # a plan may name only the weights of experts, not their module (Qwen3-Omni)
                    self.layer.sums.append(path)
            elif own_rule is not None:
                raise _NotDivisible(f"the rule {own_rule!r} of {name}.{own} is not supported")

    def plan_mixer(self, name: str, path: str, module: nn.Module) -> None:
        """Plan a module that keeps a state, including its submodules. The arguments are those of `plan`."""
        parts = divide_mixer(module, self.size)
        if parts is None:
            raise _NotDivisible(f"{name} ({type(module).__name__}) keeps its state in a form that cannot be divided")
        rule = "by heads"
        for own, sections in parts.rows.items():
            found = _find(module, own)
            if isinstance(found, nn.Linear | QuantizedLinear | nn.Conv1d):
                self._cut(f"{name}.{own}", f"{path}.{own}.weight", rule, 0, sections)
                if found.bias is not None:
                    self._cut(f"{name}.{own}", f"{path}.{own}.bias", rule, 0, sections)
            elif isinstance(found, Tensor):
                rows = sum(section.size for section in sections)
                if rows not in found.shape:
                    raise _NotDivisible(f"{name}.{own} has the shape {tuple(found.shape)}, in which no dimension is {rows}")
                self._cut(f"{name}.{own}", f"{path}.{own}", rule, found.shape.index(rows), sections)
        for own, sections in parts.columns.items():
            found = _find(module, own)
            if found is not None:
                self._cut_columns(f"{name}.{own}", f"{path}.{own}", rule, found, sections)
        for own, numbers in parts.numbers.items():
            self.layer.numbers[f"{path}.{own}" if own else path] = numbers
        for own, features in parts.norms.items():
            self.layer.norms[f"{path}.{own}"] = features

    def _plan_experts(self, name: str, path: str, module: QuantizedExperts, rules: dict[str, str]) -> None:
        """Divide the width of every expert: each rank keeps some rows of gate and of up, and some columns of down."""
        kinds = [rules.get(_general(each)) for each in (name, f"{name}.gate_up_proj", f"{name}.down_proj")]
        if kinds[0] not in SUMMED or kinds[1:] != ["packed_colwise", "rowwise"] or module.gate_up_proj_bias is not None:
            rule = "transformers' plan must divide their width, and they must have no biases"
            raise _NotDivisible(f"{name} has quantised experts ({module.description}), which cannot be divided: {rule}")
        self.layer.sums.append(path)
        self._cut(name, f"{path}.gate_up_proj", "packed_colwise", 1, equal_sections(2 * module.width, 2))
        columns = Cut(2, equal_sections(module.width))
        self._cut(name, f"{path}.down_proj", "rowwise", *columns)
        self._check_groups(f"{name}.down_proj", "rowwise", module, columns)

    def _plan_linear(self, name: str, path: str, module: Any, rule: str) -> None:
        if rule not in BY_ROWS + BY_COLUMNS:
            raise _NotDivisible(f"the rule {rule!r} of {name} is not supported")
        plain = type(module) is nn.Linear and module.weight.is_floating_point()
        if not (plain or isinstance(module, QuantizedLinear)):
            raise _NotDivisible(
                f"{name} must be an nn.Linear of floats, or quantised in a format that fa_serve loads, for the rule {rule!r}, "
                f"got {type(module).__name__}"
            )
        bias = module.bias is not None
        if rule in BY_ROWS:
            sections = self._rows(name, path, rule, module.out_features)
            self._cut(name, f"{path}.weight", rule, 0, sections)
            if bias:
                self._cut(name, f"{path}.bias", rule, 0, sections)
            return
        self._cut_columns(name, path, rule, module, self._columns(name, path, module.in_features))

    def _cut_columns(self, name: str, path: str, rule: str, module: Any, sections: tuple[Section, ...]) -> None:
        """Divide a linear layer by its input features, so that its outputs are parts of a sum."""
        self._cut(name, f"{path}.weight", rule, 1, sections)
        if isinstance(module, QuantizedLinear):
            self._check_groups(name, rule, module, Cut(1, sections))
        self.layer.sums.append(path)
        if module.bias is not None:
            self.layer.once.append(f"{path}.bias")

    def _check_groups(self, name: str, rule: str, module: QuantizedLinear | QuantizedExperts, cut: Cut) -> None:
        """Check that columns which share a scale stay together. Rows may be divided anywhere: each row has its own scales."""
        if module.scheme.ordered:
            reason = "their groups are in the order of the activations (act-order)"
            raise _NotDivisible(f"the columns of {name} (rule {rule!r}) cannot be divided: {reason}")
        group = module.scheme.columns_of_group
        borders = {start for rank in range(self.size) for start, _ in cut.ranges(rank, self.size)}
        if group and any(border % group for border in borders):
            raise _NotDivisible(
                f"the {cut.sections[0].size} columns of {name} (rule {rule!r}) cannot be divided by {self.size}: "
                f"{group} columns share a scale ({module.description})"
            )

    def _rows(self, name: str, path: str, rule: str, rows: int) -> tuple[Section, ...]:
        """How output features are divided: by heads in attention, and in two halves where gate and up are merged."""
        if not self._is_attention(name, path):
            merged = rule == "colwise_gather_output" and path.endswith("gate_up_proj")
            return equal_sections(rows, *((2,) if merged or rule == "packed_colwise" else ()))
        spec = self._attention_of(name)
        q = Section(spec.num_heads * spec.head_dim, spec.num_heads)
        k = Section(spec.num_kv_heads * spec.head_dim, spec.num_kv_heads, shared=True)
        v = Section(spec.num_kv_heads * spec.head_dim_v, spec.num_kv_heads, shared=True)
        parent = path.rpartition(".")[0]
        self.layer.attention[parent] = (spec.num_heads // self.size, max(spec.num_kv_heads // self.size, 1))
        if rows in (q.size, spec.num_heads) or (path.endswith("q_proj") and rows % spec.num_heads == 0):
            # queries, one number for each head, or queries each with a gate
            return (q._replace(size=rows),)
        if rows in (k.size, v.size):
            return (k._replace(size=rows),)
        if rows == q.size + k.size + v.size:
            return q, k, v
        if path.endswith("kv_b_proj") and rows % spec.num_heads == 0:
            return (q._replace(size=rows),)  # keys and values of each head, computed from latent vectors
        raise _NotDivisible(
            f"the {rows} rows of {name} (rule {rule!r}) match neither queries, keys or values nor all three together"
        )

    def _columns(self, name: str, path: str, columns: int) -> tuple[Section, ...]:
        if not self._is_attention(name, path):
            return equal_sections(columns)
        heads = self._attention_of(name).num_heads
        return (Section(columns, heads),) if columns % heads == 0 else equal_sections(columns)

    def _is_attention(self, name: str, path: str) -> bool:
        """Whether a projection belongs to attention: by its path, or because there is a q_proj next to it."""
        if "attn" in path or "attention" in path:
            return True
        return hasattr(self.model.get_submodule(name.rpartition(".")[0]), "q_proj")

    def _attention_of(self, name: str) -> AttentionSpec:
        if self.spec is None:
            raise _NotDivisible(f"{name} looks like a projection of attention, but its layer computes no attention")
        return self.spec

    def _cut(self, name: str, path: str, rule: str, dim: int, sections: tuple[Section, ...]) -> None:
        for section in sections:
            if not section.divides(self.size):
                units = f"{section.units} heads" if section.units != section.size else f"{section.size} rows or columns"
                raise _NotDivisible(f"the {units} of {name} (rule {rule!r}) cannot be divided by {self.size}")
        self.layer.cuts[path] = Cut(dim, sections)


def _keep_normalised(layer: LayerDivision, module: nn.Module) -> None:
    """Keep projections whole whose outputs are normalised over all heads, and cut the output of the norm instead."""
    for path in layer.attention:
        attention = module.get_submodule(path)
        for kind in ("q", "k"):
            weight = getattr(getattr(attention, f"{kind}_norm", None), "weight", None)
            cut = layer.cuts.get(f"{path}.{kind}_proj.weight")
            if weight is not None and cut is not None and weight.numel() == cut.sections[0].size:
                del layer.cuts[f"{path}.{kind}_proj.weight"]
                layer.cuts.pop(f"{path}.{kind}_proj.bias", None)
                layer.narrowed[f"{path}.{kind}_norm"] = Cut(-1, cut.sections)


def _find(module: nn.Module, name: str) -> Any:
    """A submodule, parameter or buffer by its name; None if there is none."""
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _general(name: str) -> str:
    """A name in the form of transformers' plan: layers.*.mlp for layers.3.mlp."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
