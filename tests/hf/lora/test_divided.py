"""Ranks that keep a part of a model keep the same part of its adapters, and give peft's logits together."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_families import BY_NAME
from latent_families import LATENT
from peft_adapters import ATTENTION, PeftForwards, save_adapter
from rank_threads import run_ranks
from sampled_cases import ALL
from tiny_models import make_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from fa_serve.engine.runner.lora_arrays import tile_arrays
from fa_serve.hf import patch, plan_division
from fa_serve.hf.adapter.paged import OneSequence, paged_forward
from fa_serve.hf.lora import divided as divided_module
from fa_serve.hf.lora import memory as memory_module
from fa_serve.hf.lora.format import LoraAdapter, LowRank, read_adapter
from fa_serve.hf.lora.memory import LoraMemory
from fa_serve.hf.lora.product import LoraStep
from fa_serve.hf.surgery.divide.sections import Cut, RankPart, Section, set_rank_part
from fa_serve.hf.surgery.divide.weights import divide_model
from fa_serve.spec import ParameterError

CPU = torch.device("cpu")
IDS = torch.arange(5, 20)
COLUMNS = "model.layers.0.self_attn.o_proj"
ROWS = "model.layers.0.self_attn.q_proj"


def family(name: str) -> PreTrainedModel:
    return (BY_NAME | {each.name: each for each in LATENT})[name].build()


def tied() -> PreTrainedModel:
    model = make_model("gemma3")
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.get_input_embeddings().weight
    return model


BASES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": make_model,
    "qwen3": lambda: make_model("qwen3"),
    "gemma3": lambda: make_model("gemma3"),
    "tied": tied,
    "qwen3-moe": lambda: make_model("qwen3-moe"),
    "olmo2": lambda: family("olmo2"),  # a norm of all heads, so that its queries are whole on each rank
    "phi3": lambda: family("phi3"),  # merged projections, whose rows are divided by sections
    "deepseek-v3": lambda: family("deepseek-v3"),  # latent keys
}

TARGETS = {
    "qwen3-moe": ATTENTION,
    "deepseek-v3": [
        "q_a_proj",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "o_proj",
    ],
}


@torch.no_grad()
def step_logits(memory: LoraMemory, model: PreTrainedModel, slots: list[int], *, outer: bool) -> Tensor:
    """Logits of a step whose tokens have these slots."""
    given = np.array(slots)
    rows, tiles = tile_arrays(given, 16)
    batch = memory.batch(torch.from_numpy(rows), torch.from_numpy(tiles), torch.tensor(slots, dtype=torch.int32), 16)
    own = [torch.from_numpy(np.flatnonzero(given == slot)) for slot in (0,)] if outer else []
    with memory.holder.serving(LoraStep(batch, [(0, tokens, tokens) for tokens in own])):
        return paged_forward(model, IDS, torch.arange(len(IDS)), OneSequence(), torch.arange(len(IDS)))


def logits_of_ranks(base: PreTrainedModel, folder: Path, size: int) -> list[tuple[Tensor, Tensor]]:
    """Of each rank: of a step whose tokens have the adapter, and of one without."""
    adapter = read_adapter(folder)
    patch(base)
    division = plan_division(base, size)

    def work(rank: int, all_reduce: Any) -> tuple[Tensor, Tensor]:
        model = copy.deepcopy(base)
        divide_model(model, division, rank, all_reduce, CPU)
        memory = LoraMemory(model, budget=1 << 24, max_rank=40, max_pages=8)
        packed = memory.pack(adapter)
        memory.write(packed, slot=0, pages=list(range(packed.num_pages)))
        outer = packed.outer is not None
        return tuple(step_logits(memory, model, [slot] * len(IDS), outer=outer) for slot in (0, -1))  # type: ignore[return-value]

    return run_ranks(size, work)


def differences(base: Callable[[], PreTrainedModel], folder: Path, size: int) -> list[float]:
    """Between the logits of ranks and those of peft, with the adapter and without, over the largest logit."""
    peft = PeftForwards(base(), {"x": folder})
    expected = [peft.logits(name, IDS.tolist()) for name in ("x", None)]
    assert float((expected[0] - expected[1]).abs().max()) > 0.1 * float(expected[1].abs().max()), "the adapter changes much"
    found = logits_of_ranks(base(), folder, size)
    assert all(torch.equal(one, first) for pair in found for one, first in zip(pair, found[0], strict=True))
    return [float((one - e).abs().max() / e.abs().max()) for one, e in zip(found[0], expected, strict=True)]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", [name for name in BASES if ALL or name not in ("llama", "qwen3", "gemma3")])
def test_ranks_give_the_logits_of_peft(tmp_path: Path, name: str, size: int) -> None:
    """Two heads of keys and values, which four ranks share. The next test has llama and gemma3."""
    targets = TARGETS.get(name, "all-linear")
    folder = save_adapter(tmp_path / "a", model=BASES[name](), r=20, target_modules=targets)
    assert max(differences(BASES[name], folder, size)) < 1e-5


KINDS = {
    "bias": {"lora_bias": True},
    "dora": {"use_dora": True, "target_modules": ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]},
    "embedding": {"target_modules": [*ATTENTION, "embed_tokens"]},
    "head": {"target_modules": [*ATTENTION, "lm_head"]},
    "whole weights": {"target_modules": ATTENTION, "modules_to_save": ["lm_head", "embed_tokens"]},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_every_kind_of_adapter_is_divided(tmp_path: Path, name: str, kind: str) -> None:
    """A rank has the rows of its tokens of the embedding and of the head. That of gemma3 is scaled."""
    folder = save_adapter(tmp_path / "a", model=BASES[name](), r=16, **KINDS[kind])
    assert max(differences(BASES[name], folder, 2)) < 1e-5


def test_experts_are_divided(tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "a", model=BASES["qwen3-moe"](), target_modules=["gate_proj", "up_proj", "down_proj"])
    assert max(differences(BASES["qwen3-moe"], folder, 2)) < 1e-5


def b_of_another_rank(name: str, low: LowRank, module: nn.Module) -> LowRank:
    if name != ROWS:
        return divided_module.part_of_low_rank(name, low, module)
    half = len(low.b) // 2
    return LowRank(low.a, low.b[:half], low.scale, None if low.bias is None else low.bias[:half])


def bias_on_every_rank(name: str, low: LowRank, module: nn.Module) -> LowRank:
    found = divided_module.part_of_low_rank(name, low, module)
    return LowRank(found.a, found.b, found.scale, low.bias) if name == COLUMNS else found


@pytest.mark.parametrize("fault", [b_of_another_rank, bias_on_every_rank])
def test_faults_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    folder = save_adapter(tmp_path / "a", lora_bias=True)
    monkeypatch.setattr(memory_module, "part_of_low_rank", fault)
    with_adapter, without = differences(make_model, folder, 2)
    assert with_adapter > 1e-3
    assert without < 1e-5


def test_parts_of_matrices() -> None:
    a = torch.arange(12.0).view(2, 6)
    b = torch.arange(8.0).view(4, 2)
    bias = torch.arange(4.0)
    whole = LowRank(a, b, 0.5, bias)
    for rank in (0, 1):
        rows = divided_module.part_of_low_rank("x", whole, divided_linear(0, 4, rank))
        half = slice(2 * rank, 2 * rank + 2)
        assert torch.equal(rows.a, a)
        assert torch.equal(rows.b, b[half])
        assert torch.equal(rows.bias, bias[half])
        columns = divided_module.part_of_low_rank("x", whole, divided_linear(1, 6, rank))
        assert torch.equal(columns.a, a[:, 3 * rank : 3 * rank + 3])
        assert torch.equal(columns.b, b)
        assert columns.bias.tolist() == ([0.0] * 4 if rank else bias.tolist())
    assert divided_module.whole_sizes(divided_linear(0, 4, 1), 2, 6) == (4, 6)
    assert divided_module.whole_sizes(divided_linear(1, 6, 1), 4, 3) == (4, 6)
    assert divided_module.part_of_low_rank("x", whole, nn.Linear(6, 4)) is whole


def divided_linear(dim: int, size: int, rank: int) -> nn.Linear:
    module = nn.Linear(1, 1)
    set_rank_part(module, "weight", RankPart(Cut(dim, (Section(size, size),)), rank, 2))
    return module


def test_what_does_not_fit_or_has_no_whole_rows_is_refused(tmp_path: Path) -> None:
    dora = save_adapter(tmp_path / "dora", use_dora=True)
    with pytest.raises(ParameterError, match=r"no rank has whole rows of .*down_proj, whose norms") as caught:
        logits_of_ranks(make_model(), dora, 2)
    assert caught.value.field == "use_dora"
    patch(base := make_model())

    def work(rank: int, all_reduce: Any) -> str:
        model = copy.deepcopy(base)
        divide_model(model, plan_division(base, 2), rank, all_reduce, CPU)
        memory = LoraMemory(model, budget=1 << 24, max_rank=16, max_pages=4)
        half = LowRank(torch.ones(2, 32), torch.ones(32, 2), 1.0)
        with pytest.raises(ParameterError) as caught:
            memory.pack(LoraAdapter({ROWS: half}))
        return str(caught.value)

    assert all("a layer of 32 columns and 64 rows" in each for each in run_ranks(2, work))
