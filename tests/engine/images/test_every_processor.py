"""Prompts with images of every type that docs/models.md serves, from the type's own processor to the answer.

In another process, because processors need a torchvision that other tests may not see. A sample has each eighth type.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from image_inputs import ONE_IMAGE
from sampled_cases import each_nth
from torchvision_beside import has_torchvision

from fa_serve.hf.images import PROVEN

PROGRAM = Path(__file__).parents[2] / "support" / "image_processors.py"
TYPES = sorted(PROVEN)


@pytest.mark.slow
@pytest.mark.skipif(not has_torchvision(), reason="`make .venv/images/.installed` gets torchvision")
def test_prompts_and_answers_are_those_of_transformers() -> None:
    """For one image and for two of other sizes: the tokens of the processor, and with them those of `generate`."""
    asked = each_nth(8, TYPES)
    # warnings are not errors here: each type of transformers has some
    ended = subprocess.run([sys.executable, PROGRAM, *asked], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = {each["kind"]: each for each in map(json.loads, ended.stdout.splitlines())}
    assert [*found] == asked
    others = {
        kind: (what, ours, theirs)
        for kind, each in found.items()
        for what in ("tokens", "answers")
        for ours, theirs in each[what]
        if ours != theirs
    }
    assert others == {}
    assert {kind for kind, each in found.items() if each["refused"]} == ONE_IMAGE & {*asked}
    assert all(len(each["answers"]) == (1 if kind in ONE_IMAGE else 2) for kind, each in found.items())
