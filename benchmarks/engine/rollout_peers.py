"""The workloads of bench_rollouts.py, and its peers at these workloads, each in a separate process.

    work = workload("qwen06")
    rates = measure_vllm("qwen06", work, device="cuda", path=DIR, out=folder)
    rates |= measure_generate_batch("qwen06", work, device="cuda", tiny=False, seconds=60.0, out=folder)

vLLM answers each workload three times, and the faster of the last two counts. A workload of many prompts (`--prompts`) takes
too long for that: vLLM first answers it with few tokens (`warm_up_tokens`), and then once as a whole. `generate_batch` of
transformers would need minutes for each, so it is stopped after some seconds: its rate is that of the tokens it has by then.
Compared with a whole run, its contexts are shorter, which favours it, and prompts have a larger share of the time, which does
not. What fails is said and left out.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.child_process import Log, answers
from benchmarks.engine.bench_generate import answer_within
from benchmarks.engine.bench_serving import peer_environment
from benchmarks.engine.engine_runs import tell
from benchmarks.engine.engine_workloads import SHAPES, make_folder, make_model, make_tiny, say

PREPARATION = 240.0
"""Seconds in which generate_batch must have its model, its cache and its graphs."""
WARM_UP_TOKENS = 64
"""The most tokens of an answer in the call that warms up a workload of many prompts, of ours and of vLLM."""


class Workload(NamedTuple):
    """Rollouts of a call, and sequences of a training step. samples: answers to a prompt; length, new: tokens of each"""

    prompts: int = 16
    samples: int = 16
    length: int = 512
    new: int = 1024
    trained: int = 1024

    @property
    def warm_up_tokens(self) -> int:
        return min(WARM_UP_TOKENS, self.new)

    def draw_prompts(self, draw: random.Random, vocab: int) -> list[list[int]]:
        return [[draw.randrange(vocab) for _ in range(self.length)] for _ in range(self.prompts)]


WORKLOADS = {"llama8b": Workload(new=512), "tiny": Workload(2, 3, 8, 6, 14)}


def workload(shape: str, *, tiny: bool = False, prompts: int | None = None) -> Workload:
    """prompts: so many instead of those of the shape's workload"""
    work = WORKLOADS.get("tiny" if tiny else shape, Workload())
    return work if prompts is None else work._replace(prompts=prompts)


VLLM = """
import json, sys, time
from vllm import LLM, SamplingParams
given = json.load(open(sys.argv[1]))
llm = LLM(
    given["model"], skip_tokenizer_init=True, dtype="bfloat16", max_model_len=given["longest"], gpu_memory_utilization=0.6
)
seconds = []
for asked, tokens in zip(given["prompts"], given["tokens"]):
    params = SamplingParams(
        n=given["samples"], max_tokens=tokens, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False
    )
    begin = time.perf_counter()
    llm.generate([{"prompt_token_ids": each} for each in asked], params, use_tqdm=False)
    seconds.append(time.perf_counter() - begin)
print("@ " + json.dumps(["rollouts", min(seconds[1:])]), flush=True)
begin = time.perf_counter()
llm.collective_rpc("reload_weights")
llm.reset_prefix_cache()
print("@ " + json.dumps(["update", time.perf_counter() - begin]), flush=True)
"""


def measure_vllm(shape: str, work: Workload, *, device: str, path: str, out: Path, once: bool = False) -> dict[str, float]:
    """The rate and the milliseconds of an update of vLLM, by case.

    path: folder of packages that has it; once: the whole workload is answered once, after a short warm-up
    """
    tokens = [work.warm_up_tokens, work.new] if once else [work.new] * 3
    draw = random.Random(1)
    vocab = SHAPES[shape]["vocab_size"]
    with tempfile.TemporaryDirectory(prefix="bench_rollouts_") as folder:
        make_folder(shape, Path(folder), device)
        given = {
            "model": folder,
            "longest": work.length + work.new,
            "samples": work.samples,
            "tokens": tokens,
            "prompts": [work.draw_prompts(draw, vocab) for _ in tokens],
        }
        env = os.environ | {"HF_HUB_OFFLINE": "1"} | peer_environment(path)
        given_file = Path(folder) / "given.json"
        given_file.write_text(json.dumps(given))
        command = [sys.executable, "-c", VLLM, str(given_file)]
        log = Log(out / f"peer_vllm_{shape}.log")
        seconds: dict[str, float] = dict(answers(command, env, 600.0, log))
    if len(seconds) < 2:
        say(f"vLLM has not done all:\n{log.report()}")
    rates = {"rollouts": work.prompts * work.samples / seconds["rollouts"]} if "rollouts" in seconds else {}
    say(f"{shape}: vLLM's seconds: {seconds}")
    return rates | ({"update": 1e3 * seconds["update"]} if "update" in seconds else {})


def measure_generate_batch(
    shape: str, work: Workload, *, device: str, tiny: bool, seconds: float, out: Path
) -> dict[str, float]:
    """The answers a second of generate_batch, by the name of the peer, from the tokens that it has after `seconds`."""
    given = {"shape": shape, "work": work._asdict(), "device": device, "tiny": tiny, "seconds": seconds}
    log = Log(out / f"peer_generate_batch_{shape}.log")
    command = [sys.executable, "-m", "benchmarks.engine.rollout_peers", json.dumps(given)]
    for name, rate, note in answers(command, os.environ, PREPARATION + seconds, log):
        say(f"{shape} {name} of generate_batch: {note}")
        return {"generate_batch": rate}
    say(f"generate_batch has not done it:\n{log.report()}")
    return {}


def generate_batch(given: Mapping[str, Any]) -> None:
    """Answer as many copies of each prompt as it has samples, with log-probabilities, and tell the rate."""
    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    if given["tiny"]:
        make_tiny()
    work = Workload(**given["work"])
    model = make_model(given["shape"], given["device"], dtype=torch.float32 if given["tiny"] else torch.bfloat16)
    model.set_attn_implementation("paged|sdpa")
    # end tokens are ignored, and the whole distribution is sampled, as in the other engines
    sampling = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0)
    # by default its cache takes most of the free memory, which is too much of a host
    size: dict[str, Any] = {"num_blocks": 64, "max_batch_tokens": 256} if given["tiny"] else {}
    manager = model.init_continuous_batching(
        generation_config=sampling,
        continuous_batching_config=ContinuousBatchingConfig(return_logprobs=True, **size),
        workload_hints=WorkloadHints(work.length, work.new, work.prompts * work.samples),
    )
    manager.warmup()
    manager.start()
    draw = random.Random(2)
    vocab = model.config.vocab_size
    answer_within(manager, work.draw_prompts(draw, vocab)[:4], 4, PREPARATION)
    copies = [prompt for prompt in work.draw_prompts(draw, vocab) for _ in range(work.samples)]
    tokens, seconds = answer_within(manager, copies, work.new, given["seconds"])
    note = f"{tokens} of {len(copies) * work.new} tokens in {seconds:.1f} s"
    tell("rollouts", tokens / work.new / seconds, note)


if __name__ == "__main__":
    generate_batch(json.loads(sys.argv[1]))
