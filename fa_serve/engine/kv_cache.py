"""The memory of the KV cache: how large a page is, how many fit, and the tensors.

Pages are handed out as views (page, token, head, dim), which is what `fa_serve.api` speaks. On a GPU they lie in memory as
(page, head, token, dim), which a decoding kernel reads in one stretch per head; on a CPU as they are handed out, so that pages
that follow each other need not be copied together. Which page belongs to whom is pages.py's business.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fa_serve.api import attention_varlen
from fa_serve.hf import LayerCall, paged_forward
from fa_serve.spec import AttentionSpec

HEADROOM = 224.0
CPU_SHARE = 0.25  # of the memory that is available when the model has been loaded


def bytes_per_page(layers: Sequence[AttentionSpec], page_size: int) -> int:
    """Keys and values of one page in all layers."""
    return sum(page_size * x.num_kv_heads * (x.head_dim + x.head_dim_v) * x.kv_dtype.itemsize for x in layers)


def allocate(
    layers: Sequence[AttentionSpec], num_pages: int, page_size: int, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """(k_cache, v_cache) by layer: views (num_pages, page_size, num_kv_heads, head_dim or head_dim_v)."""

    def pages(layer: AttentionSpec, dim: int) -> Tensor:
        # never zeroed: what has not been written is not read, and on a CPU memory is taken only where it is touched
        if device.type == "cpu":
            return torch.empty(num_pages, page_size, layer.num_kv_heads, dim, dtype=layer.kv_dtype)
        return torch.empty(num_pages, layer.num_kv_heads, page_size, dim, dtype=layer.kv_dtype, device=device).transpose(1, 2)

    return [(pages(layer, layer.head_dim), pages(layer, layer.head_dim_v)) for layer in layers]


class _Ranges:
    """Rides in the place of a PagedBatch: attention over one sequence, and the largest key and value of each head."""

    def __init__(self) -> None:
        self.largest: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, call: LayerCall) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (call.query, call.key, call.value))
        largest = k.float().abs().amax(dim=(0, 2)), v.float().abs().amax(dim=(0, 2))
        self.largest[cast(int, call.module.layer_idx)] = largest
        ends = torch.tensor([0, len(q)], dtype=torch.int32, device=q.device)
        out = attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q=ends,
            cu_seqlens_k=ends,
            max_seqlen_q=len(q),
            max_seqlen_k=len(q),
            causal=True,
            window_size=(call.window_size[0], 0),
            softmax_scale=call.softmax_scale,
            softcap=call.softcap,
            sinks=call.sinks,
        )
        return cast(Tensor, out)[None]


@torch.inference_mode()
def descales(model: PreTrainedModel, vocab: int, num_tokens: int = 256) -> list[tuple[Tensor, Tensor]]:
    """By layer, what stored float8 keys and values are multiplied by: (num_kv_heads,) float32 each.

    From one forward over random tokens: the largest number met is stored as HEADROOM, half of what float8_e4m3fn holds;
    what comes to more than that is saturated.
    """
    ids = torch.randint(vocab, (num_tokens,), generator=torch.Generator().manual_seed(0)).to(model.device)
    ranges = _Ranges()
    paged_forward(model, ids, torch.arange(num_tokens, device=model.device), ranges, ids[:1] * 0)
    scaled = [tuple(x.clamp(min=1e-6) / HEADROOM for x in ranges.largest[layer]) for layer in sorted(ranges.largest)]
    return cast(list[tuple[Tensor, Tensor]], scaled)


def available_memory() -> int:
    """Bytes of host memory that can be had now: the machine's, or the container's if that is less."""
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        available = 4 << 30  # macOS does not say: a quarter of this fits everywhere
    limit = Path("/sys/fs/cgroup/memory.max")
    used = Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return available
