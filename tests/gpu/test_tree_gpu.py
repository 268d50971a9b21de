"""Attention by a fixed tree on a GPU: right, and a query has the same bits in prompts, chunks, drafts, and alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fa_serve
from fa_serve.backends import hopper
from fa_serve.backends.calls import AttentionOptions, AttentionTensors
from fa_serve.backends.hopper.forward import tiles
from fa_serve.backends.triton.tree import plan as tree
from fa_serve.backends.triton.tree.plan import plan_tree
from fa_serve.launching.plans import PLANS
from fa_serve.spec import TREE_SPLITS
from fa_serve.testing import cu_seqlens

LENGTH = 1700


@pytest.mark.parametrize("heads", [(32, 8), (8, 8), (16, 1)], ids=str)
@pytest.mark.parametrize(("head_dim", "left", "softcap"), [(128, -1, 0.0), (64, 300, 0.0), (256, -1, 30.0)])
def test_a_query_has_the_same_bits_with_any_others(heads: tuple[int, int], head_dim: int, left: int, softcap: float) -> None:
    torch.manual_seed(0)
    num_heads, num_kv_heads = heads
    pages = -(-LENGTH // 16)
    make = lambda *shape: torch.randn(*shape, dtype=torch.bfloat16, device="cuda")  # noqa: E731
    q = make(LENGTH, num_heads, head_dim)
    k, v = (make(2 * pages, num_kv_heads, 16, head_dim).transpose(1, 2) for _ in range(2))
    table = torch.randperm(2 * pages, device="cuda").int().view(2, pages)

    def compute(first: int, last: int, *, beside: int = 0, **form: Any) -> Tensor:
        """Queries first to last of a sequence, with another sequence of `beside` queries before it."""
        q_lens = [beside, last - first]
        kv_lens = [beside, last]
        rows = torch.cat([make(beside, num_heads, head_dim), q[first:last]])
        numbers: Any = {"dtype": torch.int32, "device": "cuda"}
        tensors = AttentionTensors(
            rows,
            k,
            v,
            cu_seqlens_q=cu_seqlens(q_lens, rows.device),
            keys=torch.tensor(kv_lens, **numbers),
            block_table=table,
        )
        options = AttentionOptions(head_dim**-0.5, (left, 0), softcap, max(q_lens), max(kv_lens), False, TREE_SPLITS)
        return plan_tree(tensors, options, **form)(tensors)[0][beside:]

    whole = compute(0, LENGTH)
    exact = fa_serve.attention(
        *(x[None].double() for x in (q, *(c[table[1]].flatten(0, 1)[:LENGTH] for c in (k, v)))),
        causal=True,
        window_size=(left, 0),
        softcap=softcap,
        backend="reference",
    )[0]
    assert (whole.double() - exact).abs().max() < 2e-2
    for first, last in ((0, 1), (511, 512), (512, 513), (LENGTH - 1, LENGTH), (700, 705), (3, 900), (1000, LENGTH)):
        for apart in (False, True):
            for beside in (0, 1, 100):
                assert torch.equal(compute(first, last, apart=apart, beside=beside), whole[first:last]), (first, apart, beside)


class Prompts:
    """A step of the engine: prompts, a chunk behind a prefix, tokens that decode, and padding behind the last of them."""

    def __init__(self, heads: tuple[int, int], head_dim: int, *, left: int = -1, sinks: bool = False) -> None:
        torch.manual_seed(0)
        self.q_lens = [333, 1, 700, 1, 2100, 129, 5]
        self.kv_lens = [333, 900, 1700, 512, 2100, 4000, 70]
        pages = [-(-keys // 16) for keys in self.kv_lens]
        make = lambda *shape: torch.randn(*shape, dtype=torch.bfloat16, device="cuda")  # noqa: E731
        self.q = 3 * make(sum(self.q_lens) + 9, heads[0], head_dim)
        self.k, self.v = (make(sum(pages), heads[1], 16, head_dim).transpose(1, 2) for _ in range(2))
        self.table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device="cuda")
        for row, places in zip(self.table, torch.randperm(sum(pages), device="cuda").int().split(pages), strict=True):
            row[: len(places)] = places
        self.options: dict[str, Any] = {"window_size": (left, 0), "sinks": make(heads[0]) if sinks else None}

    def compute(self, backend: str = "auto") -> tuple[Tensor, Tensor]:
        """out and lse by the tree, planned anew."""
        PLANS.clear()
        out, lse = fa_serve.attention_paged(
            self.q,
            self.k,
            self.v,
            block_table=self.table,
            seqused_k=torch.tensor(self.kv_lens, dtype=torch.int32, device="cuda"),
            cu_seqlens_q=cu_seqlens(self.q_lens, self.q.device),
            max_seqlen_q=max(self.q_lens),
            max_seqlen_k=max(self.kv_lens),
            num_splits=TREE_SPLITS,
            return_lse=True,
            backend=backend,
            **self.options,
        )
        return out, lse


ON_HOPPER = pytest.mark.skipif(torch.cuda.get_device_capability()[0] != 9, reason="the other tiles are Hopper's")


@ON_HOPPER
@pytest.mark.parametrize(("heads", "head_dim"), [((16, 8), 128), ((32, 8), 128), ((8, 1), 64)], ids=str)
def test_tiles_of_128_rows_have_the_same_bits(heads: tuple[int, int], head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof for `tree.plan.CHOOSES_ROWS`."""
    prompts = Prompts(heads, head_dim)
    monkeypatch.setattr(tree, "CHOOSES_ROWS", False)
    expected = prompts.compute()
    monkeypatch.setattr(tree, "CHOOSES_ROWS", True)
    for actual, wanted in zip(prompts.compute(), expected, strict=True):
        assert torch.equal(actual, wanted)


@ON_HOPPER
@pytest.mark.parametrize(
    ("heads", "head_dim", "left", "sinks"),
    [
        ((16, 8), 128, -1, False),
        ((32, 8), 128, 700, True),
        ((8, 1), 64, -1, True),
        ((8, 8), 64, 300, False),
        ((4, 2), 96, -1, False),
        ((4, 4), 80, -1, False),
    ],
    ids=str,
)
def test_the_hopper_kernel_follows_the_tree(
    heads: tuple[int, int], head_dim: int, left: int, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof for `hopper.FOLLOWS_TREE`: all rows by this kernel, and those of prompts alone, in tiles of 128 and 64 rows."""
    prompts = Prompts(heads, head_dim, left=left, sinks=sinks)
    monkeypatch.setattr(hopper, "FOLLOWS_TREE", False)
    expected = prompts.compute("triton")
    monkeypatch.setattr(hopper, "FOLLOWS_TREE", True)
    for form in ("hopper", "auto", "small"):
        if form == "small":
            monkeypatch.setattr(tiles, "HALVES_TREE_TILES", True)
            monkeypatch.setattr(tiles, "FULL_WAVES", 1e9)
        for actual, wanted in zip(prompts.compute("auto" if form == "auto" else "hopper"), expected, strict=True):
            assert torch.equal(actual, wanted), (form, (actual != wanted).sum().item(), (actual - wanted).abs().max().item())
