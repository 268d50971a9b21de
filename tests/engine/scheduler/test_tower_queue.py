"""Images that go through the towers beside decoding: how long text waits for it, who waits for what, and what is held."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled_cases import examples
from tower_cases import DECODING, PER_EMBEDDING, PER_PROMPT_TOKEN, Case, Towers

from fa_serve.engine.errors import RequestError
from fa_serve.engine.scheduler import tower_queue
from fa_serve.engine.scheduler.prompt_share import PromptShare
from fa_serve.engine.scheduler.sequence import SequenceState
from fa_serve.engine.scheduler.step_cost import ImageSeconds, StepCost, StepSize


def gaps_of_text(case: Case) -> list[float]:
    """The steps of texts that decode while an image comes every eighth step, once costs have been learned."""
    for number in range(8):
        case.add(f"text {number}", 20, answer=400)
    for number in range(300):
        if not number % 8:
            case.add(f"image {number}", 20, b"%016d" % number, 20)
        case.step()
    seconds = case.seconds[80:300]
    case.run()
    return seconds


@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])
def test_texts_keep_their_gaps_beside_images(ahead: bool) -> None:
    """Also where an image holds up the step before its own, by whose time it would seem to cost nothing."""
    case = Case(PromptShare(0.0075), ahead=ahead)
    seconds = gaps_of_text(case)
    assert max(seconds) <= 0.0075 * 1.01
    # and what there is beside decoding is used
    assert sum(seconds) > 220 * 0.0064
    assert not case.scheduler.sequences


def test_the_last_tokens_of_texts_do_not_wait_for_images() -> None:
    """The step behind their last one has nobody who waits, but the device begins with its images beside that last one."""
    case = Case(PromptShare(0.0075), ahead=True)
    for number in range(8):
        case.add(f"text {number}", 20, answer=250)
    number = 0
    while number < 8 or "text 0" in case.scheduler.sequences:
        if not number % 8:
            case.add(f"image {number}", 20, b"%016d" % number, 20)
        case.step()
        number += 1
    assert number > 200
    assert max(case.seconds[80:]) <= 0.0075 * 1.01
    case.run()


def test_without_slices_they_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptShare, "image_limit", lambda *_, **__: 4096)
    assert max(gaps_of_text(Case(PromptShare(0.0075)))) >= 0.025


def test_a_step_encodes_a_bounded_number_of_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody waits for it as well. One image that has more goes through the towers alone."""
    monkeypatch.setattr(tower_queue, "MAX_IMAGE_TOKENS", 900)
    case = Case()
    for number in range(3):
        case.add(f"image {number}", 20, b"%016d" % number, 20)
    case.add("large", b"large", embeddings=1000)
    sizes = [case.step().size.image_tokens for _ in range(4)]
    assert sizes == [800, 400, 1000, 0]


def test_a_block_waits_for_all_of_its_images() -> None:
    """It is computed whole, also where the cache has no room for its images, nor for those of another block."""
    case = Case(PromptShare(0.0075), towers=Towers(capacity=300))
    case.add("decodes", 20, answer=200)
    case.step()
    for name in ("one", "other"):
        case.add(name, 10, *(name.encode() + b"%d" % n for n in range(3)), 10, client=name, embeddings=100, whole=True)
    case.run()
    assert len(case.towers.encoded) == 6


def test_images_share_the_time_with_prompts() -> None:
    case = Case(PromptShare(0.0075))
    case.add("text", 20, answer=600)
    for number in range(40):
        case.add(f"warm {number}", 20, b"%016d" % number, 100)
        for _ in range(12):
            case.step()
    begin = len(case.seconds)
    case.add("long", 4000)
    case.add("image", b"one")
    both = [case.step().size for _ in range(5)]
    assert all(size.image_tokens >= 16 and size.prompt_tokens >= 64 for size in both)
    assert max(case.seconds[begin:]) <= 0.0076


def test_a_request_whose_image_is_not_there_holds_up_nobody() -> None:
    case = Case(PromptShare(0.0075), slots=3)
    case.add("decodes", 20, answer=200)
    case.step()
    for number in range(4):
        case.add(f"image {number}", 20, b"%016d" % number, 20)
    case.add("text", 20)
    case.step()
    case.step()
    assert case.firsts["text"] <= 3, "texts pass"
    assert len(case.scheduler.running) == 1, "and requests with images take no slots meanwhile"
    assert len(case.scheduler.towers) == 4
    case.run()


def test_text_before_an_image_is_computed_meanwhile() -> None:
    case = Case(PromptShare(0.0075))
    case.add("decodes", 20, answer=200)
    case.step()
    case.add("image", 200, b"one", 20)
    for _ in range(4):
        case.step()
    sequence = case.scheduler.sequences["image"]
    assert sequence.num_computed == 200
    case.run()


def test_a_preempted_request_that_waits_for_its_image_leaves_nothing_unconfirmed() -> None:
    case = Case(PromptShare(0.0075))
    scheduler = case.scheduler
    case.add("decodes", 20, answer=200)
    case.step()
    case.add("image", 208, b"one", 20)
    sequence = scheduler.sequences["image"]
    while sequence.num_computed < 208:
        case.step()
    scheduler._requeue(sequence)
    case.step()
    assert sequence in scheduler.towers
    same = SequenceState(sequence.request)
    assert scheduler._prefix.num_cached(same) == 208
    scheduler.abort("image")
    assert scheduler._prefix.num_cached(same) == 0
    scheduler.check_integrity()
    case.run()


def test_clients_take_turns_at_the_towers() -> None:
    case = Case(PromptShare(0.0075))
    case.add("decodes", 20, answer=300)
    case.step()
    for number in range(6):
        case.add(f"many {number}", 20, b"many%012d" % number, client="many")
    case.step()
    case.add("one", 20, b"one", client="one")
    case.run()
    assert case.towers.encoded.index(b"one") == 1


def test_an_image_of_two_requests_is_encoded_once() -> None:
    for share in (None, PromptShare(0.0075)):
        case = Case(share)
        case.add("decodes", 20, answer=60)
        case.step()
        case.add("first", 3, b"one", 20)
        case.add("second", 5, b"one", 20, b"one", 20)
        case.run()
        assert case.towers.encoded == [b"one"]


def test_a_cached_prefix_waits_for_no_image() -> None:
    case = Case()
    case.add("first", 16, b"one", 16)
    case.run()
    towers = case.towers
    towers.known.clear()
    serial = case._serial
    case._serial = count(0)  # the same tokens
    case.add("again", 16, b"one", 16)
    case._serial = serial
    case.run()
    assert towers.encoded == [b"one"]


@pytest.mark.parametrize("target", [0.0075, 0.05])
def test_without_room_in_the_cache_images_are_encoded_one_by_one(target: float) -> None:
    """Also where steps have time for several of them: a sequence waits for its first image before its second one is held."""
    for capacity in (0, 500):
        case = Case(PromptShare(target), towers=Towers(capacity))
        case.add("decodes", 20, answer=300)
        case.step()
        for number in range(3):
            case.add(f"images {number}", 5, b"a%d" % number, 5, b"b%d" % number, 5, b"c%d" % number)
        most = 0
        while case.scheduler.sequences:
            case.step()
            most = max(most, len(case.towers.held))
        assert most <= max(capacity // 400, 1) + 1
        assert len(case.towers.encoded) == 9


def test_work_that_was_given_up_begins_anew() -> None:
    case = Case(PromptShare(0.0075))
    case.add("decodes", 20, answer=100)
    case.step()
    case.add("image", 20, b"one")
    case.step()
    case.step()
    assert case.towers.is_busy
    case.towers._left = None  # as `ImageEncoder.abandon`
    case.run()
    assert case.towers.encoded == [b"one"]


def test_a_scheduler_that_begins_anew_holds_no_image() -> None:
    """One has been encoded, one is on its way, and one waits in a queue that is not to be trusted."""
    case = Case(PromptShare(0.0075))
    case.add("decodes", 20, answer=100)
    case.step()
    case.add("first", b"one", 4000, answer=5)
    while not case.towers.is_encoded(b"one"):
        case.step()
    case.add("second", 20, b"two")
    case.step()
    case.add("third", 20, b"three")
    assert case.towers.is_busy
    assert case.towers.held == {b"one", b"two"}
    case.scheduler.towers._queue = tower_queue.FairQueue()
    case.scheduler = case.scheduler.renewed()
    assert not case.towers.held
    assert not case.towers.is_busy
    case.add("again", 20, b"two")
    case.run()
    assert case.towers.encoded == [b"one", b"two"]


def test_a_sequence_counts_as_admitted_in_the_step_of_its_first_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step without chunks is not launched, so the device would go on with the pages of the sequence that had the slot before.
    Here the cache has a part of the image for which the sequence waits."""
    case = Case(PromptShare(0.0075), ahead=True)
    serial = case._serial
    case._serial = count(0)
    case.add("first", 20, b"one", 16, b"two", 1, embeddings=40)
    case.run()
    del case.towers.known[b"two"]
    case._serial = serial
    case.add("decodes", 20, answer=2)
    case.step()
    case.step()  # its last token, which the next step does not know yet
    case._serial = count(0)
    with monkeypatch.context() as patch:  # as if the prefix had been computed after it has come
        patch.setattr(case.scheduler._prefix, "num_cached", lambda _: 0)
        case.add("again", 20, b"one", 16, b"two", 50, embeddings=40)
    again = case.scheduler.sequences["again"]
    batch = case.step()
    assert again.slot >= 0, "it is the scenario of this test"
    assert not batch.chunks
    assert not batch.admitted
    while not batch.chunks:
        batch = case.step()
    assert batch.admitted == [again]
    case.run()


def test_other_weights_encode_again() -> None:
    case = Case()
    case.add("image", 20, b"one", 200, answer=40)
    for _ in range(3):
        case.step()
    case.towers.known.clear()
    case.scheduler.forget_cache()
    case.scheduler.check_integrity()
    case.run()
    assert case.towers.encoded == [b"one", b"one"]


def test_other_weights_release_an_image_on_its_way_whose_request_has_ended() -> None:
    case = Case(PromptShare(0.0075))
    case.add("decodes", 20, answer=100)
    case.step()
    case.add("image", 20, b"one")
    case.step()
    assert case.towers.is_busy
    case.scheduler.abort("image")
    assert case.towers.held == {b"one"}, "it is encoded all the same"
    case.towers._left = None  # as `ImageEncoder.forget`
    case.scheduler.forget_cache()
    assert not case.towers.held
    case.scheduler.check_integrity()
    case.run()


PARTS = st.lists(st.integers(1, 90) | st.sampled_from([b"a", b"b", b"c", b"d"]), min_size=1, max_size=5)


@settings(max_examples=examples(120), deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 12), PARTS, st.integers(1, 30), st.integers(0, 2)), min_size=1, max_size=9),
    capacity=st.sampled_from([0, 40, 130, 1000]),
    pages=st.integers(32, 70),
    shares=st.booleans(),
    events=st.dictionaries(st.integers(0, 60), st.sampled_from(["abort", "fail", "rollback", "forget", "give up"]), max_size=6),
)
def test_every_request_ends(
    arrivals: list[tuple[int, list[int | bytes], int, int]],
    capacity: int,
    pages: int,
    shares: bool,
    events: dict[int, str],
) -> None:
    """Preempted, aborted, failed and rolled back, with any cache: no step reads what is not there, and nothing stays held."""
    towers = Towers(capacity)
    case = Case(PromptShare(0.0075) if shares else None, towers=towers, pages=pages, slots=3)
    case.checks = 1
    scheduler = case.scheduler
    left = sorted(arrivals, key=lambda each: each[0])
    steps: Iterator[int] = count()
    while left or scheduler.sequences:
        number = next(steps)
        assert number < 3000, "requests do not end"
        while left and left[0][0] <= number:
            _, parts, answer, client = left.pop(0)
            case.add(f"{number} {len(left)}", *parts, answer=answer, client=str(client), embeddings=40)
        event = events.get(number)
        if event == "abort" and scheduler.sequences:
            scheduler.abort(next(iter(scheduler.sequences)))
        elif event in ("fail", "rollback"):
            batch = scheduler.schedule()
            if event == "fail":
                scheduler.fail(batch, RequestError("step_failed", "the step failed"))
            else:
                scheduler.rollback(batch)
        elif event == "forget":
            towers.known.clear()
            towers._left = None
            scheduler.forget_cache()
        elif event == "give up":
            towers._left = None
        scheduler.check_integrity()
        case.step()
    case.step()
    case.step()
    assert not towers.held or towers.is_busy


@pytest.mark.parametrize("prompts", [0, 400])
def test_what_images_cost_is_learned_beside_prompts(prompts: int) -> None:
    cost = StepCost()
    decoding = StepSize(rows=8)
    cost.record(decoding, DECODING)
    cost.record(decoding._replace(prompt_tokens=400, pairs=0), DECODING + 400 * PER_PROMPT_TOKEN)
    for _ in range(3):
        seconds = DECODING + prompts * PER_PROMPT_TOKEN + 100 * PER_EMBEDDING
        images = ImageSeconds(100 * PER_EMBEDDING, 100 * PER_EMBEDDING)
        cost.record(decoding._replace(prompt_tokens=prompts, image_tokens=100), seconds, images)
    assert cost.image_seconds(100) == pytest.approx(100 * PER_EMBEDDING, rel=0.02)
    assert cost.prompt_seconds(400, 0) == pytest.approx(400 * PER_PROMPT_TOKEN, rel=0.05)
    assert cost.decode_seconds(8, 0) == DECODING
    assert cost.seconds(decoding._replace(image_tokens=100)) == pytest.approx(DECODING + 100 * PER_EMBEDDING, rel=0.02)


def test_the_least_slice() -> None:
    share = PromptShare(0.001)
    assert share.image_limit(StepSize(rows=8)) == 16, "before anything is measured"
    share.record(StepSize(rows=8), 0.01)
    share.record(StepSize(rows=8, image_tokens=16), 0.02, ImageSeconds(0.01, 0.01))
    assert share.image_limit(StepSize(rows=8)) == 16
