"""How to choose tokens and when to end: `SamplingParams` and `StructuredOutput`. Both validate themselves. No torch.

    params = SamplingParams(max_tokens=64, temperature=0.7, top_p=0.9, stop=("\\n\\n",), seed=1)
    params = SamplingParams(structured=StructuredOutput(regex="[0-9]{3}"))

A value that is not allowed raises a ParameterError, whose `field` is the name of the parameter. Left out: what depends on the
model, such as the size of the vocabulary (input_processor.py), and whether a grammar can be compiled (structured/grammars.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

from fa_serve.spec import ParameterError


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """What the whole answer must be. Exactly one field is given, of at most 262,144 characters. `Engine.add_request` checks its
    content.

    json_schema: a JSON schema, as a dict or as text
    json_object: True allows any JSON object
    regex:       a regular expression that the whole text matches
    choice:      texts of which the answer is one, exactly
    grammar:     a context-free grammar in Lark's notation whose start rule is `start`
    """

    json_schema: Mapping[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        names = [f.name for f in fields(StructuredOutput)]
        given = [name for name in names if getattr(self, name) not in (None, False)]
        _require(len(given) == 1, "structured", "give exactly one of " + ", ".join(names), given)
        _require(isinstance(self.json_object, bool), "json_object", "be True or False", self.json_object)
        _require(isinstance(self.json_schema, Mapping | str | None), "json_schema", "be a dict or a string", self.json_schema)
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            _require(text is None or (isinstance(text, str) and text != ""), name, "be a text that is not empty", text)
        if self.choice is not None:
            texts = isinstance(self.choice, tuple | list) and all(isinstance(text, str) and text for text in self.choice)
            _require(texts and len(self.choice) > 0, "choice", "be a tuple of texts that are not empty", self.choice)
        if given != ["json_object"]:
            rule = f"have at most {MAX_STRUCTURED} characters"
            _require(self.length() <= MAX_STRUCTURED, given[0], rule, getattr(self, given[0]))

    def length(self, limit: int | None = None) -> int:
        """A lower bound of the number of characters of the structured output, without writing it out.

        limit: number of a schema's characters above which counting stops; None is MAX_STRUCTURED
        """
        if isinstance(self.json_schema, Mapping):
            return schema_length(self.json_schema, MAX_STRUCTURED if limit is None else limit)
        return len(self.json_schema or self.regex or self.grammar or "") + sum(map(len, self.choice or ()))

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(f.name for f in fields(StructuredOutput) if getattr(self, f.name) not in (None, False))


@dataclass(frozen=True, slots=True)
class ComposedGrammar(StructuredOutput):
    """A grammar that a program has composed of structured outputs, which its user has not seen.

    parts: the structured outputs; if one of them cannot be followed, the error is that of this part alone
    """

    parts: tuple[StructuredOutput, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to end.

    max_tokens:     maximum number of tokens to generate; None means as many as the model's length leaves room for, and larger
                    values are limited to that too
    temperature:    from 0 to 100; below 1e-6 is greedy; 1 samples from the model's own distribution
    top_p:          keep the first tokens whose probabilities sum to at least top_p, as few as possible, in (0, 1]
    top_k:          keep the first k tokens; 0 keeps all
    min_p:          keep tokens that are at least min_p times as likely as the first one, in [0, 1]; 1 keeps only the first one
    presence_penalty:  subtracted once from the logit of each token that the answer contains; from -2 to 2
    frequency_penalty: subtracted from the logit of a token once for each time that the answer contains it; from -2 to 2
    repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or the answer; above 0, at most
                    10; 1 is off
    logit_bias:     token id -> number from -100 to 100 that is added to the token's logit; at most 1,024 entries
    allowed_token_ids: only these tokens are generated; at most 1,024
    bad_token_ids:  these tokens are never generated; at most 1,024
    min_tokens:     number of tokens before which no end token is generated and stop strings are ignored
    seed:           the same seed gives the same random numbers, alone or in any batch; None draws a seed
    stop:           strings that end the text, at most 16; they may span tokens and are not part of the text
    stop_token_ids: tokens that end the text, in addition to the model's end-of-sequence tokens; at most 1,024
    ignore_eos:     generate past the model's end-of-sequence tokens (for benchmarks)
    skip_special_tokens: leave the tokenizer's special tokens out of the text
    detokenize:     False returns tokens without their text, which saves the host's time; stop strings need the text
    logprobs:       report the log-probability of each token, and those of this many most likely tokens, at most 20
    prompt_logprobs: report the same for each token of the prompt except the first one
    structured:     what the whole answer must be, for example JSON of a schema
    speculative:    use speculative decoding if the engine is set up for it (`EngineConfig.speculative`); the answer is the same
    n:              number of answers to the prompt; their seeds are seed, seed + 1, ...
    best_of:        generate this many answers and return the n with the largest mean log-probability of a token; None
                    returns all n answers as they are generated

    Order of application: penalties and biases change the logits, temperature scales them, then top_k, top_p and min_p choose
    which tokens are kept; top_p counts the probabilities among the tokens that top_k keeps.

    "First" has one meaning everywhere: more likely tokens come first, and of equally likely ones the one with the lower id.
    Greedy takes the first token, each limit keeps the first tokens, and log-probabilities report the first ones, in this order.
    Equal logits are frequent in bfloat16. So `top_k=k` keeps exactly k tokens, and `top_k=1`, `min_p=1` and a `top_p` below the
    probability of the first token choose what greedy chooses.

    Raises ParameterError, a ValueError that names the field, for a value that is not allowed.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured: StructuredOutput | None = None
    speculative: bool = True
    n: int = 1
    best_of: int | None = None

    def __post_init__(self) -> None:
        self._check_types()
        self._check_ranges()
        self._check_tokens()

    def _check_types(self) -> None:
        for name in _INTEGERS:
            value = getattr(self, name)
            # the usual cases call no function, because a server does this for each request
            if type(value) is not int and not (value is None and name in _OPTIONAL):
                _require(_is_integer(value), name, "be an integer", value)
        for name in _NUMBERS:
            value = getattr(self, name)
            if type(value) is not float:
                _require(_is_number(value), name, "be a number", value)
        _require(isinstance(self.structured, StructuredOutput | None), "structured", "be a StructuredOutput", self.structured)
        _require(isinstance(self.speculative, bool), "speculative", "be True or False", self.speculative)
        _require(isinstance(self.detokenize, bool), "detokenize", "be True or False", self.detokenize)
        texts = isinstance(self.stop, tuple | list) and all(isinstance(text, str) and text for text in self.stop)
        _require(texts, "stop", "be a tuple of strings that are not empty", self.stop)
        _require(len(self.stop) <= MAX_STOP, "stop", f"hold at most {MAX_STOP} strings", len(self.stop))
        _require(self.detokenize or not self.stop, "detokenize", "be True with stop strings", self.detokenize)

    def _check_ranges(self) -> None:
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "be at least 1 or None", self.max_tokens)
        _require(0.0 <= self.temperature <= 100.0, "temperature", "be between 0 and 100", self.temperature)
        _require(0.0 < self.top_p <= 1.0, "top_p", "be above 0 and at most 1", self.top_p)
        _require(self.top_k >= 0, "top_k", "be 0 (keep all tokens) or positive", self.top_k)
        _require(0.0 <= self.min_p <= 1.0, "min_p", "be between 0 and 1", self.min_p)
        _require(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "be between -2 and 2", self.presence_penalty)
        _require(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "be between -2 and 2", self.frequency_penalty)
        repetition = self.repetition_penalty
        _require(0.0 < repetition <= 10.0, "repetition_penalty", "be above 0 and at most 10", repetition)
        limit = self.min_tokens if self.max_tokens is None else self.max_tokens
        _require(0 <= self.min_tokens <= limit, "min_tokens", "be between 0 and max_tokens", self.min_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _require(count is None or 0 <= count <= 20, name, "be between 0 and 20, or None", count)
        _require(self.n >= 1, "n", "be at least 1", self.n)
        _require(self.best_of is None or self.best_of >= self.n, "best_of", f"be at least n = {self.n}, or None", self.best_of)
        _require(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "be a 64-bit integer or None", self.seed)

    def _check_tokens(self) -> None:
        bias = self.logit_bias
        if bias is not None:
            small = isinstance(bias, Mapping) and len(bias) <= MAX_IDS
            _require(small, "logit_bias", f"be a mapping of at most {MAX_IDS} token ids", bias)
            numbers = all(_is_integer(t) and _is_number(b) and t >= 0 and abs(b) <= 100 for t, b in bias.items())
            _require(numbers, "logit_bias", "map token ids that are not negative to numbers from -100 to 100", bias)
        for name in ("allowed_token_ids", "bad_token_ids", "stop_token_ids"):
            ids = getattr(self, name)
            if ids == () or (ids is None and name == "allowed_token_ids"):
                continue
            integers = isinstance(ids, tuple | list) and all(map(_is_integer, ids))
            _require(integers, name, "be a tuple of token ids, which are integers", ids)
            _require(len(ids) <= MAX_IDS, name, f"hold at most {MAX_IDS} token ids", len(ids))
            _require(all(t >= 0 for t in ids), name, "hold token ids that are not negative", ids)
        _require(self.allowed_token_ids is None or len(self.allowed_token_ids) > 0, "allowed_token_ids", "hold a token id", ())

    def with_numbers(self, **numbers: int | None) -> SamplingParams:
        """The same parameters with other numbers, such as max_tokens, whose ranges are checked again."""
        if all(getattr(self, name) == number for name, number in numbers.items()):
            return self
        other = copy(self)
        for name, number in numbers.items():
            object.__setattr__(other, name, number)
        other._check_ranges()
        return other

    @property
    def greedy(self) -> bool:
        """Whether the first token is always taken.

        Below a temperature of 1e-6 one rounding error decides the token, and scaled logits leave the range of float32.
        """
        return self.temperature < 1e-6 or self.top_k == 1 or self.min_p == 1.0

    @property
    def penalised(self) -> bool:
        """Whether a penalty makes the logit of a token depend on the tokens before it."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    def token_ids(self) -> Iterator[int]:
        """Every token id in these parameters."""
        return chain(self.logit_bias or (), self.allowed_token_ids or (), self.bad_token_ids, self.stop_token_ids)


MAX_IDS = 1024
"""Bound of `logit_bias` and of each list of token ids: every step goes through all of them."""
MAX_STOP = 16
"""Bound of `stop`."""
MAX_STRUCTURED = 1 << 18
"""Maximum number of characters of a structured output."""
_OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs", "best_of")
_INTEGERS = (*_OPTIONAL, "top_k", "min_tokens", "n")
_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


def schema_length(schema: object, limit: int) -> int:
    """A lower bound of the number of characters of a schema in JSON. Counting stops above `limit`.

    Each value counts as two characters, including its separator, and a text as its length plus three.
    """
    total = 2
    values = [schema]
    while values and total <= limit:
        value = values.pop()
        if isinstance(value, str):
            total += len(value) + 1
        elif isinstance(value, Mapping):
            total += 4 * len(value)
            values += value
            values += value.values()
        elif isinstance(value, list | tuple):
            total += 2 * len(value)
            if total <= limit:
                values += [each for each in value if not isinstance(each, int | float)]
    return total


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require(holds: bool, field: str, rule: str, value: object) -> None:
    if not holds:
        raise ParameterError(field, rule, value)


def params_of_each(
    prompts: Sequence[str | Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None, default: SamplingParams
) -> Sequence[SamplingParams]:
    """The parameters of each prompt. params: one for all prompts, or one for each prompt; None means `default`

    Raises ParameterError if their number differs from the number of prompts, or if `prompts` is a single text.
    """
    if isinstance(prompts, str):
        raise ParameterError("prompts", "be a list of prompts, not one text", prompts)
    if params is None or isinstance(params, SamplingParams):
        return [params or default] * len(prompts)
    rule = f"be one SamplingParams, or one for each of {len(prompts)} prompts"
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise ParameterError("params", rule, params)
    if len(params) != len(prompts):
        raise ParameterError("params", rule, len(params))
    return params


def adapter_of_each(prompts: Sequence[str | Sequence[int]], adapter: str | Sequence[str | None] | None) -> Sequence[str | None]:
    """The name of each prompt's adapter. adapter: one for all prompts, or one for each prompt; None means the model itself

    Raises ParameterError if it is neither.
    """
    if adapter is None or isinstance(adapter, str):
        return [adapter] * len(prompts)
    rule = f"be one name, or one for each of {len(prompts)} prompts"
    if not isinstance(adapter, Sequence):
        raise ParameterError("adapter", rule, adapter)
    if len(adapter) != len(prompts):
        raise ParameterError("adapter", rule, len(adapter))
    return adapter
