"""What layers with linear attention keep of a sequence, and what a step of the engine says about it.

    spec = gated_delta_rule_state(k, v, g)                    # sizes alone are read
    states = spec.allocate(num_states, max_num_seqs, page_size, device)
    batch = StateBatch(page_size, sources, targets, slots, cu_seqlens, seqused_k, chunks)
    out = ops.gated_delta_rule_paged(q, k, v, g, beta, states, batch)

A layer keeps pages that are frozen when they are full, and the tokens of the page that is not full:

- A *state page* holds the state of one sequence before position P, a multiple of `page_size`. It is written once and in full,
  and never changed, so sequences share it, and the state that a step began with still exists when the step has failed.
- A *tail* holds what the tokens since P contribute, one row a token. Each slot has a ring of `tail_rows(page_size)` rows, and
  the token at position p has row p modulo that number. A step reads the page and the tail, and writes the rows of its tokens.
  A rejected draft is overwritten by the next step, and nothing is undone.

The tail has the inputs of a recurrence, from which it is computed again. The delta rule keeps u in the place of v, what it adds
to the state along a key, because that depends on the state before the token. Log gates are those of single tokens, not sums
since P, so that a row stays right when its page is full and P moves.

This module imports no Triton. Left out: who owns which page (the engine), and how a step is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

FEW_ROWS = 16
"""A sequence with more rows in a step is a chunk of a prompt. A chunk begins at a multiple of the page size."""

PIECE_ROWS = 64
"""Rows that are computed together at most: the grid on which a chunk is cut begins at position 0 of its sequence."""


class TailRow(NamedTuple):
    """One tensor of a tail: the shape of a token's row, and its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class StateTensors(NamedTuple):
    """The states of one layer, or of one call of a layer that makes several, whose `StateSpec` is `spec`.

    pages: (num_states, *spec.page)
    tails: for each row of spec.tail (max_num_seqs, tail_rows(page_size), *row.shape)
    """

    pages: Tensor
    tails: tuple[Tensor, ...]


class TimeSteps(NamedTuple):
    """How the time steps of state space models come from dt: clamp(softplus(dt + bias), *limit).

    bias:     one for each head or channel
    softplus: without it dt + bias is taken as it is
    """

    bias: Tensor | None = None
    softplus: bool = False
    limit: tuple[float, float] = (0.0, inf)


@dataclass(frozen=True)
class StateSpec:
    """What one call of a layer keeps of each sequence.

    kind:       "delta", "linear" (SSD and lightning attention), "scan", "lru" or "conv"
    page:       shape of a state
    page_dtype: float32 (float64 for float64 inputs); for "conv" the dtype of the input
    tail:       what is kept of a token
    """

    kind: str
    page: tuple[int, ...]
    page_dtype: torch.dtype
    tail: tuple[TailRow, ...]

    @property
    def bytes_per_state(self) -> int:
        """Bytes of a state page."""
        return prod(self.page) * self.page_dtype.itemsize

    @property
    def bytes_per_row(self) -> int:
        """Bytes of a token in the tail."""
        return sum(prod(row.shape) * row.dtype.itemsize for row in self.tail)

    def allocate(self, num_states: int, max_num_seqs: int, page_size: int, device: torch.device | str) -> StateTensors:
        """Tensors for so many state pages and slots. Pages and rows are read only where they were written before."""
        ring = tail_rows(page_size)
        tails = [torch.empty(max_num_seqs, ring, *row.shape, dtype=row.dtype, device=device) for row in self.tail]
        return StateTensors(torch.empty(num_states, *self.page, dtype=self.page_dtype, device=device), tuple(tails))


class StateBatch(NamedTuple):
    """What a step says about the states of its sequences, all on the device.

    A sequence has n = cu_seqlens[b + 1] - cu_seqlens[b] rows in the step, at positions seqused_k[b] - n to seqused_k[b] - 1.
    Its state is that before P, the last multiple of `page_size` up to its first position.

    page_size:  tokens of a page of the KV cache
    sources:    (batch,) int32: the state page before P; -1 is a state of zeros, as before position 0
    targets:    (batch,) int32, for sequences with at most FEW_ROWS rows: the page that gets the state before the last multiple
                of `page_size` up to seqused_k, if that is after P; -1 writes none
    slots:      (batch,) int64: whose tail
    cu_seqlens: (batch + 1,) int32: the first row of each sequence
    seqused_k:  (batch,) int32: tokens of each sequence with those of the step; 0 pads a CUDA graph: nothing is read or written
    chunks:     (num_chunks, 4) int32, for sequences with more rows: (first row, rows, sequence, state page or -1), in the order
                of the rows. A piece has at most PIECE_ROWS rows, and is cut at each multiple of PIECE_ROWS of its sequence's
                positions. The page gets the state after the piece, which ends at a multiple of `page_size` then. Pieces of
                0 rows pad, at the end
    most_rows:  the most rows that a sequence with a length has in the step, if the host knows that it is 1; else FEW_ROWS
    even_seqs:  how many sequences the step would have if all had as many rows as its longest: its rows divided by those, as far
                as the host knows; else 1
    """

    page_size: int
    sources: Tensor
    targets: Tensor
    slots: Tensor
    cu_seqlens: Tensor
    seqused_k: Tensor
    chunks: Tensor
    most_rows: int = FEW_ROWS
    even_seqs: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """What decides which kernel computes a call.

    kind:       as in `StateSpec`
    rows:       "few" for the sequences of a step with at most FEW_ROWS rows, "pieces" for the others and the functional form
    dtype:      of the rows
    dim, dim_v: of keys and values; 0 for states that are no matrices
    by_channel: gates differ by channel
    page_size:  of the engine's cache; 1 without one
    loops:      over pieces, of about the same length, that run beside each other: even sequences times heads
    num_sms:    multiprocessors of the device
    triton:     Triton's kernels run on the device
    arch:       10 * major + minor of an NVIDIA device, else 0
    """

    kind: Literal["delta", "linear", "scan", "lru", "conv"]
    rows: Literal["few", "pieces"]
    dtype: torch.dtype
    dim: int = 0
    dim_v: int = 0
    by_channel: bool = False
    page_size: int = 1
    loops: int = 0
    num_sms: int = 132
    triton: bool = True
    arch: int = 0


class Sequences(NamedTuple):
    """The sequences of a call of the functional form, whose rows are (total, ...) in both cases.

    batch, seqlen: of dense sequences; 1 and total of packed ones
    cu_seqlens:    (num_seqs + 1,) int32 of packed sequences, else None
    """

    batch: int
    seqlen: int
    cu_seqlens: Tensor | None = None

    @property
    def num_seqs(self) -> int:
        """The number of sequences."""
        return self.batch if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    def bounds(self, device: torch.device) -> Tensor:
        """The first row of each sequence, and the row behind the last one: int32."""
        if self.cu_seqlens is not None:
            return self.cu_seqlens
        return torch.arange(self.batch + 1, dtype=torch.int32, device=device) * self.seqlen


class MatrixInputs(NamedTuple):
    """The inputs of a recurrence whose state is a matrix, packed: the delta rule, SSD and lightning attention.

    q, k:   (total, key heads, dim)
    v:      (total, heads, dim_v)
    g:      (total, heads) or (total, heads, dim): log gates of the delta rule, else None
    weight: (total, heads): beta of the delta rule, dt of SSD, None for lightning attention
    a:      (heads,): by which SSD multiplies dt for a log gate, or the log gate itself without a weight; None: the delta rule
    d:      (heads,) or None: d * v is added to the output
    steps:  how time steps come from the weight, of SSD
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    weight: Tensor | None
    a: Tensor | None
    d: Tensor | None
    steps: TimeSteps
    softmax_scale: float
    use_qk_l2norm: bool


class ScanInputs(NamedTuple):
    """The inputs of a recurrence whose states are vectors, packed: the selective scan and RG-LRU.

    x:     (total, channels)
    dt:    (total, channels); for RG-LRU the log gates
    a:     (channels, size); None: RG-LRU, which has no b, c, d and z
    b, c:  (total, size)
    d:     (channels,) or None: d * x is added to the output
    z:     (total, channels) or None: the output is multiplied by silu(z)
    steps: how time steps come from dt
    """

    x: Tensor
    dt: Tensor
    a: Tensor | None
    b: Tensor | None
    c: Tensor | None
    d: Tensor | None
    z: Tensor | None
    steps: TimeSteps


class StateAccess(NamedTuple):
    """Where a kernel finds states and puts them.

    read, write: pages by the numbers of `batch`: one tensor in the engine, initial and final states of the functional form
    tails:       as in StateTensors; none in the functional form, whose sequences all begin at position 0
    """

    read: Tensor
    write: Tensor
    tails: tuple[Tensor, ...]
    batch: StateBatch


def tail_rows(page_size: int) -> int:
    """Rows of a ring: the tokens of a page, and those that a step of few rows adds to them."""
    return page_size + max(page_size, FEW_ROWS)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """What states are kept in, for inputs of a dtype."""
    return torch.promote_types(dtype, torch.float32)


def gated_delta_rule_state(k: Tensor, v: Tensor, g: Tensor) -> StateSpec:
    """What `ops.gated_delta_rule_paged` keeps. The arguments are its own; their shapes and dtypes are read."""
    wide = state_dtype(v.dtype)
    (key_heads, dim) = k.shape[-2:]
    (heads, dim_v) = v.shape[-2:]
    gate = (heads, dim) if g.dim() == v.dim() else (heads,)
    tail = (
        TailRow("k", (key_heads, dim), k.dtype),
        TailRow("u", (heads, dim_v), wide),
        TailRow("g", gate, wide),
    )
    return StateSpec("delta", (heads, dim, dim_v), wide, tail)


def lightning_attention_state(k: Tensor, v: Tensor) -> StateSpec:
    """What `ops.lightning_attention_paged` keeps. The arguments are its own."""
    (key_heads, dim) = k.shape[-2:]
    (heads, dim_v) = v.shape[-2:]
    tail = (TailRow("k", (key_heads, dim), k.dtype), TailRow("v", (heads, dim_v), v.dtype))
    return StateSpec("linear", (heads, dim, dim_v), state_dtype(v.dtype), tail)


def ssd_state(x: Tensor, b: Tensor) -> StateSpec:
    """What `ops.ssd_paged` keeps. The arguments are its own. A state page is (heads, state_size, head_dim)."""
    wide = state_dtype(x.dtype)
    (groups, dim) = b.shape[-2:]
    (heads, dim_v) = x.shape[-2:]
    tail = (
        TailRow("b", (groups, dim), b.dtype),
        TailRow("x", (heads, dim_v), x.dtype),
        TailRow("dt", (heads,), wide),
    )
    return StateSpec("linear", (heads, dim, dim_v), wide, tail)


def selective_scan_state(x: Tensor, b: Tensor) -> StateSpec:
    """What `ops.selective_scan_paged` keeps. The arguments are its own."""
    wide = state_dtype(x.dtype)
    channels = x.shape[-1]
    size = b.shape[-1]
    tail = (
        TailRow("x", (channels,), x.dtype),
        TailRow("dt", (channels,), wide),
        TailRow("b", (size,), b.dtype),
    )
    return StateSpec("scan", (channels, size), wide, tail)


def rg_lru_state(x: Tensor) -> StateSpec:
    """What `ops.rg_lru_paged` keeps. The argument is its own."""
    wide = state_dtype(x.dtype)
    channels = x.shape[-1]
    return StateSpec("lru", (channels,), wide, (TailRow("x", (channels,), x.dtype), TailRow("log_a", (channels,), wide)))


def causal_conv1d_state(x: Tensor, weight: Tensor) -> StateSpec:
    """What `ops.causal_conv1d_paged` keeps: the inputs before P that the kernel reaches, and those since P."""
    channels, width = weight.shape
    return StateSpec("conv", (width - 1, channels), x.dtype, (TailRow("x", (channels,), x.dtype),))
