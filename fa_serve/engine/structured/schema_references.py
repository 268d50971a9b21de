"""References of a JSON schema that never end or lead nowhere: llguidance does not say why no value fits `{"$ref": "#"}`.

    check_references(schema)      # a ParameterError names the reference

A schema *ends* if a finite value can follow it. For that these must end: its `$ref`, each member of `allOf`, one member of
`anyOf` and of `oneOf`, the properties that are required, and the items if there must be some. A schema that refers to itself
only in other places, such as a tree with optional children, ends.

References that lead nowhere are found on the way. Left out: documents whose parts have an `$id` (llguidance resolves their
references), and whether a schema contradicts itself.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from fa_serve.spec import ParameterError

_NO_SCHEMAS = ("$defs", "definitions", "const", "enum", "default", "examples")
"""Keywords whose values hold no schema, or only schemas that something must refer to."""
METASCHEMAS = ("http://json-schema.org/", "https://json-schema.org/")
"""llguidance knows these documents."""


def check_references(schema: Mapping[str, Any]) -> None:
    """Raise ParameterError for a schema if a part of it has a reference that leads nowhere or never ends."""
    lost, endless = bad_references(schema)
    if lost is not None:
        rule = (
            f"refer only to existing parts of the same document, but {lost!r} does not: write the schema that it stands for "
            "under $defs, and refer to it as '#/$defs/NAME'"
        )
        raise ParameterError("json_schema", rule, schema)
    if endless is not None:
        rule = (
            f"have no endless references, but {endless!r} leads back to itself, so no finite value conforms to it: replace it "
            "with the schema that it stands for, or make the property that leads back optional"
        )
        raise ParameterError("json_schema", rule, schema)


def bad_references(schema: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """A `$ref` that leads nowhere, and a `$ref` that leads back to itself without end; None where there is none.

    The time is linear in the size of the schema: a second of the interpreter for 1.4 MB. A document without references, as most
    large documents are, costs a thirtieth of that.
    """
    if '"$ref"' not in json.dumps(schema):
        return None, None
    nodes: dict[int, Mapping[str, Any]] = {}
    needs: dict[int, list[list[int]]] = {}
    found = [schema]
    while found:
        node = found.pop()
        if id(node) in nodes:
            continue
        nodes[id(node)] = node
        if "$id" in node and node is not schema:
            return None, None
        if _is_lost(schema, node):
            return str(node["$ref"]), None
        groups = _needs(schema, node)
        needs[id(node)] = [[id(member) for member in group] for group in groups]
        found += _schemas_in(node)
        found += [member for group in groups for member in group]
    endless = set(nodes) - _ending(needs)
    for key in [key for key in nodes if key in endless]:
        seen: dict[int, None] = {}
        while key not in seen:
            seen[key] = None
            key = next(key for group in needs[key] if endless.issuperset(group) for key in group)
        circle = list(seen)[list(seen).index(key) :]
        references = [nodes[key]["$ref"] for key in circle if _target(schema, nodes[key]) is not None]
        if references:
            return None, str(references[0])
    return None, None


def _ending(needs: Mapping[int, list[list[int]]]) -> set[int]:
    """The schemas that end: each of their groups has a member that ends."""
    waiting = {key: len(groups) for key, groups in needs.items()}
    groups_with: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for key, groups in needs.items():
        for number, group in enumerate(groups):
            for member in group:
                groups_with[member].append((key, number))
    met: set[tuple[int, int]] = set()
    ending = {key for key, count in waiting.items() if not count}
    ready = list(ending)
    while ready:
        for owner in groups_with[ready.pop()]:
            if owner not in met:
                met.add(owner)
                waiting[owner[0]] -= 1
                if not waiting[owner[0]]:
                    ending.add(owner[0])
                    ready.append(owner[0])
    return ending


def _needs(root: Mapping[str, Any], node: Mapping[str, Any]) -> list[list[Mapping[str, Any]]]:
    """Groups of schemas. This schema ends if at least one schema of every group ends."""
    groups: list[list[Any]] = [[_target(root, node)]]
    groups += [[member] for member in _list(node.get("allOf"))]
    groups += [_list(node.get(keyword)) for keyword in ("anyOf", "oneOf")]
    properties = node.get("properties")
    if isinstance(properties, Mapping):
        groups += [[properties.get(name)] for name in _list(node.get("required")) if isinstance(name, str)]
    fewest = node.get("minItems")
    if isinstance(fewest, int) and fewest > 0:
        first = _list(node.get("prefixItems"))[:fewest]
        groups += [[member] for member in first]
        groups += [[node.get("items")]] if fewest > len(first) else []
    # a group with a member that is not an object, such as the schema true, always ends
    return [group for group in groups if group and all(isinstance(member, Mapping) for member in group)]


def _schemas_in(node: Any) -> Iterator[Mapping[str, Any]]:
    """The objects inside a schema, which are schemas or contain schemas."""
    values = [value for keyword, value in node.items() if keyword not in _NO_SCHEMAS]
    while values:
        value = values.pop()
        if isinstance(value, Mapping):
            yield value
        elif isinstance(value, list):
            values += value


def _is_lost(root: Mapping[str, Any], node: Mapping[str, Any]) -> bool:
    """Whether a schema refers to another document, or to a part that this one does not have."""
    reference = node.get("$ref")
    if not isinstance(reference, str) or "$id" in root:
        return False
    if reference.startswith(METASCHEMAS) or (reference.startswith("#") and not reference.startswith("#/")):
        return False  # "#" is the whole document, and "#name" an anchor inside it
    return _part(root, reference) is None


def _target(root: Mapping[str, Any], node: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The schema that the `$ref` of a schema stands for, or None if there is none, or if it is true or false."""
    reference = node.get("$ref")
    part = _part(root, reference) if isinstance(reference, str) else None
    return part if isinstance(part, Mapping) else None


def _part(root: Mapping[str, Any], reference: str) -> Any:
    """The part of a document that a reference points to, or None."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    value: Any = root
    for token in reference.split("/")[1:]:
        name = unquote(token).replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping):
            value = value.get(name)
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
