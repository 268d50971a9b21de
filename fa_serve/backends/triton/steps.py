"""One token of each sequence behind a dense cache that grows: what a call costs the host, less what layers and steps share.

Between two layers of a model addresses alone change, and between two steps the number of keys and the strides that follow from
it. A step keeps all else, so that a layer is an allocation or two and two calls of the driver. With `generate` and a growing
cache the GPU waits for the host: what a layer takes there is what a token takes. Left out: kernels (decode.py, pieces.py), and
who may call (the backend's `step`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fa_serve.backends.launch import is_watched
from fa_serve.backends.triton.decode import _decode, launch_dense
from fa_serve.backends.triton.pieces import _combine

# where a launch has an argument among its numbers, which follow the pointers, 14 and 6
_MAX_K, _MASK, _STRIDES, _FIXED = (_decode.arg_names.index(n) - 14 for n in ("max_k", "stride_mb", "stride_kp", "GROUPS"))
_MERGED_MAX_K = _combine.arg_names.index("max_k") - 6


Step = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor | None]


def make_step(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Step | None:
    """`launch_dense` for calls with one query per sequence that are like this one, whose kernels run; None where launches have
    no short way, and for more queries than one.

    Alike: the same q (batch, 1, heads, dim) in shape, strides, dtype and device; of k (batch, keys, kv_heads, dim), v and the
    mask (1 or batch, 1, 1, keys) the same but for the strides and the number of keys, whose tiles are those of this call; the
    same options, no sinks. What is made takes all of them heads first, as models hold them: views cost time, too.
    -> out (batch, 1, heads, head_dim_v), or None, and nothing done, if a call has to go the long way.
    """
    if q.shape[1] != 1:
        return None
    memo: dict[str, Any] = {}
    for _ in range(2):  # the first launch of its kind compiles
        launch_dense(q, k, v, mask=mask, sinks=None, out=None, return_lse=False, memo=memo, **options)
    decode = memo["decode"].decode
    combine = memo["decode"].combine
    alike = k.stride() == v.stride()
    ready = decode is not None and decode._sender is not None and (combine is None or combine._sender is not None)
    strides = [*k.stride()[:3], *v.stride()[:3], 4 * v.shape[3]]
    if not ready or any(stride & 15 for stride in strides) or not q.stride(3) == k.stride(3) == v.stride(3) == 1:
        return None
    (native, fixed, _, stream_of, device), grid, numbers = decode._sender, decode._grid, decode._numbers
    first = numbers[:_MAX_K]
    window = numbers[_MAX_K + 1 : _MASK]
    scales = numbers[_MASK + 1 : _STRIDES]
    constants = numbers[_FIXED:]
    shape = (q.shape[0], 1, q.shape[2], v.shape[3])
    places = 0
    if combine is not None:
        places, (merge, merge_fixed, *_), merge_grid = memo["decode"].parts[1][0], combine._sender, combine._grid
        merge_first = combine._numbers[:_MERGED_MAX_K]
        merge_rest = combine._numbers[_MERGED_MAX_K + 1 :]

    def step(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor | None:
        query = q.data_ptr()
        key = k.data_ptr()
        value = v.data_ptr()
        hidden = 0 if mask is None else mask.data_ptr()
        (page_k, head_k, token_k, _), (page_v, head_v, token_v, _) = k_strides, v_strides = k.stride(), v.stride()
        odd = (query | key | value | hidden | page_k | token_k | head_k | page_v | token_v | head_v) & 15
        wide = (page_k | head_k | page_v | head_v) >> 31
        if odd or wide or (k_strides == v_strides) != alike or torch.cuda.current_device() != device or is_watched():
            return None
        out = q.new_empty(shape)
        keys = k.shape[2]
        stream = stream_of(device)
        part_out = 0
        part_lse = 0
        if places:
            pieces = q.new_empty(places * (shape[3] + 1), dtype=torch.float32)
            part_out = pieces.data_ptr()
            part_lse = part_out + 4 * places * shape[3]
        written = out.data_ptr()
        mask_stride = mask.stride(0) if mask is not None and mask.shape[0] > 1 else 0
        native(
            *grid,
            stream,
            *fixed,
            query,
            key,
            value,
            written,
            0,
            part_out,
            part_lse,
            0,
            0,
            0,
            0,
            hidden,
            0,
            0,
            *first,
            keys,
            *window,
            mask_stride,
            *scales,
            page_k,
            token_k,
            head_k,
            page_v,
            token_v,
            head_v,
            *constants,
        )
        if places:
            merge(*merge_grid, stream, *merge_fixed, written, 0, part_out, part_lse, 0, 0, *merge_first, keys, *merge_rest)
        return out

    return step
