"""What a schema says about numbers is followed: each text that its grammar allows is valid, and so are its bounds allowed."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterable
from typing import Any

import jsonschema
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sampled_cases import examples

from fa_serve import ParameterError
from fa_serve.engine import StructuredOutput
from fa_serve.engine.structured import grammars
from fa_serve.engine.structured.schema_numbers import narrow_numbers

llguidance = pytest.importorskip("llguidance")

TOKENIZER = llguidance.LLTokenizer("byte")
INT64 = 1 << 63
BOUNDS = [-10, -1.5, -1, -0.5, -0.1, -0.0, 0, 1e-30, 0.05, 0.1, 0.5, 1, 1.5, 1.55, 5, 9.9, 10, 15, 99.5]


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


SHORT = [text for n in range(1, 5) for text in map("".join, itertools.product("-0159.", repeat=n)) if is_json(text)]
"""Every number of up to four of these characters."""


class Allowed:
    """Whether a whole text follows the grammar that the engine makes of a schema."""

    def __init__(self, schema: dict[str, Any]) -> None:
        _, grammar = grammars._grammar(llguidance.LLMatcher, StructuredOutput(json_schema=schema))
        self._matcher = llguidance.LLMatcher(TOKENIZER, grammar, log_level=0)
        self.error = self._matcher.get_error() if self._matcher.is_error() else ""

    def __call__(self, text: str) -> bool:
        matcher = self._matcher.deep_copy()
        tokens = TOKENIZER.tokenize_str(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def check_texts(schema: dict[str, Any], texts: Iterable[str], draft: Any = jsonschema.Draft202012Validator) -> Allowed:
    """Each allowed text is valid, and the grammar is not refused where a text is valid."""
    allowed = Allowed(schema)
    validator = draft(schema)
    valid = [text for text in texts if validator.is_valid(json.loads(text))]
    if allowed.error:
        assert not valid, (schema, allowed.error)
    else:
        wrong = [text for text in texts if text not in valid and allowed(text)]
        assert not wrong, (schema, wrong)
    return allowed


@pytest.mark.parametrize(
    ("bounds", "wrong", "right"),
    [
        pytest.param(
            {"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, ["0", "-0", "0.0", "0.5"], ["0.1", "0.01", "0.49"], id="0"
        ),
        pytest.param({"exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, ["1", "1.0", "1.5"], ["1.1", "1.001", "1.4999"], id="1"),
        pytest.param({"exclusiveMinimum": 2, "maximum": 2.5}, ["2", "2.6"], ["2.5", "2.0001"], id="inclusive maximum"),
        pytest.param({"minimum": -0.5, "exclusiveMaximum": 0}, ["0", "-0", "-0.0", "-0.6"], ["-0.5", "-0.01"], id="below 0"),
        pytest.param({"exclusiveMinimum": -1.5, "exclusiveMaximum": -1}, ["-1", "-1.0", "-1.5"], ["-1.4", "-1.01"], id="-1"),
        pytest.param({"exclusiveMinimum": 0.0, "maximum": 1e-5}, ["0", "0.1"], ["0.00001", "0.000000001"], id="small"),
        pytest.param({"exclusiveMaximum": 10, "minimum": 9}, ["10", "8.9"], ["9", "9.9", "9.99"], id="outer side"),
        pytest.param({"exclusiveMinimum": 0, "minimum": -1, "maximum": 0.5}, ["0", "-1"], ["0.5", "0.1"], id="two minima"),
        pytest.param(
            {"exclusiveMinimum": 0, "maximum": 0.75, "multipleOf": 0.25}, ["0", "0.1"], ["0.25", "0.75"], id="multiples"
        ),
    ],
)
@pytest.mark.parametrize("place", ["root", "property", "item", "allOf", "anyOf", "$ref", "any document", "nullable"])
def test_a_range_with_an_exclusive_bound(bounds: dict[str, Any], wrong: list[str], right: list[str], place: str) -> None:
    schema, form = placed({"type": "number", **bounds}, place)
    allowed = Allowed(schema)
    assert not allowed.error
    assert [text for text in wrong if allowed(form % text)] == []
    assert [text for text in right if not allowed(form % text)] == []


def placed(number: dict[str, Any], place: str) -> tuple[dict[str, Any], str]:
    """A schema with a schema of numbers at some place, and the text around the number."""
    bounds = {keyword: value for keyword, value in number.items() if keyword != "type"}
    return {
        "root": (number, "%s"),
        "property": (
            {"type": "object", "properties": {"minimum": number}, "required": ["minimum"]},
            '{"minimum": %s}',
        ),
        "item": ({"type": "array", "items": number}, "[%s]"),
        "allOf": ({"allOf": [{"type": "number"}, bounds]}, "%s"),
        "anyOf": ({"anyOf": [{"type": "null"}, number]}, "%s"),
        "$ref": ({"$ref": "#/$defs/const", "$defs": {"const": number}}, "%s"),
        "any document": ({"$ref": "#/components/schemas/x", "components": {"schemas": {"x": number}}}, "%s"),
        "nullable": ({**number, "type": ["number", "null"]}, "%s"),
    }[place]


KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
NUMBERS = st.fixed_dictionaries(
    {"type": st.sampled_from(["number", "integer", ["integer", "null"]])},
    optional={keyword: st.sampled_from(BOUNDS) for keyword in KEYWORDS},
)


@settings(max_examples=examples(80), deadline=None, derandomize=True)
@given(schema=NUMBERS, multiple=st.sampled_from([None, None, 1, 5]))
def test_each_allowed_text_is_valid_and_bounds_are_allowed(schema: dict[str, Any], multiple: int | None) -> None:
    if multiple is not None:
        schema = {**schema, "multipleOf": multiple}
    allowed = check_texts(schema, SHORT)
    assume(not allowed.error)
    validator = jsonschema.Draft202012Validator(schema)
    for keyword in KEYWORDS:
        bound = schema.get(keyword, 0) or 0  # 0 stands for -0.0, which only some grammars write
        for text in (repr(bound).removesuffix(".0"), repr(bound + 1).removesuffix(".0")):
            if "e" not in text and validator.is_valid(json.loads(text)):
                # below a maximum of 1.55, the grammar has 1.50 and not 1.5
                assert any(allowed(text + zeros) for zeros in ("", "0", ".0")), (schema, text)


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(parts=st.lists(NUMBERS, min_size=2, max_size=2))
def test_parts_of_a_schema_are_merged(parts: list[dict[str, Any]]) -> None:
    check_texts({"allOf": parts}, SHORT[::3])


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(
    minimum=st.sampled_from(BOUNDS),
    width=st.sampled_from([0.25, 0.5, 1, 3]),
    lower=st.booleans(),
    upper=st.sampled_from([0, 1]),
)
def test_exclusive_bounds_of_draft_4(minimum: float, width: float, lower: bool, upper: bool) -> None:
    schema = {"type": "number", "minimum": minimum, "maximum": minimum + width, "exclusiveMinimum": lower}
    check_texts(schema | {"exclusiveMaximum": True} if upper else schema, SHORT[::3], jsonschema.Draft4Validator)


@pytest.mark.parametrize("number_type", ["integer", ["integer", "null"], "number"])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("bound", [(1 << 53) - 1, 1 << 53, (1 << 53) + 1, (1 << 53) + 2, (1 << 60) + 1, INT64 - 2, INT64 - 1])
@pytest.mark.parametrize("is_strict", [False, True])
def test_large_integers(number_type: Any, sign: int, bound: int, is_strict: bool) -> None:
    keyword = {(1, False): "maximum", (1, True): "exclusiveMaximum", (-1, False): "minimum", (-1, True): "exclusiveMinimum"}
    schema = {"type": number_type, keyword[sign, is_strict]: sign * bound}
    near = [sign * (bound + step) for step in (-20000, -1025, -3, -2, -1, 0, 1, 2, 3, 1025, 20000)]
    # one more text that a rounded bound would allow
    allowed = check_texts(schema, [*map(str, near), str(int(float(f"{sign * bound:.15e}")))])
    assert not allowed.error
    assert allowed(str(sign * (bound - 20000)))
    assert allowed("0")
    if bound < 1 << 53 or (number_type != "number" and schema == {"type": number_type, "maximum": INT64 - 1}):
        assert allowed(str(sign * (bound - is_strict)))


def test_the_range_of_int64() -> None:
    """llguidance refuses its lower end."""
    allowed = check_texts({"type": "integer", "minimum": -INT64, "maximum": INT64 - 1}, [str(INT64), str(-INT64 - 1)])
    assert not allowed.error
    assert all(map(allowed, ["0", str(INT64 - 1), str(-INT64 + 1024)]))


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        pytest.param({"const": (1 << 53) + 1}, "const", id="const"),
        pytest.param({"enum": [1, [{"a": (1 << 60) + 1}]]}, "enum", id="enum"),
        pytest.param({"properties": {"x": {"const": 9007199254740991.0}}}, "const", id="const of 16 digits and a zero"),
        pytest.param({"const": 2.0**60}, "const", id="float"),
        pytest.param({"type": "integer", "minimum": INT64}, "minimum", id="minimum"),
        pytest.param({"type": "integer", "exclusiveMaximum": -INT64}, "maximum", id="maximum"),
    ],
)
def test_numbers_without_a_replacement_are_refused(schema: dict[str, Any], keyword: str) -> None:
    with pytest.raises(
        ParameterError, match=rf"json_schema must have (numbers of .* digits under {keyword}, or|a {keyword} that)"
    ) as refused:
        Allowed(schema)
    assert refused.value.field == "json_schema"


@pytest.mark.parametrize("value", [0, -5, 1 << 53, 1 << 60, INT64 - 1, 0.1, -0.25, 1e-7, 3.141592653589793, {"a": [1, 2.5]}])
def test_other_constants_are_written_as_they_are(value: Any) -> None:
    allowed = Allowed({"const": value})
    assert allowed(json.dumps(value) if value != 1e-7 else "0.0000001")
    if isinstance(value, int | float):
        assert not allowed(repr(value + 1))


def test_what_is_no_bound_stays() -> None:
    schema = {
        "properties": {"exclusiveMinimum": True, "minimum": {"const": {"exclusiveMinimum": 0}}},
        "$defs": {"exclusiveMinimum": False},
        "default": {"exclusiveMinimum": 0},
        "examples": [{"exclusiveMinimum": 0}],
        "enum": [{"exclusiveMinimum": 0}],
        "minimum": 0.1,
        "maximum": 7,
    }
    narrowed = copy.deepcopy(schema)
    narrow_numbers(narrowed)
    assert narrowed == schema


@pytest.mark.parametrize(
    ("given", "narrowed"),
    [
        ({"exclusiveMinimum": 0}, {"minimum": 1e-22}),
        ({"exclusiveMaximum": -1}, {"maximum": -1.00000000000001}),
        ({"exclusiveMinimum": 5, "type": "integer"}, {"minimum": 6, "type": "integer"}),
        ({"minimum": 0.12345678901234567}, {"minimum": 0.123456789012346}),
        ({"maximum": 9223372036854775e3}, {"maximum": 9.22337203685477e18}),
        ({"maximum": 1e-30}, {"maximum": 0.0}),
        ({"maximum": 9007199254740991.0}, {"maximum": 9007199254740991}),
        ({"minimum": 2, "exclusiveMinimum": True}, {"minimum": 2.00000000000001}),
        ({"minimum": float("inf")}, {"minimum": float("inf")}),
    ],
    ids=str,
)
def test_bounds_are_narrowed(given: dict[str, Any], narrowed: dict[str, Any]) -> None:
    schema = copy.deepcopy(given)
    narrow_numbers(schema)
    assert schema == narrowed
