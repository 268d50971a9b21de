"""The warm-up plan: synthetic steps that launch every kernel which a later step may need.

    for work in plan_warm_up(config, max_tokens=4096, max_keys=8192, drafting=False):
        runner.run_warm_up(work)

Kernels are compiled for tiles, and tiles are chosen by what the host knows: the number of sequences, the queries and the keys
of the longest sequence, and whether keys come from the cache. Powers of two and the largest numbers lead to nearly all choices,
so the plan goes through these numbers, and the few others. `tests/engine/start/test_warm_up.py` compares the tiles of the plan
with the tiles of all numbers. An empty step computes few layers, has only its own keys and writes none, so it takes
milliseconds. `largest_batch` is the step that shows how much memory steps take.

Left out: CUDA graphs of steps (cuda_graphs.py), and how kernels are compiled (launching/compilations.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fa_serve.engine.config import EngineConfig
from fa_serve.engine.request.params import SamplingParams
from fa_serve.engine.request.request import Request
from fa_serve.engine.request.token_biases import TokenBiases
from fa_serve.engine.runner.sampler import draft_arrays, sampling_arrays
from fa_serve.engine.scheduler.chunk_lengths import MAX_PROMPT_LOGITS
from fa_serve.engine.scheduler.scheduled_batch import Chunk, ScheduledBatch
from fa_serve.engine.scheduler.sequence import SequenceState
from fa_serve.engine.speculation.drafts import draft_limit
from fa_serve.hf import TwoWayBlock

FEW_QUERIES = 16
"""Up to this many queries per sequence, attention chooses its tiles by the number of queries (fa_serve.spec.FEW_QUERIES)."""
MIXED_QUERIES = 64
"""Tokens of the prompt in the steps that stand for a prompt together with decoding sequences."""
ODD_CHUNKS = (24, 144)
"""Tokens of chunks that leave most rows of their last tile empty, so that the heads of a KV head share tiles: of 64 and of 128
rows. No power of two does."""
KEYS_OF_BATCHES = (64, 1024)
"""For several sequences, tiles depend on whether the keys fit one block and whether they are at most 1024."""

WIDTHS_OF_BATCHES = (32, 256, 2048)
"""Attention divides batches into classes at these sizes. The smallest batch of a class may split keys where others do not."""

MOST_MEMORY = SamplingParams(top_p=0.9, top_k=50, frequency_penalty=0.1, logprobs=20, prompt_logprobs=20)
"""The sampling that needs the most memory."""


Arrays = dict[str, NDArray[Any]]


class EmptyStep(NamedTuple):
    """A synthetic step of `batch` sequences. The last `num_long` of them have `queries` tokens each, the others one token.

    keys:  number of keys of the longest sequence that kernels are given; the step itself has only its own keys
    fresh: no sequence has keys in the cache, so attention takes the step's keys and values directly
    logits: rows of logits; 0 means as many as a step without log-probabilities of its prompts has
    two_way: the tokens of the first sequence attend to each other both ways, see `blocks`
    """

    batch: int
    queries: int
    keys: int
    fresh: bool = False
    num_long: int = 1
    logits: int = 0
    two_way: bool = False

    @property
    def num_tokens(self) -> int:
        return self.batch + self.num_long * (self.queries - 1)

    @property
    def blocks(self) -> list[TwoWayBlock]:
        """The first sequence's queries as a block after different numbers of keys: attention is called for each block."""
        if not self.two_way:
            return []
        ends = [self.queries, *(end for end in powers_of_two(self.keys) if end > self.queries)]
        return [TwoWayBlock(0, self.queries, 0, end - self.queries, end) for end in ends]


class SamplingVariant(NamedTuple):
    """Parameters of rows that are sampled.

    masked: each row has a mask of allowed tokens, as for structured outputs
    rows:   number of rows. PyTorch has different kernels for one row and for several, and loads each when it is first launched
    drafts: how many of the rows verify a draft of the first sequence
    """

    params: SamplingParams
    masked: bool = False
    rows: int = 1
    drafts: int = 0

    @property
    def slots(self) -> list[int]:
        """The slot of each row: a token and its drafts belong to one sequence, every other row to its own sequence."""
        return [max(row - self.drafts, 0) for row in range(self.rows)]

    def sequences(self, vocab_size: int) -> list[SequenceState]:
        """A sequence for each row."""
        biases = TokenBiases.of(self.params, (), vocab_size)
        # the first sequence may ask for log-probabilities of as many prompt tokens as there are rows
        request = Request("warm-up", [0] * (1 + self.rows), self.params, max_tokens=1, biases=biases)
        return [SequenceState(request) for _ in range(self.rows)]

    def arrays(self, sequences: Sequence[SequenceState], vocab_size: int) -> tuple[Arrays, Arrays]:
        """The fields of `SampleParams`, and those of `SampledRows.rows`. sequences: one for each row"""
        requests = [sequence.request for sequence in sequences]
        sampling = sampling_arrays(requests, [len(request.prompt) for request in requests], vocab_size)
        if self.drafts:
            drafts: list[list[int]] = [[0] * self.drafts, *([] for _ in range(self.rows - 1 - self.drafts))]
            sampling |= draft_arrays(drafts, vocab_size)
        rows = {"sampled_slots": np.array(self.slots, dtype=np.int64)}
        if self.params.logprobs is not None:
            rows["logprob_rows"] = np.arange(self.rows, dtype=np.int64)
        if self.params.prompt_logprobs is not None:
            rows["prompt_targets"] = np.zeros(min(self.rows, MAX_PROMPT_LOGITS), dtype=np.int64)
        return sampling, rows

    def masks(self, vocab_size: int) -> dict[int, NDArray[np.int32]] | None:
        """For each row, a mask that allows every token; None unless `masked`."""
        mask = np.full(-(-vocab_size // 32), -1, dtype=np.int32)
        return dict.fromkeys(range(self.rows), mask) if self.masked else None


def powers_of_two(largest: int, least: int = 1) -> list[int]:
    """The powers of two from `least`, a power of two, up to `largest`; and `largest` itself."""
    powers = [1 << exponent for exponent in range(least.bit_length() - 1, largest.bit_length())]
    return sorted({*powers, largest})


def most_logits(max_num_seqs: int, max_drafts: int) -> int:
    """Maximum number of rows of logits in a step: those of sequences with their drafts, and those of prompts."""
    counts = range(1, max_num_seqs + 1)
    return max(count * (1 + draft_limit(max_drafts, count)) for count in counts) + MAX_PROMPT_LOGITS


def empty_steps(*, max_num_seqs: int, max_tokens: int, max_keys: int, max_logits: int = 0) -> list[EmptyStep]:
    """The steps of the plan, each within these limits. The first ones are those that requests need first.

    max_num_seqs: sequences in a step; max_tokens: tokens in a step; max_keys: keys of a sequence
    max_logits:   rows of logits in a step with log-probabilities of its prompts, see `most_logits`; 0 for a draft model
    """
    queries = powers_of_two(min(max_tokens, max_keys))
    steps = [EmptyStep(1, count, count, fresh=True) for count in queries]
    steps += [EmptyStep(2, count, count, fresh=True) for count in queries]
    for keys in powers_of_two(max_keys):
        steps += [EmptyStep(batch, count, keys) for batch in (1, 2) for count in queries]
    steps += [EmptyStep(batch, count, max_keys) for batch in (1, 2) for count in ODD_CHUNKS]
    # products and experts choose tiles by the tokens of all sequences, which may be more than one sequence has
    for tokens in powers_of_two(max_tokens):
        count = min(max(tokens // max_keys, 1), max_num_seqs)
        # the head multiplies one row for each prompt token whose log-probability is wanted
        logits = min(tokens, max_logits)
        steps.append(EmptyStep(count, min(tokens // count, max_keys), max_keys, num_long=count, logits=logits))
    several = [size for size in powers_of_two(max_num_seqs) if size > 2]
    few = [*powers_of_two(FEW_QUERIES), MIXED_QUERIES]
    for keys in (*KEYS_OF_BATCHES, max_keys):
        steps += [EmptyStep(batch, count, keys) for batch in several for count in few]
        steps += [EmptyStep(size + 1, count, keys) for size in WIDTHS_OF_BATCHES for count in range(1, FEW_QUERIES + 1)]
    # all sequences have few queries, as when all but the end of each prompt is cached; a mixed step is computed differently
    for count in powers_of_two(FEW_QUERIES)[1:]:
        steps += [EmptyStep(batch, count, max_keys, num_long=batch) for batch in powers_of_two(max_num_seqs)]
    # with this many keys, prompts with float8 products may keep the model's dtype (fa_serve.backends.float8_copies)
    steps.append(EmptyStep(max_num_seqs, min(max(max_tokens - max_num_seqs + 1, 1), max_keys), max_keys))
    plan: dict[EmptyStep, int] = {}  # steps with logits=0, and the rows of logits of each
    for step in steps:
        if step.batch <= max_num_seqs and step.num_tokens <= max_tokens and step.queries <= step.keys <= max_keys:
            key = step._replace(logits=0)
            plan[key] = max(plan.get(key, 0), step.logits)
    return [step._replace(logits=logits) for step, logits in plan.items()]


def two_way_steps(max_tokens: int, max_keys: int) -> list[EmptyStep]:
    """The steps for a model whose images have tokens that attend both ways, in addition to `empty_steps`."""
    return [EmptyStep(1, count, max_keys, two_way=True) for count in powers_of_two(min(max_tokens, max_keys))]


def sampling_variants(max_num_seqs: int, *, max_drafts: int = 0, drafting: bool = False) -> Iterator[SamplingVariant]:
    """Parameters that lead to every kernel of sampling, for one row and for the largest number of rows that a step has.

    The largest number comes last, so that PyTorch keeps that memory for the first step that needs it.

    max_drafts: maximum number of drafts of a sequence in a step; penalties count drafts
    drafting: parameters for a draft model, whose draws have no penalties, log-probabilities or masks
    """
    for rows in dict.fromkeys((1, max_num_seqs)):
        yield from (variant._replace(rows=rows) for variant in _variants(drafting))
    if max_drafts and not drafting:
        yield SamplingVariant(SamplingParams(temperature=0.0, frequency_penalty=0.5), rows=2, drafts=1)


def _variants(drafting: bool) -> Iterator[SamplingVariant]:
    """The variants for one row. Penalties and biases are computed in float32, which needs another variant of each kernel.

    Sampling launches a parameter's kernel whatever the other parameters are. So parameters are combined only if they change
    what later kernels are given: the dtype of the scores, and the limits that processed log-probabilities apply.
    """
    filters = list(product((0, 50), (1.0, 0.9), (0.0, 0.1)))
    logprobs = None if drafting else 5
    for penalty in (0.0,) if drafting else (0.0, 0.5):
        greedy = SamplingVariant(SamplingParams(temperature=0.0, frequency_penalty=penalty))
        yield greedy
        if not drafting:
            yield greedy._replace(masked=True)
        for top_k, top_p, min_p in filters:
            limits = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, frequency_penalty=penalty, logprobs=logprobs)
            yield SamplingVariant(limits)
    yield SamplingVariant(SamplingParams(temperature=0.0, allowed_token_ids=(0, 1)))
    yield SamplingVariant(SamplingParams(temperature=0.0, allowed_token_ids=(0, 1), logit_bias={0: 1.0}))
    if not drafting:
        yield SamplingVariant(SamplingParams(temperature=0.0, logprobs=0))
        yield SamplingVariant(MOST_MEMORY)


def plan_warm_up(config: EngineConfig, max_tokens: int, max_keys: int, *, drafting: bool) -> list[EmptyStep | SamplingVariant]:
    """The plan of a model, or with `drafting` of a draft model. max_tokens: tokens of a step; max_keys: keys of a sequence"""
    count = config.max_num_seqs
    max_logits = 0 if drafting else most_logits(count, config.max_drafts)
    steps = empty_steps(max_num_seqs=count, max_tokens=max_tokens, max_keys=max_keys, max_logits=max_logits)
    return [*steps, *sampling_variants(count, max_drafts=config.max_drafts, drafting=drafting)]


def largest_batch(config: EngineConfig, max_model_len: int) -> ScheduledBatch:
    """A step with as many tokens and sampled rows as possible, all on page 0, with the sampling that needs the most memory."""
    count = min(config.max_num_seqs, config.max_num_batched_tokens)
    length = min(config.max_num_batched_tokens // count, max_model_len)
    drafts = [0] * min(draft_limit(config.max_drafts, count), length - 1)
    batch = ScheduledBatch()
    for slot in range(count):
        sequence = SequenceState(Request(f"largest-{slot}", [0] * (length - len(drafts)), MOST_MEMORY, max_tokens=1))
        sequence.start(slot, [0] * -(-length // config.page_size), num_shared=0, page_size=config.page_size)
        batch.admitted.append(sequence)
        num_prompt_logits = min(length - len(drafts) - 1, MAX_PROMPT_LOGITS - batch.num_prompt_logits)
        batch.append(Chunk(sequence, slot, 0, length, 1 + len(drafts), num_prompt_logits, drafts))
    return batch
