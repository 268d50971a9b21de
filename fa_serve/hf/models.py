"""Which models may use fa_serve, and what the mask function has to know of them; read from their source when they are made.

A model is refused, with a sentence, if its attention would not reach us, or if it is told something that we do not know. That
rests on the model's own code: what its eager attention names, and what its modules pass on by name, is its mathematics; what
eager attention swallows in **kwargs is not, and so we may swallow that too. transformers itself reads a model's source to find
out whether its attention can be switched.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from dataclasses import dataclass

from transformers.modeling_utils import PreTrainedModel

from fa_serve.spec import UnsupportedModelError

NAME = "fa_serve"

# what a model's own eager attention may name, and what its modules may pass on: all of it handled or refused in
# `attention_forward`, or of no consequence for the numbers (position_ids, deterministic)
_KNOWN = {
    "module",
    "query",
    "key",
    "value",
    "query_states",
    "key_states",
    "value_states",
    "attention_mask",
    "scaling",
    "dropout",
    "softcap",
    "position_bias",
    "s_aux",
    "sliding_window",
    "is_causal",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "output_attentions",
    "position_ids",
    "deterministic",
    "kwargs",
}
_LOOKS = (ast.Attribute, ast.Subscript)


@dataclass(frozen=True)
class Source:
    """What a file of transformers' says about its attention.

    told:             the names that its modules pass on, and that its eager attention takes
    works_on_masks:   its attention does, or another kind of it beside the one that reaches us: they must be tensors
    wants_mask:       it works on a mask before the attention, and may ask for one that is never left out
    counts_positions: it makes position_ids of its own, which do not start at 0 (as fairseq does)
    chooses_by_name:  it has a table of classes by implementations' names, ours not among them
    """

    told: frozenset[str]
    works_on_masks: bool
    wants_mask: bool
    counts_positions: bool
    chooses_by_name: bool


_handling_masks: set[type] = set()


def handles_mask(config: object) -> bool:
    """Whether the models with this config work on their masks."""
    return type(config) in _handling_masks


def counts_positions(model_class: type[PreTrainedModel]) -> bool:
    """Whether position_ids of such a model do not start at 0."""
    return _read(model_class.__module__).counts_positions


def admit(model: PreTrainedModel) -> None:
    """Check a model that is being made or switched over, and note what the mask function has to know of it."""
    check_class(type(model))
    source = _read(type(model).__module__)
    if source.works_on_masks or source.wants_mask:
        _handling_masks.add(type(model.config))


def check_class(model_class: type[PreTrainedModel]) -> None:
    """Raise UnsupportedModelError, with the reason, unless fa_serve computes this model's attention as eager would."""
    source = _read(model_class.__module__)
    if source.chooses_by_name or not model_class._can_set_attn_implementation():
        raise UnsupportedModelError(
            f"{model_class.__name__} computes its attention by itself, not through transformers' AttentionInterface, so "
            'fa_serve cannot take its place: load it with attn_implementation="eager" (or "sdpa"), or, if it is a part of '
            "a larger model, pass a dict that names the parts to be served"
        )
    if source.works_on_masks and not model_class._supports_sdpa:
        raise UnsupportedModelError(
            f"{model_class.__name__} works on masks in the form that eager attention takes them, not ours"
        )
    unknown = sorted(source.told - _KNOWN)
    if unknown:
        raise UnsupportedModelError(f"{model_class.__name__} tells its attention {unknown}, which fa_serve does not know")


@functools.cache
def _read(module: str) -> Source:
    told: set[str] = set()
    text = inspect.getsource(sys.modules[module])
    works_on_masks = "attention_mask.size() !=" in text  # of eager attention; Informer's has a kind of its own
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name.endswith("eager_attention_forward"):
            told |= {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
        elif isinstance(node, ast.ClassDef):
            inside = list(ast.walk(node))
            calls = [n for n in inside if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "attention_interface"]
            told |= {keyword.arg for call in calls for keyword in call.keywords if keyword.arg}
            looked_into = {n.value.id for n in inside if isinstance(n, _LOOKS) and isinstance(n.value, ast.Name)}
            added = {x.id for n in inside if isinstance(n, ast.BinOp) for x in (n.left, n.right) if isinstance(x, ast.Name)}
            works_on_masks |= "attention_mask" in (looked_into if calls else added if "Attention" in node.name else ())
    wants_mask = "allow_is_causal_skip" in text or "mask.dtype == torch.bool" in text
    counts = "create_position_ids_from_input_ids" in text
    by_name = "_CLASSES[config._attn_implementation]" in text
    return Source(frozenset(told), works_on_masks, wants_mask, counts, by_name)
