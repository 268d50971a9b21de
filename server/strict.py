"""The base of the request models. A field of a request is honoured or refused, never ignored.

    class Thing(StrictModel):
        size: int | None = None
        UNSUPPORTED = {"colour": ("default",)}      # refused, except for null and "default"

Values are not converted: "1" is not an integer. An unknown field is an error. `UNSUPPORTED` lists the API's fields that this
server cannot honour. Each has the values that clients send as defaults: these and null are accepted, and count as absent.

A model with `PART_OF_A_CONVERSATION` drops its unknown fields if the validation's context has "lenient": True (`--lenient`).
"""

from __future__ import annotations

import json
from collections.abc import Set
from typing import Any, ClassVar, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

from fa_serve.nearest import nearest_name

Unsupported = dict[str, tuple[Any, ...]]  # by field, the values that count as absent besides null
NOTHING: tuple[Any, ...] = ()
MESSAGE_LISTS = ("messages", "input")
"""Fields whose items count as messages. A model may override them with its own MESSAGE_LISTS."""
SAME = (
    {
        "max_token",
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "max_new_tokens",
        "max_gen_len",
        "n_predict",
        "num_predict",
    },
    {"messages", "input", "inputs", "prompt", "prompts"},
    {"documents", "passages", "texts"},
    {"stop", "stop_sequences", "stop_strings"},
    {"system", "instructions", "system_prompt"},
    {"repetition_penalty", "repeat_penalty"},
    {"response_format", "structured_outputs", "text", "output_config", "guided_decoding"},
)
"""Sets of names that several APIs have for the same thing. For an unknown field in one of them, an error suggests a field of
the model from the same set: the most similar one, else the first in alphabetical order."""


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    UNSUPPORTED: ClassVar[Unsupported] = {}
    PART_OF_A_CONVERSATION: ClassVar[bool] = False
    KNOWN: ClassVar[frozenset[str]] = frozenset()  # names of all fields as in JSON, those in UNSUPPORTED included
    TYPES: ClassVar[tuple[Any, ...]] = ()  # the values of the field `type`, if there is one

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        # kept, because pydantic computes model_fields anew for each access
        cls.KNOWN = frozenset(field.alias or name for name, field in cls.model_fields.items()) | cls.UNSUPPORTED.keys()
        if "type" in cls.model_fields:
            annotation = cls.model_fields["type"].annotation
            kinds = [annotation, *get_args(annotation)]  # a Literal, or Literal | None
            cls.TYPES = next(get_args(kind) for kind in kinds if get_origin(kind) is Literal)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        if cls.PART_OF_A_CONVERSATION and info.context and info.context.get("lenient"):
            data = {name: value for name, value in data.items() if name in cls.KNOWN}
        if not data.keys() <= cls.KNOWN:
            # pydantic would make one error for each of maybe a million unknown fields, and would not suggest a field
            if cls.TYPES and data.get("type", cls.TYPES[0]) not in cls.TYPES:
                return {name: value for name, value in data.items() if name in cls.KNOWN}  # the real error is the type
            unknown = next(name for name in data if name not in cls.KNOWN)
            nearest = _meant(unknown, cls.KNOWN - cls.UNSUPPORTED.keys())
            context = {"field": unknown, "nearest": nearest or ""}
            raise PydanticCustomError("unknown_field", "{field} is unknown", context)
        if cls.UNSUPPORTED.keys().isdisjoint(data):
            return data
        kept = dict(data)
        for field in data.keys() & cls.UNSUPPORTED.keys():
            value = kept.pop(field)
            neutral = cls.UNSUPPORTED[field]
            if value is not None and not any(_same(value, each) for each in neutral):
                harmless = " or ".join(["null", *map(json.dumps, neutral)])
                rule = f"is not supported by this server: leave it out, or send {harmless}"
                context = {"field": field, "rule": rule}
                raise PydanticCustomError("unsupported", "{field} {rule}", context)
        return kept


def _meant(unknown: str, known: Set[str]) -> str | None:
    """The known field that was probably meant. A field that is in a set of SAME with the unknown one precedes similar names."""
    same = next((sorted(known & names) for names in SAME if unknown in names), None)
    return nearest_name(unknown, same or sorted(known)) or next(iter(same or ()), None)


def _same(value: Any, other: Any) -> bool:
    """Equality that tells False from 0."""
    return type(value) is type(other) and bool(value == other)


def known_parts(*types: str) -> WrapValidator:
    """A validator for a part of a message, whose type must be one of these. Other types are those of audio, video and files."""
    remedy = "this server takes only text and images; leave out audio, video and files, which it does not support yet"
    if not any("image" in kind for kind in types):
        remedy = "this field takes only text; images may be in user messages and tool results"

    def validate(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError:
            context = {"types": " or ".join(map(repr, types)), "remedy": remedy}
            raise PydanticCustomError("known_parts", "must be {types}", context) from None

    return WrapValidator(validate)


def one_error(rule: str) -> WrapValidator:
    """A value that fits no member of a union gets one error with this rule, instead of one error for each member."""

    def validate(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("union", "must be {rule}", {"rule": rule}) from None

    return WrapValidator(validate)


def field_error(field: str, rule: str) -> PydanticCustomError:
    """The error of a validator that compares several fields. field: the one that the client should change"""
    return PydanticCustomError("field", "{field} {rule}", {"field": field, "rule": rule})
