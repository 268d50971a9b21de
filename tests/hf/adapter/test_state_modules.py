"""Which modules keep states, and their own code with other functions."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from hf_families import BY_NAME as WITHOUT_STATES
from hf_families import tokens
from hybrids import BY_NAME, HYBRIDS
from torch import nn
from transformers import AutoConfig, DynamicCache
from transformers.models.qwen3_5 import modeling_qwen3_5

import fa_serve
from fa_serve import hf
from fa_serve.hf.adapter.releases import CACHE_NAMES
from fa_serve.hf.adapter.state_modules import (
    PatchedMixer,
    _own_forward_with,
    convolution,
    exchanged_functions,
    find_state_modules,
)
from fa_serve.hf.adapter.step_cache import StepCache
from fa_serve.spec import UnsupportedModelError


def test_modules_are_found_by_what_their_code_calls() -> None:
    found = {family.name: {type(x).__name__ for x in find_state_modules(family.build())} for family in HYBRIDS[1:5:2]}
    assert found == {"qwen3.5": {"Qwen3_5GatedDeltaNet"}, "olmo-hybrid": {"OlmoHybridGatedDeltaNet"}}
    mamba = find_state_modules(BY_NAME["mamba"].build())[0]
    assert exchanged_functions(mamba) == ["causal_conv1d_fn", "mamba_selective_scan"]
    assert find_state_modules(WITHOUT_STATES["llama"].build()) == []


@torch.no_grad()
def test_a_seat_is_that_of_one_instance() -> None:
    """Its module and its class stay as they are, and a copy of the module has another patched forward."""
    model = BY_NAME["qwen3.5"].build()
    before = modeling_qwen3_5.causal_conv1d_fn
    ids = tokens(2, 9)
    expected = model(input_ids=ids).logits
    mixers = find_state_modules(model)
    for number, mixer in enumerate(mixers):
        mixer.forward = PatchedMixer(mixer, number)
    assert modeling_qwen3_5.causal_conv1d_fn is before
    torch.testing.assert_close(model(input_ids=ids).logits, expected, atol=1e-4, rtol=1e-4)
    other = copy.deepcopy(model)
    for mine, its in zip(mixers, find_state_modules(other), strict=True):
        assert its.forward.module is its
        assert mine.forward.module is mine
    torch.testing.assert_close(other(input_ids=ids).logits, expected, atol=1e-4, rtol=1e-4)
    if "_kernel_funcs" not in vars(mixers[0]):  # functions of the package `kernels`, which cannot be pickled
        restored = pickle.loads(pickle.dumps(mixers[0]))
        assert restored.forward.module is restored


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3.5", "olmo-hybrid", "nemotron-h"])
def test_a_seat_is_compiled_in_one_graph(name: str) -> None:
    model = BY_NAME[name].build()
    ids = tokens(2, 9)
    expected = model(ids, use_cache=False).logits
    for number, mixer in enumerate(find_state_modules(model)):
        mixer.forward = PatchedMixer(mixer, number)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids, use_cache=False).logits, expected, atol=1e-4, rtol=1e-4)


def test_seats_share_no_code_object_which_torch_compile_would_take_for_one_function() -> None:
    model = BY_NAME["kimi-linear"].build(num_hidden_layers=3, layer_types=[*["linear_attention"] * 2, "full_attention"])
    mixers = find_state_modules(model)
    forwards = [_own_forward_with(mixer, {}).__closure__[0].cell_contents for mixer in mixers]
    decorators = [forward.__code__ for forward in forwards]
    assert len({id(code) for code in (*decorators, type(mixers[0]).forward.__code__)}) == 3
    codes = [inspect.unwrap(forward).__code__ for forward in forwards]
    assert len({id(code) for code in (*codes, inspect.unwrap(type(mixers[0]).forward).__code__)}) == 3


@torch.no_grad()
@pytest.mark.parametrize("name", CACHE_NAMES)
def test_a_seat_takes_a_cache_by_each_name_that_releases_have_for_it(name: str) -> None:
    model = BY_NAME["qwen3.5"].build()
    mixer = find_state_modules(model)[0]
    cache = DynamicCache(config=model.config)
    hidden = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0))
    expected = mixer(hidden)
    torch.testing.assert_close(PatchedMixer(mixer, 0)(hidden, **{name: cache}), expected, atol=1e-5, rtol=1e-4)
    assert cache.has_previous_state(mixer.layer_idx)


class Keeper(nn.Module):
    """Keeps a state by arithmetic that it does itself."""

    def forward(self, hidden_states: torch.Tensor, past_key_values: Any = None) -> torch.Tensor:
        past_key_values.update_recurrent_state(hidden_states, 0)
        return hidden_states.cumsum(1)


def causal_conv1d_fn(hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("a PatchedMixer exchanges this function")


def convolve(hidden_states: torch.Tensor, weight: torch.Tensor, cache: Any, *, activation: str | None = None) -> torch.Tensor:
    """As `causal_conv1d_forward` of transformers 5.25: a part of a mixer's code, which reads and updates the cache."""
    if cache is not None:
        hidden_states = cache.update_conv_state(hidden_states, 0)
    return causal_conv1d_fn(hidden_states, weight)


class ByFunction(nn.Module):
    """As mixers of transformers 5.25: a function of its modeling module updates the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, hidden_states: torch.Tensor, cache: Any = None) -> torch.Tensor:
        return convolve(hidden_states, self.weight, cache)


def as_module(function: Any) -> nn.Module:
    """What the package `kernels` makes of a function."""

    class Function(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    return Function()


@torch.no_grad()
@pytest.mark.parametrize("is_module", [False, True], ids=["function", "module"])
def test_a_function_that_updates_the_cache_is_part_of_the_module(is_module: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_module:
        monkeypatch.setitem(globals(), "convolve", as_module(convolve))
    module = ByFunction()
    model = nn.Sequential(nn.Linear(2, 2), module)
    assert find_state_modules(model) == [module]
    assert exchanged_functions(module) == ["causal_conv1d_fn"]
    x = torch.randn(1, 4, 9)
    expected = nn.functional.conv1d(nn.functional.pad(x, (2, 0)), module.weight[:, None], groups=4)
    for cache in (None, StepCache(torch.arange(9))):
        torch.testing.assert_close(PatchedMixer(module, 0)(x, cache=cache), expected, atol=1e-5, rtol=1e-4)
    with pytest.raises(NotImplementedError):
        module(x)


def test_a_module_that_calls_no_known_function_has_no_seat() -> None:
    assert find_state_modules(nn.Sequential(Keeper()))
    with pytest.raises(UnsupportedModelError, match="Keeper keeps a state with code that fa_serve cannot replace"):
        PatchedMixer(Keeper(), 0)


def test_an_activation_that_is_not_known() -> None:
    with pytest.raises(UnsupportedModelError, match="must have the activation None or silu, got gelu"):
        convolution(lambda *args: None, torch.zeros(1, 2, 3), torch.zeros(2, 2), activation="gelu")


@torch.no_grad()
def test_a_forward_on_the_meta_device_has_shapes() -> None:
    model = fa_serve.patch(BY_NAME["nemotron-h"].build()).to("meta")
    ids = torch.zeros(2, 12, dtype=torch.long, device="meta")
    assert model(ids).logits.shape == (2, 12, model.config.vocab_size)


def test_what_the_layers_of_a_model_keep_is_found_from_its_config() -> None:
    """Layers without attention and without states, as the MLP of Nemotron-H, keep nothing."""
    layers = hf.model_layers(BY_NAME["nemotron-h"].make_config())
    assert list(layers.attention) == [1]
    assert [(key.module, key.call, spec.kind, spec.page) for key, spec in layers.states.items()] == [
        (0, 0, "conv", (3, 192)),
        (0, 1, "linear", (8, 16, 16)),
    ]
    shared = hf.model_layers(BY_NAME["zamba2"].make_config())
    assert list(shared.attention) == [1, 2]
    several = hf.model_layers(BY_NAME["zamba"].make_config())
    assert [(key.module, key.call, spec.kind) for key, spec in several.states.items()][:3] == [
        (0, 0, "conv"),
        (0, 1, "scan"),
        (0, 2, "scan"),
    ]


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("zaya", "ZayaCCAProjection keeps a state with code that fa_serve cannot replace"),
    ],
)
def test_models_whose_states_are_not_known(model_type: str, reason: str) -> None:
    small = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 32, "num_attention_heads": 4}
    with pytest.raises(UnsupportedModelError, match=reason):
        hf.check_model(AutoConfig.for_model(model_type, **small))
