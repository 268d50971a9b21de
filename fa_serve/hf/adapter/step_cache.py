"""The cache that layers with a recurrence get in a forward of the engine, instead of transformers' cache.

    cache = StepCache(position_ids, states)           # `paged_output` passes it as the model's cache
    out = cache.states.compute(key, call)             # the result of a mixer's recurrence (state_modules.py)

A mixer of transformers asks its cache whether there is a previous state, or for that state itself (releases after 5.17). It has
one code path for prompts and another for single tokens. `StepCache` says that there is no previous state and keeps nothing, so
every mixer takes the path for prompts, for any number of tokens. On this path, `states` computes the recurrences, with the
states of all packed sequences:

    PagedStates      computes a step of the engine, on state pages and tails
    WholeSequence    computes one sequence from its first token on, outside the engine's steps
    StateProbe       computes nothing: it records what is kept of a sequence

Left out: how the arguments of a mixer become a `StateCall` (`state_modules.py`).
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
    """A recurrence or a convolution of `fa_serve.ops`, in its two forms.

    whole, paged: the functions for whole sequences and for a step of the engine
    state:        returns what is kept of a sequence, given the arguments of the call that `sizes` names
    out:          name of the argument that has the shape and dtype of the output
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
LIGHTNING_ATTENTION = StateOp(
    ops.lightning_attention, ops.lightning_attention_paged, ops.lightning_attention_state, ("k", "v"), "v"
)
RG_LRU = StateOp(ops.rg_lru, ops.rg_lru_paged, ops.rg_lru_state, ("x",), "x")

Result = tuple[Tensor, Tensor | None]
Compute = Callable[..., Result]
"""(call: StateCall, initial_state=None, output_final_state=False) -> (out, final state)"""


class StateCall(NamedTuple):
    """One call of a recurrence, with the argument names of `fa_serve.ops`.

    rows:  arguments with a row for each token, (batch, seqlen, ...)
    fixed: all other arguments, such as weights
    """

    op: StateOp
    rows: dict[str, Tensor]
    fixed: dict[str, Any]


class StateKey(NamedTuple):
    """Identifies a state. module: index in `find_state_modules`; call: index of the call in a forward of the module"""

    module: int
    call: int


class ComputesStates(Protocol):
    """Computes the recurrences of a forward. layer_idx: see `StepCache.update`"""

    layer_idx: int | None

    def compute(self, key: StateKey, call: StateCall) -> Tensor:
        """The output of a call with batch 1, (1, total, ...)."""
        ...


class WholeSequence:
    """Computes recurrences over tokens that are one sequence from its first token on."""

    def __init__(self) -> None:
        self.layer_idx: int | None = None

    def compute(self, key: StateKey, call: StateCall) -> Tensor:
        return call.op.whole(**call.rows, **call.fixed)[0]


class StateProbe:
    """Records what is kept of a sequence, and computes nothing.

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
    """Computes a step of the engine. tensors: the states of the model by key; batch: describes the sequences of the step"""

    def __init__(self, tensors: Mapping[StateKey, ops.StateTensors], batch: ops.StateBatch) -> None:
        self.layer_idx: int | None = None
        self.tensors = tensors
        self.batch = batch

    def compute(self, key: StateKey, call: StateCall) -> Tensor:
        rows = {name: x[0] for name, x in call.rows.items()}
        return call.op.paged(**rows, **call.fixed, states=self.tensors[key], batch=self.batch)[None]


class _Layer:
    """The part of a cache layer's interface that a mixer may read."""

    record_past = False


class StepCache:
    """Replaces a model's cache in a forward over packed tokens.

    position_ids: (total,) int64. Llama 4 takes the length of the cache as the position of its first query and counts on from
                  there. So `get_seq_length` returns a length for each token: the token's position minus its row
    states:       computes the recurrences of the model
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
        """The convolution's inputs from before these tokens: None."""
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return None

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_recurrent_states_to_keep(self, layer_idx: int | None = None) -> int:
        """How many states before the last one a mixer shall also compute, to take tokens back (releases from 5.25 on): none,
        because the states of the engine's steps take back rejected tokens themselves."""
        return 0

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return key and value, because the batch itself keeps them. Note the layer for the batch, because a module that is
        shared by several layers does not know for which of them it runs."""
        self.states.layer_idx = layer_idx
        return key, value

    def update_conv_state(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The inputs of a convolution, unchanged; transformers' cache would put earlier inputs before them."""
        return x

    def update_recurrent_state(self, state: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return state

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """The state of MiniMax's linear attention: None."""
        return None

    def set_linear_cache(self, layer_idx: int, state: Tensor | None) -> None:
        """Keep nothing."""


def take_layer_idx(module: Any, states: ComputesStates | None) -> int:
    """The layer of an attention call: the one whose keys were last passed to the cache, or else the module's own layer_idx."""
    noted = None if states is None else states.layer_idx
    if states is None or noted is None:
        return cast(int, module.layer_idx)
    states.layer_idx = None
    return noted
