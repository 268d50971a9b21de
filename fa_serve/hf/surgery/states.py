"""Gives modules with a recurrent or convolution state the forward of `PatchedMixer`, if this is proven to change nothing.

    patch_states(model)               # raises UnsupportedModelError for a module that would compute something else

The proof compares two forms of a float32 copy of a module. The reference computes whole sequences by transformers' code. The
patched form computes the same sequences in steps of the engine: packed, in chunks that store states, one token at a time, with
rejected draft tokens whose rows a later step overwrites, and across the end of a page. Memory that was not written is NaN, so a
row that reads it differs.

If a module is divided between ranks, each rank seats its part without the other ranks: both forms are compared before the parts
of sums are added up.

Left out: which modules have a state, and which of their functions are replaced (adapter/state_modules.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fa_serve import ops
from fa_serve.hf.adapter.hub_kernels import restore_own_forwards
from fa_serve.hf.adapter.state_modules import (
    PatchedMixer,
    find_state_modules,
    patched_mixer,
    reference_forward,
    written_for,
)
from fa_serve.hf.adapter.step_cache import ComputesStates, PagedStates, StateProbe, StepCache
from fa_serve.hf.surgery.divide.weights import DIVIDED_MODULES, sums_paused
from fa_serve.hf.surgery.proof import (
    POSITIONS,
    AttentionRecorder,
    LayerInputs,
    NotReplacedError,
    check_untouched,
    float32_copy,
    observe_inputs,
    replace_forwards,
    results_agree,
)
from fa_serve.spec import UnsupportedModelError

PAGE = 16
"""The number of tokens of a page in the proof."""


class _Part(NamedTuple):
    """The rows of one sequence in a step of the proof: first .. first + length - 1. Rows from `wrong` on are draft tokens that
    are not accepted."""

    first: int
    length: int
    wrong: int


STEPS: tuple[tuple[_Part, _Part], ...] = (
    (_Part(0, 37, 37), _Part(0, 7, 7)),
    (_Part(37, 3, 38), _Part(7, 2, 9)),
    (_Part(38, 1, 39), _Part(9, 10, 19)),
    (_Part(39, 11, 50), _Part(19, 1, 20)),
    (_Part(50, 1, 51), _Part(20, 1, 21)),
)
"""The steps of the proof, each for two sequences. The first sequence begins with a chunk, and both fill a page in a step of few
rows."""
LENGTHS = (51, 21)


@torch.no_grad()
def patch_states(model: PreTrainedModel) -> None:
    """Give all modules with a state the forward of `PatchedMixer`. Modules that already have it keep it. Kernels of the Hub
    that transformers has put into the model are taken out of it, also if it has no module with a state.

    Raises UnsupportedModelError, with the module and the reason, if one of them cannot be patched, and for a model of which
    accelerate has offloaded weights.
    """
    modules = find_state_modules(model)
    numbers = {module: number for number, module in enumerate(modules)}
    restore_own_forwards(model)
    found = [module for module in modules if patched_mixer(module) is None]
    if not found:
        return
    if any(hasattr(part, "_hf_hook") for part in model.modules()) and any(x.is_meta for x in model.parameters()):
        raise UnsupportedModelError(
            f"weights of {type(model).__name__} are offloaded, so its states cannot be compared with those of fa_serve: call "
            "fa_serve.patch before accelerate offloads the weights"
        )
    refused: list[str] = []
    training = [module for module in model.modules() if module.training]
    try:
        inputs = observe_inputs(model.train(False), found, AttentionRecorder())
    except Exception as error:
        raise UnsupportedModelError(f"{type(model).__name__} cannot run on a paged cache: {error}") from error
    finally:
        for each in training:
            each.training = True

    def prove(module: nn.Module) -> Callable[[nn.Module], PatchedMixer]:
        if module not in inputs:
            raise NotReplacedError("it is not called in a forward")
        uncalled = _prove(module, inputs[module])
        return lambda other: PatchedMixer(other, numbers[other], uncalled)

    def refuse(module: nn.Module, reason: str) -> None:
        refused.append(f"{type(module).__name__}: {reason}")

    with sums_paused(model):
        patched = replace_forwards(found, prove, refuse)
    if patched < len(found):
        unpatch_states(model)
        raise UnsupportedModelError(f"{type(model).__name__} keeps states that cannot be paged ({'; '.join(refused)})")


def unpatch_states(model: nn.Module) -> None:
    """Give modules with a state their own forward again."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), PatchedMixer):
            del module.forward


def _prove(module: nn.Module, inputs: LayerInputs) -> frozenset[str]:
    """Compare a float32 copy of a module with its patched form. Raises NotReplacedError if they differ.

    Returns the names of those of its linear layers that its code does not call.
    """
    check_untouched(module, called=DIVIDED_MODULES)
    original = float32_copy(module)
    written = written_for(module)
    if written is not None and written.widen is not None:
        written.widen(original)
    wide = inputs.in_float32()
    hidden = [_mixed(wide.hidden[0], length, seed) for seed, length in enumerate(LENGTHS)]
    places = [torch.arange(length, device=hidden[0].device) for length in LENGTHS]
    expected = [_run(reference_forward(original), wide, x, at, None) for x, at in zip(hidden, places, strict=True)]
    patched = PatchedMixer(original, 0)
    linears = {linear: name for name, linear in original.named_modules() if isinstance(linear, nn.Linear)}
    called: set[nn.Module] = set()
    for linear in linears:
        linear.register_forward_pre_hook(lambda linear, _: called.add(linear))
    actual = [_run(patched, wide, x, at, None) for x, at in zip(hidden, places, strict=True)]
    if not all(results_agree(mine, wanted) for mine, wanted in zip(actual, expected, strict=True)):
        raise NotReplacedError("the results for whole sequences would change")
    probe = StateProbe()
    _run(patched, wide, hidden[0][:1], places[0][:1], probe)
    tensors = {key: _unwritten(spec, hidden[0].device) for key, spec in probe.found.items()}
    for number, step in enumerate(STEPS):
        rows = [_step_rows(x, part) for x, part in zip(hidden, step, strict=True)]
        at = torch.cat([torch.arange(part.first, part.first + part.length, device=hidden[0].device) for part in step])
        out_of_step = _run(patched, wide, torch.cat(rows), at, PagedStates(tensors, _state_batch(step, hidden[0].device)))
        for part, wanted, out in zip(step, expected, torch.split(out_of_step, [len(x) for x in rows]), strict=True):
            if not results_agree(out[: part.wrong - part.first], wanted[part.first : part.wrong]):
                raise NotReplacedError(f"the results of its linear attention would change (step {number + 1} of {len(STEPS)})")
    return frozenset(name for linear, name in linears.items() if linear not in called)


def _mixed(hidden: Tensor, length: int, seed: int) -> Tensor:
    """Random linear combinations of the rows of a module's input, (length, hidden)."""
    weights = torch.randn(length, len(hidden), generator=torch.Generator().manual_seed(seed))
    mixed: Tensor = weights.to(hidden.device) @ hidden * len(hidden) ** -0.5
    return mixed


def _run(
    forward: Callable[..., Any], inputs: LayerInputs, hidden: Tensor, positions: Tensor, states: ComputesStates | None
) -> Tensor:
    """What a module returns for rows (total, hidden) at positions (total,). states: None calls it without a cache"""
    cache = None if states is None else StepCache(positions, states)

    def given(value: Any) -> Any:
        if isinstance(value, StepCache):
            return cache
        if isinstance(value, Tensor) and value.shape == (1, len(POSITIONS)) and value.tolist() == [[*POSITIONS]]:
            return positions[None]
        if isinstance(value, Tensor) and value.dtype == torch.bool and value.dim() == 2 and bool(value.all()):
            return value.new_ones(1, len(hidden))  # a padding mask, for rows without padding
        return value

    args = [given(value) for value in inputs.args]
    out = forward(hidden[None], *args, **{name: given(value) for name, value in inputs.kwargs.items()})
    return cast(Tensor, out[0] if isinstance(out, Tensor) else out[0][0])


def _unwritten(spec: ops.StateSpec, device: torch.device) -> ops.StateTensors:
    """Memory for the states of the proof, filled with NaN."""
    tensors = spec.allocate(8, len(LENGTHS), PAGE, device)
    for tensor in (tensors.pages, *tensors.tails):
        tensor.fill_(torch.nan)
    return tensors


def _step_rows(hidden: Tensor, part: _Part) -> Tensor:
    """The rows of a sequence in a step. Rows of draft tokens that are not accepted differ from those of the sequence."""
    rows = hidden[part.first : part.first + part.length].clone()
    rows[part.wrong - part.first :] = hidden[0] + 1.0
    return rows


def _state_batch(step: Sequence[_Part], device: torch.device) -> ops.StateBatch:
    """Describe the states of the sequences in a step. State page n of a sequence holds the state before token n * PAGE."""
    sources = []
    targets = []
    chunks = []
    start = 0
    for sequence, part in enumerate(step):
        end = part.first + part.length
        base = 4 * sequence - 1
        sources.append(base + part.first // PAGE if part.first >= PAGE else -1)
        few = part.length <= ops.FEW_ROWS
        targets.append(base + end // PAGE if few and end // PAGE > part.first // PAGE else -1)
        for first in range(part.first, end, PAGE) if not few else ():
            rows = min(PAGE, end - first)
            chunks.append((start + first - part.first, rows, sequence, base + first // PAGE + 1 if rows == PAGE else -1))
        start += part.length

    def ints(values: Sequence[Any], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    counts = [0, *(part.length for part in step)]
    return ops.StateBatch(
        page_size=PAGE,
        sources=ints(sources),
        targets=ints(targets),
        slots=ints(range(len(step)), torch.int64),
        cu_seqlens=ints(counts).cumsum(0, dtype=torch.int32),
        seqused_k=ints([part.first + part.length for part in step]),
        chunks=ints(chunks).view(-1, 4),
    )
