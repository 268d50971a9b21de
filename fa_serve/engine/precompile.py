"""Compiles the kernels of a model in several processes while its weights load.

    compiling = begin(config)                # None if there is nothing to do
    model = load_model(config)
    detail = compiling.wait()

Each process makes a model of the same widths with few layers, random weights and a small vocabulary, and walks over the steps
of the warm-up plan without launching them (`claim_kernels`). What is compiled lands in Triton's cache on disk, from which the
engine loads it. A mark in the cache says that the kernels for these settings are complete; a later start has nothing to do.

`use_kernel_cache` gives the cache a folder for each release of fa_serve and of Triton and for each kind of GPU, so that it can
be copied into an image and old ones can be deleted. The variable TRITON_CACHE_DIR overrides it. Left out: kernels that the plan
does not know. The engine compiles them before it is ready, one after the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fa_serve import __version__
from fa_serve.engine.config import EngineConfig
from fa_serve.engine.loading import make_small_model, model_config
from fa_serve.engine.model_runner import ModelRunner
from fa_serve.engine.warm_up import empty_steps, sampling_variants
from fa_serve.ops.compilations import claim_kernels

log = logging.getLogger("fa_serve.engine")

MAX_PROCESSES = 8
PAGES = 2
"""Pages of the KV cache of a process that compiles. No page is read or written."""
IRRELEVANT = (
    *("model", "trust_remote_code", "device", "num_pages", "gpu_memory_utilization", "max_waiting", "prefix_caching"),
    *("process", "max_restarts", "grammar_cache_bytes", "grammar_timeout", "grammar_memory", "max_stop_chars", "seed"),
)
"""Settings that kernels do not depend on."""
PR_SET_PDEATHSIG = 1


def use_kernel_cache(device: str) -> None:
    """Let Triton keep kernels in a folder for these releases of fa_serve and Triton and this GPU, if it can be written."""
    if "TRITON_CACHE_DIR" in os.environ or not device.startswith("cuda"):
        return
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    card = torch.cuda.get_device_name(device).replace(" ", "-").replace("/", "-")
    folder = root / "fa_serve" / f"{__version__}-triton-{version('triton')}-{card}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("kernels are kept in Triton's own folder, because %s cannot be made: %s", folder, error)
        return
    if os.access(folder, os.W_OK):
        os.environ["TRITON_CACHE_DIR"] = str(folder)


class Precompilation:
    """Processes that compile, and the folder by which they divide the kernels among themselves."""

    def __init__(self, config: EngineConfig, mark: Path, count: int) -> None:
        self._mark = mark
        self._folder = Path(tempfile.mkdtemp(prefix="fa_serve_kernels_"))
        self._processes = []
        given = pickle.dumps(config)
        for index in range(count):
            command = [sys.executable, "-m", "fa_serve.engine.precompile", str(self._folder), str(index), str(count)]
            with (self._folder / f"{index}.log").open("w") as output:
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(given)
            self._processes.append(process)

    def wait(self) -> str:
        """Wait for the end of the processes. Returns what they have done, for the report of the start-up."""
        codes = [process.wait() for process in self._processes]
        claimed = len(list(self._folder.glob("*.done")))
        for index, code in enumerate(codes):
            if code:
                reason = (self._folder / f"{index}.log").read_text().strip().rpartition("\n")[2]
                log.warning("a process that compiles kernels ended with code %d: %s", code, reason)
        if not any(codes):
            with contextlib.suppress(OSError):
                self._mark.parent.mkdir(parents=True, exist_ok=True)
                self._mark.touch()
        shutil.rmtree(self._folder, ignore_errors=True)
        return f"{claimed} kernels in {len(codes)} processes"

    def cancel(self) -> None:
        """End the processes: the model could not be loaded."""
        for process in self._processes:
            process.kill()
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def begin(config: EngineConfig) -> Precompilation | None:
    """Start the processes. None if the model runs without Triton's kernels, or if the cache holds all that the plan names."""
    if not config.resolve_device().startswith("cuda"):
        return None
    mark = _mark(config)
    if mark.exists():
        return None
    return Precompilation(config, mark, max(1, min(MAX_PROCESSES, len(os.sched_getaffinity(0)) // 2)))


def _mark(config: EngineConfig) -> Path:
    """The file that says that the cache is complete for this model, these settings, these releases and this GPU."""
    settings = [(field.name, getattr(config, field.name)) for field in fields(config) if field.name not in IRRELEVANT]
    described = model_config(config).to_json_string()
    card = torch.cuda.get_device_name(config.resolve_device())
    facts = (__version__, version("triton"), torch.__version__, card, settings, described)
    root = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    return Path(root) / f"complete-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"


def compile_share(config: EngineConfig, folder: Path, index: int, count: int) -> int:
    """What process `index` of `count` does. Returns how many steps it has walked over.

    All processes walk over all steps, each from another one on, so that they seldom want the same kernel at the same time. The
    first process also compiles the kernels that prove that layers can be fused.
    """
    claims = claim_kernels(folder)
    model, vocab_size = make_small_model(config)
    runner = ModelRunner(model, config)
    runner.vocab_size = vocab_size
    if runner.fuses:
        runner.fuse(proven=index > 0)
    claims.launches = False
    limit: Any = config.max_model_len or model.config.get_text_config().max_position_embeddings
    runner.allocate(PAGES, limit)
    work: list[Any] = [*sampling_variants()]
    work += empty_steps(max_num_seqs=config.max_num_seqs, max_tokens=config.max_num_batched_tokens, max_keys=limit)
    begin_at = index * len(work) // count
    for item in work[begin_at:] + work[:begin_at]:
        runner.run_warm_up(item)
    return len(work)


def main() -> None:
    """A process: its arguments are the folder, its number and the number of processes; the config comes through stdin."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    folder, index, count = sys.argv[1:]
    compile_share(pickle.load(sys.stdin.buffer), Path(folder), int(index), int(count))


if __name__ == "__main__":
    main()
