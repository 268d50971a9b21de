"""pydantic's errors as rules in our words: "must be at least 1" instead of "Input should be greater than or equal to 1".

    rule_of(error)                     # "must be at least 1", of one of pydantic's errors
    rule_of_all(errors)                # "must be a string or a list", of the errors of the members of a union

Our own validators write their rule into the message of the error. Left out: the name of the field and its value, which
errors.py and settings.py add to a rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

TYPES = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "path_type": "a path",
    "byte_size": "a number of bytes, or a size such as 16MiB",
    "byte_size_unit": "a number of bytes, or a size such as 16MiB",
    "literal_error": "{expected}",
}
"""What a value must be, by pydantic's type of error for a value of the wrong kind."""
RULES = {
    "missing": "must be given",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
    "string_pattern_mismatch": "must match the pattern {pattern}",
    "value_error": "{error}",
}
LENGTHS = {
    "too_short": ("at least", "min_length", "item"),
    "too_long": ("at most", "max_length", "item"),
    "string_too_short": ("at least", "min_length", "character"),
    "string_too_long": ("at most", "max_length", "character"),
}


def rule_of(error: Any) -> str:
    """The rule that a value has broken, from one of pydantic's errors. It begins with a verb."""
    kind = error["type"]
    context = {name: _whole(value) for name, value in error.get("ctx", {}).items()}
    if kind in TYPES:
        return "must be " + TYPES[kind].format(**context)
    if kind in RULES:
        return RULES[kind].format(**context)
    if kind in LENGTHS:
        bound, name, unit = LENGTHS[kind]
        count = context[name]
        return f"must have {bound} {count} {unit}{'' if count == 1 else 's'}"
    return str(error["msg"])


def rule_of_all(errors: Sequence[Any]) -> str:
    """One rule from the errors that the members of a union report for one value.

    If the value has the kind of a member, it has broken a rule of this member, and that rule is returned. Otherwise the rule
    lists the kinds of all members.
    """
    other = [error for error in errors if error["type"] not in TYPES]
    if other:
        return rule_of(other[0])
    kinds = dict.fromkeys(TYPES[error["type"]].format(**error.get("ctx", {})) for error in errors)
    return "must be " + " or ".join(kinds)


def _whole(value: Any) -> Any:
    """The value, with 2.0 as 2, because a request would write it so."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
