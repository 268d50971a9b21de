"""The memory that loading a checkpoint takes, for each format of weights: what it holds at last, and its peak on the way.

    python -m benchmarks.engine.load_memory                # a dense model and a mixture, in every format, on the CPU
    python -m benchmarks.engine.load_memory --device cuda  # the same in the memory of a GPU
    python -m benchmarks.engine.load_memory --formats awq,fp8-block --layers 32

Each checkpoint has random weights, is written by examples/quantise.py, and is loaded in a process for itself, as the engine
loads it. "floats" is what the weights take in bfloat16, "held" what the loaded model takes, and "peak" the most that loading
took: below "floats", it made no full-precision copy. On a GPU the peak is what PyTorch allocates there. On the CPU it is memory
of the process without mapped files, sampled each millisecond. Weights that stay as they are in their file are mapped, and take
nothing else.

--out writes the rows of docs/quantised.md: `python -m benchmarks.engine.load_memory --out tests/results/load_memory.json`,
then `python tests/support/report_models.py --page`.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT), str(ROOT / "examples")]
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": SIZES | {"model_type": "llama"},
    "mixture": SIZES | {"model_type": "qwen3_moe", "moe_intermediate_size": 512, "num_experts": 8, "num_experts_per_tok": 2},
}
WHILE_LOADING = "bfloat16 to fp8"
"""A checkpoint of floats that is rounded while it is loaded."""
COLUMNS = ("floats", "file", "held", "peak")
MIB = 2**20


def anonymous_bytes() -> int:
    """The memory of this process, except for mapped files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon: measure on Linux")


class Peak:
    """The largest memory while it is entered, sampled by a thread."""

    def __enter__(self) -> Peak:
        self.bytes = anonymous_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._ended.is_set():
            self.bytes = max(self.bytes, anonymous_bytes())
            time.sleep(0.001)

    def __exit__(self, *error: object) -> None:
        self.bytes = max(self.bytes, anonymous_bytes())
        self._ended.set()
        self._thread.join()


def measure(folder: Path, device: str, quantization: str | None) -> dict[str, int]:
    """Load a checkpoint in this process. Returns the bytes that it holds, and its peak."""
    import torch

    from fa_serve.engine import EngineConfig
    from fa_serve.engine.start.loading import load_model

    load_model(EngineConfig(device=device))  # the embedded model, because the first load of a process imports and keeps more
    config = EngineConfig(model=folder, device=device, quantization=quantization)
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model = load_model(config)
        return {"held": torch.cuda.memory_allocated() - before, "peak": torch.cuda.max_memory_allocated() - before}
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else loading would use memory that was freed before it
    before = anonymous_bytes()
    with Peak() as peak:
        model = load_model(config)
    return {"held": held_bytes(model), "peak": peak.bytes - before}


def held_bytes(model: Any) -> int:
    """Bytes of all weights, also where they are still in the mapped file."""
    from benchmarks.engine.engine_workloads import quantised_weights, stored_bytes

    floats = sum(parameter.nbytes for parameter in model.parameters())
    return floats + sum(stored_bytes(weight) for weight in quantised_weights(model))


def write(kind: str, name: str, folder: Path, layers: int, **changes: int) -> int:
    """Write a checkpoint. Returns the bytes of its weights in bfloat16. changes: of MODELS"""
    import quantise
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**MODELS[kind] | changes, num_hidden_layers=layers)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if name in ("bfloat16", WHILE_LOADING):
        model.save_pretrained(folder)
    else:
        quantise.write(model, name, folder, 128)
    return sum(parameter.nbytes for parameter in model.parameters())


def run(kind: str, name: str, device: str, layers: int) -> dict[str, Any]:
    """Write a checkpoint, and load it in another process."""
    with tempfile.TemporaryDirectory(prefix="load_memory_") as temporary:
        folder = Path(temporary)
        floats = write(kind, name, folder, layers)
        file = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        command = [sys.executable, "-m", "benchmarks.engine.load_memory", "--load", temporary, "--device", device]
        command += ["--quantization", "fp8"] if name == WHILE_LOADING else []
        # malloc keeps no memory that was freed: the peak is what loading needs at once
        malloc = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}
        env = os.environ | malloc | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
        done = subprocess.run(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
        return {"model": kind, "format": name, "floats": floats, "file": file} | json.loads(done.stdout.splitlines()[-1])


def all_formats(kind: str) -> list[str]:
    from quantise import formats

    known = [name for name in formats(128) if kind == "dense" or name != "gptq-act-order"]
    return ["bfloat16", WHILE_LOADING, *known]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="dense, mixture, or both")
    parser.add_argument("--formats", help="names of formats; all by default")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--layers", type=int, default=8, help="of the models")
    parser.add_argument("--out", type=Path, help="write the rows to this file as well")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--quantization", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load is not None:
        print(json.dumps(measure(args.load, args.device, args.quantization)))
        return
    print(
        f"MiB on the {args.device}\n\n| model | format | floats | file | held | peak |\n|---|---|---|---|---|---|", flush=True
    )
    rows = []
    for kind in args.models.split(","):
        for name in args.formats.split(",") if args.formats else all_formats(kind):
            row = run(kind, name, args.device, args.layers)
            rows.append(row | {column: round(row[column] / MIB) for column in COLUMNS})
            print("| " + " | ".join(str(value) for value in rows[-1].values()) + " |", flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps({"device": args.device, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
