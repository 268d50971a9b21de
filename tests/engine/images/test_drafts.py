"""Images in an engine that drafts: what a draft model or a head guesses of a prompt that it does not see changes no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from image_cases import GREEDY, Case
from image_drafts import save_random_head, save_twin

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llava", {}),
    ("llava", {"num_pages": 10, "max_model_len": 40, "prefix_caching": False}),
    ("qwen2_5_vl", {}),
    ("qwen3_vl", {"max_num_batched_tokens": 9, "max_num_seqs": 2}),
    ("gemma3", {}),
]
"""Pictures, preempted as well, positions on three axes, features for inner layers, and blocks that attend both ways."""


@pytest.mark.parametrize("kind", ["model", "head"])
@pytest.mark.parametrize(("name", "settings"), CASES, ids=["llava", "preempted", "axes", "deep", "blocks"])
def test_drafts_change_no_token(tmp_path: Path, kind: str, name: str, settings: dict[str, Any]) -> None:
    case = Case(name)
    speculative = (save_twin if kind == "model" else save_random_head)(case.model, tmp_path)
    engine = case.engine(speculative=speculative, num_speculative_tokens=3, **settings)
    given = [(case.prompt(0, text=3), [0]), (case.prompt(1, text=4), [1]), (list(range(30, 36)), [])]
    given += [(case.prompt(1, 0), [1, 0])] * (not settings)
    for _ in range(2):  # the second time with what is cached
        images = [[case.images[n] for n in numbers] for _, numbers in given]
        outputs = engine.generate([ids for ids, _ in given], GREEDY, images=images)
        for (ids, numbers), output in zip(given, outputs, strict=True):
            assert list(output.token_ids) == case.generate(ids, *numbers)
    stats = engine.stats()
    assert stats.speculation.num_draft_tokens > 0
    assert not engine._scheduler.speculation.drafter._failed
    if kind == "head":  # the drafts of the model are right, and its sequences end before pages are short
        assert (stats.num_preemptions > 0) == ("num_pages" in settings)
    engine.check_integrity()


def test_drafts_after_an_image_are_accepted(tmp_path: Path) -> None:
    """A draft model that has not seen the image still knows what the model writes after the text behind it."""
    case = Case("llava")
    engine = case.engine(speculative=save_twin(case.model, tmp_path), num_speculative_tokens=3)
    ids = case.prompt(0) + list(range(30, 90))
    [output] = engine.generate([ids], GREEDY, images=[[case.images[0]]])
    assert list(output.token_ids) == case.generate(ids, 0)
    assert engine.stats().speculation.num_accepted_tokens > 0
