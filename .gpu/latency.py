"""python .gpu/latency.py [--seconds 14] [--folder /tmp/fa_8b] [--shape llama8b]: cold and warm start, then Poisson arrivals.

Prints a correctness gate, the time of imports, the phases of a start with an empty kernel cache and of one with a full cache,
and after each start first-token, per-token and between-token percentiles at 12 requests/s, and the late counters (wanted: 0).
"""
import argparse, asyncio, json, os, random, shutil, subprocess, sys, tempfile, time
from pathlib import Path

T0 = time.perf_counter()
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]


def say(*text): print(*text, flush=True)


def pct(values, *which):
    v = sorted(values) or [float("nan")]
    return " / ".join(f"{v[min(int(len(v) * p / 100), len(v) - 1)] * 1e3:.1f}" for p in which)


def prepare(args):
    import torch
    from engine_workloads import make_folder, make_model
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
    t = time.perf_counter()
    engine = Engine(config, model=model, ahead=True, on_phase=lambda x: say(f"    gate {x.name:<10}{x.seconds:7.2f} s  {x.detail}"))
    got = [c.token_ids for c in engine.generate(prompts, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))]
    say("gate:", "ok" if got == want else f"WRONG {got} {want}", f"({time.perf_counter() - t:.1f} s)")
    if got != want:
        sys.exit(1)
    if not (Path(args.folder) / "tokenizer_config.json").exists():
        t = time.perf_counter()
        make_folder(args.shape, Path(args.folder), args.device)
        say(f"model written in {time.perf_counter() - t:.1f} s")


async def serve(args):
    from fa_serve.engine import AsyncEngine, EngineConfig, SamplingParams
    say(f"  import    {time.perf_counter() - T0:7.2f} s")
    config = EngineConfig(model=args.folder, device=args.device, max_num_seqs=256, max_num_batched_tokens=4096,
                          max_model_len=args.max_model_len, process=True, seed=0)
    engine = AsyncEngine(config, on_phase=lambda p: say(f"  {p.name:<10}{p.seconds:7.2f} s  {p.detail}"))
    await engine.start()
    ready = time.perf_counter() - T0
    say(f"  READY     {ready:7.2f} s  (process start to ready)")
    draw = random.Random(1)
    kinds = [{}, {}, {}, dict(top_p=0.9), dict(top_k=20), dict(top_k=20, top_p=0.9, min_p=0.05), dict(frequency_penalty=0.3),
             dict(logprobs=5), dict(temperature=0.0), dict(logit_bias={7: 1.0}), dict(temperature=0.0, presence_penalty=0.2, logprobs=0)]
    firsts, per_token, gaps, tokens = [], [], [], [0]

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
        tokens[0] += n
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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="?", default="all")
    parser.add_argument("--seconds", type=float, default=14)
    parser.add_argument("--second-rate", type=float, default=0)
    parser.add_argument("--folder", default="/tmp/fa_8b")
    parser.add_argument("--shape", default="llama8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--max-model-len", type=int, default=8192)
    args = parser.parse_args()
    if args.what == "prepare":
        return prepare(args)
    if args.what == "serve":
        return asyncio.run(serve(args))
    options = [f"--{k.replace('_', '-')}={v}" for k, v in vars(args).items() if k != "what"]
    cache = tempfile.mkdtemp(prefix="fa_kernels_")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "HF_HUB_OFFLINE": "1",
                        "PYTHONUNBUFFERED": "1"}

    def child(what, **more):
        t = time.perf_counter()
        done = subprocess.run([sys.executable, __file__, what, *options], env=env | more)
        say(f"== {what} ended with {done.returncode} after {time.perf_counter() - t:.1f} s, {time.perf_counter() - T0:.0f} s in all")
        return done.returncode

    gate_cache = tempfile.mkdtemp(prefix="fa_kernels_")
    if child("prepare", TRITON_CACHE_DIR=gate_cache):
        sys.exit(1)
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", "import fa_serve.engine.worker"], env=env, capture_output=True, text=True)
    lines = [x.split("|") for x in done.stderr.splitlines() if x.count("|") == 2 and "cumulative" not in x]
    rows = sorted(((int(c), n.strip(), len(n) - len(n.lstrip())) for _, c, n in lines), reverse=True)
    say("imports over 0.25 s, ms:", {n: round(c / 1000) for c, n, _ in rows if c > 250_000})
    say("== cold: empty kernel cache")
    child("serve", TRITON_CACHE_DIR=cache)
    say(f"== warm: {len(list(Path(cache).iterdir()))} entries in the cache")
    child("serve", TRITON_CACHE_DIR=cache)
    shutil.rmtree(cache, ignore_errors=True)


if __name__ == "__main__":
    main()
