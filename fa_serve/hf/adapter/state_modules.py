"""Modules of transformers' models that keep a recurrent or convolution state, and how their recurrences reach `fa_serve.ops`.

    for module in find_state_modules(model):
        module.forward = PatchedMixer(module, number)

Modules are not recognised by class name, but because their own code updates a state of the cache. That code calls functions of
its modeling module by name, such as `causal_conv1d_fn`. A `PatchedMixer` runs the same code with other functions under these
names. In releases from 5.25 on, a part of that code is itself a function of the modeling module, such as
`causal_conv1d_forward`, which reads and updates the cache; the mixer runs that part with the other functions as well. For code
that holds its recurrence inline, it runs a forward of `written_recurrences.py`. Nothing is replaced outside of the instance:
another model of the same class stays as it is.

The functions translate transformers' arguments into a `StateCall`. If an argument of the forward is a `StepCache`, its `states`
computes the call. Otherwise, as in `generate`, the call is computed directly, with the initial state that it is given.

A compiled forward on a GPU leaves its graph for each call, because a graph cannot hold what `fa_serve.ops` reads from the
device. On a CPU, where `fa_serve.ops` has no kernels, the module's own code runs instead, and the graph stays whole.

Left out: whether the result equals that of the module's own code, which surgery/states.py proves.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from fa_serve.hf.adapter.packs import packs_of_states
from fa_serve.hf.adapter.releases import CACHE_NAMES, cache_argument, plain_function
from fa_serve.hf.adapter.step_cache import (
    CONVOLUTION,
    DELTA_RULE,
    SELECTIVE_SCAN,
    SSD,
    Compute,
    ComputesStates,
    Result,
    StateCall,
    StateKey,
    StepCache,
)
from fa_serve.hf.adapter.written_recurrences import WrittenRecurrence, written_recurrence
from fa_serve.spec import UnsupportedModelError

UPDATES = {"update_conv_state", "update_recurrent_state"}
"""Methods of transformers' caches that a module with a state calls."""


def find_state_modules(model: nn.Module) -> list[nn.Module]:
    """The modules whose own forward updates a state, in the order of the model."""
    return [module for module in model.modules() if UPDATES & _names_of(module) or written_for(module)]


def written_for(module: nn.Module) -> WrittenRecurrence | None:
    """The forward that is written for a module whose own code holds its recurrence inline; None for all other modules."""
    return written_recurrence(_names_of(module))


def exchanged_functions(module: nn.Module) -> list[str]:
    """The names of the functions that a module calls and that `PatchedMixer` exchanges."""
    return sorted(FUNCTIONS.keys() & _names_of(module))


def _names_of(module: nn.Module) -> set[str]:
    """The names of functions and attributes in a module's own forward, and in its parts."""
    own = _own_forward(module)
    if not isinstance(own, types.FunctionType):
        return set()
    return set(own.__code__.co_names).union(*(part.__code__.co_names for part in _parts_of(own).values()))


def _parts_of(own: types.FunctionType) -> dict[str, types.FunctionType]:
    """The functions of its modeling module that a forward calls and that update a state, by name."""
    found = {name: plain_function(own.__globals__.get(name)) for name in own.__code__.co_names}
    return {
        name: part
        for name, part in found.items()
        if part is not None and part.__globals__ is own.__globals__ and UPDATES & {*part.__code__.co_names}
    }


def _with_functions(function: types.FunctionType, functions: Mapping[str, Callable[..., Any]]) -> types.FunctionType:
    """A function with other functions under these names.

    torch.compile keeps what it compiles with a code object, so that functions with other globals must not share one.
    """
    other = types.FunctionType(
        function.__code__.replace(),
        {**function.__globals__, **functions},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    other.__kwdefaults__ = function.__kwdefaults__
    return other


def _own_forward(module: nn.Module) -> Any:
    return inspect.unwrap(type(module).forward)


def _own_forward_with(module: nn.Module, functions: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The code of a module's own forward, with other functions under these names. Its first argument is the module.

    The decorators of the forward stay around it: transformers' `force_accelerate_hooks` brings offloaded weights that the code
    reads, instead of calling their modules.
    """
    own = _own_forward(module)
    parts = {name: _with_functions(part, functions) for name, part in _parts_of(own).items()}
    forward = _with_functions(own, {**functions, **parts})
    decorated = _decorated(type(module).forward, forward)
    name = cache_argument(own)

    def with_any_cache_name(*args: Any, **kwargs: Any) -> Any:
        # callers may name the cache as earlier releases did; wrappers of the forward translate such names, but are not in `own`
        return decorated(*args, **{name if given in CACHE_NAMES else given: value for given, value in kwargs.items()})

    return with_any_cache_name


def _decorated(outer: Any, innermost: Callable[..., Any]) -> Callable[..., Any]:
    """The decorators of `outer` around another function than the one they decorate."""
    wrapped = getattr(outer, "__wrapped__", None)
    if wrapped is None:
        return innermost
    inner = _decorated(wrapped, innermost)
    cells = [types.CellType(inner) if cell.cell_contents is wrapped else cell for cell in outer.__closure__ or ()]
    if all(cell.cell_contents is not inner for cell in cells):
        return inner  # it does not call the function by a name of its closure
    code = outer.__code__.replace()
    return functools.wraps(inner)(types.FunctionType(code, outer.__globals__, outer.__name__, outer.__defaults__, tuple(cells)))


def reference_forward(module: nn.Module) -> Callable[..., Any]:
    """A module's own forward with transformers' PyTorch code of its recurrences.

    If flash-linear-attention, causal-conv1d or mamba-ssm is installed, transformers replaces this code with their functions.
    These round products to TF32 or bfloat16, so no other code can be proven equal to them.
    """
    functions = _own_forward(module).__globals__
    names = exchanged_functions(module)
    return partial(
        _own_forward_with(
            module, {name: plain_function(functions[name]) or functions[name] for name in names if name in functions}
        ),
        module,
    )


def _on_device(device_type: str, args: Iterable[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an argument of a forward is on a device of this type."""
    return any(isinstance(x, Tensor) and x.device.type == device_type for x in (*args, *kwargs.values()))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _uncompiled(function: Callable[..., Any], **arguments: Any) -> Any:
    """Call a function outside of the graph, as recurrences that read on the host where packed sequences begin."""
    return function(**arguments)


class PatchedMixer:
    """The forward of a module with a state, with recurrences of `fa_serve.ops`.

    number:   index of the module in `find_state_modules`
    uncalled: names of linear layers of the module that its code does not call, because it multiplies with their weights itself:
              no adapter takes effect in these

    Raises UnsupportedModelError for a module that calls none of the functions that are exchanged, and for which no forward is
    written.
    """

    def __init__(self, module: nn.Module, number: int, uncalled: frozenset[str] = frozenset()) -> None:
        written = written_for(module)
        names = exchanged_functions(module)
        if not names and written is None:
            raise UnsupportedModelError(f"{type(module).__name__} keeps a state with code that fa_serve cannot replace")
        self.module = module
        self.number = number
        self.uncalled = uncalled
        self._forward: Callable[..., Any]
        if written is not None:
            self._forward = partial(written.forward, compute=self._compute)
        else:
            self._forward = _own_forward_with(module, {name: partial(FUNCTIONS[name], self._compute) for name in names})
        self._states: ComputesStates | None = None
        self._num_calls = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Copying the module makes a PatchedMixer for the copy."""
        return PatchedMixer, (self.module, self.number, self.uncalled)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache = next((x for x in (*args, *kwargs.values()) if isinstance(x, StepCache)), None)
        if cache is None and self._is_left_to_the_module(args, kwargs):
            return type(self.module).forward(self.module, *args, **kwargs)
        self._states = None if cache is None else cache.states
        self._num_calls = 0
        try:
            return self._forward(self.module, *args, **kwargs)
        finally:
            self._states = None

    def _is_left_to_the_module(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether the module's own recurrence computes a forward. It computes those on the meta device, where tensors have no
        values, and those that are compiled for a CPU."""
        if _on_device("meta", args, kwargs):
            return True
        return torch.compiler.is_compiling() and packs_of_states() is None and not _on_device("cuda", args, kwargs)

    def _compute(
        self,
        call: StateCall,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
    ) -> Result:
        if self._states is None:
            cu_seqlens = packs_of_states()
            whole = call.op.whole if cu_seqlens is None else partial(_uncompiled, call.op.whole)
            out, state = whole(
                **call.rows,
                **call.fixed,
                initial_state=initial_state,
                output_final_state=output_final_state,
                cu_seqlens=cu_seqlens,
            )
            # a cache has room for the state of one sequence: it keeps that of the last packed sequence, which may go on
            return out, state if state is None or cu_seqlens is None else state[-1:]
        key = StateKey(self.number, self._num_calls)
        self._num_calls += 1
        out = self._states.compute(key, call)
        return out, out.new_empty(0)


def patched_mixer(module: nn.Module) -> PatchedMixer | None:
    """The PatchedMixer of a module, also one that accelerate's hooks have replaced by a forward that calls it."""
    own = vars(module)
    found = (own.get("forward"), own.get("_old_forward"))
    return next((forward for forward in found if isinstance(forward, PatchedMixer)), None)


def convolution(
    compute: Compute,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **unused: Any,
) -> Tensor:
    """`causal_conv1d_fn`. hidden_states: (batch, channels, seqlen)"""
    if activation not in (None, "silu", "swish"):
        raise UnsupportedModelError(f"a causal convolution must have the activation None or silu, got {activation}")
    fixed = {"weight": weight, "bias": bias, "activation": activation and "silu"}
    out, _ = compute(StateCall(CONVOLUTION, {"x": hidden_states.transpose(1, 2)}, fixed))
    return out.transpose(1, 2)


def delta_rule(
    compute: Compute,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **unused: Any,
) -> Result:
    """`torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention`. Rows have the layout of `ops.gated_delta_rule`."""
    rows = {"q": query, "k": key, "v": value, "g": g, "beta": beta}
    call = StateCall(DELTA_RULE, rows, {"use_qk_l2norm": use_qk_l2norm_in_kernel})
    return compute(call, initial_state, output_final_state)


def state_space(
    compute: Compute,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, inf),
    return_final_states: bool = False,
    **unused: Any,
) -> Tensor | Result:
    """`mamba2_chunk_scan`. Rows have the layout of `ops.ssd`."""
    fixed = {"a": A, "d": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": tuple(dt_limit)}
    call = StateCall(SSD, {"x": hidden_states, "dt": dt, "b": B, "c": C}, fixed)
    out, state = compute(call, initial_states, return_final_states)
    return (out, state) if return_final_states else out


def scan(
    compute: Compute,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **unused: Any,
) -> Tensor | Result:
    """`mamba_selective_scan`. hidden_states, dt, z: (batch, channels, seqlen); B, C: (batch, state_size, seqlen)"""
    rows = {"x": hidden_states, "dt": dt, "b": B, "c": C} | ({} if z is None else {"z": z})
    fixed = {"a": A, "d": D, "dt_bias": delta_bias, "dt_softplus": delta_softplus}
    call = StateCall(SELECTIVE_SCAN, {name: x.transpose(1, 2) for name, x in rows.items()}, fixed)
    out, state = compute(call, None, return_last_state)
    out = out.transpose(1, 2)
    return (out, state) if return_last_state else out


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": convolution,
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": state_space,
    "mamba_selective_scan": scan,
}
"""The replacements of functions of modeling modules, by the name of the function. Functions for single tokens are not replaced:
with a `StepCache` they are not called, and `generate` uses transformers' own."""
