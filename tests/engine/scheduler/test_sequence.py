"""Only the scheduler changes a sequence, through its methods. The rule is checked on the source code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

import fa_serve.engine
from fa_serve.engine import RequestError, SamplingParams
from fa_serve.engine.request.request import Request
from fa_serve.engine.scheduler.sequence import SequenceState

FOLDER = Path(fa_serve.engine.__file__).parent
FIELDS = {f.name for f in fields(SequenceState)}
METHODS = {
    name for name, value in vars(SequenceState).items() if callable(value) and not name.startswith("_") and name not in FIELDS
}
CHANGING_CALLS = {"append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse"}


def named(node: ast.AST) -> str:
    """What an expression calls itself: `chunk.sequence` and `sequence` are both "sequence"."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def changes(source: str) -> Iterator[str]:
    """The places where a module changes a sequence, by assignment, through one of its lists, or by its methods."""
    for node in ast.walk(ast.parse(source)):
        targets: list[ast.AST] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = list(node.targets)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if node.func.attr in CHANGING_CALLS and isinstance(owner, ast.Attribute):
                targets = [owner]
            if node.func.attr in METHODS and "sequence" in named(owner):
                yield ast.unparse(node.func)
        while targets:
            target = targets.pop()
            if isinstance(target, ast.Tuple | ast.List):
                targets += target.elts
                continue
            if isinstance(target, ast.Subscript):
                target = target.value
            own = isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
            if isinstance(target, ast.Attribute) and target.attr in FIELDS and not own:
                yield ast.unparse(target)


# `RequestOutput` and the step's own lists have fields of the same names.
ALLOWED = {
    "chunk_lengths.py": {"sequence.num_prompt_logits", "sequence.cuts"},  # which only read
    "batches.py": {"run.charge", "run.turn"},  # of an encoder's input, which is no sequence
    "tower_queue.py": {"wanted.charge", "wanted.turn"},  # of an image
    "groups.py": {"output.request"},
    "scheduler.py": {"sequence." + name for name in METHODS} | {"chunk.sequence." + name for name in METHODS},
    # which belongs to the scheduler
    "prefix.py": {"sequence." + name for name in ("num_prompt_logits", "offer", "release_before", "leave_unfiled")},
    "warm_up.py": {"sequence.start"},  # of a sequence that no scheduler has, to size the memory
}


def test_only_the_scheduler_changes_sequences() -> None:
    for path in FOLDER.rglob("*.py"):
        found = set(changes(path.read_text())) - ALLOWED.get(path.name, set())
        assert not found, f"{path.name} changes a sequence: {sorted(found)}"


@pytest.mark.parametrize(
    "line",
    [
        "sequence.finish_reason = 'stop'",
        "chunk.sequence.num_pending -= 1",
        "del sequence.pages[0]",
        "a, sequence.slot = 1, 2",
        "x.tokens.append(3)",
        "sequence.pages += [1]",
        "sequence.finish('stop')",
        "answer.sequence.receive([3])",
    ],
)
def test_a_planted_change_is_found(line: str) -> None:
    assert list(changes(line))


def test_reading_is_no_change() -> None:
    assert not list(changes("x = sequence.tokens[-1:] + sequence.held_pages\ny = sequence.finished"))


def test_a_request_never_changes() -> None:
    request = Request("a", [1, 2], SamplingParams(), 4)
    with pytest.raises(FrozenInstanceError):
        request.max_tokens = 5


def test_the_life_of_a_sequence() -> None:
    sequence = SequenceState(Request("a", [1, 2, 3], SamplingParams(), 4))
    assert (sequence.tokens, sequence.num_tokens, sequence.num_output_tokens, sequence.slot) == ([1, 2, 3], 3, 0, -1)
    sequence.start(2, [7, 8], num_shared=1, page_size=2)
    assert (sequence.num_computed, sequence.num_cached_tokens, sequence.num_offered) == (2, 2, 1)
    sequence.advance(1, samples=True)
    assert (sequence.num_tokens, sequence.num_output_tokens) == (4, 0), "one token is pending"
    sequence.receive([9])
    assert (sequence.tokens, sequence.num_tokens, sequence.num_output_tokens) == ([1, 2, 3, 9], 4, 1)
    sequence.release_before(1)
    assert sequence.held_pages == [8]
    sequence.pause()
    assert (sequence.slot, sequence.pages, sequence.num_computed, sequence.num_released) == (-1, [], 0, 0)
    sequence.start(0, [4, 5], num_shared=0, page_size=2)
    assert sequence.num_cached_tokens == 2, "what the first admission found"
    sequence.finish("error", RequestError("timeout", "too late"))
    assert sequence.finished
