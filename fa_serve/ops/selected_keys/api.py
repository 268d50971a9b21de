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
    """Choose the keys that each packed query attends to: the `topk` keys of its sequence up to its own with the best scores.

        score(t, s) = sum over heads h of weights(t, h) * relu(q(t, h) . keys(s))

    This is the indexer of DeepSeek Sparse Attention (DeepSeek-V3.2, arXiv:2512.02556, equation 1). A positive scale of the
    products may be a factor of the weights. On a GPU nothing is read back, so the call can be part of a CUDA graph.

    q:            (total, heads, dim), packed by cu_seqlens_q (batch + 1,), int32
    keys:         (num_pages, page_size, 1, dim), a paged cache of q's dtype that holds the keys of this call's queries already
    weights:      (total, heads), any floating dtype
    block_table:  (batch, max_pages), int32: the pages of each sequence in order; entries past seqused_k are never read
    seqused_k:    (batch,), int32: keys in the cache, including those of this call's queries
    max_seqlen_*: upper bounds of the lengths, host integers

    Returns (total, min(topk, max_seqlen_k)) int32: the slots of the chosen keys in any order, page * page_size + position in
    the page, and -1 where there are fewer keys. Of equal scores any may be chosen. Rows behind the last sequence are -1.
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

    A list says everything about what a query sees: there is neither causality nor a length of a sequence, and a query needs not
    be in a sequence. All heads of a query have the same list.

    q:          (total, num_heads, head_dim), float16, bfloat16 or float32
    k:          (num_pages, page_size, num_kv_heads, head_dim), q's dtype, any strides but a contiguous last dimension. Keys
                without pages are a view with one page
    v:          the same with head_dim_v. With the view v = k[..., :head_dim_v], as in latent attention (MLA), the kernel reads
                each key once
    slots:      (total, topk), int32: page * page_size + position in the page, each at most once in a row; -1 is no key
    sinks:      (num_heads,): one more logit per head in the denominator of the softmax, without a value
    num_splits: 0 lets the number of queries decide, 1 none, n > 1 exactly n parts of each list

    Returns (total, num_heads, head_dim_v) in q's dtype; a query without keys returns 0. PyTorch's form has gradients.
    """
    return select_ops(q.device).sparse_attention(q, k, v, slots, sinks, softmax_scale, num_splits)
