"""Which models may use fa_serve, and which of them compute with their masks: read from the source of the model when it is made.

    prepare_model(model)              # raises UnsupportedModelError with the reason, or notes what the mask function must know
    check_class(LlamaForCausalLM)     # only the check

A model is refused if its attention would not reach fa_serve, or if it passes its attention an argument that fa_serve does not
know. The model's own code decides: arguments that its eager attention names, and arguments that its modules pass by name, can
change the result. Arguments that eager attention swallows in **kwargs change nothing, so fa_serve ignores them too.
transformers itself reads a model's source to find out whether its attention can be switched.

A class inherits its attention, so the sources of its base classes are read too. Some classes have no source that can be read:
classes defined in a notebook or on standard input, classes that a library derives from a model's class, and classes whose
module is gone. They are judged only by their base classes.

Left out: running the model. `probe.py` and `info.py` find what a model asks of attention in a forward.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from transformers.modeling_utils import PreTrainedModel

from fa_serve.hf.adapter.packed_forwards import watch_packs
from fa_serve.hf.adapter.state_modules import UPDATES
from fa_serve.spec import UnsupportedModelError

NAME = "fa_serve"

# Arguments that a model's eager attention may name and that its modules may pass. `attention_forward` handles or refuses each
# of them, or it does not change the result (position_ids).
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
    "indices",
    "block_indices",
    "kwargs",
}
_LOOKS = (ast.Attribute, ast.Subscript)
_TABLE = "_CLASSES[config._attn_implementation]"
# An attribute of a config's class, because there it is not saved with a config and does not outlive the class.
_WORKS_ON_MASKS = "_fa_serve_works_on_masks"
# The attribute of a model's class in which transformers keeps whether its attention can be switched.
_ANSWER = "_can_set_attn_implementation_cached_value"


@dataclass(frozen=True)
class Source:
    """What the source files of a model's class and of its base classes say about its attention.

    told:             names of the arguments that its modules pass, and that its eager attention takes
    works_on_masks:   masks must be tensors, because its attention computes with them, or because it has a second kind of
                      attention that does, besides the one that reaches fa_serve
    wants_mask:       it computes with a mask before the attention, and may ask for a mask that is never skipped
    counts_positions: it makes position_ids that do not start at 0 (as fairseq does)
    chooses_by_name:  the class looks its attention up in a table of classes by the name of the implementation, which has no
                      entry for fa_serve, or its module does not call the attention interface
    keeps_states:     its modules keep recurrent or convolution states
    reads_bool_masks: its attention checks whether its mask is bool, and takes both forms
    """

    told: frozenset[str]
    works_on_masks: bool
    wants_mask: bool
    counts_positions: bool
    chooses_by_name: bool
    keeps_states: bool
    reads_bool_masks: bool


def handles_mask(config: object) -> bool:
    """Whether the models with this config compute with their masks, so that each mask must be a tensor."""
    return _WORKS_ON_MASKS in vars(type(config))


def counts_positions(model_class: type[PreTrainedModel]) -> bool:
    """Whether position_ids of models of this class do not start at 0."""
    return read_source(model_class).counts_positions


def prepare_model(model: PreTrainedModel) -> None:
    """Prepare a model that is being made or switched to fa_serve: check its class, note on its config's class whether it
    computes with its masks, and watch its forwards for packed sequences.

    Raises UnsupportedModelError with the reason if fa_serve does not serve it.
    """
    check_class(type(model))
    source = read_source(type(model))
    if source.works_on_masks or source.wants_mask:
        setattr(type(model.config), _WORKS_ON_MASKS, True)
    watch_packs(model, source.counts_positions)


def check_class(model_class: type[PreTrainedModel]) -> None:
    """Raise UnsupportedModelError, with the reason, unless fa_serve computes this model's attention as eager attention does."""
    source = read_source(model_class)
    if source.chooses_by_name:
        raise UnsupportedModelError(
            f"{model_class.__name__} computes its attention itself instead of through transformers' AttentionInterface, so "
            'fa_serve cannot replace it: load the model with attn_implementation="eager" or "sdpa". If it is a part of a '
            'larger model, pass a dict that names the parts to serve, such as attn_implementation={"text_config": "fa_serve"}'
        )
    if source.works_on_masks and not (model_class._supports_sdpa or source.reads_bool_masks):
        raise UnsupportedModelError(
            f"{model_class.__name__} works on its masks in the form that only its eager attention takes, so fa_serve cannot "
            'replace it: load the model with attn_implementation="eager"'
        )
    unknown = sorted(source.told - _KNOWN)
    if unknown:
        named = ", ".join(map(repr, unknown))
        raise UnsupportedModelError(
            f"{model_class.__name__} passes its attention {named}, which fa_serve does not know, so fa_serve cannot replace "
            'it: load the model with attn_implementation="eager" or "sdpa"'
        )


def read_source(model_class: type[PreTrainedModel]) -> Source:
    """What the sources of a class and of its base classes say together. A source that cannot be read is skipped.

    Raises UnsupportedModelError with the reasons if none of the sources can be read.
    """
    found = []
    unread = {}
    for each in _bases(model_class):
        try:
            text = _text_of(each.__module__)
            source = _parse(text)
        except (OSError, TypeError, SyntaxError, ValueError) as error:
            unread[each.__module__] = str(error)
            continue
        found.append(
            replace(source, chooses_by_name=each.__name__ in _users_of_a_table(text) or not _is_switched_by_name(each))
        )
    if not found:
        reasons = "; ".join(f"of the module {module!r}: {reason}" for module, reason in unread.items())
        raise UnsupportedModelError(
            f"the source of {model_class.__name__} or of a base class must be readable, because fa_serve reads from it what "
            f"the model asks of attention, got no source ({reasons}): define the class in a Python file and import it, or load "
            'the model with attn_implementation="eager" or "sdpa"'
        )
    return Source(
        told=frozenset().union(*(source.told for source in found)),
        works_on_masks=any(source.works_on_masks for source in found),
        wants_mask=any(source.wants_mask for source in found),
        counts_positions=any(source.counts_positions for source in found),
        chooses_by_name=any(source.chooses_by_name for source in found),
        keeps_states=any(source.keeps_states for source in found),
        reads_bool_masks=any(source.reads_bool_masks for source in found),
    )


def _bases(model_class: type) -> Iterator[type[PreTrainedModel]]:
    """A model's class and those of its base classes that are specific models, without the base classes of all models."""
    for each in model_class.__mro__:
        if issubclass(each, PreTrainedModel) and each.__module__ != PreTrainedModel.__module__:
            yield each


def _is_switched_by_name(model_class: type[PreTrainedModel]) -> bool:
    """Whether transformers finds the attention interface in the source of this class.

    transformers keeps the answer on the class, and subclasses inherit it, although their own source may differ. So a class
    whose source can be read is asked again, and only a class without a source inherits the answer.
    """
    if _ANSWER not in vars(model_class):
        setattr(model_class, _ANSWER, None)
    return model_class._can_set_attn_implementation()


def _text_of(module: str) -> str:
    """The source of a loaded module. Raises OSError or TypeError if there is no source."""
    if module not in sys.modules:
        raise OSError("the module is not loaded")
    return inspect.getsource(sys.modules[module])


@functools.lru_cache(maxsize=64)
def _parse(text: str) -> Source:
    """What the source of a module says. Raises SyntaxError or ValueError for a text that is not Python."""
    told: set[str] = set()
    # this check is found in attention code that bypasses the interface, such as Informer's second kind of attention
    works_on_masks = "attention_mask.size() !=" in text
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name.endswith("eager_attention_forward"):
            told |= {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
        elif isinstance(node, ast.ClassDef):
            inside = list(ast.walk(node))
            calls = [n for n in inside if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "attention_interface"]
            told |= {keyword.arg for call in calls for keyword in call.keywords if keyword.arg}
            works_on_masks |= _works_on_its_mask(node.name, inside, has_calls=bool(calls))
    return Source(
        told=frozenset(told),
        works_on_masks=works_on_masks,
        wants_mask="allow_is_causal_skip" in text or "mask.dtype == torch.bool" in text,
        counts_positions="create_position_ids_from_input_ids" in text,
        chooses_by_name=False,  # depends on the class, so `read_source` sets it
        keeps_states=any(name in text for name in UPDATES),
        reads_bool_masks="attention_mask.dtype == torch.bool" in text,
    )


@functools.lru_cache(maxsize=64)
def _users_of_a_table(text: str) -> frozenset[str]:
    """The classes of a module that take a class from a table by the implementation's name, and all classes that mention these,
    directly or indirectly.

    A module may have such a tower and also a language model that calls the attention interface (DeepSeek-OCR-2).
    """
    if _TABLE not in text:
        return frozenset()
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    mentioned = {node.name: {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} for node in classes}
    found = {node.name for node in classes if _TABLE in ast.unparse(node)}
    while more := {name for name, names in mentioned.items() if names & found} - found:
        found |= more
    return frozenset(found)


def _works_on_its_mask(class_name: str, inside: list[ast.AST], has_calls: bool) -> bool:
    """Whether a class does more with `attention_mask` than pass it on.

    A class that calls the attention interface does so if it reads an attribute or an index of the mask. An attention class that
    does not call the interface does so if it uses the mask in arithmetic, such as a sum.
    """
    if has_calls:
        return any(isinstance(n, _LOOKS) and _is_attention_mask(n.value) for n in inside)
    if "Attention" not in class_name:
        return False
    return any(isinstance(n, ast.BinOp) and (_is_attention_mask(n.left) or _is_attention_mask(n.right)) for n in inside)


def _is_attention_mask(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "attention_mask"
