"""First tokens and gaps between tokens: the engine's scheduler over arrivals, on a device that is a formula.

    python -m benchmarks.engine.simulate_scheduler [--seeds 3] [--loads long mixed-80 ...]
    python -m benchmarks.engine.simulate_scheduler --front       # the trade between both, for the picture in docs/engine.md

Everything but the device is the engine's: admission, pages, the prefix cache, chunks, the learned cost of steps, and one step
in flight while the host prepares the next one. The device is about an 8B model on an H100 (`Device`). Its numbers were chosen
so that the policies before this one give about what vLLM's client had measured there with `long`: first token p50 3,750 ms and
gaps p99 50 ms with the guard of gaps, 1,617 and 330 ms with vLLM 0.26. A simulation shows what a policy does, not what a GPU
does: the host takes no time but `Device.host`, and all policies run on the same device.

    long      60 prompts of 750 to 29,000 tokens at 1.5/s, answers of 256
    mixed-N   prompts of 100 to 30,000 tokens (even in their logarithm), answers of 64 to 512, at N% of the rate that vLLM's
              policy serves if all of them come at once
    prefixes  512 requests at 40/s over 16 prefixes of 3,000 tokens
    answers   n = 4, prompts of 1,024 and answers of 128 tokens, 32 requests at once
    sampled, logprobs   closed loops of 128 and of 64 requests, prompts and answers of 256 tokens

The policies:

    fa_serve  the scheduler as it is
    guard     as it was: prompts in the order of their arrival, steps of at most four decoding steps, 4,096 tokens
    vllm      prompts in the order of their arrival, and steps of 8,192 tokens

Results go to results/scheduler.jsonl: the times of fa_serve, with those of the other policies as peers.
"""

from __future__ import annotations

import argparse
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.measure import Results
from fa_serve.engine import SamplingParams
from fa_serve.engine.cache.pages import PageTable
from fa_serve.engine.request.request import Request
from fa_serve.engine.scheduler.prompt_share import PromptShare
from fa_serve.engine.scheduler.scheduled_batch import ScheduledBatch
from fa_serve.engine.scheduler.scheduler import Scheduler
from fa_serve.engine.scheduler.step_cost import StepSize

VOCAB = 1 << 30
"""Tokens are drawn from so many, so that nothing repeats by chance."""
PAGES = 60_000
TIMES = ("first token p50", "first token p99", "gap p50", "gap p99")


@dataclass(frozen=True)
class Device:
    """Seconds that a step takes.

    weights: reading them; token: the products of a token, which hide the reading; chunk: what starts and ends of a step with
    prompts add; key: of a row that decodes; pair: a query of a prompt with a key; row: sampling; host: between two steps
    """

    weights: float = 5.5e-3
    token: float = 25e-6
    chunk: float = 1e-3
    key: float = 48e-9
    pair: float = 1e-9
    row: float = 5e-6
    host: float = 0.4e-3

    def seconds(self, size: StepSize) -> float:
        products = self.token * (size.rows + size.prompt_tokens) + self.chunk * (size.prompt_tokens > 0)
        return self.host + max(self.weights, products) + self.key * size.keys + self.pair * size.pairs + self.row * size.rows


@dataclass(frozen=True)
class Arrival:
    """A request: when it comes, in seconds, or -1 if it comes when another one has ended; n: its answers"""

    at: float
    prompt: list[int]
    max_tokens: int
    n: int = 1


@dataclass
class Outcome:
    """first: from arrival to first token of each answer; gaps: between its tokens; tokens, seconds: of the whole run."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return (len(self.first) + len(self.gaps)) / self.seconds

    def times(self) -> dict[str, float]:
        """In milliseconds."""
        values = (percentile(self.first, 50), percentile(self.first, 99), percentile(self.gaps, 50), percentile(self.gaps, 99))
        return {name: 1000 * value for name, value in zip(TIMES, values, strict=True)}


def percentile(values: list[float], percent: float) -> float:
    """As numpy's, between the two values around it."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (at - low)


class InOrder(PromptShare):
    """The guard as it was: no order but that of arrival, and steps that do not grow for those that wait."""

    def delay(self, left: int, before: int) -> float:
        return 0.0

    def target(self, decoding: StepSize, expected: float = 0.0) -> float:
        return super().target(decoding)


def scheduler_of(share: PromptShare | None, budget: int) -> Scheduler:
    pages = PageTable(PAGES, 16)
    return Scheduler(pages, max_num_seqs=256, max_num_batched_tokens=budget, keys_per_tile=128, prompt_share=share)


POLICIES: dict[str, Callable[[], Scheduler]] = {
    "fa_serve": lambda: scheduler_of(PromptShare(), 5120),
    "guard": lambda: scheduler_of(InOrder(), 4096),
    "vllm": lambda: scheduler_of(None, 8192),
}


def tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(VOCAB) for _ in range(count)]


def long(draw: random.Random) -> list[Arrival]:
    return open_loop(draw, 60, 1.5, lambda: draw.randint(750, 29_000), lambda: 256)


def open_loop(
    draw: random.Random, count: int, rate: float, length: Callable[[], int], answer: Callable[[], int]
) -> list[Arrival]:
    """So many requests that arrive at random."""
    arrivals: list[Arrival] = []
    at = 0.0
    for _ in range(count):
        arrivals.append(Arrival(at, tokens(draw, length()), answer()))
        at += draw.expovariate(rate)
    return arrivals


def mixed(percent: int, count: int = 150) -> Callable[[random.Random], list[Arrival]]:
    """At a part of the rate that vLLM's policy serves if all of them come at once."""

    def load(draw: random.Random) -> list[Arrival]:
        requests = open_loop(draw, count, 1.0, lambda: int(100 * 300 ** draw.random()), lambda: draw.randint(64, 512))
        at_once = [Arrival(0.0, each.prompt, each.max_tokens) for each in requests]
        rate = count / simulate(at_once, POLICIES["vllm"]()).seconds
        return [Arrival(each.at / (rate * percent / 100), each.prompt, each.max_tokens) for each in requests]

    return load


def prefixes(draw: random.Random) -> list[Arrival]:
    shared = [tokens(draw, 3000) for _ in range(16)]
    requests = open_loop(draw, 512, 40.0, lambda: 100, lambda: 110)
    return [Arrival(each.at, draw.choice(shared) + each.prompt, each.max_tokens) for each in requests]


def closed(count: int, at_once: int, length: int, answer: int, n: int = 1) -> Callable[[random.Random], list[Arrival]]:
    """Requests of which so many run at once: another one comes when one has ended."""
    return lambda draw: [Arrival(0.0 if number < at_once else -1.0, tokens(draw, length), answer, n) for number in range(count)]


LOADS: dict[str, Callable[[random.Random], list[Arrival]]] = {
    "long": long,
    "mixed-50": mixed(50),
    "mixed-80": mixed(80),
    "mixed-100": mixed(100),
    "prefixes": prefixes,
    "answers": closed(128, 32, 1024, 128, n=4),
    "sampled": closed(384, 128, 256, 256),
    "logprobs": closed(192, 64, 256, 256),
}


class Run:
    """A scheduler, the device, and a clock that moves when a step has ended or a request comes."""

    def __init__(self, arrivals: list[Arrival], scheduler: Scheduler, device: Device) -> None:
        self.scheduler = scheduler
        self.device = device
        self.outcome = Outcome()
        self.now = 0.0
        self._timed = deque(each for each in arrivals if each.at >= 0)
        self._closed = deque(each for each in arrivals if each.at < 0)
        self._in_flight: deque[tuple[ScheduledBatch, float, float]] = deque()  # batch, begin, end
        self._free = 0.0  # when the device has computed all that it was given
        self._last_read = 0.0
        self._arrived: dict[str, float] = {}
        self._last_token: dict[str, float] = {}
        self._unfinished: dict[int, int] = {}  # answers of each request
        self._serial = 0

    def run(self) -> Outcome:
        while self._timed or self.scheduler.sequences or self._in_flight:
            while self._timed and self._timed[0].at <= self.now:
                self._add(self._timed.popleft())
            batch = self.scheduler.schedule()
            begin = self.now
            if batch:
                self._free = max(self.now, self._free) + self.device.seconds(batch.size)
                self._in_flight.append((batch, begin, self._free))
            if self._in_flight and (len(self._in_flight) > 1 or not batch):
                self._commit(*self._in_flight.popleft())
            elif not batch and self._timed:
                self.now = max(self.now, self._timed[0].at)
        self.outcome.seconds = self.now
        return self.outcome

    def _add(self, arrival: Arrival) -> None:
        number = self._serial
        at = arrival.at if arrival.at >= 0 else self.now
        self._unfinished[number] = arrival.n
        for index in range(arrival.n):
            name = f"{number}-{index}"
            request = Request(name, arrival.prompt, SamplingParams(), arrival.max_tokens, rank=(at, self._serial), arrival=at)
            self._serial += 1
            self._arrived[name] = at
            self.scheduler.add(request)

    def _commit(self, batch: ScheduledBatch, begin: float, end: float) -> None:
        self.now = max(self.now, end)
        seconds = self.now - max(begin, self._last_read)
        self._last_read = self.now
        drawn = [0] * sum(chunk.num_samples for chunk in batch.chunks)
        for sequence in self.scheduler.commit(batch, drawn, seconds):
            name = sequence.request.request_id
            if name in self._last_token:
                self.outcome.gaps.append(self.now - self._last_token[name])
            else:
                self.outcome.first.append(self.now - self._arrived[name])
            self._last_token[name] = self.now
            if sequence.finished:
                number = int(name.split("-")[0])
                self._unfinished[number] -= 1
                if not self._unfinished[number] and self._closed:
                    self._add(self._closed.popleft())


def simulate(arrivals: list[Arrival], scheduler: Scheduler, device: Device | None = None) -> Outcome:
    """All requests through the scheduler. Its accounts are checked at the end."""
    outcome = Run(arrivals, scheduler, device or Device()).run()
    scheduler.check_integrity()
    return outcome


def compare(load: str, seeds: int) -> dict[str, dict[str, float]]:
    """The mean over the seeds of each policy's times, in ms, and of its tokens a second ("rate")."""
    found: dict[str, dict[str, float]] = {}
    for name, make in POLICIES.items():
        outcomes = [simulate(LOADS[load](random.Random(seed)), make()) for seed in range(seeds)]
        found[name] = {time: sum(each.times()[time] for each in outcomes) / seeds for time in TIMES}
        found[name]["rate"] = sum(each.rate for each in outcomes) / seeds
    return found


def front(seeds: int) -> dict[str, tuple[float, float, float]]:
    """(gap p99, first token p50, first token p99) of `long`, in ms, for values of the settings of each policy."""
    settings: dict[str, Callable[[], Scheduler]] = {}
    for target in (25, 35, 50, 75, 100, 150, 200):
        settings[f"guard, {target} ms"] = lambda target=target: scheduler_of(InOrder(target / 1000), 8192)
    for budget in (1024, 2048, 4096, 8192):
        settings[f"vllm, {budget} tokens"] = lambda budget=budget: scheduler_of(None, budget)
    for target in (100, 200, 1000, 2000, 4000, 8000):
        settings[f"fa_serve, {target} ms"] = lambda target=target: scheduler_of(PromptShare(None, target / 1000), 5120)
    found = {}
    for name, make in settings.items():
        all_times = [simulate(long(random.Random(seed)), make()).times() for seed in range(seeds)]
        gap, p50, p99 = (sum(times[key] for times in all_times) / seeds for key in ("gap p99", *TIMES[:2]))
        found[name] = gap, p50, p99
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="First tokens and gaps of the scheduler.")
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=list(LOADS))
    parser.add_argument("--seeds", type=int, default=3, help="arrivals are drawn so many times")
    parser.add_argument("--front", action="store_true", help="the trade between both times for `long`")
    options = parser.parse_args()
    results = Results("scheduler", Path(__file__).parents[1] / "results", gpu="none, simulated")
    if options.front:
        for name, (gap, p50, p99) in front(options.seeds).items():
            print(f"{name:<22} gap p99 {gap:>6.0f}   first token p50 {p50:>6.0f} p99 {p99:>6.0f}", flush=True)
            results.add(f"front: {name}", "ms", gap, {"first token p50": p50, "first token p99": p99})
    for load in () if options.front else options.loads:
        found = compare(load, options.seeds)
        for policy, values in found.items():
            shown = "".join(f"{name} {values[name]:>8.1f}   " for name in TIMES)
            print(f"{load:<10}{policy:<9}{shown}{values['rate']:>7.0f} tokens/s", flush=True)
        for name in TIMES:
            results.add(f"{load}, {name}", "ms", found["fa_serve"][name], {p: found[p][name] for p in ("guard", "vllm")})


if __name__ == "__main__":
    main()
