"""End tokens: which of a model's files names them, and what the operator is told if they disagree; defaults of sampling."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_models import make_model
from transformers import GenerationConfig, LlamaConfig

from fa_serve.engine import Engine, EngineConfig, SamplingParams, StructuredOutput
from fa_serve.engine.start.generation_config import find_defaults, find_ends
from fa_serve.spec import ParameterError


def ends(generation: object, config: object, tokenizer_end: int | None) -> tuple[set[int], str | None]:
    tokenizer = SimpleNamespace(eos_token_id=tokenizer_end, convert_ids_to_tokens=lambda ids: [f"<{token}>" for token in ids])
    found = find_ends(
        GenerationConfig(eos_token_id=generation), LlamaConfig(eos_token_id=config, vocab_size=100), tokenizer, 100
    )
    return set(found.ids), found.warning


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        (5, 6, 5, {5}),
        ([5, 7], 6, 7, {5, 7}),
        (None, 6, 6, {6}),
        (None, [6, 8], 8, {6, 8}),
        (None, None, 7, {7}),
        (0, 6, 0, {0}),
        (100, 6, 6, {6}),
        ([99, 100], None, 99, {99}),
        (None, 100, 7, {7}),
        ("a", None, 7, {7}),
        ([None, 3], None, 3, {3}),
    ],
)
def test_the_first_source_that_names_a_token_of_the_model_is_taken(generation, config, tokenizer, expected) -> None:
    assert ends(generation, config, tokenizer) == (expected, None)


def test_an_end_of_the_tokenizer_that_ends_nothing_is_told() -> None:
    ids, warning = ends(0, None, 2)
    assert ids == {0}
    assert warning is not None
    assert "generation_config.json ends answers at 0 (<0>), but the tokenizer's end token is 2 (<2>)" in warning
    assert "stop_token_ids" in warning
    assert "config.json ends answers at 1 (<1>), 3 (<3>)" in str(ends(None, [3, 1], 2)[1])


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer"), [(None, None, None), (100, 100, 2048), (-1, 6, 7), (None, -1, 7)]
)
def test_a_model_whose_answers_never_end_is_told(generation, config, tokenizer) -> None:
    ids, warning = ends(generation, config, tokenizer)
    assert ids == set()
    assert warning is not None
    assert "No token ends an answer" in warning
    assert "from 0 to 99" in warning


def engine_of(generation: int | None, tokenizer: object) -> Engine:
    model = make_model()
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=generation)
    return Engine(EngineConfig(device="cpu", num_pages=64, page_size=4, seed=0), model=model, tokenizer=tokenizer)


FORCED = SamplingParams(max_tokens=9, allowed_token_ids=(1,), temperature=0.0)
"""Every token of the answer is 1, the tokenizer's end."""


def test_without_another_end_answers_end_at_the_tokenizers(tokenizer, caplog) -> None:
    """Before, they went on until max_tokens, although structured outputs ended there."""
    completion = engine_of(None, tokenizer).generate([[5]], FORCED)[0]
    assert (completion.token_ids, completion.finish_reason, completion.text) == ([1], "stop", "")
    assert not caplog.records


def test_the_engine_warns_at_the_start_and_follows_generation_config(tokenizer, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        engine = engine_of(7, tokenizer)
    assert ["the tokenizer's end token is 1 (<eos>)" in record.message for record in caplog.records] == [True]
    completion = engine.generate([[5]], FORCED)[0]
    assert (completion.token_ids, completion.finish_reason) == ([1] * 9, "length")
    assert engine.generate([[5]], SamplingParams(max_tokens=9, allowed_token_ids=(7,)))[0].token_ids == [7]


@pytest.mark.parametrize("settings", [{}, {"speculative": "ngram"}], ids=["plain", "speculative"])
def test_a_structured_answer_may_end_at_a_stop_token_where_it_may_end(tokenizer, settings) -> None:
    """llguidance knows the model's end, token 7 here. A chat template may have another one, which is stop token 1."""
    model = make_model()
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=7)
    engine = Engine(EngineConfig(device="cpu", num_pages=64, page_size=4, **settings), model=model, tokenizer=tokenizer)
    digits = StructuredOutput(regex="[0-9]{3,}")
    forced = {1: 100.0, 7: -100.0}
    params = SamplingParams(max_tokens=20, temperature=0.0, structured=digits, logit_bias=forced, stop_token_ids=(1,))
    completion = engine.generate([[5, 6]], params)[0]
    assert completion.finish_reason == "stop"
    assert completion.token_ids[-1] == 1
    assert len(completion.text) == 3, "it may not end before"
    assert completion.text.isdigit()
    without = engine.generate([[5, 6]], SamplingParams(max_tokens=20, temperature=0.0, structured=digits, logit_bias=forced))[0]
    assert without.finish_reason == "length"


GIVEN = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05, "max_new_tokens": 7}
DEFAULTS = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.05, max_tokens=7)


def test_the_defaults_of_a_file_are_those_that_vllm_takes() -> None:
    found = find_defaults(GenerationConfig(**GIVEN, do_sample=False, num_beams=4, typical_p=0.5))
    assert found.params == DEFAULTS
    assert str(found) == "temperature 0.6, top_k 20, top_p 0.95, min_p 0.1, repetition_penalty 1.05, max_tokens 7"
    assert find_defaults(GenerationConfig()).params == SamplingParams()
    assert find_defaults(None).given == {}


def test_a_value_that_is_not_allowed_is_left_out_and_told() -> None:
    found = find_defaults(GenerationConfig(top_k=-1, top_p=0.0, temperature="hot", repetition_penalty=1.5))
    assert found.params == SamplingParams(top_k=0, repetition_penalty=1.5)
    assert [text.partition(": ")[2] for text in found.refused] == [
        "temperature is ignored: temperature must be a number, got 'hot'",
        "top_p is ignored: top_p must be above 0 and at most 1, got 0.0",
    ]


def defaulting(tokenizer: object, **settings: object) -> Engine:
    model = make_model()
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=-1, **GIVEN)
    return Engine(EngineConfig(device="cpu", num_pages=64, page_size=4, seed=0, **settings), model=model, tokenizer=tokenizer)


def test_requests_without_parameters_get_the_defaults_and_others_what_they_give(tokenizer) -> None:
    phases = []
    model = make_model()
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=-1, **GIVEN)
    config = EngineConfig(device="cpu", num_pages=64, page_size=4, seed=0)
    engine = Engine(config, model=model, tokenizer=tokenizer, on_phase=phases.append)
    assert engine.default_params == DEFAULTS
    told = [phase.detail for phase in phases if phase.name == "sampling"]
    assert told == [f"{find_defaults(model.generation_config)} by default, from generation_config.json (--generation-config)"]
    assert [len(completion.token_ids) for completion in engine.generate([[5, 6], [7]])] == [7, 7]
    engine.add_request("one", [5, 6])
    while engine.has_unfinished():
        outputs = engine.step()
    assert outputs[-1].num_output_tokens == 7
    own = SamplingParams(max_tokens=9, temperature=0.0)
    neutral = Engine(config, model=make_model(), tokenizer=tokenizer)
    assert engine.generate([[5, 6]], own)[0].token_ids == neutral.generate([[5, 6]], own)[0].token_ids
    changed = replace(engine.default_params, seed=3, max_tokens=5)
    expected = replace(DEFAULTS, seed=3, max_tokens=5)
    assert engine.generate([[5, 6]], changed)[0].token_ids == neutral.generate([[5, 6]], expected)[0].token_ids


def test_none_is_neutral_and_a_folder_takes_the_place_of_the_models_file(tokenizer, tmp_path: Path, caplog) -> None:
    assert defaulting(tokenizer, generation_config="none").default_params == SamplingParams()
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.3, "eos_token_id": 9, "top_p": 7}))
    engine = defaulting(tokenizer, generation_config=str(tmp_path))
    assert engine.default_params == SamplingParams(temperature=0.3)
    assert engine.eos_ids == {9}
    assert "generation_config.json: top_p is ignored: top_p must be above 0 and at most 1, got 7" in caplog.text


@pytest.mark.parametrize("content", [None, "", "{", "[1]"])
def test_a_folder_without_a_file_that_can_be_read_is_refused(tokenizer, tmp_path: Path, content: str | None) -> None:
    folder = tmp_path / "absent"
    if content is not None:
        folder.mkdir()
        if content:
            (folder / "generation_config.json").write_text(content)
    with pytest.raises(
        ParameterError, match=r"generation_config must be auto, none, or a folder with .*can be read"
    ) as refused:
        defaulting(tokenizer, generation_config=folder)
    assert refused.value.field == "generation_config"
