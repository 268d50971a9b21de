"""Layers that are fused on a CPU are fused on a GPU, where kernels compute the proof.

Tests on a CPU cannot see a kernel that reads what a model makes in another layout there: such layers are found to differ, and
stay as they are, without an error.
"""

from __future__ import annotations

import pytest
import torch
from hf_families import FUSED, family

from fa_serve.hf import patch
from fa_serve.hf.surgery.fuse.fusion import fuse_layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", FUSED)
def test_layers_are_fused(name: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    model = family(name).build().to("cuda", dtype)
    patch(model)
    assert fuse_layers(model) == 2, caplog.text
