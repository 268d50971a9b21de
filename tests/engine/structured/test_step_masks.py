"""Which rows of a step have masks, and what becomes of matchers that fail or are late."""

from __future__ import annotations

import numpy as np

from fa_serve.engine.request.output_state import OutputState
from fa_serve.engine.request.params import SamplingParams
from fa_serve.engine.request.request import Request
from fa_serve.engine.scheduler.scheduled_batch import Chunk, ScheduledBatch
from fa_serve.engine.scheduler.sequence import SequenceState
from fa_serve.engine.structured.step_masks import StepMasks, grammar_ends, step_masks


class FakeMatcher:
    """It fails if it is told so, and is complete after its second token."""

    def __init__(self, error: str = "") -> None:
        self.error = error
        self.num_tokens = 0

    def is_error(self) -> bool:
        return bool(self.error)

    def get_error(self) -> str:
        return self.error

    def consume_token(self, token: int) -> None:
        self.num_tokens += 1

    def is_stopped(self) -> bool:
        return self.num_tokens == 2


class FakeGrammars:
    """Masks whose words are the numbers of their rows. The last matcher's masks are late."""

    def masks(self, matchers, clients, drafts):
        self.clients = clients
        num_rows = sum(1 + len(own) for own in drafts)
        return np.arange(num_rows, dtype=np.int32)[:, None], [len(matchers) - 1]

    def allow_ends(self, words, end_ids):
        """No row allows its answer to end."""


def make_state(name: str, matcher: FakeMatcher | None) -> OutputState:
    sequence = SequenceState(Request(name, [1, 2], SamplingParams(), max_tokens=8, client=f"client of {name}"))
    return OutputState(sequence, matcher=matcher)


def test_masks_are_for_the_rows_of_unfinished_structured_outputs() -> None:
    """Rows are counted over all chunks: those of others, of prompts that sample nothing, and of sequences that have ended."""
    states = {
        "plain": make_state("plain", None),
        "drafts": make_state("drafts", FakeMatcher()),
        "prompt": make_state("prompt", FakeMatcher()),
        "ended": make_state("ended", FakeMatcher()),
        "failed": make_state("failed", FakeMatcher("no such token")),
    }
    num_samples = {"plain": 1, "drafts": 3, "prompt": 0, "ended": 1, "failed": 1}
    chunks = [
        Chunk(states[name].sequence, slot=0, start=1, length=max(count, 1), num_samples=count, drafts=[5] * max(count - 1, 0))
        for name, count in num_samples.items()
    ]
    del states["ended"]
    grammars = FakeGrammars()
    masks = step_masks(grammars, ScheduledBatch(chunks), states)
    assert {row: mask.tolist() for row, mask in masks.rows.items()} == {1: [0], 2: [1], 3: [2], 5: [3]}
    assert grammars.clients == ["client of drafts", "client of failed"]
    assert [(name, error.code, "no such token" in error.message) for name, error in masks.failed] == [
        ("failed", "grammar", True)
    ]
    assert masks.late == [4], "the index of its chunk"
    assert masks.seconds > 0
    assert step_masks(grammars, ScheduledBatch(chunks[:1]), states) == StepMasks(), "no row has a mask"


def test_a_chunk_whose_samples_are_not_used_has_no_masks_and_is_never_late() -> None:
    """The step before it had logits that are not finite, so its sequence waits to be computed again."""
    states = {"waits": make_state("waits", FakeMatcher())}
    chunk = Chunk(states["waits"].sequence, slot=0, start=1, length=1, num_samples=1, postponed=True)
    assert step_masks(FakeGrammars(), ScheduledBatch([chunk]), states) == StepMasks()


def test_a_grammar_ends_an_answer_inside_its_tokens() -> None:
    states = {
        "one": make_state("one", FakeMatcher()),
        "plain": make_state("plain", None),
        "two": make_state("two", FakeMatcher()),
    }
    gained = {states["one"].sequence: [7], states["plain"].sequence: [7, 7], states["two"].sequence: [7, 7, 7]}
    assert grammar_ends(gained, states) == {"one": 0, "two": 2}
