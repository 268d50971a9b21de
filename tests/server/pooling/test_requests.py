"""The bodies of encoders' routes: forms of inputs, and what is refused."""

import pytest
from fa_serve.server.pooling.requests import (
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    TeiEmbedRequest,
    TeiPredictRequest,
)
from pydantic import ValidationError


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_inputs_come_in_four_forms(given, wanted) -> None:
    assert EmbeddingRequest(model="m", input=given).inputs() == wanted
    assert TeiEmbedRequest(inputs=given).items() == wanted


@pytest.mark.parametrize(
    ("given", "wanted", "batch"),
    [
        ("a", ["a"], False),
        (["a"], ["a"], False),
        (["a", "b"], [("a", "b")], False),
        ([["a"], ["b", "c"]], ["a", ("b", "c")], True),
    ],
)
def test_inputs_of_predict_are_texts_pairs_or_lists_of_them(given, wanted, batch: bool) -> None:
    body = TeiPredictRequest(inputs=given)
    assert (body.items(), body.is_batch) == (wanted, batch)


@pytest.mark.parametrize(
    ("first", "second", "wanted"),
    [("a", "b", [("a", "b")]), ("a", ["b", "c"], [("a", "b"), ("a", "c")]), (["a", "b"], ["c", "d"], [("a", "c"), ("b", "d")])],
)
def test_one_text_is_scored_with_each(first, second, wanted) -> None:
    assert ScoreRequest(text_1=first, text_2=second).pairs() == wanted


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (EmbeddingRequest, {"input": "a"}),  # without a model
        (EmbeddingRequest, {"model": "m", "input": "a", "dimensions": 0}),
        (EmbeddingRequest, {"model": "m", "input": "a", "encoding_format": "hex"}),
        (EmbeddingRequest, {"model": "m", "input": "a", "truncate_prompt_tokens": 5}),
        (EmbeddingRequest, {"model": "m", "input": "a", "truncate": False, "truncate_prompt_tokens": -1}),
        (EmbeddingRequest, {"model": "m", "input": ["a", 1]}),
        (RerankRequest, {"query": "a", "documents": []}),
        (RerankRequest, {"query": "", "documents": ["a"]}),
        (RerankRequest, {"query": "a", "documents": ["a"], "rank_fields": ["title"]}),
        (ScoreRequest, {"text_1": ["a", "b"], "text_2": ["a"]}),
        (TeiEmbedRequest, {"inputs": "a", "truncation_direction": "Left"}),
        (TeiPredictRequest, {"inputs": ["a", "b", "c"]}),
    ],
)
def test_what_is_not_honoured_is_refused(kind, body) -> None:
    with pytest.raises(ValidationError):
        kind(**body)
