"""Embeddings: sentences a second offline and over HTTP, beside sentence-transformers and servers with the same API.

    python -m benchmarks.engine.bench_embeddings --shapes bge-base,qwen3-0.6b
    python -m benchmarks.engine.bench_embeddings --shapes bge-base --peer vllm=http://127.0.0.1:9000   # it runs there
    python -m benchmarks.engine.bench_embeddings --shapes bge-base --peer-path DIR --budget 300        # vLLM lies in DIR

Models have random weights. A word of a text is one token, so that lengths are exact. Correctness comes first: the vectors of a
few texts are compared with those of the same model with eager attention, one by one, and a shape that differs has no lines.
`offline` lines, and those of calls with FEW texts (`few`), compare with sentence-transformers (`st_sdpa`; `st_fa_serve` has our
attention on its padded batches). A `products` line is the part of a batch's time that its products need alone, at the rate of a
large product of the same type (60% is aimed at with 512 tokens). `http` lines compare with the servers that --peer names, and
with vLLM's, which --peer-path starts beside ours on a third of the memory. Their cases name the clients that ask at the same
time, with one text in each request. A `p99` line is the latency of the slowest hundredth at half of the rate that as many
clients reach. No case begins after --budget seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

from benchmarks.measure import Cells, Results, graph_microseconds
from fa_serve.engine import Encoder, EngineConfig

WORDS = 1000
SPECIAL = 2
"""Tokens around a text."""
FEW = 8
"""Texts of a call in the cases `few`."""
_BERT = {"model_type": "bert", "vocab_size": 30522, "max_position_embeddings": 514}
_LARGE = {"hidden_size": 1024, "num_attention_heads": 16}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _BERT | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
    "bge-base": _BERT | {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "bge-large": _BERT | _LARGE | {"num_hidden_layers": 24, "intermediate_size": 4096},
    "modernbert-large": {"model_type": "modernbert", "num_hidden_layers": 28, "intermediate_size": 2624} | _LARGE,
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151669,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
}


def make_folder(shape: str, folder: Path, dtype: str) -> Path:
    """A folder of sentence-transformers with random weights, and a tokenizer whose words are tokens."""
    settings = dict(SHAPES[shape])
    config = AutoConfig.for_model(settings.pop("model_type"), pad_token_id=0, **settings)
    torch.manual_seed(0)
    AutoModel.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder)
    vocabulary = {name: i for i, name in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(WORDS))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=512)
    fast.save_pretrained(folder)
    kind = "lasttoken" if "num_key_value_heads" in settings else "mean"
    module = "sentence_transformers.models."
    listed = [{"idx": 0, "name": "0", "path": "", "type": f"{module}Transformer"}]
    listed += [
        {"idx": n, "name": str(n), "path": f"{n}_{k}", "type": module + k} for n, k in ((1, "Pooling"), (2, "Normalize"))
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    pooling = {"embedding_dimension": config.hidden_size, "pooling_mode": kind, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512}))
    return folder


def texts_of(count: int, length: int, seed: int = 0) -> list[str]:
    """Texts of so many tokens."""
    draw = random.Random(seed)
    return [" ".join(f"w{draw.randrange(WORDS)}" for _ in range(length - SPECIAL)) for _ in range(count)]


def check(folder: Path, encoder: Encoder, dtype: str) -> None:
    """Compare with the model's own eager code, one text at a time. Raises SystemExit above the bound."""
    eager = AutoModel.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="eager")
    eager = eager.to(encoder.config.device).eval()
    texts = [text for length in (16, 40, 129) for text in texts_of(2, length, seed=length)]
    found = torch.tensor(encoder.encode(texts))
    worst = 0.0
    with torch.inference_mode():
        for text, row in zip(texts, found, strict=True):
            ids = torch.from_numpy(encoder.reader.read([text])[0].ids).long()[None].to(eager.device)
            hidden = eager(input_ids=ids).last_hidden_state[0].float()
            wanted = (hidden[-1] if "lasttoken" in encoder.card.pooling else hidden.mean(0)).cpu()
            worst = max(worst, 1 - float(torch.nn.functional.cosine_similarity(wanted, row, dim=0)))
    bound = 1e-5 if dtype == "float32" else 1e-2
    if worst > bound:
        raise SystemExit(f"{folder.name}: the vectors differ from eager's by a cosine distance of {worst:.2e}, above {bound}")


def rate(call: Callable[[Sequence[str]], object], texts: Sequence[str], rounds: int, at_once: int | None) -> float:
    """Texts a second, the median of the rounds. at_once: texts of a call; None for all"""
    size = at_once or len(texts)
    parts = [texts[begin : begin + size] for begin in range(0, len(texts), size)]
    call(texts)
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for part in parts:
            call(part)
        seconds.append(time.perf_counter() - begin)
    return len(texts) / statistics.median(seconds)


def operations_a_second(dtype: str) -> float:
    """The rate of a product of two large matrices, the most that the products of layers can reach."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=getattr(torch, dtype)) for _ in range(2))
    return 2 * size**3 / (graph_microseconds(lambda: a @ b) * 1e-6)


def sentence_transformers(folder: Path, attention: str, device: str, dtype: str) -> Callable[[Sequence[str]], object] | None:
    """What encodes texts with that package, or None if it is not installed."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        return None
    options = {"attn_implementation": attention, "dtype": getattr(torch, dtype)}
    model = SentenceTransformer(str(folder), device=device, model_kwargs=options)

    def encode(texts: Sequence[str]) -> object:
        return model.encode(list(texts), batch_size=256)

    return encode


def offline(args: argparse.Namespace, shape: str, folder: Path, results: Results, cells: Cells) -> None:
    settings = EngineConfig(
        model=folder,
        dtype=args.dtype,
        device=args.device,
        max_num_batched_tokens=args.tokens,
        max_num_seqs=args.sequences,
    )
    encoder = Encoder(settings, ahead=True)
    check(folder, encoder, args.dtype)
    device = encoder.config.device
    peers = {f"st_{name}": sentence_transformers(folder, name, device, args.dtype) for name in ("sdpa", "fa_serve")}
    product_rate = operations_a_second(args.dtype) if torch.cuda.is_available() else 0.0
    num_weights = sum(x.weight.numel() for x in encoder._pipeline.model.model.modules() if isinstance(x, torch.nn.Linear))
    for length in args.lengths:
        for case, count, at_once in (("offline", max(args.total // length, 4), None), ("few", 16 * FEW, FEW)):
            if not cells.takes(f"{shape} {case} {length}"):
                continue
            texts = texts_of(count, length)
            ours = rate(encoder.encode, texts, args.rounds, at_once)
            theirs = {name: rate(call, texts, args.rounds, at_once) for name, call in peers.items() if call is not None}
            ratio = results.add(f"{shape} {case} {length}", "sentences/s", ours, theirs)
            if case == "offline" and product_rate:
                share = ours * length * 2 * num_weights / product_rate
                results.add(f"{shape} products {length}", "of the time", share, {})
                print(f"{shape} products {length}: {share:.0%} of the time")
            print(f"{shape} {case} {length}: {ours:.0f} sentences/s, {theirs}, ratio {ratio:.2f}")
    del encoder, peers
    gc.collect()
    torch.cuda.empty_cache()


@dataclass
class Load:
    """What clients have seen. seconds: of each request"""

    seconds: list[float] = field(default_factory=list)
    begin: float = 0.0
    end: float = 0.0

    @property
    def rate(self) -> float:
        return len(self.seconds) / (self.end - self.begin)

    def quantile(self, part: float) -> float:
        return sorted(self.seconds)[min(int(len(self.seconds) * part), len(self.seconds) - 1)]


async def ask(url: str, bodies: Iterator[bytes], load: Load, pause: Callable[[], float]) -> None:
    """One client: a connection that sends one request after the other. Servers close one that is idle for seconds; the time to
    open the next one is not counted."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        for body in bodies:
            await asyncio.sleep(pause())
            if reader.at_eof():
                writer.close()
                reader, writer = await asyncio.open_connection(place.hostname, place.port)
            head = f"POST /v1/embeddings HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
            begin = time.perf_counter()
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            fields = dict(line.lower().split(": ", 1) for line in answer.split("\r\n")[1:] if ": " in line)
            await reader.readexactly(int(fields["content-length"]))
            if " 200 " not in answer.split("\r\n")[0]:
                raise RuntimeError(answer.split("\r\n")[0])
            load.seconds.append(time.perf_counter() - begin)
    finally:
        writer.close()


async def offer(url: str, clients: int, texts: Sequence[str], per_second: float | None = None) -> Load:
    """Let clients send each text once, as fast as they can, or together at a rate, each with pauses of random length."""
    bodies = iter([json.dumps({"model": "bench", "input": text, "encoding_format": "base64"}).encode() for text in texts])
    draw = random.Random(0)

    def pause() -> float:
        return draw.expovariate(per_second / clients) if per_second else 0.0

    load = Load(begin=time.perf_counter())
    await asyncio.gather(*(ask(url, bodies, load, pause) for _ in range(clients)))
    load.end = time.perf_counter()
    return load


@contextmanager
def served(args: argparse.Namespace, folder: Path) -> Iterator[str]:
    """The address of our server."""
    command = [sys.executable, "-m", "fa_serve", "serve", str(folder), "--served-model-name", "bench", "--port", "0"]
    command += ["--dtype", args.dtype, "--device", args.device, "--log-level", "error", *args.serve]
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = next((line.strip() for line in process.stdout if line.startswith("http://")), None)
            if url is None:
                raise SystemExit("the server has not started")
            print(f"ours: ready after {time.perf_counter() - begin:.0f} s", flush=True)
            yield url
        finally:
            process.terminate()


@contextmanager
def vllm(args: argparse.Namespace, folder: Path) -> Iterator[str]:
    """The address of vLLM's server. Raises RuntimeError, with the end of its log, if it does not start."""
    from benchmarks.engine.bench_serving import PEER_SECONDS, peer_environment, server

    options = {
        "--model": str(folder),
        "--runner": "pooling",
        "--served-model-name": "bench",
        "--gpu-memory-utilization": "0.3",
        "--max-model-len": "512",
        "--dtype": args.dtype,
        "--host": "127.0.0.1",
    }
    words = [word for option in options.items() for word in option]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words, "--disable-uvicorn-access-log"]
    with server("vllm", command, peer_environment(args.peer_path), time.time() + PEER_SECONDS, args) as (url, seconds):
        print(f"vllm: ready after {seconds:.0f} s", flush=True)
        yield url


def over_http(args: argparse.Namespace, shape: str, folder: Path, results: Results, cells: Cells) -> None:
    urls: dict[str, str] = dict(peer.split("=", 1) for peer in args.peer)
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        ours = threads.submit(stack.enter_context, served(args, folder))
        peer = threads.submit(stack.enter_context, vllm(args, folder)) if args.peer_path else None
        urls = {"ours": ours.result(), **urls}
        if peer is not None:
            try:
                urls["vllm"] = peer.result()
            except RuntimeError as error:
                print(f"vllm: {error}")
        for length in args.lengths:
            for clients in args.clients:
                if cells.takes(f"{shape} http {length} x {clients}"):
                    measure_clients(args, f"{length} x {clients}", urls, shape, results)


def measure_clients(args: argparse.Namespace, case: str, urls: dict[str, str], shape: str, results: Results) -> None:
    """Rates and latencies of all servers. case: tokens of a text and clients"""
    length, clients = map(int, case.split(" x "))
    texts = texts_of(max(clients * args.requests, 16), length)
    rates: dict[str, float] = {}
    slow: dict[str, float] = {}
    for name, place in urls.items():
        asyncio.run(offer(place, clients, texts[: 2 * clients]))
        rates[name] = asyncio.run(offer(place, clients, texts)).rate
        print(f"{shape} {case}: {name} {rates[name]:.4g} sentences/s", flush=True)
    half = min(rates.values()) / 2
    for name, place in urls.items():
        slow[name] = 1e3 * asyncio.run(offer(place, clients, texts, half)).quantile(0.99)
    for what, unit, found in (("http", "sentences/s", rates), ("p99", "ms", slow)):
        ours = found.pop("ours")
        results.add(f"{shape} {what} {case}", unit, ours, found)
        print(f"{shape} {what} {case}: {ours:.4g} {unit}, {found}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="bge-base,bge-large,modernbert-large,qwen3-0.6b")
    parser.add_argument("--lengths", type=lambda text: [int(part) for part in text.split(",")], default=[16, 64, 128, 512])
    parser.add_argument("--clients", type=lambda text: [int(part) for part in text.split(",")], default=[1, 16, 128, 512])
    parser.add_argument("--requests", type=int, default=32, help="of each client")
    parser.add_argument("--total", type=int, default=1 << 18, help="tokens of the texts of an offline case")
    parser.add_argument("--tokens", type=int, default=16384, help="of a batch, offline")
    parser.add_argument("--sequences", type=int, default=1024, help="of a batch, offline")
    parser.add_argument("--serve", action="append", default=[], metavar="FLAG", help="one more of `fa-serve serve`'s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL", help="a server with OpenAI's /v1/embeddings")
    parser.add_argument("--peer-path", metavar="DIR", help="vLLM and what it needs lie there")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no case begins")
    parser.add_argument("--no-http", action="store_true")
    parser.add_argument("--no-offline", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    results = Results("embeddings", args.out)
    cells = Cells("", args.budget)
    for shape in args.shapes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            made = make_folder(shape, Path(folder), args.dtype)
            if not args.no_offline:
                offline(args, shape, made, results, cells)
            if not args.no_http:
                over_http(args, shape, made, results, cells)
    results.summarise()


if __name__ == "__main__":
    main()
