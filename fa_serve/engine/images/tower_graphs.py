"""CUDA graphs of the layers of vision towers: each layer by itself, so that the model's own loop and its pauses stay.

    graphs = TowerGraphs(reader.blocks, reader.device)
    with graphs.replaying():                 # in forwards of this thread
        reader.encode_all(images)
    graphs.clear()                           # weights lie elsewhere, or are gone

A layer of a tower is about 35 launches, between which a GPU waits for a slow host. While images are encoded, a layer that is
given tensors of a form that it was given before is captured, and replayed from then on. What it is given is copied into the
memory that its graph reads, and what it returns is a copy, which models keep as they like: a list of several layers' outputs,
features for inner layers. Tensors that are the same for all layers of a forward are copied once. Layers of one form share this
memory, and all graphs share one pool.

A form is the shapes and dtypes of the tensors, and the values of all other arguments. Towers that read images end to end
(`cu_seqlens`) have as many forms as there are sums of sizes, so these are padded (tower_forms.py).

The first replay of a graph is compared with what the layer's own code has computed. A form that differs, or that cannot be
captured, is launched as before, and the log says so. At most MAX_FORMS are kept, within MAX_GRAPH_BYTES: those that were used
longest ago are freed. Left out: how a graph is captured (runner/cuda_graphs.py), and what a model does between its layers.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fa_serve.engine.images.tower_forms import LayerCall, NoFormError, Tree, names_of, put_together, take_apart
from fa_serve.engine.runner.cuda_graphs import capture
from fa_serve.hf.images import num_recorded_outputs

log = logging.getLogger("fa_serve.engine")

REPLAYS_TOWERS = True
"""Whether an engine on a GPU makes these graphs. On an H200 one image after the other is encoded 1.6 times as fast
with them (docs/log/2026-11.md, 2026-11-30; benchmarks/engine/bench_images.py has the switch)."""
MAX_FORMS = 48
"""Forms with graphs. A tower with windows has two for each size of picture."""
MAX_GRAPH_BYTES = 1 << 30
"""Memory of all forms and of the pool, as far as it grew in captures."""
MAX_TENSOR_BYTES = 32 << 20
"""A layer that is given more at once keeps a GPU busy while the next launches come."""
MAX_KNOWN = 8
"""Calls of one forward that are told by the identity of what they are given."""
MAX_SEEN = 8 * MAX_FORMS
"""Forms without graphs of which is known which layers have met them."""

Capture = Callable[[Callable[[], None], Any, nn.Module], tuple[Callable[[], None], Any]]


@dataclass(slots=True)
class _Static:
    """Memory that graphs read. given: the tensor whose numbers it has, if these are not copied again while it is the same"""

    memory: Tensor
    given: Tensor | None = None


@dataclass(slots=True)
class _Graph:
    """outputs: of what it writes, the memory of each tensor"""

    replay: Callable[[], None]
    returned: Tree
    outputs: list[Tensor]


@dataclass(slots=True, eq=False)
class _Form:
    """What layers share that are given tensors of one form.

    statics: None before the first capture
    met:     the layers that were given it
    outputs: memory for what layers return, by its place, shape and dtype
    """

    statics: list[_Static] | None = None
    met: set[nn.Module] = field(default_factory=set)
    graphs: dict[nn.Module, _Graph] = field(default_factory=dict)
    outputs: dict[Any, Tensor] = field(default_factory=dict)
    is_refused: bool = False

    @property
    def num_bytes(self) -> int:
        """Of its memory beside the pool."""
        return sum(x.nbytes for x in (*(each.memory for each in self.statics or ()), *self.outputs.values()))

    def free(self) -> None:
        """Keep that it was met, and nothing else."""
        self.statics = None
        self.graphs.clear()
        self.outputs.clear()


@dataclass(frozen=True, slots=True)
class _Known:
    """A call of this forward, without its hidden states. kept: what it was given, so that nothing else gets its identity"""

    form: _Form
    call: LayerCall
    kept: Any


class TowerGraphs:
    """Owner of the graphs, and of the memory that they read and write.

    blocks: the layers of the towers
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        device: torch.device,
        *,
        max_forms: int = MAX_FORMS,
        max_bytes: int = MAX_GRAPH_BYTES,
        capture: Capture = capture,
    ) -> None:
        self._names = {block: names for block in blocks if (names := names_of(block)) is not None}
        self._device = device
        self._max_forms = max_forms
        self.max_bytes = max_bytes
        self._capture = capture
        self._forms: OrderedDict[Any, _Form] = OrderedDict()  # the least recently used first
        self._pool: Any = None
        self._bytes_of_pool = 0
        self._known: dict[Any, _Known] = {}
        self._nothing = torch.empty(0)
        self._threads: set[int] = set()
        self._originals: dict[nn.Module, Callable[..., Any] | None] = {}
        self.num_captures = 0
        self.num_replays = 0

    @property
    def num_bytes(self) -> int:
        return self._bytes_of_pool + sum(form.num_bytes for form in self._forms.values())

    @property
    def num_forms(self) -> int:
        """Forms that have graphs."""
        return sum(bool(form.graphs) for form in self._forms.values())

    def clear(self) -> None:
        """Free all graphs and their memory, before weights are freed or after they have moved."""
        for form in self._forms.values():
            self._free(form)
        self._forms.clear()

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Inside, forwards of this thread replay the layers that have graphs, and capture those whose form comes again.

        Forwards of other threads are not touched. They may have this context as well, as long as one of them runs at a time.
        """
        thread = threading.get_ident()
        if not self._threads:
            self._replace()
        self._threads.add(thread)
        try:
            yield
        finally:
            self._threads.discard(thread)
            self._known.clear()
            for form in self._forms.values():
                for each in form.statics or ():
                    each.given = None
            if not self._threads:
                self._put_back()

    def _replace(self) -> None:
        for block in self._names:
            original = block.forward
            self._originals[block] = vars(block).get("forward")
            block.forward = partial(self._run, block, original)

    def _put_back(self) -> None:
        for block, replaced in self._originals.items():
            del block.forward
            if replaced is not None:
                block.forward = replaced
        self._originals.clear()

    def _run(self, block: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a layer returns."""
        if threading.get_ident() not in self._threads or torch.is_grad_enabled():
            return original(*args, **kwargs)
        found = self._find(self._names[block], args, kwargs)
        if found is None:
            return original(*args, **kwargs)
        form, call = found
        graph = form.graphs.get(block)
        if graph is not None:
            return self._replay(form, graph, call)
        if form.is_refused or block not in form.met or sum(x.nbytes for x in call.tensors) > MAX_TENSOR_BYTES:
            form.met.add(block)
            self._forget_seen()
            return original(*args, **kwargs)
        return self._compute_and_capture(block, original, form, call, lambda: original(*args, **kwargs))

    def _find(self, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Form, LayerCall] | None:
        """The form of a call, or None. The layers of a forward are given the same objects, but for the hidden states."""
        hidden = args[0] if args else None
        key = None
        if isinstance(hidden, Tensor):
            others = (*map(id, args[1:]), *map(id, kwargs.values()))
            key = (names, *kwargs, others, hidden.shape, hidden.stride(), hidden.dtype)
            known = self._known.get(key)
            if known is not None:
                return known.form, known.call.with_hidden(hidden)
        try:
            call = LayerCall.of(names, args, kwargs, self._device)
        except NoFormError:
            return None
        form = self._forms.get(call.key)
        if form is None:
            form = self._forms[call.key] = _Form()
        self._forms.move_to_end(call.key)
        if key is not None:
            if len(self._known) == MAX_KNOWN:
                self._known.clear()
            self._known[key] = _Known(form, call.with_hidden(self._nothing), (args[1:], kwargs))
        return form, call

    def _replay(self, form: _Form, graph: _Graph, call: LayerCall) -> Any:
        assert form.statics is not None
        self._fill(form.statics, call)
        graph.replay()
        self.num_replays += 1
        return put_together(graph.returned, [call.cut(x).clone() for x in graph.outputs])

    def _fill(self, statics: list[_Static], call: LayerCall) -> None:
        """Copy what a layer is given to where its graph reads it."""
        for number, (static, given) in enumerate(zip(statics, call.tensors, strict=True)):
            if static.given is given:
                continue
            call.copy_to(static.memory, number)
            static.given = given if number in call.constants else None

    def _compute_and_capture(
        self, block: nn.Module, original: Callable[..., Any], form: _Form, call: LayerCall, compute: Callable[[], Any]
    ) -> Any:
        """What a layer returns, and a graph of it for the next time."""
        num_recorded = num_recorded_outputs()
        returned = compute()
        tensors: list[Tensor] = []
        try:
            tree = take_apart(returned, tensors)
            if num_recorded_outputs() != num_recorded:
                raise NoFormError("the model records what is computed within it")
            if not all(bool(x.isfinite().all()) for x in tensors):
                return returned  # a picture of which nothing can be compared
            graph = self._captured(block, original, form, call)
            self._replay_first(graph, call, tree, tensors)
        except Exception as error:  # whatever the code of a model raises in a capture; Triton's errors are no RuntimeErrors
            reason = f"{type(error).__name__}: {error}"
        else:
            form.graphs[block] = graph
            self._evict(call.key)
            return returned
        # outside of the handler, whose error keeps the memory of the forward
        log.warning("a %s of the tower is launched without a CUDA graph for one form: %s", type(block).__name__, reason)
        self._free(form)
        form.is_refused = True
        return returned

    def _captured(self, block: nn.Module, original: Callable[..., Any], form: _Form, call: LayerCall) -> _Graph:
        """A graph of a layer, which has not been replayed."""
        if form.statics is None:
            form.statics = [_Static(x) for x in call.allocate()]
        self._fill(form.statics, call)
        inputs = call.arguments([each.memory for each in form.statics])
        outputs: list[Tensor] = []
        returned: list[Tree] = []

        def step() -> None:
            tensors: list[Tensor] = []
            returned[:] = [take_apart(original(**inputs), tensors)]
            outputs[:] = [self._output(form, number, x) for number, x in enumerate(tensors)]
            for target, x in zip(outputs, tensors, strict=True):
                target.copy_(x)

        step()  # what is compiled, planned or allocated at the first call is not captured
        reserved = self._reserved()
        replay, self._pool = self._capture(step, self._pool, block)
        self.num_captures += 1
        self._bytes_of_pool += max(self._reserved() - reserved, 0)
        return _Graph(replay, returned[0], [*outputs])

    def _replay_first(self, graph: _Graph, call: LayerCall, tree: Tree, expected: Sequence[Tensor]) -> None:
        """Raises ValueError if a graph comes to something else than the layer's own code."""
        graph.replay()
        found = [call.cut(x) for x in graph.outputs]
        if graph.returned != tree or not all(_agree(*both) for both in zip(expected, found, strict=True)):
            raise ValueError("its replay differs from its own code")

    def _output(self, form: _Form, number: int, x: Tensor) -> Tensor:
        """Memory for a tensor that a layer returns."""
        key = (number, x.shape, x.dtype)
        if key not in form.outputs:
            with torch.inference_mode(False):  # so that it may be written outside of that mode as well
                form.outputs[key] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        return form.outputs[key]

    def _reserved(self) -> int:
        """Bytes that PyTorch has taken from the device."""
        return torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else 0

    def _evict(self, key: Any) -> None:
        """Keep to the bounds. key: of the form that was used last"""
        for other, form in [*self._forms.items()]:
            if self.num_forms <= self._max_forms and self.num_bytes <= self.max_bytes:
                return
            if form.graphs and other != key:
                self._free(form)
                del self._forms[other]
        form = self._forms[key]
        if self.num_bytes > self.max_bytes:
            log.warning("layers of the tower have no CUDA graphs for one form, which would take %d bytes", self.num_bytes)
            self._free(form)
            form.is_refused = True

    def _forget_seen(self) -> None:
        """Bound the forms that have no graphs."""
        if len(self._forms) <= MAX_SEEN:
            return
        oldest = next((key for key, form in self._forms.items() if not form.graphs), None)
        if oldest is not None:
            del self._forms[oldest]
            self._known.clear()

    def _free(self, form: _Form) -> None:
        if form.graphs and self._device.type == "cuda":
            with suppress(torch.AcceleratorError):  # the device is lost; the error that says so has been raised already
                torch.cuda.synchronize(self._device)
        form.free()
        self._known.clear()
        if not self.num_forms:
            self._pool = None
            self._bytes_of_pool = 0


def _agree(expected: Tensor, found: Tensor) -> bool:
    """Whether two results differ by roundings alone, as for other sizes of a product."""
    if (expected.shape, expected.dtype, expected.stride()) != (found.shape, found.dtype, found.stride()):
        return False
    if not expected.is_floating_point():
        return bool((expected == found).all())
    bound = 16 * torch.finfo(expected.dtype).eps
    return not expected.numel() or bool((expected - found).abs().max() <= bound * expected.abs().max())
