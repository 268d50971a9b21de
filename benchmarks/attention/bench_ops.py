"""Experts of mixtures and products with quantised weights: us of a call beside its bound and its peers.

    python -m benchmarks.attention.bench_ops experts         # matrices and quantised weights, 1 to 8192 tokens
    python -m benchmarks.attention.bench_ops experts --shapes gptoss20b --forms mxfp4 --kernels expert_wgmma,grouped
    python -m benchmarks.attention.bench_ops quantized       # dense products by format, 1 to 2048 tokens
    python -m benchmarks.attention.bench_ops experts --tiny  # on a CPU: small sizes, which show only that the benchmark runs

Each subcommand compares our results with float64 first, and ends if they are wrong. A call of experts is timed with several
routings that are drawn at random, because equal tokens would meet few experts; its bound is the time of reading the experts
that are met, or of the products, whichever is longer, by the bandwidth and the rate that are measured in the same run. Peers:
transformers' `grouped_mm` and, for few tokens, `batched_mm` with bfloat16 experts; the bfloat16 product for dense weights. All
are timed in CUDA graphs with weights that exceed the L2 cache. --shapes, --forms and --tokens restrict the cells. --kernels
times rows of the table of kernels (fa_serve/ops/products/table.py) without their limits instead of the row that fits, and names
them in the case: so the limits in crossovers.py are found. Results go to results/ops_<subcommand>.jsonl in the form of
measure.py, with the bound as the peer "bound". Left out: whole layers and models (bench_engine.py).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward

from benchmarks.measure import Results, graph_microseconds, read_bandwidth
from fa_serve import ops
from fa_serve.launching.plans import PLANS
from fa_serve.ops.moe.fallback import gated
from fa_serve.ops.products import table
from fa_serve.ops.products.quantised.weight import FLOAT8, QuantizedWeight, pack_int4
from fa_serve.ops.torch_ops import TorchOps
from fa_serve.testing import assert_matches_reference

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
ROUTINGS = 6
"""Calls of experts with different routings that are timed together."""
FEW = 16
"""The most tokens for which `batched_mm` is timed: it copies the weights of each pair."""


@dataclass(frozen=True)
class Mixture:
    """The sizes of one layer of experts."""

    num_experts: int
    top_k: int
    hidden: int
    width: int
    gate: ops.Gate


SILU = ops.Gate("silu")
CLAMPED = ops.Gate("silu", interleaved=True, slope=1.702, limit=7.0, offset=1.0)
MIXTURES = {"qwen30a3b": Mixture(128, 8, 2048, 768, SILU), "gptoss20b": Mixture(32, 4, 2880, 2880, CLAMPED)}
SHAPES = {"6144x4096": (6144, 4096), "28672x4096": (28672, 4096), "4096x14336": (4096, 14336), "4096x4096": (4096, 4096)}
EXPERT_FORMS = ("matrices", "mxfp4", "fp8-block", "fp8-32", "int4")
DENSE_FORMS = ("int4", "fp8-row", "fp8-block", "mxfp4")
CHECKED = (1, 2, 40, 300)
"""Tokens of the products that are compared with float64 first."""
BEYOND_CACHE = 160_000_000  # bytes
TINY_MIXTURES = {"tiny": Mixture(4, 2, 288, 64, CLAMPED)}
TINY_SHAPES = {"64x288": (64, 288)}


@dataclass(frozen=True)
class Cells:
    """Which cells are timed: all if a choice is empty. kernels: rows of the table, "" for the one that fits"""

    tiny: bool
    shapes: tuple[str, ...] = ()
    forms: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    kernels: tuple[str, ...] = ("",)

    def of_shapes(self, known: dict[str, T]) -> dict[str, T]:
        return {name: shape for name, shape in known.items() if not self.shapes or name in self.shapes}

    def of_forms(self, known: tuple[str, ...]) -> list[str]:
        return [form for form in known if not self.forms or form in self.forms]

    def of_tokens(self, known: tuple[int, ...]) -> tuple[int, ...]:
        return self.tokens or ((1, 3) if self.tiny else known)


@dataclass(frozen=True)
class Machine:
    """Where calls run, and what its bounds are. bandwidth: bytes a second; rate: floating operations a second in bfloat16"""

    device: str
    bandwidth: float
    rate: float

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def bound(self, num_bytes: float, operations: float) -> float:
        """Least time in us."""
        return max(num_bytes / self.bandwidth, operations / self.rate) * 1e6

    def microseconds(self, call: Callable[[], object], calls: int = 4) -> float:
        """The time of one of several calls inside a CUDA graph, or on a CPU the least time of one by the clock."""
        if self.device == "cuda":
            return graph_microseconds(call, calls)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return min(times) * 1e6


def measure_machine(tiny: bool) -> Machine:
    """Bandwidth of reading 4 GiB and rate of a product of 8192 x 8192, both in a graph; a CPU has nominal ones."""
    if tiny:
        return Machine("cpu", 1e8, 1e8)
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    rate = 2 * 8192**3 / graph_microseconds(lambda: square @ square, calls=1) * 1e6
    return Machine("cuda", read_bandwidth() * 1e12, rate)


def random_weight(form: str, n: int, k: int, device: str) -> QuantizedWeight:
    """Random bits of a format, with values of about 1 / sqrt(k)."""
    small = 1.0 / k**0.5
    if form == "mxfp4":
        bits = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
        exponent = 127 + round(torch.log2(torch.tensor(small / 3)).item())
        scales = torch.full((n, k // 32), exponent, dtype=torch.uint8, device=device)
        return QuantizedWeight(pack_int4(bits), scales, group_size=32, width=k)
    # integers have whole groups; the last block of float8 weights may be a part of one, as in checkpoints
    groups = k if form == "fp8-row" else 32 if form == "fp8-32" or (form == "int4" and k % 128) else 128
    scales = torch.rand(n, -(-k // groups), device=device) + 0.5
    if form == "int4":
        bits = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
        zeros = torch.randint(6, 10, scales.shape, dtype=torch.uint8, device=device)
        return QuantizedWeight(pack_int4(bits), (scales * small / 4).bfloat16(), groups, k, zeros)
    data = torch.randn(n, k, device=device).to(FLOAT8)
    return QuantizedWeight(data, scales * small, groups, k)


def num_bytes(weight: ops.Weight) -> int:
    """What a kernel reads of a weight."""
    tensors = (weight.data, weight.scales, weight.zeros) if isinstance(weight, QuantizedWeight) else (weight,)
    return sum(x.nbytes for x in tensors if x is not None)


def make_experts(mixture: Mixture, form: str, machine: Machine) -> ops.ExpertWeights:
    """Random experts, with biases where the gate is interleaved. "matrices" have the machine's dtype and lie as in models."""
    experts = mixture.num_experts
    hidden = mixture.hidden
    width = mixture.width
    gate = mixture.gate
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": machine.device, "dtype": machine.dtype}
    biases = [torch.randn(experts, rows, **options) if gate.interleaved else None for rows in (2 * width, hidden)]
    if form == "matrices":
        gate_up, down = (torch.randn(experts, n, k, **options) * k**-0.5 for n, k in ((2 * width, hidden), (hidden, width)))
        if gate.interleaved:  # gpt-oss keeps them transposed
            gate_up, down = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (gate_up, down))
        return ops.ExpertWeights(gate_up, biases[0], down, biases[1], gate)
    quantised = [random_weight(form, experts * n, k, machine.device) for n, k in ((2 * width, hidden), (hidden, width))]
    return ops.ExpertWeights(quantised[0], biases[0], quantised[1], biases[1], gate)


def route(tokens: int, mixture: Mixture, machine: Machine, seed: int) -> tuple[Tensor, Tensor]:
    """Different experts for each token, and weights that sum to 1."""
    draw = torch.Generator(machine.device).manual_seed(seed)
    scores, index = torch.rand(tokens, mixture.num_experts, device=machine.device, generator=draw).topk(mixture.top_k)
    return index, (scores / scores.sum(-1, keepdim=True)).to(machine.dtype)


@torch.no_grad()
def check_experts(mixture: Mixture, form: str, machine: Machine) -> None:
    """Results by the 2x rule, and rows that do not depend on the others in deterministic mode. Raises AssertionError."""
    weights = make_experts(mixture, form, machine)
    exact_weights = weights._replace(
        gate_up=_wide(weights.gate_up),
        gate_up_bias=None if weights.gate_up_bias is None else weights.gate_up_bias.double(),
        down=_wide(weights.down),
        down_bias=None if weights.down_bias is None else weights.down_bias.double(),
    )
    for tokens in (1, 2, 40) if machine.device == "cuda" else (1, 3):
        index, scores = route(tokens, mixture, machine, tokens)
        x = torch.randn(tokens, mixture.hidden, device=machine.device, dtype=machine.dtype)
        exact = TorchOps().experts(x.double(), index, scores.double(), exact_weights, False)
        eager = TorchOps().experts(x, index, scores, weights, False)
        for invariant in (False, True):
            found = ops.experts(x, index, scores, weights, invariant=invariant)
            assert_matches_reference(found, exact, eager)
        last = ops.experts(x[-1:], index[-1:], scores[-1:], weights, invariant=True)
        assert torch.equal(last, found[-1:]), f"{form}: a row depends on the others"


def _wide(weight: ops.Weight) -> ops.Weight:
    """Matrices in float64; quantised weights are dequantised to the dtype of the input anyway."""
    return weight.double() if isinstance(weight, Tensor) else weight


def module_of(weights: ops.ExpertWeights, mixture: Mixture) -> Any:
    """What transformers' implementations read of a module of experts with matrices."""
    transposed = mixture.gate.interleaved
    assert isinstance(weights.gate_up, Tensor)
    assert isinstance(weights.down, Tensor)
    gate_up, down = (w.transpose(1, 2) if transposed else w for w in (weights.gate_up, weights.down))
    return SimpleNamespace(
        num_experts=mixture.num_experts,
        has_gate=True,
        has_bias=weights.gate_up_bias is not None,
        is_transposed=transposed,
        is_concatenated=not mixture.gate.interleaved,
        gate_up_proj=gate_up,
        down_proj=down,
        gate_up_proj_bias=weights.gate_up_bias,
        down_proj_bias=weights.down_bias,
        _apply_gate=lambda y: gated(y, mixture.gate),
    )


@contextmanager
def computed_by(name: str) -> Iterator[None]:
    """Quantised weights are multiplied by one row of the table of kernels, without its limits; "" is the row that fits."""
    rows = table.KERNELS
    if name:
        table.KERNELS = (replace(table.kernel_named(name), refuses=lambda product: None),)
    PLANS.clear()
    try:
        yield
    finally:
        table.KERNELS = rows
        PLANS.clear()


@torch.no_grad()
def bench_experts(machine: Machine, results: Results, cells: Cells) -> None:
    """Each shape, format and number of tokens."""
    for shape, mixture in cells.of_shapes(TINY_MIXTURES if cells.tiny else MIXTURES).items():
        plain = make_experts(mixture, "matrices", machine)
        module = module_of(plain, mixture)
        for form in cells.of_forms(EXPERT_FORMS):
            weights = plain if form == "matrices" else make_experts(mixture, form, machine)
            each = (num_bytes(weights.gate_up) + num_bytes(weights.down)) / mixture.num_experts
            for tokens in cells.of_tokens((1, 4, 16, 64, 256, 1024, 8192)):
                for kernel in cells.kernels if form != "matrices" else ("",):
                    with computed_by(kernel):
                        case = f"{shape} {form} {tokens} {kernel}".strip()
                        _time_experts(case, weights, module, mixture, tokens, each, machine, results)
            del weights


def _time_experts(
    case: str,
    weights: ops.ExpertWeights,
    module: Any,
    mixture: Mixture,
    tokens: int,
    bytes_of_expert: float,
    machine: Machine,
    results: Results,
) -> None:
    x = torch.randn(tokens, mixture.hidden, device=machine.device, dtype=machine.dtype)
    routes = [route(tokens, mixture, machine, seed) for seed in range(ROUTINGS)]
    met = sum(len(set(index.flatten().tolist())) for index, _ in routes) / ROUTINGS
    operations = 6.0 * tokens * mixture.top_k * mixture.hidden * mixture.width

    def timed(call: Callable[[Tensor, Tensor], object]) -> float:
        return machine.microseconds(lambda: [call(*each) for each in routes]) / ROUTINGS

    peers = {"bound": machine.bound(met * bytes_of_expert, operations)}
    if machine.device == "cuda":  # grouped_mm is for bfloat16
        peers["grouped_mm"] = timed(lambda index, scores: grouped_mm_experts_forward(module, x, index, scores))
    if tokens <= FEW:
        peers["batched_mm"] = timed(lambda index, scores: batched_mm_experts_forward(module, x, index, scores))
    _add(case, timed(lambda index, scores: ops.experts(x, index, scores, weights)), peers, results)


@torch.no_grad()
def check_product(form: str, n: int, k: int, machine: Machine, counts: tuple[int, ...] = CHECKED) -> None:
    """Products of one and of several tokens by the 2x rule. Raises AssertionError.

    Where activations are rounded to float8 as well, their largest error may be 16 times as large.
    """
    weight = random_weight(form, n, k, machine.device)
    rounds = form == "fp8-row" and machine.device == "cuda"
    for tokens in counts:
        x = torch.randn(tokens, k, device=machine.device, dtype=machine.dtype)
        exact = x.double() @ weight.dequantize(torch.float64).t()
        eager = x @ weight.dequantize(machine.dtype).t()
        band = torch.finfo(machine.dtype).eps * exact.abs().max()
        allowed = (16 if rounds and tokens > 1 else 2) * ((eager.double() - exact).abs().max() + band)
        assert (ops.linear(x, weight).double() - exact).abs().max() <= allowed, f"{form} of {n} x {k}, {tokens} tokens"


@torch.no_grad()
def bench_quantized(machine: Machine, results: Results, cells: Cells) -> None:
    """Each shape, format and number of tokens, beside the product with a matrix."""
    for shape, (n, k) in cells.of_shapes(TINY_SHAPES if cells.tiny else SHAPES).items():
        matrix = torch.randn(n, k, device=machine.device, dtype=machine.dtype) * k**-0.5
        for form in cells.of_forms(DENSE_FORMS):
            weight = random_weight(form, n, k, machine.device)
            weights = _beyond_cache(weight, num_bytes(weight))
            matrices = _beyond_cache(matrix, matrix.nbytes)
            for tokens in cells.of_tokens((1, 4, 8, 16, 48, 64, 128, 256, 512, 2048)):
                x = torch.randn(tokens, k, device=machine.device, dtype=machine.dtype)
                bound = machine.bound(num_bytes(weight), 2.0 * tokens * n * k)
                linear = machine.microseconds(_in_turn(torch.nn.functional.linear, x, matrices), len(matrices))
                for kernel in cells.kernels:
                    with computed_by(kernel):
                        ours = machine.microseconds(_in_turn(ops.linear, x, weights), len(weights))
                    _add(f"{shape} {form} {tokens} {kernel}".strip(), ours, {"bound": bound, "linear": linear}, results)


def _in_turn(product: Callable[..., object], x: Tensor, weights: list[ops.Weight]) -> Callable[[], object]:
    """Each call is a product with the next of the weights."""
    turns = cycle(weights)
    return lambda: product(x, next(turns))


def _beyond_cache(weight: ops.Weight, size: int) -> list[ops.Weight]:
    """Copies of a weight of so many bytes, together larger than any L2 cache. On a CPU there is one."""
    count = max(2, -(-BEYOND_CACHE // size)) if weight.device.type == "cuda" else 1
    if isinstance(weight, Tensor):
        return [weight, *(weight.clone() for _ in range(count - 1))]
    tensors = ("data", "scales", "zeros", "columns")
    given = {name: getattr(weight, name) for name in tensors}
    return [
        weight,
        *(replace(weight, **{name: None if x is None else x.clone() for name, x in given.items()}) for _ in range(count - 1)),
    ]


def _add(case: str, ours: float, peers: dict[str, float], results: Results) -> None:
    results.add(case, "us", ours, peers)
    print(f"{case:<28}{ours:>10.1f} us  " + "  ".join(f"{name} {value:.1f}" for name, value in peers.items()), flush=True)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("experts", "quantized"))
    parser.add_argument("--tiny", action="store_true", help="small sizes on a CPU in float32")
    parser.add_argument("--shapes", type=_names, default=(), help="names of shapes, with commas; default: all")
    parser.add_argument("--forms", type=_names, default=(), help="formats of weights, with commas; default: all")
    parser.add_argument("--tokens", type=_numbers, default=(), help="numbers of tokens, with commas")
    parser.add_argument("--kernels", type=_names, default=("",), help="rows of the table of kernels, with commas")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    if args.tiny:
        torch.set_num_threads(1)
    machine = measure_machine(args.tiny)
    print(f"{machine.bandwidth / 1e12:.3f} TB/s, {machine.rate / 1e12:.3f} TFLOPS")
    cells = Cells(args.tiny, args.shapes, args.forms, args.tokens, args.kernels)
    results = Results(f"ops_{args.what}", args.out)
    if args.what == "experts":
        for mixture in (TINY_MIXTURES if args.tiny else {"check": Mixture(16, 4, 576, 192, CLAMPED)}).values():
            for form in cells.of_forms(EXPERT_FORMS):
                for kernel in cells.kernels if form != "matrices" else ("",):
                    with computed_by(kernel):
                        check_experts(mixture, form, machine)
    else:
        for n, k in (TINY_SHAPES if args.tiny else {"check": (512, 1056)}).values():
            for form in cells.of_forms(DENSE_FORMS):
                for kernel in cells.kernels:
                    with computed_by(kernel):
                        check_product(form, n, k, machine, cells.tokens if kernel else CHECKED)
    print("gate: results are right")
    (bench_experts if args.what == "experts" else bench_quantized)(machine, results, cells)
    results.write()


if __name__ == "__main__":
    main()
