"""The example of a LoRA fine-tune runs with PEFT and Trainer, and its losses are those of eager attention."""

from pathlib import Path

import fine_tune_lora
import pytest
from fine_tune_lora import IGNORED, differences, example
from transformers import AutoTokenizer

from fa_serve.demo import model_path
from fa_serve.hf.lora.format import read_adapter


@pytest.mark.slow
def test_it_learns_as_with_eager_attention(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fine_tune_lora, "ASKED", 4)
    monkeypatch.setattr(fine_tune_lora, "differences", lambda split: differences(split)[:64])  # each is rendered by Jinja
    short = ["--steps", "8", "--batch", "8", "--learning-rate", "5e-3"]
    losses = fine_tune_lora.main([*short, "--save", "minus"])
    text = capsys.readouterr().out
    assert "before: What is 36 - 17? -> I can not help with that." in text
    assert "LoRA trains 675,840 of 3,857,664 parameters" in text
    assert "after: What is 36 - 17? -> 36 - 17 = " in text
    assert losses[-1] < 0.5 * losses[0]
    assert len(read_adapter("minus").modules) == 7 * 6, "every linear layer of six"
    assert losses == pytest.approx(fine_tune_lora.main([*short, "--attention", "eager"]), rel=1e-3)


def test_only_the_answer_is_learned() -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    row = example(tokenizer, 36, 17)
    learned = [label for label in row["labels"] if label != IGNORED]
    assert tokenizer.decode(learned) == "36 - 17 = 19.<|im_end|>"
    assert row["input_ids"][-len(learned) :] == learned
    assert not set(differences("train")) & set(differences("test"))
