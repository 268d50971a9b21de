"""The warm-up plan: synthetic steps that launch every kernel which a later step may need.

    for step in empty_steps(max_num_seqs=256, max_tokens=4096, max_keys=8192):
        runner.run_warm_up(step)
    for variant in sampling_variants():
        runner.run_warm_up(variant)

Kernels are compiled for tiles, and tiles are chosen by numbers that the host knows: sequences, queries of the longest sequence,
keys of the longest sequence, and whether keys come from the cache. Nearly all choices are met at a power of two or at the
largest number, so the plan walks over those, and over the few others. `tests/engine/start/test_warm_up.py` compares the tiles
of the plan with the tiles of all numbers. An empty step computes few layers, has no keys but its own and writes none, so it
takes milliseconds. `largest_batch` is the step that tells how much memory steps take.

Left out: CUDA graphs of steps (cuda_graphs.py), and how kernels are compiled (ops/compilations.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from fa_serve.engine.config import EngineConfig
from fa_serve.engine.request.params import SamplingParams
from fa_serve.engine.request.request import Request
from fa_serve.engine.request.token_biases import TokenBiases
from fa_serve.engine.scheduler.chunk_lengths import MAX_PROMPT_LOGITS
from fa_serve.engine.scheduler.scheduled_batch import Chunk, ScheduledBatch
from fa_serve.engine.scheduler.sequence import SequenceState
from fa_serve.engine.speculation.drafts import draft_limit

FEW_QUERIES = 16
"""Up to so many queries of a sequence, attention chooses its tiles by the number of queries (fa_serve.spec.FEW_QUERIES)."""
MIXED_QUERIES = 64
"""Tokens of the prompt in the steps that stand for prompts beside decoding sequences."""
KEYS_OF_BATCHES = (64, 1024)
"""For several sequences, tiles depend on whether the keys fit one block and whether they are at most 1024."""

WIDTHS_OF_BATCHES = (32, 256, 2048)
"""Batches are divided into classes at these sizes, and a class may split keys in a way that its larger batches do not."""

MOST_MEMORY = SamplingParams(top_p=0.9, top_k=50, frequency_penalty=0.1, logprobs=20)
"""The sampling that needs the most memory."""


class EmptyStep(NamedTuple):
    """A synthetic step: sequences of one token, and the last `num_long` of `batch` sequences with `queries` tokens each.

    keys:  what the kernels are told of the longest sequence; the step itself has no keys but its own
    fresh: no sequence has keys in the cache, so attention takes keys and values as they come
    """

    batch: int
    queries: int
    keys: int
    fresh: bool = False
    num_long: int = 1

    @property
    def num_tokens(self) -> int:
        return self.batch + self.num_long * (self.queries - 1)


class SamplingVariant(NamedTuple):
    """Parameters of rows that are sampled.

    masked: a mask of allowed tokens comes with each, as for structured outputs
    rows:   their number. PyTorch has other kernels for one row than for several, and loads each when it is first launched
    """

    params: SamplingParams
    masked: bool = False
    rows: int = 1

    def request(self, vocab_size: int) -> Request:
        """A request with these parameters."""
        return Request("warm-up", [0], self.params, max_tokens=1, biases=TokenBiases.of(self.params, (), vocab_size))


def powers_of_two(largest: int, least: int = 1) -> list[int]:
    """The powers of two from `least`, a power of two, up to `largest`; and `largest` itself."""
    powers = [1 << exponent for exponent in range(least.bit_length() - 1, largest.bit_length())]
    return sorted({*powers, largest})


def empty_steps(*, max_num_seqs: int, max_tokens: int, max_keys: int) -> list[EmptyStep]:
    """The steps of the plan, each within these limits. The first ones are those that requests need first.

    max_num_seqs: sequences in a step; max_tokens: tokens in a step; max_keys: keys of a sequence
    """
    queries = powers_of_two(min(max_tokens, max_keys))
    steps = [EmptyStep(1, count, count, fresh=True) for count in queries]
    steps += [EmptyStep(2, count, count, fresh=True) for count in queries]
    for keys in powers_of_two(max_keys):
        steps += [EmptyStep(batch, count, keys) for batch in (1, 2) for count in queries]
    # products and experts choose tiles by the tokens of all sequences, which may be more than one sequence has
    for tokens in powers_of_two(max_tokens):
        count = min(max(tokens // max_keys, 1), max_num_seqs)
        steps.append(EmptyStep(count, min(tokens // count, max_keys), max_keys, num_long=count))
    several = [size for size in powers_of_two(max_num_seqs) if size > 2]
    few = [*powers_of_two(FEW_QUERIES), MIXED_QUERIES]
    for keys in (*KEYS_OF_BATCHES, max_keys):
        steps += [EmptyStep(batch, count, keys) for batch in several for count in few]
        steps += [EmptyStep(size + 1, count, keys) for size in WIDTHS_OF_BATCHES for count in range(1, FEW_QUERIES + 1)]
    # all of them have few queries at once, as when their prompts are cached but for the end; a mixed step is computed otherwise
    for count in powers_of_two(FEW_QUERIES)[1:]:
        steps += [EmptyStep(batch, count, max_keys, num_long=batch) for batch in powers_of_two(max_num_seqs)]
    # with so many keys, prompts with float8 products may keep the model's dtype (fa_serve.backends.float8_copies)
    steps.append(EmptyStep(max_num_seqs, min(max(max_tokens - max_num_seqs + 1, 1), max_keys), max_keys))
    return list(
        dict.fromkeys(
            step
            for step in steps
            if step.batch <= max_num_seqs and step.num_tokens <= max_tokens and step.queries <= step.keys <= max_keys
        )
    )


def sampling_variants(max_num_seqs: int, *, drafting: bool = False) -> Iterator[SamplingVariant]:
    """Parameters that lead to every kernel of sampling, for one row and for as many as a step has at most.

    Most rows come last, so that their memory stays with PyTorch for the first step that needs it.

    drafting: those of a draft model, whose draws have no penalties, log-probabilities and masks
    """
    for rows in dict.fromkeys((1, max_num_seqs)):
        yield from (variant._replace(rows=rows) for variant in _variants(drafting))


def _variants(drafting: bool) -> Iterator[SamplingVariant]:
    """The same for one row. Penalties and biases are computed in float32, which is another variant of each kernel."""
    filters = list(product((0, 50), (1.0, 0.9), (0.0, 0.1)))
    for penalty in (0.0,) if drafting else (0.0, 0.5):
        yield SamplingVariant(SamplingParams(temperature=0.0, frequency_penalty=penalty))
        for top_k, top_p, min_p in filters:
            yield SamplingVariant(SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, frequency_penalty=penalty))
    yield SamplingVariant(SamplingParams(temperature=0.0, logit_bias={0: 1.0}))
    yield SamplingVariant(SamplingParams(temperature=0.0, allowed_token_ids=(0, 1)))
    if not drafting:
        yield SamplingVariant(SamplingParams(temperature=0.0), masked=True)
        for logprobs in (0, 5):
            yield SamplingVariant(SamplingParams(temperature=0.0, logprobs=logprobs))
        yield SamplingVariant(MOST_MEMORY)


def largest_batch(config: EngineConfig, max_model_len: int) -> ScheduledBatch:
    """As many tokens and sampled rows as a step may have, all on page 0, with the sampling that needs the most memory."""
    count = min(config.max_num_seqs, config.max_num_batched_tokens)
    length = min(config.max_num_batched_tokens // count, max_model_len)
    drafts = [0] * min(draft_limit(config.max_drafts, count), length - 1)
    params = replace(MOST_MEMORY, prompt_logprobs=MOST_MEMORY.logprobs)
    batch = ScheduledBatch()
    for slot in range(count):
        sequence = SequenceState(Request(f"largest-{slot}", [0] * (length - len(drafts)), params, max_tokens=1))
        sequence.start(slot, [0] * -(-length // config.page_size), num_shared=0, page_size=config.page_size)
        batch.admitted.append(sequence)
        num_prompt_logits = min(length - len(drafts) - 1, MAX_PROMPT_LOGITS - batch.num_prompt_logits)
        batch.append(Chunk(sequence, slot, 0, length, 1 + len(drafts), num_prompt_logits, drafts))
    return batch
