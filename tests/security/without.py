"""Shows that the security tests fail without the guards that they are for: switches one guard off and runs its test.

    python tests/security/without.py                     # every guard, a line for each; ends with 1 if a test passes without it
    python tests/security/without.py parser-header prefix-per-key

Each guard is switched off by a patch of this file, in the process of pytest and in that of the server, which runs this file in
the place of `python -m fa_serve` (`FA_SERVE_TEST_PROGRAM`). It takes about a minute for each guard.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
WITHOUT = "FA_SERVE_TEST_WITHOUT"


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _json_values() -> None:
    from fa_serve.server.bounds import json_bounds

    json_bounds.JsonBounds.check = _nothing  # type: ignore[method-assign]


def _answer_size() -> None:
    from fa_serve.server.answers import answer

    answer.Answer._within_size = lambda self, params, count: params  # type: ignore[method-assign]


def _protocol(*names: str) -> Callable[[], None]:
    """The methods are those of the class above, which has no bounds."""

    def patch() -> None:
        from fa_serve.server.bounds import protocol as bounded_protocol

        protocol = bounded_protocol.BoundedProtocol
        for name in names:
            setattr(protocol, name, getattr(bounded_protocol.HalfClosedProtocol, name, _nothing))

    return patch


def _argument_total() -> None:
    from fa_serve.server.bounds import json_bounds

    json_bounds.JsonTotal.add = _nothing  # type: ignore[method-assign]


def _text_tokens() -> None:
    from fa_serve.engine.request import prompts

    prompts.PromptReader._require_few_ids = _nothing  # type: ignore[method-assign]


def _pauses() -> None:
    from fa_serve.server.bounds import read_turns

    read_turns.FairFlow.paused_seconds = 0.0  # type: ignore[method-assign, assignment]


def _read_turns() -> None:
    from fa_serve.server.bounds import read_turns

    read_turns.FairFlow.resume_reading = read_turns.FlowControl.resume_reading  # type: ignore[method-assign]


def _connections() -> None:
    from fa_serve.server.bounds import protocol as bounded_protocol

    bounded_protocol.connection_limit = lambda _: 1 << 20
    import fa_serve.server.process as process

    process.connection_limit = bounded_protocol.connection_limit


def _bytes_in_flight() -> None:
    from fa_serve.server.bounds import guard

    guard.BytesInFlight.add = guard.BytesInFlight.give_back = _nothing  # type: ignore[method-assign, assignment]


def _token_routes() -> None:
    from fa_serve.server.service import Service

    reserve = Service.reserve
    Service.reserve = lambda self, *given: reserve(self, *given) if len(given) > 2 else nullcontext()  # type: ignore


def _prefix_per_key() -> None:
    from fa_serve.server.bounds.isolation import Isolation

    Isolation.cache_salt = lambda self, key, salt: salt  # type: ignore[method-assign]


def _clients() -> None:
    from fa_serve.server.bounds.isolation import Isolation

    Isolation.client = _nothing  # type: ignore[method-assign]


def _pages_of_other_clients() -> None:
    from fa_serve.engine.scheduler.fair_queue import FairQueue
    from fa_serve.engine.scheduler.scheduler import Scheduler

    Scheduler._make_room = FairQueue.prefer_idle = _nothing  # type: ignore[method-assign, assignment]


def _pages_not_finite() -> None:
    from fa_serve.engine.cache.pages import PageTable
    from fa_serve.engine.scheduler.scheduler import Scheduler

    PageTable.unregister = PageTable.forget = Scheduler._withdraw = _nothing  # type: ignore[method-assign, assignment]


def _grammar_turns() -> None:
    from fa_serve.engine.structured import grammar_queue

    grammar_queue.MAX_LONG = grammar_queue.MAX_LONG_PER_CLIENT = grammar_queue.MAX_PER_CLIENT = 1000


def _grammar_bytes() -> None:
    """Grammars are compiled as they come, with the library's own limits, and kept by number."""
    from fa_serve.engine.structured import grammar_process
    from fa_serve.engine.structured import grammars as structured

    grammar_process.LIMITS = {}
    matcher = structured.Grammars.matcher
    structured.Grammars.matcher = lambda self, given, trial=None: matcher(self, given)  # type: ignore[method-assign]
    structured.Grammars.sweep = _nothing  # type: ignore[method-assign]
    structured.BYTES_PER_CHARACTER = 0


def _grammar_cancelled() -> None:
    from fa_serve.engine.structured import grammar_queue
    from fa_serve.sandbox import trials

    trials.Trial.cancel = grammar_queue.GrammarQueue.cancel = _nothing  # type: ignore[method-assign, assignment]


def _mask_budget() -> None:
    from fa_serve.engine.structured import matcher

    matcher.SLOW_SECONDS = 1e9


def _matcher_errors() -> None:
    from fa_serve.engine.structured import matcher

    matcher.Matcher.is_stopped = lambda self: self.inner.is_stopped()  # type: ignore[method-assign]


def _stop_chars() -> None:
    from fa_serve.engine.request import input_processor

    before = input_processor.InputProcessor.__init__

    def init(self: Any, *given: Any, **named: Any) -> None:
        before(self, *given, **named)
        self._max_stop_chars = 1 << 40

    input_processor.InputProcessor.__init__ = init  # type: ignore[method-assign]


def _trimmed() -> None:
    from fa_serve.engine.process import host_memory

    host_memory.MemoryTrimmer.look = _nothing  # type: ignore[method-assign, assignment]
    host_memory.GROWTH = 1 << 60


def _heartbeat() -> None:
    from fa_serve.server.service import Service

    Service.stall_reason = _nothing  # type: ignore[method-assign]


def _keys_are_literal() -> None:
    from fa_serve.server import settings

    before = settings._keys_in
    settings._keys_in = lambda file: [key.partition("#")[0] for key in before(file)]


def _unpaid_work() -> None:
    from fa_serve.server.bounds.costs import Costs

    Costs.settle = _nothing  # type: ignore[method-assign]


def _work_in_turns() -> None:
    from fa_serve.server.bounds import costs

    costs.ITERATION_SECONDS = 1e9


def _kept_answers() -> None:
    from fa_serve.server import kept_answers

    kept_answers.USUAL.clear()


ATTACKS = "security/test_attacks.py::"
EXPENSIVE = "security/test_expensive_parts.py::"
GUARDS: dict[str, tuple[Callable[[], None], str]] = {
    "json-values": (_json_values, "server/bounds/test_json_bounds.py"),
    "answer-size": (_answer_size, ATTACKS + "test_the_cost_of_an_answer_is_told_before_the_work"),
    "grammar-bytes": (_grammar_bytes, ATTACKS + "test_regular_expressions_do_not_fill_the_memory"),
    "pages-not-finite": (
        _pages_not_finite,
        "engine/scheduler/test_scheduler.py -k not_be_finite",
    ),
    "parser-header": (_protocol("on_header", "_check_bytes_on_wire"), ATTACKS + "test_hostile_bytes[headers]"),
    "parser-url": (_protocol("on_url", "_check_bytes_on_wire"), ATTACKS + "test_hostile_bytes[url]"),
    "parser-pipeline": (_protocol("on_headers_complete"), "server/bounds/test_protocol.py -k pipelin"),
    "keys-are-literal": (_keys_are_literal, "security/test_dialects.py::test_strangers_are_told_before_anything_is_read"),
    "clients-take-turns": (_clients, ATTACKS + "test_priority_does_not_starve_another_key"),
    "pages-of-other-clients": (_pages_of_other_clients, ATTACKS + "test_priority_does_not_starve_another_key"),
    "prefix-per-key": (_prefix_per_key, ATTACKS + "test_a_prompt_is_not_revealed_to_another_key"),
    "grammar-turns": (_grammar_turns, "engine/structured/test_grammar_queue.py"),
    "grammar-cancelled": (
        _grammar_cancelled,
        "sandbox/test_trials.py -k cancel",
    ),
    "mask-budget": (_mask_budget, ATTACKS + "test_a_hostile_body[ambiguous-grammar]"),
    "matcher-errors": (
        _matcher_errors,
        "engine/structured/test_grammars.py::test_an_answer_whose_matcher_gives_up_is_not_complete",
    ),
    "stop-chars": (_stop_chars, EXPENSIVE + "test_many_characters_of_stop_strings_are_refused_with_the_limit"),
    "body-deadline": (_protocol("_late"), "security/test_bounds.py::test_a_body_that_dribbles_ends_at_its_deadline"),
    "bytes-in-flight": (_bytes_in_flight, ATTACKS + "test_unfinished_bodies_count_before_they_are_read"),
    "read-turns": (_read_turns, "server/bounds/test_read_turns.py"),
    "argument-total": (_argument_total, "server/chat/test_conversation.py -k bounded_together"),
    "text-tokens": (_text_tokens, "engine/request/test_prompts.py -k too_many_tokens"),
    "pauses": (_pauses, "server/bounds/test_protocol.py -k not_the_clients"),
    "connections": (_connections, "security/test_bounds.py::test_1500_idle_connections_lock_out_nobody"),
    "heartbeat": (_heartbeat, "security/test_health.py::test_a_stopped_engine"),
    "token-routes": (_token_routes, EXPENSIVE + "test_token_routes_are_admitted_like_generation"),
    "unpaid-work": (_unpaid_work, "server/bounds/test_costs.py -k debts"),
    "work-in-turns": (_work_in_turns, "server/bounds/test_costs.py -k iterations"),
    "kept-answers": (_kept_answers, "server/test_kept_answers.py -k once"),
    "trimmed": (_trimmed, "engine/process/test_host_memory.py -k grown"),
}


def run(name: str) -> str:
    """Run the test of a guard without it. Returns what pytest says at last."""
    tests, _, expression = GUARDS[name][1].partition(" -k ")
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-x", "--no-header", "-p", "security.without", *tests.split()]
    given = {
        WITHOUT: name,
        "FA_SERVE_TEST_PROGRAM": __file__,
        "FA_SERVE_LOAD": os.environ.get("FA_SERVE_LOAD", "short"),
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }
    command += ["-k", expression] if expression else []
    done = subprocess.run(command, cwd=TESTS, env=os.environ | given, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines() or ["nothing was printed"]
    reason = next((line for line in lines if line.startswith("E  ")), "")
    return f"{'fails' if done.returncode == 1 else 'DOES NOT FAIL'}  {name}: {lines[-1]} {reason[1:].strip()[:160]}"


def main() -> int:
    names = sys.argv[1:] or list(GUARDS)
    passed = 0
    for name in names:
        found = run(name)
        passed += not found.startswith("fails")
        print(found, flush=True)
    return int(passed > 0)


if os.environ.get(WITHOUT):
    GUARDS[os.environ[WITHOUT]][0]()

if __name__ == "__main__":
    if os.environ.get(WITHOUT):
        from fa_serve.__main__ import main as serve

        serve()
    else:
        sys.exit(main())
