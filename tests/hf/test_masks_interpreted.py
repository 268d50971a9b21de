"""A model of transformers with a mask of elements, through the portable kernels in Triton's interpreter, with gradients."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from fa_serve.backends.triton.mask_blocks import MaskScan

LENGTH = 256


def losses_and_gradients(implementation: str, mask: Tensor) -> list[Tensor]:
    """The loss of a model of two layers, and the gradients of its parameters."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=2, head_dim=16, **sizes, attn_implementation=implementation)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).train()
    tokens = torch.arange(LENGTH)[None] * 7 % 64
    loss = model(tokens, attention_mask=mask, labels=tokens).loss
    loss.backward()
    return [loss.detach(), *(x.grad for x in model.parameters() if x.grad is not None)]


@pytest.mark.slow
def test_a_prefix_is_scanned_once_for_all_layers() -> None:
    """Also by the model's backward pass, and the results are those of PyTorch's operator."""
    i = torch.arange(LENGTH)
    mask = ((i[None, :] <= i[:, None]) | (i[None, :] < 100))[None, None]
    scans: list[Tensor] = []
    run = MaskScan.__call__
    with mock.patch.object(MaskScan, "__call__", lambda self, x: scans.append(x) or run(self, x)):
        ours = losses_and_gradients("fa_serve", mask)
    assert len(scans) == 1
    theirs = losses_and_gradients("sdpa", mask)
    assert len(ours) == len(theirs) > 10
    for actual, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
