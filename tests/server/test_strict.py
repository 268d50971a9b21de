"""The base of the request models: no conversion, no unknown field, and unsupported fields only with neutral values."""

from typing import Annotated

import pytest
from fa_serve.server.strict import StrictModel, field_error, one_error
from pydantic import ValidationError, model_validator


class Thing(StrictModel):
    size: int | None = None
    either: Annotated[int | list[int], one_error("a number or numbers")] = 0

    UNSUPPORTED = {"colour": ("default", False)}  # noqa: RUF012

    @model_validator(mode="after")
    def _check(self):
        if self.size == 13:
            raise field_error("size", "must not be 13")
        return self


@pytest.mark.parametrize("colour", [None, "default", False])
def test_neutral_values_of_unsupported_fields_pass(colour):
    assert Thing.model_validate({"size": 1, "colour": colour}).size == 1


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"colour": "red"}, "unsupported"),
        ({"colour": 0}, "unsupported"),
        ({"size": "1"}, "int_type"),
        ({"size": 13}, "field"),
        ({"weight": 1}, "unknown_field"),
        ({"either": "x"}, "union"),
        (3, "model_type"),
    ],
)
def test_everything_else_is_refused_with_one_error(body, kind):
    with pytest.raises(ValidationError) as refused:
        Thing.model_validate(body)
    [error] = refused.value.errors()
    assert error["type"] == kind
