"""What the files of a model say of generating: which tokens end an answer.

    ends = find_ends(model.generation_config, model.config, tokenizer, vocab_size)
    ends.ids                                 # frozenset({2})
    ends.warning                             # None, or a sentence for the operator

Three files may name the end: generation_config.json, config.json and the tokenizer's. They may disagree, most often in a model
that was fine-tuned for chats. Left out: the end token of a chat template, which ends chats as well (server/chat/templates.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Ends:
    """ids: the tokens that end an answer. warning: what the operator should know of them, or None."""

    ids: frozenset[int]
    warning: str | None = None


def find_ends(generation_config: Any, model_config: Any, tokenizer: Any, vocab_size: int) -> Ends:
    """The end tokens of the first source that names any: generation_config.json, then config.json, as `model.generate` takes
    them, then the tokenizer.

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
    source = next((name for name, ids in sources.items() if ids), None)
    if source is None:
        return Ends(
            frozenset(),
            f"No token ends an answer, so answers end at max_tokens or at a stop string: none of {', '.join(sources)} names an "
            f"end token (eos_token_id) from 0 to {vocab_size - 1}. Name it in generation_config.json.",
        )
    ids = frozenset(sources[source])
    if ids.issuperset(tokenizer_ids):
        return Ends(ids)
    return Ends(
        ids,
        f"{source} ends answers at {_named(sorted(ids), tokenizer)}, and the tokenizer's end token is "
        f"{_named(tokenizer_ids, tokenizer)}, which ends no answer except chats whose template ends messages with it. If all "
        "answers should end there, add it to eos_token_id in generation_config.json, or send it in stop_token_ids.",
    )


def _token_ids(given: Any, vocab_size: int) -> list[int]:
    """Those of an eos_token_id, a number or several, that are tokens of the model."""
    ids = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    return [token for token in ids if isinstance(token, int) and not isinstance(token, bool) and 0 <= token < vocab_size]


def _named(ids: Sequence[int], tokenizer: Any) -> str:
    """Token ids with their names."""
    names = tokenizer.convert_ids_to_tokens(list(ids))
    return ", ".join(f"{token} ({name})" for token, name in zip(ids, names, strict=True))
