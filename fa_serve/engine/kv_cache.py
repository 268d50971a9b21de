"""The memory of the KV cache: how large a page is, how many fit, and the tensors.

Pages lie in memory as (page, head, token, dim), which a decoding kernel reads in one stretch per head, and are handed out as
views (page, token, head, dim), which is what `fa_serve.api` speaks. Which page belongs to whom is pages.py's business.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fa_serve.spec import AttentionSpec

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
        return torch.empty(num_pages, layer.num_kv_heads, page_size, dim, dtype=layer.kv_dtype, device=device).transpose(1, 2)

    return [(pages(layer, layer.head_dim), pages(layer, layer.head_dim_v)) for layer in layers]


def available_memory() -> int:
    """Bytes of host memory that can be had now: the machine's, or the container's if that is less."""
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        available = 4 << 30  # macOS does not say: a quarter of this fits everywhere
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return available
