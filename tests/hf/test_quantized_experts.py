"""Mixtures with quantised experts: what is loaded, what is refused, and that numbers are those of the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from quantised_copies import load
from quantised_experts import WRITERS, dequantised

from fa_serve.hf.quantized_experts import QuantizedExperts

KINDS = {
    "mxfp4": "4-bit floats in groups of 32 (mxfp4)",
    "fp8-block": "float8 with a scale for each 32 x 32",
    "fp8-channel": "float8 with a scale for each row",
    "w4a16": "4 bits in groups of 32 (compressed-tensors)",
}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    for name, write in WRITERS.items():
        write(folder / name)
    return folder


def experts_of(model: torch.nn.Module) -> list[QuantizedExperts]:
    return [module for module in model.modules() if isinstance(module, QuantizedExperts)]


@torch.no_grad()
@pytest.mark.parametrize("name", WRITERS)
def test_a_forward_is_that_of_the_dequantised_model(checkpoints: Path, name: str) -> None:
    model = load(checkpoints / name, dtype="float32")
    found = experts_of(model)
    assert [module.description for module in found] == [KINDS[name]] * model.config.num_hidden_layers
    ids = torch.arange(3, 20)[None]
    expected = dequantised(model)(ids).logits
    assert float((model(ids).logits - expected).abs().max()) <= 1e-4 * float(expected.abs().max())
