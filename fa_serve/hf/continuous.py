"""transformers' own continuous batching, `model.generate_batch(...)`, through our kernels.

It works on private pieces of transformers, and this file is the only one that knows them: the paged cache and its layout, the
arguments that ride along with a batch, and a test for the word "flash" in an implementation's name, on which hang the block
tables of the decoding steps, CUDA graphs and asynchronous batches. We pass that test, since we need no mask either.

Up to some release after 5.17 the implementation is called "paged|fa_serve" while a batch runs; later it keeps its name.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fa_serve.api import attention_paged, attention_varlen, store_kv
from fa_serve.hf.models import NAME
from fa_serve.spec import UnsupportedModelError

PAGED_NAME = f"paged|{NAME}"
_PACKAGE = "transformers.generation.continuous_batching"


@torch.compiler.disable  # type: ignore[untyped-decorator]
def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    *,
    cache: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One layer of a batch: query (1, heads, total, head_dim) of packed requests, new keys and values likewise.

    Returns out (1, total, heads, head_dim_v); rows that belong to no request, the padding for CUDA graphs, are 0.
    """
    name = type(module).__name__
    if position_bias is not None:
        raise UnsupportedModelError(f"{name} adds a position_bias to its scores, which a paged cache cannot hold")
    head_dim = query.shape[-1]
    head_dim_v = value.shape[-1]
    if head_dim_v != head_dim:  # the cache has one size for both
        value = F.pad(value, (0, head_dim - head_dim_v))
    step = _Step(module, cache, key, value, kwargs)
    if (sliding_window or None) != step.window:
        raise UnsupportedModelError(f"{name}: the attention's window is {sliding_window}, the cache holds one of {step.window}")
    q = query[0].transpose(0, 1)
    options: dict[str, Any] = {
        "cu_seqlens_q": kwargs["cu_seq_lens_q"].to(torch.int32),
        "causal": True,
        "softmax_scale": scaling,
        "window_size": (-1 if step.window is None else step.window - 1, -1),
        "softcap": softcap or 0.0,
        "sinks": s_aux,
        "out": torch.zeros_like(q, memory_format=torch.contiguous_format),
    }
    out: Any = (
        step.decode(q, options)
        if step.block_table is not None
        else attention_varlen(
            q,
            step.key,
            step.value,
            cu_seqlens_k=step.cu_seqlens_k,
            max_seqlen_q=kwargs.get("max_seqlen_q") or kwargs["max_length_q"],
            max_seqlen_k=step.max_seqlen_k,
            **options,
        )
    )
    return out[None, ..., :head_dim_v], None


class _Step:
    """What a layer needs of the cache in this step, in whichever way the installed transformers says it.

    key, value:   (total_k, kv_heads, head_dim): the requests' keys and values, old and new (only the new ones for a step that
                  has a block_table)
    cu_seqlens_k: int32 (requests + 1,), the new tokens included
    window:       keys that a query sees, its own included, or None
    """

    def __init__(self, module: Any, cache: Any, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> None:
        self.layer = layer = int(module.layer_idx)
        by_layer = getattr(cache, "layer_to_allocator", None)
        holder = cache if by_layer is None else by_layer[layer]
        if holder.head_dim != key.shape[-1]:
            raise UnsupportedModelError(
                f"transformers' paged cache holds heads of size {holder.head_dim}, {type(module).__name__} has {key.shape[-1]}"
            )
        if by_layer is None:
            self._read(layer, cache, key, value, kwargs)
        else:
            self.window = getattr(holder, "sliding_window", None)
            told = dict(kwargs)
            key, value = cache.update(key_states=key, value_states=value, layer_idx=layer, kwargs=told)
            self.key = key[0].transpose(0, 1)
            self.value = value[0].transpose(0, 1)
            self.cu_seqlens_k = told["cu_seq_lens_k"]
            self.max_seqlen_k = told["max_length_k"]
            self.block_table, self.k_cache, self.v_cache = (told.get(n) for n in ("block_table", "k_cache", "v_cache"))
        if self.window is not None and self.block_table is not None:
            raise UnsupportedModelError(
                "transformers' paged cache keeps a window as a ring, whose block table we cannot follow"
            )

    def _read(self, layer: int, cache: Any, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> None:
        """As transformers 5.17 says it, where an attention function does by itself what the cache does later."""
        self.window = cache.sliding_windows[layer] if cache.sliding_windows[layer] != 1 else None
        cu_seqlens_k, max_seqlen_k, block_table = (kwargs[n] for n in ("cu_seq_lens_k", "max_seqlen_k", "block_table"))
        if isinstance(cu_seqlens_k, dict):
            kind = "full_attention" if self.window is None else "sliding_attention"
            cu_seqlens_k = cu_seqlens_k[kind]
            max_seqlen_k = max_seqlen_k[kind]
        self.cu_seqlens_k = cu_seqlens_k.to(torch.int32)
        self.max_seqlen_k = max_seqlen_k
        self.block_table = None
        if block_table is None:
            indices = {"read_index": kwargs["read_index"], "write_index": kwargs["write_index"]}
            self.key, self.value = cache.update(key_states=key, value_states=value, layer_idx=layer, **indices)
            return
        group, index = cache.layer_index_to_group_indices[layer]
        self.key = key[0].transpose(0, 1)
        self.value = value[0].transpose(0, 1)
        self.block_table = block_table[group]
        self.k_cache, self.v_cache = (
            x[index].view(-1, cache.block_size, *x[index].shape[1:]) for x in (cache.key_cache, cache.value_cache)
        )

    block_table: Any
    k_cache: Any
    v_cache: Any

    def decode(self, q: Tensor, options: dict[str, Any]) -> Tensor:
        """One token of each request. A request that only pads the batch has no keys, and its entries in the table are -1."""
        lengths, slots = self._slots(options["cu_seqlens_q"], q.shape[0])
        store_kv(self.key, self.value, self.k_cache, self.v_cache, slots)
        pages = {"block_table": self.block_table, "seqused_k": lengths}
        return cast(Tensor, attention_paged(q, self.k_cache, self.v_cache, max_seqlen_q=1, **pages, **options))

    def _slots(self, batch: Tensor, total: int) -> tuple[Tensor, Tensor]:
        """int32 (requests,), keys of each request, and int64 (total,), where each new one goes; -1 for what only pads.

        They are the same for all layers, and left with `batch`, a tensor that lives as long as the step. Its first layer finds
        those of the step before it, or of the run before a capture, whose kernels the graph would not hold: layers count up, so
        the one that does not come after the last has to compute them.
        """
        found: tuple[int, Tensor, Tensor] | None = getattr(batch, "fa_serve_slots", None)
        if found is not None and found[0] < self.layer:
            _, lengths, slots = found
        else:
            lengths = self.cu_seqlens_k.diff()
            page_size = self.k_cache.shape[1]
            last = (lengths - 1).clamp(min=0).long()
            pages = self.block_table.gather(1, (last // page_size)[:, None])[:, 0].long()
            slots = torch.where(lengths > 0, pages * page_size + last % page_size, -1)
            slots = F.pad(slots, (0, total - slots.shape[0]), value=-1)
        setattr(batch, "fa_serve_slots", (self.layer, lengths, slots))  # noqa: B010
        return lengths, slots


@functools.cache
def enable() -> None:
    """Let continuous batching treat fa_serve as it treats flash attention; called when a model first asks for fa_serve.

    What a release does not have stays as it is: generate_batch then says that it does not know fa_serve, and all else works.
    """
    wrappers = {
        "is_flash_attention_requested": _passing,
        "lazy_import_paged_flash_attention": _with_block_tables,
        "lazy_import_flash_attention": _with_block_tables,
        "resolve_continuous_batching_config": _synchronous,
    }
    for name in ("cache", "continuous_api", "initialization"):
        try:
            module = importlib.import_module(f"{_PACKAGE}.{name}")
        except ModuleNotFoundError:
            continue
        for function, wrapper in wrappers.items():
            if hasattr(module, function):
                setattr(module, function, wrapper(getattr(module, function)))


def _passing(original: Any) -> Any:
    @functools.wraps(original)
    def is_flash_attention_requested(
        config: Any = None, requested_attention_implementation: str | None = None, **kw: Any
    ) -> Any:
        name = requested_attention_implementation if config is None else config._attn_implementation
        return name in (NAME, PAGED_NAME) or original(config, requested_attention_implementation, **kw)

    return is_flash_attention_requested


def _synchronous(original: Any) -> Any:
    """Asynchronous batches gave other tokens on a GPU that others kept busy, cause unknown (docs/log.md): they are refused."""

    @functools.wraps(original)
    def resolve(config: Any, cb_config: Any, *args: Any, **kwargs: Any) -> Any:
        ours = config._attn_implementation in (NAME, PAGED_NAME)
        if ours and cb_config.use_async_batching:
            raise UnsupportedModelError(
                "generate_batch with fa_serve runs synchronous batches alone: asynchronous ones have given wrong tokens on a "
                "busy GPU. Leave use_async_batching unset, got True"
            )
        resolved = original(config, cb_config, *args, **kwargs)
        if ours:
            resolved.use_async_batching = False
        return resolved

    return resolve


def _with_block_tables(original: Any) -> Any:
    """Asked for the functions of a flash attention, it is looked at only whether there is one for block tables."""

    @functools.wraps(original)
    def lazy_import(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if implementation not in (NAME, PAGED_NAME):
            return original(implementation, *args, **kwargs)
        paged = original.__name__ == "lazy_import_paged_flash_attention"
        return (attention_varlen, attention_paged) if paged else ((None, attention_varlen, attention_paged, None, None), None)

    return lazy_import
