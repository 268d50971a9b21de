"""Texts become the ids of the tokenizer, in their order; what cannot fit is refused before it is tokenized."""

import pickle
import time

import numpy as np
import pytest
from encoder_folders import LENGTH, PAIRS, TEXTS, VOCABULARY, word_pieces
from tokenizers.processors import TemplateProcessing

from fa_serve.engine.pooling import inputs
from fa_serve.engine.pooling.inputs import InputReader, named_in_request
from fa_serve.engine.pooling.params import EncoderCard
from fa_serve.spec import ParameterError

CARD = EncoderCard("embed", 32, LENGTH, takes_types=True, prompts={"query": "find: "})


def reader(card: EncoderCard = CARD) -> InputReader:
    return InputReader(word_pieces(), card, len(VOCABULARY))


def test_ids_and_types_are_those_of_the_tokenizer() -> None:
    mixed = [*TEXTS, *PAIRS, [5, 6, 7]]
    found = list(reader().read(mixed))
    tokenizer = word_pieces()
    for text, each in zip(mixed[:-1], found[:-1], strict=True):
        wanted = tokenizer(*text) if isinstance(text, tuple) else tokenizer(text)
        assert each.ids.tolist() == wanted["input_ids"]
        assert each.types.tolist() == wanted["token_type_ids"]
        assert each.ids.dtype == each.types.dtype == np.int32
    assert found[-1].ids.tolist() == [5, 6, 7]
    assert reader(EncoderCard("embed", 32, LENGTH)).read(["a"])[0].types is None


@pytest.mark.parametrize("kind", [0, 2])
def test_texts_alone_have_the_types_of_their_template(kind: int) -> None:
    """Those of most tokenizers are zeros, which are not read from the encodings. XLNet gives its last token the type 2."""
    tokenizer = word_pieces()
    special = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("[CLS]", "[SEP]")]
    template = TemplateProcessing(single=f"[SEP]:0 $A:0 [CLS]:{kind}", pair="$A:0 $B:1", special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = template
    found = InputReader(tokenizer, CARD, len(VOCABULARY)).read(["a b", [5, 6], "c"])
    assert [each.types.tolist() for each in found] == [[0, 0, 0, kind], [0, 0], [0, 0, kind]]


def test_several_calls_are_read_together_as_each_alone() -> None:
    """Also if one of them is refused: it gets its error, with the place in its own inputs."""
    read = reader()
    calls = [TEXTS[:2], PAIRS, [[5, 6, 7]], TEXTS[2:3]]
    *rest, error = read.read_each([*calls, ["a", "a " * LENGTH]], prompt="find: ")
    assert isinstance(error, ParameterError)
    assert (error.field, error.code) == ("input[1]", "context_length_exceeded")
    for found in (read.read_each(calls, prompt="find: "), rest):
        for given, each in zip(calls, found, strict=True):
            alone = read.read(given, prompt="find: ")
            assert each.ids.tolist() == alone.ids.tolist()
            assert each.ends.tolist() == alone.ends.tolist()
            assert each.types.tolist() == alone.types.tolist()


def test_the_order_is_kept_across_pieces(monkeypatch) -> None:
    monkeypatch.setattr(inputs, "PIECE", 10)
    wanted = [each.ids.tolist() for each in reader().read(TEXTS)]
    assert wanted == [word_pieces()(text)["input_ids"] for text in TEXTS]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a " * 100, "input[0]"),
        (("a " * 100, "b c"), "input[0][0]"),
        (("b c", "a " * 100), "input[0][1]"),
        (("a " * 60, "b " * 60), "input[0][0]"),
        (("a " * 30, "b " * 30), "input[0]"),
        (("b c", "a" * 10_000), "input[0][1]"),
    ],
)
def test_long_texts_are_cut_as_transformers_cuts_them(text, place: str) -> None:
    """The error of a pair names the text that is too long alone, if one of them is."""
    with pytest.raises(ParameterError) as caught:
        reader().read([text])
    assert (caught.value.field, caught.value.code) == (place, "context_length_exceeded")
    texts = text if isinstance(text, tuple) else (text,)
    wanted = word_pieces()(*texts, truncation="longest_first", max_length=LENGTH)
    assert reader().read([text], truncate=True)[0].ids.tolist() == wanted["input_ids"]


@pytest.mark.parametrize("text", ["a " * 2000 + "dog", ("a " * 2000 + "dog", "b c"), ("a " * 60 + "x", "b " * 60 + "y")])
def test_the_end_of_long_texts_is_kept_where_the_tokenizer_cuts_on_the_left(text) -> None:
    tokenizer = word_pieces()
    tokenizer.truncation_side = "left"
    cutting = InputReader(tokenizer, CARD, len(VOCABULARY))
    texts = text if isinstance(text, tuple) else (text,)
    wanted = tokenizer(*texts, truncation="longest_first", max_length=LENGTH)
    assert cutting.read([text], truncate=True)[0].ids.tolist() == wanted["input_ids"]
    ids = [*([5] * LENGTH), 6, 7]
    assert cutting.read([ids], truncate=True)[0].ids.tolist() == ids[2:]
    assert reader().read([ids], truncate=True)[0].ids.tolist() == ids[:-2]
    with pytest.raises(ParameterError, match=f"at most {LENGTH} tokens"):
        cutting.read([ids])


def test_ten_megabytes_are_refused_or_cut_at_once() -> None:
    text = "a" * (10 << 20)
    begin = time.thread_time()
    with pytest.raises(ParameterError, match="characters"):
        reader().read([text])
    [cut] = reader().read([text], truncate=True)
    assert len(cut.ids) <= LENGTH
    assert time.thread_time() - begin < 2.0


def test_tokens_of_all_inputs_together_have_a_bound(monkeypatch) -> None:
    monkeypatch.setattr(inputs, "MAX_TOKENS", 100)
    with pytest.raises(ParameterError, match="at most 100 tokens in all inputs together"):
        reader().read(["a b c d e f"] * 20)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "at least one token"),
        ([len(VOCABULARY)], "token ids from 0 to"),
        ([-1], "token ids from 0 to"),
        ("\ud800", "UTF-8"),
    ],
)
def test_what_is_no_input_is_refused_with_its_number(given, message: str) -> None:
    with pytest.raises(ParameterError, match=message) as caught:
        reader().read(["a", given])
    assert caught.value.field == "input[1]"
    error = caught.value
    for places, place in ((None, "texts[1]"), (["query", "documents[0]"], "documents[0]")):
        named, field = named_in_request(error, "texts", 2, places)
        assert (named.field, named.rule, named.value, field) == (place, error.rule, error.value, place)
    assert named_in_request(error, "text", 1, None)[1] == "text"
    pairs = [("query", "documents[0]"), ("query", "documents[1]")]
    for field, place in (("input[1]", "documents[1]"), ("input[1][0]", "query"), ("input[1][1]", "documents[1]")):
        of_pair = ParameterError(field, error.rule, error.value)
        assert named_in_request(of_pair, "documents", 2, pairs)[1] == place
        assert named_in_request(of_pair, "inputs", 2, None)[1] == field.replace("input", "inputs")
    other = ParameterError("input[1].text", "be short", 3)
    assert named_in_request(other, "texts", 2, None) == (other, "texts")


def test_prompts_are_counted_without_the_last_special_token() -> None:
    card = EncoderCard("embed", 32, LENGTH, prompts={"query": "find: "}, default_prompt="query", skips_prompt=True)
    found = reader(card)
    assert found.prompt(None) == found.prompt("query") == "find: "
    [each] = found.read(["a cat"], prompt="find: ")
    assert each.skipped == len(word_pieces()("find: ")["input_ids"]) - 1
    assert reader().read(["a cat"], prompt="find: ")[0].skipped == 0
    with pytest.raises(ParameterError, match="query"):
        found.prompt("passage")


def test_texts_are_written_in_lower_case_where_the_folder_says_so() -> None:
    tokenizer = word_pieces()
    tokenizer.backend_tokenizer.normalizer = None
    small = InputReader(tokenizer, EncoderCard("embed", 32, LENGTH, lower_case=True), len(VOCABULARY))
    large = InputReader(tokenizer, EncoderCard("embed", 32, LENGTH), len(VOCABULARY))
    assert small.read(["A Cat"])[0].ids.tolist() == large.read(["a cat"])[0].ids.tolist()
    assert large.read(["A Cat"])[0].ids.tolist() != large.read(["a cat"])[0].ids.tolist()


@pytest.mark.parametrize("card", [CARD, EncoderCard("embed", 32, LENGTH, prompts={"query": "find: "}, skips_prompt=True)])
def test_inputs_cross_a_pipe_as_they_are_and_can_be_written(card: EncoderCard) -> None:
    given = reader(card).read(TEXTS, prompt="find: ")
    found = pickle.loads(pickle.dumps(given))
    for name in ("ids", "ends", "types", "skipped"):
        wanted = getattr(given, name)
        each = getattr(found, name)
        if wanted is None:
            assert each is None
        else:
            assert each.dtype == wanted.dtype
            assert each.flags.writeable
            assert each.tolist() == wanted.tolist()
