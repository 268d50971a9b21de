"""A tokenizer may have more tokens than its model has logits, or fewer: the model of a family may have been trained without the
tokens that were added later, or its matrices may be padded. Structured outputs and prompts hold with every relation.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from speculation_cases import CASES, SCHEMA
from tiny_models import SIZES, make_tokenizer
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from fa_serve.engine import Engine, EngineConfig, SamplingParams, StructuredOutput
from fa_serve.engine.structured.grammars import Grammars
from fa_serve.spec import ParameterError, UnsupportedModelError

pytest.importorskip("llguidance")

END = 1
KINDS: dict[str, tuple[StructuredOutput, Callable[[str], object]]] = {
    "schema": (StructuredOutput(json_schema=SCHEMA), lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None),
    "regex": (StructuredOutput(regex=r"[a-f]{3}-[0-9]{2}/x?"), re.compile(r"[a-f]{3}-[0-9]{2}/x?").fullmatch),
    "choice": (StructuredOutput(choice=("the fox", "ünïcode 日本")), ("the fox", "ünïcode 日本").__contains__),
    "grammar": (StructuredOutput(grammar='start: "a" ("+" "b"){1,3}'), re.compile(r"a(\+b){1,3}").fullmatch),
}
"""Structured outputs, and whether a whole answer follows them."""
NUM_TOKENS = 296 + 24
"""The trained tokens of `make_tokenizer` and the added ones: a multiple of 32."""
RELATIONS = [-17, -1, 0, 1, 32, 100]
"""Logits beyond the tokens. All numbers of logits below NUM_TOKENS are above the trained tokens' ids."""


@functools.cache
def large_tokenizer(num_tokens: int = NUM_TOKENS) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|added_{i}|>" for i in range(num_tokens - len(tokenizer))]})
    assert len(tokenizer) == num_tokens
    return tokenizer


def engine_of(vocab_size: int, tokenizer: Any = None, **settings: Any) -> Engine:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | {"vocab_size": vocab_size})).eval()
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=[END])
    config = EngineConfig(**{"device": "cpu", "num_pages": 128, "page_size": 4, "max_num_seqs": 8, "seed": 0} | settings)
    return Engine(config, model=model, tokenizer=tokenizer or large_tokenizer())


def bits(words: np.ndarray) -> np.ndarray:
    return np.unpackbits(words.view(np.uint8), bitorder="little")


@pytest.mark.every_case
@pytest.mark.parametrize("beyond", [-22, *RELATIONS, 31, 33])
@pytest.mark.parametrize("num_tokens", [NUM_TOKENS - 1, NUM_TOKENS, NUM_TOKENS + 1])
def test_a_mask_has_the_words_of_the_logits_and_allows_tokens_that_both_have(num_tokens, beyond) -> None:
    tokenizer = large_tokenizer(num_tokens)
    logits = num_tokens + beyond
    grammars = Grammars(tokenizer, logits, [END])
    equal = Grammars(tokenizer, num_tokens, [END])
    # free text, and a grammar that asks for one of three added tokens: the first, and two that the model may not have
    wanted = [
        StructuredOutput(regex="(.|\n)*"),
        StructuredOutput(grammar=f"start: <|added_0|> | <|added_20|> | <[{num_tokens - 1}]>"),
    ]
    known, added = tokenizer.convert_tokens_to_ids(["the", "<|added_0|>"])
    for structured, draft in zip(wanted, (known, added), strict=True):
        for drafts in ([], [draft], [0, draft]):  # token 0 may not come
            words, late = grammars.masks([grammars.matcher(structured)], [None], [drafts])
            expected, _ = equal.masks([equal.matcher(structured)], [None], [drafts])
            assert not late
            assert words.shape == (1 + len(drafts), -(-logits // 32))
            both = min(logits, num_tokens)
            allowed = bits(words[0])
            assert allowed[:both].any()
            assert (allowed[:both] == bits(expected[0])[:both]).all()
            assert not allowed[both:].any(), "neither tokens without a logit nor logits without a token"
            for row in range(1, 1 + len(drafts)):
                assert not bits(words[row])[logits:].any()
                assert (bits(words[row])[:both] == bits(expected[row])[:both]).all()
    grammars.close()
    equal.close()


@pytest.mark.parametrize("beyond", [-17, -1, 1])
def test_answers_of_every_kind_follow_their_grammar(beyond) -> None:
    logits = NUM_TOKENS + beyond
    engine = engine_of(logits)
    kinds = [kind for kind in KINDS for _ in range(2)]
    wanted = [SamplingParams(max_tokens=200, seed=i, structured=KINDS[kind][0]) for i, kind in enumerate(kinds)]
    completions = engine.generate([[3 + i, 4] for i in range(len(kinds))], wanted)
    assert [completion.error for completion in completions] == [None] * len(kinds)
    ended = 0
    for kind, completion in zip(kinds, completions, strict=True):
        assert max(completion.token_ids) < min(logits, NUM_TOKENS)
        if completion.finish_reason == "stop":
            ended += 1
            assert KINDS[kind][1](completion.text), completion.text
    assert ended > len(kinds) // 2
    free = engine.generate([[5]], SamplingParams(max_tokens=3, structured=StructuredOutput(json_object=True)))
    assert free[0].error is None
    assert free[0].text.startswith("{")


@pytest.mark.parametrize(("kind", "beyond"), [("regex", -2), ("schema", 1), ("choice", -2)])
def test_speculation_changes_no_answer(kind, beyond) -> None:
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [9] * 12]
    expected = engine_of(NUM_TOKENS + beyond).generate(prompts, CASES[kind])
    answers = engine_of(NUM_TOKENS + beyond, speculative="ngram", num_speculative_tokens=5).generate(prompts, CASES[kind])
    assert [x.error for x in answers] == [None, None]
    assert [x.token_ids for x in answers] == [x.token_ids for x in expected]


def test_a_trial_knows_the_same_tokens() -> None:
    grammars = Grammars(large_tokenizer(), NUM_TOKENS - 5, [END])
    for kind, (structured, _) in KINDS.items():
        assert not grammars.matcher(structured, grammars.trial(structured)).is_error(), kind
    grammars.close()


def test_an_answer_that_begins_with_a_token_without_a_logit_is_refused() -> None:
    structured = StructuredOutput(grammar="start: <|added_23|>")
    with pytest.raises(ParameterError, match=r"grammar must be .*begins with tokens that the model does not have"):
        engine_of(NUM_TOKENS - 1).add_request("a", [5], SamplingParams(structured=structured))
    assert engine_of(NUM_TOKENS).generate([[5]], SamplingParams(structured=structured))[0].token_ids[0] == NUM_TOKENS - 1


@pytest.mark.parametrize(("beyond", "ends"), [(-1, [NUM_TOKENS - 1]), (0, [NUM_TOKENS]), (33, [NUM_TOKENS + 2]), (0, [9999])])
def test_an_end_that_only_one_side_has_stops_no_grammar(beyond, ends) -> None:
    """The configuration may name an end that the tokenizer, or the model, does not have."""
    grammars = Grammars(large_tokenizer(), NUM_TOKENS + beyond, ends)
    matcher = grammars.matcher(StructuredOutput(regex="[0-9]{3}"))
    words, _ = grammars.masks([matcher], [None])
    assert bits(words[0])[large_tokenizer().convert_tokens_to_ids("1")]
    grammars.close()


def test_a_prompt_with_a_token_without_an_embedding_is_refused_as_text_and_as_ids() -> None:
    engine = engine_of(NUM_TOKENS - 1)
    for prompt in ("the <|added_23|> fox", [3, NUM_TOKENS - 1]):
        with pytest.raises(ParameterError, match=r"from 0 to 318 .*fewer tokens than its tokenizer; leave out <\|added_23\|>"):
            engine.add_request("a", prompt)
        with pytest.raises(ParameterError, match="from 0 to 318"):
            engine.generate([prompt, [5]])
    assert not engine.has_unfinished()
    assert engine.generate(["the <|added_22|> fox"], SamplingParams(max_tokens=2))[0].error is None


@pytest.mark.parametrize("missing", [-2, 0, 1])
def test_a_model_that_could_write_a_token_without_an_embedding_is_refused(missing: int) -> None:
    """On a GPU, a look-up beyond the embeddings ends the process."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | {"vocab_size": NUM_TOKENS})).eval()
    model.set_input_embeddings(torch.nn.Embedding(NUM_TOKENS - missing, model.config.hidden_size))
    config = EngineConfig(device="cpu", num_pages=16, page_size=4)
    if missing > 0:
        with pytest.raises(UnsupportedModelError, match="has 319 input embeddings and 320 logits, so it could generate tokens"):
            Engine(config, model=model, tokenizer=large_tokenizer())
    else:
        Engine(config, model=model, tokenizer=large_tokenizer()).generate([[5]], SamplingParams(max_tokens=2))


def test_a_tokenizer_that_llguidance_cannot_read_is_named() -> None:
    tokenizer = copy.deepcopy(large_tokenizer())
    tokenizer.backend_tokenizer.decoder = None
    tokenizer.backend_tokenizer.pre_tokenizer = None
    grammars = Grammars(tokenizer, NUM_TOKENS, [END])
    for _ in range(2):
        with pytest.raises(ParameterError, match="llguidance cannot read this model's tokenizer") as refused:
            grammars.matcher(StructuredOutput(regex="a"))
        assert (refused.value.field, refused.value.code) == ("structured", "unsupported")
