"""Linear attention: us of a call beside flash-linear-attention and the bound of reading, for prompts and for decoding.

    python -m benchmarks.attention.bench_linear                      # all cells
    python -m benchmarks.attention.bench_linear --cells decode,1x8192  # those whose names contain one of these
    python -m benchmarks.attention.bench_linear --tune --budget 60   # other tiles, for some prompts: us of each kernel
    python -m benchmarks.attention.bench_linear --tune --cells decode    # us of a step of decoding with other tiles
    python -m benchmarks.attention.bench_linear --tiny               # on a CPU: small sizes, which show only that it runs

Cells of prompts are `gated_delta_rule` with query and key norms, and `ssd`, in the functional form with the final state;
"8x4096" are eight packed sequences. Cells of decoding are one token for each sequence in the form of the engine, which reads a
page of the state and the tail behind it: the convolution of q, k and v with its activation, and the recurrence. Half a page
stands in the tail. Peers: "fla", flash-linear-attention's functions for the same (`chunk_gated_delta_rule`,
`causal_conv1d_update` with `fused_recurrent_gated_delta_rule`, `chunk_simple_gla`, `fused_recurrent_simple_gla`), if it is
installed, whose tuning takes minutes; "bound", for decoding: the bytes that the form of the engine must read, by the bandwidth
that is measured in the same run. Calls are timed in CUDA graphs. Results are compared with PyTorch in float64 first, and go to
results/linear.jsonl in the form of measure.py. Left out: models (bench_engine.py).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice, product, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Cells, Results, graph_microseconds, milliseconds, read_bandwidth
from fa_serve import ops, spec
from fa_serve.launching.plans import PLANS
from fa_serve.ops.linear_attention import table, tiles
from fa_serve.ops.linear_attention.problem import Recurrence

ROOT = Path(__file__).parents[2]
PAGE = 16
"""Tokens of a page of the KV cache."""
WIDTH = 4
"""Inputs of the convolution that a row sees."""
GATE = 2e-2
"""The largest difference from float64 that passes, as a part of the largest value."""


@dataclass(frozen=True)
class Heads:
    """Key heads, value heads (or heads and groups of SSD), and the two sizes of a state."""

    keys: int
    values: int
    dim: int = 128
    dim_v: int = 128


@dataclass(frozen=True)
class Sizes:
    """What is measured, the most telling first. prompts: (sequences, rows)"""

    device: str
    dtype: torch.dtype
    delta: tuple[Heads, ...]
    ssd: tuple[Heads, ...]
    prompts: tuple[tuple[int, int], ...]
    batches: tuple[int, ...]

    @cached_property
    def draw(self) -> torch.Generator:
        """Of all random numbers: after a capture that fails, as of a peer, PyTorch's own generator raises."""
        return torch.Generator(self.device).manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Random numbers of `self.dtype` or another one."""
        return torch.randn(shape, generator=self.draw, device=self.device, dtype=dtype or self.dtype)

    def uniform(self, *shape: int) -> Tensor:
        """Random numbers of float32 in [0, 1)."""
        return torch.rand(shape, generator=self.draw, device=self.device)


FULL = Sizes(
    "cuda",
    torch.bfloat16,
    (Heads(16, 32), Heads(2, 8)),
    (Heads(1, 80, 128, 64),),
    ((1, 8192), (8, 4096), (1, 2048), (1, 65536)),
    (64, 1, 256, 16),
)
TINY = Sizes("cpu", torch.float32, (Heads(1, 2, 16, 16),), (Heads(1, 2, 16, 16),), ((1, 100), (2, 50)), (1, 3))


@dataclass(frozen=True)
class Cell:
    """ours returns what is checked with `exact`; fla is None without flash-linear-attention. num_bytes: read; 0 has no bound"""

    name: str
    ours: Callable[[], Tensor]
    fla: Callable[[], object] | None
    exact: Callable[[], Tensor] | None
    num_bytes: int


def fla_function(module: str, name: str) -> Any:
    """A function of flash-linear-attention, or None if it is not installed."""
    if not torch.cuda.is_available() or importlib.util.find_spec("fla") is None:
        return None
    return getattr(importlib.import_module(module), name)


def delta_inputs(heads: Heads, batch: int, rows: int, sizes: Sizes) -> dict[str, Tensor]:
    make = sizes.normal
    return {
        "q": make(batch, rows, heads.keys, heads.dim),
        "k": make(batch, rows, heads.keys, heads.dim),
        "v": make(batch, rows, heads.values, heads.dim_v),
        "g": -sizes.uniform(batch, rows, heads.values),
        "beta": make(batch, rows, heads.values).sigmoid(),
    }


def ssd_inputs(heads: Heads, batch: int, rows: int, sizes: Sizes) -> dict[str, Tensor]:
    make = sizes.normal
    return {
        "x": make(batch, rows, heads.values, heads.dim_v),
        "dt": make(batch, rows, heads.values),
        "a": -sizes.uniform(heads.values) - 0.1,
        "b": make(batch, rows, heads.keys, heads.dim) * heads.dim**-0.5,
        "c": make(batch, rows, heads.keys, heads.dim),
    }


def in_float64(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same inputs on the CPU; rows beyond 256 are left out, which no earlier row depends on."""
    return {name: (x[:, :256] if x.dim() > 1 else x).double().cpu() for name, x in inputs.items()}


def prompt_cells(sizes: Sizes) -> Iterator[Cell]:
    chunk_delta = fla_function("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
    chunk_gla = fla_function("fla.ops.simple_gla", "chunk_simple_gla")
    for count, rows in sizes.prompts:
        bounds = torch.arange(count + 1, dtype=torch.int32, device=sizes.device) * rows
        packed: dict[str, Any] = {"cu_seqlens": bounds} if count > 1 else {}
        theirs = {name: x.long() for name, x in packed.items()}
        for heads in sizes.delta:
            inputs = delta_inputs(heads, 1, count * rows, sizes)
            call = partial(ops.gated_delta_rule, **inputs, use_qk_l2norm=True, output_final_state=True, **packed)
            options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
            fla = chunk_delta and partial(chunk_delta, **inputs, **options, **theirs)
            short = in_float64(inputs)
            exact = partial(ops.gated_delta_rule, **short, use_qk_l2norm=True) if count == 1 else None
            name = f"prefill delta {heads.keys}/{heads.values} {count}x{rows}"
            yield Cell(name, partial(first_of, call), fla, exact and partial(first_of, exact), 0)
        for heads in sizes.ssd:
            inputs = ssd_inputs(heads, 1, count * rows, sizes)
            call = partial(ops.ssd, **inputs, dt_softplus=True, output_final_state=True, **packed)
            fla = chunk_gla and partial(gla_of_ssd, chunk_gla, inputs, output_final_state=True, **theirs)
            exact = partial(ops.ssd, **in_float64(inputs), dt_softplus=True) if count == 1 else None
            name = f"prefill ssd {heads.values} {count}x{rows}"
            yield Cell(name, partial(first_of, call), fla, exact and partial(first_of, exact), 0)


def first_of(call: Callable[[], tuple[Tensor, Tensor | None]]) -> Tensor:
    return call()[0]


def gla_of_ssd(function: Any, inputs: dict[str, Tensor], **options: Any) -> object:
    """SSD as flash-linear-attention's `simple_gla`: the gates and values are formed before, and groups are repeated."""
    x, dt, a, b, c = inputs.values()
    steps = torch.nn.functional.softplus(dt.float())
    repeats = x.shape[2] // b.shape[2]
    b, c = (y.repeat_interleave(repeats, 2) for y in (b, c))
    return function(c, b, (x * steps[..., None]).to(x.dtype), g=steps * a, scale=1.0, **options)


def decode_cells(sizes: Sizes) -> Iterator[Cell]:
    fused_delta = fla_function("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule")
    fused_gla = fla_function("fla.ops.simple_gla", "fused_recurrent_simple_gla")
    for batch in sizes.batches:
        for heads in sizes.delta:
            inputs = delta_inputs(heads, 1, batch, sizes)
            rows = {name: x[0] for name, x in inputs.items()}
            spec = ops.gated_delta_rule_state(rows["k"], rows["v"], rows["g"])
            states = decoding_states(spec, batch, sizes)
            channels = 2 * heads.keys * heads.dim + heads.values * heads.dim_v
            mixed = sizes.normal(batch, channels)
            weight = sizes.normal(channels, WIDTH)
            conv_states = decoding_states(ops.causal_conv1d_state(mixed, weight), batch, sizes)
            step = decoding_batch(batch, sizes)
            ours = partial(step_of_layer, rows, mixed, weight, states, conv_states, step, heads)
            fla = fused_delta and their_step_of_layer(fused_delta, inputs, mixed, weight, heads, sizes)
            num_bytes = state_bytes(spec, batch) + state_bytes(ops.causal_conv1d_state(mixed, weight), batch)
            num_bytes += mixed.nbytes + weight.nbytes + rows["v"].nbytes
            yield Cell(f"decode conv+delta {heads.keys}/{heads.values} {batch}", ours, fla, None, num_bytes)
        for heads in sizes.ssd:
            inputs = ssd_inputs(heads, 1, batch, sizes)
            x, dt, a, b, c = (y[0] if y.dim() > 1 else y for y in inputs.values())
            spec = ops.ssd_state(x, b)
            states = decoding_states(spec, batch, sizes)
            step = decoding_batch(batch, sizes)
            ours = partial(ops.ssd_paged, x, dt, a, b, c, states, step, dt_softplus=True)
            apart = {name: y.transpose(0, 1) if y.dim() > 1 else y for name, y in inputs.items()}
            begin = sizes.normal(batch, heads.values, heads.dim, heads.dim_v, dtype=torch.float32)
            fla = fused_gla and partial(gla_of_ssd, fused_gla, apart, initial_state=begin, output_final_state=True)
            num_bytes = state_bytes(spec, batch) + 2 * x.nbytes + b.nbytes + c.nbytes
            yield Cell(f"decode ssd {heads.values} {batch}", ours, fla, None, num_bytes)


def decoding_states(spec: ops.StateSpec, batch: int, sizes: Sizes) -> ops.StateTensors:
    states = spec.allocate(batch, batch, PAGE, sizes.device)
    for x in (states.pages, *states.tails):
        x.normal_(std=0.05)
    return states


def decoding_batch(batch: int, sizes: Sizes) -> ops.StateBatch:
    """One row of each sequence, in the middle of the page behind its state."""
    make = partial(torch.arange, dtype=torch.int32, device=sizes.device)
    own = make(batch)
    return ops.StateBatch(
        page_size=PAGE,
        sources=own,
        targets=torch.full_like(own, -1),
        slots=own.long(),
        cu_seqlens=make(batch + 1),
        seqused_k=torch.full_like(own, 4 * PAGE + PAGE // 2),
        chunks=torch.empty(0, 4, dtype=torch.int32, device=sizes.device),
        most_rows=1,
    )


def state_bytes(spec: ops.StateSpec, batch: int) -> int:
    """Bytes of a page and of half a page's rows of the tail, which a step reads, for each sequence."""
    states = spec.allocate(1, 1, PAGE, "cpu")
    tails = sum(x.nbytes // x.shape[1] * (PAGE // 2) for x in states.tails)
    return batch * (states.pages.nbytes + tails)


def step_of_layer(
    rows: dict[str, Tensor],
    mixed: Tensor,
    weight: Tensor,
    states: ops.StateTensors,
    conv_states: ops.StateTensors,
    step: ops.StateBatch,
    heads: Heads,
) -> Tensor:
    """The convolution, and the recurrence of what it returns."""
    mixed = ops.causal_conv1d_paged(mixed, weight, conv_states, step, activation="silu")
    width = heads.keys * heads.dim
    q, k, v = mixed.split([width, width, heads.values * heads.dim_v], 1)
    q, k = (x.unflatten(1, (heads.keys, heads.dim)) for x in (q, k))
    v = v.unflatten(1, (heads.values, heads.dim_v))
    return ops.gated_delta_rule_paged(q, k, v, rows["g"], rows["beta"], states, step, use_qk_l2norm=True)


def their_step_of_layer(
    function: Any, inputs: dict[str, Tensor], mixed: Tensor, weight: Tensor, heads: Heads, sizes: Sizes
) -> Callable[[], object]:
    batch = len(mixed)
    update = fla_function("fla.modules.causal_conv1d", "causal_conv1d_update")
    cache = torch.zeros(batch, mixed.shape[1], WIDTH, device=mixed.device, dtype=mixed.dtype)
    begin = sizes.normal(batch, heads.values, heads.dim, heads.dim_v, dtype=torch.float32)
    g, beta = (inputs[name].transpose(0, 1) for name in ("g", "beta"))
    width = heads.keys * heads.dim

    def step() -> object:
        out = update(mixed[:, None], cache, weight=weight, activation="silu")[0]
        q, k, v = out.view(batch, 1, -1).split([width, width, heads.values * heads.dim_v], 2)
        q, k = (x.unflatten(2, (heads.keys, heads.dim)) for x in (q, k))
        v = v.unflatten(2, (heads.values, heads.dim_v))
        options = {"initial_state": begin, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        return function(q, k, v, g=g, beta=beta, **options)

    return step


def check(cell: Cell) -> None:
    """End the benchmark if a result is not that of float64."""
    if cell.exact is None:
        return
    expected = cell.exact()
    found = cell.ours()[:, : expected.shape[1]].cpu().double()
    difference = float((found - expected).abs().max() / expected.abs().max())
    assert difference <= GATE, f"{cell.name} differs from float64 by {difference:.1e} of the largest value"


def measure(call: Callable[[], object]) -> float:
    """us of a call in a CUDA graph, as the engine launches it. From Python, a prompt of 2k tokens takes as long as the host."""
    return graph_microseconds(call)


def measure_peer(call: Callable[[], object]) -> dict[str, float]:
    """The same of the peer, by its name; nothing for one that cannot be captured, which is said."""
    stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
    try:
        return {"fla": measure(call)}
    except RuntimeError as error:
        print(f"fla is not in a graph, and left out: {str(error).splitlines()[0]}", flush=True)
        if stream is not None:  # a capture that fails may leave its own stream behind
            torch.cuda.set_stream(stream)
            torch.cuda.synchronize()
        return {}


def cells_of(sizes: Sizes) -> Iterator[Cell]:
    """Cells of prompts and of decoding in turn, so that a run that ends early has some of each kind."""
    for pair in zip_longest(prompt_cells(sizes), decode_cells(sizes)):
        yield from (cell for cell in pair if cell is not None)


TILES: tuple[dict[str, Any], ...] = (
    {},
    {"outputs_in_loop": True, "stages": 2, "block_v": 128, "pass_warps": 8},
    {"outputs_in_loop": True, "stages": 2},
    {"stages": 2},
    {"slabs": 4},
    {"prepare_registers": None},
    {"slabs": 2},
    {"stages": 4},
    {"outputs_in_loop": True},
    {"prepare_registers": 128},
    {"stages": 2, "prepare_warps": 8},
    {"block_v": 128, "pass_warps": 8, "output_warps": 8},
)
"""What is changed of the tile of `pieces`, the most promising first."""
DECODE_TILES: tuple[dict[str, int | None], ...] = (
    {},
    {"row_registers": 168},
    {"block_v": 32, "row_registers": 96},
)
"""What is changed of the tile of `few_rows` for a step of decoding, the most promising first."""
DECODE_BATCHES = (64, 1, 256)
"""Sequences of the steps that are measured with other tiles."""


@contextmanager
def with_tile(name: str, tile: Callable[[Recurrence], Any]) -> Iterator[None]:
    """Within it, a row of the table is launched with another tile."""
    rows = table.RECURRENCE_KERNELS
    table.RECURRENCE_KERNELS = tuple(replace(row, tile=tile) if row.name == name else row for row in rows)
    try:
        yield
    finally:
        table.RECURRENCE_KERNELS = rows


def changed_tile(choose_tile: Callable[[Recurrence], Any], change: dict[str, Any], asked: Recurrence) -> Any:
    """The tile that is chosen, with other fields."""
    return choose_tile(asked)._replace(**change)


def name_of_change(change: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in change.items()) or "as chosen"


def kernel_microseconds(call: Callable[[], object], calls: int = 5) -> dict[str, float]:
    """Device time of each kernel of a call, and of the whole call, in which kernels may overlap; nothing without a GPU."""
    call()
    if not torch.cuda.is_available():
        return {}
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    found = {event.key: event.self_device_time_total / calls for event in profile.key_averages()}
    return found | {"whole call": milliseconds(call) * 1e3}


def tune(sizes: Sizes, wanted: Cells) -> None:
    """Print us of the kernels of a prompt with each tile, and check the outputs. A tile that does not fit is named."""
    names = ("_prepare_pieces", "_pass_states", "_compute_outputs", "whole call")
    print(f"{'us':30s} " + " ".join(f"{name:>16s}" for name in names))
    cells = list(islice(prompt_cells(sizes), 2 * (len(sizes.delta) + len(sizes.ssd))))  # those of the first two lengths
    for change, cell in product(TILES, cells):
        if not wanted.takes(cell.name):
            continue
        print(f"{cell.name}: {name_of_change(change)}")
        with with_tile("pieces", partial(changed_tile, tiles.pieces_tile, change)):
            try:
                check(cell)
                found = kernel_microseconds(cell.ours)
            except Exception as error:  # Triton has several for a tile without enough shared memory
                print(f"  {str(error).splitlines()[0][:100]}", flush=True)
            else:
                print(" " * 31 + " ".join(f"{found.get(name, 0):16.1f}" for name in names), flush=True)
    wanted.report()


def tune_decoding(sizes: Sizes, wanted: Cells) -> None:
    """Print us of a step of decoding with each tile, then without single rows of the convolution, and without programmatic
    launches. Outputs are compared with those of the first tile. The first column is the whole step in a CUDA graph."""
    names = ("step", "_causal_conv_of_row", "_causal_conv", "_compute_few_rows")
    batches = sizes.batches if sizes.device == "cpu" else DECODE_BATCHES
    cells = [cell for cell in decode_cells(replace(sizes, batches=batches)) if wanted.takes(cell.name)]
    print(f"{'us':51s} " + " ".join(f"{name:>20s}" for name in names))
    expected = dict[str, Tensor]()
    for change, cell in product(DECODE_TILES, cells):
        if not wanted.takes(cell.name):
            continue
        with with_tile("few_rows", partial(changed_tile, tiles.few_rows_tile, change)):
            measure_decoding(cell, name_of_change(change), names, expected)
    for cell in cells:
        if not wanted.takes(cell.name):
            continue
        with blocks_of_convolutions():
            measure_decoding(cell, "blocks of rows in the convolution", names, expected)
        with no_programmatic_launch():
            measure_decoding(cell, "no programmatic launch", names, expected)
    wanted.report()


def measure_decoding(cell: Cell, said: str, names: tuple[str, ...], expected: dict[str, Tensor]) -> None:
    """Print a line of `tune_decoding`."""
    try:
        found = cell.ours().float()
        first = expected.setdefault(cell.name, found)
        difference = float((found - first).abs().max() / first.abs().max())
        assert difference <= GATE, f"{cell.name} differs by {difference:.1e} of the largest value"
        times = kernel_microseconds(cell.ours)
        times["step"] = measure(cell.ours)
    except Exception as error:  # Triton has several for a tile that does not fit
        print(f"{cell.name}: {said}: {str(error).splitlines()[0][:100]}", flush=True)
        return
    print(f"{cell.name[7:]:20s} {said:>30s} " + " ".join(f"{times.get(name, 0):20.1f}" for name in names), flush=True)


@contextmanager
def blocks_of_convolutions() -> Iterator[None]:
    """Within it, no row of a convolution has its own programs."""
    module = importlib.import_module("fa_serve.ops.linear_attention.convolution")
    most = module.MOST_SINGLE_ROWS
    module.MOST_SINGLE_ROWS = 0
    try:
        yield
    finally:
        module.MOST_SINGLE_ROWS = most


@contextmanager
def no_programmatic_launch() -> Iterator[None]:
    """Within it, each kernel waits for the one before it."""
    known = spec.has_programmatic_launch
    spec.has_programmatic_launch = lambda arch: False
    PLANS.clear()
    try:
        yield
    finally:
        spec.has_programmatic_launch = known
        PLANS.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="", help="only cells whose names contain one of these, separated by commas")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no further cell begins")
    parser.add_argument(
        "--tune", action="store_true", help="print the time of each kernel with other tiles; no results are kept"
    )
    parser.add_argument("--tiny", action="store_true", help="a CPU and small sizes; the times say nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    sizes = TINY if args.tiny else FULL
    torch.manual_seed(0)
    wanted = Cells(args.cells, args.budget)
    if args.tune:
        tune_decoding(sizes, wanted) if "decode" in args.cells else tune(sizes, wanted)
        return
    bandwidth = 1e8 if args.tiny else read_bandwidth() * 1e12
    results = Results("linear", args.out)
    print(f"{'us':44s} {'ours':>9s} {'fla':>9s} {'bound':>9s}")
    for cell in cells_of(sizes):
        if not wanted.takes(cell.name):
            continue
        check(cell)
        ours = measure(cell.ours)
        peers = {} if cell.fla is None else measure_peer(cell.fla)
        if cell.num_bytes:
            peers["bound"] = cell.num_bytes / bandwidth * 1e6
        results.add(cell.name, "us", ours, peers)
        theirs = " ".join(f"{peers[name]:9.1f}" if name in peers else f"{'-':>9s}" for name in ("fla", "bound"))
        print(f"{cell.name:44s} {ours:9.1f} {theirs}", flush=True)
    wanted.report()
    results.summarise()


if __name__ == "__main__":
    main()
