"""What the prefix cache of a model with states offers: where a prompt begins, and which states are kept for it."""

from __future__ import annotations

from hashlib import blake2b

import pytest
from scheduling import make_scheduler
from state_traffic import SALTS, Traffic, lengths_of, prompt_of

from fa_serve.engine import SamplingParams
from fa_serve.engine.cache.pages import PageTable
from fa_serve.engine.cache.prefix import Prefix, _num_equal
from fa_serve.engine.request.request import Request
from fa_serve.engine.scheduler.sequence import SequenceState


def test_a_prompt_that_comes_again_computes_its_last_page_only() -> None:
    """Also one of whole pages, whose last token is computed in any case: the state after it is too late."""
    for length in (95, 96, 97):
        traffic = Traffic(make_scheduler(64, 16, tokens=512, num_states=8))
        prompt = prompt_of([0], length - 1)
        traffic.add("first", prompt, 1)
        traffic.run()
        again = traffic.add("again", prompt, 1)
        traffic.run()
        assert again.num_cached_tokens == (length - 1) // 16 * 16
        traffic.check_ended()


def test_a_conversation_continues_after_the_last_page_of_the_answer() -> None:
    traffic = Traffic(make_scheduler(64, 16, tokens=512, num_states=8), depth=1)
    prompt = prompt_of([0], 40)
    computed = 0
    for turn in range(4):
        traffic.add(f"turn-{turn}", prompt, 30)
        sequence = traffic.sequences[f"turn-{turn}"]
        history = len(prompt)
        traffic.run()
        assert sequence.num_cached_tokens == computed // 16 * 16
        computed = history + 30 - 1  # the last token was never computed
        prompt = [*prompt, *traffic.output[f"turn-{turn}"], 0, 1, 2]
    traffic.check_ended()


def test_conversations_keep_one_state_each_when_the_memory_holds_no_more() -> None:
    """The end of an answer replaces the end of its prompt and that of the answer before."""
    traffic = Traffic(make_scheduler(600, 4, seqs=1, tokens=64, num_states=9))
    prompts = [prompt_of([0, 0, number % 3, number // 3], 20) for number in range(6)]
    for turn in range(4):
        for number, prompt in enumerate(prompts):
            sequence = traffic.add(f"{turn}-{number}", prompt, 9)
            traffic.run()
            if turn:
                assert sequence.num_cached_tokens == (len(prompt) - 4) // 4 * 4, (
                    "all but the last token of the answer, and 3 more"
                )
            prompts[number] = [*sequence.tokens, 0, 1, 2]
    traffic.check_ended()


def test_the_logits_of_a_whole_prompt_need_no_state() -> None:
    traffic = Traffic(make_scheduler(64, 4, tokens=64, num_states=8))
    prompt = prompt_of([0], 29)
    traffic.add("first", prompt, 1)
    traffic.run()
    again = traffic.add("again", prompt, 1, params=SamplingParams(prompt_logprobs=0))
    chunk = traffic.scheduler.schedule().chunks[0]
    assert (chunk.start, chunk.source, again.num_cached_tokens) == (0, -1, 0)


def test_answers_to_the_same_prompt_wait_for_the_step_that_writes_its_state() -> None:
    scheduler = make_scheduler(64, 4, tokens=64, num_states=12)
    traffic = Traffic(scheduler)
    for name in ("a", "b", "c"):
        traffic.add(name, prompt_of([0], 30), 3)
    assert lengths_of(scheduler, traffic)[:2] == [[("a", 0, 31)], [("a", 31, 1), ("b", 28, 3), ("c", 28, 3)]]
    traffic.check_ended()


def test_requests_that_part_leave_a_state_where_they_part() -> None:
    """The first two compute their common beginning, the second one keeps a state there, and the third one begins after it."""
    traffic = Traffic(make_scheduler(64, 4, tokens=128, num_states=12))
    common = prompt_of([0], 40)
    starts = []
    for name, last in (("a", [0] * 30), ("b", [1] * 30), ("c", [2] * 30)):
        sequence = traffic.add(name, common + last, 1)
        traffic.run()
        starts.append(sequence.num_cached_tokens)
    assert starts == [0, 0, 40]


def test_a_state_is_kept_every_interval() -> None:
    traffic = Traffic(make_scheduler(64, 4, tokens=64, num_states=12, interval=32))
    prompt = prompt_of([0], 99)
    traffic.add("first", prompt, 1)
    traffic.run()
    other = traffic.add("other", prompt[:70] + [0, 1] * 20, 1)
    traffic.run()
    assert other.num_cached_tokens == 64


def test_states_for_others_are_left_out_when_states_are_short() -> None:
    scheduler = make_scheduler(64, 4, tokens=128, num_states=3, interval=4)
    traffic = Traffic(scheduler)
    traffic.add("a", prompt_of([0], 99), 30)
    batch = scheduler.schedule()
    assert [position for position, _ in batch.chunks[0].stores] == [100], "one is left for the next step"
    traffic.inflight.append((batch, traffic.device.launch(batch)))
    traffic.run()
    assert scheduler.num_preemptions == 0
    traffic.check_ended()


def test_salts_share_no_states() -> None:
    traffic = Traffic(make_scheduler(64, 4, tokens=64, num_states=8))
    prompt = prompt_of([0], 30)
    for salt in SALTS:
        first = traffic.add(f"first-{salt}", prompt, 1, cache_salt=salt)
        again = traffic.add(f"again-{salt}", prompt, 1, cache_salt=salt)
        traffic.run()
        assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 28)


def test_prompts_that_begin_alike_hash_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another salt or another adapter is hashed anew."""
    pages = PageTable(64, 4)
    prefix = Prefix(pages)
    hashed: list[bytes] = []

    def counted(content: bytes, **how: object) -> object:
        hashed.append(content)
        return blake2b(content, **how)  # type: ignore[arg-type]

    monkeypatch.setattr("fa_serve.engine.cache.pages.blake2b", counted)
    prompt = list(range(21))

    def hashes_of(tokens: list[int], **fields: object) -> tuple[int, list[bytes]]:
        sequence = SequenceState(Request("a", tokens, SamplingParams(), 4, **fields))
        before = len(hashed)
        prefix.shared(sequence)
        return len(hashed) - before, sequence.page_hashes

    first = hashes_of(prompt)
    assert first[0] == 5
    assert hashes_of(prompt) == (0, first[1])
    assert hashes_of(list(prompt)) == (0, first[1])
    longer = hashes_of([*prompt, *range(5)])
    assert longer[0] == 1
    assert longer[1][:5] == first[1]
    other = hashes_of([*prompt[:9], 50, *prompt[10:]])
    assert other[0] == 3
    assert [a == b for a, b in zip(other[1], first[1], strict=True)] == [True, True, False, False, False]
    assert hashes_of(prompt[:7]) == (0, first[1][:1])
    assert hashes_of(prompt) == (4, first[1])
    salted = hashes_of(prompt, cache_salt="s")
    assert salted[0] == 6
    assert not set(salted[1]) & set(first[1])
    assert hashes_of(prompt, cache_salt="s") == (0, salted[1])
    assert hashes_of(prompt) == (5, first[1])


@pytest.mark.parametrize("length", [0, 1, 4095, 4096, 9000])
def test_equal_tokens_are_counted(length: int) -> None:
    tokens = list(range(9000))
    assert _num_equal(tokens, [*tokens[:length], -1]) == length
    assert _num_equal([*tokens[:length], -1, *tokens], tokens) == length
    assert _num_equal(tokens, tokens[:length]) == length
