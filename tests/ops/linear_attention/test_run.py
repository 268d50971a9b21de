"""Where kernels run."""

from __future__ import annotations

import torch

from fa_serve.ops.linear_attention.run import runs_triton


def test_where_kernels_run() -> None:
    assert runs_triton(torch.device("cuda", 0))
    assert not runs_triton(torch.device("cpu"))
