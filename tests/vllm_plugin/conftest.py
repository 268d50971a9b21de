"""A stand-in for vLLM: the classes that the plugin derives from and the registry, with the signatures of its releases."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import pytest
import torch


class AttentionBackend:
    supported_dtypes: Any = ()
    supported_kv_cache_dtypes: Any = ()
    forward_includes_kv_cache_update = True

    def get_name(self): ...
    def get_impl_cls(self): ...
    def get_builder_cls(self): ...
    def supports_sink(self): ...
    def supports_head_size(self): ...
    def supports_compute_capability(self): ...
    def get_supported_kernel_block_sizes(self): ...


class AttentionCGSupport(Enum):
    ALWAYS = 3


class AttentionImpl:
    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads,
        alibi_slopes,
        sliding_window,
        kv_cache_dtype,
        logits_soft_cap,
        attn_type,
        kv_sharing_target_layer_name,
    ): ...

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ): ...


class AttentionMetadataBuilder:
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.device = device

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True


class MultipleOf:
    def __init__(self, base):
        self.base = base


class AttentionBackendEnum(Enum):
    CUSTOM = None


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The package as `import vllm` finds it; `vllm.registered` holds what was registered."""
    names = ("vllm", "vllm.envs", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backend", "vllm.v1.attention.backends")
    registry_name = "vllm.v1.attention.backends.registry"
    modules = {name: ModuleType(name) for name in (*names, registry_name)}
    package = modules["vllm"]
    package.__version__ = "0.99.0"
    package.registered = {}
    package.envs = modules["vllm.envs"]
    package.envs.VLLM_BATCH_INVARIANT = False
    package.backend = modules["vllm.v1.attention.backend"]
    classes = (
        AttentionBackend,
        AttentionCGSupport,
        AttentionImpl,
        AttentionMetadataBuilder,
        CommonAttentionMetadata,
        MultipleOf,
    )
    for value in classes:
        setattr(package.backend, value.__name__, value)

    def register_backend(backend, class_path=None, is_mamba=False):
        package.registered[backend] = class_path

    modules[registry_name].register_backend = register_backend
    modules[registry_name].AttentionBackendEnum = AttentionBackendEnum
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield package
    sys.modules.pop("fa_serve.vllm.paged_backend", None)
