"""A document mask: packed documents in one row that must not see each other, from a mask_mod of FlexAttention.

    python examples/document_mask.py

Training data is packed: several documents lie end to end in one row. FlexAttention describes who sees whom as a Python
function. fa_serve's kernels cannot include it, so `BlockLists.from_block_mask` evaluates it once, in the blocks that are partly
visible, and keeps bits. The lists then serve every layer and step. The script checks the result against one call for each
document, and uses a GPU if there is one.
"""

import argparse

import torch
from torch.nn.attention.flex_attention import create_block_mask

import fa_serve

HEADS = 4
KV_HEADS = 2
DIM = 64
DOCUMENTS = [700, 90, 410, 37, 463]


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    seqlen = sum(DOCUMENTS)
    document = torch.repeat_interleave(torch.arange(len(DOCUMENTS)), torch.tensor(DOCUMENTS)).to(device)
    q = torch.randn(1, seqlen, HEADS, DIM, device=device, dtype=dtype)
    k, v = (torch.randn(1, seqlen, KV_HEADS, DIM, device=device, dtype=dtype) for _ in range(2))

    def same_document(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return (document[i] == document[j]) & (i >= j)

    block_mask = create_block_mask(same_document, None, None, seqlen, seqlen, device=device)
    lists = fa_serve.BlockLists.from_block_mask(block_mask)
    out = fa_serve.attention(q, k, v, block_mask=lists)

    expected = torch.cat(
        [
            fa_serve.attention(*parts, causal=True)
            for parts in zip(*(x.split(DOCUMENTS, dim=1) for x in (q, k, v)), strict=True)
        ],
        dim=1,
    )
    difference = (out.float() - expected.float()).abs().max().item()
    partial, full = (int(x.sum()) for x in (lists.kv_num_blocks, lists.full_kv_num_blocks))
    blocks = lists.kv_num_blocks.shape[2] ** 2
    print(f"{len(DOCUMENTS)} documents, {seqlen} tokens: {partial} partial and {full} full of {blocks} blocks")
    print(f"differs from one call for each document by {difference:.1e}")
    assert difference < 2e-2


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
