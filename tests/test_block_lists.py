"""Lists of key blocks: how they are made, what they stand for, which forms of `block_mask` are read, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from block_sparse_cases import BASE, CASES, SparseCase, make_lists
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, create_mask, flex_attention

import fa_serve
from fa_serve import BlockLists, ParameterError, block_lists, dispatch, index_functions, kept_values
from fa_serve.backends.calls import AttentionTensors
from fa_serve.block_lists import CallSizes, as_block_lists, pack_bits
from fa_serve.testing import make_qkv

DOCUMENTS = torch.tensor([0] * 70 + [1] * 130 + [2] * 50)


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def documents(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (DOCUMENTS[i] == DOCUMENTS[j]) & (i >= j)


def prefix(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) | (j < 140)


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
    some = torch.rand(3, 97, generator=torch.Generator().manual_seed(0)) < 0.5
    bits = pack_bits(some[:, 1:])
    assert torch.equal((bits[..., None] >> torch.arange(32) & 1 != 0).flatten(1), some[:, 1:])
    assert torch.equal(pack_bits(some.flatten()[3:67]), pack_bits(some.flatten()[3:67].clone()))


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
    found = as_block_lists(small, CallSizes(1, 4, 250, 250, q.device))
    assert found.block_size == (64, 64)
    assert found.full_kv_indices is None


@pytest.mark.parametrize("size", [(32, 64), (64, 96), (128,), (64, 64, 64)])
def test_blocks_of_other_sizes_are_refused_where_lists_are_made(size: tuple[int, ...]) -> None:
    with pytest.raises(ParameterError, match=r"block_size must have sizes of 64 or 128 for queries and keys, got \("):
        BlockLists.from_blocks(torch.ones(1, 1, 2, 2, dtype=torch.bool), size)


@pytest.mark.parametrize("size", [4, 24, 32, 128, 256])
@pytest.mark.parametrize("masked", ["", "k", "qk"])
def test_chosen_blocks_become_bits(size: int, masked: str) -> None:
    """Blocks that queries have chosen, some of which are none and some of which are past the end."""
    draw = torch.Generator().manual_seed(size)
    chosen = torch.randint(-1, 250 // size + 3, (2, 3, 150, 5), generator=draw)
    mask = torch.rand(2, 1, 150 if "q" in masked else 1, 250, generator=draw) < 0.7 if masked else None
    lists = BlockLists.from_chosen_blocks(chosen, size, 250, mask)
    exact = (chosen[..., None] == torch.arange(250) // size).any(3)
    exact = exact if mask is None else exact & mask
    assert torch.equal(lists.expanded(150, 250, 3), exact)
    # all of the first queries have chosen one block
    few = BlockLists.from_chosen_blocks(chosen[:, :, :1].expand(-1, -1, 150, -1) * 0, size, 250)
    assert few.kv_num_blocks.tolist() == [[[-(-min(size, 250) // 128)] * 2] * 3] * 2


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("mask_mod", "lists"), [(causal, (1, 1)), (documents, (1, 1)), (prefix, (1, 1)), (of_heads, (2, 4))])
def test_a_mask_mod_is_a_block_mask(mask_mod: Callable[..., Tensor], lists: tuple[int, int]) -> None:
    """The function itself, and a BlockMask that has it. What the function does not tell apart shares lists."""
    q, k, v = make_qkv(2, 250, 250, 4, 2, 32)
    mask = create_block_mask(mask_mod, 2, 4, 250, 250, device="cpu")
    expected = flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask, enable_gqa=True).transpose(1, 2)
    for given in (mask_mod, mask):
        torch.testing.assert_close(fa_serve.attention(q, k, v, block_mask=given), expected, rtol=1e-5, atol=1e-5)
    assert BlockLists.from_mask_mod(mask_mod, 2, 4, 250, 250).kv_num_blocks.shape[:2] == lists


@pytest.mark.parametrize("size", [(128, 128), (64, 128), (128, 64)], ids=str)
@pytest.mark.parametrize("mask_mod", [documents, prefix, of_heads])
def test_rows_of_blocks_are_evaluated_one_after_the_other(
    mask_mod: Callable[..., Tensor], size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more than two rows of blocks at once, of a length that is no multiple of them."""
    rows = []

    def watched(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return mask_mod(b, h, i, j)

    def counted(function: Any) -> Any:
        def evaluate(*indices: Tensor) -> Tensor:
            rows.append(len(indices[2]))
            return index_functions.over_grid(function)(*indices)

        return evaluate

    monkeypatch.setattr(block_lists, "_EVALUATED_ELEMENTS", 2 * 8 * size[0] * 256)
    monkeypatch.setattr(block_lists, "over_grid", counted)
    lists = BlockLists.from_mask_mod(watched, 2, 4, 250, 250, block_size=size)
    exact = create_mask(mask_mod, 2, 4, 250, 250, device="cpu")
    assert torch.equal(lists.expanded(250, 250, 4).expand(2, 4, -1, -1), exact)
    if mask_mod is of_heads:
        assert max(rows) == min(2 * size[0], 256)
    for first, last in ((0, 250), (size[0], 250)):
        assert torch.equal(lists.of_rows(first, last, 250, 4).expand(2, 4, -1, -1), exact[:, :, first:last])


@pytest.mark.parametrize("size", [32, (256, 192)], ids=str)
@pytest.mark.parametrize("mask_mod", [causal, of_heads])
def test_blocks_of_other_sizes_are_divided_anew(mask_mod: Callable[..., Tensor], size: Any) -> None:
    mask = create_block_mask(mask_mod, 2, 4, 250, 250, device="cpu", BLOCK_SIZE=size)
    lists = as_block_lists(mask, CallSizes(2, 4, 250, 250, torch.device("cpu")))
    assert lists.block_size == (128, 128)
    exact = create_mask(mask_mod, 2, 4, 250, 250, device="cpu")
    assert torch.equal(lists.expanded(250, 250, 4).expand(2, 4, -1, -1), exact)
    listed = BlockMask.from_kv_blocks(mask.kv_num_blocks, mask.kv_indices, BLOCK_SIZE=size, seq_lengths=(250, 250))
    found = as_block_lists(listed, CallSizes(2, 4, 250, 250, torch.device("cpu"))).expanded(250, 250, 4)
    assert torch.equal(found.expand(2, 4, -1, -1), partial_blocks(mask).expand(2, 4, -1, -1))


def partial_blocks(mask: BlockMask) -> Tensor:
    """bool (batch, heads, 250, 250): the elements of partial blocks."""
    rows, keys = mask.BLOCK_SIZE
    keep = torch.zeros(*mask.kv_indices.shape[:2], 250, 250, dtype=torch.bool)
    for batch, head, block in torch.ones_like(mask.kv_num_blocks).nonzero().tolist():
        for key_block in mask.kv_indices[batch, head, block, : mask.kv_num_blocks[batch, head, block]].tolist():
            keep[batch, head, block * rows : (block + 1) * rows, key_block * keys : (key_block + 1) * keys] = True
    return keep


@pytest.mark.parametrize("sizes", [(0, 2, 9, 9), (2, 2, 0, 9), (2, 2, 9, 0), (1, 1, 0, 0)], ids=str)
def test_a_mask_mod_of_nothing_has_empty_lists(sizes: tuple[int, int, int, int]) -> None:
    batch, heads, seqlen_q, seqlen_k = sizes
    lists = BlockLists.from_mask_mod(of_heads, *sizes)
    assert lists.kv_indices.shape == (batch, heads, -(-seqlen_q // 128), -(-seqlen_k // 128))


def test_a_function_is_evaluated_once_for_what_it_reads() -> None:
    """A BlockMask and a function: again only after the tensor that it reads has changed, or for other sizes."""
    q, k, v = make_qkv(1, 250, 250, 2, 2, 32)
    borders = torch.tensor([100])

    def behind(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j >= borders[b]

    sizes = CallSizes(1, 2, 250, 250, q.device)
    for given in (behind, create_block_mask(behind, 1, 1, 250, 250, device="cpu")):
        first = as_block_lists(given, sizes)
        assert as_block_lists(given, sizes) is first
        borders += 10
        assert as_block_lists(given, sizes) is not first
    assert as_block_lists(behind, sizes._replace(seqlen_q=100)) is not as_block_lists(behind, sizes)
    seen = fa_serve.attention(q, k, v, block_mask=behind)
    torch.testing.assert_close(seen, fa_serve.attention(q, k[:, 120:], v[:, 120:]), rtol=1e-5, atol=1e-5)


def test_a_function_without_a_name_is_evaluated() -> None:
    def near(width: int, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i - j).abs() < width

    mask = create_block_mask(partial(near, 5), 1, 1, 250, 250, device="cpu")
    found = as_block_lists(mask, CallSizes(1, 1, 250, 250, torch.device("cpu"))).expanded(250, 250, 1)
    assert torch.equal(found, create_mask(partial(near, 5), 1, 1, 250, 250, device="cpu"))


def test_a_function_that_torch_has_combined_is_evaluated_again() -> None:
    documents = torch.zeros(250, dtype=torch.int64)
    both = and_masks(causal, lambda b, h, i, j: documents[i] == documents[j])
    sizes = CallSizes(1, 1, 250, 250, torch.device("cpu"))
    for _ in range(2):
        assert torch.equal(as_block_lists(both, sizes).expanded(250, 250, 1), create_mask(both, 1, 1, 250, 250, device="cpu"))
        documents[128:] = 1


def test_a_block_mask_is_evaluated_again_when_its_lists_change() -> None:
    """Its bits lie in the order of its lists. Tensors of inference mode have no version, so theirs are not kept."""
    sizes = CallSizes(1, 1, 250, 250, torch.device("cpu"))
    mask = create_block_mask(causal, 1, 1, 250, 250, device="cpu")
    first = as_block_lists(mask, sizes)
    assert as_block_lists(mask, sizes) is first
    mask.kv_num_blocks[0, 0, 1] = 0
    assert as_block_lists(mask, sizes) is not first
    assert not as_block_lists(mask, sizes).expanded(250, 250, 1)[0, 0, 128:, 128:].any()
    with torch.inference_mode():
        unversioned = create_block_mask(causal, 1, 1, 250, 250, device="cpu")
        assert as_block_lists(unversioned, sizes) is not as_block_lists(unversioned, sizes)
        assert block_lists.version_of(as_block_lists(prefix, sizes)) is not None


def test_lists_are_made_before_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph reads them for as long as the process lives."""

    def last(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j > 100

    sizes = CallSizes(1, 1, 250, 250, torch.device("cpu"))
    made = as_block_lists(last, sizes)
    for module in (block_lists, kept_values):
        monkeypatch.setattr(module, "is_capturing", lambda device: True)
    assert as_block_lists(last, sizes) is made
    assert any(lists is made for lists, _ in block_lists._EVALUATED._captured.values())
    for given in (partial(last), create_block_mask(last, 1, 1, 250, 250, device="cpu")):
        with pytest.raises(ParameterError, match=r"while a CUDA graph captures the call.*: make the same call once before"):
            as_block_lists(given, sizes)


def test_expanded_lists_belong_to_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = BlockLists.from_mask_mod(causal, 1, 1, 250, 250)
    first = block_lists.expand_once(lists, 250, 250, 1)
    assert block_lists.expand_once(lists, 250, 250, 1) is first
    monkeypatch.setattr(block_lists, "stream_of", lambda device: 1)
    assert block_lists.expand_once(lists, 250, 250, 1) is not first


def test_gradients_are_those_of_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels differentiate masks. Layers share the mask that is made of their lists, until these change."""
    leaves = [x.requires_grad_() for x in make_qkv(2, 250, 250, 4, 2, 32)]
    lists = BlockLists.from_mask_mod(of_heads, 2, 4, 250, 250)
    mask = create_mask(of_heads, 2, 4, 250, 250, device="cpu")
    expected = torch.autograd.grad(fa_serve.attention(*leaves, mask=mask, causal=True).square().sum(), leaves)
    masks = []

    def run_dense(tensors: Any, options: Any) -> Any:
        masks.append(tensors.mask)
        return run(tensors, options)

    run = dispatch.run_dense
    monkeypatch.setattr(dispatch, "run_dense", run_dense)
    for _ in range(2):
        found = torch.autograd.grad(fa_serve.attention(*leaves, block_mask=lists, causal=True).square().sum(), leaves)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(masks[0], mask)
    assert masks[1] is masks[0]
    lists.kv_num_blocks.zero_()
    fa_serve.attention(*leaves, block_mask=lists, causal=True)
    assert masks[2] is not masks[0]
    with pytest.raises(ParameterError, match="mask must be None with block_mask"):
        dispatch._plan_expanded(AttentionTensors(*leaves, mask=mask, blocks=lists), None)  # type: ignore[arg-type]


def test_functions_are_refused_in_a_graph() -> None:
    sizes = CallSizes(1, 1, 128, 128, torch.device("cpu"))
    for given in (causal, create_block_mask(causal, None, None, 128, 128, device="cpu")):
        with pytest.raises(ParameterError, match="have no mask_mod while the call is compiled") as caught:
            as_block_lists(given, sizes, traced=True)
        assert "from_block_mask or from_mask_mod" in caught.value.rule


@pytest.mark.parametrize("given", [torch.ones(1), "causal", (torch.ones(1),) * 3], ids=["tensor", "text", "three"])
def test_other_forms_are_refused(given: Any) -> None:
    with pytest.raises(ParameterError, match=r"block_mask must be a fa_serve\.BlockLists"):
        as_block_lists(given, CallSizes(1, 1, 128, 128, torch.device("cpu")))
    if not isinstance(given, tuple):
        with pytest.raises(ParameterError, match=r"block_mask must be a fa_serve\.BlockLists"):
            BlockLists.from_block_mask(given)


def test_one_sequence_of_shared_lists_is_all_of_them() -> None:
    lists, _ = make_lists(BASE)
    assert lists.of_sequence(3) is lists
