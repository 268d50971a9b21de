"""Runs calls of linear attention with the kernels that table.py chooses. Only this module launches kernels of this room.

    out, state = run_matrix_rule(inputs, sequences, initial_state)          # the functional form
    out = run_matrix_rule_paged(inputs, states, batch)                      # a step of the engine

The functional form reads initial states and writes final ones as a step reads and writes pages: the state of sequence b is
page b. Gradients of the convolution and of the delta rule have kernels. For the others, the backward pass computes PyTorch's
form again from the inputs, and differentiates it. Only PyTorch's form reads anything back from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fa_serve import spec
from fa_serve.ops.linear_attention import fallback
from fa_serve.ops.linear_attention.problem import (
    FEW_ROWS,
    MatrixInputs,
    Recurrence,
    ScanInputs,
    Sequences,
    StateAccess,
    StateBatch,
    StateTensors,
    state_dtype,
)
from fa_serve.ops.linear_attention.table import RecurrenceChoice, select_recurrence_kernel
from fa_serve.ops.modes import rows_are_independent

Recurrent = TypeVar("Recurrent", MatrixInputs, ScanInputs)
_ROOM = __name__.rpartition(".")[0]


def run_matrix_rule(inputs: MatrixInputs, sequences: Sequences, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out, final states) of packed rows. States are (num_seqs, heads, dim, dim_v)."""
    few = sequences.cu_seqlens is None and 0 < sequences.seqlen <= FEW_ROWS
    choice = _choice_of_matrix(inputs, few, sequences.seqlen if few else 1, sequences.num_seqs)
    if choice.kernel.name == "torch":
        return fallback.matrix_rule(inputs, sequences, initial_state)

    def compute(*tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        given = _with_tensors(inputs, tensors[1:])
        v = given.v
        shape = (v.shape[1], given.k.shape[2], v.shape[2])
        access = _functional_access(sequences, tensors[0], shape, state_dtype(v.dtype), v, few)
        out = v.new_empty(v.shape) if sequences.cu_seqlens is None else v.new_zeros(v.shape)  # rows past the last sequence
        _launch_matrix(choice, given, access, out)
        return out, access.write

    # The functions that autograd keeps hold no tensors of the call. The only tensors it keeps are the saved ones, which
    # checkpoints and hooks may drop.
    bare = _with_tensors(inputs, (None,) * 8)

    def reference(*tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        return fallback.matrix_rule(_with_tensors(bare, tensors[1:]), sequences, tensors[0])

    def gradients(given: Sequence[Any], needed: Sequence[bool], grads: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        rule = _with_tensors(bare, given[1:])
        pieces = _choice_of_matrix(rule, False, 1)
        shape = (rule.v.shape[1], rule.k.shape[2], rule.v.shape[2])
        access = _functional_access(sequences, given[0], shape, state_dtype(rule.v.dtype), rule.v, False)
        name, function = ("channel_gradients",) * 2 if by_channel else ("pieces_backward", "delta_rule_gradients")
        compute_gradients = getattr(import_module(f"{_ROOM}.{name}"), function)
        found: tuple[Tensor | None, ...] = compute_gradients(rule, access, *grads, pieces.tile)
        return (*found, None, None, None)

    by_channel = inputs.g is not None and inputs.g.dim() == 3
    tensors = (initial_state, *inputs[:7], inputs.steps.bias)
    has_kernels = inputs.g is not None and _fit_gradients(inputs.k.shape[2], inputs.v)
    return _with_gradients(compute, gradients if has_kernels else partial(_gradients_of, reference), tensors)


def _fit_gradients(dim: int, v: Tensor) -> bool:
    """Whether the kernels of gradients fit into the shared memory of the device.

    They take up to 68 KiB for 16-bit keys of 128 numbers, 100 KiB for 16-bit keys of 256, and 160 KiB for float32 keys of 128.
    Float32 keys of 256 numbers fit on no device. Triton's interpreter has no such limit.
    """
    is_float = v.dtype.itemsize > 2
    is_wide = max(dim, v.shape[2]) > 128
    if spec.arch_of(v.device) in (80, 90, 100, 103):
        return not (is_float and is_wide)
    return v.device.type == "cpu" or not (is_float or is_wide)


def run_matrix_rule_paged(inputs: MatrixInputs, states: StateTensors, batch: StateBatch) -> Tensor:
    """The outputs of a step's rows."""
    few = _choice_of_matrix(inputs, True, batch.page_size)
    if few.kernel.name == "torch":
        return fallback.matrix_rule_paged(inputs, states, batch)
    out = inputs.v.new_empty(inputs.v.shape)
    access = StateAccess(states.pages, states.pages, states.tails, batch)
    _launch_matrix(few, inputs, access, out)
    if len(batch.chunks):
        _launch_matrix(_choice_of_matrix(inputs, False, batch.page_size, batch.even_seqs), inputs, access, out)
    return out


def run_causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, sequences: Sequences, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(out, final states) of packed rows. States are inputs, (num_seqs, width - 1, channels), in the dtype of x."""

    def reference(*tensors: Any) -> tuple[Tensor, Tensor]:
        state, rows, weights, biases = tensors
        return fallback.convolve_sequences(rows, weights, biases, activation, sequences, state)

    def compute(*tensors: Any) -> tuple[Tensor, Tensor]:
        state, rows, weights, biases = tensors
        access = _functional_access(sequences, state, (weight.shape[1] - 1, weight.shape[0]), x.dtype, x, False)
        launch = import_module(f"{_ROOM}.convolution").launch_causal_conv
        return launch(rows, weights, biases, activation, access, 0), access.write

    def gradients(given: Sequence[Any], needed: Sequence[bool], grads: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        module = import_module(f"{_ROOM}.convolution_backward")
        bounds = sequences.bounds(given[1].device)
        found: tuple[Tensor | None, ...] = module.causal_conv_gradients(*given, activation, bounds, *grads)
        return found

    tensors = (initial_state, x, weight, bias)
    if _choice_of("conv", x, "pieces").kernel.name == "torch":
        return reference(*tensors)
    return _with_gradients(compute, gradients, tensors)


def run_causal_conv1d_paged(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, states: StateTensors, batch: StateBatch
) -> Tensor:
    """The outputs of a step's rows."""
    if _choice_of("conv", x, "few").kernel.name == "torch":
        return fallback.convolve_paged(x, weight, bias, activation, states, batch)
    access = StateAccess(states.pages, states.pages, states.tails, batch)
    launch = import_module(f"{_ROOM}.convolution").launch_causal_conv
    out: Tensor = launch(x, weight, bias, activation, access)
    return out


def run_scan(inputs: ScanInputs, sequences: Sequences, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out, final states) of packed rows. States are (num_seqs, channels, size), or (num_seqs, channels) for RG-LRU."""
    shape = inputs.x.shape[1:] if inputs.a is None else inputs.a.shape

    def compute(*tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        given = _with_tensors(inputs, tensors[1:])
        access = _functional_access(sequences, tensors[0], shape, state_dtype(given.x.dtype), given.x, True)
        launch = import_module(f"{_ROOM}.scans").launch_scan
        return launch(given, access, True), access.write

    bare = _with_tensors(inputs, (None,) * 8)

    def reference(*tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        return fallback.scan_sequences(_with_tensors(bare, tensors[1:]), sequences, tensors[0])

    tensors = (initial_state, *inputs[:7], inputs.steps.bias)
    if _choice_of_scan(inputs, 16).kernel.name == "torch":
        return reference(*tensors)
    return _with_gradients(compute, partial(_gradients_of, reference), tensors)


def run_scan_paged(inputs: ScanInputs, states: StateTensors, batch: StateBatch) -> Tensor:
    """The outputs of a step's rows."""
    if _choice_of_scan(inputs, batch.page_size).kernel.name == "torch":
        return fallback.scan_paged(inputs, states, batch)
    launch = import_module(f"{_ROOM}.scans").launch_scan
    out: Tensor = launch(inputs, StateAccess(states.pages, states.pages, states.tails, batch), False)
    return out


def runs_triton(device: torch.device) -> bool:
    """Whether Triton's kernels run on a device."""
    return device.type == "cuda"


@lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def _choice_of(kind: Any, x: Tensor, rows: Any, **sizes: Any) -> RecurrenceChoice:
    triton = runs_triton(x.device) and len(x) > 0  # a launch has at least one program
    return select_recurrence_kernel(
        Recurrence(kind=kind, rows=rows, dtype=x.dtype, triton=triton, arch=spec.arch_of(x.device) if triton else 0, **sizes)
    )


def _choice_of_scan(inputs: ScanInputs, page_size: int) -> RecurrenceChoice:
    return _choice_of("lru" if inputs.a is None else "scan", inputs.x, "pieces", page_size=page_size)


def _choice_of_matrix(inputs: MatrixInputs, few: bool, page_size: int, even_seqs: int = 1) -> RecurrenceChoice:
    """even_seqs: as in `StateBatch`. It is ignored in modes in which the bits of a row must not depend on other sequences."""
    return _choice_of(
        "delta" if inputs.a is None else "linear",
        inputs.v,
        "few" if few else "pieces",
        dim=inputs.k.shape[2],
        dim_v=inputs.v.shape[2],
        by_channel=inputs.g is not None and inputs.g.dim() == 3,
        page_size=page_size,
        loops=inputs.v.shape[1] * (1 if rows_are_independent() else even_seqs),
        num_sms=_multiprocessors(inputs.v.device),
    )


def _launch_matrix(choice: RecurrenceChoice, inputs: MatrixInputs, access: StateAccess, out: Tensor) -> None:
    module = import_module(f"{_ROOM}.{choice.kernel.name}")
    launch: Any = module.launch_few_rows if choice.kernel.name == "few_rows" else module.launch_pieces
    launch(inputs, access, out, choice.tile)


def _with_tensors(inputs: Recurrent, tensors: Any) -> Recurrent:
    """The inputs with their tensors replaced: seven fields, and the bias of the time steps."""
    fields = dict(zip(inputs._fields[:7], tensors[:7], strict=True))
    return inputs._replace(**fields, steps=inputs.steps._replace(bias=tensors[7]))


def _functional_access(
    sequences: Sequences, initial_state: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, x: Tensor, few: bool
) -> StateAccess:
    """Initial states as pages to read, and final states as pages to write: page b of sequence b.

    few: each sequence has few rows, which fill a page as long as they are, so that the kernel for few rows writes its state
    """
    listed = import_module(f"{_ROOM}.listing").list_sequences(sequences, len(x), x.device)
    if initial_state is None:
        write = torch.zeros(sequences.num_seqs, *shape, dtype=dtype, device=x.device)
    else:
        write = initial_state.to(dtype).clone(memory_format=torch.contiguous_format)
    read = write if initial_state is None else initial_state.to(dtype).contiguous()
    batch = StateBatch(
        page_size=sequences.seqlen if few else max(len(x), 1),
        sources=listed.none if initial_state is None else listed.own,
        targets=listed.own if few else listed.none,
        slots=listed.own,
        cu_seqlens=listed.bounds,
        seqused_k=listed.lengths,
        chunks=listed.pieces[:0] if few else listed.pieces,
    )
    return StateAccess(read, write, (), batch)


class _KernelWithGradients(torch.autograd.Function):
    """A node of autograd: `compute(*tensors)` returns the outputs, and `gradients(tensors, which of them need a gradient,
    gradients of the outputs)` returns one gradient for each tensor."""

    @staticmethod
    def forward(ctx: Any, compute: Any, gradients: Any, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.gradients = gradients
        ctx.save_for_backward(*tensors)
        out: tuple[Tensor, Tensor] = compute(*tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        found = ctx.gradients(ctx.saved_tensors, needed, grads)
        return (None, None, *[x if need else None for x, need in zip(found, needed, strict=True)])


def _gradients_of(
    reference: Callable[..., tuple[Tensor, Tensor]],
    tensors: Sequence[Tensor | None],
    needed: Sequence[bool],
    grads: Sequence[Tensor],
) -> list[Tensor | None]:
    """The gradients of a call: PyTorch's form is computed again and differentiated."""
    with torch.enable_grad():
        inputs = [x if x is None else x.detach().requires_grad_(need) for x, need in zip(tensors, needed, strict=True)]
        outputs = reference(*inputs)
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    found = iter(torch.autograd.grad(outputs, wanted, grads, allow_unused=True))
    return [next(found) if need else None for need in needed]


def _with_gradients(
    compute: Callable[..., tuple[Tensor, Tensor]], gradients: Callable[..., Sequence[Tensor | None]], tensors: Any
) -> tuple[Tensor, Tensor]:
    """What `compute` returns for the tensors, as a node of autograd if one of them needs a gradient."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        out, state = _KernelWithGradients.apply(compute, gradients, *tensors)  # type: ignore[no-untyped-call]
        return out, state
    return compute(*tensors)
