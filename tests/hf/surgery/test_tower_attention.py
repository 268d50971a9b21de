"""Attention of towers that rotates by one kernel, and what it leaves to the module's own code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from every_type import tiny_model
from image_inputs import CHANGES, one_image
from torch import Tensor, nn

import fa_serve
from fa_serve.hf.images import ImageReader
from fa_serve.hf.surgery.towers import speed_up_tower
from fa_serve.spec import UnsupportedModelError

NAMES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "exaone4_5"]


def attention_of(name: str) -> Any:
    """The attention of the first layer of a tower, with larger weights than at the start of a training."""
    model = tiny_model(name, CHANGES[name])
    fa_serve.patch(model)
    torch.manual_seed(0)
    for module in model.modules():
        if {*dict(module.named_children())} == {"qkv", "proj"}:
            for weight in module.parameters():
                nn.init.normal_(weight, std=0.3)
            return module.requires_grad_(False)
    raise AssertionError(f"{name} has no such attention")


def given(module: Any, ends: tuple[int, ...] = (0, 4, 4, 10), seed: int = 0) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    angles = torch.randn(ends[-1], module.head_dim // 2, generator=draw).repeat(1, 2)
    borders = torch.tensor(ends, dtype=torch.int32)
    return {
        "hidden_states": torch.randn(ends[-1], module.qkv.in_features, generator=draw),
        "cu_seqlens": borders,
        "position_embeddings": (angles.cos(), angles.sin()),
        "max_seqlen": int(borders.diff().max()),
    }


def own(module: Any, **words: Any) -> Tensor:
    found: Tensor = type(module).forward(module, **words)
    return found


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_it_comes_to_what_the_module_comes_to(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = attention_of(name)
    calls = [given(module), given(module, (0, 1), seed=1), given(module, (0, 7, 8, 23), seed=2)]
    expected = [own(module, **words) for words in calls]
    assert speed_up_tower(nn.ModuleList([module])) == 1
    monkeypatch.setattr(type(module), "forward", lambda *_, **__: pytest.fail("its own code has run"))
    for words, wanted in zip(calls, expected, strict=True):
        before = words["hidden_states"].clone()
        torch.testing.assert_close(module(**words), wanted, rtol=1e-4, atol=1e-5)
        assert torch.equal(words["hidden_states"], before)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_a_tower_uses_it(name: str) -> None:
    model = tiny_model(name, CHANGES[name])
    image = one_image(name, model, seed=0)
    fa_serve.patch(model)
    expected = ImageReader(model, speeds_up=False).encode(image)
    reader = ImageReader(model)
    replaced = [type(vars(x).get("forward")).__name__ for x in model.modules()].count("PackedAttention")
    assert replaced == 2
    torch.testing.assert_close(reader.encode(image).embeds, expected.embeds, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_angles_whose_halves_differ_are_left_to_the_module() -> None:
    module = attention_of("qwen2_5_vl")
    speed_up_tower(nn.ModuleList([module]))
    words = given(module)
    cos, sin = words["position_embeddings"]
    cos[:, 0] += 0.5
    for angles in ((torch.ones_like(cos), torch.zeros_like(sin)), (cos, sin), (cos, sin)):
        words["position_embeddings"] = angles
        torch.testing.assert_close(module(**words), own(module, **words))


def test_what_it_leaves_to_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = attention_of("qwen3_vl")
    speed_up_tower(nn.ModuleList([module]))
    words = given(module)
    with torch.no_grad():
        expected = module(**words)
    ran: list[int] = []
    forward = type(module).forward
    monkeypatch.setattr(type(module), "forward", lambda *args, **given: ran.append(1) or forward(*args, **given))
    hidden = words["hidden_states"].clone().requires_grad_()
    module(**words | {"hidden_states": hidden}).sum().backward()
    assert hidden.grad is not None
    assert len(ran) == 1
    with torch.no_grad():
        torch.testing.assert_close(module(**words | {"max_seqlen": None}), expected)
        assert len(ran) == 2
        with pytest.raises(UnsupportedModelError, match="attention weights"):
            module(**words, output_attentions=True)
        assert len(ran) == 3
        module.config._attn_implementation = "sdpa"
        # PyTorch's attention, which the newest transformers does not give an empty sequence
        full = words | {"cu_seqlens": words["cu_seqlens"].unique()}
        torch.testing.assert_close(module(**full), expected, rtol=1e-4, atol=1e-5)
        assert len(ran) == 4


def test_modules_that_stay() -> None:
    class Swapped(type(attention_of("qwen2_vl"))):  # type: ignore[misc]
        """Attends from keys to queries."""

        def forward(self, hidden_states: Tensor, **words: Any) -> Any:
            q, k, v = self.qkv.weight.chunk(3)
            self.qkv.weight = nn.Parameter(torch.cat((k, q, v)), requires_grad=False)
            try:
                return super().forward(hidden_states, **words)
            finally:
                self.qkv.weight = nn.Parameter(torch.cat((q, k, v)), requires_grad=False)

    swapped = attention_of("qwen2_vl")
    swapped.__class__ = Swapped
    plain = attention_of("qwen2_vl")
    plain.config._attn_implementation = "eager"
    hooked = attention_of("qwen2_vl")
    hooked.qkv.register_forward_hook(lambda *_: None)
    for module in (swapped, plain, hooked):
        assert speed_up_tower(nn.ModuleList([module])) == 0
        assert "forward" not in vars(module)
