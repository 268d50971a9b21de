"""Inputs for tests of the Hopper backward kernel in the emulator, and the comparison of its gradients with the reference's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hopper_emulator import emulated
from torch import Tensor

from fa_serve.backends.calls import AttentionOptions, BackwardTensors, Gradients
from fa_serve.backends.hopper.backward.plan import plan_hopper_backward
from fa_serve.backends.hopper.backward.tiles import BackwardTileConfig
from fa_serve.backends.reference import attention_reference
from fa_serve.testing import assert_matches_reference, cu_seqlens, eager_attention, make_qkv

NAMES = ("q", "k", "v", "sinks")


@dataclass(frozen=True)
class GradientCase:
    """A dense batch of sequences of equal lengths, or a packed one with `lengths`, (queries, keys) of each sequence."""

    id: str
    seqlen_q: int = 150
    seqlen_k: int = 200
    heads: tuple[int, int] = (2, 1)
    head_dim: tuple[int, int] = (64, 64)
    batch: int = 1
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: bool = False
    with_lse: bool = False
    scale: float = 0.125
    dtype: torch.dtype = torch.bfloat16
    tiles: BackwardTileConfig | None = None
    lengths: tuple[tuple[int, int], ...] = ()

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        return self.lengths or ((self.seqlen_q, self.seqlen_k),) * self.batch

    @property
    def options(self) -> AttentionOptions:
        longest = (max(n for n, _ in self.sequences), max(n for _, n in self.sequences))
        return AttentionOptions(self.scale, self.window, self.softcap, *longest, return_lse=True)

    def differentiate(self, attend: Any, given: list[Tensor], upstream: list[Tensor]) -> list[Tensor]:
        """out, lse and the gradients of q, k, v and sinks of one sequence by autograd, in the dtype of `given`."""
        leaves = [x.detach().requires_grad_() for x in given]
        sinks = {"sinks": leaves[3]} if self.sinks else {}
        options = {"softmax_scale": self.scale, "window_size": self.window, "softcap": self.softcap}
        out, lse = attend(*leaves[:3], **options, **sinks)
        results = [out, lse] if self.with_lse else [out]
        grads = [g.to(x.dtype) for x, g in zip(results, upstream, strict=False)]
        found = torch.autograd.grad(results, leaves, grads, allow_unused=True, materialize_grads=True)
        return [out.detach(), lse.detach(), *found]


def _eager(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return eager_attention(q, k, v, **options), attention_reference(q, k, v, **options)[1]


class GradientCall:
    """The tensors of a case, and what autograd says about them: `exact` in float64, `eager` in the case's dtype."""

    def __init__(self, case: GradientCase, seed: int = 0) -> None:
        self.case = case
        draw = torch.Generator().manual_seed(seed)
        heads, kv_heads = case.heads
        sinks = torch.randn(heads, generator=draw)
        parts: list[list[Tensor]] = []
        self.exact: list[list[Tensor]] = []
        self.eager: list[list[Tensor]] = []
        for number, (rows, keys) in enumerate(case.sequences):
            q, k, v = make_qkv(1, rows, keys, heads, kv_heads, *case.head_dim, dtype=case.dtype, seed=seed + number)
            dout = torch.randn(1, rows, heads, case.head_dim[1], generator=draw).to(case.dtype)
            dlse = torch.randn(1, heads, rows, generator=draw)
            given = [q, k, v, sinks]
            exact = case.differentiate(attention_reference, [x.double() for x in given], [dout, dlse])
            self.exact.append(exact[2:])
            self.eager.append(case.differentiate(_eager, given, [dout, dlse])[2:])
            parts.append([q, k, v, exact[0].to(case.dtype), exact[1].float(), dout, dlse])
        tokens = (1, 1, 1, 1, 2, 1, 2)  # the dimension of each tensor along which sequences are packed
        if case.lengths:
            joined = [torch.cat(x, dim)[0] for x, dim in zip(zip(*parts, strict=True), tokens, strict=True)]
        else:
            joined = [torch.cat(x) for x in zip(*parts, strict=True)]
        q, k, v, out, lse, dout, dlse = joined
        ends = [cu_seqlens([pair[i] for pair in case.lengths]) if case.lengths else None for i in (0, 1)]
        self.tensors = BackwardTensors(
            q,
            k,
            v,
            sinks if case.sinks else None,
            None,
            *ends,
            out,
            lse,
            dout,
            dlse if case.with_lse else None,
            needs_dsinks=case.sinks,
        )

    def run(self, **emulation: Any) -> Gradients:
        with emulated(**emulation):
            found: Gradients = plan_hopper_backward(self.tensors, self.case.options, self.case.tiles)(self.tensors)
        return found

    def rows(self, name: str, number: int) -> tuple[Any, ...]:
        """Where sequence `number` stands in a tensor."""
        ends = self.tensors.cu_seqlens_q if name == "q" else self.tensors.cu_seqlens_k
        return (slice(number, number + 1),) if ends is None else (slice(int(ends[number]), int(ends[number + 1])),)

    def check(self, found: Gradients, number: int) -> None:
        """Compare the gradients of sequence `number` with the exact ones by the 2x rule."""
        for name, actual, exact, eager in zip(NAMES[:3], found[:3], self.exact[number], self.eager[number], strict=False):
            assert_matches_reference(actual[self.rows(name, number)].view_as(exact), exact, eager, f"d{name}")


def run_backward(case: GradientCase, **emulation: Any) -> None:
    """Emulate a backward pass and compare all of its gradients."""
    call = GradientCall(case)
    found = call.run(**emulation)
    for number in range(len(case.sequences)):
        call.check(found, number)
    if case.sinks:
        exact, eager = (sum(x[number][3] for number in range(len(case.sequences))) for x in (call.exact, call.eager))
        # a float32 sum over rows, each with a delta from its output, which is rounded to the case's dtype
        roundings = round(torch.finfo(case.dtype).eps / torch.finfo(torch.float32).eps)
        assert_matches_reference(found.sinks, exact, eager, "dsinks", roundings)
