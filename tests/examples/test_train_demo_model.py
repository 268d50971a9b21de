"""The training of the embedded model: a few steps at a tiny size, and the training data."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import train_demo_model
from demo_data import (
    CHAT_TEMPLATE,
    FOLLOW_UPS,
    IGNORE,
    OFF_TOPIC,
    SPECIAL_TOKENS,
    SUMS,
    answer_labels,
    conversation,
    number_pairs,
    python_sources,
    render,
    short_functions,
    train_tokenizer,
    vary,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from sampled_cases import examples
from tokenizers import Tokenizer
from train_demo_model import HISTORY, Dataset, Recipe, bits_per_byte, chat_tokenizer, main, new_model, run, train
from transformers import AutoModelForCausalLM, AutoTokenizer

TINY = Recipe(
    vocab_size=400,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    max_length=192,
    chat_length=64,
    conversations=200,
    long_conversations=20,
    python_rows=2,
    long_chat_rows=1,
    chat_rows=8,
    learning_rate=1e-2,
    warmup_steps=5,
    evaluations=1,
    tokenizer_chats=200,
    python_bytes=5_000,
    scored_pairs=1,
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([*python_sources("train", 30_000), render(HISTORY)], TINY.vocab_size)


@pytest.mark.slow
def test_training_writes_a_folder_that_transformers_loads(tmp_path: Path) -> None:
    facts = run(tmp_path, TINY, device=torch.device("cpu"), steps=12)
    assert facts["loss_last"] < 0.9 * facts["loss_first"]
    assert (facts["steps"], facts["skipped"]) == (12, 0)
    assert {path.name for path in tmp_path.iterdir()} == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert {value.dtype for value in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert model.num_parameters() == facts["parameters"]
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    assert saved["padding"] is None
    assert saved["truncation"] is None
    assert tokenizer.apply_chat_template(list(HISTORY), tokenize=False, add_generation_prompt=True) == render(
        HISTORY, add_generation_prompt=True
    )
    card = (tmp_path / "README.md").read_text()
    assert f"{facts['parameters']:,} parameters" in card
    assert f"{facts['right']} of {facts['asked']} right" in card


def test_the_deadline_ends_a_training_without_a_number_of_steps(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock advances by a fixed time at each reading, so that the speed of the machine does not matter."""
    clock = itertools.count()
    monkeypatch.setattr(train_demo_model, "time", SimpleNamespace(monotonic=lambda: next(clock) * 0.05))
    data = Dataset.build(TINY, tokenizer, python_sources("train", TINY.python_bytes), torch.device("cpu"))
    model = new_model(TINY, tokenizer)
    outcome = train(model, chat_tokenizer(tokenizer, TINY), data, TINY, deadline=2.0)
    assert 3 * TINY.warmup_steps < outcome["steps"] < 50
    assert outcome["losses"][-1] < outcome["losses"][0]
    assert model.dtype == torch.bfloat16
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_refuses_no_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path), "--steps", "0"])
    assert "--steps must be at least 1, got 0" in capsys.readouterr().err


def test_the_splits_share_no_pair_and_hold_out_both_orders() -> None:
    train, dev, test = (set(number_pairs(split)) for split in ("train", "dev", "test"))
    assert len(train) + len(dev) + len(test) == len(train | dev | test) == 10_000
    assert all((b, a) in test for a, b in test)
    assert 900 <= len(test) <= 1_100


def test_conversations_ask_training_pairs_only() -> None:
    rng = random.Random(1)
    train = set(number_pairs("train"))
    answers = [m["content"] for _ in range(300) for m in conversation(rng, 5, sorted(train), []) if m["role"] == "assistant"]
    sums = [tuple(map(int, match)) for text in answers for match in re.findall(r"(\d+) (?:\+|and) (\d+) (?:=|is) (\d+)", text)]
    assert len(sums) > 1_000
    assert all((a, b) in train and a + b == c for a, b, c in sums)


def test_every_phrasing_states_its_numbers() -> None:
    for question, answer in (*SUMS, *FOLLOW_UPS):
        assert "{a}" in question
        assert "{b}" in question
        assert "{c}" in answer
    assert all("+ {b}" not in question or "{a}{b}" in question for question in OFF_TOPIC)


def test_short_functions_are_whole() -> None:
    one = "def one(x):\n    return x"
    two = "def two():\n\n    pass"
    text = f"import os\n\n\n{one}\n\n\nclass A:\n    def no(self):\n        pass\n\n\n{two}\nx = 1\n"
    assert short_functions([text]) == [("one", one), ("two", two)]
    assert short_functions([text], longest=len(two)) == [("two", two)]


@settings(deadline=None, max_examples=examples(60))
@given(text=st.text())
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_each_digit_is_a_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("1234+567").tokens == ["1", "2", "3", "4", "+", "5", "6", "7"]
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2]


def test_labels_are_the_assistants_turns_with_their_end(tokenizer: Tokenizer) -> None:
    text = render([*HISTORY, {"role": "user", "content": "assistant\nfoo"}])
    ids = torch.tensor([tokenizer.encode(text).ids])
    labels = answer_labels(ids, tokenizer)
    learnt = tokenizer.decode(labels[labels != IGNORE].tolist(), skip_special_tokens=False)
    assert learnt == "".join(m["content"] + "<|im_end|>" for m in HISTORY if m["role"] == "assistant")


def test_the_template_and_its_fast_rendering_agree(tokenizer: Tokenizer) -> None:
    fast = chat_tokenizer(tokenizer, TINY)
    assert fast.chat_template == CHAT_TEMPLATE
    assert fast.apply_chat_template(list(HISTORY), tokenize=False) == render(HISTORY)


def test_bits_per_byte_of_a_uniform_guess(tokenizer: Tokenizer) -> None:
    model = new_model(TINY, tokenizer).eval()
    torch.nn.init.zeros_(model.model.embed_tokens.weight)  # tied: every logit is 0
    tokens = torch.randint(0, TINY.vocab_size, (1_000,))
    expected = torch.tensor(float(tokenizer.get_vocab_size())).log2().item() * 1_000 / 2_500
    assert bits_per_byte(model, tokens, 2_500) == pytest.approx(expected, rel=1e-5)


def test_variants_keep_the_numbers() -> None:
    rng = random.Random(0)
    seen = {vary("What is 17 + 25?", rng) for _ in range(200)}
    assert len(seen) > 5
    assert all("hat is 17 + 25" in text for text in seen)
