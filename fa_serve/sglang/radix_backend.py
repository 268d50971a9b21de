"""The attention backend that SGLang calls: its pool writes the cache, `fa_serve.attention_paged` reads it.

SGLang keeps keys and values of a layer as (slots, kv_heads, dim), and a table with the slots of each request's tokens. With
--page-size P, P consecutive tokens have consecutive slots, so every P-th entry of that table, divided by P, is a block table. A
step is described once for all layers, by tensors on the device and upper bounds on the host. Lengths on the host are rounded up
to powers of two, so that steps of different lengths share a plan. Decoding steps can be captured in CUDA graphs: the
description then lives in buffers that are filled before each replay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from torch import Tensor

from fa_serve import api
from fa_serve.adapters import rounded_up
from fa_serve.spec import UnsupportedError

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn)


@dataclass
class StepMetadata:
    """One step, for all layers: the arguments of `attention_paged` that do not depend on the layer.

    block_table:  (batch, pages), int32; cu_seqlens_q: (batch + 1,), int32; seqused_k: (batch,), int32
    max_seqlen_q, max_seqlen_k: upper bounds
    """

    block_table: Tensor
    cu_seqlens_q: Tensor
    seqused_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


class RadixBackend(AttentionBackend):  # type: ignore[misc]
    """model_runner: SGLang's model runner. Raises UnsupportedError for a cache that the kernels cannot read."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        pool = model_runner.token_to_kv_pool
        page_size = model_runner.page_size
        if model_runner.use_mla_backend:
            raise UnsupportedError("fa_serve's backend for SGLang does not support MLA; choose another --attention-backend")
        if type(pool) is not MHATokenToKVPool:
            raise UnsupportedError(
                f"fa_serve's backend for SGLang reads only the cache of MHATokenToKVPool, got {type(pool).__name__}; for a "
                "model with sliding windows, start SGLang with --disable-hybrid-swa-memory"
            )
        if pool.dtype not in DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise UnsupportedError(f"fa_serve's backend for SGLang reads only caches of {names}, got {pool.dtype}")
        if pool.k_buffer[0].dim() != 3:
            raise UnsupportedError(
                "fa_serve's backend for SGLang reads only caches of shape (slots, kv_heads, dim); unset SGLANG_USE_HND_KVCACHE"
            )
        if page_size % 16:
            raise UnsupportedError(f"fa_serve's backend for SGLang needs --page-size 16 or a multiple of it, got {page_size}")
        self.token_to_kv_pool = pool
        self.kv_cache_dtype = pool.dtype
        self._page_size = page_size
        self._slots_of_requests: Tensor = model_runner.req_to_token_pool.req_to_token
        self._max_keys: int = model_runner.model_config.context_len
        self._graph: StepMetadata | None = None
        self._descales_of_layers: dict[int, dict[str, Tensor]] = {}
        self._attention_chunk = getattr(model_runner, "attention_chunk_size", None)
        self.forward_metadata: StepMetadata | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Describe a step that is not captured."""
        self._require_plain(forward_batch)
        batch = forward_batch.batch_size
        device = forward_batch.seq_lens.device
        longest = self._longest(forward_batch)
        if forward_batch.forward_mode.is_decode_or_idle():
            starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
            queries = 1
        else:
            starts = torch.zeros(batch + 1, dtype=torch.int32, device=device)
            torch.cumsum(forward_batch.extend_seq_lens, dim=0, dtype=torch.int32, out=starts[1:])
            queries = max(forward_batch.extend_seq_lens_cpu, default=1)
        self.forward_metadata = StepMetadata(
            block_table=self._block_table(forward_batch.req_pool_indices, longest),
            cu_seqlens_q=starts,
            seqused_k=forward_batch.seq_lens.to(torch.int32),
            max_seqlen_q=rounded_up(queries),
            max_seqlen_k=longest,
        )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make the buffers of captured decoding steps. Smaller batches use the first rows of the buffers."""
        device = self._slots_of_requests.device
        pages = -(-self._max_keys // self._page_size)
        self._graph = StepMetadata(
            block_table=torch.zeros(max_bs, pages, dtype=torch.int32, device=device),
            cu_seqlens_q=torch.arange(max_bs + 1, dtype=torch.int32, device=device),
            seqused_k=torch.ones(max_bs, dtype=torch.int32, device=device),
            max_seqlen_q=1,
            max_seqlen_k=self._max_keys,
        )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fill the buffers before a capture or a replay of a decoding step."""
        self._require_plain(forward_batch)
        if not forward_batch.forward_mode.is_decode_or_idle():
            raise UnsupportedError(
                "fa_serve's backend for SGLang captures decoding steps only, got a prompt; start SGLang with "
                "--cuda-graph-backend-prefill breakable or --disable-prefill-cuda-graph"
            )
        assert self._graph is not None
        batch = forward_batch.batch_size
        table = self._graph.block_table[:batch]
        longest = self._max_keys if in_capture else self._longest(forward_batch)
        pages = self._block_table(forward_batch.req_pool_indices[:batch], longest)
        table[:, : pages.shape[1]].copy_(pages)
        lengths = self._graph.seqused_k[:batch]
        lengths.copy_(forward_batch.seq_lens[:batch])
        self.forward_metadata = StepMetadata(
            block_table=table,
            cu_seqlens_q=self._graph.cu_seqlens_q[: batch + 1],
            seqused_k=lengths,
            max_seqlen_q=1,
            max_seqlen_k=self._max_keys,
        )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **others: Any
    ) -> Tensor:
        """(tokens, heads * head_dim_v) of one layer, from q (tokens, heads * head_dim)."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, **others)

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **others: Any
    ) -> Tensor:
        """As `forward_decode`, for steps with prompts, which may also have sequences that decode."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, **others)

    def _attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        unknown = sorted(name for name, value in others.items() if value is not None and value is not False)
        if layer.is_cross_attention or layer.attn_type is not AttentionType.DECODER:
            unknown.append("encoder attention")
        if getattr(layer, "xai_temperature_len", -1) > 0:
            unknown.append("a temperature that depends on the position (xai_temperature_len)")
        if self._attention_chunk and getattr(layer, "use_irope", False):
            unknown.append("chunked attention (use_irope)")
        if unknown:
            names = ", ".join(unknown)
            raise UnsupportedError(f"fa_serve's backend for SGLang does not support {names}; choose another one")
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc), k, v, layer.k_scale, layer.v_scale)
        metadata = self.forward_metadata
        assert metadata is not None
        heads = layer.tp_q_head_num
        # SGLang's windows (left, right) include both ends, as window_size does
        left = -1 if layer.sliding_window_size is None else layer.sliding_window_size
        out: Any = api.attention_paged(
            q.reshape(-1, heads, layer.qk_head_dim),
            self._pages(pool.get_key_buffer(layer.layer_id)),
            self._pages(pool.get_value_buffer(layer.layer_id)),
            causal=True,
            softmax_scale=layer.scaling,
            window_size=(left, 0) if left > -1 else (-1, -1),
            softcap=layer.logit_cap or 0.0,
            sinks=sinks,
            **cast(dict[str, Any], self._descales(layer)),
            **vars(metadata),
        )
        return cast(Tensor, out.view(-1, heads * layer.v_head_dim))

    def _block_table(self, requests: Tensor, longest: int) -> Tensor:
        """(batch, pages), int32: the pages of these requests, as many as `longest` keys take."""
        first_slots = self._slots_of_requests[requests, : longest : self._page_size]
        return torch.div(first_slots, self._page_size, rounding_mode="floor").to(torch.int32)

    def _longest(self, forward_batch: Any) -> int:
        """An upper bound of the keys of a sequence. Without lengths on the host, it is the model's context length."""
        lengths = forward_batch.seq_lens_cpu
        if lengths is None or not len(lengths):
            return self._max_keys
        return min(rounded_up(max(int(lengths.max()), 1)), self._max_keys)

    def _pages(self, slots: Tensor) -> Tensor:
        """A view of the slots as (pages, page_size, kv_heads, dim)."""
        count = len(slots) // self._page_size
        return slots[: count * self._page_size].view(count, self._page_size, *slots.shape[1:])

    def _descales(self, layer: Any) -> dict[str, Tensor]:
        """One factor for each KV head, made once, before a capture. SGLang has one for a layer, or none, which means 1."""
        if self.kv_cache_dtype is not torch.float8_e4m3fn:
            return {}
        if layer.layer_id not in self._descales_of_layers:
            scales = {"k_descale": layer.k_scale, "v_descale": layer.v_scale}
            shape = (layer.tp_k_head_num,)
            device = self._slots_of_requests.device
            self._descales_of_layers[layer.layer_id] = {
                name: torch.full(shape, 1.0 if scale is None else float(scale), device=device) for name, scale in scales.items()
            }
        return self._descales_of_layers[layer.layer_id]

    def _require_plain(self, forward_batch: Any) -> None:
        if forward_batch.spec_info is not None:
            raise UnsupportedError(
                "fa_serve's backend for SGLang does not support speculative decoding; choose another backend for it"
            )
        for name in ("attn_cp_metadata", "dcp_kv_mask"):
            if getattr(forward_batch, name, None) is not None:
                raise UnsupportedError(
                    f"fa_serve's backend for SGLang does not support context parallelism ({name}); choose another one"
                )
