"""transformers' own continuous batching, `model.generate_batch(...)`, through fa_serve's kernels.

It uses private parts of transformers, which only this file knows: the paged cache and its layout, the arguments that ride along
with a batch, and a test for the word "flash" in an implementation's name. Three features depend on that test: block tables for
decoding steps, CUDA graphs, and asynchronous batches. fa_serve passes it (`enable`), because it needs no mask either.

The arguments of a call show how the installed release works. In 5.17 the implementation is called "paged|fa_serve" while a
batch runs, and the attention function does everything that the cache needs. In later releases the implementation keeps its
name. There the attention function lets the cache store new keys (5.23), or the model's modules have let it store them before
and the attention function gets no cache (5.24).

Left out: the engine's paged cache (`paged.py`).
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fa_serve.api import attention_paged, attention_varlen, store_kv
from fa_serve.hf.adapter.flash_branches import PAGED_NAME, passes_for_flash
from fa_serve.hf.adapter.models import NAME
from fa_serve.spec import UnsupportedModelError

_PACKAGE = "transformers.generation.continuous_batching"


@torch.compiler.disable  # type: ignore[untyped-decorator]
def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    *,
    cache: Any = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute one layer of a batch of requests that are packed end to end.

    query:      (1, num_heads, total, head_dim)
    key, value: new keys and values, (1, num_kv_heads, total, head_dim or head_dim_v)
    cache:      transformers' PagedAttentionCache, or None if the cache has already stored the new keys and kwargs have the rest
    kwargs:     arguments that ride along with the batch: cu_seq_lens_q, cu_seq_lens_k, max_seqlen_q, block_table, ...
    Returns out (1, total, num_heads, head_dim_v), and None instead of the attention weights. Rows that belong to no request,
    which pad a batch for CUDA graphs, are 0.

    Raises UnsupportedModelError for a call that does not come from `generate_batch`, for a position_bias, for keys that the
    queries choose, and if transformers' cache does not fit the layer.
    """
    name = type(module).__name__
    stored = cache is None and "read_index" in kwargs
    if not (stored or hasattr(cache, "update")) or kwargs.get("cu_seq_lens_q") is None:
        got = "without a cache" if cache is None else f"with cache={type(cache).__name__} and without packed requests"
        raise UnsupportedModelError(
            f'"{PAGED_NAME}" must be called by generate_batch, which passes its paged cache and packed requests, got a call of '
            f'{name} {got}: call model.generate_batch, or call model.set_attn_implementation("{NAME}") before a plain forward '
            "or generate, without an argument cache"
        )
    if position_bias is not None:
        raise UnsupportedModelError(f"{name} adds a position_bias to its scores, which attention on a paged cache cannot do")
    if indices is not None:
        raise UnsupportedModelError(
            f"{name} lets its queries choose keys, and transformers' paged cache keeps no keys to choose by: call generate, or "
            "serve the model with the engine"
        )
    head_dim = query.shape[-1]
    head_dim_v = value.shape[-1]
    if head_dim_v != head_dim:  # the cache has one size for both
        value = F.pad(value, (0, head_dim - head_dim_v))
    view = _CacheView(module, cache, key, value, kwargs)
    if (sliding_window or None) != view.window:
        raise UnsupportedModelError(
            f"transformers' paged cache must keep the window of the layer, {sliding_window} keys in {name}, got a cache that "
            f"keeps {view.window}"
        )
    q = query[0].transpose(0, 1)
    options: dict[str, Any] = {
        "cu_seqlens_q": kwargs["cu_seq_lens_q"].to(torch.int32),
        "causal": True,
        "softmax_scale": scaling,
        "window_size": (-1 if view.window is None else view.window - 1, -1),
        "softcap": softcap or 0.0,
        "sinks": s_aux,
        "out": torch.zeros_like(q, memory_format=torch.contiguous_format),
    }
    if view.block_table is not None:
        out = view.decode(q, options)
    else:
        out = cast(
            Tensor,
            attention_varlen(
                q,
                view.key,
                view.value,
                cu_seqlens_k=view.cu_seqlens_k,
                max_seqlen_q=kwargs.get("max_seqlen_q") or kwargs["max_length_q"],
                max_seqlen_k=view.max_seqlen_k,
                **options,
            ),
        )
    return out[None, ..., :head_dim_v], None


class _CacheView:
    """The parts of transformers' cache that one layer needs for this batch, read as the installed release requires.

    key, value:       (total_k, num_kv_heads, head_dim): all keys and values of the requests; with a block_table, only new ones
    cu_seqlens_k:     (requests + 1,) int32, the new tokens included
    max_seqlen_k:     upper bound of the requests' lengths
    window:           the number of keys that a query sees, its own key included, or None
    block_table:      (requests, max_pages) int32 in a decoding step, else None
    k_cache, v_cache: (num_pages, page_size, num_kv_heads, head_dim); set only with a block_table
    """

    key: Tensor
    value: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_k: int
    window: int | None
    block_table: Tensor | None
    k_cache: Tensor
    v_cache: Tensor

    def __init__(self, module: Any, cache: Any, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> None:
        self.layer_idx = int(module.layer_idx)
        if cache is None:
            self._read_stored(key, value, kwargs, _window_by_config(module))
        else:
            self._store(module, cache, key, value, kwargs)
        if self.window is not None and self.block_table is not None:
            raise UnsupportedModelError(
                "transformers' paged cache keeps a sliding window as a ring, whose block table fa_serve cannot follow: set "
                "attn_implementation to another name for generate_batch"
            )

    def _store(self, module: Any, cache: Any, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> None:
        """Let the cache store new keys, or (5.17) prepare to store them here."""
        by_layer = getattr(cache, "layer_to_allocator", None)
        holder = cache if by_layer is None else by_layer[self.layer_idx]
        if holder.head_dim != key.shape[-1]:
            raise UnsupportedModelError(
                f"transformers' paged cache must hold heads of the layer's size, {key.shape[-1]} in {type(module).__name__}, "
                f"got a cache that holds heads of size {holder.head_dim}"
            )
        if by_layer is None:
            self._read_as_in_5_17(cache, key, value, kwargs)
        else:
            told = dict(kwargs)
            key, value = cache.update(key_states=key, value_states=value, layer_idx=self.layer_idx, kwargs=told)
            self._read_stored(key, value, told, getattr(holder, "sliding_window", None))

    def _read_stored(self, key: Tensor, value: Tensor, told: dict[str, Any], window: int | None) -> None:
        """Read arguments to which the cache, after storing new keys, has added what attention needs."""
        self.window = window
        self.key = key[0].transpose(0, 1)
        self.value = value[0].transpose(0, 1)
        self.cu_seqlens_k = told["cu_seq_lens_k"]
        self.max_seqlen_k = told["max_length_k"]
        self.block_table = told.get("block_table")
        if self.block_table is not None:
            self.k_cache = told["k_cache"]
            self.v_cache = told["v_cache"]

    def _read_as_in_5_17(self, cache: Any, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> None:
        """Read the view in 5.17, where the attention function does what the cache does in later releases."""
        self.window = cache.sliding_windows[self.layer_idx] if cache.sliding_windows[self.layer_idx] != 1 else None
        cu_seqlens_k = kwargs["cu_seq_lens_k"]
        max_seqlen_k = kwargs["max_seqlen_k"]
        if isinstance(cu_seqlens_k, dict):
            kind = "full_attention" if self.window is None else "sliding_attention"
            cu_seqlens_k = cu_seqlens_k[kind]
            max_seqlen_k = max_seqlen_k[kind]
        self.cu_seqlens_k = cu_seqlens_k.to(torch.int32)
        self.max_seqlen_k = max_seqlen_k
        if kwargs["block_table"] is None:
            self.block_table = None
            self.key, self.value = cache.update(
                key_states=key,
                value_states=value,
                layer_idx=self.layer_idx,
                read_index=kwargs["read_index"],
                write_index=kwargs["write_index"],
            )
            return
        group, index = cache.layer_index_to_group_indices[self.layer_idx]
        self.key = key[0].transpose(0, 1)
        self.value = value[0].transpose(0, 1)
        self.block_table = kwargs["block_table"][group]
        k_cache = cache.key_cache[index]
        v_cache = cache.value_cache[index]
        self.k_cache = k_cache.view(-1, cache.block_size, *k_cache.shape[1:])
        self.v_cache = v_cache.view(-1, cache.block_size, *v_cache.shape[1:])

    def decode(self, q: Tensor, options: dict[str, Any]) -> Tensor:
        """Compute one token of each request -> (total, num_heads, head_dim).

        A request that only pads the batch has no keys, and its entries in the block table are -1.
        """
        lengths, slots = self._slots(options["cu_seqlens_q"], q.shape[0])
        store_kv(self.key, self.value, self.k_cache, self.v_cache, slots)
        pages: dict[str, Any] = {"block_table": self.block_table, "seqused_k": lengths}
        return cast(Tensor, attention_paged(q, self.k_cache, self.v_cache, max_seqlen_q=1, **pages, **options))

    def _slots(self, cu_seqlens_q: Tensor, total: int) -> tuple[Tensor, Tensor]:
        """(requests,) int32, the number of keys of each request, and (total,) int64, the slot of each new key, -1 for padding.

        Both are the same for all layers of a step, so the first layer keeps them on `cu_seqlens_q`, a tensor that transformers
        reuses in every step. The first layer of a step must not use the values of the previous step, nor the values of the run
        before a graph is captured, because the graph would then lack the kernels that compute them. Layers are called in rising
        order, so a layer whose index is not above that of the last caller computes them again.
        """
        found: tuple[int, Tensor, Tensor] | None = getattr(cu_seqlens_q, "fa_serve_slots", None)
        if found is not None and found[0] < self.layer_idx:
            _, lengths, slots = found
        else:
            assert self.block_table is not None
            lengths = self.cu_seqlens_k.diff()
            page_size = self.k_cache.shape[1]
            last = (lengths - 1).clamp(min=0).long()
            pages = self.block_table.gather(1, (last // page_size)[:, None])[:, 0].long()
            slots = torch.where(lengths > 0, pages * page_size + last % page_size, -1)
            slots = F.pad(slots, (0, total - slots.shape[0]), value=-1)
        setattr(cu_seqlens_q, "fa_serve_slots", (self.layer_idx, lengths, slots))  # noqa: B010
        return lengths, slots


def _window_by_config(module: Any) -> int | None:
    """The window that transformers' cache keeps for a layer; transformers determines it from the config alone."""
    kinds = getattr(module.config, "layer_types", None)
    window: int | None = getattr(module.config, "sliding_window", None)
    return window if kinds is None or kinds[module.layer_idx] == "sliding_attention" else None


@functools.lru_cache(maxsize=1)
def enable() -> None:
    """Make continuous batching treat fa_serve like flash attention. This is called when a model first asks for fa_serve.

    A function that a release of transformers lacks is not wrapped. `generate_batch` then raises an error that it does not know
    fa_serve, and everything else works.
    """
    wrappers = {
        "is_flash_attention_requested": passes_for_flash,
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
        manager = getattr(module, "ContinuousBatchingManager", None)
        for method in () if manager is None or manager.__module__ != module.__name__ else ("__init__", "warmup"):
            if hasattr(manager, method):
                setattr(manager, method, _undone_on_failure(getattr(manager, method)))


def _undone_on_failure(original: Any) -> Any:
    """A wrapper of a method of transformers' manager that gives the model its implementation back if the method fails.

    The manager switches the model to "paged|fa_serve" before it checks whether it can serve the model. It switches back when it
    is stopped, which does not happen to a manager that was never started.
    """

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except BaseException:
            model = getattr(self, "model", None)
            if model is not None and getattr(self, "_original_attn_impl", None) == NAME:
                model.set_attn_implementation(NAME)
                self._original_attn_impl = None
            raise

    return method


def _synchronous(original: Any) -> Any:
    """Refuse asynchronous batches: on a GPU that was busy with other work they gave other tokens; why is unknown (docs/log)."""

    @functools.wraps(original)
    def resolve(config: Any, cb_config: Any, *args: Any, **kwargs: Any) -> Any:
        ours = config._attn_implementation in (NAME, PAGED_NAME)
        if ours and cb_config.use_async_batching:
            raise UnsupportedModelError(
                "use_async_batching must be None or False with fa_serve, got True: asynchronous batches have given wrong "
                "tokens on a busy GPU"
            )
        resolved = original(config, cb_config, *args, **kwargs)
        if ours:
            resolved.use_async_batching = False
        return resolved

    return resolve


def _with_block_tables(original: Any) -> Any:
    """Return functions of fa_serve; transformers only checks whether there is a function that takes block tables."""

    @functools.wraps(original)
    def lazy_import(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if implementation not in (NAME, PAGED_NAME):
            return original(implementation, *args, **kwargs)
        if original.__name__ == "lazy_import_paged_flash_attention":
            return attention_varlen, attention_paged
        return (None, attention_varlen, attention_paged, None, None), None

    return lazy_import
