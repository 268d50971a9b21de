"""One rank of a data-parallel training step: what the test of DistributedDataParallel runs in two processes.

    python -m data_parallel 1 FILE      # rank 1 of 2; FILE is where the ranks find one another

Each rank computes the gradients of one row of the batch, which DistributedDataParallel averages while autograd runs.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from opaque_backend import opaque_backend
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fa_serve

RANKS = 2


class Layer(nn.Module):
    """Attention with projections and sinks, which the kernel differentiates as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(32, 64)
        self.out = nn.Linear(32, 1)
        self.sinks = nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (8, 8)).split([4, 2, 2], dim=2)
        out: Any = fa_serve.attention(q, k, v, sinks=self.sinks, causal=True)
        loss: Tensor = self.out(out.flatten(2)).square().mean()
        return loss


def batch() -> Tensor:
    return torch.randn(RANKS, 9, 32, generator=torch.Generator().manual_seed(1))


def gradients(rank: int, meeting_point: str) -> list[Tensor]:
    """The gradients that this rank has after one step; the same on every rank. The process group is left to the caller."""
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=RANKS)
    with opaque_backend():
        layer = Layer()
        parallel = DistributedDataParallel(layer)  # it averages only while it lives
        parallel(batch()[rank : rank + 1]).backward()
        del parallel
    dist.barrier()  # no rank leaves while another one is still averaging
    return [p.grad for p in layer.parameters() if p.grad is not None]


if __name__ == "__main__":
    gradients(int(sys.argv[1]), sys.argv[2])
    # gloo's threads have aborted the process while the interpreter ended, when the gradients were there already
    os._exit(0)
