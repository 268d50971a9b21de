"""Streamed text never has half a character or a part of a stop string, and its sum is what the tokenizer writes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled_cases import examples
from tiny_models import VOCAB, make_tokenizer

from fa_serve.engine.request.detokenizer import MAX_UNSETTLED, TextStream
from fa_serve.engine.request.stop_strings import StopStrings

TOKENIZER = make_tokenizer().backend_tokenizer


def stream(tokens: list[int], **options) -> tuple[list[str], TextStream]:
    texts = TextStream(TOKENIZER, **options | {"stop": StopStrings(options.get("stop", ()))})
    parts = []
    for token in tokens:
        parts.append(texts.push(token))
        if texts.stop_string is not None:
            break
    parts.append(texts.flush())
    return parts, texts


@settings(max_examples=examples(200), deadline=None)
@given(text=st.text(max_size=30), context=st.text(max_size=10))
def test_any_text_comes_out_in_whole_characters(text, context) -> None:
    tokens = TOKENIZER.encode(text).ids
    parts, _ = stream(tokens, context=TOKENIZER.encode(context).ids)
    assert "".join(parts) == text
    assert "\ufffd" not in "".join(parts).replace("\ufffd", "", text.count("\ufffd"))


@settings(max_examples=examples(200), deadline=None)
@given(tokens=st.lists(st.integers(2, VOCAB - 1), max_size=60))
def test_any_tokens_come_out_as_the_tokenizer_writes_them(tokens) -> None:
    """Except for an unfinished character at the end, and for bytes that stay broken for more than MAX_UNSETTLED tokens."""
    parts, _ = stream(tokens)
    text = "".join(parts)
    whole = TOKENIZER.decode(tokens)
    assert whole.startswith(text) or whole.count("\ufffd") > MAX_UNSETTLED // 2
    assert whole.replace("\ufffd", "") == text.replace("\ufffd", "") or whole.startswith(text)


def test_a_character_of_four_tokens_comes_with_the_last() -> None:
    tokens = TOKENIZER.encode("\U0001f642").ids
    assert len(tokens) == 4
    parts, _ = stream([*tokens, *TOKENIZER.encode("!").ids])
    assert parts == ["", "", "", "\U0001f642", "!", ""]


def test_broken_bytes_are_settled_after_a_while() -> None:
    first = TOKENIZER.encode("\U0001f642").ids[0]
    parts, _ = stream([first] * (MAX_UNSETTLED + 3) + TOKENIZER.encode("ok").ids)
    assert "".join(parts).endswith("ok")
    assert parts[MAX_UNSETTLED - 1] == "\ufffd" * MAX_UNSETTLED


def test_special_tokens_have_no_text() -> None:
    end = TOKENIZER.token_to_id("<eos>")
    parts, _ = stream([end, *TOKENIZER.encode("dog").ids, end])
    assert "".join(parts) == "dog"


@settings(max_examples=examples(200), deadline=None)
@given(
    text=st.text(alphabet="ab\u00e9", max_size=30),
    stops=st.lists(st.text(alphabet="ab\u00e9", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_nothing_of_a_stop_string_is_ever_shown(text, stops) -> None:
    tokens = TOKENIZER.encode(text).ids
    parts, texts = stream(tokens, stop=stops)
    ends = [(text.index(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    assert (texts.stop_string is not None) == bool(ends)
    if ends:
        end, length = min(ends)
        assert texts.stop_string == text[end + length : end]
        assert "".join(parts) == text[: end + length]
    else:
        assert "".join(parts) == text


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        pytest.param("one\n\ntwo", ("\n\n",), "one", id="two tokens"),
        pytest.param("abcabd", ("abd",), "abc", id="begins twice"),
        pytest.param("the dog", ("he d",), "t", id="across words"),
        pytest.param("aXbY", ("Y", "Xb"), "a", id="first complete"),
        pytest.param("aXYb", ("Y", "XY"), "a", id="longer of two"),
    ],
)
def test_stop_strings(text, stop, expected) -> None:
    parts, _ = stream(TOKENIZER.encode(text).ids, stop=stop)
    assert "".join(parts) == expected


def test_text_that_may_begin_a_stop_string_is_held_until_it_does_not() -> None:
    tokens = [TOKENIZER.encode(character).ids[0] for character in "a#b##"]
    parts, _ = stream(tokens, stop=("##!",))
    assert parts == ["a", "", "#b", "", "", "##"]


def test_special_tokens_are_text_if_they_are_wanted() -> None:
    special = next(iter(TOKENIZER.get_added_tokens_decoder()))
    tokens = [*TOKENIZER.encode("a").ids, special, *TOKENIZER.encode("b").ids]
    assert "".join(stream(tokens)[0]) == "ab"
    written = TOKENIZER.get_added_tokens_decoder()[special].content
    assert "".join(stream(tokens, skip_special_tokens=False, context=TOKENIZER.encode("x").ids)[0]) == f"a{written}b"
