"""Each kind of pydantic's errors that a request or a setting can meet is a rule in our words."""

import re
from typing import Annotated, Any, Literal

import pytest
from fa_serve.server.rules import rule_of, rule_of_all
from pydantic import BaseModel, Field, TypeAdapter, ValidationError


class Part(BaseModel):
    text: str


def errors(kind: Any, value: Any, strict: bool = True) -> list[Any]:
    with pytest.raises(ValidationError) as refused:
        TypeAdapter(kind).validate_python(value, strict=strict)
    return refused.value.errors()


@pytest.mark.parametrize(
    ("kind", "value", "rule"),
    [
        (str, 5, "must be a string"),
        (int, "5", "must be an integer"),
        (int, 1.5, "must be an integer"),
        (float, "x", "must be a number"),
        (Annotated[float, Field(allow_inf_nan=False)], float("nan"), "must be a finite number"),
        (bool, "yes", "must be true or false"),
        (list[int], 5, "must be a list"),
        (dict[str, int], 5, "must be an object"),
        (Part, 5, "must be an object"),
        (Literal["left", "right"], "up", "must be 'left' or 'right'"),
        (Annotated[int, Field(ge=1)], 0, "must be at least 1"),
        (Annotated[float, Field(gt=0)], 0, "must be above 0"),
        (Annotated[float, Field(le=2)], 3, "must be at most 2"),
        (Annotated[float, Field(lt=0.5)], 3, "must be below 0.5"),
        (Annotated[list[int], Field(min_length=1)], [], "must have at least 1 item"),
        (Annotated[list[int], Field(max_length=2)], [1, 2, 3], "must have at most 2 items"),
        (Annotated[str, Field(min_length=1)], "", "must have at least 1 character"),
        (Annotated[str, Field(max_length=2)], "abc", "must have at most 2 characters"),
        (Annotated[str, Field(pattern="^a$")], "b", "must match the pattern ^a$"),
    ],
)
def test_the_rule_of_an_error(kind, value, rule):
    [error] = errors(kind, value)
    assert rule_of(error) == rule


@pytest.mark.parametrize(("kind", "value"), [(int, "x"), (float, "x"), (bool, "x")])
def test_texts_of_the_environment_have_the_same_rules(kind, value):
    [error] = errors(kind, value, strict=False)
    assert re.fullmatch("must be (an integer|a number|true or false)", rule_of(error))


def test_a_union_has_one_rule():
    words = str | list[int]
    assert rule_of_all(errors(words, {})) == "must be a string or a list"
    some = Annotated[str, Field(min_length=1)] | Annotated[list[int], Field(min_length=1)]
    assert rule_of_all(errors(some, [])) == "must have at least 1 item", "and not that it must be a string"
