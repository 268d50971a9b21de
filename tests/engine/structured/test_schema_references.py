"""References of a schema that never end are found, wherever they stand, and no other schema is refused."""

from __future__ import annotations

import time
from typing import Any

import pytest

from fa_serve import ParameterError
from fa_serve.engine.structured.schema_references import bad_references, check_references

SELF = {"$ref": "#/$defs/a"}
DEFS = {"$defs": {"a": SELF}}
NODE = {"type": "object", "properties": {"next": {"$ref": "#"}, "default": {"type": "string"}}}

ENDLESS: list[tuple[str, dict[str, Any], str]] = [
    ("itself", {"$ref": "#"}, "#"),
    ("definition", SELF | DEFS, "#/$defs/a"),
    ("two", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "#/$defs/"),
    ("allOf", {"allOf": [{"type": "object"}, {"$ref": "#"}]}, "#"),
    ("every branch of anyOf", {"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]}, "#"),
    ("oneOf", {"oneOf": [{"$ref": "#"}]}, "#"),
    ("optional property", {"properties": {"x": SELF}} | DEFS, "#/$defs/a"),
    ("property called like a keyword", {"properties": {"default": SELF}, "required": ["default"]} | DEFS, "#/$defs/a"),
    ("items", {"type": "array", "items": SELF} | DEFS, "#/$defs/a"),
    ("additional properties", {"type": "object", "additionalProperties": SELF} | DEFS, "#/$defs/a"),
    ("required", NODE | {"required": ["next"]}, "#"),
    ("items that must be", {"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#"),
    ("first item", {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, "#"),
    ("escaped pointer", {"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": {"$ref": "#/$defs/a~1b%20c"}}}, "#/$defs/a~1b%20c"),
    ("pointer into a list", {"anyOf": [{"$ref": "#/anyOf/0"}]}, "#/anyOf/0"),
]
ENDING: list[tuple[str, dict[str, Any]]] = [
    ("optional", NODE),
    ("required default", NODE | {"required": ["default"]}),
    ("required and not described", {"type": "object", "required": ["x"]}),
    ("items", {"type": "array", "items": {"$ref": "#"}}),
    ("another branch", {"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
    ("list or null", NODE | {"required": ["next"], "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}),
    ("unused", {"type": "object"} | DEFS),
    ("a value that looks like one", {"const": {"$ref": "#"}, "enum": [{"$ref": "#"}], "default": {"$ref": "#"}}),
    ("a property called $ref", {"properties": {"$ref": {"type": "string"}}, "required": ["$ref"]}),
    ("a name inside", {"$ref": "#name", "$defs": {"a": {"$anchor": "name"}}}),
    ("another address of this document", {"$id": "https://example.org/a", "$ref": "https://example.org/a#/$defs/b"}),
    ("a document inside", {"properties": {"x": {"$id": "https://example.org/a", "$ref": "#"}}, "required": ["x"]}),
    ("a part that is true", {"$ref": "#/$defs/a", "$defs": {"a": True}}),
    ("a part that is false", {"$ref": "#/$defs/a", "$defs": {"a": False}}),
    ("nothing refers to it", {"$defs": {"a": {"$ref": "#/$defs/none"}}}),
    ("true", {"allOf": [True], "anyOf": [True, {"$ref": "#"}], "items": True, "minItems": 1}),
    ("odd", {"allOf": 3, "properties": [], "required": "x", "$ref": 5, "minItems": 1.5}),
]


@pytest.mark.parametrize(("schema", "reference"), [pytest.param(*rest, id=name) for name, *rest in ENDLESS])
def test_a_reference_that_never_ends_is_named(schema: dict[str, Any], reference: str) -> None:
    lost, found = bad_references(schema)
    assert lost is None
    assert found is not None
    assert found.startswith(reference)
    with pytest.raises(ParameterError, match=r"json_schema must have no endless references, but '#.*' leads back to itself"):
        check_references(schema)


@pytest.mark.parametrize("schema", [pytest.param(schema, id=name) for name, schema in ENDING])
def test_other_schemas_pass(schema: dict[str, Any]) -> None:
    assert bad_references(schema) == (None, None)
    check_references(schema)


@pytest.mark.parametrize("reference", ["#/$defs/none", "#/$defs/a/7", "https://example.org/schema", "other.json#/a", "#/$defs"])
def test_a_reference_that_leads_nowhere_is_named(reference: str) -> None:
    schema = {"items": {"$ref": reference}, "definitions": {"a": []}}
    assert bad_references(schema) == (reference, None)
    with pytest.raises(
        ParameterError, match=r"refer only to existing parts of the same document, but '.*' does not: write the schema"
    ):
        check_references(schema)


def seconds_of_a_chain(length: int) -> float:
    """Of the processor, for a chain of references that ends, and one that does not."""
    begin = time.thread_time()
    for last in ({"type": "null"}, {"$ref": "#/$defs/0"}):
        definitions = {str(i): {"allOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(length)} | {str(length): last}
        _, found = bad_references({"$ref": "#/$defs/0", "$defs": definitions})
        assert (found is None) == ("type" in last)
    return time.thread_time() - begin


def test_the_time_is_linear() -> None:
    """Sixteen times the references take about 16 times as long. It would be 256 times if each looked at all others."""
    assert seconds_of_a_chain(12_800) < 64 * min(seconds_of_a_chain(800) for _ in range(3))
