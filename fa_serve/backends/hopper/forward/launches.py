"""How a plan of the Hopper forward runs: the launches of one call, on copies of tensors that the copy engine cannot address.

This module leaves out how the launches are planned (`plan`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fa_serve.backends.calls import AttentionTensors
from fa_serve.backends.hopper.descriptors import addressable
from fa_serve.backends.hopper.forward.tile_scheduler import take_counter, tile_table
from fa_serve.backends.hopper.split_kv.combine import Combine
from fa_serve.backends.triton.float8_inputs import InputQuantizer
from fa_serve.backends.unseen_rows import without_keys
from fa_serve.launching.launch import Launch
from fa_serve.launching.plans import Run

_NO_LISTS = (None,) * 5
_NO_SCALES = [None] * 3


class Launches(NamedTuple):
    """attention: the kernel; None if there can be no tile
    table:    makes the table of tiles, with room for `max_tiles` tiles; None if the batch is dense
    counted:  whether the schedule needs a counter that the table does not hold
    combine:  combines the splits of keys; None if no keys are split
    mask_words: whether the kernel takes the mask in words of two numbers
    """

    attention: Launch | None = None
    table: Launch | None = None
    max_tiles: int = 0
    counted: bool = False
    combine: Combine | None = None
    mask_words: bool = False


def run_launches(
    launches: Launches,
    quantizer: InputQuantizer | None,
    out_shape: tuple[int, ...],
    lse_shape: tuple[int, ...] | None,
    copied: tuple[bool | None, ...],
) -> Run:
    """The plan of a call whose strides the copy engine can address.

    lse_shape: None if lse is not wanted
    copied:    as in `run_on_copies`
    """
    attention = launches.attention
    table_of = launches.table
    combine = launches.combine
    max_tiles = launches.max_tiles
    counted = launches.counted
    any_address = copied[1] is None
    unmarked = tuple([None if copy is None else False for copy in copied])

    def run(tensors: AttentionTensors) -> tuple[Tensor, Tensor | None]:
        q = tensors.q
        k = tensors.k
        v = tensors.v
        out = tensors.out
        lse = tensors.lse
        blocks = tensors.blocks
        addresses = q.data_ptr() if any_address else q.data_ptr() | k.data_ptr() | v.data_ptr()
        if addresses & 15 or (out is not None and out.data_ptr() & 15):
            return run_on_copies(run, tensors, unmarked)
        if out is None:
            out = q.new_empty(out_shape)
        if lse is None and lse_shape is not None:
            lse = q.new_empty(lse_shape, dtype=torch.float32)
        if attention is not None:
            table = counter = None
            if table_of is not None:
                table = tile_table(table_of, max_tiles, tensors.cu_seqlens_q, tensors.keys, out, lse)
            elif counted:
                counter = take_counter(q)
            lists: Sequence[Tensor | None] = _NO_LISTS
            added = None
            if blocks is not None:
                lists = [x if x is None else x.contiguous() for x in blocks.tensors]
                # the bits of a bool mask are all that the kernel needs of it
                added = tensors.mask if blocks.partial_bits is None else None
            if added is not None and launches.mask_words:
                added = added.view(torch.int32)
            scales = _NO_SCALES
            if quantizer is not None:
                q, k, v, *scales = quantizer(tensors)
            splits = None if combine is None else combine.buffer(q)
            pages = (table, counter, tensors.block_table)
            attention((q, q, k, k, v, v, out, out, lse, tensors.sinks, *pages, *lists, *scales, splits, added))
            if combine is not None:
                combine(out, lse, splits, table)
        return out, lse

    return run


def run_on_copies(run: Run, tensors: AttentionTensors, copied: tuple[bool | None, ...]) -> tuple[Tensor, Tensor | None]:
    """Run on copies of those of q, k, v and out that are marked or have an unaligned address, and copy the output back.

    copied: for each of the four, whether it is marked; None for caches that only the quantizer reads, which takes any strides
            and addresses
    """
    given = (tensors.q, tensors.k, tensors.v, tensors.out)
    q, k, v, out = (x if x is None or copy is None else addressable(x, copy) for x, copy in zip(given, copied, strict=True))
    result, lse = run(tensors._replace(q=q, k=k, v=v, out=out))
    return (result if out is tensors.out else tensors.out.copy_(result)), lse


def run_without_keys(out_shape: tuple[int, ...], lse_shape: tuple[int, ...] | None) -> Run:
    """The plan of a call without queries or without keys, see `unseen_rows`."""

    def run(tensors: AttentionTensors) -> tuple[Tensor, Tensor | None]:
        q = tensors.q
        out = q.new_empty(out_shape) if tensors.out is None else tensors.out
        lse = tensors.lse
        if lse is None and lse_shape is not None:
            lse = q.new_empty(lse_shape, dtype=torch.float32)
        without_keys(out, lse, tensors.sinks, tensors.cu_seqlens_q)
        return out, lse

    return run
