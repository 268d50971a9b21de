"""Many requests of random lengths, with aborts, deadlines and every parameter, through an engine with too small a cache.

The run checks that no request is lost, that all pages and slots are accounted for, and that memory does not grow.

python -m benchmarks.soak.long_run                       # 20,000 requests on the embedded model, about a minute on a GPU
python -m benchmarks.soak.long_run --requests 500 --device cpu
python -m benchmarks.soak.long_run --tensor-parallel 2   # on two GPUs
python -m benchmarks.soak.long_run --shape qwen30a3b --tiny      # a mixture; llama8b-w4 has quantised weights
python -m benchmarks.soak.long_run --shape qwen3next --tiny --longest-prompt 16 --longest-answer 8   # states; short for a CPU

It prints one JSON line, and raises AssertionError if a check fails. With --results the line is kept in soak.jsonl.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.engine.engine_workloads import QUANTISED, SHAPES, make_folder, make_model, make_tiny
from benchmarks.measure import Results
from fa_serve.engine import Engine, EngineConfig, SamplingParams

HOST_GROWTH = 256 << 20
"""How many bytes of the host's memory a run may take after a quarter of its requests: caches that are filled, no leak."""


def random_params(draw: random.Random, seed: int, most: int = 60) -> SamplingParams:
    values: dict[str, Any] = {"max_tokens": draw.randint(1, most), "seed": seed, "temperature": draw.choice([0.0, 0.7, 1.0])}
    for name, options in {
        "top_p": [0.9],
        "top_k": [1, 40],
        "min_p": [0.05],
        "repetition_penalty": [1.2],
        "presence_penalty": [0.5],
        "logprobs": [0, 3],
        "prompt_logprobs": [1],
        "n": [2, 3],
        "best_of": [3],
        "logit_bias": [{5: 2.0}],
        "ignore_eos": [True],
    }.items():
        if draw.random() < 0.08:
            values[name] = draw.choice(options)
    values["best_of"] = max(values.get("best_of", 0), values.get("n", 1)) if "best_of" in values else None
    return SamplingParams(**values)


def long_run(
    engine: Engine, count: int, *, alive: int, longest: int, most: int = 60, seconds: float = inf, seed: int = 0
) -> dict[str, Any]:
    """Run `count` requests, `alive` at a time, with prompts of up to `longest` tokens and answers of up to `most`.

    seconds: after so many none is added, and the report says how many there were

    Returns the report by name.
    """
    draw = random.Random(seed)
    heads = [[draw.randrange(engine.vocab_size) for _ in range(longest // 2)] for _ in range(8)]
    wanted: dict[str, int] = {}  # answers that have not ended, by request
    ends: Counter[str] = Counter()
    memory: dict[str, float] = {}
    added = steps = 0
    start = time.perf_counter()
    while added < count or engine.has_unfinished():
        if time.perf_counter() - start > seconds:
            count = added
        while added < count and len(wanted) < alive:
            head = draw.choice(heads)[: draw.randint(0, longest // 2)] if draw.random() < 0.5 else []
            prompt = head + [draw.randrange(engine.vocab_size) for _ in range(draw.randint(1, longest - len(head)))]
            params = random_params(draw, added, most)
            timeout = 0.02 if draw.random() < 0.01 else None
            engine.add_request(str(added), prompt, params, priority=draw.choice([0, 0, 0, -1, 2]), timeout=timeout)
            wanted[str(added)] = params.n
            added += 1
        outputs = engine.step()
        if wanted and draw.random() < 0.1:
            outputs += engine.abort(draw.choice(tuple(wanted)))
        for output in outputs:
            assert output.request_id in wanted, f"request {output.request_id} has an output after its end"
            if output.finished:
                ends[f"{output.finish_reason}"] += 1
                assert output.finish_reason != "error" or output.error.code == "timeout", output.error
                wanted[output.request_id] -= 1
                if not wanted[output.request_id]:
                    del wanted[output.request_id]
        steps += 1
        if steps % 16 == 0:
            engine.check_integrity()
        if added * 4 >= count and "before" not in memory:
            memory["before"] = device_bytes()
            memory["host_before"] = host_bytes()
    elapsed = time.perf_counter() - start
    engine.check_integrity()
    stats = engine.stats()
    assert not wanted, f"{len(wanted)} requests were lost"
    assert stats.num_pages_used == stats.num_states_used == stats.num_running == stats.num_waiting == 0
    assert not engine._scheduler.sequences, "every sequence has left its slot"
    assert device_bytes() <= memory["before"] + (16 << 20), f"device memory grew from {memory['before']} to {device_bytes()}"
    grown = host_bytes() - memory["host_before"]
    assert grown <= HOST_GROWTH, f"the host's memory grew by {grown} bytes after a quarter of the requests"
    return {
        "requests": count,
        "answers": dict(ends),
        "steps": steps,
        "seconds": round(elapsed, 1),
        "largest_alive": alive,
        "output_tokens": stats.num_output_tokens,
        "preemptions": stats.num_preemptions,
        "cached_tokens": stats.num_cached_tokens,
        "device_mib_grown": round((device_bytes() - memory["before"]) / 2**20, 1),
        "host_mib_grown": round(grown / 2**20, 1),
        "states_kept": stats.num_states_kept,
    }


def device_bytes() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def host_bytes() -> int:
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * 4096 if status.exists() else 0


def make_engine(args: argparse.Namespace, folder: str) -> Engine:
    """An engine with the model that was asked for. Its files, where it needs some, go into `folder`."""
    # short prompts are admitted together and grow into more pages than there are; small pages make that frequent
    settings: dict[str, Any] = {
        "device": args.device,
        "tensor_parallel": args.tensor_parallel,
        "num_pages": 1536,
        "page_size": 4,
        "max_model_len": 256,
        "max_num_batched_tokens": 2048,
        "seed": 0,
    }
    if "linear_num_key_heads" in SHAPES.get(args.shape, {}):
        settings["num_states"] = 320  # fewer than 256 running sequences need with those that are kept
    device = EngineConfig(**settings).resolve_device()
    if args.shape is None:
        return Engine(EngineConfig(**settings))
    if args.shape in QUANTISED or args.tensor_parallel > 1:
        make_folder(args.shape, Path(folder), device)
        return Engine(EngineConfig(model=folder, **settings))
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return Engine(EngineConfig(**settings), model=make_model(args.shape, device, dtype=dtype))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks that the model is divided between")
    parser.add_argument(
        "--shape", choices=SHAPES, help="a model of this shape with random weights; default: the embedded model"
    )
    parser.add_argument("--tiny", action="store_true", help="the shape in tiny sizes")
    parser.add_argument("--longest-prompt", type=int, default=48, help="in tokens")
    parser.add_argument("--longest-answer", type=int, default=60, help="in tokens")
    parser.add_argument("--seconds", type=float, default=inf, help="after which no request is added")
    parser.add_argument("--results", type=Path, help="the folder with soak.jsonl, to which the line is added")
    args = parser.parse_args()
    if args.tiny and args.shape is None:
        parser.error("--tiny needs --shape, which names the model that gets tiny sizes")
    if args.tiny:
        make_tiny()
    with TemporaryDirectory() as folder:
        engine = make_engine(args, folder)
    report = long_run(
        engine, args.requests, alive=400, longest=args.longest_prompt, most=args.longest_answer, seconds=args.seconds
    )
    engine.close()
    print(json.dumps(report))
    if args.results is not None:
        case = f"{args.shape or 'embedded'}{', tiny' if args.tiny else ''}, {report['requests']} requests"
        results = Results("soak", args.results, **report)
        results.add(case, "requests/s", report["requests"] / report["seconds"], {})


if __name__ == "__main__":
    main()
