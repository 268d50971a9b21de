"""python .gpu/latency.py [--seconds 10] [--folder /tmp/fa_8b] [--shape llama8b]: cold and warm start, then Poisson arrivals.

Stages, each in a process of its own and ended, with its children, after a time limit; the first that fails ends the script.
All stages together end within --total seconds (240):
1. gate:  a tiny float32 model, tokens against model.generate, 45 s; then the same prompts with a mixture of experts, 4-bit weights
          and the same model as its draft model, where steps of the warm-up and late counters are shown
2. small: 2 layers of the 8B shape in bfloat16, CUDA_LAUNCH_BLOCKING=1, every step of the warm-up is named before it runs and
          synchronised after it, then 64 mixed requests, 60 s
3. cold, warm: phases of a start with an empty and with a full kernel cache, and first-token, per-token and between-token
          percentiles at 12 requests/s and the late counters (wanted: 0), 90 s and what is left
"""
import argparse, asyncio, faulthandler, os, random, shutil, signal, subprocess, sys, tempfile, time
from functools import partial
from pathlib import Path

T0 = time.perf_counter()
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]


def say(*text): print(*text, flush=True)


def pct(values, *which):
    v = sorted(values) or [float("nan")]
    return " / ".join(f"{v[min(int(len(v) * p / 100), len(v) - 1)] * 1e3:.1f}" for p in which)


def phase(name, p): say(f"  {name} {p.name:<10}{p.seconds:7.2f} s  {p.detail}")


def gate(args):
    import torch
    from engine_workloads import make_model
    from fa_serve.engine import Engine, EngineConfig, SamplingParams
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    model = make_model("tiny", args.device, dtype=torch.float32, initializer_range=0.4, eos_token_id=None)
    draw = random.Random(0)
    prompts = [draw.choices(range(5, 512), k=n) for n in (1, 17, 150, 150, 150)]
    model.set_attn_implementation("eager")
    want = []
    for p in prompts:
        ids = torch.tensor([p], device=args.device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0)
        want.append(out[0, len(p):].tolist())
    config = EngineConfig(device=args.device, num_pages=256, max_num_seqs=8, max_num_batched_tokens=100, max_model_len=512)
    engine = Engine(config, model=model, ahead=True, on_phase=partial(phase, "gate"))
    got = [c.token_ids for c in engine.generate(prompts, SamplingParams(max_tokens=12, temperature=0.0))]
    if got != want:
        say("gate: WRONG tokens", got, want)
        return 1
    say(f"gate: ok, prepared {engine.preparations()}")
    return kinds(args)


def kinds(args):
    """Mixtures, quantised weights and draft models start with a warm-up, and answer as the same engine without one."""
    import torch
    from engine_workloads import make_folder, make_model
    from fa_serve.engine import Engine, EngineConfig, SamplingParams
    draw = random.Random(1)
    prompts = [draw.choices(range(5, 300), k=n) for n in (1, 17, 90)]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    folder = tempfile.mkdtemp(prefix="fa_tiny_")
    quantised, plain = Path(folder) / "w4", Path(folder) / "plain"
    make_folder("tiny-w4", quantised, args.device)
    make_folder("tiny", plain, args.device)
    cases = [("4 bits", dict(model=str(quantised)), None), ("draft", dict(model=str(plain), speculative=f"draft={plain}"), None)]
    bad = 0
    for name, more, shape in [*cases, ("experts", {}, "qwen30a3b")]:
        config = EngineConfig(device=args.device, num_pages=256, max_num_seqs=8, max_num_batched_tokens=100, max_model_len=256, **more)
        got = []
        for ahead in (False, True):
            torch.manual_seed(0)
            model = None if shape is None else make_model(shape, args.device, dtype=torch.bfloat16, num_hidden_layers=2, num_experts=16,
                                                               hidden_size=256, moe_intermediate_size=128, vocab_size=512)
            engine = Engine(config, model=model, ahead=ahead, on_phase=partial(phase, name) if ahead else lambda _: None)
            then = engine.preparations()
            got.append([c.token_ids for c in engine.generate(prompts, params)])
            late = [a - b for a, b in zip(engine.preparations(), then)]
            engine.close()
        same = got[0] == got[1]
        short = sum(len(x) != 8 for x in got[1])
        bad += bool(short)
        say(f"gate: {name}: {'ok' if not short else 'WRONG'}, same tokens with and without a warm-up: {same}, late {late}")
    shutil.rmtree(folder, ignore_errors=True)
    return int(bool(bad))


def small(args):
    faulthandler.dump_traceback_later(55, exit=False)
    import torch
    from engine_workloads import make_model
    from fa_serve.engine import Engine, EngineConfig, SamplingParams, model_runner
    from fa_serve.backends.launch import NotCompiledError
    say(f"  small: blocking launches {os.environ.get('CUDA_LAUNCH_BLOCKING')}")
    torch.manual_seed(0)
    model = make_model(args.shape, args.device, dtype=torch.bfloat16, num_hidden_layers=2)
    run, ended, tries = model_runner.ModelRunner.run_warm_up, [], [0]
    trace = os.environ.get("FA_TRACE")

    def named(self, work):
        tries[0] += 1
        if trace:
            Path(trace).write_text(repr(work))  # what a process that dies was doing
        try:
            run(self, work)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        except NotCompiledError:
            raise
        except BaseException as error:
            say(f"  small: FAILED in {work}: {type(error).__name__}: {str(error)[:300]}")
            raise
        ended.append(work)
        if len(ended) % 50 == 1:
            say(f"  small: {len(ended)} works done at {time.perf_counter() - T0:.1f} s, {tries[0]} tries, now {work}")

    model_runner.ModelRunner.run_warm_up = named
    config = EngineConfig(device=args.device, max_num_seqs=256, max_num_batched_tokens=4096, gpu_memory_utilization=0.5,
                          max_model_len=args.max_model_len, seed=0)
    engine = Engine(config, model=model, ahead=True, on_phase=partial(phase, "small"))
    before = engine.preparations()
    say(f"  small: {len(ended)} works, {tries[0]} tries, compiled or loaded, captured: {before}")
    draw = random.Random(0)
    prompts = [draw.choices(range(5, 500), k=min(int(2 ** draw.uniform(0, 11)), args.max_model_len - 9)) for _ in range(64)]
    kinds = [{}, dict(top_p=0.9), dict(top_k=20), dict(top_k=20, top_p=0.9, min_p=0.05), dict(frequency_penalty=0.3),
             dict(logprobs=5), dict(temperature=0.0), dict(logit_bias={7: 1.0})]
    params = [SamplingParams(max_tokens=8, ignore_eos=True, **kinds[i % len(kinds)]) for i in range(64)]
    got = [c.token_ids for c in engine.generate(prompts, params)]
    late = [now - then for now, then in zip(engine.preparations(), before)]
    if args.device == "cuda":
        torch.cuda.synchronize()
    bad = sum(len(x) != 8 for x in got)
    say(f"small: {'ok' if not bad else 'WRONG'}, {bad} of 64 answers are short, late compilations and captures {late}")
    faulthandler.cancel_dump_traceback_later()
    return int(bool(bad))


def prepare(args):
    from engine_workloads import make_folder
    t = time.perf_counter()
    if not Path(args.folder).exists():
        make_folder(args.shape, Path(args.folder), args.device)
    say(f"model written in {time.perf_counter() - t:.1f} s")
    return 0


async def serve(args):
    from fa_serve.engine import AsyncEngine, EngineConfig, SamplingParams
    say(f"  import    {time.perf_counter() - T0:7.2f} s")
    config = EngineConfig(model=args.folder, device=args.device, max_num_seqs=256, max_num_batched_tokens=4096,
                          max_model_len=args.max_model_len, process=True, seed=0)
    engine = AsyncEngine(config, on_phase=partial(phase, ""))
    await engine.start()
    ready = time.perf_counter() - T0
    say(f"  READY     {ready:7.2f} s  (process start to ready)")
    draw = random.Random(1)
    kinds = [{}, {}, {}, dict(top_p=0.9), dict(top_k=20), dict(top_k=20, top_p=0.9, min_p=0.05), dict(frequency_penalty=0.3),
             dict(logprobs=5), dict(temperature=0.0), dict(logit_bias={7: 1.0}), dict(temperature=0.0, presence_penalty=0.2, logprobs=0)]
    firsts, per_token, gaps = [], [], []

    async def one(i):
        prompt = draw.choices(range(5, 500), k=draw.randint(140, 1260))
        params = SamplingParams(max_tokens=draw.randint(40, 360), ignore_eos=True, **draw.choice(kinds))
        begin = last = time.perf_counter()
        first, n = None, 0
        async for out in engine.generate(prompt, params, f"r{i}"):
            now = time.perf_counter()
            if out.token_ids:
                if first is None:
                    first = now
                    firsts.append(now - begin)
                else:
                    gaps.extend([(now - last) / len(out.token_ids)] * len(out.token_ids))
                last = now
                n += len(out.token_ids)
            if out.error:
                say("  ERROR", out.error)
        if n > 1:
            per_token.append((last - first) / (n - 1))

    for rate, seconds in ((12.0, args.seconds), (24.0, args.second_rate)):
        if not seconds:
            continue
        for x in (firsts, per_token, gaps):
            x.clear()
        jobs, end, i = [], time.perf_counter() + seconds, 0
        while time.perf_counter() < end:
            jobs.append(asyncio.create_task(one(f"{rate}-{i}")))
            i += 1
            await asyncio.sleep(draw.expovariate(rate))
        await asyncio.gather(*jobs)
        say(f"  {rate:.0f}/s, {i} requests, ms: first token p50/p95/p99 {pct(firsts, 50, 95, 99)}; worst 3 "
            f"{[round(x * 1e3) for x in sorted(firsts)[-3:]]}; per token p50/p99 {pct(per_token, 50, 99)}; "
            f"between p50/p95/p99 {pct(gaps, 50, 95, 99)}")
        stats = engine.stats()
        late = {k: getattr(stats, k, None) for k in ("num_late_compilations", "num_late_captures", "num_steps", "num_preemptions")}
        say("  late:", late)
    await engine.shutdown()
    return 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="?", default="all", choices=["all", "gate", "small", "prepare", "serve"])
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--second-rate", type=float, default=0)
    parser.add_argument("--total", type=float, default=240)
    parser.add_argument("--folder", default="/tmp/fa_8b")
    parser.add_argument("--shape", default="llama8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--max-model-len", type=int, default=8192)
    args = parser.parse_args()
    if args.what == "serve":
        return sys.exit(asyncio.run(serve(args)))
    if args.what != "all":
        return sys.exit({"gate": gate, "small": small, "prepare": prepare}[args.what](args))
    options = [f"--{k.replace('_', '-')}={v}" for k, v in vars(args).items() if k != "what"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "HF_HUB_OFFLINE": "1",
                        "PYTHONUNBUFFERED": "1"}

    def child(what, limit, **more):
        t = time.perf_counter()
        limit = round(min(limit, args.total - (t - T0) - 2))
        if limit < 10:
            say(f"== {what}: no time is left")
            sys.exit(1)
        say(f"== {what}: at most {limit} s")
        process = subprocess.Popen([sys.executable, __file__, what, *options], env=env | more, start_new_session=True)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = "the time limit"
        try:
            os.killpg(process.pid, signal.SIGKILL)  # the engine's process, if it is still there
        except ProcessLookupError:
            pass
        process.wait()
        say(f"== {what} ended with {code} after {time.perf_counter() - t:.1f} s, {time.perf_counter() - T0:.0f} s in all")
        if code:
            trace = more.get("FA_TRACE")
            if trace and Path(trace).exists():
                say("   the last work of the warm-up was", Path(trace).read_text())
            sys.exit(1)

    caches = [tempfile.mkdtemp(prefix="fa_kernels_") for _ in range(3)]
    child("gate", 45, TRITON_CACHE_DIR=caches[0])
    child("small", 60, TRITON_CACHE_DIR=caches[1], CUDA_LAUNCH_BLOCKING="1", FA_TRACE=caches[1] + "/work.txt")
    child("prepare", 45)
    say("== cold: empty kernel cache")
    child("serve", 90, TRITON_CACHE_DIR=caches[2])
    say(f"== warm: {len(list(Path(caches[2]).iterdir()))} entries in the cache")
    child("serve", 90, TRITON_CACHE_DIR=caches[2])
    for cache in caches:
        shutil.rmtree(cache, ignore_errors=True)


if __name__ == "__main__":
    main()
