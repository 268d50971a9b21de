"""The names in SGLang that the plugin needs (fa_serve/adapters.py checks them)."""

from __future__ import annotations

MODULES = (
    "sglang.srt.layers.attention.attention_registry",
    "sglang.srt.layers.attention.base_attn_backend",
    "sglang.srt.layers.radix_attention",
    "sglang.srt.mem_cache.memory_pool",
    "sglang.srt.model_executor.forward_batch_info",
)
"""The modules that define the classes and functions in REQUIRED."""

REQUIRED: dict[str, frozenset[str]] = {
    name: frozenset(words.split())
    for name, words in {
        "register_attention_backend": "name",
        "AttentionBackend": "forward init_forward_metadata",
        "AttentionBackend.init_forward_metadata": "forward_batch",
        "AttentionBackend.init_forward_metadata_out_graph": "forward_batch in_capture",
        "AttentionBackend.init_cuda_graph_state": "max_bs max_num_tokens",
        "AttentionBackend.get_cuda_graph_seq_len_fill_value": "",
        "AttentionBackend.forward_decode": "q k v layer forward_batch save_kv_cache",
        "AttentionBackend.forward_extend": "q k v layer forward_batch save_kv_cache",
        "AttentionType": "DECODER",
        "RadixAttention.__init__": "num_heads head_dim scaling num_kv_heads layer_id logit_cap v_head_dim sliding_window_size "
        "is_cross_attention attn_type",
        "KVWriteLoc": "loc",
        "MHATokenToKVPool.set_kv_buffer": "layer loc_info cache_k cache_v k_scale v_scale",
        "MHATokenToKVPool.get_key_buffer": "layer_id",
        "MHATokenToKVPool.get_value_buffer": "layer_id",
        "ForwardBatch": "forward_mode batch_size req_pool_indices seq_lens out_cache_loc seq_lens_cpu extend_seq_lens "
        "extend_seq_lens_cpu spec_info",
    }.items()
}
