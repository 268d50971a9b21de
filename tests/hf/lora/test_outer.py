"""Adapters of the embedding and the head change the tokens and the rows of logits that are theirs."""

from __future__ import annotations

import pytest
import torch
from tiny_models import make_model

from fa_serve.hf.lora.format import AdapterConfig, LoraAdapter, LowRank
from fa_serve.hf.lora.outer import OuterModules
from fa_serve.hf.lora.product import LoraStep, StepHolder
from fa_serve.ops import LoraBatch
from fa_serve.spec import ParameterError

EMBED = "model.embed_tokens"
HEAD = LowRank(torch.ones(2, 32), torch.ones(320, 2), 0.5)
NONE = LoraBatch(*(torch.zeros(0, dtype=torch.int32) for _ in range(5)), 16)


def make(tie_word_embeddings: bool = False):
    model = make_model()
    model.config.tie_word_embeddings = tie_word_embeddings
    holder = StepHolder()
    return model, holder, OuterModules(model, holder)


def test_each_part_reaches_its_rows() -> None:
    model, holder, outer = make()
    embedding = model.model.embed_tokens.weight.detach()
    head = model.lm_head.weight.detach()
    saved = LoraAdapter(saved={EMBED: embedding + 1.0, "lm_head": head * 2.0})
    low = LoraAdapter(
        {"lm_head": LowRank(torch.ones(2, 32), torch.ones(320, 2), 0.5)},
        {EMBED: LowRank(torch.ones(2, 320), torch.ones(32, 2), 3.0)},
    )
    outer.write(4, outer.pack(saved))
    outer.write(7, outer.pack(low))
    ids = torch.tensor([[5, 6, 7]])
    x = torch.randn(1, 2, 32)
    step = LoraStep(NONE, [(4, torch.tensor([0]), torch.tensor([1])), (7, torch.tensor([2]), torch.tensor([0]))])
    with torch.no_grad(), holder.serving(step):
        found = model.model.embed_tokens(ids)[0]
        logits = model.lm_head(x)[0]
    torch.testing.assert_close(found, torch.stack([embedding[5] + 1.0, embedding[6], embedding[7] + 6.0]))
    torch.testing.assert_close(logits[1], x[0, 1] @ head.t() * 2.0)
    torch.testing.assert_close(logits[0], x[0, 0] @ head.t() + x[0, 0].sum())
    assert torch.equal(model.model.embed_tokens(ids)[0], embedding[[5, 6, 7]])


def test_weights_that_are_those_of_the_base_take_nothing() -> None:
    model, _, outer = make()
    same = {EMBED: model.model.embed_tokens.weight.detach().clone(), "lm_head": model.lm_head.weight.detach().clone()}
    assert outer.pack(LoraAdapter(saved=same)) is None
    assert outer.pack(LoraAdapter()) is None


@pytest.mark.parametrize(
    ("adapter", "field"),
    [
        (LoraAdapter(saved={"model.norm": torch.ones(1, 32)}), "modules_to_save"),
        (LoraAdapter(saved={"model.layers.0.mlp.up_proj": torch.ones(48, 32)}), "modules_to_save"),
        (LoraAdapter(saved={"lm_head": torch.ones(321, 32)}), "lm_head.weight"),
        (LoraAdapter(embeddings={EMBED: LowRank(torch.ones(2, 321), torch.ones(32, 2), 1.0)}), EMBED),
        (LoraAdapter({"lm_head": LowRank(torch.ones(2, 31), torch.ones(320, 2), 1.0)}), "lm_head"),
        (LoraAdapter({"lm_head": LowRank(torch.ones(2, 32), torch.ones(320, 2), 1.0, None, torch.ones(320))}), "use_dora"),
    ],
)
def test_what_does_not_fit_is_refused(adapter, field) -> None:
    _, _, outer = make()
    with pytest.raises(ParameterError) as caught:
        outer.pack(adapter)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "part", [{"saved": {EMBED: torch.ones(320, 32)}}, {"modules": {"lm_head": HEAD}}], ids=["whole", "low"]
)
def test_an_adapter_that_ties_what_the_model_ties_is_refused(part) -> None:
    """peft would give the head what the adapter has for the embedding. An adapter of neither ties nothing."""
    tying = AdapterConfig(tying=True)
    _, _, untied = make()
    assert untied.pack(LoraAdapter(**part, config=tying)) is not None
    _, _, tied = make(tie_word_embeddings=True)
    with pytest.raises(ParameterError, match=r"ensure_weight_tying must be false for an adapter of model.embed_tokens or lm_h"):
        tied.pack(LoraAdapter(**part, config=tying))
    assert tied.pack(LoraAdapter(**part)) is not None
    assert tied.pack(LoraAdapter(config=tying)) is None


def test_the_weights_of_a_slot_go_with_its_adapter() -> None:
    model, _, outer = make()
    outer.write(1, outer.pack(LoraAdapter(saved={"lm_head": model.lm_head.weight.detach() * 2.0})))
    assert outer._slots
    outer.write(1, None)
    assert not outer._slots
