"""The dequantisers of AutoAWQ and AutoGPTQ, written here as their sources have them, because neither is installed.

Sources: awq/utils/packing_utils.py and auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py. Both return (k, n).
"""

from __future__ import annotations

import torch
from torch import Tensor

SHIFTS = torch.arange(0, 32, 4)


def of_autoawq(tensors: dict[str, Tensor], group_size: int) -> Tensor:
    def unpacked(words: Tensor) -> Tensor:
        numbers = (words[:, :, None] >> SHIFTS[None, None, :]).to(torch.int8).view(words.shape[0], -1)
        order = torch.arange(numbers.shape[1]).view(-1, 8)[:, [0, 4, 1, 5, 2, 6, 3, 7]].view(-1)
        return torch.bitwise_and(numbers[:, order], 15)

    values = unpacked(tensors["qweight"])
    groups = (tensors["scales"], unpacked(tensors["qzeros"]))
    scales, zeros = (x.repeat_interleave(group_size, dim=0)[: len(values)] for x in groups)
    return (values - zeros) * scales


def of_autogptq(tensors: dict[str, Tensor], *, subtracted: bool) -> Tensor:
    wf = SHIFTS[None, :]
    zeros = torch.bitwise_right_shift(tensors["qzeros"].unsqueeze(2).expand(-1, -1, 8), wf.unsqueeze(0)).to(torch.int16)
    zeros = torch.bitwise_and(torch.bitwise_and(zeros, 15) + int(subtracted), 15).reshape(tensors["scales"].shape)
    weight = torch.bitwise_right_shift(tensors["qweight"].unsqueeze(1).expand(-1, 8, -1), wf.unsqueeze(-1)).to(torch.int16)
    weight = torch.bitwise_and(weight, 15).reshape(-1, weight.shape[2])
    groups = tensors["g_idx"].long()
    return tensors["scales"][groups] * (weight - zeros[groups])
