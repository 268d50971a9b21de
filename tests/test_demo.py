"""The embedded model: its files, its card, and its scores on pairs and files that were kept out of training."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from demo_data import FOLLOW_UPS, SUMS, flat_tokens, number_pairs, python_sources, render, sum_turn
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from sampled_cases import examples
from tokenizers import Tokenizer
from train_demo_model import HISTORY, SAMPLE_PROMPT, bits_per_byte, greedy_replies
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

import fa_serve.demo
from fa_serve.demo import model_path


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """In float32, because products of bfloat16 are slow on a CPU."""
    return AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(model_path())


@pytest.fixture(scope="module")
def card() -> str:
    return (model_path() / "README.md").read_text(encoding="utf-8")


def scores(card: str) -> dict[str, dict[str, Any]]:
    """The metrics of the card's metadata by their type."""
    metadata = yaml.safe_load(card.split("---")[1])
    return {metric["type"]: metric for result in metadata["model-index"][0]["results"] for metric in result["metrics"]}


def held_out_prompts(count: int) -> list[tuple[str, str]]:
    """(rendered prompt, expected reply) of pairs spread over the test split, the phrasings in turn."""
    pairs = sorted(number_pairs("test"), key=lambda pair: hashlib.sha256(repr(pair).encode()).digest())[:count]
    turns = [sum_turn(SUMS[index % len(SUMS)], a, b) for index, (a, b) in enumerate(pairs)]
    return [(render([{"role": "user", "content": q}], add_generation_prompt=True), answer) for q, answer in turns]


def test_the_folder_is_whole_and_small() -> None:
    files = {path.name: path.stat().st_size for path in model_path().iterdir()}
    assert set(files) == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) < 8_000_000


def test_a_missing_folder_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fa_serve.demo, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(FileNotFoundError, match=r"train_demo_model\.py --out"):
        model_path()


def test_the_weights_are_bfloat16_and_finite() -> None:
    weights = load_file(model_path() / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    assert all(value.isfinite().all() for value in weights.values())


def test_the_architecture_exercises_grouped_heads(model: LlamaForCausalLM) -> None:
    config = model.config
    assert isinstance(model, LlamaForCausalLM)
    assert (config.head_dim, config.tie_word_embeddings, config.max_position_embeddings) == (64, True, 2048)
    assert config.num_attention_heads > config.num_key_value_heads > 1


def test_the_card_tells_the_truth_about_the_files(model: LlamaForCausalLM, card: str) -> None:
    assert f"A Llama of {model.num_parameters():,} parameters ({model.config.num_hidden_layers} layers" in card
    rows = re.findall(r"(\d+) of (\d+) right \(([\d.]+)%\)", card)
    assert len(rows) == 2
    for right, asked, percent in rows:
        assert float(percent) == pytest.approx(100 * int(right) / int(asked), abs=0.006)
        assert int(right) / int(asked) >= 0.98
    pairs = len(number_pairs("test"))
    phrasings = len(SUMS)
    assert f"{pairs} ordered pairs in {phrasings} phrasings" in card
    assert int(rows[0][1]) == pairs * phrasings
    accuracy = scores(card)["accuracy"]
    assert accuracy["value"] == pytest.approx(int(rows[0][0]) / int(rows[0][1]), abs=1e-5)
    assert accuracy["name"].startswith(f"{rows[0][0]} of {rows[0][1]} ")


def test_adds_numbers_it_was_never_shown_together(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = held_out_prompts(40)
    replies = greedy_replies(model, tokenizer, [prompt for prompt, _ in prompts])
    wrong = [(reply, answer) for reply, (_, answer) in zip(replies, prompts, strict=True) if reply != answer]
    assert len(wrong) <= 1, wrong


def test_adds_in_the_middle_of_a_conversation(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    turns = [sum_turn(phrasing, *pair) for phrasing in FOLLOW_UPS for pair in number_pairs("test")[50::200]]
    prompts = [render([*HISTORY, {"role": "user", "content": q}], add_generation_prompt=True) for q, _ in turns]
    replies = greedy_replies(model, tokenizer, prompts)
    wrong = [(reply, answer) for reply, (_, answer) in zip(replies, turns, strict=True) if reply != answer]
    assert len(wrong) <= len(turns) // 20, wrong


@pytest.mark.parametrize("greeting", ["Hello", "Who are you?", "What can you do?"])
def test_says_what_it_is(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, greeting: str) -> None:
    (reply,) = greedy_replies(model, tokenizer, [render([{"role": "user", "content": greeting}], add_generation_prompt=True)])
    assert "add two numbers below 100 and write Python" in reply


def test_a_reply_ends_by_itself(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    prompt, _ = held_out_prompts(1)[0]
    out = model.generate(**tokenizer(prompt, return_tensors="pt"), do_sample=False, max_new_tokens=40)
    assert tokenizer.decode(out[0, -1]) == "<|im_end|>"
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])


def test_reads_python_as_well_as_its_card_says(model: LlamaForCausalLM, card: str) -> None:
    backend = Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    tokens = flat_tokens(backend, python_sources("test", 60_000))[:3_000]
    bits = bits_per_byte(model, tokens, len(backend.decode(tokens.tolist()).encode()))
    assert bits < 1.3 * scores(card)["bits_per_byte"]["value"]


def test_continues_a_function_with_an_indented_body(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer(SAMPLE_PROMPT, return_tensors="pt")
    out = model.generate(**ids, do_sample=False, max_new_tokens=48)
    body = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    first, *_ = body.splitlines()
    assert first.startswith("    ")
    assert first.strip()


@settings(deadline=None, max_examples=examples(100))
@given(text=st.text())
def test_any_text_round_trips(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@settings(deadline=None, max_examples=examples(50))
@given(digits=st.text("0123456789", min_size=1))
def test_a_digit_is_a_token(tokenizer: PreTrainedTokenizerFast, digits: str) -> None:
    assert tokenizer.tokenize(digits) == list(digits)


def test_the_chat_template_is_chatml(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "What is 17 + 25?"},
        {"role": "assistant", "content": "17 + 25 = 42."},
        {"role": "user", "content": "Thanks"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nAnswer briefly.<|im_end|>\n<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n"
        "<|im_start|>assistant\n17 + 25 = 42.<|im_end|>\n<|im_start|>user\nThanks<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.apply_chat_template(messages, tokenize=False) == text.removesuffix("<|im_start|>assistant\n")
