"""Attention on plain tensors: packed sequences, and then the same keys in a paged cache.

    python examples/packed_attention.py

Three sequences of unequal length lie end to end in one tensor, without padding. Then their keys and values go into pages in an
arbitrary order, as in a server, and the last token of each sequence attends to them. The script uses a GPU if there is one.
"""

import argparse

import torch

import fa_serve

HEADS = 8
KV_HEADS = 2
DIM = 64
PAGE = 16


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    lengths = [37, 5, 90]
    total = sum(lengths)
    q = torch.randn(total, HEADS, DIM, device=device, dtype=dtype)
    k, v = (torch.randn(total, KV_HEADS, DIM, device=device, dtype=dtype) for _ in range(2))

    # packed: token i of sequence b is row cu_seqlens[b] + i
    starts = [0, 37, 42, 132]
    cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=device)
    out = fa_serve.attention_varlen(
        q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=90, max_seqlen_k=90, causal=True
    )
    print(f"packed {lengths}: out {tuple(out.shape)}")

    # paged: sequence b has the pages block_table[b], in that order
    block_table = torch.tensor([[9, 0, 4, 0, 0, 0], [2, 0, 0, 0, 0, 0], [7, 1, 8, 3, 5, 6]], dtype=torch.int32, device=device)
    k_cache, v_cache = (torch.zeros(10, PAGE, KV_HEADS, DIM, device=device, dtype=dtype) for _ in range(2))
    slots = [int(block_table[b, i // PAGE]) * PAGE + i % PAGE for b, n in enumerate(lengths) for i in range(n)]
    fa_serve.store_kv(k, v, k_cache, v_cache, torch.tensor(slots, device=device))

    last = torch.tensor([end - 1 for end in starts[1:]], device=device)
    decoded = fa_serve.attention_paged(
        q[last],
        k_cache,
        v_cache,
        block_table=block_table,
        seqused_k=torch.tensor(lengths, dtype=torch.int32, device=device),
        cu_seqlens_q=torch.arange(4, dtype=torch.int32, device=device),
        max_seqlen_q=1,
    )
    difference = (decoded.float() - out[last].float()).abs().max().item()
    print(f"paged: the last token of each sequence differs from the packed result by {difference:.1e}")
    assert difference < 2e-2


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
