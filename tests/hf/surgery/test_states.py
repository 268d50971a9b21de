"""Models with recurrent or convolution states in the engine's forward: the logits of whole sequences, and what is refused."""

from __future__ import annotations

import copy
import functools
import sys
from typing import Any

import pytest
import torch
from hf_families import Family, tokens
from hybrids import BY_NAME, HYBRIDS, HybridPages
from torch import Tensor, nn
from transformers.models.lfm2.modeling_lfm2 import causal_conv1d_fn

import fa_serve
from fa_serve.hf.adapter.state_modules import PatchedMixer, find_state_modules
from fa_serve.hf.surgery.states import patch_states
from fa_serve.spec import UnsupportedModelError

NAMES = {"qwen3.5-moe", "kimi-linear", "nemotron-h", "jamba", "lfm2", "zamba", "zamba2", "mamba", "minimax", "recurrent-gemma"}
"""Each kind of state, a mixer with several scans, and attention that layers share; the engine's tests have all families."""
TOLERANCE = 1e-4  # relative to the largest logit: in float32, transformers' own code is off by 6e-5 of the result in float64


def assert_near(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE, f"error {error:.1e}"


@pytest.mark.parametrize("family", [x for x in HYBRIDS if x.name in NAMES], ids=lambda family: family.name)
@torch.no_grad()
def test_steps_of_the_engine_give_the_logits_of_whole_sequences(family: Family) -> None:
    """Packed prompts, chunks, few rows at any position, drafts that are dropped, pages that fill, and a sequence that rests."""
    eager = family.build()
    ids = tokens(2, 45)
    expected = eager(input_ids=ids).logits
    ours = fa_serve.patch(copy.deepcopy(eager))
    patch_states(ours)
    pages = HybridPages(ours, 2)
    wrong = tokens(2, seed=1)

    def step(spans: dict[int, tuple[int, int]], dropped: int = 0) -> None:
        new = {b: torch.cat([ids[b, first:last], wrong[:dropped]]) for b, (first, last) in spans.items()}
        for b, logits in pages.step(new, dropped=dict.fromkeys(new, dropped)).items():
            first, last = spans[b]
            assert_near(logits[: last - first], expected[b, first:last])

    step({0: (0, 20), 1: (0, 3)})  # a chunk beside few rows
    step({0: (20, 38), 1: (3, 14)})
    step({1: (14, 15)}, dropped=2)  # the drafts fill a page
    step({0: (38, 39), 1: (15, 16)})
    step({0: (39, 45), 1: (16, 33)})
    step({1: (33, 34)})


class Doubled(nn.Module):
    """A short convolution, and a sum over all rows that it is given."""

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, hidden_states: Tensor, cache: Any = None, past_key_values: Any = None, **unused: Any) -> Tensor:
        for given in (cache, past_key_values):  # the name depends on the release of transformers
            if given is not None:
                given.update_conv_state(hidden_states.mT, 0, conv_kernel_size=3)
        out: Tensor = causal_conv1d_fn(hidden_states.mT, self.conv.conv.weight.squeeze(1), self.conv.conv.bias).mT
        return out + hidden_states.cumsum(1)


@torch.no_grad()
def test_a_module_that_computes_something_else_is_refused() -> None:
    """It sums over the rows of a sequence beside its convolution, which steps of the engine would sum over a step alone."""
    model = BY_NAME["lfm2"].build()
    model.set_attn_implementation("fa_serve")
    layer: Any = model.model.layers[0]
    layer.conv = Doubled(layer.conv)
    with pytest.raises(
        UnsupportedModelError, match=r"Lfm2ForCausalLM keeps states that cannot be paged \(Doubled: the results of its linear"
    ):
        patch_states(model)
    assert "forward" not in vars(layer.conv)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "function"),
    [("qwen3.5", "torch_chunk_gated_delta_rule"), ("lfm2", "causal_conv1d_fn"), ("jamba", "mamba_selective_scan")],
)
def test_packages_that_round_otherwise_do_not_matter(name: str, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers takes the functions of flash-linear-attention, causal-conv1d and mamba-ssm where they are installed."""
    model = BY_NAME[name].build()
    model.set_attn_implementation("fa_serve")
    (module, *_) = find_state_modules(model)
    functions = sys.modules[type(module).__module__].__dict__
    own = functions[function]

    @functools.wraps(own)
    def rounded(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        out, *rest = found if isinstance(found, tuple) else (found,)
        out = out.bfloat16().to(out.dtype)
        return (out, *rest) if isinstance(found, tuple) else out

    monkeypatch.setitem(functions, function, rounded)
    patch_states(model)
    assert all(isinstance(vars(x)["forward"], PatchedMixer) for x in find_state_modules(model))


@torch.no_grad()
def test_a_module_with_hooks_is_refused_and_nothing_stays_patched() -> None:
    model = BY_NAME["jamba"].build(num_hidden_layers=4)
    model.set_attn_implementation("fa_serve")
    mixers = find_state_modules(model)
    mixers[1].in_proj.register_forward_hook(lambda *args: None)
    with pytest.raises(UnsupportedModelError, match="JambaMambaMixer: its Linear has hooks, which would not be called"):
        patch_states(model)
    assert not any(isinstance(vars(x).get("forward"), PatchedMixer) for x in mixers)
    assert model.training is False


@pytest.mark.parametrize(
    ("name", "uncalled"), [("jamba", {"dt_proj"}), ("mamba", {"dt_proj"}), ("bamba", set()), ("lfm2", set())]
)
def test_linear_layers_whose_weights_are_read_are_known(name: str, uncalled: set[str]) -> None:
    model = BY_NAME[name].build()
    fa_serve.patch(model)
    forwards = [vars(module)["forward"] for module in find_state_modules(copy.deepcopy(model))]
    assert [each.uncalled for each in forwards] == [uncalled] * len(forwards)
