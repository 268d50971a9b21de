"""What a server has decided at its start and why, in about ten lines, so that its operator does not have to guess.

    for name, text in decisions(settings, engine): print(name, text)

Each line names the flag that changes it. Left out: how long the start took (startup_report.py), and why an attention backend
serves a model or not (`fa-serve info MODEL`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fa_serve.engine import AsyncEngine, EngineConfig

    from ..settings import Settings

LOCAL = ("127.0.0.1", "::1", "localhost")


def decisions(settings: Settings, engine: AsyncEngine) -> list[tuple[str, str]]:
    """Pairs (subject, what was decided and why) for a loaded engine. No key is shown."""
    config = engine.config
    lines = [("device", _device(settings, engine)), ("dtype", _dtype(settings, config))]
    if engine.card is None:
        lines += [
            ("attention", _attention(engine)),
            ("kv cache", _cache(settings, engine)),
            ("batch", _batch(config)),
            ("graphs", _graphs(engine)),
            ("parallel", _parallel(config)),
        ]
    else:
        lines.append(("batch", f"{config.max_num_batched_tokens} tokens a step; inputs of {engine.card.max_tokens} tokens"))
    lines += [("model", _model(settings, engine)), ("access", _access(settings))]
    return lines


def _device(settings: Settings, engine: AsyncEngine) -> str:
    name = f"{engine.config.device} ({engine.summary.device})"
    if settings.device != "auto":
        return f"{name}, by --device"
    return f"{name}: --device auto takes a GPU if there is one"


def _dtype(settings: Settings, config: EngineConfig) -> str:
    why = "the checkpoint's" if settings.dtype == "auto" else "by --dtype"
    if settings.quantization is not None:
        why += f"; weights are rounded to {settings.quantization} (--quantization)"
    if settings.kv_cache_dtype != "auto":
        why += f"; the KV cache has {settings.kv_cache_dtype} (--kv-cache-dtype)"
    return f"{config.dtype}, {why}"


def _attention(engine: AsyncEngine) -> str:
    served = ", ".join(f"{kind}: {' and '.join(names)}" for kind, names in engine.summary.attention.items() if names)
    return f"{served or 'no layer computes attention'} (fa-serve info says why)"


def _cache(settings: Settings, engine: AsyncEngine) -> str:
    config = engine.config
    assert config.num_pages is not None
    size = f"{config.num_pages * config.page_size:,} tokens, {_size(engine.summary.cache_bytes)}"
    if settings.num_pages is not None:
        why = "by --num-pages"
    elif config.device.startswith("cuda"):
        why = f"what is left of {config.gpu_memory_utilization:.0%} of the memory (--gpu-memory-utilization)"
    else:
        why = "as much as --max-num-seqs can use, at most a quarter of the memory (--num-pages)"
    return f"{size}: {why}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _batch(config: EngineConfig) -> str:
    return (
        f"{config.max_num_seqs} sequences (--max-num-seqs), {config.max_num_batched_tokens} tokens a step "
        f"(--max-num-batched-tokens), {config.max_model_len} a sequence"
    )


def _graphs(engine: AsyncEngine) -> str:
    layers = "fused layers" if engine.summary.fuses else "no fused layers"
    if engine.summary.graphs:
        return f"CUDA graphs, {layers} (--eager turns off both)"
    if engine.config.eager:
        return "none, and no fused layers: --eager"
    return f"none{'' if engine.config.device.startswith('cuda') else ' on a CPU'}, {layers}"


def _parallel(config: EngineConfig) -> str:
    size = config.tensor_parallel
    divided = f"each layer is divided between {size} devices" if size > 1 else "one device"
    guesses = f"; draft tokens from {config.speculative}" if config.speculative else "; no speculative decoding (--speculative)"
    return f"{divided} (--tensor-parallel){guesses}"


def _model(settings: Settings, engine: AsyncEngine) -> str:
    task = "generate" if engine.card is None else engine.card.task
    if engine.card is not None:
        return f"{task}, by its files (--task)" if settings.task is None else f"{task}, by --task"
    images = f"at most {settings.max_images} images" if engine.summary.images is None else "no images"
    adapters = ", ".join(engine.adapters) or ("from --lora-folder" if settings.lora_folder else "none (--lora)")
    return f"{task}; {images}; adapters: {adapters}"


def _access(settings: Settings) -> str:
    where = "this machine only" if settings.host in LOCAL else f"every machine that can reach {settings.host}"
    keys = len(settings.all_keys)
    administrator = f"{'no' if settings.admin_key is None else 'an'} administrator's key (FA_SERVE_ADMIN_KEY)"
    if keys:
        return f"{keys} API key{'s' if keys > 1 else ''}, {administrator}, {where}"
    return f"no API key (FA_SERVE_API_KEYS), {administrator}, {where} (--host)"
