"""Images through the engine: requests a second, the first token, the same image again, and text beside images.

    python -m benchmarks.engine.bench_images --budget 100    # a 7B or 8B shape with random weights, images of 560 x 560
    python -m benchmarks.engine.bench_images --shapes qwen3vl-8b --cells requests,text
    python -m benchmarks.engine.bench_images --cells encode,p99 --no-tower-graphs        # layers of the tower are launched
    python -m benchmarks.engine.bench_images --tiny          # on a CPU, sizes that are done at once; the numbers say nothing

    requests     requests a second of 32 clients, each with another image in each request, 128 tokens out
    first of 32  median seconds to the first token of these requests
    first        median seconds to the first token of a request alone, with a new image
    again        the same for a request with that image and another question behind it; ours is compared with "first"
    encode       images a second through the towers, 16 in one call; compared with one after the other
    text p99     seconds between two tokens of requests with text alone while requests with images come; compared with "alone",
                 and with "prompts" of as many tokens that come instead; with and without a target for the time of a step
    beside text  median seconds to the first token of these requests with images, the same way
    text         requests a second of text alone; compared with an engine that takes no images

Every case runs once before it is measured, those of text p99 twice, with idle moments between them. Pixels are random numbers
as the processor would give them, so that no case contains its work. Cases that begin after the budget are left out, and those
of a line that are measured replace it in results/images.jsonl. Left out: other engines, HTTP, and reading files.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig, Qwen3VLConfig
from transformers.configuration_utils import PreTrainedConfig

from benchmarks.measure import Cells, Results
from benchmarks.tuning.step_parts import LongSteps
from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.engine.images import tower_graphs
from fa_serve.engine.images.encoder import ImageEncoder
from fa_serve.engine.images.prompt import ImageInput
from fa_serve.engine.process.child import tune_interpreter

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Sizes:
    """shape: of the model; side: patches along each side of an image, of which four are a token; text: tokens of a question"""

    shape: str = "qwen25vl-7b"
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    requests: int = 32
    rounds: int = 4
    side: int = 40
    text: int = 64
    output: int = 128

    @property
    def patch(self) -> int:
        """Numbers of a patch: three colours, two moments, and pixels."""
        return 3 * 2 * (16 * 16 if self.shape == "qwen3vl-8b" else 14 * 14)


TINY = Sizes("tiny", "cpu", torch.float32, requests=2, rounds=1, side=4, text=6, output=4)
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
_TINY_TOKENS = {"image_token_id": 300, "video_token_id": 301, "vision_start_token_id": 302, "vision_end_token_id": 303}


# transformers' default is the text of 72 billion weights
_TEXT_7B = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}
_TEXT_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True},
}
_VISION_7B = {"hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584}  # transformers' default is 3584 wide
_VISION_8B = {"out_hidden_size": 4096}
SHAPES: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen25vl-7b": lambda: Qwen2_5_VLConfig(text_config=_TEXT_7B, vision_config=_VISION_7B),
    "qwen3vl-8b": lambda: Qwen3VLConfig(text_config=_TEXT_8B, vision_config=_VISION_8B),
    "tiny": lambda: Qwen2_5_VLConfig(text_config=_TINY_TEXT, vision_config=_TINY_VISION, **_TINY_TOKENS),
}


def make_vision_model(sizes: Sizes) -> Any:
    """A model with random weights, in the sizes of its shape."""
    with torch.device(sizes.device):
        return cast(Any, AutoModelForImageTextToText).from_config(SHAPES[sizes.shape](), dtype=sizes.dtype).eval()


EVERY = 8
"""Steps between two images that come beside texts."""
LONGEST = 1.25
"""The target of a step beside decoding alone, a little below what is wanted of the 99th percentile (1.3)."""
ROUNDS = 3
"""Of texts beside others, the last of which counts. The ones before it teach what steps cost and which graphs they need."""
SETTINGS = {"": False, "target": True}
"""Whether steps should take at most LONGEST times what decoding alone takes, by the end of a case's name."""


class Workload:
    """An engine and the requests that it is given. Each new image has other pixels.

    max_images: 0 for an engine without them; others: settings of the engine
    """

    def __init__(self, sizes: Sizes, model: Any, max_images: int = 16, **others: Any) -> None:
        self._sizes = sizes
        self._token = model.config.image_token_id
        limits = {"max_model_len": 4096} if sizes.device == "cuda" else {"max_model_len": 64, "num_pages": 64}
        config = EngineConfig(max_num_seqs=2 * sizes.requests, max_images=max_images, **limits | others)
        self.engine = Engine(config, model=model)
        self.firsts: list[float] = []
        self._draw = torch.Generator().manual_seed(0)
        self._text = 2

    def image(self) -> ImageInput:
        side = self._sizes.side
        pixels = torch.randn(side * side, self._sizes.patch, generator=self._draw)
        ids = torch.full((1, side * side // 4), self._token)
        return ImageInput.of({"input_ids": ids, "pixel_values": pixels, "image_grid_thw": torch.tensor([[1, side, side]])})

    def prompt(self, image: ImageInput | None) -> list[int]:
        """Another question at each call, behind the image."""
        self._text += 1
        places = [] if image is None else [self._token] * image.inputs["input_ids"].shape[1]
        return [1, *places, *((self._text + n) % 250 + 3 for n in range(self._sizes.text))]

    def run_clients(self, with_images: bool) -> tuple[float, float]:
        """Requests a second of clients that send the next request when they have an answer, and the median seconds to the first
        token."""
        sizes = self._sizes
        params = SamplingParams(max_tokens=sizes.output, temperature=0.0, ignore_eos=True)
        images = [self.image() if with_images else None for _ in range(sizes.requests * sizes.rounds)]
        left = [(image, self.prompt(image)) for image in images]
        sent: dict[str, float] = {}
        firsts: dict[str, float] = {}
        begin = time.perf_counter()

        def send() -> None:
            image, prompt = left.pop()
            name = f"request-{len(sent)}"
            sent[name] = time.perf_counter()
            self.engine.add_request(name, prompt, params, images=[] if image is None else [image])

        for _ in range(sizes.requests):
            send()
        while self.engine.has_unfinished():
            for output in self.engine.step():
                firsts.setdefault(output.request_id, time.perf_counter() - sent[output.request_id])
                if output.finished and left:
                    send()
        return len(sent) / (time.perf_counter() - begin), statistics.median(firsts.values())

    def images_per_second(self, together: int) -> float:
        """Through the towers, so many in one call."""
        encoder = cast(ImageEncoder, self.engine._runner.images)
        images = [self.image().inputs for _ in range(16)]
        times = []
        with torch.inference_mode(), encoder.replaying():
            for _ in range(4):  # layers may be captured in the first two
                begin = time.perf_counter()
                for number in range(0, len(images), together):
                    encoder.reader.encode_all(images[number : number + together])
                if self._sizes.device == "cuda":
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - begin)
        return len(images) / min(times)

    def first_token(self, image: ImageInput) -> float:
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        prompt = self.prompt(image)
        begin = time.perf_counter()
        self.engine.generate([prompt], params, images=[[image]])
        return time.perf_counter() - begin

    def idle(self) -> None:
        """Capture the graphs that steps have missed, as a server does while it has no request."""
        while self.engine.prepare_one():
            pass

    def gaps_of_text(self, beside: str) -> float:
        """The 99th percentile of the seconds between two tokens of text. Images are drawn before, in as many steps as answers
        take if each step gives one token, because drawing one takes longer than a step.

        beside: what comes every few steps: "images", "prompts" of as many tokens without an image, or nothing ("alone")
        """
        sizes = self._sizes
        params = SamplingParams(max_tokens=sizes.output, temperature=0.0, ignore_eos=True)
        for number in range(sizes.requests):
            self.engine.add_request(f"text-{number}", self.prompt(None), params)
        gaps = []
        self.firsts = []
        sent: dict[str, float] = {}
        last: dict[str, float] = {}
        step = 0
        ready = [self.image() for _ in range(0 if beside == "alone" else 2 * sizes.output // EVERY)]
        while any(name not in last or last[name] >= 0 for name in (f"text-{n}" for n in range(sizes.requests))):
            if ready and not step % EVERY:
                image = ready.pop()
                tokens = self.prompt(image)
                if beside == "prompts":  # no two begin alike, so that the prefix cache has none of them
                    tokens = [token if token != self._token else (5 * step + at) % 250 + 3 for at, token in enumerate(tokens)]
                images = [image] if beside == "images" else []
                sent[f"beside-{step}"] = time.perf_counter()
                self.engine.add_request(f"beside-{step}", tokens, replace(params, max_tokens=1), images=images)
            step += 1
            for output in self.engine.step():
                now = time.perf_counter()
                if output.request_id in sent:
                    self.firsts.append(now - sent[output.request_id])
                if output.request_id.startswith("text"):
                    if output.request_id in last:
                        gaps.append(now - last[output.request_id])
                    last[output.request_id] = -1.0 if output.finished else now
        while self.engine.has_unfinished():
            self.engine.step()
        return statistics.quantiles(gaps, n=100)[-1] if len(gaps) > 1 else 0.0


def measure(sizes: Sizes, results: Results, cells: Cells, long_steps: int = 0) -> None:
    model = make_vision_model(sizes)
    if cells.takes("text"):
        alone = Workload(sizes, model, max_images=0)
        alone.run_clients(with_images=False)
        without, _ = alone.run_clients(with_images=False)
        alone.engine.close()
    tune_interpreter()
    work = Workload(sizes, model)
    if cells.takes("requests") or cells.takes("first of 32"):
        work.run_clients(with_images=True)
        rate, first = work.run_clients(with_images=True)
        results.show(f"{sizes.shape} requests", "requests/s", rate, {})
        results.show(f"{sizes.shape} first of 32", "s", first, {})
    if cells.takes("first") or cells.takes("again"):
        images = [work.image() for _ in range(6)]
        # the first image compiles what both cases need
        firsts, again = ([work.first_token(image) for image in images][1:] for _ in range(2))
        results.show(f"{sizes.shape} first", "s", statistics.median(firsts), {})
        results.show(f"{sizes.shape} again", "s", statistics.median(again), {"first": statistics.median(firsts)})
    if cells.takes("encode"):
        work.images_per_second(together=16)
        results.show(
            f"{sizes.shape} encode",
            "images/s",
            work.images_per_second(together=16),
            {"alone": work.images_per_second(together=1)},
        )
    if cells.takes("text"):
        work.run_clients(with_images=False)
        rate, _ = work.run_clients(with_images=False)
        results.show(f"{sizes.shape} text", "requests/s", rate, {"max_images=0": without})
    work.engine.close()
    if cells.takes("text p99"):
        measure_gaps(sizes, model, results, cells, long_steps)


def measure_gaps(sizes: Sizes, model: Any, results: Results, cells: Cells, long_steps: int) -> None:
    """The cases "text p99" and "beside text", with each setting. The first one says what decoding alone takes. Objects of the
    engine are frozen before the round that counts, as in a server that is ready."""
    alone = 0.0
    for name, has_target in SETTINGS.items():
        if name and not cells.takes(f"text p99 {name}"):
            continue
        target = {"target_itl": 1000 * LONGEST * alone} if has_target else {}
        work = Workload(sizes, model, **target)
        for _ in range(ROUNDS):
            gaps = {kind: work.gaps_of_text(kind) for kind in ("alone", "prompts", "images")}
            work.idle()
            tune_interpreter()
        if long_steps:
            with LongSteps() as steps:
                work.gaps_of_text("images")
            print(steps.table(long_steps))
        work.engine.close()
        alone = alone or gaps["alone"]
        case = f" {name}" if name else ""
        results.show(f"{sizes.shape} text p99{case}", "s", gaps.pop("images"), gaps)
        results.show(f"{sizes.shape} beside text{case}", "s", statistics.median(work.firsts or [0.0]), {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a CPU and sizes that are done at once; the numbers say nothing")
    parser.add_argument("--shapes", choices=[name for name in SHAPES if name != "tiny"], default="qwen25vl-7b")
    parser.add_argument(
        "--tower-graphs", action=argparse.BooleanOptionalAction, default=True, help="replay layers of the tower as CUDA graphs"
    )
    parser.add_argument("--cells", default="", help="parts of names of cases, separated by commas; all by default")
    parser.add_argument("--long-steps", type=int, default=0, help="print so many of the longest steps of texts beside images")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds after which no case begins")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    tower_graphs.REPLAYS_TOWERS = args.tower_graphs
    results = Results("images", args.out)
    cells = Cells(args.cells, args.budget)
    measure(TINY if args.tiny else Sizes(args.shapes), results, cells, args.long_steps)
    cells.report()


if __name__ == "__main__":
    main()
