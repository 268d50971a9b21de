"""examples/grpo.py: the reward rises, and each first ratio of probabilities is exactly 1."""

from __future__ import annotations

from pathlib import Path

import grpo
import pytest
import torch
from tiny_models import SIZES, make_tokenizer
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

LEARNS = ["--steps", "8", "--prompts", "2", "--samples", "8", "--max-tokens", "4", "--learning-rate", "0.02"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A tiny model with random weights, which is rewarded for small letters: it knows no Python.

    It has one layer, because exact attention takes each query by itself.
    """
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES | {"num_hidden_layers": 1}))
    model.generation_config = GenerationConfig(pad_token_id=0)
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(grpo, "reward", lambda text: sum(map(str.islower, text)) / len(text))
    return str(tmp_path)


@pytest.mark.slow
def test_the_reward_rises_and_first_ratios_are_exactly_1(folder: str) -> None:
    steps = grpo.main(["--model", folder, *LEARNS])
    rewards = [step.reward for step in steps]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15, rewards
    assert [step.first for step in steps] == [0.0] * len(steps)
    assert all(step.last > 0.0 for step in steps), "after an update the answers are another model's"


def test_the_plain_forward_has_other_ratios(folder: str) -> None:
    steps = grpo.main(["--model", folder, "--not-exact", "--steps", "2", "--samples", "4", "--max-tokens", "5"])
    assert min(step.first for step in steps) > 0.0


def test_valid_python_is_rewarded() -> None:
    assert [grpo.reward(text) for text in ("x = 1\n", "return 1", "def f(", "a\0b")] == [1.0, 1.0, 0.0, 0.0]
