"""What bench_engine.py runs in separate processes: first the gate and the model, then one engine in each process."""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.engine.engine_workloads import (
    HEADS,
    LIMIT,
    LOOKUPS,
    SHAPES,
    TOP_P,
    WORKLOADS,
    Workload,
    make_folder,
    make_head,
    make_model,
    save_tokenizer,
    tiny_sizes,
)


def tell(name: str, value: float | None = None, note: str = "") -> None:
    """Report a line to the process that started this one."""
    print("@ " + json.dumps([name, value, note]), flush=True)


def prepare(args: argparse.Namespace) -> None:
    start = time.perf_counter()
    gate(args)
    tell("gate", None, f"greedy float32 tokens are those of model.generate, {time.perf_counter() - start:.1f} s")
    start = time.perf_counter()
    make_folder(args.shapes[0], Path(args.folder), args.device)
    tell("model", None, f"written in {time.perf_counter() - start:.1f} s")
    tell("done", 0.0)


def gate(args: argparse.Namespace, shape: str = "tiny") -> None:
    """Check that the engine's greedy tokens, with prompts in chunks and in one batch, are those of transformers, one by one.

    shape: whose kind of model is checked, in the sizes of TINY
    """
    import torch

    from fa_serve.engine import Engine, EngineConfig, SamplingParams

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    # wide weights keep logits far apart, so rounding does not decide
    model = make_model(shape, args.device, dtype=torch.float32, initializer_range=0.4, eos_token_id=None, **tiny_sizes(shape))
    draw = random.Random(0)
    prompts = [draw.choices(range(5, 512), k=length) for length in (1, 17, 150, 150, 150, 150)]
    expected = []
    model.set_attn_implementation("eager")
    for prompt in prompts:
        ids = torch.tensor([prompt], device=args.device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0)
        expected.append(out[0, len(prompt) :].tolist())
    settings = {"device": args.device, "num_pages": 256, "max_num_seqs": 8, "max_num_batched_tokens": 100, "max_model_len": 512}
    settings |= {"dtype": "float32", "tensor_parallel": args.tensor_parallel}
    with tempfile.TemporaryDirectory(prefix="gate_") as folder:
        model.save_pretrained(folder)
        save_tokenizer(Path(folder), model.config.vocab_size)
        engine = Engine(EngineConfig(**settings | {"model": folder} | args.set))
        answers = engine.generate(prompts, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
        engine.close()
    for prompt, answer, tokens in zip(prompts, answers, expected, strict=True):
        assert answer.token_ids == tokens, f"prompt of {len(prompt)} tokens: {answer.token_ids}, model.generate says {tokens}"


MAX_REPEATS = 3
Rate = Callable[[str, Workload], tuple[float, str] | None]


def measure(
    args: argparse.Namespace,
    rate: Rate,
    before: tuple[str, ...] = ("first",),
    num_prepared: Callable[[], int] = lambda: 0,
) -> None:
    """Run each workload once for each name in `before`, with other prompts and half as long, and then time it.

    The first runs compile kernels and capture graphs. `rate` runs a workload and returns (seconds, note), or None when the time
    is up. `num_prepared`, if given, counts what an engine has compiled and captured: a run in which the count has grown is
    repeated, at most MAX_REPEATS times, because a server prepares everything before its first request.
    """
    for name in args.workloads:
        whole = WORKLOADS[name].cut(args.requests or 256)
        for prompts, workload in (*((f"{name} {each}", whole.halved()) for each in before), (name, whole)):
            repeats = 0
            while True:
                prepared = num_prepared()
                if (taken := rate(f"{prompts} {repeats}" if repeats else prompts, workload)) is None:
                    return
                if prompts != name or num_prepared() == prepared or repeats == MAX_REPEATS:
                    break
                repeats += 1
            seconds, note = taken
            note = f"{len(workload.lengths)} requests in {seconds:.2f} s{note}"
            note += f", repeated {repeats} times" if repeats else ""
            note += ", and still compiles or captures" if repeats == MAX_REPEATS and num_prepared() > prepared else ""
            tell(prompts, None if prompts != name else workload.tokens / seconds, note)
    tell("done", 0.0)


def serve_ours(args: argparse.Namespace) -> None:
    imports = time.time()
    from benchmarks.engine.synthetic_drafts import accepting, no_drafts
    from fa_serve.engine import Engine, EngineConfig, SamplingParams
    from fa_serve.engine.process.child import tune_interpreter
    from fa_serve.launching.compilations import watch

    settings = {
        "model": args.folder,
        "device": args.device,
        "max_model_len": LIMIT,
        "gpu_memory_utilization": 0.85,
        "seed": 0,
        "prefix_caching": "shared" in args.workloads,
        "speculative": drafter(args),
        "tensor_parallel": args.tensor_parallel,
    }
    loading = time.time()
    engine = Engine(EngineConfig(**settings | args.set))
    tune_interpreter()
    watch()
    first = time.time()
    engine.generate([[7] * 128], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    start_up(args, imports, loading, first)

    def drafting(workload: Workload) -> AbstractContextManager[None]:
        if workload.accepted is not None:
            return accepting(engine, workload.accepted)
        return nullcontext() if workload.unmatched else no_drafts(engine)

    def rate(name: str, workload: Workload) -> tuple[float, str] | None:
        before = engine.stats()
        prompts = workload.prompts(name, engine.vocab_size)
        start = time.perf_counter()
        for row, (prompt, (_, tokens_out)) in enumerate(zip(prompts, workload.lengths, strict=True)):
            sampling: Any = TOP_P if workload.sampled else {"temperature": 0.0}
            params = SamplingParams(max_tokens=tokens_out, ignore_eos=True, detokenize=False, **sampling)  # as the others
            engine.add_request(f"{name}-{row}", prompt, params)
        ended: Counter[str | None] = Counter()
        with drafting(workload):
            while engine.has_unfinished():
                ended.update(output.finish_reason for output in engine.step() if output.finished)
                if time.time() > args.deadline:
                    return None
        seconds = time.perf_counter() - start
        after = engine.stats()
        assert ended == {"length": len(prompts)}, ended
        steps = after.num_steps - before.num_steps
        preempted = after.num_preemptions - before.num_preemptions
        note = f", {steps} steps of {seconds / steps * 1e3:.2f} ms"
        note += f", {preempted} preemptions" if preempted else ""
        drafted = after.speculation.num_draft_tokens - before.speculation.num_draft_tokens
        note += f", {drafted} drafts" if drafted else ""
        cached = after.num_cached_tokens - before.num_cached_tokens
        return seconds, note + (f", {cached} tokens cached" if cached else "")

    # a step with prompts is captured when its shape occurs again
    measure(args, rate, before=("first", "again"), num_prepared=lambda: sum(engine.preparations()))


def drafter(args: argparse.Namespace) -> str | None:
    """What the workloads speculate with. A head is written next to the model."""
    if not set(args.workloads) & set(HEADS):
        return "ngram" if set(args.workloads) & set(LOOKUPS) else None
    folder = Path(args.folder) / "head"
    if not folder.exists():
        make_head(args.shapes[0], folder)
    return f"eagle3={folder}"


def whole_folder(folder: Path) -> Path:
    """A folder with the config of the image-text model that a text model belongs to, beside its checkpoint.

    vLLM 0.26 runs the text of Qwen 3.5 by the class of the whole alone, which it makes without its tower if asked to.
    """
    text = json.loads((folder / "config.json").read_text())
    tower = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": text["hidden_size"]}
    whole = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "dtype": "bfloat16"}
    whole |= {"text_config": text, "vision_config": tower, "tie_word_embeddings": text["tie_word_embeddings"]}
    made = folder / "whole"
    made.mkdir(exist_ok=True)
    (made / "config.json").write_text(json.dumps(whole))
    return made


def serve_vllm(args: argparse.Namespace) -> None:
    imports = time.time()
    from vllm import LLM, SamplingParams

    own: dict[str, Any] = {}
    folder = Path(args.folder)
    if SHAPES[args.shapes[0]]["model_type"] == "qwen3_5_text":
        folder = whole_folder(folder)
        own = {"language_model_only": True, "load_format": "dummy"}
    if "linear_num_value_heads" in SHAPES[args.shapes[0]] and importlib.util.find_spec("flashinfer") is None:
        # on Hopper, vLLM computes prompts of delta nets by FlashInfer, and ends at the first one where it is not installed
        own |= {"additional_config": {"gdn_prefill_backend": "triton"}}
        tell("no FlashInfer", None, "prompts of delta nets by vLLM's own kernels")
    loading = time.time()
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=LIMIT,
        gpu_memory_utilization=0.85,
        enable_prefix_caching="shared" in args.workloads,
        disable_log_stats=True,
        tensor_parallel_size=args.tensor_parallel,
        **own,
    )
    vocab = SHAPES[args.shapes[0]]["vocab_size"]

    def params(tokens_out: int) -> Any:
        return SamplingParams(max_tokens=tokens_out, temperature=0.0, ignore_eos=True, detokenize=False)

    first = time.time()
    llm.generate([{"prompt_token_ids": [7] * 128}], params(1), use_tqdm=False)
    start_up(args, imports, loading, first)

    def rate(name: str, workload: Workload) -> tuple[float, str]:
        prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts(name, vocab)]
        asked = [params(tokens_out) for _, tokens_out in workload.lengths]
        start = time.perf_counter()
        answers = llm.generate(prompts, asked, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert [len(x.outputs[0].token_ids) for x in answers] == [tokens_out for _, tokens_out in workload.lengths]
        return seconds, ""

    # as often as ours: in one run of a Qwen3-Next shape, the call after the first was the slow one, 2.3 s instead of 1.2
    measure(args, rate, before=("first", "again"))


def serve_generate_batch(args: argparse.Namespace) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    imports = loading = time.time()
    model: Any = AutoModelForCausalLM.from_pretrained(args.folder, dtype="auto", attn_implementation="paged|sdpa")
    model.to(args.device).eval()

    def rate(name: str, workload: Workload) -> tuple[float, str]:
        (tokens_out,) = {tokens_out for _, tokens_out in workload.lengths}
        config = GenerationConfig(max_new_tokens=tokens_out, do_sample=False, eos_token_id=-1, pad_token_id=0)
        start = time.perf_counter()
        answers = model.generate_batch(workload.prompts(name, model.config.vocab_size), config, progress_bar=False)
        if args.device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        assert {len(answer.generated_tokens) for answer in answers.values()} == {tokens_out}
        return seconds, ""

    first = time.time()
    rate("first", Workload([(128, 1)]))
    start_up(args, imports, loading, first)
    measure(args, rate)


def start_up(args: argparse.Namespace, imports: float, loading: float, first: float) -> None:
    """Report the parts of the time from the start of this process to the first token. Call it at the first token."""
    now = time.time()
    parts = f"Python {imports - args.started:.1f}, imports {loading - imports:.1f}, engine {first - loading:.1f}"
    tell("startup", now - args.started, f"s: {parts}, first token {now - first:.1f}")


PARTS = {
    "prepare": prepare,
    "fa_serve": serve_ours,
    "one_gpu": serve_ours,
    "vllm": serve_vllm,
    "generate_batch": serve_generate_batch,
}
