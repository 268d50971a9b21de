"""The mask function: what transformers asks for stays implicit where a kernel knows the pattern, else it is spelled out.

transformers describes a mask by a function of (batch, head, query, key) indices, composed of closures. Reading the closures
tells the plain patterns (causal or not, a window, packed sequences) from everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    packed_sequence_mask_function,
    prepare_padding_mask,
    sdpa_mask,
    sliding_window_bidirectional_overlay,
    sliding_window_overlay,
)
from transformers.utils.import_utils import is_tracing

from fa_serve.hf.models import handles_mask
from fa_serve.spec import UnsupportedModelError

MaskFunction = Callable[..., Any]

# devices with kernels for keys that are packed, and for masks over keys alone
KERNELS_ON = {"cuda"}


@dataclass(frozen=True, eq=False)
class Packing:
    """A padded batch with its keys packed end to end, none of them padding, and all of its queries.

    rows, columns: int64 (total_k,): where the keys stand; cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,)
    """

    rows: Tensor
    columns: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_k: int

    def to(self, *args: Any, **kwargs: Any) -> Packing:
        return cast("Packing", _moved(self, *args, **kwargs))


@dataclass(frozen=True, eq=False)
class Implicit:
    """A mask that a kernel knows by itself. It stands in the place of a tensor on its way through a model.

    window_size: (left, right) as in `fa_serve.api`, aligned to the last of the keys that count; right is 0 if causal
    keys:        how many of the first keys count: a static cache hands out all its room; None: all of them
    padding:     bool (1 or batch, keys), False where a key is padding, or None
    starts:      int32 (n + 1,): a batch of one is n sequences packed end to end, each on its own; or None
    packing:     the same as `padding`, where the keys that it leaves can be packed
    tail:        only the last queries are asked for; `starts` and a caller's cu_seq_lens_q still count all of them
    steps:       short ways that earlier layers of this forward have found (ops.py)
    """

    window_size: tuple[int, int]
    keys: int | None = None
    padding: Tensor | None = None
    starts: Tensor | None = None
    packing: Packing | None = None
    tail: bool = False
    steps: dict[Any, Any] = field(default_factory=dict)

    ndim = 4  # transformers asks it of a mask that was made ahead of the forward

    def to(self, *args: Any, **kwargs: Any) -> Implicit:
        """Moved as a tensor would be; layers on several devices ask for it."""
        return cast("Implicit", _moved(self, *args, **kwargs))

    def contiguous(self) -> Implicit:
        return self

    def __radd__(self, bias: Tensor) -> Tensor:
        """A bias that a model adds to its mask (BEiT's of relative positions), where nothing is masked."""
        if (self.window_size, self.padding, self.starts) != ((-1, -1), None, None):
            raise UnsupportedModelError("a bias is added to a mask that is not spelled out")
        return bias

    def __getitem__(self, index: tuple[slice, slice, slice, slice]) -> Implicit:
        """mask[:, :, -n:, :]. Layers that share the keys of others compute the queries whose logits are kept, and no others
        (Gemma 4, later than 5.17). The last queries stand where they stood: at the last of the keys."""
        everything = slice(None)
        queries = index[2]
        cut_elsewhere = not isinstance(queries, slice) or (queries.start or 0) > 0 or queries.stop is not None
        if cut_elsewhere or (*index[:2], index[3]) != (everything,) * 3:
            raise UnsupportedModelError(f"a mask that is not spelled out can be cut to its last queries alone, got {index}")
        if not queries.start:  # -0: all of them
            return self
        packing = self.packing
        if packing is not None:
            numbers = torch.arange(len(packing.cu_seqlens_q), dtype=torch.int32, device=packing.cu_seqlens_q.device)
            packing = replace(packing, cu_seqlens_q=torch.minimum(packing.cu_seqlens_q, numbers * -queries.start))
        return replace(self, packing=packing, tail=True)


def _moved(x: Any, *args: Any, **kwargs: Any) -> Any:
    parts = {part.name: getattr(x, part.name) for part in fields(x)}
    return replace(x, **{n: part.to(*args, **kwargs) for n, part in parts.items() if isinstance(part, Tensor | Packing)})


# closures of one function share its code
_AND = and_masks(causal_mask_function).__code__
_PACKED = packed_sequence_mask_function(torch.empty(0)).__code__
_REMAPPED = None
if hasattr(masking_utils, "remap_positions_for_packed_sequence"):  # later than 5.17
    _REMAPPED = masking_utils.remap_positions_for_packed_sequence(causal_mask_function, torch.empty(0)).__code__
_WINDOW = sliding_window_overlay(1).__code__
_WINDOW_BOTH_WAYS = sliding_window_bidirectional_overlay(1).__code__


def classify(mask_function: MaskFunction) -> tuple[tuple[int, int], Tensor | None] | None:
    """The window_size that a mask function of transformers stands for, and which packed sequence each token belongs to
    ((batch, seqlen) int64, or None). None if the function is anything else."""
    if mask_function is causal_mask_function:
        return (-1, 0), None
    if mask_function is bidirectional_mask_function:
        return (-1, -1), None
    if _code(mask_function) is not _AND:
        return None
    parts = _closed_over(mask_function, "mask_functions")
    if len(parts) != 2:
        return None
    first, second = parts
    if _code(first) is _WINDOW and second is causal_mask_function:
        left = _closed_over(first, "sliding_window") - 1
        return ((left, 0), None) if left >= 0 else None
    if _code(first) is _WINDOW_BOTH_WAYS and second is bidirectional_mask_function:
        side = _closed_over(first, "sliding_window")
        return ((side, side), None) if side >= 0 else None
    if _code(second) is _PACKED:
        base = classify(first)
        sequences = second
    elif _code(first) is _PACKED and _code(second) is _REMAPPED:
        # positions rise by one within a sequence: a window of positions is a window of tokens
        base = classify(_closed_over(second, "mask_function"))
        sequences = first
    else:
        return None
    return (base[0], _closed_over(sequences, "packed_sequence_mask")) if base is not None and base[1] is None else None


def _code(function: Any) -> Any:
    return getattr(function, "__code__", None)


def _closed_over(function: Any, name: str) -> Any:
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


def mask_forward(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Tensor | Implicit | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> Tensor | Implicit:
    """The mask function of `attn_implementation="fa_serve"`: called by transformers once per forward and kind of layer.

    attention_mask: bool (batch, any length), padding; or None; or what we made of it ahead of the forward
    q_offset:       a tensor when a static cache is being filled
    Returns bool (batch, 1, q_length, kv_length), True where a key is seen, or what stands for it.
    """
    if isinstance(attention_mask, Implicit):
        return attention_mask
    pattern = None
    tracing = is_tracing(attention_mask)
    if not handles_mask(config):
        # a traced forward cannot read closures
        plain = ((-1, 0), None) if mask_function is causal_mask_function else None
        pattern = plain if tracing else classify(mask_function)
    if pattern is not None:
        window_size, sequences = pattern
        alone = q_length == 1 and window_size[1] == 0 and sequences is None
        if alone and (decoding := _decoding(window_size, kv_length, q_offset, kv_offset, attention_mask, tracing)):
            return decoding
    # nor look at the padding
    if pattern is not None and not tracing:
        if isinstance(q_offset, Tensor) and q_length > 1 and window_size[1] == 0 and not q_offset.is_meta:
            q_offset = int(q_offset)  # a chunk of a prompt behind a static cache: its kernel is worth the wait
        implicit = _implicit(window_size, q_length, kv_length, q_offset, kv_offset)
        # a caller that works on the mask forbids to skip it; packed ones transformers never allows to be skipped
        may_skip = allow_is_causal_skip if window_size[1] == 0 else allow_is_bidirectional_skip
        if implicit is not None and sequences is not None and batch_size == 1 and implicit.keys is None:
            return replace(implicit, starts=_starts(sequences))
        if implicit is not None and sequences is None and may_skip:
            padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
            if padding is not None:
                padding = padding[:, kv_offset : kv_offset + (implicit.keys or kv_length)]
                # a model that is tried out on the meta device has no padding to look at
                padding = None if padding.is_meta or padding.all() else padding
            return replace(implicit, padding=padding, packing=_packing(padding, window_size, q_length))
    mask: Tensor = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        **kwargs,
    )
    return mask


def _implicit(
    window_size: tuple[int, int], q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int
) -> Implicit | None:
    """The window with the keys it is aligned to, or None when that cannot be had."""
    if window_size == (-1, -1):
        return Implicit(window_size)
    if isinstance(q_offset, Tensor):
        return None
    # where the last query stands among the keys; the static cache has room behind it
    keys = q_offset + q_length - kv_offset
    if keys == kv_length:
        return Implicit(window_size)
    return Implicit(window_size, keys) if window_size[1] == 0 and q_length <= keys < kv_length else None


def _packing(padding: Tensor | None, window_size: tuple[int, int], q_length: int) -> Packing | None:
    """The keys without their padding, if the kernels can count from their end: causal ones padded on the left, and those that
    every query sees, however they are padded. Looks at the device, once for all layers."""
    if padding is None or padding.device.type not in KERNELS_ON:
        return None
    causal = window_size[1] == 0
    lengths = padding.sum(1)
    longest, ends = torch.stack([lengths.max(), (padding[:, :-1] & ~padding[:, 1:]).sum() + (~padding[:, -1]).sum()]).tolist()
    if ends and (causal or window_size != (-1, -1)):
        return None
    rows, columns = padding.nonzero(as_tuple=True)
    cu_seqlens_k = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    cu_seqlens_q = torch.arange(len(padding) + 1, dtype=torch.int32, device=padding.device) * q_length
    return Packing(rows, columns, cu_seqlens_q, cu_seqlens_k, longest)


def _decoding(
    window_size: tuple[int, int],
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    attention_mask: Tensor | None,
    tracing: bool,
) -> Implicit | None:
    """What one query per row sees, without asking the device anything: the host need not wait in a step that is repeated.

    The padding goes along, there or not; of a static cache, which has room behind its keys, so does what is not there yet.
    """
    static = isinstance(q_offset, Tensor)
    known = q_offset if isinstance(q_offset, Tensor) else attention_mask
    if known is None or known.device.type not in KERNELS_ON or (tracing and not static):
        return None
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None and padding.shape[1] != kv_length:
        # a copy, because kernels that get an address other than a multiple of 16 are launched the long way, in every layer;
        # contiguous, because CUDA graphs of a compiled step are recorded anew for each stride
        padding = padding[:, kv_offset : kv_offset + kv_length].clone(memory_format=torch.contiguous_format)
    if not static and q_offset + 1 - kv_offset == kv_length:
        return Implicit(window_size, padding=padding)
    behind = q_offset - kv_offset - torch.arange(kv_length, device=known.device)
    seen = (behind >= 0)[None]
    if window_size[0] >= 0:
        seen = seen & (behind <= window_size[0])
    return Implicit((-1, -1), padding=seen if padding is None else seen & padding)


def _starts(sequences: Tensor) -> Tensor:
    """(1, seqlen), a number for each sequence -> int32 (n + 1,): where each starts, and the end."""
    edges = (sequences[0].diff() != 0).nonzero()[:, 0] + 1
    ends = edges.new_tensor([0, sequences.shape[1]])
    return torch.cat([ends[:1], edges, ends[1:]]).to(torch.int32)
