"""The base of the request models. A field of a request is honoured or refused, never ignored.

    class Thing(StrictModel):
        size: int | None = None
        UNSUPPORTED = {"colour": ("default",)}      # refused, except for null and "default"

Values are not converted: "1" is no integer. An unknown field is an error. A field of OpenAI's API that this server cannot
honour stands in `UNSUPPORTED` with the values that ask for nothing; null always asks for nothing. Clients send such values as
defaults, so they pass.

A model with `PART_OF_A_CONVERSATION` drops its unknown fields if the validation's context has "lenient": True (`--lenient`).
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

Unsupported = dict[str, tuple[Any, ...]]  # by field, the values that ask for nothing besides null
NOTHING: tuple[Any, ...] = ()


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    UNSUPPORTED: ClassVar[Unsupported] = {}
    PART_OF_A_CONVERSATION: ClassVar[bool] = False
    KNOWN: ClassVar[frozenset[str]] = frozenset()  # the names of all fields in JSON, and of those in UNSUPPORTED

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        # kept, because pydantic computes model_fields anew for each access
        cls.KNOWN = frozenset(field.alias or name for name, field in cls.model_fields.items()) | cls.UNSUPPORTED.keys()

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        if cls.PART_OF_A_CONVERSATION and info.context and info.context.get("lenient"):
            data = {name: value for name, value in data.items() if name in cls.KNOWN}
        if len(data) > len(cls.KNOWN):
            # pydantic would make an error for each of a million unknown fields
            unknown = next(name for name in data if name not in cls.KNOWN)
            raise PydanticCustomError("unknown_field", "{field} is unknown", {"field": unknown})
        if cls.UNSUPPORTED.keys().isdisjoint(data):
            return data
        kept = dict(data)
        for field in data.keys() & cls.UNSUPPORTED.keys():
            value = kept.pop(field)
            if value is not None and not any(_same(value, neutral) for neutral in cls.UNSUPPORTED[field]):
                context = {"field": field, "rule": "is not supported by this server"}
                raise PydanticCustomError("unsupported", "{field} {rule}", context)
        return kept


def _same(value: Any, other: Any) -> bool:
    """Equality that tells False from 0."""
    return type(value) is type(other) and bool(value == other)


def one_error(rule: str) -> WrapValidator:
    """A value that fits no member of a union gets one error with this rule, instead of one error for each member."""

    def validate(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("union", "must be {rule}", {"rule": rule}) from None

    return WrapValidator(validate)


def field_error(field: str, rule: str) -> PydanticCustomError:
    """The error of a validator that compares several fields. It names the one that the client should change."""
    return PydanticCustomError("field", "{field} {rule}", {"field": field, "rule": rule})
