"""What layers with a recurrence are given in a forward of the engine, in the place of transformers' cache.

    cache = StepCache(position_ids, states)           # `paged_output` passes it as the model's cache
    out = cache.states.compute(key, call)             # what a mixer's recurrence comes to (state_modules.py)

A mixer of transformers asks its cache whether there is a previous state, or for that state itself (releases later than 5.17),
and takes one code for prompts and another one for single tokens. `StepCache` says that there is none and keeps nothing, so that
every mixer takes the code for prompts, for any number of tokens. What its recurrences compute then, with states and for packed
sequences, is the business of `states`:

    PagedStates      a step of the engine, on state pages and tails
    WholeSequence    one sequence from its first token on, for all that is no step of the engine
    StateProbe       nothing: it writes down what is kept of a sequence

Left out: how the words of a mixer become a `StateCall`, which `state_modules.py` knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from fa_serve import ops
from fa_serve.spec import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class StateOp:
    """A recurrence or a convolution of `fa_serve.ops`, in its forms.

    whole, paged: for whole sequences, and for a step of the engine
    state:        says what is kept, from those arguments of the call that `sizes` names
    out:          the argument whose shape and dtype the output has
    """

    whole: Callable[..., tuple[Tensor, Tensor | None]]
    paged: Callable[..., Tensor]
    state: Callable[..., ops.StateSpec]
    sizes: tuple[str, ...]
    out: str


CONVOLUTION = StateOp(ops.causal_conv1d, ops.causal_conv1d_paged, ops.causal_conv1d_state, ("x", "weight"), "x")
DELTA_RULE = StateOp(ops.gated_delta_rule, ops.gated_delta_rule_paged, ops.gated_delta_rule_state, ("k", "v", "g"), "v")
SSD = StateOp(ops.ssd, ops.ssd_paged, ops.ssd_state, ("x", "b"), "x")
SELECTIVE_SCAN = StateOp(ops.selective_scan, ops.selective_scan_paged, ops.selective_scan_state, ("x", "b"), "x")


class StateCall(NamedTuple):
    """One call of a recurrence, in the words of `fa_serve.ops`.

    rows:  arguments with a row for each token, (batch, seqlen, ...)
    fixed: the others, such as weights
    """

    op: StateOp
    rows: dict[str, Tensor]
    fixed: dict[str, Any]


class StateKey(NamedTuple):
    """The owner of a state. module: number in `find_state_modules`; call: number of the call in a forward of the module"""

    module: int
    call: int


class ComputesStates(Protocol):
    """Answers for the recurrences of a forward. layer_idx: see `StepCache.update`"""

    layer_idx: int | None

    def compute(self, key: StateKey, call: StateCall) -> Tensor:
        """The output of a call whose batch is 1, (1, total, ...)."""
        ...


class WholeSequence:
    """The tokens are one sequence, from its first one on."""

    def __init__(self) -> None:
        self.layer_idx: int | None = None

    def compute(self, key: StateKey, call: StateCall) -> Tensor:
        return call.op.whole(**call.rows, **call.fixed)[0]


class StateProbe:
    """Writes down what is kept of a sequence, and computes nothing.

    found: StateSpec by key
    """

    def __init__(self) -> None:
        self.layer_idx: int | None = None
        self.found: dict[StateKey, ops.StateSpec] = {}

    def compute(self, key: StateKey, call: StateCall) -> Tensor:
        if key in self.found:
            raise UnsupportedModelError("a module computes its states more than once in a forward")
        given = call.rows | call.fixed
        self.found[key] = call.op.state(**{name: given[name] for name in call.op.sizes})
        return torch.zeros_like(given[call.op.out])


class PagedStates:
    """A step of the engine. tensors: the states of the model by key; batch: what the step says about its sequences"""

    def __init__(self, tensors: Mapping[StateKey, ops.StateTensors], batch: ops.StateBatch) -> None:
        self.layer_idx: int | None = None
        self.tensors = tensors
        self.batch = batch

    def compute(self, key: StateKey, call: StateCall) -> Tensor:
        rows = {name: x[0] for name, x in call.rows.items()}
        return call.op.paged(**rows, **call.fixed, states=self.tensors[key], batch=self.batch)[None]


class _Layer:
    """What a mixer may ask of one layer of its cache."""

    record_past = False


class StepCache:
    """Takes the place of a model's cache in a forward over packed tokens.

    position_ids: (total,) int64. Llama 4 counts the positions of its queries from the length of the cache, which it takes to
                  be the first one. For each token the length is thus what is missing to its position
    states:       answers for the recurrences of the model
    """

    def __init__(self, position_ids: Tensor, states: ComputesStates | None = None) -> None:
        self.position_ids = position_ids
        self.states: ComputesStates = WholeSequence() if states is None else states
        self.layers = self

    def __getitem__(self, layer_idx: int) -> _Layer:
        return _Layer()

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        return self.position_ids - torch.arange(len(self.position_ids), device=self.position_ids.device)

    def has_previous_state(self, layer_idx: int = 0, state_idx: int | None = None) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The inputs of a convolution before these tokens: none."""
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return None

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The batch keeps the keys and values. It is told their layer, which modules that several layers share do not know."""
        self.states.layer_idx = layer_idx
        return key, value

    def update_conv_state(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The inputs of a convolution, to which transformers' cache adds those before them."""
        return x

    def update_recurrent_state(self, state: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return state


def take_layer_idx(module: Any, states: ComputesStates | None) -> int:
    """The layer whose keys an attention module has passed to its cache last, or its own number if there is no such call."""
    noted = None if states is None else states.layer_idx
    if states is None or noted is None:
        return cast(int, module.layer_idx)
    states.layer_idx = None
    return noted
