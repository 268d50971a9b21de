"""What the content of a KV cache depends on: pages from files are valid only where all of this is the same.

    facts = cache_facts(config, model, page_tensors, state_tensors)
    identity = identity_of(facts)            # 16 bytes
    number = content_number(adapter)         # names an adapter by its content: the count of loads differs between processes

Weights are identified by a checksum of their values, because names, sizes and dates of files do not tell two fine-tunes of one
model apart. The checksum reads each weight once, on the device where it lies. It protects against confusion, not against
someone who makes up weights with the same checksum.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from fa_serve import __version__
from fa_serve.engine.config import EngineConfig

FORMAT = 1
"""Version of the format of the rows of pages and states. Files of another version are not read."""
CHUNK_WORDS = 1 << 21
_MASK = (1 << 64) - 1
_UNNAMED = ("_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype")
_EXACT = ("eager", "fusion", "cascade_attention", "max_num_seqs", "max_num_batched_tokens")
"""Settings that change roundings. They count in deterministic mode, which promises the same tokens in any batch."""


def cache_facts(config: EngineConfig, model: Any, pages: Sequence[Tensor], states: Sequence[Tensor]) -> dict[str, object]:
    """What an engine's pages and states depend on. config: that of a loaded engine; pages, states: the cache's tensors"""
    exact = [*(getattr(config, name) for name in _EXACT), torch.__version__, _device_name(model)]
    return {
        "format": FORMAT,
        "fa_serve": __version__,
        "model": json.loads(model.config.to_json_string(use_diff=False), object_hook=_without_names),
        "weights": weights_digest(model).hex(),
        "dtype": config.dtype,
        "kv_cache_dtype": config.kv_cache_dtype,
        "quantization": config.quantization,
        "attention_precision": config.attention_precision,
        "page_size": config.page_size,
        "pages": [_layout(x) for x in pages],
        "states": [_layout(x) for x in states],
        "deterministic": exact if config.deterministic else False,
    }


def identity_of(facts: Mapping[str, object]) -> bytes:
    """16 bytes that stand for these facts."""
    return blake2b(json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=16).digest()


def weights_digest(model: nn.Module) -> bytes:
    """16 bytes that depend on every weight and buffer of a model."""
    digest = blake2b(digest_size=16)
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)} {tensor_checksum(x):x}\0".encode())
    return digest.digest()


def tensor_checksum(x: Tensor) -> int:
    """A number below 2**64 that depends on every bit of a tensor and on its place: a change of one word always changes it."""
    flat = x.detach().contiguous().view(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    total = int.from_bytes(bytes(flat[whole:].tolist()), "little")
    words = flat[:whole]
    if words.storage_offset() % 8:
        words = words.clone()
    words = words.view(torch.int64)
    for start in range(0, len(words), CHUNK_WORDS):
        part = words[start : start + CHUNK_WORDS]
        value = int((part * _factors(x.device)[: len(part)]).sum())
        total = (total * 0x9E3779B97F4A7C15 + value) & _MASK
    return total


@lru_cache(maxsize=1)
def _factors(device: torch.device) -> Tensor:
    """Odd numbers, one for each word of a chunk."""
    draw = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**62), 2**62, (CHUNK_WORDS,), generator=draw) * 2 + 1).to(device)


def content_number(value: Any) -> int:
    """A positive number below 2**64 that depends on all of what an adapter holds: dataclasses, mappings, sequences, tensors."""
    digest = blake2b(digest_size=8)
    _add_content(digest, value)
    return int.from_bytes(digest.digest(), "little") or 1


def _add_content(digest: Any, value: Any) -> None:
    parts: list[tuple[object, Any]] = []
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)} {tensor_checksum(value):x}\0".encode())
    elif is_dataclass(value):
        parts = [(each.name, getattr(value, each.name)) for each in fields(value)]
    elif isinstance(value, Mapping):
        parts = sorted(value.items(), key=lambda item: str(item[0]))
    elif isinstance(value, set | frozenset):
        parts = [*enumerate(sorted(map(str, value)))]
    elif isinstance(value, list | tuple):
        parts = [*enumerate(value)]
    else:
        digest.update(f"{value!r}\0".encode())
    digest.update(f"{len(parts)}\0".encode())
    for name, part in parts:
        digest.update(f"{name}\0".encode())
        _add_content(digest, part)


def _layout(x: Tensor) -> list[object]:
    """The layout of a row. How many rows there are does not matter."""
    return [[*x.shape[1:]], [*x.stride()[1:]], str(x.dtype)]


def _without_names(values: dict[str, object]) -> dict[str, object]:
    """A part of a model's config without the entries that only say where the model comes from."""
    return {name: value for name, value in values.items() if name not in _UNNAMED}


def _device_name(model: Any) -> str:
    device: torch.device = model.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
