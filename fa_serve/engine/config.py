"""The engine's settings: one frozen dataclass, checked when it is made.

    config = EngineConfig(model="Qwen/Qwen3-0.6B", max_num_seqs=64)

`None` and "auto" mean that the engine decides once, when the model is loaded; `Engine.config` holds what it decided. Left
out: how to sample (request.SamplingParams) and everything about HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """
    model:                  hub name or local folder; None is the embedded model
    trust_remote_code:      run code that comes with the model; else one that needs its own is refused
    dtype:                  "auto" (the checkpoint's), "float16", "bfloat16", "float32"
    device:                 "auto" (cuda if there is one, else cpu), or a torch device
    page_size:              tokens in a page of the KV cache
    num_pages:              pages of the KV cache; None sizes it by memory
    kv_cache_dtype:         "auto" (the model's) or "fp8": half the memory of 16-bit numbers, tokens may differ
    gpu_memory_utilization: share of the GPU's memory for weights, activations and KV cache together
    max_num_seqs:           sequences that run at once
    max_waiting:            requests that may wait beyond the running ones
    max_num_batched_tokens: tokens in one step, prompts' chunks and single tokens together
    max_model_len:          tokens of prompt and answer together; None is the model's own limit, or what the cache holds
    prefix_caching:         keep the pages of finished requests for prompts that begin alike
    eager:                  no CUDA graphs and no fusion: every step launches the model's own kernels one by one
    fusion:                 layers of the Llama kind are computed by fewer and fused kernels, proven when the model is loaded
    deterministic:          a request's tokens and log-probabilities are bitwise the same alone and in any batch; slower
    process:                the async engine runs in a process of its own; None: if it is on a GPU
    max_restarts:           how often the async engine starts a new one when its engine has died; 0: it ends for good
    seed:                   from which requests without a seed draw theirs; None is a fresh one each time
    """

    model: str | Path | None = None
    trust_remote_code: bool = False
    dtype: str = "auto"
    device: str = "auto"
    page_size: int = 16
    num_pages: int | None = None
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 256
    max_waiting: int = 1024
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    prefix_caching: bool = True
    eager: bool = False
    fusion: bool = True
    deterministic: bool = False
    process: bool | None = None
    max_restarts: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("page_size", "num_pages", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            value = getattr(self, name)
            if not (value is None and name in ("num_pages", "max_model_len")) and (not _is_integer(value) or value < 1):
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        for name in ("max_waiting", "max_restarts"):
            if not _is_integer(getattr(self, name)) or getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or a positive integer, got {getattr(self, name)!r}")
        if self.seed is not None and not _is_integer(self.seed):
            raise ValueError(f"seed must be an integer or None, got {self.seed!r}")
        if self.dtype not in ("auto", "float16", "bfloat16", "float32"):
            raise ValueError(f"dtype must be auto, float16, bfloat16 or float32, got {self.dtype!r}")
        if self.kv_cache_dtype not in ("auto", "fp8"):
            raise ValueError(f"kv_cache_dtype must be auto or fp8, got {self.kv_cache_dtype!r}")
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0.0 < share <= 1.0:
            raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, got {share!r}")

    @property
    def model_name(self) -> str:
        """The name to show: the hub name, or the folder's own name."""
        if self.model is None:
            return "fa-serve-demo"
        path = Path(self.model)
        return path.resolve().name if path.exists() else str(self.model)

    def model_path(self) -> str:
        """What transformers loads: the hub name or folder, that of the embedded model if none is named."""
        if self.model is None:
            from fa_serve.demo import model_path

            return str(model_path())
        if (isinstance(self.model, Path) or self.model.startswith(("/", "."))) and not Path(self.model).is_dir():
            raise ValueError(f"model must be a hub name or an existing folder, got {self.model}")
        return str(self.model)

    def resolve_device(self) -> str:
        return ("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device

    @property
    def uses_process(self) -> bool:
        return self.resolve_device().startswith("cuda") if self.process is None else self.process


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
