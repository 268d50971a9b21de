"""The rows of a step that are sampled, by hand, and when their arrays are made."""

from __future__ import annotations

import pytest
import torch

from fa_serve.engine import SamplingParams
from fa_serve.engine.cache.block_table import BlockTable
from fa_serve.engine.request.request import Request
from fa_serve.engine.runner import model_runner
from fa_serve.engine.runner.batch_arrays import batch_arrays
from fa_serve.engine.runner.sampled_rows import SampledRows, sampled_rows
from fa_serve.engine.runner.sampler import random_keys
from fa_serve.engine.scheduler.scheduled_batch import Chunk, ScheduledBatch
from fa_serve.engine.scheduler.sequence import SequenceState


def make_sequence(name: str, prompt: list[int], slot: int, pages: list[int], **params: object) -> SequenceState:
    sequence = SequenceState(Request(name, prompt, SamplingParams(**{"temperature": 0.0} | params), 8, seed=slot))
    sequence.start(slot, pages, num_shared=0, page_size=4)
    return sequence


def make_rows(*chunks: Chunk, **options: object) -> SampledRows:
    batch = ScheduledBatch()
    for chunk in chunks:
        batch.append(chunk)
    arrays = batch_arrays(batch, BlockTable(4, 5, torch.device("cpu")), page_size=4, vocab_size=100, **options)
    return sampled_rows(batch, arrays, vocab_size=100, **options)


def test_a_chunk_of_a_prompt_beside_a_decoding_sequence() -> None:
    decoding = make_sequence("a", [1, 2, 3, 4, 5], slot=3, pages=[9, 7], logprobs=2)
    decoding.advance(5, samples=True)  # the sampled token is still on the device
    prompt = make_sequence("b", [11, 12, 13, 14, 15], slot=0, pages=[2, 3], prompt_logprobs=0)
    rows = make_rows(Chunk(decoding, 3, 5, 1, 1), Chunk(prompt, 0, 0, 3, 0, num_prompt_logits=3))
    assert {name: array.tolist() for name, array in rows.arrays.items()} == {
        "sampled_slots": [3],
        "logprob_rows": [0],
        "prompt_targets": [12, 13, 14],
    }
    assert rows.sequences == [decoding]
    assert rows.prompt_spans == [(prompt, 1, 4)]


def test_a_chunk_with_drafts_has_a_row_for_each_of_its_tokens() -> None:
    plain = make_sequence("a", [1, 2, 3], slot=1, pages=[0], temperature=1.0)
    guessed = make_sequence("b", [4, 5, 6, 7], slot=2, pages=[1, 2], presence_penalty=1.0, logprobs=1)
    rows = make_rows(Chunk(plain, 1, 2, 1, 1), Chunk(guessed, 2, 3, 3, 3, drafts=[8, 9]))
    assert rows.sequences == [plain, guessed, guessed, guessed]
    assert rows.rows["sampled_slots"].tolist() == [1, 2, 2, 2]
    assert rows.rows["logprob_rows"].tolist() == [1, 2, 3]
    assert rows.sampling["draft_index"].tolist() == [208, 308, 309]
    assert rows.sampling["next_drafts"].tolist() == [-1, 8, 9, -1]
    assert rows.sampling["first_rows"].tolist() == [0, 1, 1, 1]
    assert rows.sampling["temperature"].tolist() == [1.0, 0.0, 0.0, 0.0]
    seeds = torch.tensor([1, 2, 2, 2]).numpy()
    assert rows.sampling["keys"].tolist() == random_keys(seeds, torch.tensor([3, 4, 5, 6]).numpy()).tolist()


def test_drafts_beside_a_chunk_that_does_not_sample() -> None:
    prompt = make_sequence("a", [1, 2, 3, 4], slot=0, pages=[0])
    guessed = make_sequence("b", [4, 5, 6], slot=2, pages=[1, 2])
    rows = make_rows(Chunk(prompt, 0, 0, 3, 0), Chunk(guessed, 2, 2, 2, 2, drafts=[8]))
    assert rows.sequences == [guessed, guessed]
    assert rows.rows["sampled_slots"].tolist() == [2, 2]


@pytest.mark.parametrize("speculative", ["ngram", None])
def test_what_drafts_sample_is_sent_behind_the_forward(make_engine, replays, monkeypatch, speculative) -> None:
    """The device waits for the forward of a step with drafts. Other steps run ahead, and send everything at once."""
    steps: list[list[str]] = []
    send = model_runner.send
    rows = model_runner.sampled_rows
    run = model_runner.ModelRunner._run
    launch = model_runner.ModelRunner.launch
    monkeypatch.setattr(model_runner, "send", lambda *args: steps[-1].append("send") or send(*args))
    monkeypatch.setattr(model_runner, "sampled_rows", lambda *args, **names: steps[-1].append("rows") or rows(*args, **names))
    monkeypatch.setattr(model_runner.ModelRunner, "_run", lambda *args: steps[-1].append("run") or run(*args))
    monkeypatch.setattr(model_runner.ModelRunner, "launch", lambda *args: steps.append([]) or launch(*args))
    engine = make_engine(speculative=speculative)
    engine._runner.make_graphs()
    params = SamplingParams(max_tokens=24, temperature=0.0, allowed_token_ids=(5, 6))
    engine.generate([[5, 6] * 6], params)
    late = ["send", "run", "rows", "send"]
    assert steps.count(late) == engine.stats().speculation.num_drafts
    assert (late in steps) == (speculative is not None)
    assert all(step in (late, ["rows", "send", "run"]) for step in steps)
