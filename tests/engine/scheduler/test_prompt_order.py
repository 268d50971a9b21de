"""Which prompts get the tokens of a step: the shortest rest first, none starves, and clients take turns."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
from scheduling import BUDGET, Run, make_request, make_scheduler, step_cost

from fa_serve.engine.scheduler.fair_queue import FairQueue
from fa_serve.engine.scheduler.prompt_order import PromptOrder
from fa_serve.engine.scheduler.prompt_share import STRETCH, PromptShare
from fa_serve.engine.scheduler.sequence import SequenceState
from fa_serve.engine.scheduler.step_cost import StepSize


def share() -> PromptShare:
    """One that has measured prompts of 25 us a token, and decoding."""
    known = PromptShare()
    for tokens in (64, 256, 1024, 2048, 4096):
        known.record(StepSize(0, 0, tokens, 0), 25e-6 * tokens)
    known.record(StepSize(1), 0.004)
    return known


def run_with(**given: int) -> Run:
    run = Run(share(), **{"num_pages": 4_000, "seqs": 64} | given)
    run.add("decodes", [1] * 8, 5000)
    run.step()
    return run


def first_tokens(run: Run, names: dict[str, SequenceState]) -> list[str]:
    """The names in the order of their first tokens. Steps until all have one."""
    order: list[str] = []
    for _ in range(3000):
        run.step()
        order += [name for name, sequence in names.items() if sequence.num_output_tokens and name not in order]
        if len(order) == len(names):
            return order
    raise AssertionError("no progress")


def test_shorter_prompts_go_first_among_those_that_come_together() -> None:
    run = run_with()
    names = {
        str(length): run.add(str(length), [length] * length, 2, serial=serial)
        for serial, length in enumerate((20_000, 3_000, 700, 9_000), 1)
    }
    assert first_tokens(run, names) == ["700", "3000", "9000", "20000"]


def test_a_small_prompt_is_never_behind_a_long_one_that_has_begun() -> None:
    """The long one, of 28,000 tokens, takes most of a second; the small one gets its first token within three steps."""
    run = run_with()
    long = run.add("long", [2] * 28_000, 2, serial=1)
    for _ in range(3):
        run.step()
    assert 0 < long.num_computed < 14_000
    small = run.add("small", [3] * 300, 2, serial=2)
    begin = run.now
    steps = 0
    while not small.num_output_tokens:
        run.step()
        steps += 1
    assert steps <= 3
    assert not long.num_output_tokens
    assert run.now - begin < 0.25


def test_a_prompt_that_is_nearly_done_is_not_left_lying() -> None:
    """It has less left than the one that comes, which is shorter as a whole."""
    run = run_with()
    long = run.add("long", [2] * 9_000, 2, serial=1)
    while long.num_computed < 8_000:
        run.step()
    names = {"long": long, "shorter": run.add("shorter", [3] * 5_000, 2, serial=2)}
    assert first_tokens(run, names) == ["long", "shorter"]


def test_no_prompt_starves_behind_shorter_ones() -> None:
    """Short prompts take 9 tenths of the GPU for ever; the long one counts as if it had come later by what it takes."""
    run = run_with(tokens=2048)
    serial = count(2)
    long = run.add("long", [2] * 12_000, 2, serial=1)
    due = STRETCH * run.share.cost.prompt_seconds(12_000, 0)
    arrived = run.now
    next_at = run.now
    steps = 0
    while not long.num_output_tokens:
        while next_at <= run.now:
            number = next(serial)
            run.add(str(number), [number] * 900, 1, serial=number)
            next_at += 900 * 25e-6 / 0.9
        run.step()
        steps += 1
        assert steps < 3000, "the long prompt starves"
    assert due < run.now - arrived < 4.0 * due


def test_one_client_s_long_prompt_does_not_hold_up_another_client() -> None:
    run = run_with()
    long = run.add("long", [2] * 28_000, 2, serial=1, client="a")
    for _ in range(3):
        run.step()
    small = run.add("small", [3] * 300, 2, serial=2, client="b")
    for _ in range(3):
        run.step()
    assert small.num_output_tokens
    assert not long.num_output_tokens


def test_a_flood_of_short_prompts_leaves_another_client_its_share() -> None:
    """Each client gets half of the tokens, although every short prompt is more urgent than the long one."""
    run = run_with(num_pages=6_000)
    for serial in range(2, 202):
        run.add(str(serial), [serial] * 300, 1, serial=serial, client="flood")
    long = run.add("long", [1] * 8_000, 2, serial=999, client="other")
    done = 0
    while not long.num_output_tokens:
        batch = run.step()
        done += sum(chunk.length for chunk in batch.chunks if chunk.sequence.request.client == "flood")
    assert done < 3 * 8_000 + BUDGET, "the flood has 60,000 tokens, of which the long prompt waits for about as many as it has"


def test_without_costs_prompts_go_by_rank() -> None:
    scheduler = make_scheduler(num_pages=4000, tokens=64, seqs=8)
    for serial, length in enumerate((500, 20, 300)):
        scheduler.add(make_request(str(serial), [serial] * length, 2, serial=serial))
    order: list[str] = []
    for _ in range(20):
        batch = scheduler.schedule()
        names = [chunk.sequence.request.request_id for chunk in batch.chunks if chunk.length != chunk.num_samples]
        order += [name for name in names if name not in order]
        scheduler.commit(batch, [1] * sum(chunk.num_samples for chunk in batch.chunks))
    assert order == ["0", "1", "2"]


@pytest.mark.parametrize("closed", [False, True])
def test_running_and_waiting_prompts_are_merged(closed: bool) -> None:
    waiting: FairQueue[SequenceState] = FairQueue()
    running = [SequenceState(make_request(name, [1] * 9, serial=serial)) for name, serial in (("a", 1), ("c", 3))]
    for serial, name in ((2, "b"), (4, "d")):
        waiting.add(SequenceState(make_request(name, [1] * 9, serial=serial)))
    order = PromptOrder(running, waiting, 4, None)
    found = []
    while (sequence := order.first()) is not None:
        if order.is_waiting and closed:
            order.close()
            continue
        if order.is_waiting:
            waiting.admit(9)
        order.drop()
        found.append(sequence.request.request_id)
    assert found == (["a", "c"] if closed else ["a", "b", "c", "d"])


def test_what_a_prompt_costs_is_that_of_the_device() -> None:
    assert share().delay(2048, 0) == pytest.approx(STRETCH * step_cost(0, 2048) * 25 / 23, rel=0.1)


@pytest.mark.parametrize("caching", [False, True])
def test_the_answers_to_one_prompt_begin_in_one_step(caching: bool) -> None:
    """The first computes the prompt, and the others a page of it, beside the share if that is used up."""
    run = run_with(caching=caching)
    prompt = list(range(1024))
    run.share.limits = lambda *step: (256, 256)  # type: ignore[method-assign]
    requests = [make_request(f"{index}", prompt, 4, serial=index + 1, arrival=run.now) for index in range(4)]
    answers = [run.scheduler.add(replace(request, prompt=prompt)) for request in requests]
    chunks: list[dict[str, int]] = []
    while not all(answer.num_pending or answer.num_output_tokens for answer in answers):
        batch = run.step()
        chunks.append({chunk.sequence.request.request_id: chunk.length for chunk in batch.chunks if chunk.length > 1})
    if caching:
        assert chunks == [{"0": 256}] * 3 + [{"0": 256, "1": 16, "2": 16, "3": 16}]
    else:
        assert len(chunks) == 16, "nothing is shared, so each of them takes its share of four steps"
        assert all(sum(lengths.values()) <= 256 for lengths in chunks)
