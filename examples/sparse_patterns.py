"""Block-sparse attention with fixed patterns: local and global blocks, and the butterfly of FlashAttention.

    python examples/sparse_patterns.py

A pattern says which key blocks a block of queries attends to. The local and global pattern (Longformer, BigBird) has a window
of blocks and a few blocks that everyone sees. The butterfly is the pattern of FlashAttention's block-sparse experiments
(section 3.3; Pixelated Butterfly, Chen et al. 2021): block i attends to the blocks whose number differs from i in one bit, so
log n blocks connect every block with every other one in log n layers. Both are causal here. The script compares each pattern
with the same mask of elements, and uses a GPU if there is one.
"""

import argparse

import torch

import fa_serve

HEADS = 4
KV_HEADS = 2
DIM = 64
BLOCK = 64
SEQLEN = 2000  # not a multiple of the block: the last block of queries and keys is cut


def local_and_global(blocks: int, window: int = 3, first: int = 1) -> torch.Tensor:
    """bool (blocks, blocks): each block of queries sees the `window` blocks up to its own and the `first` blocks."""
    i = torch.arange(blocks)[:, None]
    j = torch.arange(blocks)[None, :]
    return (j <= i) & ((i - j < window) | (j < first))


def butterfly(blocks: int) -> torch.Tensor:
    """bool (blocks, blocks): block i sees itself and the earlier blocks whose number differs from i in one bit."""
    i = torch.arange(blocks)[:, None]
    j = torch.arange(blocks)[None, :]
    differing = i ^ j
    return (j <= i) & ((differing & (differing - 1)) == 0)


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q = torch.randn(1, SEQLEN, HEADS, DIM, device=device, dtype=dtype)
    k, v = (torch.randn(1, SEQLEN, KV_HEADS, DIM, device=device, dtype=dtype) for _ in range(2))
    blocks = -(-SEQLEN // BLOCK)
    causal = blocks * (blocks + 1) // 2
    for name, keep in (("local and global", local_and_global(blocks)), ("butterfly", butterfly(blocks))):
        keep = keep.to(device)
        lists = fa_serve.BlockLists.from_blocks(keep[None, None], (BLOCK, BLOCK))
        # causality masks the blocks on the diagonal, which are listed like the others
        out = fa_serve.attention(q, k, v, causal=True, block_mask=lists)

        mask = keep.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[None, None, :SEQLEN, :SEQLEN]
        expected = fa_serve.attention(q, k, v, causal=True, mask=mask)
        difference = (out.float() - expected.float()).abs().max().item()
        kept = int(keep.sum())
        print(f"{name}: {kept} of {causal} causal blocks, {kept / causal:.0%}; differs from the dense mask by {difference:.1e}")
        assert difference < 2e-2


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
