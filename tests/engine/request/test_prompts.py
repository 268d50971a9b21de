"""Prompts: what is refused and why, and the token ids of the others."""

from __future__ import annotations

import copy

import pytest
from tiny_models import VOCAB

from fa_serve.engine.request import prompts
from fa_serve.engine.request.prompts import PromptReader
from fa_serve.spec import ParameterError


def test_texts_and_token_ids_are_read(tokenizer) -> None:
    reader = PromptReader(tokenizer, VOCAB, 20)
    assert reader.read("the quick") == tokenizer.encode("the quick")
    given = (5, 6, 7)
    assert reader.read(given) == [5, 6, 7]


def test_a_tokenizer_that_cuts_and_pads_gives_all_tokens_and_no_others(tokenizer) -> None:
    """Its file says so if it was saved after training, and a call with `truncation` or `padding` sets it at any time."""
    own = copy.deepcopy(tokenizer)
    text = "the quick brown fox"
    expected = tokenizer.encode(text)
    own.backend_tokenizer.enable_truncation(2)
    reader = PromptReader(own, VOCAB, 50)
    assert reader.read(text) == expected
    own.backend_tokenizer.enable_padding(length=40)
    assert reader.read(text) == expected
    own([text], truncation=True, max_length=2)
    assert reader.encode(text, plain=[(0, 3)])[-3:] == expected[-3:]


def test_ids_that_no_tokenizer_can_have_are_refused(tokenizer) -> None:
    """Before: "number too large to fit in target type", from the tokenizer that was asked for a name."""
    for number in (1 << 32, 1 << 40, (1 << 63) - 1):
        with pytest.raises(ParameterError, match=f"from 0 to {VOCAB - 1}, got {number}"):
            PromptReader(tokenizer, VOCAB, 20).read([3, number])


def test_without_a_tokenizer_a_text_is_refused() -> None:
    with pytest.raises(ParameterError) as error:
        PromptReader(None, VOCAB, 20).read("the quick")
    assert (error.value.field, error.value.code) == ("prompt", "no_tokenizer")


@pytest.mark.parametrize(
    ("prompt", "code", "message"),
    [
        pytest.param([1] * 20, "context_length_exceeded", "shorter than max_model_len = 20 tokens.*got 20", id="long"),
        pytest.param("the quick brown fox " * 20, "context_length_exceeded", "max_model_len = 20", id="long text"),
        pytest.param([], "invalid_value", "at least one token", id="empty"),
        pytest.param("", "invalid_value", "at least one token", id="empty text"),
        pytest.param([VOCAB], "invalid_value", f"from 0 to {VOCAB - 1}, got {VOCAB}", id="large"),
        pytest.param([3, -1], "invalid_value", "from 0 to .*got -1", id="negative"),
        pytest.param([2**70], "invalid_value", "from 0 to", id="huge"),
        pytest.param(5, "invalid_value", "be a text or a list of token ids, got 5", id="one number"),
        pytest.param(b"the quick", "invalid_value", "be a text or a list of token ids", id="bytes"),
        pytest.param([1.5], "invalid_value", "from 0 to .*float", id="no integer"),
        pytest.param("half \ud83d", "invalid_value", "UTF-8", id="half a surrogate pair"),
    ],
)
def test_a_bad_prompt_is_refused(make_engine, prompt, code, message) -> None:
    engine = make_engine(max_model_len=20)
    with pytest.raises(ParameterError, match=message) as error:
        engine.add_request("bad", prompt)
    assert (error.value.field, error.value.code) == ("prompt", code)
    assert not engine.has_unfinished()


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(make_engine, tokenizer) -> None:
    engine = make_engine(max_model_len=20)
    longest = max(map(len, tokenizer.get_vocab()))
    with pytest.raises(ParameterError, match=f"max_model_len = 20 tokens, and so have at most {20 * longest} characters"):
        engine.add_request("bad", "x" * (20 * longest + 1))


def test_a_text_of_too_many_tokens_is_refused_before_all_of_them_are_in_memory(tokenizer, monkeypatch) -> None:
    """One long token in the vocabulary allows long texts. Before: 16 MB of short tokens became 16 million ids."""
    monkeypatch.setattr(prompts, "MAX_IDS", 3000)
    monkeypatch.setattr(prompts, "PIECE", 5000)
    tokenizer = copy.deepcopy(tokenizer)
    long = "the quick brown fox" * 10
    tokenizer.add_tokens([long])
    reader = PromptReader(tokenizer, len(tokenizer), 1000)
    tokenized = []
    encoding = reader._encoding
    monkeypatch.setattr(reader, "_encoding", lambda text, special: tokenized.append(len(text)) or encoding(text, special))
    few = long * 500
    assert len(reader.encode(few)) <= 502
    assert sum(tokenized) == 2 * len(few)
    tokenized.clear()
    with pytest.raises(ParameterError, match="have at most 3000 tokens, got 'at least 3") as error:
        reader.encode("the quick " * 9000)
    assert error.value.code == "context_length_exceeded"
    assert sum(tokenized) <= 30_000


def test_messages_are_no_prompt_and_the_error_says_what_makes_one_of_them(tokenizer) -> None:
    reader = PromptReader(tokenizer, VOCAB, 64)
    with pytest.raises(ParameterError, match=r"hold token ids from 0 to \d+ \(tokenizer.apply_chat_template makes them"):
        reader.checked([{"role": "user", "content": "Hello"}])
