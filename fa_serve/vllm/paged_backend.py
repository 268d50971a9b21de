"""The attention backend that vLLM calls: `fa_serve.store_kv` writes the cache, `fa_serve.attention_paged` reads it.

vLLM hands over packed queries, a table of pages and lengths on the device, which are the arguments of `attention_paged`. Two
layouts of its cache exist: (pages, 2, page_size, kv_heads, dim) in releases that ask the backend for the shape, and (pages,
kv_heads, page_size, 2 * dim) in later ones. Both are read in place.

Lengths on the host are rounded up to powers of two, so that steps of different lengths share a plan. Nothing is read from the
device, so a step with any mixture of prompts and single tokens can be captured in a CUDA graph. With VLLM_BATCH_INVARIANT, only
a sequence's own length decides where its keys are split, so the bits of its result do not depend on the other sequences of a
step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import vllm.envs
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    MultipleOf,
)

from fa_serve import api
from fa_serve.adapters import rounded_up
from fa_serve.spec import UnsupportedError

NO_OPTION = (None, False, 0, -1)
"""Values with which an unknown option is off."""
INVARIANT_SPLITS = 4
"""Splits of each sequence's keys with VLLM_BATCH_INVARIANT: a fixed number, so that other sequences do not decide it."""


class PagedBackend(AttentionBackend):  # type: ignore[misc]
    """Answers the questions that vLLM asks before it chooses the backend."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]
    forward_includes_kv_cache_update = False
    accept_output_buffer = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[PagedAttention]:
        return PagedAttention

    @staticmethod
    def get_builder_cls() -> type[PagedBuilder]:
        return PagedBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= 256

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= 8)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True


@dataclass
class PagedMetadata:
    """One step, for all layers that share a table of pages; lengths on the host are upper bounds."""

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool


class PagedBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Turns vLLM's description of a step into PagedMetadata; tensors are passed on, so a captured graph sees new values."""

    _cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> PagedMetadata:
        step = common_attn_metadata
        if isinstance(step.causal, Tensor):
            raise UnsupportedError("fa_serve computes a whole step either causally or not, but vLLM asks for both in one step")
        return PagedMetadata(
            num_actual_tokens=step.num_actual_tokens,
            max_query_len=rounded_up(step.max_query_len),
            max_seq_len=rounded_up(step.max_seq_len),
            query_start_loc=step.query_start_loc,
            seq_lens=step.seq_lens,
            block_table=step.block_table_tensor,
            slot_mapping=step.slot_mapping,
            causal=step.causal,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> PagedMetadata:
        metadata = self.build(0, common_attn_metadata)
        # a capture runs the kernels once, which would take long for sequences of the greatest length
        metadata.seq_lens.fill_(1)
        return metadata

    def update_block_table(self, metadata: PagedMetadata, blk_table: Tensor, slot_mapping: Tensor) -> PagedMetadata:
        words = {**vars(metadata), "block_table": blk_table, "slot_mapping": slot_mapping}
        return PagedMetadata(**words)


class PagedAttention(AttentionImpl):  # type: ignore[misc]
    """The attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        unknown = {name: value for name, value in others.items() if not _is_off(value)}
        if alibi_slopes is not None:
            unknown["alibi_slopes"] = alibi_slopes
        if getattr(attn_type, "value", attn_type) != "decoder":
            unknown["attn_type"] = attn_type
        if unknown:
            names = ", ".join(sorted(unknown))
            raise UnsupportedError(f"fa_serve's backend for vLLM does not support {names}; choose another backend")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.window_size = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        self.softcap = logits_soft_cap or 0.0
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.num_splits = INVARIANT_SPLITS if vllm.envs.VLLM_BATCH_INVARIANT else 0

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Write new keys and values (tokens, kv_heads, dim); there may be more rows than slots, which are padding."""
        if self.kv_sharing_target_layer_name is not None or key is None or value is None:
            return
        k_cache, v_cache = self._caches(kv_cache)
        count = slot_mapping.shape[0]
        api.store_kv(key[:count], value[:count], k_cache, v_cache, slot_mapping, **self._descales(layer))

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PagedMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend to the cache: query (tokens, heads, dim), written to `output` of the same shape, which is returned."""
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError(
                "fa_serve's backend for vLLM does not quantise its output; turn off vLLM's fusion of attention and quantisation"
            )
        if attn_metadata is None:
            return output.fill_(0)  # vLLM runs the model to measure its memory
        k_cache, v_cache = self._caches(kv_cache)
        count = attn_metadata.num_actual_tokens
        table = attn_metadata.block_table
        api.attention_paged(
            query[:count],
            k_cache,
            v_cache,
            block_table=table,
            seqused_k=attn_metadata.seq_lens,
            cu_seqlens_q=attn_metadata.query_start_loc,
            max_seqlen_q=attn_metadata.max_query_len,
            max_seqlen_k=min(attn_metadata.max_seq_len, table.shape[1] * k_cache.shape[1]),
            causal=attn_metadata.causal,
            softmax_scale=self.scale,
            window_size=self.window_size,
            softcap=self.softcap,
            sinks=self.sinks,
            num_splits=self.num_splits,
            out=output.view(-1, self.num_heads, self.head_size)[:count],
            **self._descales(layer),
        )
        return output

    def _caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Views of keys and of values, (pages, page_size, kv_heads, dim). vLLM passes a float8 cache as bytes."""
        if kv_cache.dim() == 5:
            k_cache, v_cache = kv_cache.unbind(1)
        else:
            kv_cache = kv_cache.transpose(1, 2)
            k_cache = kv_cache[..., : self.head_size]
            v_cache = kv_cache[..., self.head_size :]
        if self.kv_cache_dtype.startswith("fp8"):
            return k_cache.view(torch.float8_e4m3fn), v_cache.view(torch.float8_e4m3fn)
        return k_cache, v_cache

    def _descales(self, layer: Any) -> dict[str, Any]:
        """One factor for each KV head. vLLM has one factor for a layer, and may change its value while it runs."""
        if not self.kv_cache_dtype.startswith("fp8"):
            return {}
        scales = {"k_descale": layer._k_scale, "v_descale": layer._v_scale}
        return {name: scale.reshape(-1).expand(self.num_kv_heads).contiguous() for name, scale in scales.items()}


def _is_off(value: Any) -> bool:
    return not isinstance(value, Tensor) and value in NO_OPTION
