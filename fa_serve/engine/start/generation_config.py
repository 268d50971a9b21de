"""What the files of a model say about generating: which tokens end an answer, and how tokens are chosen by default.

    ends = find_ends(model.generation_config, model.config, tokenizer, vocab_size)
    ends.ids                                 # frozenset({2})
    ends.warning                             # None, or a sentence for the operator
    defaults = find_defaults(model.generation_config)
    defaults.params                          # SamplingParams(temperature=0.6, top_p=0.95)

Three files may name end tokens: generation_config.json, config.json and the tokenizer's config. They may disagree, most often
in a model that was fine-tuned for chats. Left out: which generation_config.json is used (loading.py), and the end token of a
chat template, which also ends chats (server/chat/templates.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fa_serve.engine.request.params import SamplingParams
from fa_serve.spec import ParameterError

NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Fields of generation_config.json that give defaults, and their names in `SamplingParams`. vLLM uses the same fields."""


@dataclass(frozen=True, slots=True)
class Ends:
    """ids: the tokens that end an answer. warning: what the operator should know about them, or None."""

    ids: frozenset[int]
    warning: str | None = None


@dataclass(frozen=True, slots=True)
class Defaults:
    """How tokens are chosen if a request does not say.

    params: fa_serve's own defaults, replaced by the values that the file gives
    given:  the values from the file, by their names in `SamplingParams`
    refused: a sentence for each value that is not allowed and is therefore left out
    """

    params: SamplingParams = field(default_factory=SamplingParams)
    given: dict[str, Any] = field(default_factory=dict)
    refused: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.given.items())


def find_defaults(generation_config: Any) -> Defaults:
    """The defaults of a generation_config.json. As in vLLM, `do_sample` is ignored: a temperature of 0 is greedy."""
    given: dict[str, Any] = {}
    refused = []
    for name, own_name in NAMES.items():
        value = getattr(generation_config, name, None)
        if value is None:
            continue
        if name == "top_k" and value == -1:
            value = 0  # keeps every token
        checked: dict[str, Any] = {own_name: value}
        try:
            SamplingParams(**checked)
        except ParameterError as error:
            refused.append(f"generation_config.json: {name} is ignored: {error}")
        else:
            given |= checked
    return Defaults(SamplingParams(**given), given, tuple(refused))


def find_ends(generation_config: Any, model_config: Any, tokenizer: Any, vocab_size: int) -> Ends:
    """The end tokens of the first source that names any: generation_config.json, then config.json (the order of
    `model.generate`), then the tokenizer.

    As in transformers' continuous batching, a negative number says that no token ends an answer. Later sources are then not
    consulted.

    tokenizer:  of transformers, or None
    vocab_size: how many logits the model has. A token beyond them is never generated, so it ends nothing
    """
    text_config = model_config.get_text_config()
    tokenizer_ids = _token_ids(getattr(tokenizer, "eos_token_id", None), vocab_size)
    sources = {
        "generation_config.json": _token_ids(getattr(generation_config, "eos_token_id", None), vocab_size),
        "config.json": _token_ids(getattr(text_config, "eos_token_id", None), vocab_size),
        "the tokenizer": tokenizer_ids,
    }
    source, found = next(((name, ids) for name, ids in sources.items() if ids), ("", []))
    ids = frozenset(token for token in found if token >= 0)
    if not ids:
        return Ends(
            ids,
            f"No token ends an answer, so answers end at max_tokens or at a stop string: none of {', '.join(sources)} names an "
            f"end token (eos_token_id) from 0 to {vocab_size - 1}. Name it in generation_config.json.",
        )
    if ids.issuperset(tokenizer_ids):
        return Ends(ids)
    return Ends(
        ids,
        f"{source} ends answers at {_named(sorted(ids), tokenizer)}, but the tokenizer's end token is "
        f"{_named(tokenizer_ids, tokenizer)}, which ends an answer only in chats whose template ends messages with it. If "
        "all answers should end there, add it to eos_token_id in generation_config.json, or send it in stop_token_ids.",
    )


def _token_ids(given: Any, vocab_size: int) -> list[int]:
    """The numbers in an eos_token_id (one number or several) that are tokens of the model, or negative."""
    ids = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    return [token for token in ids if isinstance(token, int) and not isinstance(token, bool) and token < vocab_size]


def _named(ids: Sequence[int], tokenizer: Any) -> str:
    """Token ids with their names."""
    names = tokenizer.convert_ids_to_tokens(list(ids))
    return ", ".join(f"{token} ({name})" for token, name in zip(ids, names, strict=True))
