"""Structured output: which tokens may come next so that the whole answer is of a schema, by llguidance.

    grammars = Grammars(tokenizer, vocab_size, end_ids)
    matcher = grammars.matcher(StructuredOutput(regex="[0-9]{3}"))   # a ValueError says what is wrong with it
    masks = grammars.masks([matcher])        # one bit for each token
    matcher.consume_token(token)
    matcher.is_stopped()                     # the answer is complete

A matcher belongs to one request and knows its answer so far. Making one may take long (a large schema half a second, the first
of all the tokenizer's tables too), so worker.py has it made outside the step; llguidance lets go of the interpreter
meanwhile. The masks of a step are filled by several threads while the device runs the step's forward.

JSON may be written with whitespace, at most 20 characters at a place, because some models would write nothing else. Left out:
where a mask meets the logits (sampler.py). Source: llguidance, https://github.com/guidance-ai/llguidance.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa_serve.engine.request import StructuredOutput
from fa_serve.spec import ParameterError

WHITESPACE = {"whitespace_pattern": r"[ \t\n\r]{0,20}"}
MAX_COMPILED = 64  # grammars that are kept for requests to come
MAX_LENGTH = 1 << 18  # characters of a grammar
STACK = 512 << 20  # bytes for a grammar of that length: llguidance calls itself for each rule that leads to another
_STARTING = threading.Lock()


class Grammars:
    """tokenizer: a fast one of transformers, or None, with which every grammar is refused; end_ids: what ends an answer.

    Safe to use from any thread.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = sorted(end_ids)
        self._lock = threading.Lock()
        self._tables: Any = None
        self._executor: Any = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()  # the least recently used first; those with an error too

    def matcher(self, structured: StructuredOutput) -> Any:
        """A new LLMatcher at the start of its answer. Raises ValueError, which names the field, if there can be none."""
        import llguidance

        field, grammar = _grammar(llguidance.LLMatcher, structured)
        if len(grammar) > MAX_LENGTH:
            raise ParameterError(field, f"have at most {MAX_LENGTH} characters", len(grammar))

        with self._lock:
            tables = self._load(llguidance)
            compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = _compile(llguidance, tables, grammar)
        with self._lock:
            self._compiled[grammar] = compiled
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            if compiled.is_error():
                raise ParameterError(field, "be a structure that can be followed", compiled.get_error().strip()[:400])
            return compiled.deep_copy()

    def masks(self, matchers: Sequence[Any]) -> NDArray[np.int32]:
        """(n, ceil(vocab_size / 32)): bit t % 32 of word t // 32 is 1 if token t may come next in the n-th answer."""
        words = np.zeros((len(matchers), -(-self._vocab_size // 32)), dtype=np.int32)
        self._executor.unsafe_compute_mask_ptr(
            [(matcher, row) for row, matcher in enumerate(matchers)], words.ctypes.data, words.shape[1] * 4, len(matchers)
        )
        return words

    def _load(self, llguidance: Any) -> Any:
        if self._tables is None:
            if self._tokenizer is None:
                raise ParameterError(
                    "structured", "be None because this engine has no tokenizer", "a structure", "no_tokenizer"
                )
            end_ids = self._end_ids or [x for x in [self._tokenizer.eos_token_id] if x is not None]
            if not end_ids:
                raise ParameterError(
                    "structured", "be None because the model has no end-of-sequence token", "a structure", "unsupported"
                )
            text = self._tokenizer.backend_tokenizer.to_str()
            self._tables = llguidance.LLTokenizer(text, n_vocab=self._vocab_size, eos_token=end_ids)
            self._executor = llguidance.LLExecutor()
        return self._tables


def _compile(llguidance: Any, tables: Any, grammar: str) -> Any:
    """In a thread that has STACK. The size is every thread's that starts meanwhile: memory that nobody touches."""

    def work() -> Any:
        matcher = llguidance.LLMatcher(tables, grammar, log_level=0)
        matcher.compute_bitmask()  # an error if there is no answer at all
        return matcher

    pool = ThreadPoolExecutor(1)
    with _STARTING:
        before = threading.stack_size(STACK)
        try:
            compiling = pool.submit(work)
        finally:
            threading.stack_size(before)
    with pool:
        return compiling.result()


def _grammar(matcher: Any, structured: StructuredOutput) -> tuple[str, str]:
    """The field that is given, and its content in llguidance's language."""
    if structured.regex is not None:
        return "regex", matcher.grammar_from_regex(structured.regex)
    if structured.grammar is not None:
        return "grammar", matcher.grammar_from_lark(structured.grammar)
    if structured.choice is not None:
        return "choice", matcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, structured.choice)))
    if structured.json_object:
        return "json_object", matcher.grammar_from_json_schema({"type": "object"}, overrides=WHITESPACE)
    try:
        schema = structured.json_schema
        schema = json.loads(schema) if isinstance(schema, str) else json.loads(json.dumps(dict(schema or {})))
    except (ValueError, TypeError, RecursionError) as error:
        raise ParameterError("json_schema", "be JSON", str(error)) from None
    if not isinstance(schema, dict):
        raise ParameterError("json_schema", "be an object", schema)
    return "json_schema", matcher.grammar_from_json_schema(schema, overrides=WHITESPACE)
