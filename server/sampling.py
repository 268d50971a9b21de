"""A request's fields as the engine's `SamplingParams`. The engine checks the values; its complaint becomes a 400."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fa_serve.engine import SamplingParams, StructuredOutput

from .errors import BadRequest
from .schemas import ChatRequest, SamplingRequest, Tool

SAME = (
    "n",
    "seed",
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
)


@dataclass(frozen=True)
class Constraint:
    """What an answer is held to, and the field that wants it."""

    field: str
    output: StructuredOutput


def sampling_params(body: SamplingRequest, **others: Any) -> SamplingParams:
    """What the request leaves open is the engine's default."""
    given: dict[str, Any] = {name: getattr(body, name) for name in SAME}
    given |= {
        "top_k": None if body.top_k is None else max(body.top_k, 0),
        "logit_bias": _token_ids(body.logit_bias) if body.logit_bias else None,
        "allowed_token_ids": None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        "stop": (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        "best_of": getattr(body, "best_of", None),
        "stop_token_ids": tuple(body.stop_token_ids or ()),
    } | others
    try:
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})
    except ValueError as error:
        raise BadRequest(f"{error}.", param=str(error).split()[0], code="invalid_value") from None


def _token_ids(bias: dict[str, float]) -> dict[int, float]:
    try:
        ids = {int(token): value for token, value in bias.items()}
    except ValueError:
        ids = {}
    if [*map(str, ids)] != [*bias]:  # int() also takes "1_0", "+1" and other writers' digits
        raise BadRequest("logit_bias must have token ids as its keys.", param="logit_bias", code="invalid_value")
    return ids


def constraint(body: SamplingRequest) -> Constraint | None:
    """Of all the ways to ask for a structured output the one that the request uses. Raises BadRequest if there are two."""
    wanted: dict[str, dict[str, Any]] = {
        "guided_json": {"json_schema": body.guided_json},
        "guided_regex": {"regex": body.guided_regex},
        "guided_choice": {"choice": body.guided_choice},
        "guided_grammar": {"grammar": body.guided_grammar},
    }
    if body.structured_outputs is not None:
        structured = body.structured_outputs.model_dump(exclude_none=True)
        wanted["structured_outputs"] = {"json_schema" if name == "json_" else name: value for name, value in structured.items()}
    if isinstance(body, ChatRequest):
        wanted |= _of_chat(body)
    given = {field: {k: v for k, v in kinds.items() if v not in (None, False)} for field, kinds in wanted.items()}
    chosen = [(field, kinds) for field, kinds in given.items() if kinds or field == "structured_outputs"]
    if not chosen:
        return None
    field, kinds = chosen[-1]
    if len(chosen) > 1:
        raise BadRequest(f"{field} and {chosen[0][0]} exclude each other.", param=field, code="invalid_value")
    if len(kinds) != 1:
        raise BadRequest(f"{field} must have exactly one constraint.", param=field, code="invalid_value")
    if "choice" in kinds:
        kinds["choice"] = tuple(kinds["choice"])
    return Constraint(field, StructuredOutput(**kinds))


def _of_chat(body: ChatRequest) -> dict[str, dict[str, Any]]:
    wanted: dict[str, dict[str, Any]] = {}
    if body.response_format is not None:
        schema = body.response_format.json_schema
        wanted["response_format"] = {
            "json_object": body.response_format.type == "json_object" or None,
            "json_schema": None if schema is None else schema.schema_ or {},
        }
    if (tool := body.named_tool()) is not None:
        wanted["tool_choice"] = {"json_schema": tool.parameters()}
    elif body.tool_choice == "required":
        most = {"maxItems": 1} if body.parallel_tool_calls is False else {}
        calls, parameters = call_schemas(body.offered_tools(), "parameters")
        items = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
        wanted["tool_choice"] = {"json_schema": {**items, **most, "$defs": parameters}}
    return wanted


def call_schemas(tools: Sequence[Tool], arguments: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Schemas of calls, {"name": ..., arguments: ...}, and the definitions that they refer to."""
    calls = []
    definitions = {}
    for name, parameters in ((tool.function.name, tool.parameters()) for tool in tools):
        place = f"#/$defs/{name}"
        definitions[name] = _moved(parameters, place)
        properties = {"name": {"const": name}, arguments: {"$ref": place}}
        calls.append({"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False})
    return calls, definitions


def _moved(schema: Any, place: str) -> Any:
    """A schema that is no longer a document's root: its references begin at its new place."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    if isinstance(reference := moved.get("$ref"), str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved
