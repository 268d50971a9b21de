"""Checks of the values in index tensors: on a CPU at every call, on a GPU only under FA_SERVE_CHECK=1.

    run = with_value_checks(plan, q, check)      # `check(tensors)` runs before each call of the plan, or never

If a kernel gets a page that does not exist, or lengths that end beyond their tensor, it reads other memory, and its result is
wrong without an error. To read such values on a GPU, the host has to wait for the device, so they are not read there unless the
environment asks for it. On a CPU reading them costs microseconds. Whether a plan checks values is decided when the plan is
made, so that a call on a GPU pays nothing. A call that is traced, captured in a CUDA graph, or whose tensors have no values, is
not checked.

Every function raises ParameterError with the name of the argument, the rule and the value. Left out: shapes, dtypes and devices
(`argument_checks`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fa_serve.backends.calls import AttentionTensors, StoreTensors
from fa_serve.block_lists import BlockLists
from fa_serve.launching.plans import Run
from fa_serve.spec import ParameterError

VARIABLE = "FA_SERVE_CHECK"


def with_value_checks(run: Run, q: Tensor, check: Callable[[Any], None]) -> Run:
    """The plan, with a check before each call if the device of q is one whose values are checked."""
    if q.device.type != "cpu" and os.environ.get(VARIABLE) != "1":
        return run

    def run_checked(tensors: Any) -> Any:
        if _has_values(tensors):
            check(tensors)
        return run(tensors)

    return run_checked


def check_varlen_values(tensors: AttentionTensors, max_seqlen_q: int, max_seqlen_k: int) -> None:
    """Check the values of a call of `fa_serve.attention_varlen`."""
    assert tensors.cu_seqlens_q is not None
    assert tensors.keys is not None
    _check_starts("cu_seqlens_q", tensors.cu_seqlens_q, "q", tensors.q, "max_seqlen_q", max_seqlen_q)
    _check_starts("cu_seqlens_k", tensors.keys, "k", tensors.k, "max_seqlen_k", max_seqlen_k)
    check_block_values(tensors.blocks)


def check_paged_values(tensors: AttentionTensors, max_seqlen_q: int, max_seqlen_k: int | None, left: int, chunk: int) -> None:
    """Check the values of a call of `fa_serve.attention_paged`.

    left, chunk: the window to the left and attention_chunk; entries of the block table before them are not read
    """
    assert tensors.cu_seqlens_q is not None
    assert tensors.keys is not None
    assert tensors.block_table is not None
    lengths = _check_starts("cu_seqlens_q", tensors.cu_seqlens_q, "q", tensors.q, "max_seqlen_q", max_seqlen_q)
    used = _values(tensors.keys)
    if (used < 0).any():
        raise ParameterError("seqused_k", "have no negative length", int(used.min()))
    num_pages, page_size = tensors.k.shape[:2]
    max_pages = tensors.block_table.shape[1]
    longest = max_pages * page_size if max_seqlen_k is None else max_seqlen_k
    if (used > longest).any():
        if max_seqlen_k is None:
            raise ParameterError("seqused_k", f"have lengths of at most max_pages * page_size = {longest}", int(used.max()))
        raise ParameterError("max_seqlen_k", f"be at least the longest length in seqused_k, {int(used.max())}", max_seqlen_k)
    if tensors.blocks is not None:
        check_block_values(tensors.blocks)
        return
    first_query = (used - lengths).clamp(min=0)
    first_key = (first_query - left).clamp(min=0) if left >= 0 else first_query // chunk * chunk if chunk else 0 * used
    page = torch.arange(max_pages)
    is_read = (page < -(-used // page_size)[:, None]) & (page >= (first_key // page_size)[:, None])
    table = _values(tensors.block_table)
    is_bad = is_read & ((table < 0) | (table >= num_pages))
    if is_bad.any():
        row, column = (int(x) for x in is_bad.nonzero()[0])
        rule = f"have pages from 0 to {num_pages - 1} for all keys up to seqused_k; row {row}, column {column} does not"
        raise ParameterError("block_table", rule, int(table[row, column]))


def check_store_values(tensors: StoreTensors) -> None:
    """Check the values of a call of `fa_serve.store_kv`."""
    slots = _values(tensors.slot_mapping)
    count = tensors.k_cache.shape[0] * tensors.k_cache.shape[1]
    is_bad = (slots < -1) | (slots >= count)
    if is_bad.any():
        rule = f"have slots from 0 to num_pages * page_size - 1 = {count - 1}, or -1 to skip a token"
        raise ParameterError("slot_mapping", rule, int(slots[is_bad][0]))


def check_block_values(blocks: BlockLists | None) -> None:
    """Check the values of the lists of a block-sparse call. A block past the last key is allowed, and has no keys."""
    if blocks is None:
        return
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    for (num_name, num), (name, indices) in (
        ((names[0], blocks.kv_num_blocks), (names[1], blocks.kv_indices)),
        ((names[2], blocks.full_kv_num_blocks), (names[3], blocks.full_kv_indices)),
    ):
        if num is None or indices is None:
            continue
        counts = _values(num)
        width = indices.shape[-1]
        if counts.numel() and not 0 <= int(counts.min()) <= int(counts.max()) <= width:
            worst = int(counts.min() if counts.min() < 0 else counts.max())
            raise ParameterError("block_mask", f"have {num_name} from 0 to {width}, the width of {name}", worst)
        listed = _values(indices)[torch.arange(width) < counts[..., None]]
        if listed.numel() and listed.min() < 0:
            raise ParameterError("block_mask", f"have no negative block in {name}", int(listed.min()))


def _check_starts(name: str, starts: Tensor, rows_name: str, rows: Tensor, max_name: str, longest: int) -> Tensor:
    """Check where packed sequences begin -> their lengths."""
    values = _values(starts)
    lengths = values.diff()
    if values[0] != 0:
        raise ParameterError(name, "begin with 0", int(values[0]))
    if (lengths < 0).any():
        at = int((lengths < 0).nonzero()[0]) + 1
        raise ParameterError(name, f"not decrease, as it does at index {at}", values[at - 1 : at + 1].tolist())
    if values[-1] > rows.shape[0]:
        raise ParameterError(name, f"end with at most {rows_name}'s number of rows, {rows.shape[0]}", int(values[-1]))
    if lengths.numel() and lengths.max() > longest:
        raise ParameterError(max_name, f"be at least the longest length in {name}, {int(lengths.max())}", longest)
    return lengths


def _has_values(tensors: AttentionTensors | StoreTensors) -> bool:
    """Whether the host may read the tensors of this call now."""
    if torch._C._is_tracing() or (tensors.k.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    index = tensors.slot_mapping if isinstance(tensors, StoreTensors) else tensors.cu_seqlens_q
    return index is None or type(index) is Tensor  # a FakeTensor has no values


def _values(x: Tensor) -> Tensor:
    return x.detach().to("cpu", torch.int64)
