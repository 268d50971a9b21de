"""Training through `attn_implementation="fa_serve"`: the losses of a few steps are those of eager attention."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hf_families import BY_NAME, cached, tokens
from opaque_backend import opaque_backend
from tiny_models import make_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, T5Config, T5ForConditionalGeneration

import fa_serve
from fa_serve.demo import model_path
from fa_serve.spec import UnsupportedModelError


def losses(model: torch.nn.Module, ids: Tensor, mask: Tensor, steps: int) -> list[float]:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for _ in range(steps):
        loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_the_embedded_model_learns_what_it_learns_with_eager_attention() -> None:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(4, 200, (2, 24), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 18:] = 0
    found = []
    for name in ("eager", "fa_serve"):
        model = AutoModelForCausalLM.from_pretrained(model_path(), attn_implementation=name, dtype=torch.float32)
        found.append(losses(model, ids, mask, 5))
    torch.testing.assert_close(found[1], found[0], atol=2e-3, rtol=2e-3)
    assert found[1][-1] < found[1][0]


@pytest.mark.slow
def test_200_steps_end_where_eager_attention_ends() -> None:
    """Each step has a new batch of padded progressions, so small differences of gradients could grow."""
    found = []
    for name in ("eager", "fa_serve"):
        generator = torch.Generator().manual_seed(7)
        model = make_model().train()
        model.set_attn_implementation(name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        losses = []
        with opaque_backend() if name == "fa_serve" else nullcontext() as backend:
            for _ in range(200):
                first, step = torch.randint(1, 16, (2, 4, 1), generator=generator)
                ids = (first + step * torch.arange(20)) % 32
                mask = (torch.arange(20) < torch.tensor([[20], [20], [17], [9]])).long()
                loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        found.append(losses)
    assert {spec.op for spec, _ in backend.planned} == {"attention", "backward"}
    last_eager, last = (sum(losses[-20:]) / 20 for losses in found)
    assert last < 0.3 * found[1][0], "it has learned"
    assert last == pytest.approx(last_eager, rel=0.02)


def _checkpointed(model: torch.nn.Module) -> Callable[..., Tensor]:
    # transformers has renamed it after 5.17
    enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    return lambda **given: model(**given).loss


def _compiled(model: torch.nn.Module) -> Callable[..., Tensor]:
    torch.compiler.reset()
    return torch.compile(lambda **given: model(**given).loss, fullgraph=True, backend="eager")


@pytest.mark.parametrize("way", [_checkpointed, _compiled])
def test_checkpointing_and_graphs_have_the_gradients_of_eager_attention(way: Callable[..., Callable[..., Tensor]]) -> None:
    ids = torch.randint(1, 300, (2, 15), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, 11:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    gradients = []
    for name in ("eager", "fa_serve"):
        model = make_model().train()
        model.set_attn_implementation(name)
        with opaque_backend():
            attend = way(model) if name == "fa_serve" else lambda model=model, **given: model(**given).loss
            attend(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).backward()
        gradients.append({key: p.grad for key, p in model.named_parameters()})
    for key, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], expected, atol=1e-5, rtol=1e-3, msg=key)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_cache_that_checkpointed_layers_leave_out_is_refused(family: str) -> None:
    """As with prefix tuning, whose virtual tokens are a cache: the mask has them, and the layers drop them."""
    model = fa_serve.patch(BY_NAME[family].build())
    with torch.no_grad():
        cache = model(tokens(2, 3), use_cache=True).past_key_values
    given = {"input_ids": tokens(2, 6), **cached(model, cache)}
    loss = _checkpointed(model.train())
    with pytest.raises(UnsupportedModelError, match=r"a mask for \d+ keys needs a call with as many, got 6 from"):
        loss(**given, labels=tokens(2, 6))


@pytest.mark.parametrize("family", ["gpt-oss", "gemma2"])
def test_sinks_softcap_and_windows_have_gradients(family: str) -> None:
    gradients = []
    for model in (BY_NAME[family].build(), fa_serve.patch(BY_NAME[family].build())):
        model(tokens(2, 14)).logits.square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, atol=1e-4, rtol=1e-3, msg=name)


def test_the_position_bias_of_t5_has_a_gradient() -> None:
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2, decoder_start_token_id=0, dropout_rate=0.0
    )
    ids = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    gradients = []
    for name in ("eager", "fa_serve"):
        torch.manual_seed(0)
        model = T5ForConditionalGeneration._from_config(config, attn_implementation=name)
        model(input_ids=ids, labels=ids).loss.backward()
        bias = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad
        assert bias is not None
        assert bias.any()
        gradients.append(bias)
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("family", ["llama", "deepseek-v3", "gpt-oss", "t5"])
def test_gradients_under_autocast_are_as_exact_as_those_of_eager_attention(family: str, use_cache: bool) -> None:
    """With weights of float32, rotary positions give q and k in float32, and v is in bfloat16 if no cache promotes it."""
    ids = tokens(2, 14)
    labels = {"labels": ids} if family == "t5" else {}
    gradients = []
    for name, enabled in (("eager", False), ("eager", True), ("fa_serve", True)):
        model = BY_NAME[family].build()
        model.set_attn_implementation(name)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            logits = model(ids, use_cache=use_cache, **labels).logits
        logits.float().square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    exact, eager, ours = gradients
    assert (ours - exact).norm() <= 2 * (eager - exact).norm()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of PyTorch's operator, whose samples are expected
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_gradients_of_each_sample_of_a_padded_batch(family: str) -> None:
    ids = tokens(3, 12)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    mask[1, -2:] = 0
    gradients = []
    for name in ("eager", "fa_serve"):
        model = BY_NAME[family].build()
        model.set_attn_implementation(name)

        def loss(parameters: dict[str, Tensor], ids: Tensor, mask: Tensor, model: PreTrainedModel = model) -> Tensor:
            inputs = {"attention_mask": mask[None], "use_cache": False}
            logits: Tensor = torch.func.functional_call(model, parameters, (ids[None],), inputs).logits[0]
            return (logits * mask[:, None]).square().sum()

        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        gradients.append(torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, ids, mask))
    for name, expected in gradients[0].items():
        assert (gradients[1][name] - expected).abs().max() <= 1e-5 * expected.abs().max(), name
