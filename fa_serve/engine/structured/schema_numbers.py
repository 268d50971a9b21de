"""Numbers of a JSON schema that llguidance 1.9 does not follow: they are replaced by numbers that it follows, or refused.

    schema = {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}
    narrow_numbers(schema)        # {"type": "number", "minimum": 1e-22, "maximum": 0.5}

llguidance turns bounds into a regular expression of decimal digits. Three things go wrong on the way:

- Where both bounds have the same integer part, the bound nearer to zero is allowed although it is exclusive: (0, 0.5) allows 0,
  and [-0.5, 0) allows -0.
- Its JSON reader loses the last bit of some numbers, such as 9223372036854775e3.
- Bounds and constants are float64, so that integers beyond 2**53 are rounded, and integers beyond int64 are cut off.

Such an exclusive bound therefore becomes an inclusive one, and every bound becomes a decimal of at most DIGITS digits and
PLACES decimal places, which is read exactly. A new bound is stricter than the old one, so that every answer still follows the
schema that was given. Numbers between the old and the new bound, which differ in the 15th digit, cannot be written. An
exclusive bound on the other side stays as it is, because below the inclusive bound 9.9999 llguidance allows 9.990 and not 9.99.
A constant has no neighbour that could take its place, and is refused if it is not read exactly. Left out: `multipleOf`, which
llguidance follows or refuses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import ROUND_CEILING, Decimal
from typing import Any

from fa_serve.spec import ParameterError

DIGITS = 15
PLACES = 22
"""Such a decimal is the quotient of two integers that float64 represents exactly, and so it is read exactly."""
EXACT = 1 << 53
"""float64 represents all integers up to this one exactly."""
LARGEST_INTEGER = (1 << 63) - 1
"""llguidance reads any larger float64 as this integer."""
LARGEST_FLOAT = (1 << 63) - 1024
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values have a schema for each name."""
_CONSTANTS = ("const", "enum")
_NOTES = ("default", "examples")
"""Keywords whose values are not schemas and do not matter."""


def narrow_numbers(schema: dict[str, Any]) -> None:
    """Replace the bounds in a schema, in place. Raises ParameterError for numbers that have no replacement."""
    found: list[Any] = [schema]
    while found:
        node = found.pop()
        if isinstance(node, list):
            found += node
        elif isinstance(node, dict):
            _narrow_bounds(node)
            for keyword, value in node.items():
                if keyword in _CONSTANTS:
                    _check_constants(keyword, value)
                elif keyword in _NAMED and isinstance(value, dict):
                    found += value.values()
                elif keyword not in _NOTES:
                    found.append(value)


def _narrow_bounds(node: dict[str, Any]) -> None:
    types = node.get("type")
    types = types if isinstance(types, list) else [types]
    only_integers = "integer" in types and "number" not in types
    for inclusive, exclusive, sign in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
        bound = node.get(inclusive)
        strict = node.get(exclusive)
        bounds = []
        if _is_number(bound):
            bounds.append((node.pop(inclusive), strict is True))  # in draft 4, True says that this bound is exclusive
        if _is_number(strict) or bounds:
            strict = node.pop(exclusive, None)
        if _is_number(strict):
            bounds.append((strict, True))
        for value, is_strict in bounds:
            keyword = inclusive
            if only_integers:
                narrowed: float = _narrow_integer(value, sign, is_strict, inclusive)
            elif is_strict and -EXACT <= sign * value < 0:
                narrowed = _narrow_number(value, sign, False)
                keyword = exclusive if narrowed == value else inclusive
            else:
                narrowed = _narrow_number(value, sign, is_strict)
            node[keyword] = max(narrowed, node.get(keyword, narrowed), key=lambda number: sign * number)


def _narrow_number(bound: float, sign: int, strict: bool) -> float:
    """The least decimal that is read exactly and is at least (`strict`: more than) the bound; with sign -1 the greatest one."""
    if not strict and bound == int(bound) and abs(bound) <= EXACT:
        return int(bound)
    given = _decimal(bound) * sign
    step = Decimal(1).scaleb(max(given.adjusted() - DIGITS + 1, -PLACES) if given else -PLACES)
    narrowed = given.quantize(step, rounding=ROUND_CEILING)
    if strict and narrowed == given:
        narrowed += step
    if abs(narrowed) > EXACT and Decimal(float(narrowed)) < narrowed:
        narrowed += step  # if another part of the schema asks for an integer, its bound is this float64
    narrowed *= sign
    return int(narrowed) if isinstance(bound, int) and narrowed == narrowed.to_integral_value() else float(narrowed)


def _narrow_integer(bound: float, sign: int, strict: bool, keyword: str) -> int:
    """The least integer that llguidance has and that is at least (`strict`: more than) the bound; with sign -1 the greatest."""
    given = sign * bound
    narrowed = math.ceil(given)
    if strict and narrowed == given:
        narrowed += 1
    if sign == -1 and narrowed <= -LARGEST_INTEGER:
        return LARGEST_INTEGER
    if narrowed > LARGEST_FLOAT:
        raise ParameterError("json_schema", f"have a {keyword} that some 64-bit integer satisfies", bound)
    narrowed = max(narrowed, -LARGEST_FLOAT)
    if abs(narrowed) > EXACT and int(float(narrowed)) != narrowed:
        near = float(narrowed)
        narrowed = int(near if near > narrowed else math.nextafter(near, math.inf))
    return sign * narrowed


def _check_constants(keyword: str, value: Any) -> None:
    for number in _numbers_in(value):
        if not _is_read_exactly(number):
            rule = (
                f"have numbers of at most {DIGITS} digits under {keyword}, or strings, because other numbers cannot be written "
                "exactly"
            )
            raise ParameterError("json_schema", rule, number)


def _numbers_in(value: Any) -> Iterator[float]:
    values = [value]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list):
            values += value
        elif _is_number(value):
            yield value


def _is_read_exactly(number: float) -> bool:
    """Whether llguidance allows this constant, and not a neighbouring number instead."""
    if isinstance(number, int):
        return number == LARGEST_INTEGER or (abs(number) <= LARGEST_FLOAT and int(float(number)) == number)
    if number.is_integer() and abs(number) > EXACT:
        return False
    # serde_json without its feature float_roundtrip reads a number like this
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    assert isinstance(exponent, int)
    significand = float("".join(map(str, digits)))
    return exponent >= -308 and significand / 10.0**-exponent == abs(number)


def _decimal(number: float) -> Decimal:
    """The exact value of an integer; for any other number the shortest decimal, which is how JSON writes it."""
    return Decimal(int(number)) if isinstance(number, int) or number.is_integer() else Decimal(repr(number))


def _is_number(value: Any) -> bool:
    """Whether a value is a finite number. (llguidance refuses JSON's text of Infinity.)"""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)
