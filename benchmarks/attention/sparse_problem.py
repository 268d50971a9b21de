"""One block-sparse call: its lists, our call, FlexAttention's, dense attention, the check against float64, and the benchmark.

bench_attention.py calls `sparse`. Each head keeps the same number of random key blocks in each block of queries, the block
of the queries among them, so that the part that is kept is exact and the load is balanced. A causal problem keeps a part of the
blocks up to the diagonal.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import fa_serve
from benchmarks.attention.attention_cells import HIDDEN, SPARSE_PARTS, SPARSE_SEQLENS
from benchmarks.measure import Results, in_turns, milliseconds, served
from fa_serve.backends.reference import attention_reference
from fa_serve.testing import assert_matches_reference, eager_attention

BLOCK = 128  # FlexAttention's default


def _causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


@dataclass
class SparseProblem:
    """q, k, v (1, seqlen, heads, head_dim); keep: bool (1, heads, blocks, blocks)"""

    q: Tensor
    k: Tensor
    v: Tensor
    keep: Tensor
    causal: bool

    @classmethod
    def make(
        cls, seqlen: int, heads: int, head_dim: int, part: float, causal: bool, dtype: torch.dtype, device: str
    ) -> SparseProblem:
        """`part`: of the blocks that a dense call would visit, how much each block of queries keeps, at least one block."""
        q, k, v = (torch.randn(1, seqlen, heads, head_dim, device=device, dtype=dtype) for _ in range(3))
        blocks = -(-seqlen // BLOCK)
        rank = torch.rand(1, heads, blocks, blocks, device=device)
        rank.diagonal(dim1=2, dim2=3).fill_(-1.0)
        reachable = torch.full((blocks,), blocks, device=device)
        if causal:
            rank = rank.masked_fill(torch.ones(blocks, blocks, dtype=torch.bool, device=device).triu(1), 2.0)
            reachable = torch.arange(1, blocks + 1, device=device)
        kept = (reachable * part).round().long().clamp(min=1)
        keep = rank.argsort(-1).argsort(-1) < kept[:, None]
        return cls(q, k, v, keep, causal)

    @property
    def part(self) -> float:
        """The part of the blocks of a dense call that is kept, over all blocks of queries."""
        blocks = self.keep.shape[-1]
        return self.keep.float().mean().item() * (2 * blocks / (blocks + 1) if self.causal else 1.0)

    def ours(self, backend: str = "auto") -> Callable[[], Tensor]:
        lists = fa_serve.BlockLists.from_blocks(self.keep, (BLOCK, BLOCK))
        return partial(fa_serve.attention, self.q, self.k, self.v, causal=self.causal, block_mask=lists, backend=backend)

    def dense(self, backend: str = "auto") -> Callable[[], Tensor]:
        """Every block: what the sparse call is to be faster than."""
        return partial(fa_serve.attention, self.q, self.k, self.v, causal=self.causal, backend=backend)

    def flex(self) -> Callable[[], Tensor]:
        """FlexAttention, compiled, on the same blocks. Only blocks on the diagonal of a causal call are masked."""
        blocks = self.keep.shape[-1]
        diagonal = torch.eye(blocks, dtype=torch.bool, device=self.keep.device)
        partial_blocks = self.keep & diagonal if self.causal else torch.zeros_like(self.keep)
        some, whole = (fa_serve.BlockLists.from_blocks(x) for x in (partial_blocks, self.keep & ~partial_blocks))
        mask = BlockMask.from_kv_blocks(
            some.kv_num_blocks,
            some.kv_indices,
            whole.kv_num_blocks,
            whole.kv_indices,
            BLOCK_SIZE=BLOCK,
            mask_mod=_causal if self.causal else None,
            seq_lengths=(self.q.shape[1], self.q.shape[1]),
        )
        call = torch.compile(flex_attention, dynamic=False)
        q, k, v = (x.transpose(1, 2) for x in (self.q, self.k, self.v))
        return lambda: call(q, k, v, block_mask=mask).transpose(1, 2)

    def check(self, out: Tensor, name: str) -> None:
        """Compare three blocks of queries of two heads with float64; AssertionError if the 2x rule is broken."""
        seqlen, heads = self.q.shape[1:3]
        for block in {0, self.keep.shape[2] // 2, self.keep.shape[2] - 1}:
            rows = slice(block * BLOCK, min((block + 1) * BLOCK, seqlen))
            i = torch.arange(rows.start, rows.stop, device=out.device)[:, None]
            j = torch.arange(seqlen, device=out.device)
            for head in {0, heads - 1}:
                mask = self.keep[0, head, block].repeat_interleave(BLOCK)[:seqlen] & ((i >= j) if self.causal else (i >= 0))
                one = (self.q[:, rows, head : head + 1], *(x[:, :, head : head + 1] for x in (self.k, self.v)))
                options = {"softmax_scale": self.q.shape[-1] ** -0.5, "mask": mask[None, None]}
                exact, _ = attention_reference(*(x.double() for x in one), **options)
                assert_matches_reference(out[:, rows, head : head + 1], exact, eager_attention(*one, **options), name)


def sparse(args: argparse.Namespace) -> None:
    """Block-sparse calls in milliseconds, beside compiled FlexAttention on the same blocks and our dense call.

    The last column is the speed over dense, times the part that is kept: 1.00 if time falls with the blocks and nothing else.
    A few small calls are compared with float64 first, and some rows of each cell. `--peers` does not apply.
    """
    results = Results("sparse" if args.backend == "auto" else f"sparse_{args.backend}", args.out)
    where = {"dtype": torch.float32, "device": "cpu"} if args.tiny else {"dtype": torch.bfloat16, "device": "cuda"}
    hidden = 128 if args.tiny else HIDDEN
    for head_dim in args.head_dims:
        for causal in (False, True):
            gated = SparseProblem.make(1000, 4, head_dim, 0.4, causal, **where)
            gated.check(gated.ours(args.backend)(), f"d{head_dim} gate")
    print(f"the gate holds for head sizes {args.head_dims}")
    print(f"{'case':<28}{'ours ms':>9}{'flex ms':>9}{'dense ms':>9}{'kept':>7}{'ratio':>7}{'scaled':>8}", flush=True)
    grid = [(seqlen, dim, causal) for seqlen in SPARSE_SEQLENS for dim in args.head_dims for causal in (False, True)]
    for seqlen, head_dim, causal in [(512, dim, causal) for _, dim, causal in grid[:2]] if args.tiny else grid:
        for part in SPARSE_PARTS:
            case = f"d{head_dim}_{'causal' if causal else 'full'}_{seqlen}_{part:.0%}"
            if not args.cells.takes(case):
                continue
            problem = SparseProblem.make(seqlen, hidden // head_dim, head_dim, part, causal, **where)
            _sparse_cell(results, case, problem, args.backend)
        torch.compiler.reset()
    results.write()


def _sparse_cell(results: Results, case: str, problem: SparseProblem, backend: str) -> None:
    ours = problem.ours(backend)
    problem.check(ours(), case)
    calls = served({"flex": problem.flex()})
    for name, call in calls.items():
        worst = (ours().float() - call().float()).abs().max().item()
        assert worst < 0.05, f"{name} and ours differ by {worst}"
    times = in_turns({"ours": ours, "dense": problem.dense()} | calls)
    mine = times.pop("ours")
    results.add(case, "ms", mine, times)
    flex = times.get("flex", float("nan"))
    scaled = times["dense"] / mine * problem.part
    shown = f"{mine:9.3f}{flex:9.3f}{times['dense']:9.3f}{problem.part:7.1%}"
    print(f"{case:<28}{shown}{flex / mine:7.2f}{scaled:8.2f}", flush=True)


def tune_lists(args: argparse.Namespace) -> None:
    """Time the Hopper kernel with lists for each tile that fits, over 16k tokens and a quarter of the blocks.

    The branches of `list_tiles` are to quote this table. The first row is the tile that it chooses.
    """
    from fa_serve.backends.calls import AttentionOptions, AttentionTensors
    from fa_serve.backends.hopper.forward.plan import plan_hopper_forward
    from fa_serve.backends.hopper.forward.tiles import list_tiles

    for head_dim in args.head_dims:
        chosen = list_tiles(head_dim, head_dim, (BLOCK, BLOCK))
        changes: list[dict[str, int]] = [
            {},
            {"rescale_late": not chosen.rescale_late},
            {"softmax_first": not chosen.softmax_first},
        ]
        changes += [{"pingpong": True}, {"stages": 1}, {"stages": 3}, {"block_n": 64, "stages": 2 if head_dim > 128 else 4}]
        changes += [{"groups": 1, "block_n": 64, "blocks_per_sm": 2}, {"q_stages": 1, "o_parts": 2}]
        for causal in (False, True):
            problem = SparseProblem.make(16384, HIDDEN // head_dim, head_dim, 0.25, causal, torch.bfloat16, "cuda")
            lists = fa_serve.BlockLists.from_blocks(problem.keep, (BLOCK, BLOCK))
            tensors = AttentionTensors(problem.q, problem.k, problem.v, blocks=lists)
            options = AttentionOptions(head_dim**-0.5, (-1, 0 if causal else -1), 0.0, 16384, 16384, return_lse=False)
            print(f"d{head_dim} {'causal' if causal else 'full'}  {chosen}", flush=True)
            for change in changes:
                try:
                    run = plan_hopper_forward(tensors, options, replace(chosen, **change))
                    problem.check(run(tensors)[0], str(change))
                    shown = f"{milliseconds(partial(run, tensors), 30):9.3f} ms"
                except Exception as error:  # a tile that does not fit has its error in the table
                    shown = type(error).__name__
                print(f"  {shown:<14}{change}", flush=True)
