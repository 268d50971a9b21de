"""Small correct calls of the public functions, each a function and its arguments. Tests change one argument at a time."""

from __future__ import annotations

import torch

import fa_serve
from fa_serve.testing import cu_seqlens, make_paged, make_qkv

Q, K, V = make_qkv(2, 5, 7, 4, 2, 16)
FLAT = {"q": Q.flatten(0, 1), "k": K.flatten(0, 1), "v": V.flatten(0, 1)}
CU = {"cu_seqlens_q": cu_seqlens([5, 5]), "cu_seqlens_k": cu_seqlens([7, 7]), "max_seqlen_q": 5, "max_seqlen_k": 7}
K_CACHE, V_CACHE, TABLE, USED = make_paged(list(K), list(V), 4)
PAGED = (
    fa_serve.attention_paged,
    {
        "q": FLAT["q"],
        "k_cache": K_CACHE,
        "v_cache": V_CACHE,
        "block_table": TABLE,
        "seqused_k": USED,
        "cu_seqlens_q": CU["cu_seqlens_q"],
        "max_seqlen_q": 5,
    },
)
ROWS = {"k": FLAT["k"][:3], "v": FLAT["v"][:3]}
STORE = (fa_serve.store_kv, ROWS | {"k_cache": K_CACHE, "v_cache": V_CACHE, "slot_mapping": torch.tensor([0, -1, 9])})
DENSE = (fa_serve.attention, {"q": Q, "k": K, "v": V})
VARLEN = (fa_serve.attention_varlen, FLAT | CU)
