"""Lists of key blocks: how they are made, what they stand for, which forms of `block_mask` are read, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from block_sparse_cases import BASE, CASES, SparseCase, make_lists
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention

import fa_serve
from fa_serve import BlockLists, ParameterError
from fa_serve.block_lists import as_block_lists, pack_bits
from fa_serve.testing import make_qkv

DOCUMENTS = torch.tensor([0] * 70 + [1] * 130 + [2] * 50)


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def documents(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (DOCUMENTS[i] == DOCUMENTS[j]) & (i >= j)


def of_heads(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i - j).abs() <= 40 * h + 10 * b


@pytest.mark.parametrize("case", CASES, ids=str)
def test_lists_expand_to_the_mask_that_they_stand_for(case: SparseCase) -> None:
    lists, seen = make_lists(case)
    for index in range(len(case.lengths_q)):
        found = lists.of_sequence(index).expanded(*seen.shape[2:], case.heads)
        assert torch.equal(found.expand(1, case.heads, -1, -1), seen[index : index + 1])


def test_lists_of_blocks() -> None:
    keep = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)) < 0.4
    lists = BlockLists.from_blocks(keep, (64, 128))
    assert lists.kv_num_blocks.dtype == lists.kv_indices.dtype == torch.int32
    assert torch.equal(lists.kv_num_blocks, keep.sum(-1).int())
    assert lists.kv_indices[1, 2, 3, : lists.kv_num_blocks[1, 2, 3]].tolist() == keep[1, 2, 3].nonzero().flatten().tolist()
    assert torch.equal(lists.expanded(256, 640, 3), keep.repeat_interleave(64, 2).repeat_interleave(128, 3))
    with pytest.raises(ParameterError, match="keep must be bool"):
        BlockLists.from_blocks(keep.int())


@pytest.mark.parametrize("size", [64, 128, (64, 128)], ids=str)
@pytest.mark.parametrize(("mask_mod", "batch", "heads"), [(causal, 1, 1), (documents, 1, 1), (of_heads, 2, 4)])
def test_a_mask_mod_becomes_bits(mask_mod: Callable[..., Tensor], batch: int, heads: int, size: Any) -> None:
    """The lengths are not multiples of a block, and `documents` reads a tensor that ends with them."""
    mask = create_block_mask(mask_mod, batch, heads, 250, 250, device="cpu", BLOCK_SIZE=size)
    lists = BlockLists.from_block_mask(mask)
    exact = create_mask(mask_mod, batch, heads, 250, 250, device="cpu")
    assert torch.equal(lists.expanded(250, 250, heads), exact)
    assert lists.partial_bits is not None
    assert lists.partial_bits.shape[3] == lists.kv_num_blocks.max()


def test_bits_reach_from_the_first_key_to_the_last_of_a_word() -> None:
    keep = torch.zeros(2, 64, dtype=torch.bool)
    keep[0, [0, 63]] = True
    keep[1, [31, 32]] = True
    assert pack_bits(keep).tolist() == [[1, -(2**31)], [-(2**31), 1]]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_result_is_that_of_flex_attention() -> None:
    q, k, v = make_qkv(1, 250, 250, 4, 2, 32)
    mask = create_block_mask(documents, None, None, 250, 250, device="cpu", BLOCK_SIZE=64)
    expected = flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask, enable_gqa=True).transpose(1, 2)
    out = fa_serve.attention(q, k, v, block_mask=BlockLists.from_block_mask(mask))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_a_block_mask_and_its_four_tensors_are_read() -> None:
    """Without a mask_mod, partial blocks are masked by the call's causality."""
    q, k, v = make_qkv(1, 250, 250, 4, 2, 32)
    mask = create_block_mask(causal, None, None, 250, 250, device="cpu")
    four = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    expected = fa_serve.attention(q, k, v, causal=True)
    for given in (four, list(four), BlockLists(*four), BlockMask.from_kv_blocks(*four)):
        torch.testing.assert_close(fa_serve.attention(q, k, v, causal=True, block_mask=given), expected, rtol=1e-5, atol=1e-6)
    small = BlockMask.from_kv_blocks(*four[:2], BLOCK_SIZE=64)
    assert as_block_lists(small).block_size == (64, 64)
    assert as_block_lists(small).full_kv_indices is None


def test_an_arbitrary_mask_mod_is_refused_with_what_to_do() -> None:
    q, k, v = make_qkv(1, 250, 250, 4, 2, 32)
    mask = create_block_mask(documents, None, None, 250, 250, device="cpu")
    with pytest.raises(ParameterError, match="mask_mod") as caught:
        fa_serve.attention(q, k, v, block_mask=mask)
    assert caught.value.field == "block_mask"
    for advice in ("causal=True", "four tensors", "BlockLists.from_block_mask"):
        assert advice in caught.value.rule


@pytest.mark.parametrize("given", [torch.ones(1), "causal", (torch.ones(1),) * 3], ids=["tensor", "text", "three"])
def test_other_forms_are_refused(given: Any) -> None:
    with pytest.raises(ParameterError, match=r"block_mask must be a fa_serve\.BlockLists"):
        as_block_lists(given)
    if not isinstance(given, tuple):
        with pytest.raises(ParameterError, match=r"block_mask must be a fa_serve\.BlockLists"):
            BlockLists.from_block_mask(given)


def test_one_sequence_of_shared_lists_is_all_of_them() -> None:
    lists, _ = make_lists(BASE)
    assert lists.of_sequence(3) is lists
