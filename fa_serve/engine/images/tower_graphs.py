"""CUDA graphs of the layers of vision towers, one for each layer, so that the model's own loop and the pauses in it remain.

    graphs = TowerGraphs(reader.blocks, reader.device)
    with graphs.replaying():                 # in forwards of this thread
        reader.encode_all(images)
    graphs.clear()                           # weights lie elsewhere, or are gone

A layer of a tower is about 35 launches, and a GPU waits between them if the host is slow. A layer is captured the second time
that its arguments have the same form, and replayed from then on. Its arguments are copied to the memory that its graph reads.
Its outputs are returned as copies, because models may keep them: in a list of several layers' outputs, or as features for inner
layers. Tensors that are the same for all layers of a forward are copied once. Layers of one form share the memory of their
arguments, and all graphs share one pool.

A form is the shapes and dtypes of the tensors, and the values of all other arguments. Towers that read images end to end
(`cu_seqlens`) would have a form for each total size of a batch, so these sizes are padded (tower_forms.py).

The first replay of a graph is compared with the result of the layer's own code. A form whose results differ, or that cannot be
captured, is launched without a graph, and the log says so. At most MAX_FORMS forms are kept, within MAX_GRAPH_BYTES; the least
recently used are freed first. Left out: how a graph is captured (runner/cuda_graphs.py), and what a model does between layers.
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
"""Whether an engine on a GPU makes these graphs. On an H200, encoding images one after the other is 1.6 times as fast with them
(docs/log/2026-11.md, 2026-11-30; benchmarks/engine/bench_images.py has the switch)."""
MAX_FORMS = 48
"""Forms with graphs. A tower with windows has two for each size of picture."""
MAX_GRAPH_BYTES = 1 << 30
"""Bound on the memory of all forms together with what captures have added to the pool."""
MAX_TENSOR_BYTES = 32 << 20
"""A layer whose arguments are larger is not captured: it keeps a GPU busy while the host launches the next kernels."""
MAX_KNOWN = 8
"""Calls of one forward that are recognised by the identity of their arguments."""
MAX_SEEN = 8 * MAX_FORMS
"""Forms that are remembered. Of forms without graphs, only the layers that have met them are known."""

Capture = Callable[[Callable[[], None], Any, nn.Module], tuple[Callable[[], None], Any]]


@dataclass(slots=True)
class _Static:
    """Memory that graphs read. given: the tensor it was copied from, if that need not be copied again in this forward"""

    memory: Tensor
    given: Tensor | None = None


@dataclass(slots=True)
class _Graph:
    """returned: structure of the layer's result; outputs: the memory of each tensor that the graph writes"""

    replay: Callable[[], None]
    returned: Tree
    outputs: list[Tensor]


@dataclass(slots=True, eq=False)
class _Form:
    """What the layers whose arguments have one form share.

    statics: memory for the arguments; None before the first capture
    met:     the layers that have been called with it
    outputs: memory for what layers return, by index, shape and dtype
    """

    statics: list[_Static] | None = None
    met: set[nn.Module] = field(default_factory=set)
    graphs: dict[nn.Module, _Graph] = field(default_factory=dict)
    outputs: dict[Any, Tensor] = field(default_factory=dict)
    is_refused: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of its memory outside of the pool."""
        return sum(x.nbytes for x in (*(each.memory for each in self.statics or ()), *self.outputs.values()))

    def free(self) -> None:
        """Free everything, and only remember which layers have met the form."""
        self.statics = None
        self.graphs.clear()
        self.outputs.clear()


@dataclass(frozen=True, slots=True)
class _Known:
    """A call of this forward, without its hidden states. kept: its arguments, alive so that no other object gets their ids"""

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
        """Inside, forwards of this thread replay the layers that have graphs, and capture those whose form occurs again.

        Forwards of other threads are not touched. Several threads may be in this context, as long as only one runs at a time.
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
        """Compute a layer, by its graph if it has one. Returns what the layer returns."""
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
        """The form of a call, or None. All layers of a forward get the same objects, except for the hidden states."""
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
        """Copy a layer's arguments to the memory that its graph reads."""
        for number, (static, given) in enumerate(zip(statics, call.tensors, strict=True)):
            if static.given is given:
                continue
            call.copy_to(static.memory, number)
            static.given = given if number in call.constants else None

    def _compute_and_capture(
        self, block: nn.Module, original: Callable[..., Any], form: _Form, call: LayerCall, compute: Callable[[], Any]
    ) -> Any:
        """Compute a layer by its own code, and capture a graph for the next call. Returns what the layer returns."""
        num_recorded = num_recorded_outputs()
        returned = compute()
        tensors: list[Tensor] = []
        try:
            tree = take_apart(returned, tensors)
            if num_recorded_outputs() != num_recorded:
                raise NoFormError("the model records outputs from inside the layer")
            if not all(bool(x.isfinite().all()) for x in tensors):
                return returned  # with NaN or infinities, results cannot be compared
            graph = self._captured(block, original, form, call)
            self._replay_first(graph, call, tree, tensors)
        except Exception as error:  # a model's code may raise anything in a capture; Triton's errors are no RuntimeErrors
            reason = f"{type(error).__name__}: {error}"
        else:
            form.graphs[block] = graph
            self._evict(call.key)
            return returned
        # outside of the handler, because its error keeps the memory of the forward alive
        log.warning("a %s of the vision tower runs without a CUDA graph for one input form: %s", type(block).__name__, reason)
        self._free(form)
        form.is_refused = True
        return returned

    def _captured(self, block: nn.Module, original: Callable[..., Any], form: _Form, call: LayerCall) -> _Graph:
        """Capture a graph of a layer, without replaying it."""
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
        """Replay a new graph. Raises ValueError if its result differs from that of the layer's own code."""
        graph.replay()
        found = [call.cut(x) for x in graph.outputs]
        if graph.returned != tree or not all(_agree(*both) for both in zip(expected, found, strict=True)):
            raise ValueError("the replay's result differs from that of the layer's own code")

    def _output(self, form: _Form, number: int, x: Tensor) -> Tensor:
        """Memory for a tensor that a layer returns."""
        key = (number, x.shape, x.dtype)
        if key not in form.outputs:
            with torch.inference_mode(False):  # so that it may be written outside of inference mode as well
                form.outputs[key] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        return form.outputs[key]

    def _reserved(self) -> int:
        """Bytes that PyTorch has reserved on the device."""
        return torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else 0

    def _evict(self, key: Any) -> None:
        """Free forms until the bounds are met. key: of the newest form, which is freed if it exceeds them by itself"""
        for other, form in [*self._forms.items()]:
            if self.num_forms <= self._max_forms and self.num_bytes <= self.max_bytes:
                return
            if form.graphs and other != key:
                self._free(form)
                del self._forms[other]
        form = self._forms[key]
        if self.num_bytes > self.max_bytes:
            log.warning(
                "the vision tower's layers have no CUDA graphs for one input form, because they need %d bytes", self.num_bytes
            )
            self._free(form)
            form.is_refused = True

    def _forget_seen(self) -> None:
        """Forget the oldest form without graphs if there are too many forms."""
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
    """Whether two results differ only by roundings, as the same product does in other sizes."""
    if (expected.shape, expected.dtype, expected.stride()) != (found.shape, found.dtype, found.stride()):
        return False
    if not expected.is_floating_point():
        return bool((expected == found).all())
    bound = 16 * torch.finfo(expected.dtype).eps
    return not expected.numel() or bool((expected - found).abs().max() <= bound * expected.abs().max())
