"""Images on a GPU: the tokens of `generate`, by graphs for the tokens after the prompt."""

from __future__ import annotations

import pytest
from report_types import check_images

pytestmark = pytest.mark.usefixtures("full_float32")


@pytest.mark.parametrize(
    "name",
    ["llava", "llava_onevision", "mistral3", "internvl", "gemma3", "gemma4", "paligemma", "qwen2_5_vl", "qwen3_vl", "smolvlm"],
)
def test_tokens_are_those_of_generate(name: str) -> None:
    check_images(name, device="cuda")
