"""The bytes of single tokens, and log-probabilities in the shapes of OpenAI and vLLM."""

from __future__ import annotations

import math

import pytest
from fa_serve.server.answers.logprobs import LOWEST, TextOffsets, TokenTexts, for_chat, for_completion, for_prompt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fa_serve.engine import TokenLogprob

PIECES = ["▁he", "llo", "<0xC3>", "<0xB6>", "w▁w"]


def pieces() -> PreTrainedTokenizerFast:
    """Pieces of words as SentencePiece writes them, with bytes for what has no piece; token 5 is special."""
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(PIECES)}, merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("<|end▁of|>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_level() -> PreTrainedTokenizerFast:
    """Tokens in GPT-2's characters: "Ġ" is a space and "Ã¶" is the two bytes of "ö"; token 4 is special."""
    tokenizer = Tokenizer(models.BPE(vocab={"Ġa": 0, "Ã¶": 1, "Ã": 2, "¶": 3}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|Ġ|>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture
def texts() -> TokenTexts:
    return TokenTexts(byte_level())


def test_every_byte_has_one_character() -> None:
    """The alphabet is the one that tokenizers writes."""
    assert sorted(TokenTexts.ALPHABET.values()) == list(range(256))
    assert set(TokenTexts.ALPHABET) == set(pre_tokenizers.ByteLevel.alphabet())
    for text in ("a b", "wörld\n", "\x00\x7f", "日本"):
        [(written, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
        assert bytes(TokenTexts.ALPHABET[character] for character in written) == text.encode()


def test_byte_level_tokens(texts: TokenTexts) -> None:
    assert [texts.of(token) for token in range(4)] == [b" a", "ö".encode(), b"\xc3", b"\xb6"]
    assert [texts.text(token) for token in range(4)] == [" a", "ö", "\ufffd", "\ufffd"]
    assert texts.of(4) == "<|Ġ|>".encode(), "a special token is written as it is"


def test_pieces_of_words() -> None:
    texts = TokenTexts(pieces())
    assert [texts.of(token) for token in range(5)] == [b" he", b"llo", b"\xc3", b"\xb6", b"w w"]
    assert texts.of(5) == "<|end▁of|>".encode()


def test_a_token_beyond_the_vocabulary_of_the_tokenizer_has_no_bytes(texts: TokenTexts) -> None:
    """Vocabularies of models are padded."""
    assert texts.of(99) == b""


def test_a_token_is_looked_up_once(texts: TokenTexts, monkeypatch: pytest.MonkeyPatch) -> None:
    assert texts.of(0) == b" a"
    monkeypatch.setattr(texts._tokenizer, "convert_ids_to_tokens", lambda *_: pytest.fail("looked up again"))
    assert texts.of(0) == b" a"


ENTRIES = [TokenLogprob(0, -0.5, [(1, -0.25), (2, -math.inf)]), TokenLogprob(1, -math.inf, [(1, -math.inf), (0, -1.5)])]


def test_for_chat(texts: TokenTexts) -> None:
    """JSON has no infinity; the bytes are exact where the text is not."""
    broken = {"token": "\ufffd", "logprob": LOWEST, "bytes": [0xC3]}
    umlaut = {"token": "ö", "logprob": -0.25, "bytes": [0xC3, 0xB6]}
    [first, second] = for_chat(texts, ENTRIES, as_ids=False)
    assert first == {"token": " a", "logprob": -0.5, "bytes": [0x20, 0x61], "top_logprobs": [umlaut, broken]}
    assert (second["token"], second["logprob"]) == ("ö", LOWEST)
    assert [(top["token"], top["logprob"]) for top in second["top_logprobs"]] == [("ö", LOWEST), (" a", -1.5)]


def test_for_completion(texts: TokenTexts) -> None:
    """Offsets count characters. The actual token is reported besides the `count` most likely ones."""
    offsets = TextOffsets()
    assert offsets.of(b"0123456789") == 0
    assert for_completion(texts, [2, 0, 1], [None, *ENTRIES], offsets, count=1, as_ids=False) == {
        "text_offset": [10, 11, 13],
        "token_logprobs": [None, -0.5, LOWEST],
        "tokens": ["\ufffd", " a", "ö"],
        "top_logprobs": [None, {"ö": -0.25, " a": -0.5}, {"ö": LOWEST}],
    }
    assert offsets.of(b"") == 14


def test_the_most_likely_of_several_tokens_with_one_text_is_reported(texts: TokenTexts) -> None:
    """Parts of characters all have the same text. The actual token has the value of token_logprobs."""
    top = [(2, -0.25), (0, -1.5), (3, -2.5)]
    entries = [TokenLogprob(0, -1.5, top), TokenLogprob(3, -2.5, top)]
    found = for_completion(texts, [0, 3], entries, TextOffsets(), count=3, as_ids=False)
    assert found["top_logprobs"] == [{"\ufffd": -0.25, " a": -1.5}, {"\ufffd": -2.5, " a": -1.5}]
    assert found["token_logprobs"] == [-1.5, -2.5]


def test_offsets_are_those_of_the_text_where_tokens_are_parts_of_characters() -> None:
    """Each part of a character counted as a character, so that all tokens after it were too far behind."""
    smile = "🙂".encode()
    parts = [b"a", smile[:1], smile[1:3], smile[3:] + b"b", b"c", smile[:2], b"d", smile[:3], smile]
    offsets = TextOffsets()
    places = [offsets.of(part) for part in parts]
    assert places == [0, 1, 1, 1, 3, 4, 5, 6, 7]
    text = b"".join(parts).decode(errors="replace")
    assert (text, [text[place] for place in places]) == ("a🙂bc\ufffdd\ufffd🙂", [*"a🙂🙂🙂c\ufffdd\ufffd🙂"])


def test_a_replacement_character_of_the_text_is_one_character() -> None:
    """A U+FFFD that is written in two tokens or three was taken for a character that is not gone on with."""
    own = "\ufffd".encode()
    parts = [b"a", own[:2], own[2:] + b"b", b"c", own[:1], own[1:2], own[2:], own, own[:2], b"d"]
    offsets = TextOffsets()
    assert [offsets.of(part) for part in parts] == [0, 1, 1, 3, 4, 4, 4, 5, 6, 7]
    assert b"".join(parts).decode(errors="replace") == "a\ufffdbc\ufffd\ufffd\ufffdd"


def test_for_prompt(texts: TokenTexts) -> None:
    """An actual token that is among the most likely ones has their rank."""
    assert for_prompt(texts, [None, *ENTRIES], count=1) == [
        None,
        {
            "0": {"logprob": -0.5, "rank": None, "decoded_token": " a"},
            "1": {"logprob": -0.25, "rank": 1, "decoded_token": "ö"},
        },
        {"1": {"logprob": LOWEST, "rank": 1, "decoded_token": "ö"}},
    ]
