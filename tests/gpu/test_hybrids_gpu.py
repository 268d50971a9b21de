"""Models with states through the engine on a GPU: by graphs and without, from the prefix cache, and preempted."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from hf_families import Family
from hybrids import HYBRIDS
from tiny_models import VOCAB
from transformers import GenerationConfig, PreTrainedModel

from fa_serve.engine import Engine, EngineConfig, SamplingParams

GREEDY = SamplingParams(max_tokens=14, temperature=0.0)
pytestmark = pytest.mark.usefixtures("full_float32")


def prompts(count: int, longest: int = 90) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(3, VOCAB) for _ in range(draw.randint(1, longest))] for _ in range(count)]


def generated(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """The tokens of transformers' own code."""
    ids = torch.tensor([prompt], device="cuda")
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=14, do_sample=False)  # type: ignore[operator]
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", HYBRIDS, ids=lambda family: family.name)
def test_greedy_tokens_are_those_of_generate(family: Family) -> None:
    """Three times: the second captures the steps with prompts, and the third replays them; then from the prefix cache."""
    model = family.build(vocab_size=VOCAB).to("cuda")
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=-1)
    given = prompts(8)
    expected = [generated(model, prompt) for prompt in given]
    settings: dict[str, Any] = {"device": "cuda", "max_model_len": 128, "max_num_seqs": 8, "page_size": 16, "seed": 0}
    settings |= {"max_num_batched_tokens": 192, "num_pages": 256, "num_states": 64}
    for changes in ({"prefix_caching": False}, {"eager": True}, {}, {"num_pages": 24, "num_states": 8}):
        engine = Engine(EngineConfig(**settings | changes), model=copy.deepcopy(model))
        for _ in range(3):
            assert [x.token_ids for x in engine.generate(given, GREEDY)] == expected, changes
        if changes == {"prefix_caching": False}:
            graphs = engine._runner._graphs
            assert graphs is not None
            assert {"nothing", "prompts"} <= {shape.kind for shape in graphs._replays}
        engine.check_integrity()
        assert engine.stats().num_states_used == 0
        engine.close()
