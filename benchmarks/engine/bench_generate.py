"""`model.generate` and `model.generate_batch` with fa_serve, sdpa and eager, at real shapes with random weights, on one GPU.

    python -m benchmarks.engine.bench_generate  # everything, a quarter of an hour
    python -m benchmarks.engine.bench_generate --cases growing,static --models llama-3.1-8b --budget 150

ttft:    time until the first token of one prompt of 1k, 8k, 32k and 128k tokens; eager up to 8k, where its scores fit
padded:  the same for 16 prompts of 256 to 2,048 tokens, padded on the left, and the time of a later token
growing: time of a token after 32k of context in a growing cache
static:  32k tokens in and 128 out in a static cache, with the compiled forward and CUDA graphs of transformers: the time of
         the whole call, and of a token
batch:   generate_batch for 256 requests with 512 tokens in and 256 out, end tokens ignored, after a warm-up; sdpa is stopped
         after 20 seconds, and the tokens that it has by then count

The implementations take turns for five seconds, or fifteen where the host determines the time (later tokens, and prompts of
1k), and have at least one turn each after a first one that does not count. The clock of a GPU and the load of its host change
over time, and cuDNN, which computes sdpa on Hopper, takes tens of milliseconds for a length that it has not seen. The result is
the turn that is slower than a tenth of the turns. Ratios of best turns scatter by 2% from process to process, because a best
turn may be lucky; ratios of these turns scatter by less. The time of a token is the median of 24 in each turn.

The models are complete, except that gpt-oss has two of its 32 experts, which do not change attention; its only peer is eager.
Before a model is timed, its logits are compared with float32 by the 2x rule (mean error). A line is written and printed as
soon as it is measured. Cases that do not fit into the budget are left out.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

import fa_serve  # noqa: F401  (makes the name known to transformers)
from benchmarks.measure import Results

OURS = "fa_serve"
EAGER_LIMIT = 8192  # tokens of one prompt beyond which eager's scores outgrow the card
PROMPTS = (1024, 8192, 32768, 131072)


@dataclass(frozen=True)
class Shape:
    """The sizes of a published model."""

    model_class: str
    layers: int
    config: dict[str, Any] = field(default_factory=dict)
    sdpa: bool = True


SHAPES = {
    "llama-3.1-8b": Shape(
        "LlamaForCausalLM",
        32,
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 128256,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-0.6b": Shape(
        "Qwen3ForCausalLM",
        28,
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
    ),
    "gemma-3-4b": Shape(
        "Gemma3ForCausalLM",
        34,
        {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262208,
            "sliding_window": 1024,
            "query_pre_attn_scalar": 256,
            "layer_types": ([*["sliding_attention"] * 5, "full_attention"] * 6)[:34],
        },
    ),
    "gpt-oss-20b": Shape(
        "GptOssForCausalLM",
        24,
        {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 201088,
            "num_local_experts": 2,
            "num_experts_per_tok": 2,
            "sliding_window": 128,
        },
        sdpa=False,
    ),
}


class Bench:
    def __init__(self, budget: float, results: Results) -> None:
        self.deadline = time.perf_counter() + budget
        self.results = results

    def left(self) -> float:
        return self.deadline - time.perf_counter()

    def compare(self, case: str, unit: str, measure: dict[str, Callable[[], float]], seconds: float, turns: int = 1000) -> None:
        """Time the implementations in turn and write the line. `seconds` is the expected duration of a turn.

        The first turn is a warm-up. With `turns=1` there is none, and the call must warm up by itself.
        """
        values: dict[str, list[float]] = {name: [] for name in measure}
        begin = time.perf_counter()
        enough = 15.0 if case.endswith(("token", "growing", "1024")) else 5.0
        for turn in range(turns):
            started = time.perf_counter()
            if self.left() < seconds or (turn > 1 and started - begin > enough):
                break
            for name in sorted(measure, reverse=turn % 2 == 1):
                try:
                    values[name].append(measure[name]())
                except torch.OutOfMemoryError:
                    print(f"{case}: {name} is out of memory", flush=True)
            ended = time.perf_counter()
            seconds, begin = (ended - started, begin) if turn else (seconds, ended)
        counted = {name: sorted(times[turns > 1 :], reverse="/" in unit) for name, times in values.items()}
        measured = {name: times[len(times) // 10] for name, times in counted.items() if times}
        if len(measured) < len(measure):
            print(f"{case}: left out {sorted(measure.keys() - measured.keys())}, {self.left():.0f} s are left", flush=True)
        if OURS in measured and len(measured) > 1:
            ours = measured.pop(OURS)
            self.results.add(case, unit, ours, measured)
            print(json.dumps(self.results.lines[-1]), flush=True)
        gc.collect()
        torch.cuda.empty_cache()


def build(shape: Shape) -> PreTrainedModel:
    model_class: Any = getattr(transformers, shape.model_class)
    changes = {"num_hidden_layers": shape.layers, "max_position_embeddings": 262144, "pad_token_id": 0, "eos_token_id": None}
    if "layer_types" in shape.config:
        changes["layer_types"] = shape.config["layer_types"][: shape.layers]
    config = model_class.config_class(**(shape.config | changes))
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model: PreTrainedModel = model_class(config).eval()
    torch.set_default_dtype(torch.float32)
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    return model


def implementations(shape: Shape, tokens: int) -> list[str]:
    return [OURS, *(["sdpa"] if shape.sdpa else []), *(["eager"] if tokens <= EAGER_LIMIT else [])]


def prompt(shape: Shape, rows: int, length: int) -> Tensor:
    return torch.randint(3, shape.config["vocab_size"], (rows, length), device="cuda")


def gate(model: PreTrainedModel, shape: Shape) -> bool:
    """Whether our mean error is at most twice that of eager bfloat16, over the logits of 3 padded prompts, against float32."""
    ids = prompt(shape, 3, 700)
    mask = torch.ones_like(ids)
    mask[0, :300] = mask[1, :10] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    exact_model = copy.deepcopy(model).float()
    exact_model.set_attn_implementation("eager")
    if "num_local_experts" in shape.config:
        exact_model.set_experts_implementation("eager")  # the others are for bfloat16
    exact = exact_model(**inputs, logits_to_keep=64).logits
    errors = {}
    for name in (OURS, "eager"):
        model.set_attn_implementation(name)
        errors[name] = (model(**inputs, logits_to_keep=64).logits.float() - exact).abs().mean().item()
    right = errors[OURS] <= 2 * errors["eager"]
    print(f"gate: error {errors[OURS]:.2e}, of eager {errors['eager']:.2e}: {'right' if right else 'WRONG'}", flush=True)
    return right


class Clock(StoppingCriteria):
    """A stopping criterion that records the time of each token and never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def generate(model: PreTrainedModel, name: str, inputs: dict[str, Tensor], new: int, **options: Any) -> list[float]:
    """Seconds from the call to each new token."""
    if model.config._attn_implementation != name:
        model.set_attn_implementation(name)
    clock = Clock()
    torch.cuda.synchronize()
    started = time.perf_counter()
    generate_tokens: Any = model.generate
    generate_tokens(**inputs, max_new_tokens=new, stopping_criteria=StoppingCriteriaList([clock]), **options)
    return [at - started for at in clock.times]


def first_token(model: PreTrainedModel, name: str, inputs: dict[str, Tensor]) -> float:
    """Milliseconds."""
    return 1e3 * generate(model, name, inputs, 1)[0]


def later_token(times: list[float]) -> float:
    """Milliseconds: the median of all but the first eight."""
    return 1e3 * statistics.median(b - a for a, b in itertools.pairwise(times[7:]))


def time_to_first_token(bench: Bench, model: PreTrainedModel, shape: Shape, title: str) -> None:
    for length in PROMPTS:
        inputs = {"input_ids": prompt(shape, 1, length)}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        calls = {n: lambda n=n, i=inputs: first_token(model, n, i) for n in implementations(shape, length)}
        if len(calls) > 1:
            bench.compare(f"ttft_{title}_{length}", "ms", calls, length / 5e4)


def padded(bench: Bench, model: PreTrainedModel, shape: Shape, title: str) -> None:
    inputs = {"input_ids": prompt(shape, 16, 2048)}
    lengths = torch.linspace(256, 2048, 16, device="cuda").long()
    inputs["attention_mask"] = (torch.arange(2048, device="cuda") >= 2048 - lengths[:, None]).long()
    names = implementations(shape, 2048)
    bench.compare(f"padded_{title}_16x2048_first", "ms", {n: lambda n=n: first_token(model, n, inputs) for n in names}, 1)
    calls = {n: lambda n=n: later_token(generate(model, n, inputs, 32)) for n in names}
    bench.compare(f"padded_{title}_16x2048_token", "ms", calls, 1)


def growing(bench: Bench, model: PreTrainedModel, shape: Shape, title: str) -> None:
    inputs = {"input_ids": prompt(shape, 1, 32768)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    calls = {n: lambda n=n: later_token(generate(model, n, inputs, 32)) for n in implementations(shape, 32768)}
    bench.compare(f"decode_{title}_32768_growing", "ms", calls, 1)


def static(bench: Bench, model: PreTrainedModel, shape: Shape, title: str) -> None:
    inputs = {"input_ids": prompt(shape, 1, 32768)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    token: dict[str, float] = {}

    def whole(name: str) -> float:
        torch.compiler.reset()
        runs = [generate(model, name, inputs, 128, cache_implementation="static") for _ in range(3)]
        token[name] = min(later_token(times) for times in runs[1:])
        return min(1e3 * times[-1] for times in runs)

    names = implementations(shape, 32768)
    bench.compare(f"generate_{title}_32768_128_static", "ms", {n: lambda n=n: whole(n) for n in names}, 10, turns=1)
    calls = {n: lambda n=n: token[n] for n in names if n in token}
    bench.compare(f"decode_{title}_32768_static", "ms", calls, 0, turns=1)


def batch(bench: Bench, model: PreTrainedModel, shape: Shape, title: str) -> None:
    def tokens_per_second(name: str) -> float:
        if model.config._attn_implementation != name:
            model.set_attn_implementation(name)
        make: Any = model.init_continuous_batching
        manager = make(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(max_requests_per_batch=256, max_blocks_per_request=4),
        )
        started = time.perf_counter()
        manager.warmup()
        manager.start()
        answer_within(manager, prompt(shape, 256 if name == OURS else 4, 512).tolist(), 4, 60)
        warm = time.perf_counter()
        tokens, seconds = answer_within(manager, prompt(shape, 256, 512).tolist(), 256, 60 if name == OURS else 20)
        print(f"{name}: warm-up {warm - started:.1f} s, {tokens} tokens in {seconds:.1f} s", flush=True)
        manager.destroy()
        return tokens / seconds

    calls = {n: lambda n=n: tokens_per_second(n) for n in (OURS, "sdpa")}
    bench.compare(f"batch_{title}_256x512+256", "token/s", calls, 12, turns=1)


def answer_within(manager: Any, prompts: list[list[int]], new: int, limit: float) -> tuple[int, float]:
    """Tokens and seconds when all requests are done, or after `limit` seconds."""
    started = time.perf_counter()
    manager.add_requests(prompts, max_new_tokens=new)
    done = 0
    while done < len(prompts) and time.perf_counter() - started < limit:
        result = manager.get_result(timeout=0.2)
        if result is not None and result.error:
            raise RuntimeError(result.error)
        done += result is not None and result.is_finished()
        if not manager.is_running():
            raise RuntimeError(f"generate_batch ended after {done} of {len(prompts)} requests")
    seconds = time.perf_counter() - started
    unfinished = list(manager.batch_processor.scheduler.active_requests.values())
    tokens = done * new + sum(state.generated_len() for state in unfinished)
    if done < len(prompts):
        manager.stop(block=True, timeout=10, hard_stop=True)
    return tokens, seconds


CASES = {"ttft": time_to_first_token, "padded": padded, "growing": growing, "static": static, "batch": batch}
# generate_batch once, at the smallest shape: what it costs beyond the kernels does not depend on the model. Eager attention,
# all that gpt-oss can be compared with, does not fit behind 32k
SKIP = {("batch", name) for name in SHAPES if name != "qwen3-0.6b"} | {("growing", "gpt-oss-20b"), ("static", "gpt-oss-20b")}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--layers", type=int, default=0, help="so many of each model's, for a quick look")
    parser.add_argument("--budget", type=float, default=1200, help="seconds")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    bench = Bench(arguments.budget, Results("generate", arguments.out))
    cases = arguments.cases.split(",")
    for name in arguments.models.split(","):
        if all((case, name) in SKIP for case in cases):
            continue
        shape = SHAPES[name]
        if arguments.layers:
            shape = replace(shape, layers=arguments.layers)
        model = build(shape)
        if gate(model, shape):
            for case in cases:
                if (case, name) not in SKIP:
                    CASES[case](bench, model, shape, name + f"_{arguments.layers}_layers" * bool(arguments.layers))
        del model
        gc.collect()
        torch.cuda.empty_cache()
    print(f"{len(bench.results.lines)} lines -> {bench.results.path}")


if __name__ == "__main__":
    main()
