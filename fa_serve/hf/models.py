"""Which models may use fa_serve, decided when they are made or switched over.

A model is refused, with a sentence, if its attention would not reach us or takes an option that we do not know. That rests on
the model's own eager attention: what it names is the model's mathematics; what it swallows in **kwargs is not, and so we may
swallow that too. Both are read from the model's source, as transformers itself does to find out whether it can be switched.
"""

from __future__ import annotations

import inspect
import sys

from transformers.modeling_utils import PreTrainedModel

from fa_serve.spec import UnsupportedModelError

NAME = "fa_serve"

# every option that a model's own eager attention may name, all of them handled or refused in `attention_forward`
_KNOWN_OPTIONS = {"module", "query", "key", "value", "query_states", "key_states", "value_states", "attention_mask", "scaling",
                  "dropout", "softcap", "position_bias", "s_aux", "sliding_window", "is_causal", "kwargs"}  # fmt: skip


def check_class(model_class: type[PreTrainedModel]) -> None:
    """Raise UnsupportedModelError, with the reason, unless fa_serve computes this model's attention as eager would."""
    if not model_class._can_set_attn_implementation():
        raise UnsupportedModelError(
            f"{model_class.__name__} computes its attention by itself, not through transformers' AttentionInterface, so "
            'fa_serve cannot take its place: load it with attn_implementation="eager" (or "sdpa"), or, if it is a part of '
            "a larger model, pass a dict that names the parts to be served"
        )
    for name, function in vars(sys.modules[model_class.__module__]).items():
        if name.endswith("eager_attention_forward") and inspect.isfunction(function):
            unknown = [p for p in inspect.signature(function).parameters if p not in _KNOWN_OPTIONS]
            if unknown:
                raise UnsupportedModelError(f"{model_class.__name__}: its {name} takes {unknown}, which fa_serve does not know")
