"""A stand-in for SGLang: what the plugin derives from, its pool of keys and values, and the registry, as in its releases."""

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
    forward_metadata: Any = None

    def init_forward_metadata(self, forward_batch): ...
    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False): ...
    def init_cuda_graph_state(self, max_bs, max_num_tokens): ...
    def get_cuda_graph_seq_len_fill_value(self): ...
    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True): ...
    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True): ...

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **others):
        method = self.forward_decode if forward_batch.forward_mode.is_decode() else self.forward_extend
        return method(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **others)


class AttentionType(Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class RadixAttention:
    def __init__(
        self,
        num_heads,
        head_dim,
        scaling,
        num_kv_heads,
        layer_id,
        logit_cap=0.0,
        v_head_dim=-1,
        sliding_window_size=-1,
        is_cross_attention=False,
        attn_type=AttentionType.DECODER,
    ):
        self.tp_q_head_num = num_heads
        self.tp_k_head_num = num_kv_heads
        self.qk_head_dim = head_dim
        self.v_head_dim = head_dim if v_head_dim == -1 else v_head_dim
        self.scaling = scaling
        self.layer_id = layer_id
        self.logit_cap = logit_cap
        self.sliding_window_size = sliding_window_size
        self.is_cross_attention = is_cross_attention
        self.attn_type = attn_type
        self.k_scale = self.v_scale = None


@dataclass
class KVWriteLoc:
    loc: torch.Tensor


class MHATokenToKVPool:
    """Slots from 0 on; the first page is never handed out."""

    def __init__(self, size, page_size, dtype, heads, dim, dim_v):
        self.dtype = dtype
        self.k_buffer = [torch.full((size + page_size, heads, dim), float("nan")).to(dtype) for _ in range(2)]
        self.v_buffer = [torch.full((size + page_size, heads, dim_v), float("nan")).to(dtype) for _ in range(2)]

    def get_key_buffer(self, layer_id):
        return self.k_buffer[layer_id]

    def get_value_buffer(self, layer_id):
        return self.v_buffer[layer_id]

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, k_scale=None, v_scale=None):
        if cache_k.dtype != self.dtype:
            cache_k = cache_k / (1.0 if k_scale is None else k_scale)
            cache_v = cache_v / (1.0 if v_scale is None else v_scale)
        self.k_buffer[layer.layer_id][loc_info.loc] = cache_k.to(self.dtype)
        self.v_buffer[layer.layer_id][loc_info.loc] = cache_v.to(self.dtype)


class ForwardMode(Enum):
    EXTEND = 1
    DECODE = 2

    def is_decode(self):
        return self is ForwardMode.DECODE

    def is_decode_or_idle(self):
        return self is ForwardMode.DECODE


@dataclass
class ForwardBatch:
    forward_mode: ForwardMode
    batch_size: int
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    out_cache_loc: torch.Tensor
    seq_lens_cpu: torch.Tensor | None = None
    extend_seq_lens: torch.Tensor | None = None
    extend_seq_lens_cpu: list[int] | None = None
    spec_info: Any = None


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The package as `import sglang` finds it. `registered` holds what was registered, `choices` the values of the flag."""
    contents: dict[str, tuple[Any, ...]] = {
        "sglang.srt.layers.attention.base_attn_backend": (AttentionBackend,),
        "sglang.srt.layers.radix_attention": (AttentionType, RadixAttention),
        "sglang.srt.mem_cache.memory_pool": (KVWriteLoc, MHATokenToKVPool),
        "sglang.srt.model_executor.forward_batch_info": (ForwardBatch, ForwardMode),
        "sglang.srt.layers.attention.attention_registry": (),
        "sglang.srt.server_args": (),
    }
    modules = {name: ModuleType(name) for path in contents for name in _prefixes(path)}
    for path, values in contents.items():
        for value in values:
            setattr(modules[path], value.__name__, value)
    package = modules["sglang"]
    package.__version__ = "0.9.9"
    package.registered = {}
    package.choices = modules["sglang.srt.server_args"].ATTENTION_BACKEND_CHOICES = ["triton"]
    package.pools = modules["sglang.srt.mem_cache.memory_pool"]

    def register_attention_backend(name):
        def decorate(make):
            package.registered[name] = make
            return make

        return decorate

    modules["sglang.srt.layers.attention.attention_registry"].register_attention_backend = register_attention_backend
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield package
    sys.modules.pop("fa_serve.sglang.radix_backend", None)


def _prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]
