"""Hidden states are read where they are asked for, and as they were."""

from __future__ import annotations

import pytest
import torch
from tiny_models import make_model
from torch import nn

from fa_serve.hf.hidden_states import HiddenStateReader
from fa_serve.spec import UnsupportedModelError


@torch.no_grad()
def test_states_are_those_of_transformers() -> None:
    """And they stay what they were, although the second layer overwrites its input, as fused layers do."""
    ids = torch.tensor([[3, 4, 5]])
    expected = make_model()(input_ids=ids, output_hidden_states=True).hidden_states
    model = make_model()

    def overwrite(_: nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        given[0].zero_()

    own = model.model.layers[1].register_forward_hook(overwrite)
    with HiddenStateReader(model, (1, 0, 2)).reading() as states:
        model(input_ids=ids)
    own.remove()
    assert [x.shape for x in states] == [(1, 3, 32)] * 3
    torch.testing.assert_close(states[0], expected[1], rtol=0, atol=0)
    torch.testing.assert_close(states[1], expected[0], rtol=0, atol=0)
    torch.testing.assert_close(model.model.norm(states[2]), expected[2], rtol=0, atol=0)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.model.layers), (
        "hooks end with the context"
    )


def test_a_failed_forward_leaves_no_hook() -> None:
    model = make_model()
    with pytest.raises(KeyError), HiddenStateReader(model, (0, 1, 2)).reading():
        raise KeyError("broken")
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.model.layers)


def test_layers_that_are_not_there() -> None:
    model = make_model()
    for depths in ((0, 1, 3), (-1, 0, 1)):
        with pytest.raises(UnsupportedModelError, match=r"it reads hidden states after .* layers, but LlamaForCausalLM has 2"):
            HiddenStateReader(model, depths)
    model.model.layers = nn.ModuleList([*model.model.layers, nn.Identity()])
    with pytest.raises(UnsupportedModelError, match="the layers of LlamaForCausalLM are not in one list"):
        HiddenStateReader(model, (0, 1, 2))
