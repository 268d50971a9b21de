"""Chunks of prompts with images: none ends inside a block that attends both ways."""

from __future__ import annotations

import pytest

from fa_serve.engine.cache.pages import PageTable
from fa_serve.engine.errors import RequestError
from fa_serve.engine.images.prompt import PromptImages
from fa_serve.engine.request.params import SamplingParams
from fa_serve.engine.request.request import Request
from fa_serve.engine.scheduler.prompt_share import PromptShare
from fa_serve.engine.scheduler.scheduler import Scheduler


def make(max_tokens: int, prompt_share: PromptShare | None = None) -> Scheduler:
    pages = PageTable(64, 4)
    return Scheduler(pages, max_num_seqs=8, max_num_batched_tokens=max_tokens, keys_per_tile=16, prompt_share=prompt_share)


def request(name: str, length: int, *blocks: tuple[int, int], rank: int = 0) -> Request:
    prompt = list(range(100 * rank, 100 * rank + length))
    images = PromptImages((), prompt, blocks=blocks) if blocks else None
    return Request(name, prompt, SamplingParams(max_tokens=4), 4, rank=(0.0, rank), images=images)


def chunks(scheduler: Scheduler, steps: int) -> list[list[tuple[str, int, int]]]:
    found = []
    for _ in range(steps):
        batch = scheduler.schedule()
        found.append([(chunk.sequence.request.request_id, chunk.start, chunk.length) for chunk in batch.chunks])
        scheduler.commit(batch, [1] * sum(chunk.num_samples for chunk in batch.chunks))
        scheduler.check_integrity()
    return found


def test_a_chunk_ends_before_a_block_that_it_cannot_hold() -> None:
    scheduler = make(8)
    scheduler.add(request("image", 20, (5, 11), (11, 17)))
    assert chunks(scheduler, 4) == [[("image", 0, 5)], [("image", 5, 6)], [("image", 11, 8)], [("image", 19, 1)]]


def test_a_block_that_fits_into_no_step_is_computed_beside_decoding() -> None:
    """The limit was lowered for lack of memory after the request had come."""
    scheduler = make(8)
    scheduler.add(request("decodes", 1, rank=0))
    chunks(scheduler, 1)
    scheduler.max_num_batched_tokens = 4
    scheduler.add(request("image", 10, (2, 8), rank=1))
    scheduler.add(request("text", 9, rank=2))
    expected = [[("decodes", 1, 1), ("image", 0, 2), ("text", 0, 1)], [("decodes", 2, 1), ("image", 2, 6)]]
    expected += [[("decodes", 3, 1), ("image", 8, 2), ("text", 1, 1)]]
    assert chunks(scheduler, 3) == expected


def test_without_blocks_it_is_cut_anywhere() -> None:
    scheduler = make(8)
    scheduler.add(request("text", 20))
    assert chunks(scheduler, 3) == [[("text", 0, 8)], [("text", 8, 8)], [("text", 16, 4)]]


def test_a_block_waits_for_a_step_with_room() -> None:
    scheduler = make(8)
    scheduler.add(request("first", 5, rank=0))
    scheduler.add(request("image", 8, (0, 6), rank=1))
    assert chunks(scheduler, 2) == [[("first", 0, 5)], [("first", 5, 1), ("image", 0, 7)]]


@pytest.mark.parametrize("length", [6, 7])
def test_a_block_beside_decoding_is_not_starved_by_the_share_of_prompts(length: int) -> None:
    class Small(PromptShare):
        def limits(self, *step: object) -> tuple[int, int]:
            return 2, 2

    scheduler = make(8, Small(20.0))
    scheduler.add(request("decodes", 1, rank=0))
    chunks(scheduler, 1)
    scheduler.add(request("image", length, (0, length), rank=1))
    assert chunks(scheduler, 1) == [[("decodes", 1, 1), ("image", 0, length)]]


@pytest.mark.parametrize("undo", ["fail", "rollback"])
def test_a_sequence_without_a_chunk_keeps_no_pages_that_a_failed_step_was_to_fill(undo: str) -> None:
    """Its block has no room left in the step that gave it the slot, and in which the text before the block is computed."""
    scheduler = make(16)
    first = scheduler.add(request("first", 9))
    text = list(range(8))
    images = PromptImages((), [*text, *range(50, 62)], blocks=((8, 18),))
    image = scheduler.add(Request("image", list(images.content), SamplingParams(max_tokens=4), 4, rank=(0.0, 1), images=images))
    batch = scheduler.schedule()
    assert [chunk.sequence for chunk in batch.chunks] == [first]
    assert (image.slot >= 0, image.num_computed) == (True, 8), "it is the scenario of this test"
    if undo == "fail":
        scheduler.fail(batch, RequestError("step_failed", "the step failed"))
    else:
        scheduler.rollback(batch)
    assert (image.slot, image.num_computed) == (-1, 0)
    scheduler.check_integrity()
    again = [("image", 0, 8)] if undo == "fail" else [("first", 0, 9)]
    assert chunks(scheduler, 1) == [again]
