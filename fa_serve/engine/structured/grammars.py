"""Structured output: which tokens may come next so that the whole answer follows a schema or a grammar, by llguidance.

    grammars = Grammars(tokenizer, vocab_size, end_ids)
    matcher = grammars.matcher(StructuredOutput(regex="[0-9]{3}"))   # a ParameterError says what is wrong with it
    masks, late = grammars.masks([matcher], ["client"])       # one bit for each token; which masks have to wait
    matcher.consume_token(token)
    matcher.is_stopped()                     # the answer is complete

A grammar is compiled structured output; a matcher is its state for one request. Compiling may take seconds, and the first
grammar also builds the tables of the tokenizer. Therefore engine_loop.py compiles outside the step, in threads
(grammar_queue.py); llguidance releases the interpreter's lock meanwhile. What clients send is compiled on trial first, in a
process that can be limited and killed (trials.py). Several threads fill the masks of a step while the device runs the
forward of the step.

A step waits for its masks. A mask takes some tens of microseconds, but 50 ms and more after a hundred tokens of an ambiguous
grammar. Therefore each request has a budget for slow masks, and its matchers (matcher.py) report an error when it is spent.

Compiled grammars are kept for later requests, up to a number of bytes. Grammars that are not used for IDLE_SECONDS are kept
only up to a smaller number.

A tokenizer may have more tokens than the model has logits, or fewer. llguidance knows all tokens, but a mask covers exactly the
logits. A token beyond the logits is never allowed, and neither is a logit beyond the tokens.

JSON may contain at most 20 characters of whitespace at one place, because some models would write nothing else. Left out: where
a mask is applied to the logits (sampler.py). Source: llguidance, https://github.com/guidance-ai/llguidance.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa_serve.engine.config import EngineConfig
from fa_serve.engine.request.params import MAX_STRUCTURED, ComposedGrammar, StructuredOutput
from fa_serve.engine.structured import grammar_process
from fa_serve.engine.structured.grammar_process import STACK, compiled
from fa_serve.engine.structured.matcher import FirstMask, Matcher
from fa_serve.engine.structured.schema_numbers import narrow_numbers
from fa_serve.engine.structured.schema_references import check_references
from fa_serve.sandbox.trial_process import NICE
from fa_serve.sandbox.trials import Cancelled, Trial, TrialError, TrialLimits, Trials
from fa_serve.spec import ParameterError

WHITESPACE = {"whitespace_pattern": r"[ \t\n\r]{0,20}"}
MAX_REASON = 400
"""Characters of llguidance's explanation that go into an error message."""
MIN_BYTES = 64 << 10
"""A grammar counts as at least this many bytes, so that the number of grammars is bounded as well."""
BYTES_PER_CHARACTER = 400
"""A grammar without a trial counts as this many bytes per character. Measured: 110 to 350 for schemas of 60 to 150 kB."""
IDLE_SECONDS = 10.0
IDLE_SHARE = 64
"""Idle grammars are kept only while all grammars take at most `grammar_cache_bytes // IDLE_SHARE` bytes."""
SLOW_STEP_SECONDS = 0.01
"""If masks that are computed in parallel take longer, the other masks of this step and all masks of the next step are computed
one by one, in turns of the clients, and each request is charged."""
MASKS_SECONDS = 0.02
"""If masks that are computed one by one take longer, the other masks wait for the next step."""
FIRST_SLICE = 8
"""Masks that are computed in parallel before the time is checked. Each slice is twice as long as the previous one."""
_STACK_SIZE_LOCK = threading.Lock()


@dataclass(slots=True)
class _Kept:
    """matcher: at the start of its answer; None if the grammar has an error. used: on time.monotonic's clock"""

    matcher: Any
    error: str
    num_bytes: int
    first: FirstMask = field(default_factory=FirstMask)
    used: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class _Row:
    """The masks of one matcher in a step: rows `first` to `first + len(drafts)`."""

    index: int
    matcher: Matcher
    client: str | None
    first: int
    drafts: Sequence[int]


class Grammars:
    """Compiles and keeps grammars. Safe to use from any thread.

    tokenizer:  a fast tokenizer of transformers, or None; without one every grammar is refused
    vocab_size: how many logits the model has; the tokenizer may have fewer or more tokens
    end_ids:    the tokens that end an answer
    config:     bytes of compiled grammars that are kept, and limits of a trial
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: Collection[int], config: EngineConfig | None = None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._num_bits = vocab_size  # bits of llguidance's masks: the number of logits or of tokens, whichever is larger
        self._end_ids = sorted(end_ids)
        self._grammar_ends: list[int] = []  # the end ids that llguidance knows
        self._config = config or EngineConfig()
        self._lock = threading.Lock()
        self._tables: Any = None
        self._executor: Any = None
        self._one_by_one = False
        self._spent: dict[str | None, float] = {}  # seconds of the clients of the last step that computed masks one by one
        self._trials: Trials | None = None
        # At most `grammar_cache_bytes`, the least recently used first. Grammars with an error are kept as well.
        self._compiled: OrderedDict[str, _Kept] = OrderedDict()
        self.num_bytes = 0

    def trial(self, structured: StructuredOutput) -> Trial:
        """A trial to give to `matcher`. Raises ParameterError if this engine follows no grammar."""
        self._load(structured)
        assert self._trials is not None
        return self._trials.trial()

    def matcher(self, structured: StructuredOutput, trial: Trial | None = None) -> Matcher:
        """A new matcher at the start of its answer.

        trial: compiles the grammar first, under limits; without one there is no limit

        Raises ParameterError, whose field is the one given in `structured`, if the grammar cannot be compiled or followed. The
        error of a `ComposedGrammar` is that of the part that is to blame, if it is one of them.
        Raises Cancelled, and keeps nothing, if the trial is cancelled before the grammar is compiled.
        """
        import llguidance

        try:
            field, grammar = _grammar(llguidance.LLMatcher, structured)
        except ParameterError:
            raise
        except ValueError as unreadable:
            reason = str(unreadable)[:MAX_REASON]
            raise ParameterError("structured", f"be a structure that llguidance can read ({reason})", structured) from None
        if len(grammar) > MAX_STRUCTURED:
            raise ParameterError(field, f"have at most {MAX_STRUCTURED} characters", len(grammar))
        tables = self._load(structured)
        with self._lock:
            kept = self._compiled.get(grammar)
            if kept is not None:
                kept.used = time.monotonic()
                self._compiled.move_to_end(grammar)
        if kept is None:
            num_bytes = BYTES_PER_CHARACTER * len(grammar)
            error = ""
            if trial is not None:
                try:
                    result = json.loads(trial.run(json.dumps(grammar).encode()))
                except TrialError as refused:
                    shown = structured.parts[0] if isinstance(structured, ComposedGrammar) and structured.parts else structured
                    raise ParameterError(shown.kind, str(refused), getattr(shown, shown.kind)) from None
                num_bytes = result["bytes"]
                error = result["error"]
            matcher = None
            if not error:
                matcher, error = _compile(llguidance, tables, grammar)
            if trial is not None and trial.cancelled:
                raise Cancelled  # its client has left: a grammar of tens of megabytes would be kept for nobody
            if matcher is not None and (error := self._beyond_logits(matcher)):
                matcher = None
            if matcher is None:
                num_bytes = 0
            else:
                num_bytes += self._num_bits // 8  # the first mask
            kept = _Kept(matcher, error.strip()[:MAX_REASON], max(num_bytes, len(grammar), MIN_BYTES))
            self._keep(grammar, kept)
        if kept.matcher is None:
            for part in structured.parts if isinstance(structured, ComposedGrammar) else ():
                self.matcher(part, trial)  # raises the error of the part that is to blame
            raise ParameterError(field, f"be valid and satisfiable ({kept.error})", getattr(structured, field))
        return Matcher(kept.matcher.deep_copy(), first=kept.first)

    def sweep(self) -> None:
        """Let go of grammars that are not used."""
        with self._lock:
            idle = time.monotonic() - IDLE_SECONDS
            while (
                self.num_bytes > self._config.grammar_cache_bytes // IDLE_SHARE
                and next(iter(self._compiled.values())).used < idle
            ):
                self._drop_oldest()

    def close(self) -> None:
        """End every trial at once."""
        with self._lock:
            if self._trials is not None:
                self._trials.close()

    def _keep(self, grammar: str, kept: _Kept) -> None:
        with self._lock:
            replaced = self._compiled.pop(grammar, None)
            self.num_bytes += kept.num_bytes - (0 if replaced is None else replaced.num_bytes)
            self._compiled[grammar] = kept
            while self.num_bytes > self._config.grammar_cache_bytes:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, dropped = self._compiled.popitem(last=False)
        self.num_bytes -= dropped.num_bytes

    def masks(
        self, matchers: Sequence[Matcher], clients: Sequence[str | None], drafts: Sequence[Sequence[int]] | None = None
    ) -> tuple[NDArray[np.int32], list[int]]:
        """The masks of a step, (n, ceil(vocab_size / 32)), and which matchers' masks are late because others were slow.

        Bit t % 32 of word t // 32 is 1 if token t may come next in the answer of a row. Bits beyond the vocabulary are 0. A
        matcher with an error, or with a late mask, allows no token. The matchers do not advance.

        clients: who has sent the request of each matcher. While masks are slow, the client that has taken the least time is
                 next, so that fast masks of one client do not wait for slow ones of another client
        drafts:  guesses of each answer's next tokens; an answer with k of them has 1 + k rows, the last k of them for the
                 tokens after each draft. Rows after a draft that is not allowed allow every token
        """
        drafts = drafts or [[]] * len(matchers)
        ends = list(accumulate(1 + len(own) for own in drafts))
        words = np.full((ends[-1], -(-self._num_bits // 32)), -1, dtype=np.int32)
        rows: list[_Row] = []
        for index, (matcher, own, end) in enumerate(zip(matchers, drafts, ends, strict=True)):
            first = end - 1 - len(own)
            if matcher.is_error():
                words[first:end] = 0
            elif not own and (kept := matcher.kept_first()) is not None:
                words[first] = kept
            else:
                rows.append(_Row(index, matcher, clients[index], first, own))
        begin = time.perf_counter()
        done = 0 if self._one_by_one else self._fill_slices(rows, words)
        late = self._fill_in_turns(rows[done:], words)
        self._one_by_one = time.perf_counter() - begin > SLOW_STEP_SECONDS
        for row in late:
            words[row.first : row.first + 1 + len(row.drafts)] = 0
        indices = [row.index for row in late]
        for row in rows:
            if not row.drafts and row.index not in indices:
                row.matcher.keep_first(words[row.first])
        return self._of_logits(words), indices

    def _of_logits(self, words: NDArray[np.int32]) -> NDArray[np.int32]:
        """The words of llguidance's masks that cover the logits. Bits beyond the logits are cleared in place."""
        words = words[..., : -(-self._vocab_size // 32)]
        if surplus := -self._vocab_size % 32:
            words[..., -1] &= np.int32(0x7FFFFFFF >> (surplus - 1))
        return words

    def _beyond_logits(self, matcher: Any) -> str:
        """Why no answer of the model can follow the grammar, although an answer in the tokenizer's tokens can, or ""."""
        if self._num_bits > self._vocab_size:
            first = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32).copy()
            if not self._of_logits(first).any():
                return f"it begins with tokens that the model does not have (the model's ids are below {self._vocab_size})"
        return ""

    def allow_ends(self, words: NDArray[np.int32], end_ids: Collection[int]) -> None:
        """Let masks in which the answer may end allow each token that ends the answer of this request, in place.

        llguidance knows the model's end tokens. A request may have others, such as the one of a chat template.
        """
        others = set(end_ids).difference(self._grammar_ends)
        if not others:
            return
        may_end = np.zeros(len(words), dtype=bool)
        for token in self._grammar_ends:
            if token < self._vocab_size:
                may_end |= (words[:, token // 32] >> (token % 32) & 1) == 1
        bits = words.view(np.uint32)
        for token in others:
            bits[may_end, token // 32] |= np.uint32(1 << (token % 32))

    def _fill_slices(self, rows: Sequence[_Row], words: NDArray[np.int32]) -> int:
        """Fill rows in parallel while that is fast. Returns how many are done."""
        begin = time.perf_counter()
        done = 0
        size = FIRST_SLICE
        while done < len(rows) and time.perf_counter() - begin <= SLOW_STEP_SECONDS:
            self._fill(rows[done : done + size], words)
            done += size
            size *= 2
        return min(done, len(rows))

    def _fill_in_turns(self, rows: Sequence[_Row], words: NDArray[np.int32]) -> list[_Row]:
        """Fill rows one by one, at least one of them, until the time is up. Returns the others."""
        queues: dict[str | None, deque[_Row]] = {}
        for row in sorted(rows, key=lambda row: row.matcher.slow_seconds):
            queues.setdefault(row.client, deque()).append(row)
        self._spent = {client: self._spent.get(client, 0.0) for client in queues}
        turns = [(self._spent[client], number, client) for number, client in enumerate(queues)]
        heapify(turns)
        begin = time.perf_counter()
        elapsed = 0.0
        while turns and elapsed <= MASKS_SECONDS:
            _, number, client = heappop(turns)
            self._spent[client] += self._fill_one(queues[client].popleft(), words)
            if queues[client]:
                heappush(turns, (self._spent[client], number, client))
            elapsed = time.perf_counter() - begin
        return [row for queue in queues.values() for row in queue]

    def _fill_one(self, row: _Row, words: NDArray[np.int32]) -> float:
        """Compute the masks of one matcher and charge it. Returns the seconds that it is charged for."""
        begin = time.perf_counter()
        if row.drafts:
            self._fill([row], words)
            seconds = time.perf_counter() - begin
        else:  # in this thread, so that only its own processor time counts
            words[row.first] = 0
            seconds = row.matcher.fill(words[row.first].ctypes.data, words.shape[1] * 4)
        row.matcher.charge(seconds, 1 + len(row.drafts))
        return seconds

    def _fill(self, rows: Sequence[_Row], words: NDArray[np.int32]) -> None:
        """Compute the masks of these rows in parallel."""
        size = words.shape[1] * 4
        plain = [(row.matcher.inner, row.first) for row in rows if not row.drafts]
        guessed = [(row.matcher.inner, row.first, row.drafts) for row in rows if row.drafts]
        if plain:
            words[[first for _, first in plain]] = 0  # stays like this if a mask ends with an error
            self._executor.unsafe_compute_mask_ptr(plain, words.ctypes.data, size, len(words))
        if guessed:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(guessed, words.ctypes.data, size, len(words))

    def _load(self, structured: StructuredOutput) -> Any:
        """The tables of the tokenizer, made at the first call."""
        import llguidance

        with self._lock:
            if self._tables is None:
                if self._tokenizer is None:
                    rule = "be None because this engine has no tokenizer"
                    raise ParameterError("structured", rule, structured, "no_tokenizer")
                backend = self._tokenizer.backend_tokenizer
                num_tokens = backend.get_vocab_size(with_added_tokens=True)
                # llguidance accepts only end ids that the tokenizer has
                given_ends = [token for token in self._end_ids if token < num_tokens]
                end_ids = given_ends or [x for x in [self._tokenizer.eos_token_id] if x is not None]
                if not end_ids:
                    rule = "be None because neither the model nor the tokenizer names an end-of-sequence token"
                    raise ParameterError("structured", rule, structured, "unsupported")
                text = backend.to_str()
                num_bits = max(self._vocab_size, num_tokens)
                try:
                    self._tables = llguidance.LLTokenizer(text, n_vocab=num_bits, eos_token=end_ids)
                except ValueError as unreadable:
                    reason = str(unreadable)[:MAX_REASON]
                    rule = f"be None because llguidance cannot read this model's tokenizer ({reason})"
                    raise ParameterError("structured", rule, structured, "unsupported") from None
                self._num_bits = num_bits
                self._grammar_ends = end_ids
                self._executor = llguidance.LLExecutor()
                given = {"tokenizer": text, "vocab_size": num_bits, "end_ids": end_ids}
                limits = TrialLimits("compile", self._config.grammar_timeout, self._config.grammar_memory, "grammar")
                self._trials = Trials(grammar_process.__file__, given, limits, STACK)
            return self._tables


def _compile(llguidance: Any, tables: Any, grammar: str) -> tuple[Any, str]:
    """`compiled` in a thread with a stack of STACK bytes and a low priority. The thread does not keep the process alive.

    Python sets the stack size for all threads that start meanwhile. That costs only address space, because memory that is
    never touched is never allocated.
    """
    results: list[tuple[Any, str]] = []

    def work() -> None:
        with contextlib.suppress(OSError, AttributeError):  # on Linux each thread has a priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        results.append(compiled(llguidance, tables, grammar))

    thread = threading.Thread(target=work, name=f"{threading.current_thread().name}-compile", daemon=True)
    with _STACK_SIZE_LOCK:
        before = threading.stack_size(STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return results[0]


def _grammar(matcher: Any, structured: StructuredOutput) -> tuple[str, str]:
    """The name of the field that is given, and its content in llguidance's language."""
    if structured.regex is not None:
        return "regex", matcher.grammar_from_regex(structured.regex)
    if structured.grammar is not None:
        return "grammar", matcher.grammar_from_lark(structured.grammar)
    if structured.choice is not None:
        return "choice", matcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, structured.choice)))
    if structured.json_object:
        return "json_object", matcher.grammar_from_json_schema({"type": "object"}, overrides=WHITESPACE)
    given = structured.json_schema
    try:
        schema = json.loads(given) if isinstance(given, str) else json.loads(json.dumps(dict(given or {})))
    except (ValueError, TypeError, RecursionError) as error:
        raise ParameterError("json_schema", f"be JSON ({error})", given) from None
    if not isinstance(schema, dict):
        raise ParameterError("json_schema", "be a JSON object", schema)
    check_references(schema)
    narrow_numbers(schema)
    return "json_schema", matcher.grammar_from_json_schema(schema, overrides=WHITESPACE)
