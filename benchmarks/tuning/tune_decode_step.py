"""Decoding steps whose layers are one persistent kernel: us a layer, beside the layers launch by launch and their floor.

    python -m benchmarks.tuning.tune_decode_step                          # 0.6B and 8B, 1 and 8 tokens, all tiles
    python -m benchmarks.tuning.tune_decode_step --shapes qwen06 --tokens 1 --tiles default
    python -m benchmarks.tuning.tune_decode_step --shapes waiting         # layers of few weights: what waiting costs
    python -m benchmarks.tuning.tune_decode_step --shapes tiny --tiles default --device cpu     # TRITON_INTERPRET=1

A line has the layers launch by launch (FusedLayer, as the engine runs them without the kernel), one launch for all layers, one
launch for each layer, and the floor: the time of reading weights, keys and values at the bandwidth of a kernel that only reads.
All are in CUDA graphs, and the weights of all layers together exceed the L2 cache. The kernel's result is compared with that of
the launches first. What the lines decide is `DEFAULT_TILE` in fa_serve/ops/decode_step/layout.py, and whether
`stack.STACKS_LAYERS` is switched on. A whole engine: `python -m benchmarks.engine.bench_engine decode --persistent`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import graph_microseconds, in_turns, read_bandwidth
from fa_serve import ops
from fa_serve.hf import PagedBatch
from fa_serve.hf.surgery.fuse.layer import FusedLayer, HeadsAttention
from fa_serve.hf.surgery.fuse.parts import FusedProduct
from fa_serve.ops.decode_step.layout import DEFAULT_TILE, StepTile
from fa_serve.ops.decode_step.run import DecodeStack
from fa_serve.ops.decode_step.stacked import StackLayer, StackOptions, StackStep

PAGE_SIZE = 16


@dataclass(frozen=True)
class StackSizes:
    """The sizes of a model's layers, and how many of them are timed."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_norms: bool
    layers: int


SHAPES = {
    "qwen06": StackSizes(1024, 3072, 16, 8, 128, True, 28),
    "llama1b": StackSizes(2048, 8192, 32, 8, 64, False, 16),
    "llama8b": StackSizes(4096, 14336, 32, 8, 128, False, 8),
    "waiting": StackSizes(256, 256, 16, 8, 128, True, 28),
    "tiny": StackSizes(64, 64, 4, 2, 16, True, 2),
}
WORDS = DEFAULT_TILE._replace(tagged=True)
TILES = {
    "default": DEFAULT_TILE,
    "16 KiB": DEFAULT_TILE._replace(tile_bytes=16384),
    "64 KiB": DEFAULT_TILE._replace(tile_bytes=65536),
    "1024 columns": DEFAULT_TILE._replace(block_k=1024),
    "4 warps": DEFAULT_TILE._replace(num_warps=4, tile_bytes=16384, block_k=1024),
    "16 warps": DEFAULT_TILE._replace(num_warps=16, tile_bytes=32768),
    "32 keys": DEFAULT_TILE._replace(block_keys=32),
    "3 stages": DEFAULT_TILE._replace(key_stages=3),
    "nothing ahead": DEFAULT_TILE._replace(ahead_bytes=0),
    "32 KiB ahead": DEFAULT_TILE._replace(ahead_bytes=32768),
    "128 KiB ahead": DEFAULT_TILE._replace(ahead_bytes=131072),
    "256 KiB ahead": DEFAULT_TILE._replace(ahead_bytes=262144),
    "words": WORDS,
    "words 4 warps": WORDS._replace(num_warps=4, tile_bytes=16384, block_k=1024),
    "words 16 warps": WORDS._replace(num_warps=16),
    "words 16 KiB": WORDS._replace(tile_bytes=16384),
    "words 64 KiB": WORDS._replace(tile_bytes=65536),
    "words 4096 columns": WORDS._replace(block_k=4096),
    "words 32 keys": WORDS._replace(block_keys=32),
    "words nothing ahead": WORDS._replace(ahead_bytes=0),
    "words 128 KiB ahead": WORDS._replace(ahead_bytes=131072),
}


class StackProblem:
    """Layers with random weights, and a step of `tokens` sequences with `keys` keys each."""

    def __init__(self, sizes: StackSizes, tokens: int, keys: int, device: str) -> None:
        self.sizes = sizes
        self.device = device
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.layers = [self._layer() for _ in range(sizes.layers)]
        self.options = StackOptions(sizes.num_heads, sizes.head_dim, sizes.head_dim, "silu", 1.0, sizes.head_dim**-0.5)
        pages = -(-keys // PAGE_SIZE)
        table = torch.randperm(tokens * pages, device=device).to(torch.int32).view(tokens, pages)
        places = torch.full((tokens,), keys - 1, device=device)
        slots = table[:, -1].long() * PAGE_SIZE + places % PAGE_SIZE
        angles = torch.rand(tokens, sizes.head_dim // 2, device=device).repeat(1, 2)
        self.step = StackStep(
            cos=angles.cos().to(self.dtype),
            sin=angles.sin().to(self.dtype),
            caches=[self._caches(table.numel()) for _ in range(sizes.layers)],
            slot_mapping=slots,
            block_table=table,
            seqused_k=torch.full((tokens,), keys, dtype=torch.int32, device=device),
            cu_seqlens_q=torch.arange(tokens + 1, dtype=torch.int32, device=device),
            max_seqlen_q=1,
        )
        self.x = self._random(tokens, sizes.hidden)
        self.bytes = sizes.layers * self.dtype.itemsize * 2 * tokens * keys * sizes.num_kv_heads * sizes.head_dim
        self.bytes += sum(x.nbytes for layer in self.layers for x in layer.weights().values() if x is not None)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=self.dtype, device=self.device)

    def _caches(self, pages: int) -> tuple[Tensor, Tensor]:
        shape = (pages, PAGE_SIZE, self.sizes.num_kv_heads, self.sizes.head_dim)
        return self._random(*shape), self._random(*shape)

    def _layer(self) -> StackLayer:
        sizes = self.sizes

        def weights(rows: int, columns: int) -> Tensor:
            return self._random(rows, columns) * columns**-0.5

        def norm(width: int) -> ops.Norm:
            return ops.Norm(torch.ones(width, dtype=self.dtype, device=self.device), 1e-6)

        attended = sizes.num_heads * sizes.head_dim
        head_norms = [norm(sizes.head_dim) if sizes.head_norms else None for _ in range(2)]
        return StackLayer(
            weights(attended + 2 * sizes.num_kv_heads * sizes.head_dim, sizes.hidden),
            None,
            weights(sizes.hidden, attended) / 4,  # so that the residual stream does not grow
            weights(2 * sizes.intermediate, sizes.hidden),
            weights(sizes.hidden, sizes.intermediate) / 4,
            norm(sizes.hidden),
            norm(sizes.hidden),
            *head_norms,
        )

    def launches(self) -> Any:
        """All layers, launch by launch."""
        step = self.step
        batch = PagedBatch(
            kv_caches=dict(enumerate(step.caches)),
            slot_mapping=step.slot_mapping,
            block_table=step.block_table,
            seqused_k=step.seqused_k,
            cu_seqlens_q=step.cu_seqlens_q,
            max_seqlen_q=1,
            max_seqlen_k=int(step.seqused_k.max()),
        )
        fused = [self._fused(index, layer) for index, layer in enumerate(self.layers)]
        steps = [layer.step(batch, index, step.cos, step.sin) for index, layer in enumerate(fused)]

        def compute(x: Tensor) -> Tensor:
            for layer, told in zip(fused, steps, strict=True):
                x = layer.compute(x, told)
            return x

        return compute

    def _fused(self, index: int, layer: StackLayer) -> FusedLayer:
        options = {"left": -1, "attention_chunk": 0, "softmax_scale": None, "softcap": 0.0, "sinks": None}
        sizes = self.sizes
        attention = HeadsAttention(
            sizes.num_heads, sizes.head_dim, layer.q_norm, layer.k_norm, FusedProduct(layer.qkv, None), "twice"
        )
        return FusedLayer(
            original=lambda x: x,
            index=index,
            options=options,
            before_attention=layer.before_attention,
            after_attention=None,
            before_mlp=layer.before_mlp,
            after_mlp=None,
            attention=attention,
            o=FusedProduct(layer.o, None),
            gate_up=FusedProduct(layer.gate_up, None),
            down=FusedProduct(layer.down, None),
            activation="silu",
            mlp=nn.Identity(),
            multiplier=1.0,
        )

    def calls(self, tile: StepTile) -> dict[str, Any]:
        """The kernel in one launch, and in one for each layer."""
        stack = DecodeStack(self.layers, self.options, tile=tile)

        def one_by_one(x: Tensor) -> Tensor:
            for first in range(len(self.layers)):
                stack.compute(x, self.step, first=first, count=1)
            return x

        return {"one launch": partial(stack.compute, step=self.step), "a launch a layer": one_by_one}


def check(name: str, actual: Tensor, expected: Tensor) -> None:
    """Raise unless two results in 16 bits agree as far as two orders of summation do."""
    difference = float((actual.float() - expected.float()).norm() / expected.float().norm())
    if not difference < 0.02:
        raise AssertionError(f"{name}: the kernel differs from the launches by {difference:.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="qwen06,llama8b,waiting")
    parser.add_argument("--tokens", default="1,8")
    parser.add_argument("--keys", type=int, default=640)
    parser.add_argument("--tiles", default=",".join(TILES))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = read_bandwidth() if options.device == "cuda" else 1.0
    for shape in options.shapes.split(","):
        for tokens in map(int, options.tokens.split(",")):
            problem = StackProblem(SHAPES[shape], tokens, options.keys, options.device)
            launches = problem.launches()
            expected = launches(problem.x.clone())
            count = problem.sizes.layers
            floor = problem.bytes / bandwidth * 1e-6 / count
            for name in options.tiles.split(","):
                calls = problem.calls(TILES[name])
                for way, call in calls.items():
                    for _ in range(3):  # the counters go on from call to call
                        check(f"{shape} {tokens} {name}, {way}", call(problem.x.clone()), expected)
                x = problem.x.clone()
                timed = {"launches": partial(launches, x), **{way: partial(call, x) for way, call in calls.items()}}
                times = in_turns(timed, partial(graph_microseconds, calls=1))
                shown = "  ".join(f"{way} {time / count:.2f} ({time / count / floor:.2f})" for way, time in times.items())
                print(f"{shape} {tokens} tokens, {name}: us a layer (over the floor {floor:.2f}): {shown}", flush=True)
            del problem, launches, expected
            if options.device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
