"""Attention to keys that a query has chosen: token-sparse attention (DeepSeek-V3.2, arXiv:2512.02556, section 2.1).

A small network, the indexer, scores the keys up to a query's own, and attention reads the `topk` best ones:

    score(t, s) = sum over heads h of w(t, h) * relu(q(t, h) . k(s))

    scores.py      the scores of the keys in a paged cache, and the slots of the best ones
    attention.py   attention of each query to the keys in its slots
    fallback.py    both in plain PyTorch, on any device

A slot is a place in a paged cache, as in the `slot_mapping` of `fa_serve.store_kv`, so a query needs neither its sequence nor
its position to find its keys. Left out: how the queries, keys and weights of an indexer are computed, which the model's own
module does (fa_serve.hf.adapter.indexers), and products in float8.
"""
