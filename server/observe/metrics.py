"""Prometheus metrics. Those that vLLM has too differ only in the prefix, so vLLM's dashboards need one replacement.

The engine's gauges and counters are read from its snapshot at each scrape. Times are measured here, as the client sees them:
from the arrival of the request to the moment when an increment is handed to the connection. All statistics of engines and
sequences have the label `model_name`. The metrics of the process, such as its memory, are left to the operating system's
exporters.

With traces, each sequence is a span as well (traces.py).
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from fa_serve.engine import EngineStats, RequestOutput
from fa_serve.engine.cache.host_tier import HostTierStats
from fa_serve.engine.stats import STEP_SECONDS

from .logs import num_dropped

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

PREFIX = "fa_serve:"
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
REQUEST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
MAX_COUNTERS = 256  # combinations of labels whose counters are cached: there are a dozen paths with a dozen statuses
MAX_ADAPTERS = 256  # adapters that have their own label; later ones are counted together, as OTHER
OTHER = "(others)"
"""A name that no adapter can have."""
SCRAPE_SHARE = 0.05  # share of the event loop's time that making the text of /metrics may take
DELAY_INTERVAL = 0.05  # seconds between two measurements of the event loop's delay
TOKENS = tuple(float(2**power) for power in range(18))


class EngineLife(NamedTuple):
    """is_up: whether an engine takes requests; num_restarts: how often a new engine has replaced a dead one"""

    is_up: bool
    num_restarts: int = 0


class Metrics(Collector):
    """All metrics of a server.

    snapshot: returns the statistics of each engine by the name of its replica, and the model's name. The replica's name is None
              for a single engine without replicas. It returns None while no engine is running
    life:     returns the state of the engine, or None while the model is loaded for the first time
    """

    def __init__(
        self,
        snapshot: Callable[[], tuple[Mapping[str | None, EngineStats], str] | None],
        life: Callable[[], EngineLife | None] = lambda: EngineLife(is_up=True),
    ):
        self._snapshot = snapshot
        self._life = life
        self.tracer: Tracer | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", REQUEST_SECONDS)
        self.between_tokens = self._histogram("inter_token_latency_seconds", "One token to the next.", TOKEN_SECONDS)
        self.whole = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", REQUEST_SECONDS)
        self.queue = self._histogram(
            "request_queue_time_seconds", "Time in the engine's queue before the first step.", REQUEST_SECONDS
        )
        self.in_prompt = self._histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", REQUEST_SECONDS
        )
        self.in_decode = self._histogram(
            "request_decode_time_seconds", "From the first token to the last one.", REQUEST_SECONDS
        )
        self.loop_delay = self._histogram(
            "event_loop_delay_seconds", "How late the server's event loop runs callbacks that are due.", STEP_SECONDS
        )
        self.prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a finished sequence.", TOKENS)
        self.output = self._histogram("request_generation_tokens", "Generated tokens of a finished sequence.", TOKENS)
        labels = ["model_name", "finished_reason"]
        finished = Counter(f"{PREFIX}request_success", "Sequences that have ended, by reason.", labels, registry=self._registry)
        responses = Counter(
            f"{PREFIX}http_responses", "HTTP responses, by path and status.", ["path", "status"], registry=self._registry
        )
        # cached, because the library takes a lock and converts the labels to strings to find a counter
        self.finished = lru_cache(MAX_COUNTERS)(finished.labels)
        self._responses = lru_cache(MAX_COUNTERS)(responses.labels)

        self.adapters = AdapterCounters(self._registry)
        self._refused = Counter(
            f"{PREFIX}connections_refused",
            "Connections that were refused or closed before their request was whole, by reason.",
            ["reason"],
            registry=self._registry,
        )

        self.delayed = Counter(
            f"{PREFIX}delayed_requests",
            "Requests that waited because their client had sent many requests that were refused or asked for no tokens.",
            registry=self._registry,
        ).inc

    def connection_refused(self, reason: str) -> None:
        self._refused.labels(reason).inc()

    def responded(self, path: str, status: int) -> None:
        self._responses(path, status).inc()

    def _histogram(self, name: str, help: str, bounds: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, help, bounds)
        self._registry.register(histogram)
        return histogram

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The engine's snapshot as gauges and counters."""
        dropped = CounterMetricFamily(f"{PREFIX}log_records_dropped", "Log records dropped because nobody read the log.")
        dropped.add_metric([], num_dropped())
        yield dropped
        found = self._snapshot()
        life = self._life()
        if life is not None:
            about = (
                "1, or 0 while no engine takes requests: it is dead, stalled or being restarted, or the model could not be "
                "loaded; missing while the model is loaded for the first time."
            )
            up = GaugeMetricFamily(f"{PREFIX}engine_up", about)
            up.add_metric([], int(life.is_up))
            yield up
            restarts = CounterMetricFamily(f"{PREFIX}engine_restarts", "Engines started to replace a dead one.")
            restarts.add_metric([], life.num_restarts)
            yield restarts
        if found is None:
            return
        snapshots, model = found
        labels = ["model_name"] if None in snapshots else ["model_name", "replica"]
        families: dict[str, Metric] = {}
        for replica, stats in snapshots.items():
            _add_engine(families, labels, [model] if replica is None else [model, replica], stats)
        yield from families.values()


class AdapterCounters:
    """How much each adapter was used. An adapter gets a label when the first sequence that uses it has ended.

    Only the operator and the administrator name adapters. A request for another name is refused before it has a sequence, so
    clients cannot add labels. An adapter that is unloaded keeps its counters.
    """

    def __init__(self, registry: CollectorRegistry):
        labels = ["model_name", "adapter"]
        texts = {
            "prompt": "Prompt tokens of finished sequences with an adapter.",
            "generation": "Generated tokens of finished sequences with an adapter.",
        }
        ended = "Sequences with an adapter that have ended, by reason."
        self._ended = Counter(f"{PREFIX}lora_request_success", ended, [*labels, "finished_reason"], registry=registry)
        self._tokens = {
            kind: Counter(f"{PREFIX}lora_{kind}_tokens", help, labels, registry=registry) for kind, help in texts.items()
        }
        self._known: set[str] = set()

    def ended(self, model: str, adapter: str, reason: str, output: RequestOutput | None) -> None:
        """Count a sequence with an adapter. output: its last one, or None if it ended without one"""
        if len(self._known) < MAX_ADAPTERS:
            self._known.add(adapter)
        adapter = adapter if adapter in self._known else OTHER
        self._ended.labels(model, adapter, reason).inc()
        if output is not None:
            self._tokens["prompt"].labels(model, adapter).inc(output.num_prompt_tokens)
            self._tokens["generation"].labels(model, adapter).inc(output.num_output_tokens)


def _add_engine(families: dict[str, Metric], names: list[str], label: list[str], stats: EngineStats) -> None:
    """Add the statistics of one engine to the families of metrics. names: the names of the labels; label: their values"""

    def add(kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, help: str, value: float, *more: str) -> None:
        family = families.setdefault(name, kind(PREFIX + name, help, labels=names + ["position"] * len(more)))
        family.add_metric([*label, *more], value)  # type: ignore[attr-defined]

    drafts = stats.speculation
    gauges: dict[str, tuple[str, float]] = {
        "num_requests_running": ("Sequences in the running batch.", stats.num_running),
        "num_requests_waiting": ("Sequences that wait to be admitted to the running batch.", stats.num_waiting),
    }
    if stats.num_pages:  # an encoder has none
        usage = stats.num_pages_used / stats.num_pages
        gauges["kv_cache_usage_perc"] = ("Fraction of the KV cache's pages in use, 0 to 1.", usage)
    if stats.num_states:
        gauges["state_usage_perc"] = (
            "Fraction of the states of linear attention in use, 0 to 1.",
            stats.num_states_used / stats.num_states,
        )
    counters: dict[str, tuple[str, float]] = {
        "num_preemptions": ("Sequences that were preempted because no page was free.", stats.num_preemptions),
        "prompt_tokens": ("Prompt tokens that have been processed.", stats.num_prompt_tokens),
        "generation_tokens": ("Tokens that have been generated.", stats.num_output_tokens),
        "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", stats.num_prompt_tokens),
        "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", stats.num_cached_tokens),
        "engine_steps": ("Steps of the engine.", stats.num_steps),
        "late_compilations": (
            "Kernels that were compiled or loaded while requests waited or ran.",
            stats.num_late_compilations,
        ),
        "late_captures": ("CUDA graphs that were captured while requests waited or ran.", stats.num_late_captures),
        "spec_decode_num_drafts": ("Drafts, one for each sequence and step.", drafts.num_drafts),
        "spec_decode_num_draft_tokens": ("Draft tokens.", drafts.num_draft_tokens),
        "spec_decode_num_accepted_tokens": ("Draft tokens that were accepted.", drafts.num_accepted_tokens),
    }
    if stats.host_tier is not None:
        more_gauges, more_counters = _of_host_tier(stats.host_tier)
        gauges |= more_gauges
        counters |= more_counters
    for name, (help, value) in gauges.items():
        add(GaugeMetricFamily, name, help, value)
    for name, (help, value) in counters.items():
        add(CounterMetricFamily, name, help, value)
    by_position = "spec_decode_num_accepted_tokens_per_pos"
    for position, count in enumerate(drafts.accepted_at):
        add(CounterMetricFamily, by_position, "Draft tokens that were accepted, by position.", count, str(position))
    steps = HistogramMetricFamily(
        f"{PREFIX}engine_step_seconds", "One step of the engine's loop, with its outputs.", labels=names
    )
    family = families.setdefault("engine_step_seconds", steps)
    family.add_metric(label, _buckets(STEP_SECONDS, stats.steps.counts), stats.steps.total)  # type: ignore[attr-defined]


def _of_host_tier(tier: HostTierStats) -> tuple[dict[str, tuple[str, float]], dict[str, tuple[str, float]]]:
    """Gauges and counters of a host tier, and of its folder."""
    gauges: dict[str, tuple[str, float]] = {
        "kv_host_bytes": ("Bytes of the host's memory for evicted pages and states.", tier.num_bytes),
        "kv_host_bytes_used": ("Bytes of that memory that hold pages and states.", tier.num_bytes_used),
    }
    counters: dict[str, tuple[str, float]] = {
        "kv_host_hits": ("Pages that came back from the host for a sequence.", tier.num_hits),
        "kv_host_misses": ("Full pages of prompts that neither the device nor the host had.", tier.num_misses),
        "kv_host_bytes_in": ("Bytes copied from the host to the device.", tier.bytes_in),
        "kv_host_bytes_out": ("Bytes copied from the device to the host.", tier.bytes_out),
        "kv_host_evictions": ("Pages and states that were evicted from the host.", tier.num_evictions),
        "kv_host_lost": ("Pages and states that were evicted from the device before they could be copied.", tier.num_lost),
        "kv_host_failures": ("Copies to or from the host that failed.", tier.num_failures),
        "kv_host_wait_seconds": ("Seconds that sequences have waited for copies from the host.", tier.seconds),
    }
    if (folder := tier.folder) is not None:
        gauges["kv_host_folder_bytes"] = ("Bytes that files of pages and states may take.", folder.num_bytes)
        gauges["kv_host_folder_bytes_used"] = ("Bytes of these files.", folder.num_bytes_used)
        counters |= {
            "kv_host_folder_hits": ("Pages that were read from files for a sequence.", folder.num_hits),
            "kv_host_folder_bytes_in": ("Bytes read from files.", folder.bytes_in),
            "kv_host_folder_bytes_out": ("Bytes written to files.", folder.bytes_out),
            "kv_host_folder_evictions": ("Files that were evicted.", folder.num_evictions),
            "kv_host_folder_lost": ("Pages and states that left the host before they were written.", folder.num_lost),
            "kv_host_folder_bad_files": ("Files that were torn, truncated or altered.", folder.num_bad),
            "kv_host_folder_failures": ("Reads and writes of files that failed.", folder.num_failures),
            "kv_host_folder_wait_seconds": ("Seconds that sequences have waited for files.", folder.seconds),
        }
    return gauges, counters


class Histogram(Collector):
    """A histogram for values that are observed at every token.

    It takes a tenth of the time of the library's own histogram, and observes several equal values in one call.
    """

    def __init__(self, name: str, help: str, bounds: tuple[float, ...]):
        self._name = PREFIX + name
        self._help = help
        self._bounds = bounds
        # by model name (a server has only one): the number of values in each bucket, and the sum of all values
        self._seen: dict[str, tuple[list[int], list[float]]] = {}
        self._observers: dict[str, Callable[[float, int], None]] = {}

    def of(self, model_name: str) -> Callable[[float, int], None]:
        """`observe(value, count)` for this model; only the event loop may call it."""
        if model_name in self._observers:
            return self._observers[model_name]
        bounds = self._bounds
        counts = [0] * (len(bounds) + 1)
        total = [0.0]
        self._seen[model_name] = (counts, total)

        def observe(value: float, count: int) -> None:
            counts[bisect_left(bounds, value)] += count
            total[0] += value * count

        self._observers[model_name] = observe
        return observe

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._help, labels=["model_name"])
        for model, (counts, total) in self._seen.items():
            family.add_metric([model], _buckets(self._bounds, counts), total[0])
        yield family


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """The cumulative counts by upper bound. `counts` has one number for each bound, and one for larger values."""
    return [*zip([*map(floatToGoString, bounds), "+Inf"], map(float, accumulate(counts)), strict=True)]


class ScrapedText:
    """The text of /metrics. It is made once for all scrapes that wait for it. make: makes the text

    The next text is not made until enough time has passed that texts take only SCRAPE_SHARE of the event loop's time.
    """

    def __init__(self, make: Callable[[], bytes]):
        self._make = make
        self._next: asyncio.Task[bytes] | None = None
        self._not_before = 0.0  # on time.monotonic's clock

    async def text(self) -> bytes:
        """A text that is made after this call."""
        if self._next is None:
            self._next = asyncio.create_task(self._make_in_time())
        return await asyncio.shield(self._next)

    async def _make_in_time(self) -> bytes:
        await asyncio.sleep(max(self._not_before - time.monotonic(), 0.0))
        self._next = None
        begin = time.thread_time()
        try:
            return self._make()
        finally:
            self._not_before = time.monotonic() + (time.thread_time() - begin) / SCRAPE_SHARE


class LoopDelay:
    """Observes several times a second how late the event loop runs a timer. Any other event has to wait as long."""

    def __init__(self, observe: Callable[[float, int], None]):
        self._observe = observe
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + DELAY_INTERVAL
        self._timer = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        now = self._loop.time()
        self._observe(max(now - self._due, 0.0), 1)
        self._due = now + DELAY_INTERVAL
        self._timer = self._loop.call_at(self._due, self._look)

    def stop(self) -> None:
        self._timer.cancel()


class SequenceMetrics:
    """The metrics of one sequence.

    arrival: when its request arrived, on time.perf_counter's clock
    adapter: the name of a loaded adapter, or None
    """

    def __init__(self, metrics: Metrics, model_name: str, arrival: float, adapter: str | None = None):
        self._metrics = metrics
        self._model = model_name
        self._adapter = adapter
        self._arrival = arrival
        self._first: float | None = None
        self._last: float | None = None
        self._observe_gap = metrics.between_tokens.of(model_name)
        self._span = metrics.tracer.start_span("sequence") if metrics.tracer else None

    def observe(self, output: RequestOutput) -> None:
        """Record an output of the sequence."""
        now = time.perf_counter()
        count = len(output.token_ids)
        if count and self._last is None:
            self._first = now - self._arrival
            self._metrics.first_token.of(self._model)(self._first, 1)
        elif self._last is not None and count:
            self._observe_gap((now - self._last) / count, count)
        if count:
            self._last = now
        if output.finished:
            self._metrics.whole.of(self._model)(now - self._arrival, 1)
            self._metrics.prompt.of(self._model)(output.num_prompt_tokens, 1)
            self._metrics.output.of(self._model)(output.num_output_tokens, 1)
            if output.times is not None and output.times.begun:
                self._metrics.queue.of(self._model)(output.times.queue, 1)
                self._metrics.in_prompt.of(self._model)(output.times.prompt, 1)
                self._metrics.in_decode.of(self._model)(output.times.decode, 1)
            self.end(output.finish_reason or "error", output)

    def end(self, reason: str, output: RequestOutput | None = None) -> None:
        """Record the end of the sequence.

        reason: the finish reason, "abort" if the client left, or "refused", which is not counted
        output: the sequence's last output, or None if it ended without one
        """
        if reason != "refused":
            self._metrics.finished(self._model, reason).inc()
            if self._adapter is not None:
                self._metrics.adapters.ended(self._model, self._adapter, reason, output)
        if self._span is None:
            return
        seconds: dict[str, float | None] = {"time_to_first_token": self._first, "e2e": time.perf_counter() - self._arrival}
        if output is not None:
            seconds |= _seconds_of(output)
            self._span.set_attribute("gen_ai.usage.input_tokens", output.num_prompt_tokens)
            self._span.set_attribute("gen_ai.usage.output_tokens", output.num_output_tokens)
        self._span.set_attribute("gen_ai.request.model", self._model)
        self._span.set_attribute("gen_ai.response.finish_reasons", [reason])
        for name, value in seconds.items():
            if value is not None:
                self._span.set_attribute(f"gen_ai.latency.{name}", value)
        self._span.end()


def _seconds_of(output: RequestOutput) -> dict[str, float]:
    """How long the engine took for each part of a sequence, by attribute. Attributes have vLLM's names where vLLM has one."""
    times = output.times
    if times is None or not times.begun:
        return {}
    return {
        "time_in_queue": times.queue,
        "time_in_model_prefill": times.prompt,
        "time_in_model_decode": times.decode,
        "time_in_masks": times.masks,
        "time_in_detokenise": times.detokenise,
        "longest_step": times.longest_step,
    }
