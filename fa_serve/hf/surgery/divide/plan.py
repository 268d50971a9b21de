"""How the layers of a model are divided between the ranks of tensor parallelism: a plan, made from shapes alone.

    division = plan_division(model, size=2)     # raises UnsupportedModelError that names the layer and the rule
    for path, layer in division.layers.items():
        for name, cut in layer.cuts.items(): ...    # which rows or columns of the parameter a rank keeps

transformers' own plan (`base_model_tp_plan`) says which projections are divided by rows and which by columns. A product by rows
gives some of the features, and a product by columns that takes them gives one part of a sum, which is added up over the ranks.
What transformers gathers because its code cuts features apart (merged projections, norms over all heads) is divided here by
heads instead, so no features travel. Key and value heads that are fewer than the ranks are repeated. If the size of the
vocabulary is a multiple of the number of ranks, a rank looks up some of the embeddings and computes some of the logits.

Left out: dividing weights, and the proof that the plan is right for a kind of layer (weights.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from fa_serve.hf.adapter.probe import model_layers
from fa_serve.hf.surgery.quantised.experts import QuantizedExperts
from fa_serve.hf.surgery.quantised.linear import QuantizedLinear
from fa_serve.spec import AttentionSpec, UnsupportedModelError

BY_ROWS = ("colwise", "colwise_gather_output", "colwise_rep", "packed_colwise")
"""Rules of transformers for weights whose rows, the output features, are divided. It calls them columns of the transpose."""
BY_COLUMNS = ("rowwise", "rowwise_split_input", "rowwise_rep")
"""Rules for weights whose columns, the input features, are divided, so that their products are parts of a sum."""
SUMMED = ("moe_tp_experts",)
"""Rules for modules, such as all experts of a layer, whose outputs are parts of a sum."""
WHOLE = ("replicated_with_grad_allreduce", "mla_kv_a_proj")
"""Rules for modules that every rank keeps whole. Latent keys are those of all heads."""


class Section(NamedTuple):
    """Consecutive rows or columns that are divided.

    size:   number of rows or columns
    units:  parts that stay together, such as heads
    shared: several ranks may keep the same unit if there are fewer units than ranks
    """

    size: int
    units: int
    shared: bool = False


class Cut(NamedTuple):
    """What the ranks keep of a tensor: some of each section, along one dimension."""

    dim: int
    sections: tuple[Section, ...]

    def ranges(self, rank: int, size: int) -> list[tuple[int, int]]:
        """(start, length) of the part of each section that a rank keeps."""
        found = []
        start = 0
        for section in self.sections:
            width = section.size // section.units
            count = max(section.units // size, 1)
            first = rank * section.units // size
            found.append((start + first * width, count * width))
            start += section.size
        return found

    def kept(self, tensor: Tensor, rank: int, size: int) -> list[Tensor]:
        """Views of what a rank keeps."""
        return [tensor.narrow(self.dim, start, length) for start, length in self.ranges(rank, size)]


@dataclass(slots=True)
class LayerDivision:
    """What is done to one decoder layer. Names are relative to it.

    cuts:      of parameters
    sums:      modules whose outputs are added up over the ranks
    once:      biases of such modules, which only rank 0 adds
    narrowed:  modules whose output is cut, because they need the features of all ranks
    attention: modules that count their heads, with the numbers of query heads and of key and value heads of a rank
    """

    cuts: dict[str, Cut] = field(default_factory=dict)
    sums: list[str] = field(default_factory=list)
    once: list[str] = field(default_factory=list)
    narrowed: dict[str, Cut] = field(default_factory=dict)
    attention: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Division:
    """How a model is divided.

    layers:     by the path of the decoder layer
    vocabulary: of the embeddings and of the head; None if every rank keeps them whole
    """

    size: int
    layers: dict[str, LayerDivision]
    vocabulary: Cut | None


def plan_division(model: PreTrainedModel, size: int) -> Division:
    """How a causal model is divided between `size` ranks. The model may be on the meta device.

    Raises UnsupportedModelError, which names the layer and the rule, if it cannot be divided.
    """
    rules: dict[str, str] = model.tp_plan or {}
    attention, states, indexers = model_layers(model.config)
    if states:
        raise _refusal(model, size, "it keeps recurrent or convolution states, whose layers are not divided")
    if indexers and size > 1:
        raise _refusal(model, size, "its queries choose keys by indexers, which are not divided")
    specs = list(attention.values())
    layers: dict[str, LayerDivision] = {}
    try:
        for name, module in model.named_modules():
            found = re.match(r"(.*?\.(\d+))\.(.+)", name)
            if found is None or int(found[2]) >= len(specs):
                continue  # outside of the layers: embeddings, the last norm, the head
            planner = _Planner(layers.setdefault(found[1], LayerDivision()), specs[int(found[2])], size)
            planner.plan(name, found[3], module, rules)
        for path, layer in layers.items():
            _keep_normalised(layer, model.get_submodule(path))
    except _NotDivisible as error:
        raise _refusal(model, size, str(error)) from None
    if not any(layer.sums for layer in layers.values()):
        raise _refusal(model, size, "transformers has no tensor-parallel plan for its layers (base_model_tp_plan)")
    return Division(size, layers, _vocabulary(model, size))


def _vocabulary(model: PreTrainedModel, size: int) -> Cut | None:
    """How embeddings and head are divided, if both are plain and of the same size."""
    embeddings: Any = model.get_input_embeddings()
    head: Any = cast(Any, model).get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None or not isinstance(embeddings, nn.Embedding):
        return None
    rows = head.out_features
    if embeddings.num_embeddings != rows or rows % size or not head.weight.is_floating_point():
        return None
    return Cut(0, _equal(rows))


def _refusal(model: PreTrainedModel, size: int, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{type(model).__name__} cannot be divided between {size} ranks: {reason}")


class _NotDivisible(Exception):
    """Why a layer cannot be divided."""


@dataclass(frozen=True, slots=True)
class _Planner:
    """Plans the modules of one layer. spec: what the layer asks of attention"""

    layer: LayerDivision
    spec: AttentionSpec
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
                halves = (2,) if own_rule == "packed_colwise" else ()
                self._cut(f"{name}.{own}", f"{path}.{own}", own_rule, parameter.dim() - 2, _equal(parameter.shape[-2], *halves))
            elif own_rule in BY_ROWS:
                self._cut(f"{name}.{own}", f"{path}.{own}", own_rule, 0, self._rows(name, path, own_rule, len(parameter)))
            elif own_rule in BY_COLUMNS:
                self._cut(f"{name}.{own}", f"{path}.{own}", own_rule, parameter.dim() - 1, _equal(parameter.shape[-1]))
            elif own_rule is not None:
                raise _NotDivisible(f"the rule {own_rule!r} of {name}.{own} is not supported")

    def _plan_experts(self, name: str, path: str, module: QuantizedExperts, rules: dict[str, str]) -> None:
        """Every rank keeps some of the width of every expert: rows of the gate and of up, and columns of down."""
        kinds = [rules.get(_general(each)) for each in (name, f"{name}.gate_up_proj", f"{name}.down_proj")]
        if kinds[0] not in SUMMED or kinds[1:] != ["packed_colwise", "rowwise"] or module.gate_up_proj_bias is not None:
            rule = "transformers' plan must divide their width, and they must have no biases"
            raise _NotDivisible(f"{name} has quantised experts ({module.description}), which are not divided: {rule}")
        self.layer.sums.append(path)
        self._cut(name, f"{path}.gate_up_proj", "packed_colwise", 1, _equal(2 * module.width, 2))
        columns = Cut(2, _equal(module.width))
        self._cut(name, f"{path}.down_proj", "rowwise", *columns)
        self._check_groups(f"{name}.down_proj", "rowwise", module, columns)

    def _plan_linear(self, name: str, path: str, module: Any, rule: str) -> None:
        if rule not in BY_ROWS + BY_COLUMNS:
            raise _NotDivisible(f"the rule {rule!r} of {name} is not supported")
        plain = type(module) is nn.Linear and module.weight.is_floating_point()
        if not (plain or isinstance(module, QuantizedLinear)):
            raise _NotDivisible(
                f"{name} must be an nn.Linear of floats, or be quantised in a format of fa_serve, for the rule {rule!r}, "
                f"got {type(module).__name__}"
            )
        bias = module.bias is not None
        if rule in BY_ROWS:
            sections = self._rows(name, path, rule, module.out_features)
            self._cut(name, f"{path}.weight", rule, 0, sections)
            if bias:
                self._cut(name, f"{path}.bias", rule, 0, sections)
            return
        sections = self._columns(path, module.in_features)
        self._cut(name, f"{path}.weight", rule, 1, sections)
        if isinstance(module, QuantizedLinear):
            self._check_groups(name, rule, module, Cut(1, sections))
        self.layer.sums.append(path)
        if bias:
            self.layer.once.append(f"{path}.bias")

    def _check_groups(self, name: str, rule: str, module: QuantizedLinear | QuantizedExperts, cut: Cut) -> None:
        """Columns that share a scale stay together. Rows may be divided anywhere, because each has separate scales."""
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
        """How output features are divided: by heads in attention, in two halves where a gate and its values are merged."""
        spec = self.spec
        q = Section(spec.num_heads * spec.head_dim, spec.num_heads)
        k = Section(spec.num_kv_heads * spec.head_dim, spec.num_kv_heads, shared=True)
        v = Section(spec.num_kv_heads * spec.head_dim_v, spec.num_kv_heads, shared=True)
        if not _is_attention(path):
            merged = rule == "colwise_gather_output" and path.endswith("gate_up_proj")
            return _equal(rows, *((2,) if merged or rule == "packed_colwise" else ()))
        parent = path.rpartition(".")[0]
        self.layer.attention[parent] = (spec.num_heads // self.size, max(spec.num_kv_heads // self.size, 1))
        if rows in (q.size, spec.num_heads):
            return (q._replace(size=rows),)
        if rows in (k.size, v.size):
            return (k._replace(size=rows),)
        if rows == q.size + k.size + v.size:
            return q, k, v
        if path.endswith("kv_b_proj") and rows % spec.num_heads == 0:
            return (q._replace(size=rows),)  # keys and values of each head, made of latent vectors
        raise _NotDivisible(f"the {rows} rows of {name} (rule {rule!r}) are neither queries, keys, values nor all of them")

    def _columns(self, path: str, columns: int) -> tuple[Section, ...]:
        heads = self.spec.num_heads
        return (Section(columns, heads),) if _is_attention(path) and columns % heads == 0 else _equal(columns)

    def _cut(self, name: str, path: str, rule: str, dim: int, sections: tuple[Section, ...]) -> None:
        for section in sections:
            fits = section.units % self.size == 0 or (section.shared and self.size % section.units == 0)
            if not fits:
                units = f"{section.units} heads" if section.units != section.size else f"{section.size} rows or columns"
                raise _NotDivisible(f"the {units} of {name} (rule {rule!r}) cannot be divided by {self.size}")
        self.layer.cuts[path] = Cut(dim, sections)


def _keep_normalised(layer: LayerDivision, module: nn.Module) -> None:
    """A norm over all heads needs every head: its projection stays whole, and its output is cut."""
    for path in layer.attention:
        attention = module.get_submodule(path)
        for kind in ("q", "k"):
            weight = getattr(getattr(attention, f"{kind}_norm", None), "weight", None)
            cut = layer.cuts.get(f"{path}.{kind}_proj.weight")
            if weight is not None and cut is not None and weight.numel() == cut.sections[0].size:
                del layer.cuts[f"{path}.{kind}_proj.weight"]
                layer.cuts.pop(f"{path}.{kind}_proj.bias", None)
                layer.narrowed[f"{path}.{kind}_norm"] = Cut(-1, cut.sections)


def _equal(count: int, parts: int = 1) -> tuple[Section, ...]:
    """Sections of the same size, in which each row or column stands alone."""
    return (Section(count // parts, count // parts),) * parts


def _is_attention(path: str) -> bool:
    return "attn" in path or "attention" in path


def _general(name: str) -> str:
    """The name as transformers' plan has it: layers.*.mlp for layers.3.mlp."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
