"""Image-text types of transformers: what docs/models.md says of a type is what happens.

Each sixteenth of the types, because all of them take minutes: FA_SERVE_CASES=all runs them all.
What is served with the release of the page is served with later ones, which add more types.
"""

from __future__ import annotations

import json

import pytest
import report_newer
import transformers
from every_type import CAUSAL, IMAGE_TEXT
from image_inputs import IMAGES
from report_models import FAMILIES as RESULTS
from report_types import UNTRIED, YES, check_images, check_text
from sampled_cases import each_nth

from fa_serve.hf.images import PROVEN

FOUND = json.loads(RESULTS.read_text())
ROWS = FOUND["types"]
NEWER = json.loads(report_newer.RESULTS.read_text())
SERVED = [name for name in IMAGE_TEXT if name in ROWS and ROWS[name]["engine text"] == YES]
ADDED = [name for name, row in NEWER["types"].items() if name in {*IMAGE_TEXT, *CAUSAL} and row["engine text"] == YES]
TRIED = [*each_nth(16, SERVED), *each_nth(8, ADDED)]
of_the_page = pytest.mark.skipif(
    FOUND["versions"]["transformers"] != transformers.__version__, reason="the page is about another release of transformers"
)


@pytest.mark.parametrize("name", TRIED)
def test_tokens_are_those_of_generate(name: str) -> None:
    """A check of images has a prompt of text alone beside those with images."""
    if (ROWS | NEWER["types"])[name]["engine image"] == YES:
        check_images(name)
    else:
        check_text(name)


@pytest.mark.skipif(NEWER["transformers"] != transformers.__version__, reason="the results are of another release")
def test_every_type_that_the_newest_release_adds_has_a_row() -> None:
    assert list(NEWER["types"]) == report_newer.added(), f"run {report_newer.__file__} again"
    assert all(reason for row in NEWER["types"].values() for reason in row.values())


@of_the_page
def test_every_type_has_a_row() -> None:
    assert set(ROWS) == {*IMAGE_TEXT, *CAUSAL}
    assert all(reason for row in ROWS.values() for reason in row.values())
    assert {name for name, reason in UNTRIED.items() if ROWS[name]["engine text"] != reason} == set()


@of_the_page
def test_images_of_those_types_are_served_that_are_proven() -> None:
    seen = {name for name, row in ROWS.items() if row["engine image"] == YES}
    assert seen == PROVEN
    assert seen <= set(IMAGES)
    assert len(seen) >= 40
    assert len(SERVED) >= 75
