"""Block-sparse attention: for each block of queries, the list of key blocks that it attends to.

    lists = BlockLists.from_blocks(keep, block_size=(64, 64))      # keep: bool (1, 1, query blocks, key blocks)
    lists = BlockLists.from_block_mask(flex_block_mask)            # evaluates FlexAttention's mask_mod once, to bits
    lists = BlockLists.from_mask_mod(mask_mod, batch, heads, seqlen_q, seqlen_k, device="cuda")
    out = fa_serve.attention(q, k, v, causal=True, block_mask=lists)

`as_block_lists` reads the argument `block_mask` of the public functions: a `BlockLists`, a `BlockMask` of FlexAttention, its
four tensors, or a mask_mod. The form is FlexAttention's, so its masks need no conversion. Kernels are compiled ahead of the
call and cannot include a function, so a `mask_mod` becomes the bits of partial blocks. The lists of a function are kept for as
long as the function lives. This module leaves out which blocks are worth keeping: that is the caller's choice
(examples/sparse_prefill.py shows one).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_serve.index_functions import IndexFunction, dims_read, over_blocks, over_grid, what_is_read
from fa_serve.kept_values import KeptValues, StreamValues, is_capturing, stream_of
from fa_serve.spec import ParameterError

BLOCK_SIZES = (64, 128)
WORD = 32
"""Keys per word of `partial_bits`."""

_GATHERS_BYTES = 0x0102040810204080

_EVALUATED_TOGETHER = 64
"""Blocks that `from_block_mask` evaluates at once: 64 blocks of 128 x 128 bool are 1 MB."""

_EVALUATED_ELEMENTS = 1 << 22
"""Elements that `from_mask_mod` evaluates at once, in whole rows of blocks: their indices are int64, 32 MB."""

_FORMS = "be a fa_serve.BlockLists, a BlockMask of FlexAttention, the four tensors of one, or a mask_mod"
_MADE_BEFORE = "pass a BlockLists that was made beforehand with fa_serve.BlockLists.from_block_mask or from_mask_mod"
_NO_FUNCTION = (
    f"have no mask_mod while the call is compiled or traced, because its blocks cannot be computed then: {_MADE_BEFORE}"
)
_NO_CAPTURE = (
    "have no mask_mod that is evaluated while a CUDA graph captures the call, because a capture cannot wait for its blocks: "
    f"make the same call once before the capture, or {_MADE_BEFORE}"
)


class CallSizes(NamedTuple):
    """The sizes for which a mask_mod is evaluated: sequences, query heads, and the most queries and keys of a sequence."""

    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int
    device: torch.device


class BlockLists(NamedTuple):
    """The key blocks of each block of queries. Query block i begins at query i * block_size[0] of a sequence in this call, key
    block j at key j * block_size[1] of the sequence.

    kv_num_blocks:      (1 or batch, heads, query blocks), int32: how many partial key blocks a query block has
    kv_indices:         (1 or batch, heads, query blocks, width), int32: the partial key blocks, each at most once. Entries past
                        the number are not read
    full_kv_num_blocks, full_kv_indices: the same for full blocks, to which `partial_bits` does not apply; or None
    block_size:         (queries, keys) per block, 64 or 128 each
    partial_bits:       (1 or batch, heads, query blocks, partial width, block_size[0], block_size[1] // 32), int32: bit c of
                        word w keeps key 32 * w + c of the block for a query. None keeps all keys of partial blocks. The partial
                        width is at least the largest of kv_num_blocks

    `heads` is 1, the number of KV heads, or the number of query heads. A query sees a key if its list has the block, the bit is
    set where the block is partial and has bits, and causality and the window of the call allow it.
    """

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor | None = None
    full_kv_indices: Tensor | None = None
    block_size: tuple[int, int] = (128, 128)
    partial_bits: Tensor | None = None

    @classmethod
    def from_blocks(cls, keep: Tensor, block_size: tuple[int, int] = (128, 128)) -> BlockLists:
        """Lists of the blocks where `keep` is True: bool (1 or batch, heads, query blocks, key blocks).

        Raises ParameterError for a `keep` of another shape or dtype, and for block sizes other than 64 and 128.
        """
        if len(block_size) != 2 or any(size not in BLOCK_SIZES for size in block_size):
            raise ParameterError("block_size", "have sizes of 64 or 128 for queries and keys", block_size)
        if keep.dim() != 4 or keep.dtype != torch.bool:
            raise ParameterError("keep", "be bool (batch, heads, query blocks, key blocks)", (keep.dtype, tuple(keep.shape)))
        # a stable sort puts the kept blocks first, in their order
        order = torch.argsort(keep.to(torch.uint8), dim=-1, descending=True, stable=True)
        return cls(keep.sum(-1, dtype=torch.int32), order.to(torch.int32), block_size=block_size)

    @classmethod
    def from_chosen_blocks(cls, chosen: Tensor, size: int, seqlen_k: int, mask: Tensor | None = None) -> BlockLists:
        """The lists for queries that each chose blocks of `size` keys. A list has all keys that one of its queries chose.

        chosen: (batch, heads, seqlen_q, n), int64: numbers of blocks, in any order; a number below 0 is no block
        mask:   bool, broadcastable to (batch, heads, seqlen_q, seqlen_k): which chosen keys a query sees; or None for all
        The bits take an eighth of a byte for each query, key and head. The host does not wait for the device.
        """
        rows, keys = cls._field_defaults["block_size"]
        count = -(-seqlen_k // size)
        # numbers below 0 and blocks past the end go to an extra place after the last block
        places = torch.where(chosen < 0, count, chosen).clamp(max=count)
        kept = torch.zeros(*chosen.shape[:3], count + 1, dtype=torch.bool, device=chosen.device).scatter_(3, places, True)
        words = _words_of(kept[..., :count], size)[..., : -(-seqlen_k // WORD)]
        if mask is not None:
            words = words & pack_bits(torch.nn.functional.pad(mask, (0, -seqlen_k % WORD)))
        words = torch.nn.functional.pad(words, (0, -words.shape[3] % (keys // WORD), 0, -words.shape[2] % rows))
        blocks = words.view(*words.shape[:2], -1, rows, words.shape[3] // (keys // WORD), keys // WORD).transpose(3, 4)
        lists = cls.from_blocks((blocks != 0).flatten(4).any(4), (rows, keys))
        at = lists.kv_indices.long()[..., None, None].expand(blocks.shape)
        return lists._replace(partial_bits=blocks.gather(3, at))

    @classmethod
    def from_block_mask(cls, block_mask: Any) -> BlockLists:
        """A `BlockMask` of FlexAttention with its `mask_mod` evaluated in every partial block.

        The host waits for the device once, to read the largest number of partial blocks, and each partial block takes 2 kB at
        128 x 128. Build it once for each mask, and not at each call. Block sizes other than 64 and 128 become 128.
        """
        lists = _lists_of(block_mask)
        if any(size not in BLOCK_SIZES for size in lists.block_size):
            shape = (*lists.kv_num_blocks.shape[:2], *block_mask.seq_lengths)
            return cls.from_mask_mod(_seen_by(lists, block_mask), *shape, device=lists.kv_indices.device)
        rows, keys = lists.block_size
        width = int(lists.kv_num_blocks.max()) if lists.kv_num_blocks.numel() else 0
        shape = (*lists.kv_num_blocks.shape, width, rows, keys // WORD)
        bits = torch.zeros(shape, dtype=torch.int32, device=lists.kv_indices.device)
        listed = torch.arange(width, device=bits.device) < lists.kv_num_blocks[..., None]
        entries = listed.nonzero()
        last_query, last_key = (n - 1 for n in block_mask.seq_lengths)
        evaluate = over_blocks(block_mask.mask_mod)
        for some in torch.split(entries, _EVALUATED_TOGETHER):
            batch, head, block, place = some.unbind(1)
            # with indices past the end, mask_mod would read past the end of its tensors; no query or key is there
            i = (block[:, None] * rows + torch.arange(rows, device=bits.device)).clamp(max=last_query)
            first = lists.kv_indices[batch, head, block, place].long() * keys
            j = (first[:, None] + torch.arange(keys, device=bits.device)).clamp(max=last_key)
            bits[batch, head, block, place] = pack_bits(evaluate(batch, head, i, j))
        return lists._replace(partial_bits=bits)

    @classmethod
    def from_mask_mod(
        cls,
        mask_mod: IndexFunction,
        batch: int,
        heads: int,
        seqlen_q: int,
        seqlen_k: int,
        *,
        device: torch.device | str = "cpu",
        block_size: tuple[int, int] = (128, 128),
    ) -> BlockLists:
        """The lists of a mask_mod(b, h, q_idx, kv_idx) of FlexAttention, which is evaluated once for each query and key.

        batch, heads: numbers of sequences and query heads. If mask_mod does not read b (or h), sequences (or heads) share lists
        Rows of blocks are evaluated one after the other, so that the whole mask is never in memory. The host waits for the
        device. Raises UnsupportedError for a function that `torch.vmap` cannot evaluate.
        """
        rows, keys = block_size
        device = torch.device(device)
        on_batch, on_heads = dims_read(mask_mod, device)
        b = torch.arange(batch if on_batch else 1, device=device)
        h = torch.arange(heads if on_heads else 1, device=device)
        query_blocks = -(-seqlen_q // rows)
        key_blocks = -(-seqlen_k // keys)
        j = torch.arange(key_blocks * keys, device=device).clamp(max=seqlen_k - 1)
        at_once = max(1, _EVALUATED_ELEMENTS // max(1, len(b) * len(h) * rows * len(j)))
        parts = []
        for first in range(0, query_blocks, at_once):
            last = min(first + at_once, query_blocks)
            # indices past the end repeat the last index, so they do not change which blocks are full or empty
            i = torch.arange(first * rows, last * rows, device=device).clamp(max=seqlen_q - 1)
            keep = over_grid(mask_mod)(b, h, i, j).bool()
            parts.append(_BlockRows.of(keep.reshape(len(b), len(h), last - first, rows, key_blocks, keys).transpose(3, 4)))
        return _joined(parts, (len(b), len(h)), key_blocks, block_size, device)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors, in the order in which kernels and operators take them."""
        return (
            self.kv_num_blocks,
            self.kv_indices,
            self.full_kv_num_blocks,
            self.full_kv_indices,
            self.partial_bits,
        )

    def of_sequence(self, index: int) -> BlockLists:
        """The lists of one sequence of a batch."""
        if self.kv_num_blocks.shape[0] == 1:
            return self
        num, indices, full_num, full_indices, bits = (x if x is None else x[index : index + 1] for x in self.tensors)
        assert num is not None
        assert indices is not None
        return BlockLists(num, indices, full_num, full_indices, self.block_size, bits)

    def of_rows(self, first: int, last: int, seqlen_k: int, num_heads: int) -> Tensor:
        """`expanded` for the queries from `first` to `last` - 1."""
        rows = self.block_size[0]
        skipped = first // rows
        blocks = slice(skipped, -(-last // rows))
        num, indices, full_num, full_indices, bits = (x if x is None else x[:, :, blocks] for x in self.tensors)
        assert num is not None
        assert indices is not None
        some = BlockLists(num, indices, full_num, full_indices, self.block_size, bits)
        return some.expanded(last - skipped * rows, seqlen_k, num_heads)[:, :, first - skipped * rows :]

    def expanded(self, seqlen_q: int, seqlen_k: int, num_heads: int) -> Tensor:
        """bool (1 or batch, 1 or num_heads, seqlen_q, seqlen_k): the keys that each query sees by the lists and the bits."""
        rows, keys = self.block_size
        blocks = (-(-seqlen_q // rows), -(-seqlen_k // keys))
        keep = _expanded(self.kv_num_blocks, self.kv_indices, self.partial_bits, blocks, self.block_size)
        if self.full_kv_num_blocks is not None and self.full_kv_indices is not None:
            keep |= _expanded(self.full_kv_num_blocks, self.full_kv_indices, None, blocks, self.block_size)
        keep = keep[..., :seqlen_q, :seqlen_k]
        heads = keep.shape[1]
        return keep if heads == 1 else keep.repeat_interleave(num_heads // heads, dim=1)


def expand_once(lists: BlockLists, seqlen_q: int, seqlen_k: int, num_heads: int) -> Tensor:
    """`lists.expanded`, computed once for all layers that use these lists. A CUDA graph computes it at each replay."""
    version = version_of(lists)
    device = lists.kv_num_blocks.device
    if version is None or is_capturing(device):
        return lists.expanded(seqlen_q, seqlen_k, num_heads)
    key = (seqlen_q, seqlen_k, num_heads, version, stream_of(device))
    found = _EXPANDED.find(lists.kv_num_blocks, key)
    if found is None:
        mask = lists.expanded(seqlen_q, seqlen_k, num_heads)
        found = _EXPANDED.keep(lists.kv_num_blocks, key, (mask, lists.tensors[1:]))
    return found[0]


def version_of(lists: BlockLists) -> Hashable | None:
    """A key of the lists, which changes if one of their tensors is changed in place, and is valid while the tensors live.

    None if a tensor was made in `torch.inference_mode`: such a tensor has no version.
    """
    if any(x is not None and x.is_inference() for x in lists.tensors):
        return None
    return (lists.block_size, *(None if x is None else (id(x), x._version) for x in lists.tensors))


_EXPANDED: KeptValues[tuple[Tensor, tuple[Tensor | None, ...]]] = KeptValues(room=2)
"""The masks of the lists that were expanded last, and the lists' other tensors. The keys have their ids, so they stay alive."""


def as_block_lists(block_mask: Any, sizes: CallSizes, *, traced: bool = False) -> BlockLists:
    """The lists that the argument `block_mask` means in a call of these sizes.

    traced: PyTorch records the call, so no function can be evaluated
    Raises ParameterError for another type, for a function in a traced call, and for a function that was not evaluated before a
    CUDA graph captures the call.
    """
    if isinstance(block_mask, BlockLists):
        return block_mask
    if isinstance(block_mask, tuple | list):
        if len(block_mask) != 4:
            raise ParameterError("block_mask", _FORMS, f"{len(block_mask)} values")
        return BlockLists(*block_mask)
    lists = None
    mask_mod = block_mask
    if not callable(block_mask) or hasattr(block_mask, "kv_indices"):
        lists = _lists_of(block_mask)
        mask_mod = getattr(block_mask, "mask_mod", None)
        is_listed = mask_mod is None or getattr(mask_mod, "__name__", None) == "noop_mask"
        if is_listed and all(size in BLOCK_SIZES for size in lists.block_size):
            return lists
    if traced:
        raise ParameterError("block_mask", _NO_FUNCTION, mask_mod)
    return _evaluated_once(block_mask, mask_mod, sizes, lists)


def _evaluated_once(block_mask: Any, mask_mod: Any, sizes: CallSizes, lists: BlockLists | None) -> BlockLists:
    """The lists of a mask_mod, or of a BlockMask with one. It is evaluated again if something that it reads has changed."""
    device = sizes.device if lists is None else lists.kv_indices.device
    key, tensors = _made_of(block_mask, mask_mod, sizes, lists)
    found = None if key is None else _EVALUATED.find(block_mask, key, device)
    if found is not None:
        return found[0]
    if is_capturing(device):
        raise ParameterError("block_mask", _NO_CAPTURE, mask_mod)
    # outside of inference mode, because the next call may need gradients, and later calls compare the versions of these tensors
    with torch.inference_mode(False), torch.no_grad():
        if lists is None:
            *shape, _ = sizes
            evaluated = BlockLists.from_mask_mod(mask_mod, *shape, device=device)
        else:
            evaluated = BlockLists.from_block_mask(block_mask)
    if key is not None:
        _EVALUATED.keep(block_mask, key, device, (evaluated, tensors))
    return evaluated


def _made_of(
    block_mask: Any, mask_mod: Any, sizes: CallSizes, lists: BlockLists | None
) -> tuple[Hashable | None, tuple[Tensor | None, ...]]:
    """-> a key of everything that the lists depend on, None if that is not known, and the tensors whose ids are in the key."""
    read = what_is_read(mask_mod)
    if read is None:
        return None, ()
    facts, tensors = read
    if lists is None:
        return (facts, sizes), (*tensors,)
    version = version_of(lists)
    key = None if version is None else (facts, version, block_mask.seq_lengths)
    return key, (*tensors, *lists.tensors)


_EVALUATED: StreamValues[tuple[BlockLists, tuple[Tensor | None, ...]]] = StreamValues(room=8)
"""The lists of masks and functions, and the tensors that were read: while they are kept, no other tensors have their ids."""


def _seen_by(lists: BlockLists, block_mask: Any) -> IndexFunction:
    """A BlockMask of any block size as a mask_mod, whose indices b and h are those of the lists."""
    rows, keys = lists.block_size
    seqlen_q, seqlen_k = block_mask.seq_lengths
    blocks = (-(-seqlen_q // rows), -(-seqlen_k // keys))
    partial = _expanded(lists.kv_num_blocks, lists.kv_indices, None, blocks, (1, 1))
    full = torch.zeros_like(partial)
    if lists.full_kv_num_blocks is not None and lists.full_kv_indices is not None:
        full = _expanded(lists.full_kv_num_blocks, lists.full_kv_indices, None, blocks, (1, 1))

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        at = (b, h, i // rows, j // keys)
        keep: Tensor = full[at] | (partial[at] & block_mask.mask_mod(b, h, i, j))
        return keep

    return mask_mod


class _BlockRows(NamedTuple):
    """Some rows of blocks of a mask.

    mixed, full: bool (batch, heads, rows of blocks, key blocks)
    bits:        (mixed blocks, queries, words) int32, in the order of `mixed`
    """

    mixed: Tensor
    full: Tensor
    bits: Tensor

    @classmethod
    def of(cls, keep: Tensor) -> _BlockRows:
        """keep: bool (batch, heads, rows of blocks, key blocks, queries, keys)"""
        full = keep.flatten(4).all(4)
        mixed = keep.flatten(4).any(4) & ~full
        return cls(mixed, full, pack_bits(keep[mixed]))


def _joined(
    parts: list[_BlockRows], lists: tuple[int, int], key_blocks: int, block_size: tuple[int, int], device: torch.device
) -> BlockLists:
    """The lists of all rows of blocks."""
    nothing = torch.zeros(*lists, 0, key_blocks, dtype=torch.bool, device=device)
    mixed = BlockLists.from_blocks(torch.cat([nothing, *(part.mixed for part in parts)], 2), block_size)
    full = BlockLists.from_blocks(torch.cat([nothing, *(part.full for part in parts)], 2), block_size)
    num = mixed.kv_num_blocks
    width = int(num.max()) if num.numel() else 0
    bits = torch.zeros((*num.shape, width, block_size[0], block_size[1] // WORD), dtype=torch.int32, device=device)
    listed = torch.arange(width, device=device) < num[..., None]
    first = 0
    for part in parts:
        last = first + part.mixed.shape[2]
        bits[:, :, first:last][listed[:, :, first:last]] = part.bits
        first = last
    return mixed._replace(full_kv_num_blocks=full.kv_num_blocks, full_kv_indices=full.kv_indices, partial_bits=bits)


def pack_bits(keep: Tensor) -> Tensor:
    """bool (..., keys) -> int32 (..., keys // 32), as `BlockLists.partial_bits` has them."""
    keep = keep.contiguous()
    eights = (keep.clone() if keep.storage_offset() % 8 else keep).view(torch.int64)
    # the product has byte k, which is 0 or 1, at bit 56 + k, and nothing else there
    packed = ((eights * _GATHERS_BYTES) >> 56) & 255
    return packed.to(torch.uint8).view(torch.int32)


def _words_of(kept: Tensor, size: int) -> Tensor:
    """bool (..., blocks), of `size` keys each -> int32 (..., words): the bits of their keys."""
    if size % WORD == 0:
        return kept.to(torch.int32).neg().repeat_interleave(size // WORD, dim=-1)
    keys = kept.repeat_interleave(size, dim=-1)
    return pack_bits(torch.nn.functional.pad(keys, (0, -keys.shape[-1] % WORD)))


def _lists_of(block_mask: Any) -> BlockLists:
    """The four tensors of a BlockMask, whatever its mask_mod is."""
    names = BlockLists._fields[:4]
    if not all(hasattr(block_mask, name) for name in (*names, "BLOCK_SIZE")):
        raise ParameterError("block_mask", _FORMS, type(block_mask).__name__)
    num, indices, full_num, full_indices = (getattr(block_mask, name) for name in names)
    queries, keys = block_mask.BLOCK_SIZE
    return BlockLists(num, indices, full_num, full_indices, (queries, keys))


def _expanded(
    num: Tensor, indices: Tensor, bits: Tensor | None, blocks: tuple[int, int], block_size: tuple[int, int]
) -> Tensor:
    """One kind of list as bool (batch, heads, query blocks * rows, key blocks * keys)."""
    query_blocks, key_blocks = blocks
    rows, keys = block_size
    num = num[..., :query_blocks]
    places = torch.arange(indices.shape[-1], device=num.device)
    # entries past the end of a list go to an extra block, which is cut off
    nowhere = torch.tensor(key_blocks, device=num.device)
    at = torch.where(places < num[..., None], indices[:, :, :query_blocks].long(), nowhere).clamp(max=key_blocks)
    if bits is None:
        keep = torch.zeros(*num.shape, key_blocks + 1, dtype=torch.bool, device=num.device).scatter_(-1, at, True)
        return keep[..., :-1].repeat_interleave(rows, dim=2).repeat_interleave(keys, dim=3)
    seen = (bits[:, :, :query_blocks, ..., None] >> torch.arange(WORD, device=num.device)) & 1
    at = at[..., : bits.shape[3], None, None].expand(*num.shape, -1, rows, keys)
    keep = torch.zeros(*num.shape, key_blocks + 1, rows, keys, dtype=torch.bool, device=num.device)
    keep = keep.scatter_(3, at, seen.flatten(-2) != 0)[:, :, :, :-1]
    return keep.transpose(3, 4).flatten(4, 5).flatten(2, 3)
