"""Rollouts of GRPO's shape in the trainer's process, and what a training step takes beside them.

    python -m benchmarks.engine.bench_rollouts                         # 0.6B and 8B on one GPU
    python -m benchmarks.engine.bench_rollouts --parts rollouts --peer-path DIR        # DIR has vLLM, which runs beside ours
    python -m benchmarks.engine.bench_rollouts --shapes qwen06 --parts rollouts,generate_batch
    python -m benchmarks.engine.bench_rollouts --shapes llama06,qwen06,qwenmoe06,gemma06 --parts lengths,exact
    python -m benchmarks.engine.bench_rollouts --shapes tiny --device cpu --tiny       # to try the script

rollouts:  answers a second: groups of 16 answers to prompts of 512 tokens, as many and as long as WORKLOADS says: 256 answers
           of 1,024 tokens for 0.6B, and of 512 tokens for 8B, so that each shape takes 150 seconds of a GPU. With --peer-path,
           vLLM generates as many, with their log-probabilities, in another process. With --prompts, that is all of this part,
           and the line names the number: 64 prompts are GRPO's usual 1,024 answers. Then a short call warms up, and the first
           whole call in which nothing is compiled counts, of ours and of vLLM
generate_batch: the same by `generate_batch` of transformers with sdpa, in another process, as one more peer of the line of
           `rollouts`; stopped after --peer-seconds (rollout_peers.py)
update:    milliseconds of `RolloutEngine.update` after a step in place, once, with the pages of all these calls in the prefix
           cache; and the bytes that it allocates. "update again" has nothing in the cache: the median of 5
sleep:     milliseconds of `sleep` and `wake_up` together
lengths:   the largest difference between the log-probabilities of rollouts and those of a training forward and backward in
           `fa_serve.exact`, which must be 0: prompts and answers of 1 to 4,000 tokens (LENGTHS) are rolled out together, and
           trained one by one. "tokens" are those that were compared by then. "plain" is the difference without
           `fa_serve.exact`, which shows that the comparison would find one. Every difference is printed; none ends the run
exact:     milliseconds of a training forward and backward in `fa_serve.exact`, of 1 and of 8 sequences of 1,024 tokens; the
           peer is the plain forward and backward. Both ways alternate: the median of 5 after 2 warm-ups of each. A shape is
           not timed if a rollout's log-probabilities differ from those of the exact forward

update and sleep are measured with `rollouts`. Rollouts and sleep are warmed up until two calls in a row agree. No call counts
in which a kernel was compiled (benchmarks/steady.py). Of vLLM's update, its own `reload_weights` from files is timed. The lines
are in results/rollouts.jsonl, each as soon as it is measured, except with --tiny. The exit status is 1 if a bit differs.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fa_serve
from benchmarks.engine.bench_engine import names
from benchmarks.engine.engine_workloads import SHAPES, make_model, make_tiny, say
from benchmarks.engine.rollout_peers import Workload, measure_generate_batch, measure_vllm, workload
from benchmarks.measure import Results
from benchmarks.steady import late_work, one_call, steady_seconds
from fa_serve.engine import RolloutEngine, SamplingParams

EXACT_BATCHES = (1, 8)
EXACT_WARM_UPS = 2
EXACT_TURNS = 5
SECONDS = 60.0
"""After which no further call of rollouts is timed, but the first one."""
PARTS = ("rollouts", "generate_batch", "lengths", "exact")
LENGTHS = ((1, 1), (17, 300), (513, 700), (1500, 64), (64, 2000), (1, 4000), (4000, 1), (4000, 4000))
"""Tokens of a prompt and of its answer, of those whose log-probabilities are compared."""
TINY_LENGTHS = ((1, 1), (17, 30), (1, 40), (40, 1), (150, 12))


def step_in_place(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0001)


def logprobs_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The log-probabilities of the tokens after the first. ids: (batch, tokens)"""
    logits = model(input_ids=ids).logits[:, :-1]
    return fa_serve.token_logprobs(logits, ids[:, 1:])


def train(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """`logprobs_of`, with a backward pass."""
    logprobs = logprobs_of(model, ids)
    logprobs.sum().backward()
    return logprobs.detach()


def rollouts_case(shape: str, prompts: int | None) -> str:
    return f"{shape} rollouts" + ("" if prompts is None else f" of {prompts} prompts")


def measure_engine(
    results: Results, shape: str, model: Any, tiny: bool, peers: dict[str, float], prompts: int | None = None
) -> None:
    """peers: vLLM's rate and update, by case; prompts: so many instead of the shape's, and nothing but their rate"""

    def beside(case: str) -> dict[str, float]:
        return {"vllm": peers[case]} if case in peers else {}

    work = workload(shape, tiny=tiny, prompts=prompts)
    size: dict[str, Any] = {"num_pages": 512} if tiny else {}
    engine = RolloutEngine(model, max_model_len=work.length + work.new, **size)
    draw = random.Random(0)
    vocab = model.config.vocab_size

    def roll_out(tokens: int = work.new) -> None:
        """With other prompts in each call, so that nothing is found in the prefix cache, which fills up."""
        params = SamplingParams(max_tokens=tokens, seed=0, ignore_eos=True)
        engine.generate(work.draw_prompts(draw, vocab), work.samples, params)

    engine.update()
    # a call of many prompts is too long to be made until two agree
    one: dict[str, Any] = {} if prompts is None else {"calls": 1, "warm_up": partial(roll_out, work.warm_up_tokens)}
    seconds = steady_seconds(roll_out, lambda: late_work(engine), budget=SECONDS, **one)
    rate = work.prompts * work.samples / seconds
    results.show(rollouts_case(shape, prompts), "answers/s", rate, beside("rollouts"))
    if prompts is None:
        measure_update(results, shape, model, engine, beside("update"))
    engine.close()


def measure_update(results: Results, shape: str, model: Any, engine: RolloutEngine, peers: dict[str, float]) -> None:
    """The lines of update and sleep, of an engine whose prefix cache is full."""
    step_in_place(model)
    before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    results.show(f"{shape} update", "ms", one_call(engine.update) * 1e3, peers)
    if torch.cuda.is_available():
        results.show(f"{shape} update memory", "bytes", torch.cuda.max_memory_allocated() - before, {})

    again = []
    for _ in range(5):
        step_in_place(model)
        again.append(one_call(engine.update) * 1e3)
    results.show(f"{shape} update again", "ms", statistics.median(again), {})

    def nap() -> None:
        engine.sleep()
        engine.wake_up()

    results.show(f"{shape} sleep", "ms", steady_seconds(nap) * 1e3, {})


def add_generate_batch(results: Results, shape: str, options: argparse.Namespace) -> None:
    """Add the peer generate_batch to the line of rollouts that this run has."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the peer sizes its cache by the memory that is free
    work = workload(shape, tiny=options.tiny, prompts=options.prompts)
    given = {"device": options.device, "tiny": options.tiny, "seconds": options.peer_seconds, "out": options.out}
    peers = measure_generate_batch(shape, work, **given)
    case = rollouts_case(shape, options.prompts)
    [line] = [each for each in results.lines if each["case"] == case]
    results.show(case, line["unit"], line["ours"], line["peers"] | peers)


def measure_lengths(results: Results, shape: str, model: Any, tiny: bool) -> bool:
    """Whether training forwards have the log-probabilities of rollouts of many lengths, in every bit.

    The lines grow with each sequence, so that a run that is cut off has those of the sequences before.
    """
    pairs = TINY_LENGTHS if tiny else LENGTHS
    exact = fa_serve.exact(model)
    sequences = roll_out_lengths(shape, model, pairs)
    compared = torch.empty(0, dtype=torch.float64)
    for (length, new), (ids, expected) in zip(pairs, sequences, strict=True):
        model.zero_grad(set_to_none=True)
        with exact:
            found = train(model, ids)[0, length - 1 :]
        say(f"{shape} lengths: prompt {length}, answer {new}: {compare(found, expected)}, {gradients(model)}")
        compared = torch.cat([compared, distance(found, expected)])
        results.add(f"{shape} lengths tokens", "tokens", len(compared), {})
        results.add(f"{shape} lengths", "difference", compared.max().item(), {})
    model.zero_grad(set_to_none=True)
    results.show(f"{shape} lengths tokens", "tokens", len(compared), {})
    results.show(f"{shape} lengths", "difference", compared.max().item(), {})

    largest = 0.0
    with torch.no_grad():
        for (length, _), (ids, expected) in zip(pairs, sequences, strict=True):
            found = logprobs_of(model, ids)[0, length - 1 :]
            largest = max(largest, distance(found, expected).max().item())
    results.show(f"{shape} lengths plain", "difference", largest, {})
    return not compared.any()


def roll_out_lengths(shape: str, model: Any, pairs: tuple[tuple[int, int], ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """All pairs in one call. Returns (1, tokens) of each with its answer, and the log-probabilities of the answer."""
    longest = max(map(sum, pairs))
    # the pages that they need and no more, because training needs the memory
    engine = RolloutEngine(
        model, deterministic=True, max_model_len=longest, num_pages=sum(map(sum, pairs)) // 16 + 16 * len(pairs)
    )
    draw = random.Random(3)
    prompts = [[draw.randrange(model.config.vocab_size) for _ in range(length)] for length, _ in pairs]
    params = [SamplingParams(max_tokens=new, seed=seed, ignore_eos=True) for seed, (_, new) in enumerate(pairs)]
    groups: list[Any] = []
    seconds = one_call(lambda: groups.extend(engine.generate(prompts, params=params)))
    engine.close()
    say(f"{shape} lengths: {sum(new for _, new in pairs)} tokens rolled out in {seconds:.1f} s, compilations included")
    found = []
    for prompt, group in zip(prompts, groups, strict=True):
        [rollout] = group.rollouts
        ids = torch.tensor([prompt + rollout.token_ids], device=model.device)
        found.append((ids, torch.tensor(rollout.logprobs, dtype=torch.float64)))
    return found


def distance(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Of each log-probability, on the host. float64 holds the difference of two float32 numbers without rounding it to 0."""
    return (found.double().cpu() - expected).abs()


def compare(found: torch.Tensor, expected: torch.Tensor) -> str:
    """How many tokens are equal, or where the first difference is."""
    apart = distance(found, expected)
    unequal = apart.nonzero()[:, 0].tolist()  # NaN is unequal too
    if not unequal:
        return f"{len(apart)} equal in every bit"
    first = unequal[0]
    return (
        f"{len(unequal)} of {len(apart)} tokens DIFFER, by up to {apart.max():.3g}, first token {first} of the answer: "
        f"{found[first]:.9g} in training, {expected[first]:.9g} in the rollout"
    )


def gradients(model: torch.nn.Module) -> str:
    wrong = [name for name, x in model.named_parameters() if x.grad is None or not x.grad.isfinite().all()]
    return f"gradients missing or not finite: {', '.join(wrong[:4])} and {len(wrong)} in all" if wrong else "gradients finite"


def measure_exact(results: Results, shape: str, model: Any, tiny: bool) -> None:
    work = workload(shape, tiny=tiny)
    exact = fa_serve.exact(model)
    require_equal_bits(model, exact, work, tiny)
    draw = torch.Generator().manual_seed(0)

    def in_context(ids: torch.Tensor) -> None:
        with exact:
            train(model, ids)

    for batch in EXACT_BATCHES:
        ids = torch.randint(model.config.vocab_size, (batch, work.trained), generator=draw).to(model.device)
        ways = {"exact": partial(in_context, ids), "plain": partial(train, model, ids)}
        for _ in range(EXACT_WARM_UPS):
            for way in ways.values():
                way()
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(2 * EXACT_TURNS):
            for name, way in ways.items():
                num_late = late_work()
                taken = one_call(way) * 1e3
                if late_work() == num_late and len(times[name]) < EXACT_TURNS:
                    times[name].append(taken)
        if not all(times.values()):
            raise RuntimeError("each training step has compiled something")
        found = {name: statistics.median(each) for name, each in times.items()}
        case = f"{shape} exact" if batch == 1 else f"{shape} exact {batch}"
        results.show(case, "ms", found["exact"], {"plain forward": found["plain"]})
    model.zero_grad(set_to_none=True)


def require_equal_bits(model: Any, exact: Any, work: Workload, tiny: bool) -> None:
    """Raise AssertionError unless a training forward has the log-probabilities of a rollout in every bit."""
    length = work.length
    new = min(work.new, work.trained - length)
    size: dict[str, Any] = {"num_pages": 512} if tiny else {}
    engine = RolloutEngine(model, deterministic=True, max_model_len=work.trained, **size)
    prompt = [7] * length
    params = SamplingParams(max_tokens=new, seed=0, ignore_eos=True)
    [rollout] = engine.generate([prompt], params=params)[0].rollouts
    engine.close()
    ids = torch.tensor([prompt + rollout.token_ids], device=model.device)
    with exact:
        found = train(model, ids)[0, length - 1 :]
    assert found.tolist() == rollout.logprobs, "the training forward differs from the rollout"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=names(SHAPES), default=["qwen06", "llama8b"], help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="the shapes in tiny sizes, with few and short answers; writes nothing"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    parser.add_argument("--parts", type=names(PARTS), default=["rollouts", "exact"], help=f"of {', '.join(PARTS)}")
    parser.add_argument("--prompts", type=int, help="so many prompts in a call of rollouts")
    parser.add_argument("--peer-path", help="folder of packages with vLLM")
    parser.add_argument("--peer-seconds", type=float, default=60.0, help="after which generate_batch is stopped")
    options = parser.parse_args()
    if "generate_batch" in options.parts and "rollouts" not in options.parts:
        parser.error("the part generate_batch is a peer of the part rollouts: ask for both")
    if options.tiny:
        make_tiny()
    results = Results("rollouts", options.out, kept=not options.tiny)
    right = [measure(results, shape, options) for shape in options.shapes]
    sys.exit(0 if all(right) else 1)


def measure(results: Results, shape: str, options: argparse.Namespace) -> bool:
    """The parts of a shape. Returns whether the training forward has the bits of rollouts, where that was compared."""
    peers: dict[str, float] = {}
    if options.peer_path and "rollouts" in options.parts:
        work = workload(shape, tiny=options.tiny, prompts=options.prompts)
        peers = measure_vllm(
            shape, work, device=options.device, path=options.peer_path, out=options.out, once=options.prompts is not None
        )
    model = make_model(shape, options.device, dtype=torch.float32 if options.tiny else torch.bfloat16)
    model.set_attn_implementation("fa_serve")
    right = True
    if "rollouts" in options.parts:
        measure_engine(results, shape, model, options.tiny, peers, options.prompts)
    if "generate_batch" in options.parts:
        add_generate_batch(results, shape, options)
    if "lengths" in options.parts:
        right = measure_lengths(results, shape, model, options.tiny)
    if "exact" in options.parts:
        try:
            measure_exact(results, shape, model, options.tiny)
        except AssertionError as error:  # the other shapes are still measured
            say(f"{shape} exact is not timed: {error}")
            right = False
    return right


if __name__ == "__main__":
    main()
