"""Compiles a grammar on trial, in a process of trial_process.py, which loads only this file.

llguidance bounds the memory of its lexer, but neither the time nor the memory of all of its work: a schema of 169 kB can take
two seconds, and a schema that is refused in the end can take 300 MB before that. Left out: what is done with the result
(grammars.py).
"""

import contextlib
import json
import resource
import threading
from collections.abc import Callable
from typing import Any

STACK = 512 << 20
"""Bytes of stack for a grammar of maximum length: llguidance recurses for each rule that refers to another one."""
LIMITS = {"initial_lexer_fuel": 300_000, "max_lexer_states": 50_000, "verbose_errors": False}
"""llguidance's own limits. The regex ((X{100}){100}){100}z takes 170 MB with its default fuel of 1,000,000, and 64 MB with this
fuel. A schema with 1,000 patterns needs less than a third of this fuel. A state of the lexer takes 1 to 2 kB."""

NO_ANSWER = "no answer is possible: it refers to itself endlessly, or its parts contradict each other"
"""llguidance compiles such a grammar. At the first mask it reports only an identifier of its code, which this text replaces."""


def prepare(given: dict[str, Any]) -> Callable[[bytes], bytes]:
    """Load the tables of a tokenizer. The function takes a grammar and returns its error and its bytes, in JSON.

    given: the tokenizer as JSON text, the number of bits of a mask, the ids that end an answer
    """
    import llguidance

    tables = llguidance.LLTokenizer(given["tokenizer"], n_vocab=given["vocab_size"], eos_token=given["end_ids"])
    return lambda request: json.dumps(_try(llguidance, tables, json.loads(request))).encode()


def _try(llguidance: Any, tables: Any, grammar: str) -> dict[str, Any]:
    """Compile the grammar and compute its first mask. Returns llguidance's reason why the grammar cannot be followed, or "",
    and the bytes that it has taken. Raises MemoryError.
    """
    results: list[dict[str, Any]] = []

    def work() -> None:
        before = _memory()
        with contextlib.suppress(MemoryError):
            _, error = compiled(llguidance, tables, grammar)
            results.append({"error": error, "bytes": max(_memory() - before, 0)})

    threading.stack_size(STACK)
    thread = threading.Thread(target=work)
    try:
        thread.start()
    except RuntimeError as error:  # the only possible reason: there is no memory for its stack
        raise MemoryError from error
    thread.join()
    if not results:
        raise MemoryError
    return results[0]


def compiled(llguidance: Any, tables: Any, grammar: str) -> tuple[Any, str]:
    """The matcher of a grammar, or None, and why no answer can follow the grammar, or ""."""
    matcher = llguidance.LLMatcher(tables, grammar, log_level=0, limits=llguidance.LLParserLimits(**LIMITS))
    if matcher.is_error():
        return None, matcher.get_error()
    matcher.compute_bitmask()
    return (None, NO_ANSWER) if matcher.is_error() else (matcher, "")


def _memory() -> int:
    """Bytes of memory of this process; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0
