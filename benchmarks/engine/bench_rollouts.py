"""Rollouts of GRPO's shape in the trainer's process, and what a training step takes beside them.

    python -m benchmarks.engine.bench_rollouts                         # 0.6B and 8B on one GPU
    python -m benchmarks.engine.bench_rollouts --shapes tiny --device cpu --tiny       # to try the script

rollouts:  answers a second, of 64 prompts with 16 answers each, 512 tokens in and 1,024 out, with `update` before them
update:    milliseconds of `RolloutEngine.update` after a step in place; and the bytes that it allocates
sleep:     milliseconds of `sleep` and `wake_up` together, and the bytes that the KV cache gives back
exact:     milliseconds of a training forward and backward in `fa_serve.exact`; the peer is the plain forward and backward

A rollout's log-probabilities are compared with the exact forward first, in every bit. Left out: vLLM and generate_batch beside
it, which bench_engine has offline. The lines are in results/rollouts.jsonl.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fa_serve
from benchmarks.engine.engine_workloads import SHAPES, make_model
from benchmarks.measure import Results
from fa_serve.engine import RolloutEngine, SamplingParams


def seconds(call: Callable[[], object]) -> float:
    """Of one call, with what it has queued on the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def step_in_place(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0001)


def train(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """One forward and backward. Returns the log-probabilities of the tokens after the first."""
    logits = model(input_ids=ids).logits[:, :-1]
    logprobs = fa_serve.token_logprobs(logits, ids[:, 1:])
    logprobs.sum().backward()
    return logprobs.detach()


def measure_engine(results: Results, shape: str, model: Any, tiny: bool) -> None:
    prompts, samples, length, new = (2, 3, 8, 6) if tiny else (64, 16, 512, 1024)
    size: dict[str, Any] = {"num_pages": 512} if tiny else {}
    engine = RolloutEngine(model, max_model_len=length + new, **size)
    draw = random.Random(0)
    vocab = model.config.vocab_size
    asked = [[draw.randrange(vocab) for _ in range(length)] for _ in range(prompts)]
    params = SamplingParams(max_tokens=new, seed=0, ignore_eos=True)
    engine.generate(asked[:1], samples, params)

    def roll_out() -> None:
        engine.update()
        engine.generate(asked, samples, params)

    results.add(f"{shape} rollouts", "answers/s", prompts * samples / seconds(roll_out), {})
    step_in_place(model)
    before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    results.add(f"{shape} update", "ms", seconds(engine.update) * 1e3, {})
    if torch.cuda.is_available():
        results.add(f"{shape} update memory", "bytes", torch.cuda.max_memory_allocated() - before, {})

    def nap() -> None:
        engine.sleep()
        engine.wake_up()

    results.add(f"{shape} sleep", "ms", seconds(nap) * 1e3, {})
    engine.close()


def measure_exact(results: Results, shape: str, model: Any, tiny: bool) -> None:
    length, new = (8, 6) if tiny else (512, 512)
    size: dict[str, Any] = {"num_pages": 512} if tiny else {}
    engine = RolloutEngine(model, deterministic=True, max_model_len=length + new, **size)
    prompt = [7] * length
    params = SamplingParams(max_tokens=new, seed=0, ignore_eos=True)
    [rollout] = engine.generate([prompt], params=params)[0].rollouts
    engine.close()
    ids = torch.tensor([prompt + rollout.token_ids], device=model.device)
    exact = fa_serve.exact(model)
    with exact:
        found = train(model, ids)[0, length - 1 :]
    assert found.tolist() == rollout.logprobs, "the training forward differs from the rollout"

    def in_context() -> None:
        with exact:
            train(model, ids)

    train(model, ids)
    plain = seconds(lambda: train(model, ids))
    results.add(f"{shape} exact", "ms", seconds(in_context) * 1e3, {"plain": plain * 1e3})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="qwen06,llama8b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="few and short answers")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    options = parser.parse_args()
    results = Results("rollouts", options.out)
    for shape in options.shapes.split(","):
        model = make_model(shape, options.device, dtype=torch.float32 if options.tiny else torch.bfloat16)
        model.set_attn_implementation("fa_serve")
        measure_engine(results, shape, model, options.tiny)
        measure_exact(results, shape, model, options.tiny)
    for line in results.lines:
        print(f"{line['case']}: {line['ours']} {line['unit']}, peers {line['peers']}")
    results.merge()


if __name__ == "__main__":
    main()
