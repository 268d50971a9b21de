"""One dense call of a class of workloads: its tensors and mask, our call, the peers' calls, their checks, and the benchmark.

bench_attention.py calls `measure_class` with the name of a class of `attention_cells.DENSE_CLASSES`. A cell of the class
"train" is timed with its backward pass. Ours gets a mask as it is, and scans it at each call; a second line has the call over
lists that were kept, which the later layers of a model make. FlexAttention gets the block mask of the same pattern, made ahead
of time ("flex"), and the mask as a score_mod ("flex_scores").
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import fa_serve
from benchmarks.attention.attention_cells import DENSE_CLASSES, DenseCell
from benchmarks.measure import Results, flash_peers, graph_microseconds, in_turns, milliseconds, pytorch_varlen, served
from fa_serve.backends.mask_blocks import SCANNED
from fa_serve.backends.reference import attention_reference
from fa_serve.testing import assert_matches_reference, eager_attention

KINDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
FEW_QUERIES = 64
"""A call of fewer queries is measured inside a CUDA graph, where decoding runs."""


@dataclass
class DenseProblem:
    """q (batch, seqlen_q, heads, head_dim), k and v; mask: bool or q's dtype, broadcastable to the scores, or None"""

    cell: DenseCell
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None

    @classmethod
    def make(cls, cell: DenseCell, dtype: torch.dtype, device: str, *, trains: bool = False) -> DenseProblem:
        """`trains`: the tensors ask for gradients."""
        shapes = ((cell.seqlen_q, cell.heads), (cell.seqlen_k, cell.kv_heads), (cell.seqlen_k, cell.kv_heads))
        q, k, v = (torch.randn(cell.batch, *shape, cell.head_dim, device=device, dtype=dtype) for shape in shapes)
        for x in (q, k, v):
            x.requires_grad_(trains)
        return cls(cell, q, k, v, make_mask(cell, dtype, device))

    @property
    def options(self) -> dict[str, Any]:
        return {"causal": self.cell.causal, "mask": self.mask}

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, in all sequences and heads."""
        cell = self.cell
        keep = torch.ones(1, 1, cell.seqlen_q, cell.seqlen_k, dtype=torch.bool, device=self.q.device)
        if cell.causal:
            keep = keep.tril(cell.seqlen_k - cell.seqlen_q)
        if self.mask is not None:
            keep = keep & (self.mask if self.mask.dtype == torch.bool else self.mask > float("-inf"))
        return int(keep.sum()) * (cell.batch // keep.shape[0]) * (cell.heads // keep.shape[1])

    def ours(self, backend: str = "auto") -> Callable[[], Tensor]:
        return partial(fa_serve.attention, self.q, self.k, self.v, backend=backend, **self.options)

    def peers(self, wanted: str) -> dict[str, Callable[[], Tensor]]:
        """The calls of peers, which return out in our layout. Those that refuse the cell are still among them."""
        names = wanted.split(",")
        cell = self.cell
        calls: dict[str, Callable[[], Tensor]] = {
            name: self._sdpa(kind) for name, kind in KINDS.items() if name in names and (self.mask is None or name != "flash")
        }
        if self.mask is None and cell.seqlen_q == cell.seqlen_k:
            flat = [x.flatten(0, 1) for x in (self.q, self.k, self.v)]
            lengths = [cell.seqlen_q] * cell.batch
            window = (-1, 0 if cell.causal else -1)
            packed = {} if self.q.requires_grad else flash_peers(wanted, *flat, lengths, window)
            if "varlen" in names:
                packed |= pytorch_varlen(*flat, lengths, window)
            for name, call in packed.items():
                calls[name] = partial(_unflatten, call, self.q.shape[:2])
        if "flex" in names:
            calls |= self._flex()
        return calls

    def _sdpa(self, kind: SDPBackend) -> Callable[[], Tensor]:
        """PyTorch's operator, which takes no mask beside is_causal. With a mask it has no GQA, and gets repeated heads."""
        q, k, v = (x.transpose(1, 2) for x in (self.q, self.k, self.v))
        mask = self.mask
        gqa = mask is None and q.shape[1] != k.shape[1]
        if not gqa:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        assert mask is None or not self.cell.causal

        def call() -> Tensor:
            with sdpa_kernel(kind):
                causal = self.cell.causal
                return scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=gqa).transpose(1, 2)

        return call

    def _flex(self) -> dict[str, Callable[[], Tensor]]:
        """FlexAttention, compiled, over the blocks of the pattern and, where there is a mask, with it as a score_mod."""
        q, k, v = (x.transpose(1, 2) for x in (self.q, self.k, self.v))
        gqa = q.shape[1] != k.shape[1]
        call = torch.compile(flex_attention, dynamic=False)
        mask = self.mask
        if mask is None:
            blocks = _block_mask(_causal, self.cell, q.device) if self.cell.causal else None
            return {"flex": lambda: call(q, k, v, block_mask=blocks, enable_gqa=gqa).transpose(1, 2)}
        at = partial(_read, mask)
        if mask.dtype != torch.bool:

            def add(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                return s + at(b, h, i, j)

            return {"flex_scores": lambda: call(q, k, v, score_mod=add, enable_gqa=gqa).transpose(1, 2)}

        def hide(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return torch.where(at(b, h, i, j), s, float("-inf"))

        blocks = _block_mask(at, replace(self.cell, batch=mask.shape[0], heads=mask.shape[1]), q.device)
        return {
            "flex": lambda: call(q, k, v, block_mask=blocks, enable_gqa=gqa).transpose(1, 2),
            "flex_scores": lambda: call(q, k, v, score_mod=hide, enable_gqa=gqa).transpose(1, 2),
        }

    def check(self, out: Tensor, name: str) -> None:
        """Compare the first and the last sequence and head with float64; AssertionError if the 2x rule is broken."""
        cell = self.cell
        for b, h in {(0, 0), (cell.batch - 1, cell.heads - 1)}:
            kv = h // (cell.heads // cell.kv_heads)
            one = [self.q[b : b + 1, :, h : h + 1], *(x[b : b + 1, :, kv : kv + 1] for x in (self.k, self.v))]
            mask = self.mask
            if mask is not None:
                mask = mask[b % mask.shape[0], h % mask.shape[1]][None, None]
            window = (-1, 0 if cell.causal else -1)
            options = {"softmax_scale": cell.head_dim**-0.5, "mask": mask, "window_size": window}
            exact, _ = attention_reference(*(x.detach().double() for x in one), **options)
            eager = eager_attention(*(x.detach() for x in one), **options)
            assert_matches_reference(out.detach()[b : b + 1, :, h : h + 1], exact, eager, name)


def make_mask(cell: DenseCell, dtype: torch.dtype, device: str) -> Tensor | None:
    """The mask of a cell's pattern; `cell.extent` is what a pattern counts, in tokens.

    prefix:    causal, but the first `extent` keys are seen by all queries
    documents: packed documents of `extent` tokens, causal
    images:    causal, but every second run of `extent` tokens sees itself both ways
    padding:   sequence b of n has seqlen * (b + 1) / n keys
    blocks:    causal, and each head keeps a random quarter of the runs of `extent` keys for each run of queries
    bias:      numbers that are added to the scores, one for each head, query and key
    """
    if not cell.pattern:
        return None
    i = torch.arange(cell.seqlen_q, device=device)[:, None]
    j = torch.arange(cell.seqlen_k, device=device)[None, :]
    extent = max(cell.extent, 1)
    if cell.pattern == "bias":
        return torch.randn(1, cell.heads, cell.seqlen_q, cell.seqlen_k, device=device).to(dtype)
    if cell.pattern == "padding":
        ends = torch.arange(1, cell.batch + 1, device=device) * cell.seqlen_k // cell.batch
        return j < ends[:, None, None, None]
    if cell.pattern == "blocks":
        runs = -(-cell.seqlen_q // extent)
        keep = (torch.rand(1, cell.heads, runs, runs, device=device) < 0.25) | torch.eye(runs, dtype=torch.bool, device=device)
        keep = keep.repeat_interleave(extent, 2).repeat_interleave(extent, 3)
        return keep[..., : cell.seqlen_q, : cell.seqlen_k] & (i >= j)
    patterns = {
        "prefix": (j <= i) | (j < extent),
        "documents": (i // extent == j // extent) & (j <= i),
        "images": (j <= i) | ((i // extent == j // extent) & (i // extent % 2 == 1)),
    }
    return patterns[cell.pattern][None, None]


def _causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def _read(mask: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """An element of a mask that broadcasts its dimensions of size 1."""
    zero = torch.zeros_like(b)
    places = [zero if size == 1 else place for size, place in zip(mask.shape, (b, h, i, j), strict=True)]
    return mask[places[0], places[1], places[2], places[3]]


def _block_mask(mask_mod: Callable[..., Tensor], cell: DenseCell, device: torch.device) -> Any:
    return create_block_mask(mask_mod, cell.batch, cell.heads, cell.seqlen_q, cell.seqlen_k, device=str(device))


def _unflatten(call: Callable[[], Tensor], shape: tuple[int, int]) -> Tensor:
    return call().unflatten(0, shape)


def _with_backward(call: Callable[[], Tensor], problem: DenseProblem, dout: Tensor) -> tuple[Tensor, ...]:
    leaves = (problem.q, problem.k, problem.v)
    return torch.autograd.grad(call(), leaves, dout)


def _scanning(call: Callable[[], Tensor]) -> Tensor:
    """A call whose mask has not been seen before."""
    SCANNED.clear()
    return call()


def measure_class(name: str, args: argparse.Namespace) -> None:
    """Cells of one class. TFLOPS count the products of visible pairs, 3.5 times those of a forward pass with its backward.

    The first and the last head of each cell are compared with float64, and each peer with ours. Calls of a few queries are
    timed inside a CUDA graph.
    """
    trains = name == "train"
    dtype, device = (torch.float32, "cpu") if args.tiny else (torch.bfloat16, "cuda")
    results = Results(name if args.backend == "auto" else f"{name}_{args.backend}", args.out)
    wanted = "math" if args.tiny else ",".join({*args.peers.split(","), "efficient", "varlen", "flex"})
    for cell in DENSE_CLASSES[name]:
        if not args.cells.takes(cell.name):
            continue
        problem = DenseProblem.make(cell.tiny() if args.tiny else cell, dtype, device, trains=trains)
        ours = problem.ours(args.backend)
        problem.check(ours(), cell.name)
        calls = served({"ours": ours} | problem.peers(wanted))
        _compare(calls, problem, trains)
        operations = 4 * problem.pairs * problem.cell.head_dim * (3.5 if trains else 1.0)
        if trains:
            dout = torch.randn_like(problem.q)
            calls = {peer: partial(_with_backward, call, problem, dout) for peer, call in calls.items()}  # type: ignore[misc]
        elif problem.mask is not None:
            calls = {"kept": ours, **calls, "ours": partial(_scanning, ours)}
        times = _times(calls, problem)
        rates = {peer: operations / ms * 1e-9 for peer, ms in times.items()}
        mine = rates.pop("ours")
        kept = rates.pop("kept", None)
        ratio = results.add(cell.name, "TFLOPS", mine, rates)
        shown = "  ".join(f"{peer} {rate:.3g}" for peer, rate in rates.items())
        print(f"{cell.name:<34} ours {mine:.3g}  {shown}  ratio {ratio:.2f}", flush=True)
        if kept is not None:
            ratio = results.add(f"{cell.name}_kept", "TFLOPS", kept, rates)
            print(f"{'... with lists that were kept':<34} ours {kept:.3g}  ratio {ratio:.2f}", flush=True)
        torch.compiler.reset()
    results.write()


def _times(calls: dict[str, Callable[[], Tensor]], problem: DenseProblem) -> dict[str, float]:
    """Milliseconds of each call."""
    if problem.cell.seqlen_q >= FEW_QUERIES:
        return in_turns(calls, milliseconds)
    return {name: us * 1e-3 for name, us in in_turns(calls, graph_microseconds).items()}


def _compare(calls: dict[str, Callable[[], Tensor]], problem: DenseProblem, trains: bool) -> None:
    """Raise AssertionError if a peer's result, or its gradients, are not ours."""
    ours = calls["ours"]()
    dout = torch.randn_like(ours)
    mine = _with_backward(calls["ours"], problem, dout) if trains else ()
    for name, call in calls.items():
        out = call()
        worst = (ours.float() - out.float()).abs().max().item()
        assert worst < 0.05, f"{name} and ours differ by {worst}"
        if trains:
            for first, second in zip(mine, _with_backward(call, problem, dout), strict=True):
                worst = (first.float() - second.float()).abs().max().item()
                assert worst < 0.02 * second.abs().max().item() + 0.02, f"gradients of {name} and ours differ by {worst}"
