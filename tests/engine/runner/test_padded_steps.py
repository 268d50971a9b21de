"""Padding of steps: what it says, and that padding made ahead of a step is the same as padding made for it."""

from __future__ import annotations

import numpy as np
import torch

from fa_serve.engine import SamplingParams
from fa_serve.engine.runner import padded_steps
from fa_serve.engine.runner.padded_steps import PaddedSteps, Shape, padding

CPU = torch.device("cpu")


def test_padding_holds_no_keys_and_writes_none() -> None:
    arrays = {
        "input_ids": np.array([7, 8, 9]),
        "position_ids": np.array([4, 0, 1]),
        "slot_mapping": np.array([20, 32, 33]),
        "slots": np.array([3, 1]),
        "seqused_k": np.array([5, 2]),
        "cu_seqlens_q": np.array([0, 1, 3]),
        "logits_indices": np.array([2]),
    }
    assert {
        name: array.tolist() for name, array in PaddedSteps(CPU, states=False).padded(arrays, Shape(5, 6, 5, 1024)).items()
    } == {
        "input_ids": [7, 8, 9, 0, 0],
        "position_ids": [4, 0, 1, 0, 0],
        "slot_mapping": [20, 32, 33, -1, -1],
        "slots": [3, 1, 0, 0, 0, 0],
        "seqused_k": [5, 2, 0, 0, 0, 0],
        "cu_seqlens_q": [0, 1, 3, 4, 5, 5, 5],
        "logits_indices": [2, 0, 0, 0, 0, 0],
    }


def test_the_fields_of_a_step_with_drafts_are_padded() -> None:
    """Two sequences, with two drafts and without drafts, in a step for four sequences of three tokens."""
    inputs = {
        "input_ids": np.array([7, 8, 9, 5]),
        "slots": np.array([3, 1]),
        "cu_seqlens_q": np.array([0, 3, 4]),
        "logits_indices": np.array([0, 1, 2, 3]),
    }
    padded = PaddedSteps(CPU, states=False).padded(inputs, Shape(12, 4, 3, 64))
    assert padded["input_ids"].tolist() == [7, 8, 9, 5] + [0] * 8
    assert padded["cu_seqlens_q"].tolist() == [0, 3, 4, 5, 6]
    assert padded["logits_indices"].tolist() == [0, 1, 2, 3] + [0] * 8


def test_staged_padding_serves_one_step_of_its_shape() -> None:
    steps = PaddedSteps(CPU, states=False)
    shape = Shape(3, 3, 1, 64)
    full = {name: array + 1 for name, array in padding(shape).items() if name != "cu_seqlens_q"}
    full["cu_seqlens_q"] = np.array([0, 1, 2, 3])
    one = {name: array[:1] for name, array in full.items()} | {"cu_seqlens_q": np.array([0, 1])}
    steps.stage(shape)
    first = steps.padded(full, shape)
    second = steps.padded(one, shape)
    assert first["input_ids"].tolist() == [1, 1, 1], "later steps leave it alone: it may not have been copied yet"
    assert second["input_ids"].tolist() == [1, 0, 0]
    steps.stage(shape)
    other = steps.padded(one, Shape(2, 2, 1, 64))
    assert other["input_ids"].tolist() == [1, 0], "of another shape than the staged one"


def test_the_padding_of_the_next_step_is_made_behind_the_launch(make_engine, replays, monkeypatch) -> None:
    """In a run of equal steps, no padding is made between the results of a step and the launch of the next one."""
    made: list[tuple[int, Shape]] = []
    real = padded_steps.padding
    monkeypatch.setattr(
        padded_steps, "padding", lambda shape, states: made.append((len(replays), shape)) or real(shape, states=states)
    )
    engine = make_engine()
    engine._runner.make_graphs()
    engine.generate([[3, 4, 5]], SamplingParams(max_tokens=6, temperature=0.0))
    assert len(replays) == 4, "an eager step, a step that captures, and four that replay"
    assert [count for count, shape in made] == [0, 0, 1, 2, 3, 4], "for the first step, and behind each launch"
