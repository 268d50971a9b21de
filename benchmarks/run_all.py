"""Run the benchmarks of JOBS, each in a separate process, on one GPU or side by side on several, and merge their results.

    python -m benchmarks.run_all --peer-path DIR           # about 160 minutes on one GPU; DIR has vLLM and FA3
    python -m benchmarks.run_all --peer-path DIR --gpus 4  # about 60 minutes on four
    python -m benchmarks.run_all --peer-path DIR --gpus 2 --seconds 540 --only decode,engine_llama8b
    python -m benchmarks.run_all --list

The longest benchmark starts first, or those of --only in its order. One that would not end within --seconds is not started; the
last lines name these and those that failed. A benchmark writes into a temporary folder. When it has ended, or was stopped
because it took too long, its lines replace those of the same cases in --out. What it printed is in --logs. Without --peer-path,
the peers are PyTorch's kernels. Benchmarks that run side by side share the host, so each GPU needs eight cores or more. Those
that need two GPUs run on the first two, which take no others until these have ended; without --gpus 2 they are left out. Those
that measure the host's work need one thread each and run last. Models of KEPT_SHAPES are written once for all benchmarks.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.engine.engine_workloads import KEPT_MODELS, SPECULATING

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Job:
    """One benchmark.

    seconds: an estimate, from runs on H100s and H200s
    peers:   "import" adds the path of the peers to PYTHONPATH, "path" passes it as --peer-path, "" does neither; "needed" is
             "path", and without a path there is nothing to measure
    gpus:    how many it needs: 1 or 2
    quiet:   measures the host's work
    """

    seconds: int
    command: str
    peers: str = ""
    gpus: int = 1
    quiet: bool = False

    def words(self, folder: str, peer_path: str) -> list[str]:
        """The module and the flags of its command line, which writes into `folder`."""
        script, *flags = self.command.split()
        words = [f"benchmarks.{script}", *flags]
        if script != "soak.long_run":  # it has no results
            words += ["--out", folder]
        if self.peers in ("path", "needed") and peer_path:
            words += ["--peer-path", peer_path]
        elif self.peers and script == "engine.bench_engine":
            words.append("--no-peers")
        return words

    def shapes(self) -> set[str]:
        """The models that its command names."""
        words = self.command.split()
        return {name for flag, names in pairwise(words) if flag in ("--shape", "--shapes") for name in names.split(",")}


KEPT_SHAPES = {"llama8b", "qwen06"}
"""Models that many benchmarks need. They take 17 GB of the folder for temporary files."""
GENERATE = "engine.bench_generate"
ENGINE = "engine.bench_engine --workloads A,D,C,shared,B,sampled"
JOBS = {
    "serving_llama8b": Job(295, "engine.bench_serving --shapes llama8b --waves 2 --clients 4 --budget 305", "path"),
    "engine_llama8b": Job(310, f"{ENGINE} --shapes llama8b --budget 320", "path"),
    "engine_qwen06": Job(175, f"{ENGINE} --shapes qwen06 --budget 250", "path"),
    "engine_of_16": Job(
        195,
        "engine.bench_engine --workloads A,C --shapes qwen06 --requests 16 --peers vllm,generate_batch --budget 235",
        "path",
    ),
    "serving_qwen06": Job(145, "engine.bench_serving --shapes qwen06 --waves 2 --clients 4 --budget 240", "path"),
    "prefill": Job(130, "attention.bench_attention prefill", "import"),
    "decode": Job(105, "attention.bench_attention decode", "import"),
    "long_run": Job(60, "soak.long_run"),
    "generate_llama": Job(150, f"{GENERATE} --models llama-3.1-8b --cases ttft,padded,growing", quiet=True),
    "generate_gemma": Job(175, f"{GENERATE} --models gemma-3-4b --cases ttft,padded,growing", quiet=True),
    "generate_qwen_gpt": Job(180, f"{GENERATE} --models qwen3-0.6b,gpt-oss-20b --cases ttft,padded,growing", quiet=True),
    "generate_static_llama": Job(85, f"{GENERATE} --models llama-3.1-8b --cases static", quiet=True),
    "generate_static_gemma": Job(165, f"{GENERATE} --models gemma-3-4b --cases static", quiet=True),
    "generate_static_qwen": Job(80, f"{GENERATE} --models qwen3-0.6b --cases static", quiet=True),
    "generate_batch": Job(55, f"{GENERATE} --cases batch", quiet=True),
    "prefill_triton": Job(80, "attention.bench_attention prefill --backend triton --peers flash,cudnn"),
    "latent": Job(85, "attention.bench_attention latent --ways hopper,portable"),
    "fp8": Job(100, "attention.bench_attention fp8 --budget 90", "import"),
    "experts": Job(160, "attention.bench_ops experts"),
    "quantized": Job(75, "attention.bench_ops quantized"),
    "backward": Job(90, "attention.bench_attention backward --peers flash,cudnn --budget 100"),
    "sparse": Job(170, "attention.bench_attention sparse --budget 190"),
    "profile": Job(130, "engine.bench_engine profile --shapes qwen06,llama8b --budget 150"),
    "profile_of_drafts": Job(75, "engine.bench_engine profile --shapes llama8b --set speculative=ngram --budget 60"),
    "models": Job(390, "attention.bench_attention models --budget 400", "import"),
    "chunk": Job(110, "attention.bench_attention chunk --budget 130", "import"),
    "verify": Job(80, "attention.bench_attention verify --budget 100", "import"),
    "mixed": Job(90, "attention.bench_attention mixed --budget 110", "import"),
    "varlen": Job(28, "attention.bench_attention varlen", "import"),
    "window": Job(40, "attention.bench_attention window", "import"),
    "open_loops": Job(
        480, "engine.bench_serving --open --shapes llama8b --clients 4 --seconds 16 --no-offline --budget 580", "path"
    ),
    "loads": Job(600, "engine.bench_loads --budget 600", "path"),
    "steps_of_models": Job(
        240, "engine.bench_engine decode --shapes qwen30a3b,gptoss20b,llama8b-fp8,llama8b-w4,deepseek-lite --budget 100"
    ),
    **{
        f"engine_{shape}": Job(
            seconds,
            f"engine.bench_engine --shapes {shape} --workloads C,C16,C64,C256 --peers vllm --budget {seconds + 100}",
            "path",
        )
        for seconds, shape in (
            (300, "llama8b-w4"),
            (300, "llama8b-fp8"),
            (300, "gptoss20b"),
            (400, "deepseek-lite"),
            (420, "qwen30a3b"),
        )
    },
    "speculation": Job(
        190,
        f"engine.bench_engine --workloads {','.join(SPECULATING)} --shapes llama8b --no-peers --budget 280",
    ),
    "lora": Job(500, "engine.bench_lora --shape llama8b --ranks 16,64", "path"),
    "masks": Job(100, "attention.bench_attention masks --budget 110"),
    "train": Job(70, "attention.bench_attention train --budget 80", "import"),
    "encoder": Job(45, "attention.bench_attention encoder --budget 55", "import"),
    "cross": Job(45, "attention.bench_attention cross --budget 55", "import"),
    "diffusion": Job(45, "attention.bench_attention diffusion --budget 55", "import"),
    "wide": Job(60, "attention.bench_attention wide --budget 70", "import"),
    "sparse_latent": Job(70, "attention.bench_sparse --budget 80", "import"),
    "linear": Job(200, "attention.bench_linear --budget 210", "import"),
    "cascade": Job(100, "engine.bench_cascade --shapes llama8b"),
    "deterministic": Job(150, "engine.bench_deterministic --shapes qwen06,llama8b"),
    "rollouts": Job(310, "engine.bench_rollouts --shapes qwen06", "path"),
    "chats": Job(160, "engine.bench_chats"),
    "host_tier": Job(90, "engine.bench_host_tier --shapes llama8b"),
    "images": Job(110, "engine.bench_images --budget 110"),
    "images_http": Job(300, "engine.bench_images_http", "path"),
    "transformers_serve": Job(190, "engine.bench_transformers_serve --shape qwen06"),
    "embeddings": Job(
        400, "engine.bench_embeddings --shapes bge-base,bge-large,modernbert-large,qwen3-0.6b --budget 400", "path"
    ),
    "shared_gpu": Job(100, "soak.shared_gpu --seconds 20"),
    "edits": Job(180, "engine.bench_edits"),
    "long_run_of_mixture": Job(90, "soak.long_run --shape qwen30a3b --tiny"),
    "long_run_quantised": Job(90, "soak.long_run --shape llama8b-w4 --tiny"),
    "allreduce": Job(25, "attention.bench_allreduce", gpus=2),
    "tensor_parallel": Job(
        450,
        "engine.bench_engine --shapes llama8b --tensor-parallel 2 --peers one_gpu,vllm --workloads C,C64,A,B,D --budget 580",
        "path",
        gpus=2,
    ),
    "tensor_parallel_70b": Job(
        240,
        "engine.bench_engine decode --shapes llama70b --tensor-parallel 2 --requests 1 --set gpu_memory_utilization=0.93",
        gpus=2,
    ),
    "long_run_of_ranks": Job(100, "soak.long_run --tensor-parallel 2", gpus=2),
    "replicas": Job(150, "engine.bench_replicas --shape llama8b --device cuda", gpus=2),
    "replicas_of_two_servers": Job(
        250, "engine.bench_replicas --shape llama8b --device cuda --parts throughput --servers 2", gpus=2
    ),
    "vllm_plugin": Job(350, "engine.bench_vllm_plugin --shape llama8b --gpus 0,1", "needed", gpus=2),
}


class Run:
    """The jobs that wait, those that run and those that failed, and the GPUs that are free.

    names:  of the jobs, in the order in which they are to start
    models: a folder for the models of KEPT_SHAPES
    """

    def __init__(self, names: list[str], args: argparse.Namespace, models: str) -> None:
        self.models = models
        self.waiting = list(names)
        self.running: list[str] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.free = list(range(args.gpus))
        self.args = args
        self.deadline = time.monotonic() + args.seconds
        self.changed = threading.Condition()
        self.failed: list[str] = []

    def work(self) -> None:
        """Run the jobs. Returns when none runs, and none that waits can start."""
        with self.changed:
            while True:
                if job := self.next():
                    threading.Thread(target=self.finish, args=job).start()
                elif self.running:
                    self.changed.wait()
                else:
                    return

    def interrupt(self) -> None:
        """End the jobs that run. Those that wait are not started."""
        self.deadline = 0.0
        for process in self.processes:
            if process.poll() is None:
                stop(process)

    def next(self) -> tuple[str, list[int]] | None:
        """Take the first job that can start now, and GPUs for it; None if there is none."""
        left = self.deadline - time.monotonic()
        fitting = [name for name in self.waiting if JOBS[name].seconds <= left and JOBS[name].gpus <= self.args.gpus]
        loud = [name for name in fitting if not JOBS[name].quiet]
        pair_waits = any(JOBS[name].gpus > 1 for name in loud)
        for name in loud or fitting:
            job = JOBS[name]
            if job.quiet and not all(JOBS[other].quiet for other in self.running):
                return None
            if job.gpus > 1:
                gpus = [gpu for gpu in self.free if gpu < 2]
            else:
                gpus = [gpu for gpu in self.free if gpu > 1 or not pair_waits][-1:]
            if len(gpus) == job.gpus:
                self.waiting.remove(name)
                self.free = [gpu for gpu in self.free if gpu not in gpus]
                self.running.append(name)
                return name, gpus
        return None

    def finish(self, name: str, gpus: list[int]) -> None:
        """Run a job, and give back its GPUs."""
        numbers = ",".join(map(str, gpus))
        begin = time.monotonic()
        code = 1
        try:
            code = self.run(name, numbers)
        finally:
            with self.changed:
                if code:
                    self.failed.append(name)
                self.running.remove(name)
                self.free = sorted(self.free + gpus)
                self.changed.notify()
                end = f"ended with {code}" if code else "done"
                print(f"GPU {numbers}  {name:<20}{end}, {time.monotonic() - begin:.0f} s", flush=True)

    def run(self, name: str, gpus: str) -> int:
        """Run a job on the GPUs of these numbers and merge its results; returns its exit status."""
        job = JOBS[name]
        path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        with tempfile.TemporaryDirectory(prefix=f"{name}_") as folder:
            command = [sys.executable, "-m", *job.words(folder, self.args.peer_path)]
            if self.args.peer_path and job.peers == "import":
                path.append(self.args.peer_path)
            own = {"CUDA_VISIBLE_DEVICES": gpus, "PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONUNBUFFERED": "1"}
            if job.shapes() and job.shapes() <= KEPT_SHAPES:
                own[KEPT_MODELS] = self.models
            with (self.args.logs / f"{name}.log").open("w") as log:
                process = subprocess.Popen(
                    command, env=os.environ | own, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
                self.processes.append(process)
                try:
                    code = process.wait(min(1.5 * job.seconds + 30, self.deadline + 15 - time.monotonic()))
                except subprocess.TimeoutExpired:
                    code = stop(process)
            with self.changed:
                for written in Path(folder).glob("*.jsonl"):
                    merge(written, self.args.out / written.name)
        return code


def stop(process: subprocess.Popen[bytes]) -> int:
    """Interrupt the process, so that it can end the servers and engines that it started; kill it after 10 seconds."""
    try:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait() or 1


def merge(new: Path, kept: Path) -> None:
    """Replace the lines of the cases in `new`, append cases that are new, and keep the rest in its order."""
    lines = {json.loads(line)["case"]: line for path in (kept, new) if path.exists() for line in path.read_text().splitlines()}
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text("".join(line + "\n" for line in lines.values()))


def default_jobs(gpus: int, peer_path: str) -> list[str]:
    """The benchmarks that this machine can run, the longest first."""
    names = [name for name, job in JOBS.items() if job.gpus <= gpus and (peer_path or job.peers != "needed")]
    return sorted(names, key=lambda name: -JOBS[name].seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="benchmarks that --list names, separated by commas; default: all that can run")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10800.0, help="time for all of them")
    parser.add_argument("--peer-path", default="", help="folder with vLLM and its dependencies")
    parser.add_argument("--logs", type=Path, default=Path("bench_logs"))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--list", action="store_true", help="print the benchmarks and exit")
    args = parser.parse_args()
    asked = args.only.split(",") if args.only else default_jobs(args.gpus, args.peer_path)
    if unknown := set(asked) - set(JOBS):
        parser.error(f"--only must name benchmarks of {list(JOBS)}, got {sorted(unknown)}")
    if args.list:
        print("\n".join(f"{name:<20}{job.seconds:>5} s  {job.command}" for name, job in JOBS.items()))
        return
    args.logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="run_all_models_", ignore_cleanup_errors=True) as models:
        run = Run(asked, args, models)
        try:
            run.work()
        except KeyboardInterrupt:
            run.interrupt()
            run.work()  # until the results of those that have ended are merged
    for what, names in (("failed", run.failed), ("not started for lack of time or GPUs", run.waiting)):
        if names:
            print(f"{what}: {','.join(names)}")
    sys.exit(bool(run.failed or run.waiting))


if __name__ == "__main__":
    main()
