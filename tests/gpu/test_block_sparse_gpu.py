"""Block-sparse calls on the GPU: the cases of the interpreter in 16 bits, longer ones beside FlexAttention, and CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from block_sparse_cases import BASE, CASES, DECODE, SparseCase, check_sparse
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import fa_serve
from fa_serve import ParameterError
from fa_serve.testing import make_qkv


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case: SparseCase, dtype: torch.dtype) -> None:
    if case.float8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("reads float8 from compute capability 8.9 on")
    check_sparse(case, "triton", dtype, "cuda")


@pytest.mark.parametrize("size", [(128, 128), (64, 128), (128, 64)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_wide_heads_and_long_lists(head_dim: int, size: tuple[int, int]) -> None:
    """Many tiles for each list, so that every stage of the pipeline is used again."""
    case = replace(BASE, lengths_q=(777,), lengths_k=(2100,), head_dim=head_dim, block_size=size, causal=True, bits=True)
    for list_heads in ("one", "kv", "q"):
        check_sparse(replace(case, list_heads=list_heads), "auto", torch.bfloat16, "cuda")
    check_sparse(
        replace(DECODE, head_dim=head_dim, lengths_k=(9000, 70, 0, 2100), block_size=size), "auto", torch.bfloat16, "cuda"
    )


def test_a_document_mask_as_flex_attention_computes_it() -> None:
    q, k, v = make_qkv(1, 4000, 4000, 8, 2, 128, dtype=torch.bfloat16, device="cuda")
    document = torch.arange(4000, device="cuda") // 700

    def same_document(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return (document[i] == document[j]) & (i >= j)

    mask = create_block_mask(same_document, None, None, 4000, 4000, device="cuda")
    out = fa_serve.attention(q, k, v, block_mask=fa_serve.BlockLists.from_block_mask(mask))
    flex = torch.compile(flex_attention)
    theirs = flex(*(x.transpose(1, 2).contiguous() for x in (q, k, v)), block_mask=mask, enable_gqa=True).transpose(1, 2)
    assert (out.float() - theirs.float()).abs().max() <= 2 * 2**-8 * theirs.abs().max()


def test_functions_of_flex_attention() -> None:
    """A mask_mod, a BlockMask that has it, and a score_mod, which is ALiBi for what the mask shows."""
    q, k, v = make_qkv(1, 2000, 2000, 8, 2, 128, dtype=torch.bfloat16, device="cuda")
    document = torch.arange(2000, device="cuda") // 700
    slopes = 2.0 ** -torch.arange(1, 9, device="cuda")

    def same_document(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return (document[i] == document[j]) & (i >= j)

    def alibi(s: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return s - slopes[h] * (i - j)

    block_mask = create_block_mask(same_document, None, None, 2000, 2000, device="cuda")
    mask = (document[:, None] == document)[None, None]
    for score_mod, bias in ((None, None), (alibi, slopes)):
        exact = fa_serve.attention(q, k, v, mask=mask, causal=True, alibi_slopes=bias, backend="sdpa")
        for given in (block_mask, same_document):
            out = fa_serve.attention(q, k, v, block_mask=given, score_mod=score_mod)
            assert (out.float() - exact.float()).abs().max() <= 2 * 2**-8 * exact.abs().max()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_of_lists_are_those_of_a_mask(head_dim: int) -> None:
    """Both layers share the mask that the lists become."""
    document = torch.arange(777, device="cuda") // 300

    def same_document(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return (document[i] == document[j]) & (i >= j - 40)

    mask = (document[:, None] == document) & (
        torch.arange(777, device="cuda")[:, None] >= torch.arange(777, device="cuda") - 40
    )
    found = []
    for given in ({"block_mask": same_document}, {"block_mask": same_document}, {"mask": mask[None, None]}):
        leaves = [x.requires_grad_() for x in make_qkv(2, 777, 777, 4, 2, head_dim, dtype=torch.float16, device="cuda")]
        out = fa_serve.attention(*leaves, **given)
        out.backward(torch.linspace(-1, 1, out.numel(), device="cuda").view(out.shape).half())
        found.append([out, *(x.grad for x in leaves)])
    for ours, again, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)
        torch.testing.assert_close(again, theirs, rtol=0.02, atol=0.02)


def test_lists_may_change_below_a_captured_graph() -> None:
    """Numbers and indices are read on the device at each replay."""
    q, k, v = make_qkv(2, 1, 1024, 8, 2, 128, dtype=torch.bfloat16, device="cuda")
    keep = torch.rand(2, 2, 1, 16, device="cuda") < 0.5
    lists = fa_serve.BlockLists.from_blocks(keep, (64, 64))
    fa_serve.attention(q, k, v, block_mask=lists)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fa_serve.attention(q, k, v, block_mask=lists)
    other = fa_serve.BlockLists.from_blocks(~keep, (64, 64))
    lists.kv_num_blocks.copy_(other.kv_num_blocks)
    lists.kv_indices.copy_(other.kv_indices)
    graph.replay()
    assert torch.equal(out, fa_serve.attention(q, k, v, block_mask=other))


def test_a_graph_keeps_what_functions_became() -> None:
    """After the functions are gone. A first call in a capture is refused, unless it has nothing to wait for, such as a cap."""
    q, k, v = make_qkv(1, 500, 500, 8, 2, 128, dtype=torch.bfloat16, device="cuda")
    slopes = 2.0 ** -torch.arange(1, 9, device="cuda")
    border = torch.tensor(100, device="cuda")

    def behind(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return (j >= border) & (i >= j)

    def alibi(s: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return s - slopes[h] * (i - j)

    def capped(s: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return 20 * torch.tanh(s / 20)

    calls = [{"score_mod": alibi, "block_mask": behind}, {"score_mod": alibi, "causal": True}, {"score_mod": capped}]
    expected = [fa_serve.attention(q, k, v, **call) for call in calls[:2]]  # type: ignore[call-overload]
    expected.append(fa_serve.attention(q, k, v, softcap=20.0))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [fa_serve.attention(q, k, v, **call) for call in calls]  # type: ignore[call-overload]
        for refused in ({"block_mask": lambda b, h, i, j: i >= j}, {"score_mod": lambda s, b, h, i, j: s + slopes[h] * j}):
            with pytest.raises(ParameterError, match="CUDA graph captures the call"):
                fa_serve.attention(q, k, v, **refused)  # type: ignore[call-overload]
    del calls, behind, alibi, capped
    others = [torch.full((1 << 22,), -1, dtype=torch.int32, device="cuda") for _ in range(8)]
    for out in found:
        out.zero_()
    graph.replay()
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    assert len(others) == 8
