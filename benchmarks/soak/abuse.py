"""Honest streams beside random abuse: what the honest clients get, and what memory the server keeps.

python -m benchmarks.soak.abuse --seconds 3600                   # an hour on the embedded model
python -m benchmarks.soak.abuse --seconds 120 --seed 3 -- --max-num-seqs 64

It starts a server on a CPU with two API keys and measures it calm. Then, for the given time, one key streams answers while the
other attacks: hostile bodies, hostile bytes and connections that say nothing, in an order drawn from the seed (the attacks of
tests/security/attacks.py). It prints a line for each minute and one JSON line at the end. It ends with 1 if an honest answer
was lost, if the server ended, or if memory is above 110% of its calm value half a minute later. `differing` counts honest
greedy answers that are not the first answer to their prompt: a batch of another size may round differently.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "support")]
import server_process  # noqa: E402
from security import attacks  # noqa: E402
from security.probe import MEMORY_FACTOR, Probe, memory_of, warm_up  # noqa: E402

HONEST = "honest-key"
ATTACKER = "attackers-key"
SETTLE = 30.0


class Honest:
    """Clients that stream greedy answers, one after the other."""

    def __init__(self, url: str, clients: int, tokens: int):
        self.tokens = tokens
        self.answers = 0
        self.differing = 0
        self.lost: list[str] = []
        self.first_token: list[float] = []
        self._url = url
        self._clients = clients
        self._right: dict[str, str] = {}

    async def run(self, end: float) -> None:
        limits = httpx.Limits(max_connections=None)
        headers = {"authorization": f"Bearer {HONEST}"}
        async with httpx.AsyncClient(base_url=self._url, headers=headers, timeout=60, limits=limits, trust_env=False) as client:
            await asyncio.gather(*(self._stream(client, f"def f{i % 8}(x):", end) for i in range(self._clients)))

    async def _stream(self, client: httpx.AsyncClient, prompt: str, end: float) -> None:
        while time.monotonic() < end:
            try:
                text = await self._answer(client, prompt)
            except Exception as error:
                self.lost.append(repr(error)[:200])
                await asyncio.sleep(0.1)
                continue
            self.answers += 1
            self.differing += self._right.setdefault(prompt, text) != text

    async def _answer(self, client: httpx.AsyncClient, prompt: str) -> str:
        body = {"model": attacks.MODEL, "prompt": prompt, "max_tokens": self.tokens, "temperature": 0, "stream": True}
        begin = time.monotonic()
        text = ""
        done = False
        async with client.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as reply:
            if reply.status_code != 200:
                raise RuntimeError(f"{reply.status_code} {await reply.aread()!r}")
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    if not text:
                        self.first_token.append(time.monotonic() - begin)
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RuntimeError(line)
                    text += "".join(choice["text"] for choice in event["choices"])
                done |= line == "data: [DONE]"
        if not done:
            raise RuntimeError("the stream ended early")
        return text


class Abuse:
    """One attack after the other, in a few threads."""

    def __init__(self, url: str, seed: int, threads: int):
        address = httpx.URL(url)
        self.counts: Counter[str] = Counter()
        self._url = url
        self._address = (address.host, address.port or 80)
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(random.Random(f"{seed}-{i}"),)) for i in range(threads)]
        for each in self._threads:
            each.start()

    def stop(self) -> None:
        self._stopped.set()
        for each in self._threads:
            each.join()

    def _run(self, draw: random.Random) -> None:
        while not self._stopped.is_set():
            name = draw.choice([*attacks.BODIES, *attacks.WIRE, "silent"])
            try:
                outcome = self._attack(name, draw)
            except (OSError, httpx.HTTPError) as error:
                outcome = type(error).__name__
            self.counts[f"{name} {outcome}"] += 1
            self._stopped.wait(draw.random())

    def _attack(self, name: str, draw: random.Random) -> str:
        if name == "silent":
            with attacks.Silent(self._address, 200, draw.choice([b"", b"GET / HTTP/1.1\r\nX: "])):
                self._stopped.wait(2)
        elif name in attacks.WIRE:
            attacks.WIRE[name](self._address, draw.choice([ATTACKER, None]))
        else:
            path, body = attacks.BODIES[name]()
            headers = {"authorization": f"Bearer {ATTACKER}", "content-type": "application/json"}
            timeout = draw.choice([0.5, 5, 60])  # many leave before the answer
            return str(
                httpx.post(self._url + path, content=body, headers=headers, timeout=timeout, trust_env=False).status_code
            )
        return "sent"


def abuse(served: server_process.ServerProcess, args: argparse.Namespace) -> dict[str, Any]:
    pid = served.process.pid
    warm_up(served.url, HONEST)
    asyncio.run(Honest(served.url, args.streams, args.tokens).run(time.monotonic() + 5))
    calm_probe = Probe(served.url, HONEST)
    calm = Honest(served.url, args.streams, args.tokens)
    asyncio.run(calm.run(time.monotonic() + args.calm))
    calm_report = calm_probe.stop()
    calm_memory = memory_of(pid)
    honest = Honest(served.url, args.streams, args.tokens)
    hostile = Abuse(served.url, args.seed, args.attackers)
    probe = Probe(served.url, HONEST)
    peak = 0
    end = time.monotonic() + args.seconds
    worker = threading.Thread(target=lambda: asyncio.run(honest.run(end)))
    worker.start()
    told = time.monotonic()
    while worker.is_alive():
        worker.join(1)
        peak = max(peak, memory_of(pid))
        if time.monotonic() - told > 60:
            told = time.monotonic()
            print(
                f"{honest.answers} answers, {len(honest.lost)} lost, {hostile.counts.total()} attacks, {peak >> 20} MB",
                flush=True,
            )
    report = probe.stop()
    hostile.stop()
    begin = time.monotonic()
    while (kept := memory_of(pid)) > calm_memory * MEMORY_FACTOR and time.monotonic() - begin < SETTLE:
        time.sleep(0.5)

    def quantile(found: list[float], q: float) -> float:
        return round(1000 * sorted(found)[int(q * (len(found) - 1))], 1) if found else 0.0

    return {
        "seconds": args.seconds,
        "answers": honest.answers,
        "lost": len(honest.lost) + len(report.failures),
        "examples": (honest.lost + report.failures)[:5],
        "differing": honest.differing,
        "alive": served.process.poll() is None,
        "answers_per_s": {"calm": round(calm.answers / args.calm, 2), "abused": round(honest.answers / args.seconds, 2)},
        "ttft_p50_ms": {"calm": quantile(calm.first_token, 0.5), "abused": quantile(honest.first_token, 0.5)},
        "ttft_p99_ms": {"calm": quantile(calm.first_token, 0.99), "abused": quantile(honest.first_token, 0.99)},
        "calm": calm_report.figures(),
        "abused": report.figures(),
        "memory_mb": {"calm": calm_memory >> 20, "peak": peak >> 20, "kept": kept >> 20},
        "attacks": hostile.counts.total(),
        "outcomes": dict(sorted(hostile.counts.items())),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--calm", type=float, default=15, help="seconds of the measurement before")
    parser.add_argument("--streams", type=int, default=4, help="honest clients")
    parser.add_argument("--tokens", type=int, default=64, help="of each honest answer")
    parser.add_argument("--attackers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("flags", nargs="*", help="more flags of the server, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        served = server_process.start(*args.flags, log=Path(folder, "log"), FA_SERVE_API_KEYS=f"{ATTACKER},{HONEST}")
        try:
            found = abuse(served, args)
        finally:
            served.end()
    print(json.dumps(found))
    memory = found["memory_mb"]
    return int(bool(found["lost"]) or not found["alive"] or memory["kept"] > memory["calm"] * MEMORY_FACTOR)


if __name__ == "__main__":
    sys.exit(main())
