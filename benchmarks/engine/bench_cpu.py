"""The engine on a CPU and `model.generate` with sdpa: one request alone, and 16 in a batch. Greedy, on the embedded model.

python -m benchmarks.engine.bench_cpu --dtype float32

All are timed in turn by the CPU time of their thread. The results are medians over the rounds, and ratios are medians of the
ratios within a round, because other programs disturb the caches from second to second. These ratios still differ by 4% between
processes, and ratios of least times by 10%. The script prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM

from fa_serve.demo import model_path
from fa_serve.engine import Engine, EngineConfig, SamplingParams

TOKENS = 100
PROMPT = "def add(a, b):\n    return a + b\n\n\n"


def seconds(function: Callable[[], object]) -> float:
    start = time.thread_time()
    function()
    return time.thread_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the time of one thread is what is measured
    engine = Engine(EngineConfig(device="cpu", num_pages=256, dtype=args.dtype))
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=args.dtype, attn_implementation="sdpa")
    prompt = engine.tokenizer.encode(PROMPT)
    ids = torch.tensor([prompt])
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)

    def generate() -> list[int]:
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False
        )
        return output[0, len(prompt) :].tolist()

    ways = {
        "generate": generate,
        "engine": lambda: engine.generate([prompt], params),
        "engine16": lambda: engine.generate([prompt[: 3 + i % 5] for i in range(16)], params),
    }
    # min_new_tokens of `generate` suppresses the end token, and so does min_tokens
    exact = SamplingParams(max_tokens=TOKENS, temperature=0.0, min_tokens=TOKENS)
    same = generate() == engine.generate([prompt], exact)[0].token_ids
    ways["engine16"]()
    rounds = [[seconds(way) for way in ways.values()] for _ in range(args.rounds)]
    alone, one, sixteen = (statistics.median(times) for times in zip(*rounds, strict=True))
    report = {
        "dtype": str(model.dtype)[6:],
        "same_tokens": same,
        "generate_tokens_per_s": round(TOKENS / alone, 1),
        "engine_tokens_per_s": round(TOKENS / one, 1),
        "engine_16_tokens_per_s": round(16 * TOKENS / sixteen, 1),
        "one_over_generate": round(statistics.median(a / b for a, b, _ in rounds), 3),
        "sixteen_over_generate": round(statistics.median(16 * a / c for a, _, c in rounds), 2),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
