"""A piece of memory is filled from zeros. What a GPU does is in tests/gpu/test_lora_gpu.py."""

from __future__ import annotations

import torch

from fa_serve.hf.lora.staging import Staging


def test_a_piece_is_zeros_where_nothing_is_written() -> None:
    memory = torch.ones(2, 10)
    staging = Staging(torch.device("cpu"), torch.float32, 6)

    def write(view: torch.Tensor) -> None:
        view[1:3] = 5.0

    staging.send(memory[1, 2:8], write)
    assert memory.tolist() == [[1.0] * 10, [1.0, 1.0, 0.0, 5.0, 5.0, 0.0, 0.0, 0.0, 1.0, 1.0]]
