"""Many adapters through a small pool, for a long time: nothing is lost, nothing is mixed up, and memory stays flat.

python -m benchmarks.soak.many_adapters                                   # 200 adapters, 16 in memory, ten minutes on a GPU
python -m benchmarks.soak.many_adapters --shape tiny --device cpu --seconds 60
python -m benchmarks.soak.many_adapters --results benchmarks/results      # keep the line in soak.jsonl

Each adapter makes greedy take one token, its mark, whatever came before. Requests of random adapters and of the base come in
random order and lengths, some are aborted, and now and then an adapter is unloaded and loaded again. Every answer of an adapter
must be its mark over and over. Every answer of the base must be the one that it gave to this prompt before, in float32; in 16
bits, where company may change a token, it must not be an adapter's. It prints one JSON line, and raises AssertionError if a
check fails.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.engine.bench_lora import linear_layers, write_mark
from benchmarks.engine.engine_workloads import SHAPES, make_model, make_tiny
from benchmarks.measure import Results
from benchmarks.soak.long_run import HOST_GROWTH, device_bytes, host_bytes
from fa_serve.engine import Engine, EngineConfig, SamplingParams

FIRST_MARK = 7
LONGEST = 48
"""Tokens of a prompt."""


class Traffic:
    """Requests of adapters and of the base, and what they must answer.

    folders: of the adapters, whose marks are the tokens from FIRST_MARK on
    """

    def __init__(self, engine: Engine, folders: list[Path], seed: int = 0) -> None:
        self.engine = engine
        self.folders = folders
        self.draw = random.Random(seed)
        self.prompts = [
            [self.draw.randrange(engine.vocab_size) for _ in range(self.draw.randint(1, LONGEST))] for _ in range(64)
        ]
        self.by_base: dict[tuple[int, int], list[int]] = {}
        self.open: dict[str, tuple[int | None, int, int]] = {}  # adapter, prompt and tokens of requests without an end
        self.tokens: dict[str, list[int]] = {}
        self.counts = {"answers": 0, "of the base": 0, "aborted": 0, "loaded again": 0}
        for number, folder in enumerate(folders):
            engine.load_adapter(f"mark-{number}", folder)

    def add(self, name: str) -> None:
        """One more request, of the base or of an adapter."""
        number = None if self.draw.random() < 0.2 else self.draw.randrange(len(self.folders))
        prompt = self.draw.randrange(len(self.prompts))
        tokens = self.draw.randint(1, 12)
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        adapter = None if number is None else f"mark-{number}"
        self.engine.add_request(name, self.prompts[prompt], params, adapter=adapter)
        self.open[name] = (number, prompt, tokens)
        self.tokens[name] = []

    def step(self) -> None:
        """A step of the engine, and the checks of what it gives."""
        outputs = self.engine.step()
        if self.open and self.draw.random() < 0.02:
            aborted = self.draw.choice(tuple(self.open))
            outputs += self.engine.abort(aborted)
            self.counts["aborted"] += 1
        for output in outputs:
            assert output.finish_reason != "error", output.error
            self.tokens[output.request_id] += output.token_ids
            if output.finished:
                self._check(output.request_id, aborted=output.finish_reason == "abort")

    def load_again(self) -> None:
        """Unload an adapter that no request has, and load it under its name."""
        used = {number for number, _, _ in self.open.values()}
        number = self.draw.choice([number for number in range(len(self.folders)) if number not in used])
        self.engine.unload_adapter(f"mark-{number}")
        self.engine.load_adapter(f"mark-{number}", self.folders[number])
        self.counts["loaded again"] += 1

    def _check(self, name: str, *, aborted: bool) -> None:
        number, prompt, tokens = self.open.pop(name)
        found = self.tokens.pop(name)
        if number is not None:
            assert found == [FIRST_MARK + number] * len(found), f"adapter {number} answered {found}"
        elif not aborted:
            expected = self.by_base.setdefault((prompt, tokens), found)
            assert found == expected or self._is_of_the_base(found), f"the base answered {found}, and {expected} before"
            self.counts["of the base"] += 1
        assert aborted or len(found) == tokens, f"{len(found)} of {tokens} tokens"
        self.counts["answers"] += not aborted

    def _is_of_the_base(self, found: list[int]) -> bool:
        """Whether an answer that differs from an earlier one can be the base's: in 16 bits, without a mark twice in a row."""
        exact = self.engine.config.dtype == "float32" or self.engine.config.device == "cpu"
        marks = range(FIRST_MARK, FIRST_MARK + len(self.folders))
        repeated = {token for token, following in pairwise(found) if token == following}
        return not exact and not repeated & set(marks)


def run(engine: Engine, folders: list[Path], seconds: float, alive: int) -> dict[str, Any]:
    """`alive` requests at a time, for so many seconds. Returns the report by name."""
    traffic = Traffic(engine, folders)
    begin = time.perf_counter()
    memory: tuple[int, int] | None = None
    added = steps = 0
    while (elapsed := time.perf_counter() - begin) < seconds or traffic.open:
        while elapsed < seconds and len(traffic.open) < alive:
            traffic.add(str(added))
            added += 1
        traffic.step()
        steps += 1
        if steps % 64 == 0:
            engine.check_integrity()
            traffic.load_again()
        if memory is None and elapsed > seconds / 4:
            memory = (device_bytes(), host_bytes())
    engine.check_integrity()
    assert memory is not None
    assert not engine.has_unfinished()
    assert engine.adapters.pool.num_held == 0, "an adapter is held by no request"
    grown = (device_bytes() - memory[0], host_bytes() - memory[1])
    assert grown[0] <= 16 << 20, f"device memory grew by {grown[0]} bytes"
    assert grown[1] <= HOST_GROWTH, f"the host's memory grew by {grown[1]} bytes"
    return {
        **traffic.counts,
        "seconds": round(elapsed, 1),
        "loads": engine.adapters.pool.num_loads,
        "steps": steps,
        "device_mib_grown": round(grown[0] / 2**20, 1),
        "host_mib_grown": round(grown[1] / 2**20, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen06")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--adapters", type=int, default=200)
    parser.add_argument("--slots", type=int, default=16, help="adapters in memory at a time")
    parser.add_argument("--alive", type=int, default=64, help="requests at a time")
    parser.add_argument("--results", type=Path, help="the folder with soak.jsonl, to which the line is added")
    args = parser.parse_args()
    on_cpu = args.device == "cpu"
    if on_cpu:
        make_tiny()
    model = make_model(args.shape, args.device, dtype=torch.float32 if on_cpu else torch.bfloat16)
    layers = linear_layers(model)
    name = next(name for name in reversed(layers) if name.endswith("down_proj"))
    head = model.get_output_embeddings().weight.detach()
    if FIRST_MARK + args.adapters > len(head):
        parser.error(f"--adapters must be at most {len(head) - FIRST_MARK}, because the model has {len(head)} tokens")
    with TemporaryDirectory() as place:
        folders = [
            write_mark(Path(place) / str(number), name, head[FIRST_MARK + number], layers[name][1])
            for number in range(args.adapters)
        ]
        # a page of the pool holds sixteen ranks of all layers, which is more than these adapters have
        page = 16 * sum(sum(sizes) for sizes in layers.values()) * model.dtype.itemsize
        config = EngineConfig(
            device=args.device,
            max_model_len=128,
            num_pages=1024,
            max_num_seqs=args.alive,
            lora_bytes=args.slots * page,
            lora_host_bytes=2 * args.slots * page,
            max_lora_rank=16,
            seed=0,
        )
        engine = Engine(config, model=model)
        report = run(engine, folders, args.seconds, args.alive)
        engine.close()
    print(json.dumps(report))
    if args.results is not None:
        case = f"{args.adapters} adapters, {args.slots} in memory, {args.shape}, {args.device}"
        Results("soak", args.results, **report).add(case, "answers/s", report["answers"] / report["seconds"], {})


if __name__ == "__main__":
    main()
