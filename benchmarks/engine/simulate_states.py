"""What the prefix cache of states saves: the engine's scheduler and tables over synthetic traffic, without a model.

    python -m benchmarks.engine.simulate_states [--gib 24] [--state-mib 73.7] [--token-kib 24] [chats documents]

A state of a hybrid model is as large as the keys and values of thousands of tokens, so it matters which are kept, and how the
memory is divided between states and pages. Two kinds of traffic, whose tokens are random:

    chats      64 conversations of 8 turns. All have the same 500 tokens first, and about 2,000 tokens before the second turn.
    documents  24 texts of 6,000 tokens, with 12 questions about each. Questions come in any order.

Requests come in the order of their times, which are numbers of steps, and steps compute nothing. Everything else is the
engine's: admission, chunks, preemption, eviction. The columns:

    hit       tokens found in the cache, of those that an earlier request has had in common with this one
    again     tokens computed again for a request, the mean. A page at most is what an unlimited cache computes
    states    written in all, in GiB: what keeping more of them costs
    preempted sequences that lost their pages or states

Results go to results/states.jsonl: the hit rate of each case, with those of a division or a policy that differs as peers. One
that has hit nothing is left out.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.measure import Results
from fa_serve.engine import SamplingParams
from fa_serve.engine.cache.pages import PageTable
from fa_serve.engine.cache.prefix import Prefix, SharedPrefix
from fa_serve.engine.cache.states import STATE_INTERVAL, StateTable
from fa_serve.engine.request.request import Request
from fa_serve.engine.scheduler.scheduler import Scheduler
from fa_serve.engine.scheduler.sequence import SequenceState

VOCAB = 1 << 30
"""Tokens are drawn from so many, so that nothing repeats by chance."""


@dataclass(frozen=True)
class Policy:
    """What is kept beside the state at the end of a prompt, and how the memory is divided.

    state_tokens: states get as many bytes, for each byte of pages, as a state has for each byte of so many tokens
    interval:     tokens between states inside a prompt
    ends, branches: whether states at the ends of answers, and where prompts part, are kept
    replaces:     whether states that a later one replaces are evicted first
    """

    state_tokens: int = 2048
    interval: int = STATE_INTERVAL
    ends: bool = True
    branches: bool = True
    replaces: bool = True


@dataclass(frozen=True)
class Memory:
    """Bytes of the caches: in all, of a state, and of the keys and values of a token."""

    total: int
    state: int
    token: int

    def divide(self, state_tokens: int, page_size: int) -> tuple[int, int]:
        """Numbers of pages and of states."""
        num_states = self.total // (self.state + state_tokens * self.token)
        return (self.total - num_states * self.state) // (page_size * self.token), num_states


class PolicyPrefix(Prefix):
    """A Prefix that leaves out what the policy does not keep."""

    policy = Policy()

    def shared(self, sequence: SequenceState) -> SharedPrefix:
        found = super().shared(sequence)
        return found if self.policy.branches else replace(found, branch=0)

    def keep_newest(self, sequence: SequenceState, limit: int) -> None:
        if self.policy.ends:
            super().keep_newest(sequence, limit)


class LeastRecentlyUsed(StateTable):
    """A StateTable in which no state is evicted before those that have not been used for longer."""

    def replace(self, page_hash: bytes) -> None:
        pass


class Talk:
    """Requests that follow each other, each with the tokens of the one before, or with the first tokens of all.

    beginning: tokens before the first request; turns: (new tokens, tokens of the answer) of each request
    continues: whether the answers belong to the next request
    """

    def __init__(self, beginning: list[int], turns: list[tuple[int, int]], continues: bool, first_step: int) -> None:
        self.tokens = beginning
        self.turns = turns
        self.continues = continues
        self.step = first_step
        self.number = 0


def chats(draw: random.Random) -> list[Talk]:
    """64 conversations of 8 turns."""
    system = tokens(draw, 500)
    return [
        Talk(
            list(system),
            [(draw.randint(1000, 1500), draw.randint(50, 300))]
            + [(draw.randint(30, 300), draw.randint(50, 300)) for _ in range(7)],
            True,
            draw.randint(0, 1500),
        )
        for _ in range(64)
    ]


def documents(draw: random.Random) -> list[Talk]:
    """12 questions about each of 24 texts. Each question is a talk of one turn, because it comes at any time."""
    texts = [tokens(draw, 6000) for _ in range(24)]
    return [
        Talk(list(text), [(draw.randint(20, 100), draw.randint(50, 300))], False, draw.randint(0, 6000))
        for text in texts
        for _ in range(12)
    ]


TRAFFIC = {"chats": chats, "documents": documents}


def tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(VOCAB) for _ in range(count)]


@dataclass
class Outcome:
    """What a simulation has counted; see the columns above."""

    num_common: int = 0
    num_cached: int = 0
    num_again: int = 0
    num_requests: int = 0
    num_written: int = 0
    num_preemptions: int = 0

    @property
    def hit_rate(self) -> float:
        return self.num_cached / max(self.num_common, 1)


def simulate(talks: list[Talk], memory: Memory, policy: Policy, draw: random.Random, page_size: int = 16) -> Outcome:
    """All requests of the talks, through a scheduler of 32 slots."""
    num_pages, num_states = memory.divide(policy.state_tokens, page_size)
    pages = PageTable(num_pages, page_size)
    table = StateTable if policy.replaces else LeastRecentlyUsed
    states = table(num_states, pages, interval=policy.interval)
    scheduler = Scheduler(pages, states, max_num_seqs=32, max_num_batched_tokens=4096, keys_per_tile=128)
    scheduler._prefix = PolicyPrefix(pages, states)
    scheduler._prefix.policy = policy
    outcome = Outcome()
    asked: dict[str, Talk] = {}
    common: dict[str, int] = {}
    seen: set[tuple[int, ...]] = set()
    waiting = sorted(talks, key=lambda talk: talk.step)
    step = serial = 0
    while waiting or asked:
        while waiting and waiting[0].step <= step:
            talk = waiting.pop(0)
            known = len(talk.tokens) if talk.number or tuple(talk.tokens[:64]) in seen else 0
            if not talk.number and talk.continues:
                known = min(known, 500)
            seen.add(tuple(talk.tokens[:64]))
            new, length = talk.turns[talk.number]
            prompt = talk.tokens + tokens(draw, new)
            scheduler.add(Request(str(serial), prompt, SamplingParams(), max_tokens=length, rank=(float(step), serial)))
            asked[str(serial)] = talk
            common[str(serial)] = known
            serial += 1
        batch = scheduler.schedule()
        outcome.num_written += sum(len(chunk.stores) for chunk in batch.chunks)
        for sequence in scheduler.commit(batch, tokens(draw, sum(chunk.num_samples for chunk in batch.chunks))):
            if sequence.finished:
                talk = asked.pop(name := sequence.request.request_id)
                outcome.num_requests += 1
                outcome.num_common += common[name]
                outcome.num_cached += min(sequence.num_cached_tokens, common[name])
                outcome.num_again += max(common[name] - sequence.num_cached_tokens, 0)
                talk.number += 1
                if talk.number < len(talk.turns):
                    talk.tokens = list(sequence.tokens)
                    talk.step = step + draw.randint(100, 1500)
                    waiting.append(talk)
                    waiting.sort(key=lambda each: each.step)
        step = step + 1 if batch or not waiting else max(step + 1, waiting[0].step)
    scheduler.check_integrity()
    outcome.num_preemptions = scheduler.num_preemptions
    return outcome


def policies() -> Iterator[tuple[str, str, Policy]]:
    """(group, name, policy); each group compares values of one setting."""
    for state_tokens in (512, 1024, 2048, 4096, 8192):
        yield "states : pages", f"{state_tokens} tokens", Policy(state_tokens=state_tokens)
    for interval in (512, 2048, 8192):
        yield "interval", f"{interval} tokens", Policy(interval=interval)
    yield "evicted first", "replaced", Policy()
    yield "evicted first", "least recently used", Policy(replaces=False)
    yield "kept", "all", Policy()
    yield "kept", "no ends of answers", Policy(ends=False)
    yield "kept", "no branches", Policy(branches=False)
    yield "kept", "ends of prompts alone", Policy(ends=False, branches=False, interval=1 << 30)


def main() -> None:
    parser = argparse.ArgumentParser(description="What the prefix cache of states saves.")
    parser.add_argument("traffic", nargs="*", default=list(TRAFFIC), choices=list(TRAFFIC))
    parser.add_argument("--gib", type=float, nargs="*", default=[8.0, 16.0, 32.0], help="of pages and states together")
    parser.add_argument("--state-mib", type=float, default=73.7, help="of a state; the default is Qwen3-Next's")
    parser.add_argument("--token-kib", type=float, default=24.0, help="of the keys and values of a token")
    parser.add_argument("--results", type=Path, default=Path(__file__).parents[1] / "results")
    options = parser.parse_args()
    results = Results("states", options.results)
    print(f"{'':<56}{'hit':>7}{'again':>8}{'states':>9}{'preempted':>11}")
    for name in options.traffic:
        for gib in options.gib:
            memory = Memory(int(gib * 2**30), int(options.state_mib * 2**20), int(options.token_kib * 2**10))
            rates: dict[str, dict[str, float]] = {}
            done: dict[Policy, Outcome] = {}
            for group, what, policy in policies():
                if policy not in done:
                    done[policy] = simulate(TRAFFIC[name](random.Random(0)), memory, policy, random.Random(1))
                outcome = done[policy]
                rates.setdefault(group, {})[what] = outcome.hit_rate
                print(
                    f"{name:<10}{gib:>5g} GiB  {group:<15}{what:<22}{outcome.hit_rate:>7.1%}"
                    f"{outcome.num_again / outcome.num_requests:>8.0f}{outcome.num_written * memory.state / 2**30:>9.0f}"
                    f"{outcome.num_preemptions:>11}",
                    flush=True,
                )
            ours = done[Policy()].hit_rate
            for group, peers in rates.items():
                results.add(
                    f"{name} {gib:g} GiB, {group}", "hit rate", ours, {what: rate for what, rate in peers.items() if rate}
                )


if __name__ == "__main__":
    main()
