"""How many pages and states the device has room for in addition to the weights and the largest step.

    num_pages, num_states = find_room(runner, config, max_model_len)

On a GPU the largest step is run to measure the memory that it takes. Left out: what the settings ask for (start/loading.py).
"""

from __future__ import annotations

import torch

from fa_serve.api import MAX_COPY_BYTES
from fa_serve.engine.cache import tensors as kv_cache
from fa_serve.engine.config import EngineConfig
from fa_serve.engine.images.encoder import ImageEncoder
from fa_serve.engine.runner.host_memory import staging_bytes
from fa_serve.engine.runner.model_runner import ModelRunner
from fa_serve.engine.start.warm_up import largest_batch


def find_room(runner: ModelRunner, config: EngineConfig, max_model_len: int) -> tuple[int, int]:
    """How many pages and states fit. On a GPU, the runner has no cache afterwards. Raises ParameterError if nothing fits."""
    size = runner.bytes_per_page
    memory = runner.state_memory
    if runner.device.type != "cuda":
        enough = runner.max_num_seqs * -(-max_model_len // runner.page_size)
        return kv_cache.fit_on_host(memory, size, enough, config.tensor_parallel)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(runner.device)
    runner.allocate(1, max_model_len, 1 if memory else 0)
    before = torch.cuda.memory_allocated(runner.device)
    runner.sample(runner.launch(largest_batch(config, max_model_len))).read()
    peak = torch.cuda.max_memory_allocated(runner.device) - (memory.bytes_of_tails if memory else 0)
    if not runner.eager:
        # graphs have a separate memory pool, whose size the largest step determines too; graphs of a draft model have another
        peak += (peak - before) * (1 if runner.draft is None else 2)
    if config.attention_precision != "bf16":
        peak += MAX_COPY_BYTES  # a later step may have more keys in its prompts than this one
    if isinstance(runner.images, ImageEncoder):
        peak += runner.images.max_bytes
        if runner.images.graphs is not None:
            peak += runner.images.graphs.max_bytes
    if config.kv_host_memory:
        peak += sum(staging_bytes(x) for x in (size, memory.bytes_per_state) if x)
    runner.close()
    torch.cuda.empty_cache()
    least = size + (memory.least_bytes if memory else 0)
    room = kv_cache.device_room(runner.device, config.gpu_memory_utilization, peak, least)
    return memory.shares(room, size) if memory else (room // size, 0)
