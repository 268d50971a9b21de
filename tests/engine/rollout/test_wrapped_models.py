"""A rollout engine over a model whose calls something has wrapped or compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import make_model

from fa_serve.engine import RolloutEngine, SamplingParams

SIZES: dict[str, Any] = {"device": "cpu", "num_pages": 64, "page_size": 4, "max_num_seqs": 8, "seed": 0}
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
PROMPT = [*range(5, 25)]


def test_a_model_that_accelerate_has_prepared_is_run_without_its_autocast() -> None:
    accelerate = pytest.importorskip("accelerate")
    [expected] = RolloutEngine(make_model(), **SIZES).generate([PROMPT], params=GREEDY)
    model = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(make_model())
    forward = model.forward
    [group] = RolloutEngine(model, **SIZES).generate([PROMPT], params=GREEDY)
    assert group.rollouts == expected.rollouts
    assert model.forward is forward


def test_a_model_that_is_compiled_in_place_is_run_by_its_own_code() -> None:
    """`Module.compile`, unlike `torch.compile`, leaves no wrapper around the model. Steps would be traced again and again."""
    [expected] = RolloutEngine(make_model(), **SIZES).generate([PROMPT], params=GREEDY)
    model = make_model()
    traced = []
    model.compile(backend=lambda graph, _: traced.append(graph) or graph)
    engine = RolloutEngine(model, **SIZES)
    [group] = engine.generate([PROMPT], params=GREEDY)
    assert group.rollouts == expected.rollouts
    for layer in model.model.layers:
        layer.compile(backend=lambda graph, _: traced.append(graph) or graph)
    engine.update()
    [again] = engine.generate([PROMPT], params=GREEDY)
    assert again.rollouts[0].token_ids == group.rollouts[0].token_ids
    assert not traced
    model(input_ids=torch.tensor([PROMPT]))
    assert traced, "the trainer's calls are compiled"
