"""The names in vLLM that the plugin needs (fa_serve/adapters.py checks them)."""

from __future__ import annotations

MODULES = ("vllm.v1.attention.backend", "vllm.v1.attention.backends.registry")
"""The modules that define the classes and functions in REQUIRED."""

REQUIRED: dict[str, frozenset[str]] = {
    name: frozenset(words.split())
    for name, words in {
        "AttentionBackend": "get_name get_impl_cls get_builder_cls supports_sink supports_head_size "
        "supports_compute_capability get_supported_kernel_block_sizes supported_dtypes "
        "supported_kv_cache_dtypes forward_includes_kv_cache_update",
        "AttentionCGSupport": "ALWAYS",
        "AttentionImpl.__init__": "num_heads head_size scale num_kv_heads alibi_slopes sliding_window kv_cache_dtype "
        "logits_soft_cap attn_type kv_sharing_target_layer_name",
        "AttentionImpl.forward": "layer query key value kv_cache attn_metadata output output_scale output_block_scale",
        "AttentionMetadataBuilder.__init__": "kv_cache_spec layer_names vllm_config device",
        "AttentionMetadataBuilder.build": "common_prefix_len common_attn_metadata fast_build",
        "CommonAttentionMetadata": "query_start_loc seq_lens num_actual_tokens max_query_len max_seq_len block_table_tensor "
        "slot_mapping causal",
        "MultipleOf": "base",
        "AttentionBackendEnum": "CUSTOM",
        "register_backend": "backend class_path",
    }.items()
}
