"""What the plugin needs of vLLM, by name: vLLM's interface for attention changes between releases.

A signature is the name of a class, method or function, and the names of its parameters, fields or members. `installed` reads
them from the imported vLLM; a test reads them from the sources of other releases.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from enum import EnumMeta
from importlib import import_module
from typing import Any

MODULES = ("vllm.v1.attention.backend", "vllm.v1.attention.backends.registry")
"""The modules that define what REQUIRED names."""

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


def missing(signatures: Mapping[str, frozenset[str]]) -> list[str]:
    """What REQUIRED names and `signatures` lack, such as "AttentionImpl.forward(output)"."""
    absent = []
    for name, needed in REQUIRED.items():
        lacks = sorted(needed - signatures.get(name, frozenset()))
        if lacks:
            absent.append(f"{name}({', '.join(lacks)})")
    return absent


def installed() -> dict[str, frozenset[str]]:
    """The signatures of the installed vLLM that REQUIRED names."""
    found = {}
    for module in map(import_module, MODULES):
        for name in REQUIRED:
            value: Any = module
            for part in name.split("."):
                value = None if value is None else getattr(value, part, None)
            if value is not None:
                found[name] = _names(value)
    return found


def _names(value: Any) -> frozenset[str]:
    if isinstance(value, EnumMeta):
        return frozenset(value.__members__)
    if dataclasses.is_dataclass(value):
        return frozenset(field.name for field in dataclasses.fields(value))
    if isinstance(value, type):
        return frozenset({*dir(value), *inspect.signature(value).parameters})
    return frozenset(inspect.signature(value).parameters)
