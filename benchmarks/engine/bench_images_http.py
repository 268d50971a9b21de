"""Images over HTTP, beside vLLM's server, on one GPU, one of them at a time.

    python -m benchmarks.engine.bench_images_http --peer-path DIR    # vLLM and what it needs lie in DIR
    python -m benchmarks.engine.bench_images_http                    # ours alone
    python -m benchmarks.engine.bench_images_http --tiny             # on a CPU; the numbers say nothing

    http requests     requests a second of 32 clients, each with another image in each request, 128 tokens out
    http first of 32  median seconds to the first token of these requests
    http first        median seconds to the first token of a request alone, with a new image
    http again        the same for a request with that image and another question

A model has the config of its shape and random weights, the processor of its type, and a tokenizer with a word for each id.
Images are JPEG files of 560 x 560 pixels in data URIs, as smooth as photographs. Both servers get the same requests from the
same client (`/v1/chat/completions`, streamed, end tokens ignored), after 32 that are not counted. Lines are added to
results/images.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from benchmarks.engine.bench_images import ROOT, SHAPES, TINY, Sizes, make_vision_model
from benchmarks.engine.bench_serving import ours, server, vllm
from benchmarks.engine.engine_workloads import save_tokenizer, say
from benchmarks.measure import Results

PIXELS_OF_PATCH = {"qwen3vl-8b": 16}
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] in ('image', 'image_url') %}"
    "<|vision_start|><|image_pad|><|vision_end|> {% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
SECONDS = 240
"""Until a server must be ready."""


def make_folder(sizes: Sizes, folder: Path) -> None:
    """Write weights, config, processor and tokenizer."""
    from transformers import AddedToken, AutoTokenizer, Qwen2_5_VLProcessor, Qwen3VLProcessor
    from transformers.utils import is_torchvision_available

    model = make_vision_model(sizes)
    config = model.config
    save_tokenizer(folder, config.text_config.vocab_size)
    place = folder / "tokenizer.json"
    words = json.loads(place.read_text())
    numbers = words["model"]["vocab"]
    special = {
        "<|image_pad|>": config.image_token_id,
        "<|video_pad|>": config.video_token_id,
        "<|vision_start|>": config.vision_start_token_id,
        "<|vision_end|>": config.vision_end_token_id,
    }
    for name, number in special.items():
        del numbers[f"w{number}"]
        numbers[name] = number
    place.write_text(json.dumps(words))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(name, special=True) for name in special]})
    tokenizer.chat_template = TEMPLATE
    vision = config.vision_config
    options = {"patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size, "min_pixels": 28 * 28}
    kind: Any = Qwen3VLProcessor if sizes.shape == "qwen3vl-8b" else Qwen2_5_VLProcessor
    videos: Any = None
    if is_torchvision_available():
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor as ImageProcessor
        from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

        videos = Qwen2VLVideoProcessor(patch_size=vision.patch_size, merge_size=vision.spatial_merge_size)
    else:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil as ImageProcessor
    images: Any = ImageProcessor(**options)
    kind(images, tokenizer, videos, chat_template=TEMPLATE).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder, max_shard_size="2GB")


def data_uri(seed: int, pixels: int) -> str:
    """A smooth picture: random colours at 20 x 20 places, and all between them."""
    few = np.random.default_rng(seed).integers(0, 255, (20, 20, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(few).resize((pixels, pixels), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


@dataclass
class Client:
    """Sends requests to one server. firsts: seconds to the first token of each; uris: images by seed"""

    url: str
    sizes: Sizes
    pixels: int
    firsts: list[float] = field(default_factory=list)
    uris: dict[int, str] = field(default_factory=dict)
    sent: int = 0

    async def ask(self, http: httpx.AsyncClient, seed: int, max_tokens: int) -> None:
        """One request with the image of this seed, and a question that no other request has."""
        self.sent += 1
        text = " ".join(f"w{5 + (self.sent * 7 + n) % 240}" for n in range(self.sizes.text))
        parts = [{"type": "image_url", "image_url": {"url": self.uris[seed]}}, {"type": "text", "text": text}]
        body = {
            "model": "bench",
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": True,
            "ignore_eos": True,
        }
        content = json.dumps(body).encode()
        begin = time.perf_counter()
        first = None
        async with http.stream("POST", "/v1/chat/completions", content=content, headers=JSON) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code}: {(await answer.aread()).decode()[:500]}")
            async for line in answer.aiter_lines():
                if first is None and line.startswith("data: {") and (json.loads(line[6:])["choices"] or [{}])[0].get("delta"):
                    delta = json.loads(line[6:])["choices"][0]["delta"]
                    first = time.perf_counter() - begin if delta.get("content") is not None and "role" not in delta else None
        self.firsts.append(time.perf_counter() - begin if first is None else first)

    def draw(self, seeds: range) -> None:
        """Make the images of these seeds ahead of time, because the loop that measures must not wait for it."""
        self.uris = {seed: data_uri(seed, self.pixels) for seed in seeds}

    async def load(self, seeds: range) -> float:
        """Requests a second of clients that send the next one when they have an answer."""
        left = iter(seeds)

        async def client(http: httpx.AsyncClient) -> None:
            for seed in left:
                await self.ask(http, seed, self.sizes.output)

        self.draw(seeds)
        self.firsts.clear()
        async with httpx.AsyncClient(base_url=self.url, timeout=120) as http:
            begin = time.perf_counter()
            await asyncio.gather(*(client(http) for _ in range(self.sizes.requests)))
            return len(seeds) / (time.perf_counter() - begin)

    async def alone(self, seeds: range) -> tuple[float, float]:
        """Median seconds to the first token of a request with a new image, and with an image that came before."""
        found = []
        self.draw(seeds)
        async with httpx.AsyncClient(base_url=self.url, timeout=120) as http:
            for _ in range(2):
                self.firsts.clear()
                for seed in seeds:
                    await self.ask(http, seed, 1)
                found.append(statistics.median(self.firsts))
        return found[0], found[1]


JSON = {"Content-Type": "application/json"}


async def measure(url: str, sizes: Sizes) -> dict[str, float]:
    client = Client(url, sizes, sizes.side * PIXELS_OF_PATCH.get(sizes.shape, 14))
    await client.load(range(sizes.requests))
    begin = sizes.requests
    rate = await client.load(range(begin, begin + sizes.rounds * sizes.requests))
    first = statistics.median(client.firsts)
    new, again = await client.alone(range(100_000, 100_009))
    return {"requests": rate, "first of 32": first, "first": new, "again": again}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a CPU and sizes that are done at once; the numbers say nothing")
    parser.add_argument("--shapes", choices=[name for name in SHAPES if name != "tiny"], default="qwen25vl-7b")
    parser.add_argument("--peer-path", help="a folder with vLLM and what it needs")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    sizes = TINY if args.tiny else Sizes(args.shapes)
    # what bench_serving's functions ask for
    args.device = sizes.device
    args.serve = [] if sizes.device == "cuda" else ["--dtype", "float32", "--max-model-len", "256", "--num-pages", "128"]
    results = Results("images", args.out, kept=not args.tiny)
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="bench_images_") as folder:
        begin = time.time()
        make_folder(sizes, Path(folder))
        say(f"{sizes.shape}: model written after {time.time() - begin:.0f} s")
        sides = {"fa_serve": ours(folder, args)} | ({"vllm": vllm(folder, args)} if args.peer_path else {})
        for side, (command, env) in sides.items():
            # both keep what they have computed of images and prompts
            command = [word for word in command if word not in ("--no-prefix-caching", "--no-enable-prefix-caching")]
            try:
                with server(side, command, env, time.time() + SECONDS, args) as (url, seconds):
                    say(f"  {side}: ready after {seconds:.1f} s")
                    measures = asyncio.run(measure(url, sizes))
            except (RuntimeError, OSError, httpx.HTTPError) as error:
                say(f"  {side}: {type(error).__name__}: {error}")
                continue
            for name, value in measures.items():
                found.setdefault(name, {})[side] = value
            say(f"  {side:<10}" + ", ".join(f"{name} {value:.5g}" for name, value in measures.items()))
            record(results, sizes.shape, found)
    results.summarise()


def record(results: Results, shape: str, found: dict[str, dict[str, float]]) -> None:
    """Keep what has been measured so far. found: by measure, the value of each side"""
    for name, values in found.items():
        if "fa_serve" in values:
            unit = "requests/s" if name == "requests" else "s"
            peers = {side: value for side, value in values.items() if side != "fa_serve"}
            if name == "again":
                peers |= {"first": found["first"]["fa_serve"]}
            results.add(f"{shape} http {name}", unit, values["fa_serve"], peers)


if __name__ == "__main__":
    main()
