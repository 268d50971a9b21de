"""The public functions of token-sparse attention: the choice of keys by an indexer, and attention to them."""

from __future__ import annotations

from torch import Tensor

from fa_serve.ops.select import select_ops


def select_slots(
    q: Tensor,
    keys: Tensor,
    weights: Tensor,
    *,
    block_table: Tensor,
    seqused_k: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    topk: int,
) -> Tensor:
    """Choose the keys that each packed query attends to: of the keys of its sequence up to its own, the `topk` with the
    best scores.

        score(t, s) = sum over heads h of weights(t, h) * relu(q(t, h) . keys(s))

    This is the indexer of DeepSeek Sparse Attention (DeepSeek-V3.2, arXiv:2512.02556, equation 1). A positive scale of the
    products can be multiplied into the weights. On a GPU nothing is read back, so the call can be part of a CUDA graph.

    q:            (total, heads, dim), packed by cu_seqlens_q (batch + 1,), int32
    keys:         (num_pages, page_size, 1, dim), a paged cache of q's dtype that already holds the keys of this call's queries
    weights:      (total, heads), any floating dtype
    block_table:  (batch, max_pages), int32: the pages of each sequence in order; entries past seqused_k are never read
    seqused_k:    (batch,), int32: keys in the cache, including those of this call's queries
    max_seqlen_*: upper bounds of the lengths, host integers

    Returns (total, min(topk, max_seqlen_k)) int32: the slots of the chosen keys in any order, page * page_size + position in
    the page, and -1 where there are fewer keys. Of equal scores any may be chosen. Rows past the last sequence are -1.
    """
    return select_ops(q.device).select_slots(
        q, keys, weights, block_table, seqused_k, cu_seqlens_q, max_seqlen_q, max_seqlen_k, topk
    )


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    *,
    softmax_scale: float,
    sinks: Tensor | None = None,
    num_splits: int = 0,
) -> Tensor:
    """Attention of each query to the keys in its list of slots (token-sparse attention, DeepSeek-V3.2, arXiv:2512.02556,
    equation 2).

    The list alone decides what a query sees: there is no causal mask and no sequence length, and a query need not belong to a
    sequence. All heads of a query have the same list.

    q:          (total, num_heads, head_dim), float16, bfloat16 or float32
    k:          (num_pages, page_size, num_kv_heads, head_dim), q's dtype, contiguous in the last dimension, otherwise with any
                strides. Keys without pages are passed as a view with one page
    v:          like k, with head_dim_v. If v is the view k[..., :head_dim_v], as in latent attention (MLA), the kernel reads
                each key once
    slots:      (total, topk), int32: page * page_size + position in the page, each at most once in a row; -1 is no key
    sinks:      (num_heads,): one more logit per head in the denominator of the softmax, without a value
    num_splits: into how many parts each list is divided: n > 0 is exactly n (1 does not divide it), and 0 lets the number of
                queries decide

    Returns (total, num_heads, head_dim_v) in q's dtype; a query without keys returns 0. PyTorch's form has gradients.
    """
    return select_ops(q.device).sparse_attention(q, k, v, slots, sinks, softmax_scale, num_splits)
