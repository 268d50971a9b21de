"""Convolutions over one patch each, as products."""

from __future__ import annotations

import copy

import pytest
import torch
from every_type import tiny_model
from image_inputs import CHANGES, one_image
from torch import nn

from fa_serve.engine import Engine, EngineConfig
from fa_serve.hf.images import ImageReader
from fa_serve.hf.surgery import towers
from fa_serve.hf.surgery.towers import speed_up_tower


@pytest.mark.parametrize("make", [nn.Conv2d, nn.Conv3d])
def test_patches_and_larger_inputs(make: type[nn.Conv2d] | type[nn.Conv3d], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    size = (2, 4, 6)[-2:] if make is nn.Conv2d else (2, 4, 6)
    conv = make(3, 8, kernel_size=size, stride=size)  # type: ignore[arg-type]
    one = torch.randn(7, 3, *size)
    larger = torch.randn(2, 3, *(2 * n for n in size))
    expected = [conv(one), conv(larger)]
    assert speed_up_tower(nn.Sequential(conv)) == 1
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
    assert speed_up_tower(conv) == 0
    assert "forward" not in vars(conv)


def test_a_product_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    conv = nn.Conv2d(3, 6, kernel_size=2, stride=2)
    multiply = towers._multiply
    monkeypatch.setattr(towers, "_multiply", lambda module, x: multiply(module, x.flip(1)))
    assert speed_up_tower(conv) == 0


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_a_tower_runs_no_convolution(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(name, CHANGES[name])
    image = one_image(name, model, seed=0)
    monkeypatch.setattr(towers, "_covers_patches", lambda module: False)
    plain = ImageReader(model).encode(image)  # nothing is replaced
    monkeypatch.undo()
    reader = ImageReader(model)
    monkeypatch.setattr(nn.Conv3d, "forward", lambda self, x: pytest.fail("the convolution has run"))
    torch.testing.assert_close(reader.encode(image).embeds, plain.embeds)


class Gated(nn.Module):
    def __init__(self, width: int, bias: bool = True) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(32, width, bias=bias)
        self.up_proj = nn.Linear(32, width, bias=bias)
        self.down_proj = nn.Linear(width, 32, bias=bias)
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("bias", [True, False])
def test_gated_mlps_of_unaligned_width(bias: bool) -> None:
    torch.manual_seed(0)
    mlp = Gated(44, bias).to(torch.bfloat16)
    x = torch.randn(2, 3, 32, dtype=torch.bfloat16)
    state = {name: value.clone() for name, value in mlp.state_dict().items()}
    expected = mlp.float()(x.float())
    mlp = Gated(44, bias).to(torch.bfloat16)
    mlp.load_state_dict(state)
    objects = [id(x) for x in mlp.parameters()]
    with torch.no_grad():
        assert speed_up_tower(nn.ModuleList([mlp])) == 1
        torch.testing.assert_close(mlp(x).float(), expected, rtol=0.02, atol=0.02)
        assert all(torch.equal(value, state[name]) for name, value in mlp.state_dict().items())
        assert [id(x) for x in mlp.parameters()] == objects, "an optimizer may have them"
        mlp.down_proj.weight.mul_(2)  # new weights are used
        mlp.gate_proj.weight.zero_()
        if not bias:
            assert not mlp(x).any()
        assert type(mlp.forward).__name__ == "PaddedMlp"


def test_mlps_that_stay() -> None:
    class Swapped(Gated):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))

    for mlp in (Gated(48).to(torch.bfloat16), Gated(44), Swapped(44).to(torch.bfloat16)):
        assert speed_up_tower(mlp) == 0
    tower = nn.ModuleList([Gated(44).to(torch.bfloat16)])
    assert speed_up_tower(tower, beside=tower[0]) == 0


def test_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen2_5_vl", CHANGES["qwen2_5_vl"])
    norm = next(x for x in model.modules() if type(x).__name__ == "Qwen2_5_VLRMSNorm")
    torch.nn.init.normal_(norm.weight)  # type: ignore[arg-type]
    x = torch.randn(2, 3, len(norm.weight), dtype=torch.float32)  # type: ignore[arg-type]
    expected = norm(x)
    assert speed_up_tower(nn.ModuleList([norm])) == 1
    monkeypatch.setattr(type(norm), "forward", lambda self, x: pytest.fail("its own code has run"))
    with torch.no_grad():
        torch.testing.assert_close(norm(x), expected)
    assert speed_up_tower(nn.ModuleList([nn.LayerNorm(8, bias=False)])) == 0, "it subtracts the mean"


def test_parameters_that_get_other_memory_are_used() -> None:
    """As those of an engine that sleeps, or of a model that is moved."""
    mlp = Gated(44).to(torch.bfloat16)
    with torch.no_grad():
        speed_up_tower(mlp)
        x = torch.randn(3, 32, dtype=torch.bfloat16)
        assert mlp(x).any()
        for parameter in mlp.parameters():
            parameter.data = torch.zeros_like(parameter)
        assert not mlp(x).any()
    mlp.float()
    assert mlp(x.float()).dtype == torch.float32


def test_gradients_reach_the_parameters() -> None:
    mlp = Gated(44).to(torch.bfloat16)
    norm = nn.RMSNorm(32, eps=1e-6)
    speed_up_tower(nn.ModuleList([mlp, norm]))
    mlp(norm(torch.randn(3, 32)).bfloat16()).sum().backward()
    assert all(x.grad is not None and x.grad.any() for x in (*mlp.parameters(), *norm.parameters()))


def test_an_engine_that_sleeps_encodes_with_the_new_weights() -> None:
    changes = CHANGES["qwen2_5_vl"]
    changes = changes | {"vision_config": {"intermediate_size": 44}}
    model = tiny_model("qwen2_5_vl", changes).to(torch.bfloat16)  # type: ignore[arg-type]
    engine = Engine(EngineConfig(num_pages=32, max_model_len=128), model=model)
    reader = engine._runner.images.reader  # type: ignore[union-attr]
    image = one_image("qwen2_5_vl", model, seed=0)
    before = reader.encode(image).embeds
    padded = [type(vars(x).get("forward")).__name__ for x in model.modules()].count("PaddedMlp")
    assert padded
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.clone()
            if "visual" in name and "down_proj" in name:
                parameter.zero_()
    engine.update_weights([])  # as after values that were written into the parameters
    assert not engine._residence.settle(), "nothing has moved since, so that nothing is fused and captured again"
    plain = ImageReader(copy.deepcopy(model), speeds_up=False).encode(image).embeds
    torch.testing.assert_close(reader.encode(image).embeds, plain, rtol=0.02, atol=0.02)
    assert not torch.allclose(before, plain, rtol=0.02, atol=0.02)
    assert [type(vars(x).get("forward")).__name__ for x in model.modules()].count("PaddedMlp") == padded


@pytest.mark.parametrize("change", [{"eager": True}, {"fusion": False}], ids=["eager", "without fusion"])
def test_a_setting_keeps_the_code_of_towers(change: dict[str, bool]) -> None:
    model = tiny_model("qwen2_5_vl", CHANGES["qwen2_5_vl"])
    Engine(EngineConfig(num_pages=32, max_model_len=128, **change), model=model)
    assert "forward" not in vars(next(x for x in model.modules() if isinstance(x, nn.Conv3d)))
