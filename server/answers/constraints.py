"""The structured output that a request asks for. Several fields can ask for one, but a request may use only one of them.

    constraint = single_constraint(guided_constraints(body))

`guided_constraints` reads the fields that completions and chats share; chat/answer.py adds the fields that only chats have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fa_serve.engine import StructuredOutput
from fa_serve.spec import ParameterError

from ..errors import BadRequest, parameter_refused
from ..schemas import SamplingRequest


@dataclass(frozen=True)
class Constraint:
    """field: the request's field that asks for the output; output: the form that the answer must have"""

    field: str
    output: StructuredOutput


def guided_constraints(body: SamplingRequest) -> dict[str, dict[str, Any]]:
    """For each field that can ask for a structured output, the arguments of `StructuredOutput` that it holds."""
    asked: dict[str, dict[str, Any]] = {
        "guided_json": {"json_schema": body.guided_json},
        "guided_regex": {"regex": body.guided_regex},
        "guided_choice": {"choice": body.guided_choice},
        "guided_grammar": {"grammar": body.guided_grammar},
    }
    if body.structured_outputs is not None:
        given = dict(body.structured_outputs)  # not model_dump(), which copies the whole schema
        asked["structured_outputs"] = {"json_schema" if name == "json_" else name: value for name, value in given.items()}
    return asked


def single_constraint(asked: Mapping[str, Mapping[str, Any]]) -> Constraint | None:
    """The one constraint that is given, or None. Raises BadRequest if two fields, or two kinds in one field, are given.

    asked: for each field, arguments of `StructuredOutput`; None and False count as absent
    """
    given = {field: {k: v for k, v in kinds.items() if v not in (None, False)} for field, kinds in asked.items()}
    chosen = [(field, kinds) for field, kinds in given.items() if kinds or field == "structured_outputs"]
    if not chosen:
        return None
    field, kinds = chosen[-1]
    if len(chosen) > 1:
        raise BadRequest(f"{field} must not be given together with {chosen[0][0]}.", param=field, code="invalid_value")
    if len(kinds) != 1:
        raise BadRequest(f"{field} must have exactly one constraint.", param=field, code="invalid_value")
    if "choice" in kinds:
        kinds["choice"] = tuple(kinds["choice"])
    try:
        return Constraint(field, StructuredOutput(**kinds))
    except ParameterError as error:
        raise parameter_refused(error, field) from None
