"""Structured output: which tokens may come next so that the whole answer follows a schema or a grammar, by llguidance.

    grammars = Grammars(tokenizer, vocab_size, end_ids)
    matcher = grammars.matcher(StructuredOutput(regex="[0-9]{3}"))   # a ParameterError says what is wrong with it
    masks = grammars.masks([matcher])        # one bit for each token
    matcher.consume_token(token)
    matcher.is_stopped()                     # the answer is complete

A grammar is compiled structured output; a matcher is its state for one request. Compiling may take long: half a second for a
large schema, and the first grammar also builds the tables of the tokenizer. Therefore engine_loop.py compiles outside the step,
in threads; llguidance releases the interpreter's lock meanwhile. Several threads fill the masks of a step while the device
runs the forward of the step.

JSON may contain at most 20 characters of whitespace at one place, because some models would write nothing else. Left out: where
a mask meets the logits (sampler.py). Source: llguidance, https://github.com/guidance-ai/llguidance.
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

from fa_serve.engine.sampling_params import StructuredOutput
from fa_serve.spec import ParameterError

WHITESPACE = {"whitespace_pattern": r"[ \t\n\r]{0,20}"}
MAX_COMPILED = 64
"""Grammars that are kept for later requests."""
MAX_LENGTH = 1 << 18
"""Characters of a grammar."""
STACK = 512 << 20
"""Bytes of stack for a grammar of MAX_LENGTH: llguidance recurses for each rule that refers to another one."""
MAX_REASON = 400
"""Characters of llguidance's explanation that go into an error message."""
_STACK_SIZE_LOCK = threading.Lock()


class Grammars:
    """Compiles and keeps grammars. Safe to use from any thread.

    tokenizer: a fast tokenizer of transformers, or None; without one every grammar is refused
    end_ids:   the tokens that end an answer
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = sorted(end_ids)
        self._lock = threading.Lock()
        self._tables: Any = None
        self._executor: Any = None
        # At most MAX_COMPILED, the least recently used first. Grammars with an error are kept as well.
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    def matcher(self, structured: StructuredOutput) -> Any:
        """A new LLMatcher at the start of its answer.

        Raises ParameterError, whose field is the one given in `structured`, if the grammar cannot be compiled or followed.
        """
        import llguidance

        field, grammar = _grammar(llguidance.LLMatcher, structured)
        if len(grammar) > MAX_LENGTH:
            raise ParameterError(field, f"have at most {MAX_LENGTH} characters", len(grammar))

        with self._lock:
            tables = self._load(llguidance, structured)
            compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = _compile(llguidance, tables, grammar)
        with self._lock:
            self._compiled[grammar] = compiled
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            if compiled.is_error():
                reason = compiled.get_error().strip()[:MAX_REASON]
                raise ParameterError(field, f"be a structure that can be followed ({reason})", getattr(structured, field))
            return compiled.deep_copy()

    def masks(self, matchers: Sequence[Any]) -> NDArray[np.int32]:
        """(n, ceil(vocab_size / 32)): bit t % 32 of word t // 32 is 1 if token t may come next in the n-th answer."""
        words = np.zeros((len(matchers), -(-self._vocab_size // 32)), dtype=np.int32)
        self._executor.unsafe_compute_mask_ptr(
            [(matcher, row) for row, matcher in enumerate(matchers)], words.ctypes.data, words.shape[1] * 4, len(matchers)
        )
        return words

    def _load(self, llguidance: Any, structured: StructuredOutput) -> Any:
        """The tables of the tokenizer, made at the first call."""
        if self._tables is None:
            if self._tokenizer is None:
                rule = "be None because this engine has no tokenizer"
                raise ParameterError("structured", rule, structured, "no_tokenizer")
            end_ids = self._end_ids or [x for x in [self._tokenizer.eos_token_id] if x is not None]
            if not end_ids:
                rule = "be None because neither the model nor the tokenizer names an end-of-sequence token"
                raise ParameterError("structured", rule, structured, "unsupported")
            text = self._tokenizer.backend_tokenizer.to_str()
            self._tables = llguidance.LLTokenizer(text, n_vocab=self._vocab_size, eos_token=end_ids)
            self._executor = llguidance.LLExecutor()
        return self._tables


def _compile(llguidance: Any, tables: Any, grammar: str) -> Any:
    """Compile in a thread with a stack of STACK bytes.

    Python sets the stack size for all threads that start meanwhile. That costs only address space, because memory that is
    never touched is never allocated.
    """

    def work() -> Any:
        matcher = llguidance.LLMatcher(tables, grammar, log_level=0)
        matcher.compute_bitmask()  # sets an error if no answer is possible
        return matcher

    pool = ThreadPoolExecutor(1)
    with _STACK_SIZE_LOCK:
        before = threading.stack_size(STACK)
        try:
            compiling = pool.submit(work)
        finally:
            threading.stack_size(before)
    with pool:
        return compiling.result()


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
    return "json_schema", matcher.grammar_from_json_schema(schema, overrides=WHITESPACE)
