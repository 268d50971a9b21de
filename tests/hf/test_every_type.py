"""Image-text types of transformers: what docs/models.md says of a type is what happens.

Each eighth of the types, because all of them take minutes: `make test-types` sets FA_SERVE_EVERY_TYPE, which runs them all.
"""

from __future__ import annotations

import json
import os

import pytest
import transformers
from every_type import CAUSAL, IMAGE_TEXT
from image_inputs import IMAGES
from report_models import FAMILIES as RESULTS
from report_types import UNTRIED, YES, check_images, check_text

from fa_serve.hf.images import PROVEN

FOUND = json.loads(RESULTS.read_text())
ROWS = FOUND["types"]
SERVED = [name for name in IMAGE_TEXT if name in ROWS and ROWS[name]["engine text"] == YES]
TRIED = SERVED if os.environ.get("FA_SERVE_EVERY_TYPE") else SERVED[::8]
pytestmark = pytest.mark.skipif(
    FOUND["versions"]["transformers"] != transformers.__version__, reason="the page is about another release of transformers"
)


@pytest.mark.parametrize("name", TRIED)
def test_tokens_are_those_of_generate(name: str) -> None:
    """A check of images has a prompt of text alone beside those with images."""
    if ROWS[name]["engine image"] == YES:
        check_images(name)
    else:
        check_text(name)


def test_every_type_has_a_row() -> None:
    assert set(ROWS) == {*IMAGE_TEXT, *CAUSAL}
    assert all(reason for row in ROWS.values() for reason in row.values())
    assert {name for name, reason in UNTRIED.items() if ROWS[name]["engine text"] != reason} == set()


def test_images_of_those_types_are_served_that_are_proven() -> None:
    seen = {name for name, row in ROWS.items() if row["engine image"] == YES}
    assert seen == PROVEN
    assert seen <= set(IMAGES)
    assert len(seen) >= 40
    assert len(SERVED) >= 75
