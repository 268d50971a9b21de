"""Convolutions over one patch each, as products."""

from __future__ import annotations

import pytest
import torch
from every_type import tiny_model
from image_inputs import CHANGES, one_image
from torch import nn

from fa_serve.hf.images import ImageReader
from fa_serve.hf.surgery import patches
from fa_serve.hf.surgery.patches import multiply_patches


@pytest.mark.parametrize("make", [nn.Conv2d, nn.Conv3d])
def test_patches_and_larger_inputs(make: type[nn.Conv2d] | type[nn.Conv3d], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    size = (2, 4, 6)[-2:] if make is nn.Conv2d else (2, 4, 6)
    conv = make(3, 8, kernel_size=size, stride=size)  # type: ignore[arg-type]
    one = torch.randn(7, 3, *size)
    larger = torch.randn(2, 3, *(2 * n for n in size))
    expected = [conv(one), conv(larger)]
    assert multiply_patches(nn.Sequential(conv)) == 1
    monkeypatch.setattr(make, "forward", lambda self, x: pytest.fail("the convolution has run"))
    torch.testing.assert_close(conv(one), expected[0])
    monkeypatch.undo()
    assert torch.equal(conv(larger), expected[1])


@pytest.mark.parametrize(
    "options",
    [{"padding": 1}, {"stride": 1}, {"groups": 3}, {"dilation": 2}, {"padding": 1, "padding_mode": "circular"}],
    ids=lambda options: "-".join(options),
)
def test_other_convolutions_stay(options: dict[str, object]) -> None:
    conv = nn.Conv2d(**({"in_channels": 3, "out_channels": 6, "kernel_size": 2, "stride": 2} | options))  # type: ignore[arg-type]
    assert multiply_patches(conv) == 0
    assert "forward" not in vars(conv)


def test_a_product_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    conv = nn.Conv2d(3, 6, kernel_size=2, stride=2)
    multiply = patches._multiply
    monkeypatch.setattr(patches, "_multiply", lambda module, x: multiply(module, x.flip(1)))
    assert multiply_patches(conv) == 0


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_a_tower_runs_no_convolution(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(name, CHANGES[name])
    image = one_image(name, model, seed=0)
    monkeypatch.setattr(patches, "_covers_patches", lambda module: False)
    plain = ImageReader(model).encode(image)  # nothing is replaced
    monkeypatch.undo()
    reader = ImageReader(model)
    monkeypatch.setattr(nn.Conv3d, "forward", lambda self, x: pytest.fail("the convolution has run"))
    torch.testing.assert_close(reader.encode(image).embeds, plain.embeds)
