"""The mask function of `attn_implementation="fa_serve"`, and the mask that it returns in most cases, `ImplicitMask`.

transformers asks for one mask per forward and kind of layer, and hands it to every layer. If the mask is a window, chunks,
padding or packed sequences, a kernel can apply it from a few numbers and skip the keys that no query sees. Then `mask_forward`
returns an `ImplicitMask`, which holds these numbers and is never formed. Otherwise (image blocks, users' masks) it returns the
bool tensor of 4 dimensions that transformers' sdpa would get.

Left out: the pattern that a mask function of transformers stands for (`mask_patterns.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    packed_sequence_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)

from fa_serve.hf.adapter.mask_patterns import MaskFunction, Pattern, classify, split_blocks, tells_packs, without_packs
from fa_serve.hf.adapter.models import handles_mask
from fa_serve.hf.adapter.packs import hides_values, is_captured, refuse_untold_positions, running_packs
from fa_serve.spec import UnsupportedModelError

# Device types with kernels that take packed keys, and with a decoding kernel that takes a mask over keys.
KERNELS_ON = {"cuda"}


@dataclass(frozen=True, eq=False)
class PackedKeys:
    """The keys of a padded batch without their padding, packed end to end, and all of its queries.

    rows, columns: (total_k,) int64: where each packed key stands in the batch
    cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32
    """

    rows: Tensor
    columns: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_k: int

    def to(self, *args: Any, **kwargs: Any) -> PackedKeys:
        return cast("PackedKeys", _moved(self, *args, **kwargs))


@dataclass(frozen=True, eq=False)
class ImplicitMask:
    """A mask that a kernel applies from a few numbers. A model passes it to its layers in place of a mask tensor.

    window_size: (left, right) as in `fa_serve.api`, aligned to the last key of the first `num_keys`; right is 0 if causal
    num_keys:    only the first `num_keys` keys count, because a static cache passes its free room too; None: all keys count
    key_mask:    (1 or batch, 1, 1, keys) bool, False where a key is hidden, such as padding; or None
    cu_seqlens:  (n + 1,) int32: a batch of 1 holds n sequences packed end to end, which do not see each other; or None
    packed_keys: the keys that `key_mask` shows, packed, if kernels can compute them so; or None
    attention_chunk: keys per chunk as in `fa_serve.api`, counted from the first key that is passed; 0 without chunks
    only_last_queries: only the last queries are passed, while `cu_seqlens`, or a caller's cu_seq_lens_q, counts all of them
    kv_length:   the number of keys that the mask was made for, of which a call may not have fewer; None if it is that of the
                 queries, and in a traced forward
    """

    window_size: tuple[int, int]
    num_keys: int | None = None
    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    packed_keys: PackedKeys | None = None
    attention_chunk: int = 0
    only_last_queries: bool = False
    kv_length: int | None = None

    # transformers reads these attributes of a mask that was made before the forward, and then passes the mask to `mask_forward`
    ndim = 4
    shape = (0, 0, 0, 0)

    @property
    def is_dense(self) -> bool:
        """Whether the call is a dense batch in which only `window_size`, `attention_chunk` and `key_mask` hide keys."""
        return self.num_keys is None and self.cu_seqlens is None and self.packed_keys is None

    def to(self, *args: Any, **kwargs: Any) -> ImplicitMask:
        """Move the tensors, as `Tensor.to` would; accelerate does so for layers on several devices."""
        return cast("ImplicitMask", _moved(self, *args, **kwargs))

    def contiguous(self) -> ImplicitMask:
        return self

    def __radd__(self, bias: Tensor) -> Tensor:
        """bias + mask, which BEiT computes for its relative positions: allowed for a mask that hides nothing."""
        if (self.window_size, self.key_mask, self.cu_seqlens) != ((-1, -1), None, None):
            raise UnsupportedModelError(
                "fa_serve can add a bias only to a mask that hides no key, got an implicit mask that hides some: load the "
                'model with attn_implementation="eager" or "sdpa"'
            )
        return bias

    def __getitem__(self, index: tuple[slice, slice, slice, slice]) -> ImplicitMask:
        """mask[:, :, -n:, :], the mask of the last n queries.

        In layers that share the keys of other layers, Gemma 4 (in releases after transformers 5.17) computes only the queries
        whose logits are kept. A window is aligned to the last key, so it holds unchanged for the last queries.
        """
        everything = slice(None)
        queries = index[2]
        is_tail = isinstance(queries, slice) and (queries.start or 0) <= 0 and queries.stop is None
        if not is_tail or (*index[:2], index[3]) != (everything,) * 3:
            raise UnsupportedModelError(
                f"fa_serve's implicit masks can be cut to their last queries only, mask[:, :, -n:, :], got mask[{index}]"
            )
        if not queries.start:  # -0 keeps all queries
            return self
        packed_keys = self.packed_keys
        if packed_keys is not None:
            cu_seqlens_q = packed_keys.cu_seqlens_q
            numbers = torch.arange(len(cu_seqlens_q), dtype=torch.int32, device=cu_seqlens_q.device)
            packed_keys = replace(packed_keys, cu_seqlens_q=torch.minimum(cu_seqlens_q, numbers * -queries.start))
        return replace(self, packed_keys=packed_keys, only_last_queries=True)


def _moved(x: Any, *args: Any, **kwargs: Any) -> Any:
    """A copy of a dataclass whose tensors have been moved by `to(*args, **kwargs)`."""
    parts = {part.name: getattr(x, part.name) for part in fields(x)}
    return replace(x, **{n: part.to(*args, **kwargs) for n, part in parts.items() if isinstance(part, Tensor | PackedKeys)})


_blocks: ContextVar[list[Tensor] | None] = ContextVar("fa_serve_blocks", default=None)


@contextmanager
def leaving_out_blocks() -> Iterator[list[Tensor]]:
    """Inside, masks are made without blocks of tokens that attend to each other both ways.

    Yields a list, to which each mask that had such blocks appends the block of each token, (batch, seqlen) int64, or -1.
    """
    found: list[Tensor] = []
    token = _blocks.set(found)
    try:
        yield found
    finally:
        _blocks.reset(token)


class _Request(NamedTuple):
    """What transformers says about the forward that it wants a mask for.

    q_offset:  the position of the first query; a tensor if the forward fills a static cache
    kv_offset: the position of the first key, which is not 0 for a sliding cache that has rolled
    padding:   (batch, any length) bool, False is padding, or None
    cu_seqlens: (n + 1,) int32: where packed sequences begin, if the caller told the model; or None
    """

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int | Tensor
    kv_offset: int
    padding: Tensor | None
    cu_seqlens: Tensor | None = None


def mask_forward(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Tensor | ImplicitMask | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> Tensor | ImplicitMask:
    """Make the mask of a forward; transformers calls this once per forward and kind of layer.

    q_offset:       position of the first query, a tensor if a static cache is filled; kv_offset: position of the first key
    mask_function:  says which keys a query sees, see `mask_patterns.py`
    attention_mask: (batch, any length) bool, False is padding; or None; or an ImplicitMask that was made before the forward,
                    which is returned as it is
    allow_is_causal_skip, allow_is_bidirectional_skip: False asks for a tensor, because the caller computes with the mask
    config:         the config of the model
    Returns an ImplicitMask, or bool (batch, 1, q_length, kv_length), True where a query sees a key.

    Raises UnsupportedModelError for an attention_mask that does not have two dimensions.
    """
    if isinstance(attention_mask, ImplicitMask):
        return attention_mask
    if attention_mask is not None and attention_mask.dim() != 2:  # a mask of 4 dimensions goes to the layers, not here
        raise UnsupportedModelError(
            "attention_mask must have 2 dimensions, (batch, keys), or 4, (batch, heads, queries, keys), got shape "
            f"{tuple(attention_mask.shape)}: pass attention_mask[:, None] if it is (batch, queries, keys)"
        )
    hidden = hides_values(attention_mask)
    tracing = hidden and not is_captured()
    blocks = None if tracing else _blocks.get()
    if blocks is not None and (split := split_blocks(mask_function)) is not None:
        mask_function, sequence_ids = split
        blocks.append(sequence_ids)
        allow_is_causal_skip = True  # transformers forbids it only because of the blocks
    request = _Request(batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask)
    mask_function, request = _with_told_packs(mask_function, request, config, hidden, tracing)
    pattern = None if handles_mask(config) else _pattern(mask_function, tracing)
    if pattern is not None:
        implicit = _mask_of_one_query(request, pattern, hidden)
        if implicit is None and not (hidden and (tracing or _waits_for_values(request, pattern))):
            # for packed sequences transformers allows no skip, but `_mask_of_queries` describes them anyway
            may_skip = allow_is_causal_skip if pattern.is_causal else allow_is_bidirectional_skip
            implicit = _mask_of_queries(request, pattern, may_skip)
        if implicit is not None:
            return implicit if tracing or kv_length == q_length else replace(implicit, kv_length=kv_length)
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


def _with_told_packs(
    mask_function: MaskFunction, request: _Request, config: Any, hidden: bool, tracing: bool
) -> tuple[MaskFunction, _Request]:
    """Add the packed sequences that the caller told the model to the mask function and the request.

    The model's own code may make its masks without them. A forward with keys in a cache or with padding is returned unchanged:
    there the arguments of each layer's call must tell the sequences apart. Raises UnsupportedModelError for position_ids that
    start again if nothing else tells the sequences apart.
    """
    packs = running_packs(request.batch_size, request.q_length)
    if packs is None:
        return mask_function, request
    # a traced forward cannot read closures, and a captured one cannot read the tensors in them
    if not hidden and tells_packs(mask_function):
        packs.in_masks = True
        return mask_function, request
    if packs.cu_seqlens is None:
        if packs.restarts:
            refuse_untold_positions(config)
        return mask_function, request
    whole = isinstance(request.q_offset, int) and (request.q_offset, request.kv_offset) == (0, 0)
    padding = request.padding
    if padding is not None and not hidden and padding.shape[1] == request.kv_length and not padding.is_meta and padding.all():
        padding = None
    if not whole or padding is not None or request.kv_length != request.q_length:
        return mask_function, request
    packs.in_masks = True
    if hidden and not tracing:
        # transformers has also found the sequences by position_ids, in a tensor that a captured forward cannot read
        mask_function = without_packs(mask_function)
    within = packed_sequence_mask_function(packs.numbers(request.q_length))
    return and_masks(within, mask_function), request._replace(cu_seqlens=packs.cu_seqlens)


def _pattern(mask_function: MaskFunction, tracing: bool) -> Pattern | None:
    if not tracing:
        return classify(mask_function)
    # a traced forward cannot read closures
    return Pattern((-1, 0)) if mask_function is causal_mask_function else None


def _waits_for_values(request: _Request, pattern: Pattern) -> bool:
    """Whether `_mask_of_queries` would read values on the device: padding, where packed sequences begin, or q_offset."""
    packs = pattern.sequences is not None and request.cu_seqlens is None
    return packs or request.padding is not None or isinstance(request.q_offset, Tensor)


def _mask_of_one_query(request: _Request, pattern: Pattern, hidden: bool) -> ImplicitMask | None:
    """The mask of one causal query per row on a device with kernels, made without waiting for the device; else None.

    In a step that is repeated for each token, the host must not wait. So padding is passed on without checking whether there is
    any. For a static cache, the mask also hides the free room after the keys.
    """
    q_offset = request.q_offset
    is_static = isinstance(q_offset, Tensor)
    known = q_offset if isinstance(q_offset, Tensor) else request.padding
    if request.q_length != 1 or not pattern.is_causal or pattern.sequences is not None:
        return None
    if known is None or known.device.type not in KERNELS_ON or (hidden and not is_static):
        return None
    kv_length = request.kv_length
    chunks = pattern.chunks
    if chunks is not None and request.kv_offset + kv_length <= chunks.length:
        chunks = None  # all keys are in the first chunk
    padding = prepare_padding_mask(request.padding, kv_length, request.kv_offset)
    if padding is not None and padding.shape[1] != kv_length:
        # Copied, because a kernel that gets an address that is not a multiple of 16 is launched through Triton's JIT, in every
        # layer. Contiguous, because a compiled step records its CUDA graphs again for each new stride.
        kv_end = request.kv_offset + kv_length
        padding = padding[:, request.kv_offset : kv_end].clone(memory_format=torch.contiguous_format)
    if chunks is None and not is_static and q_offset + 1 - request.kv_offset == kv_length:
        return ImplicitMask(pattern.window_size, key_mask=_over_keys(padding), attention_chunk=_chunk_length(pattern))
    distance = q_offset - request.kv_offset - torch.arange(kv_length, device=known.device)
    seen = (distance >= 0)[None]
    if pattern.window_size[0] >= 0:
        seen = seen & (distance <= pattern.window_size[0])
    if chunks is not None:
        seen = seen & (distance <= (q_offset - chunks.left_padding[:, None]) % chunks.length)
    return ImplicitMask((-1, -1), key_mask=_over_keys(seen if padding is None else seen & padding))


def _mask_of_queries(request: _Request, pattern: Pattern, may_skip: bool) -> ImplicitMask | None:
    """The mask of any number of queries. It waits for the device to read the offset of a static cache and to find padding."""
    q_offset = request.q_offset
    if isinstance(q_offset, Tensor) and request.q_length > 1 and pattern.is_causal and not q_offset.is_meta:
        # a chunk of a prompt after the keys of a static cache: its kernel saves more time than the host loses by waiting
        q_offset = int(q_offset)
    implicit = _aligned(request._replace(q_offset=q_offset), pattern.window_size)
    if implicit is None:
        return None
    if pattern.sequences is not None:
        if request.batch_size != 1 or implicit.num_keys is not None:
            return None
        told = request.cu_seqlens
        return replace(implicit, cu_seqlens=_cu_seqlens(pattern.sequences) if told is None else told)
    if not may_skip:
        return None
    padding = prepare_padding_mask(request.padding, request.kv_length, request.kv_offset)
    if padding is not None:
        kv_end = request.kv_offset + (implicit.num_keys or request.kv_length)
        padding = padding[:, request.kv_offset : kv_end]
        # on the meta device, where models are only tried out, padding has no values to look at
        padding = None if padding.is_meta or padding.all() else padding
    packed_keys = _packed_keys(padding, pattern, request.q_length)
    if not _chunks_begin_at_first_key(request, pattern, packed_keys):
        return None
    return replace(implicit, key_mask=_over_keys(padding), packed_keys=packed_keys, attention_chunk=_chunk_length(pattern))


def _chunk_length(pattern: Pattern) -> int:
    return 0 if pattern.chunks is None else pattern.chunks.length


def _chunks_begin_at_first_key(request: _Request, pattern: Pattern, packed_keys: PackedKeys | None) -> bool:
    """Whether a kernel places the chunks right: it counts them from the first key that it is given. May wait for the device.

    transformers counts chunks from the first token of each row, whose place changes with padding on the left and with a cache
    that has rolled. The output of a query that is padding does not matter.
    """
    chunks = pattern.chunks
    if chunks is None or request.kv_offset + request.kv_length <= chunks.length:
        return True
    if packed_keys is not None:  # they begin at the first token
        return request.kv_offset == 0
    is_padded = request.padding is not None and not request.padding.is_meta and bool(chunks.left_padding.any())
    return not is_padded and request.kv_offset % chunks.length == 0


def _aligned(request: _Request, window_size: tuple[int, int]) -> ImplicitMask | None:
    """The window and the number of keys whose last one it is aligned to, or None if no kernel can align it there."""
    if window_size == (-1, -1):
        return ImplicitMask(window_size)
    if isinstance(request.q_offset, Tensor):
        return None
    # the last query is at the place of the last key that counts; a static cache has free room after this key
    num_keys = request.q_offset + request.q_length - request.kv_offset
    if num_keys == request.kv_length:
        return ImplicitMask(window_size)
    if window_size[1] != 0 or not request.q_length <= num_keys < request.kv_length:
        return None
    return ImplicitMask(window_size, num_keys)


def _over_keys(padding: Tensor | None) -> Tensor | None:
    """(batch, keys) -> (batch, 1, 1, keys), made once here, and not again in each layer."""
    return None if padding is None else padding[:, None, None]


def _packed_keys(padding: Tensor | None, pattern: Pattern, q_length: int) -> PackedKeys | None:
    """The keys without their padding, or None if a kernel would align packed keys wrongly. It waits for the device once.

    A window is aligned to the last key. So keys can be packed if the window is causal and all padding is on the left, or if
    every query sees every key.
    """
    if padding is None or padding.device.type not in KERNELS_ON:
        return None
    lengths = padding.sum(1)
    keys_before_padding = (padding[:, :-1] & ~padding[:, 1:]).sum() + (~padding[:, -1]).sum()
    longest, not_on_the_left = torch.stack([lengths.max(), keys_before_padding]).tolist()
    if not_on_the_left and (pattern.is_causal or pattern.window_size != (-1, -1)):
        return None
    rows, columns = padding.nonzero(as_tuple=True)
    cu_seqlens_k = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    cu_seqlens_q = torch.arange(len(padding) + 1, dtype=torch.int32, device=padding.device) * q_length
    return PackedKeys(rows, columns, cu_seqlens_q, cu_seqlens_k, longest)


def _cu_seqlens(sequences: Tensor) -> Tensor:
    """(1, seqlen), the number of each token's sequence -> (n + 1,) int32: where each sequence starts, and the end."""
    edges = (sequences[0].diff() != 0).nonzero()[:, 0] + 1
    ends = edges.new_tensor([0, sequences.shape[1]])
    return torch.cat([ends[:1], edges, ends[1:]]).to(torch.int32)
