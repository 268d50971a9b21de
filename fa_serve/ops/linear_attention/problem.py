"""What layers with linear attention keep of a sequence, and how a step of the engine refers to it.

    spec = gated_delta_rule_state(k, v, g)                    # reads only shapes and dtypes
    states = spec.allocate(num_states, max_num_seqs, page_size, device)
    batch = StateBatch(page_size, sources, targets, slots, cu_seqlens, seqused_k, chunks)
    out = ops.gated_delta_rule_paged(q, k, v, g, beta, states, batch)

A layer keeps states at multiples of the page size, which never change, and the tokens since the last of them:

- A *state page* holds the state of one sequence before position P, a multiple of `page_size`. It is written once, in full, and
  never changed. Sequences can therefore share it, and if a step fails, the state that it began with still exists.
- A *tail* holds what the tokens since P contribute, one row per token. Each slot has a ring of `tail_rows(page_size)` rows, and
  the token at position p has row p modulo that number. A step reads the page and the tail, and writes the rows of its tokens.
  The next step overwrites the rows of rejected draft tokens, so nothing has to be undone.

The tail holds the inputs of the recurrence, so that a step can compute it again from the state page. The delta rule keeps u
instead of v: u is what a token adds to the state along its key, and it depends on the state before the token. Log gates are
kept per token and not as sums since P, so that a row stays valid when its page is full and P moves.

This module imports no Triton. Left out: who owns which page (the engine), and how a step is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

FEW_ROWS = 16
"""The most rows of a sequence that count as few. A sequence with more rows in a step is a chunk of a prompt, and begins at a
multiple of the page size."""

PIECE_ROWS = 64
"""The most rows that are computed together. Chunks are cut at multiples of this, from position 0 of their sequence on."""


class TailRow(NamedTuple):
    """One tensor of a tail: the shape of a token's row, and its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class StateTensors(NamedTuple):
    """The states of one layer, or of one call of a layer that makes several calls. Their `StateSpec` is `spec`.

    pages: (num_states, *spec.page)
    tails: one tensor for each `row` of spec.tail: (max_num_seqs, tail_rows(page_size), *row.shape)
    """

    pages: Tensor
    tails: tuple[Tensor, ...]


class TimeSteps(NamedTuple):
    """How state space models compute their time steps from dt: clamp(softplus(dt + bias), *limit).

    bias:     one number for each head or channel
    softplus: if False, dt + bias is clamped without softplus
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
    tail:       the tensors that the tail keeps of each token
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
        """Bytes of a token's rows in the tail."""
        return sum(prod(row.shape) * row.dtype.itemsize for row in self.tail)

    def allocate(self, num_states: int, max_num_seqs: int, page_size: int, device: torch.device | str) -> StateTensors:
        """Tensors for this many state pages and slots, uninitialised: pages and rows are read only after they were written."""
        ring = tail_rows(page_size)
        tails = [torch.empty(max_num_seqs, ring, *row.shape, dtype=row.dtype, device=device) for row in self.tail]
        return StateTensors(torch.empty(num_states, *self.page, dtype=self.page_dtype, device=device), tuple(tails))


class StateBatch(NamedTuple):
    """Which states and tails the sequences of a step read and write. All tensors are on the device.

    A sequence has n = cu_seqlens[b + 1] - cu_seqlens[b] rows in the step, at positions seqused_k[b] - n to seqused_k[b] - 1.
    It starts from the state before P, the last multiple of `page_size` up to its first position.

    page_size:  tokens of a page of the KV cache
    sources:    (batch,) int32: the page with the state before P; -1 is a state of zeros, as before position 0
    targets:    (batch,) int32, for sequences with at most FEW_ROWS rows: the page that gets the state before the last multiple
                of `page_size` up to seqused_k, if that is after P; -1 writes none
    slots:      (batch,) int64: the slot whose tail belongs to the sequence
    cu_seqlens: (batch + 1,) int32: the first row of each sequence
    seqused_k:  (batch,) int32: tokens of each sequence, including those of the step. 0 marks a sequence that pads a CUDA graph:
                its states and its tail are neither read nor written
    chunks:     (num_chunks, 4) int32: the pieces of sequences with more rows, as (first row, rows, sequence, state page or -1),
                in the order of the rows. Sequences are cut at multiples of PIECE_ROWS of their positions, so a piece has at
                most PIECE_ROWS rows. A piece with a page ends at a multiple of `page_size`, and the page gets the state after
                it. Pieces of 0 rows are padding at the end
    most_rows:  1 if the host knows that no sequence has more than one row (padding aside), else FEW_ROWS
    even_seqs:  how many sequences the step would have if all were as long as its longest: the rows of the step divided by the
                rows of its longest sequence, if the host knows them; else 1
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
    rows:       "few" for sequences with at most FEW_ROWS rows, of a step or dense ones of the functional form; else "pieces"
    dtype:      dtype of the rows
    dim, dim_v: numbers of a key and of a value; 0 if the states are not matrices
    by_channel: whether gates differ by channel
    page_size:  tokens of a page of the engine's cache. The functional form has no pages: it gives the length of dense sequences
                with few rows, 16 for scans, and 1 otherwise
    loops:      how many loops over pieces, of about equal length, can run at the same time: `even_seqs` times heads
    num_sms:    multiprocessors of the device
    triton:     whether Triton's kernels run on the device
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
    """The sequences of a call of the functional form. Dense or packed, their rows are (total, ...).

    batch, seqlen: number and length of dense sequences; 1 and total if the sequences are packed
    cu_seqlens:    (num_seqs + 1,) int32 for packed sequences, else None
    """

    batch: int
    seqlen: int
    cu_seqlens: Tensor | None = None

    @property
    def num_seqs(self) -> int:
        """The number of sequences."""
        return self.batch if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    def bounds(self, device: torch.device) -> Tensor:
        """The first row of each sequence, and the row past the last one: int32."""
        if self.cu_seqlens is not None:
            return self.cu_seqlens
        return torch.arange(self.batch + 1, dtype=torch.int32, device=device) * self.seqlen


class MatrixInputs(NamedTuple):
    """The inputs of a recurrence whose state is a matrix, packed: the delta rule, SSD and lightning attention.

    q, k:   (total, key heads, dim)
    v:      (total, heads, dim_v)
    g:      (total, heads) or (total, heads, dim): log gates of the delta rule, else None
    weight: (total, heads): beta of the delta rule, dt of SSD, None for lightning attention
    a:      (heads,): a * dt is the log gate of SSD; without a weight, a is the log gate itself; None for the delta rule
    d:      (heads,) or None: d * v is added to the output
    steps:  how SSD computes its time steps from the weight
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
    a:     (channels, size); None for RG-LRU, which has no b, c, d or z either
    b, c:  (total, size)
    d:     (channels,) or None: d * x is added to the output
    z:     (total, channels) or None: the output is multiplied by silu(z)
    steps: how time steps are computed from dt
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
    """Where a kernel reads states and writes them.

    read, write: pages, indexed by the page numbers in `batch`. In the engine both are the same tensor, in the functional form
                 they are the initial and the final states
    tails:       as in StateTensors; empty in the functional form, whose sequences all begin at position 0
    """

    read: Tensor
    write: Tensor
    tails: tuple[Tensor, ...]
    batch: StateBatch


def tail_rows(page_size: int) -> int:
    """Rows of a ring: enough for the tokens of a page and for those that a step with few rows adds to them."""
    return page_size + max(page_size, FEW_ROWS)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states, for inputs of `dtype`: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def gated_delta_rule_state(k: Tensor, v: Tensor, g: Tensor) -> StateSpec:
    """What `ops.gated_delta_rule_paged` keeps. Takes arguments of that function, and reads only their shapes and dtypes."""
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
    """What `ops.lightning_attention_paged` keeps. Takes arguments of that function."""
    (key_heads, dim) = k.shape[-2:]
    (heads, dim_v) = v.shape[-2:]
    tail = (TailRow("k", (key_heads, dim), k.dtype), TailRow("v", (heads, dim_v), v.dtype))
    return StateSpec("linear", (heads, dim, dim_v), state_dtype(v.dtype), tail)


def ssd_state(x: Tensor, b: Tensor) -> StateSpec:
    """What `ops.ssd_paged` keeps. Takes arguments of that function. A state page is (heads, state_size, head_dim)."""
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
    """What `ops.selective_scan_paged` keeps. Takes arguments of that function."""
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
    """What `ops.rg_lru_paged` keeps. Takes an argument of that function."""
    wide = state_dtype(x.dtype)
    channels = x.shape[-1]
    return StateSpec("lru", (channels,), wide, (TailRow("x", (channels,), x.dtype), TailRow("log_a", (channels,), wide)))


def causal_conv1d_state(x: Tensor, weight: Tensor) -> StateSpec:
    """What `ops.causal_conv1d_paged` keeps: the inputs before P that the kernel reaches, and those since P."""
    channels, width = weight.shape
    return StateSpec("conv", (width - 1, channels), x.dtype, (TailRow("x", (channels,), x.dtype),))
