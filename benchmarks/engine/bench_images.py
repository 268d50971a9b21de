"""Images through the engine: requests a second, the first token, the same image again, and text beside images.

    python -m benchmarks.engine.bench_images                 # Qwen2.5-VL-7B with random weights, images of 560 x 560
    python -m benchmarks.engine.bench_images --tiny          # on a CPU, sizes that are done at once; the numbers say nothing

    requests     requests a second of 32 that run at once, each with another image, 128 tokens out
    first        seconds to the first token of a request alone, with a new image
    again        the same for a request with that image and another question behind it; ours is compared with "first"
    text p99     seconds between two tokens of requests with text alone while requests with images come; compared with "alone"

Every case runs once before it is measured. Pixels are random numbers as the processor would give them, so that no case contains
its work. Results go to results/images.jsonl in the form of measure.py. Left out: other engines, HTTP, and reading files.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from benchmarks.measure import Results
from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.engine.images.prompt import ImageInput

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Sizes:
    """side: patches of 14 pixels along each side of an image, of which four are a token; text: tokens of a question"""

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    requests: int = 32
    rounds: int = 4
    side: int = 40
    text: int = 64
    output: int = 128


TINY = Sizes("cpu", torch.float32, requests=2, rounds=1, side=4, text=6, output=4)
_TINY_TEXT = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
}
_TINY_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}


def make_vision_model(sizes: Sizes) -> Any:
    """A model with random weights, of the published sizes unless they are tiny."""
    config = Qwen2_5_VLConfig()
    if sizes == TINY:
        config = Qwen2_5_VLConfig(text_config=_TINY_TEXT, vision_config=_TINY_VISION, image_token_id=300)
    with torch.device(sizes.device):
        return Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=sizes.dtype).eval()


class Workload:
    """An engine and the requests that it is given. Each new image has other pixels."""

    def __init__(self, sizes: Sizes) -> None:
        model = make_vision_model(sizes)
        self._sizes = sizes
        self._token = model.config.image_token_id
        limits = {"max_model_len": 4096} if sizes.device == "cuda" else {"max_model_len": 64, "num_pages": 64}
        self.engine = Engine(EngineConfig(max_num_seqs=2 * sizes.requests, **limits), model=model)
        self._draw = torch.Generator().manual_seed(0)
        self._text = 2

    def image(self) -> ImageInput:
        side = self._sizes.side
        pixels = torch.randn(side * side, 3 * 2 * 14 * 14, generator=self._draw)
        ids = torch.full((1, side * side // 4), self._token)
        return ImageInput.of({"input_ids": ids, "pixel_values": pixels, "image_grid_thw": torch.tensor([[1, side, side]])})

    def prompt(self, image: ImageInput | None) -> list[int]:
        """Another question at each call, behind the image."""
        self._text += 1
        places = [] if image is None else [self._token] * image.inputs["input_ids"].shape[1]
        return [1, *places, *((self._text + n) % 250 + 3 for n in range(self._sizes.text))]

    def requests_per_second(self) -> float:
        count = self._sizes.requests * self._sizes.rounds
        images = [self.image() for _ in range(count)]
        prompts = [self.prompt(image) for image in images]
        params = SamplingParams(max_tokens=self._sizes.output, temperature=0.0, ignore_eos=True)
        begin = time.perf_counter()
        self.engine.generate(prompts, params, images=[[image] for image in images])
        return count / (time.perf_counter() - begin)

    def first_token(self, image: ImageInput) -> float:
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        prompt = self.prompt(image)
        begin = time.perf_counter()
        self.engine.generate([prompt], params, images=[[image]])
        return time.perf_counter() - begin

    def gaps_of_text(self, with_images: bool) -> float:
        """The 99th percentile of the seconds between two tokens of text. with_images: one comes every few steps"""
        sizes = self._sizes
        params = SamplingParams(max_tokens=sizes.output, temperature=0.0, ignore_eos=True)
        for number in range(sizes.requests):
            self.engine.add_request(f"text-{number}", self.prompt(None), params)
        gaps = []
        last: dict[str, float] = {}
        step = 0
        while any(name not in last or last[name] >= 0 for name in (f"text-{n}" for n in range(sizes.requests))):
            if with_images and not step % 8:
                image = self.image()
                self.engine.add_request(f"image-{step}", self.prompt(image), replace(params, max_tokens=1), images=[image])
            step += 1
            for output in self.engine.step():
                if output.request_id.startswith("text"):
                    now = time.perf_counter()
                    if output.request_id in last:
                        gaps.append(now - last[output.request_id])
                    last[output.request_id] = -1.0 if output.finished else now
        while self.engine.has_unfinished():
            self.engine.step()
        return statistics.quantiles(gaps, n=100)[-1] if len(gaps) > 1 else 0.0


def measure(sizes: Sizes, results: Results) -> None:
    work = Workload(sizes)
    work.requests_per_second()
    results.add("requests", "requests/s", work.requests_per_second(), {})
    image = work.image()
    work.first_token(work.image())
    first = work.first_token(image)
    results.add("first", "s", first, {})
    results.add("again", "s", work.first_token(image), {"first": first})
    alone = work.gaps_of_text(with_images=False)
    results.add("text p99", "s", work.gaps_of_text(with_images=True), {"alone": alone})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a CPU and sizes that are done at once; the numbers say nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    results = Results("images", args.out)
    measure(TINY if args.tiny else Sizes(), results)
    for line in results.lines:
        print(f"{line['case']:<10}{line['ours']:>12.5g} {line['unit']}")
    results.write()


if __name__ == "__main__":
    main()
