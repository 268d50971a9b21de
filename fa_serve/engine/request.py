"""What goes into the engine and what comes out of it, and the state of a request in between. Plain Python, no torch.

    params = SamplingParams(max_tokens=64, temperature=0.7, top_p=0.9, stop=("\\n\\n",), seed=1)

`SamplingParams` validates itself; `RequestOutput` is one increment of one request; `Completion` is a whole answer, as the
offline API returns it. `Request` belongs to the scheduler: tokens, pages, and how far the cache is filled. Left out: text
state (detokenizer.py) and everything on a device (model_runner.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any, Literal

from fa_serve.engine.errors import RequestError
from fa_serve.spec import ParameterError

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """What the whole answer must be: exactly one of these. The engine checks the content when the request is submitted.

    json_schema: a JSON schema, as a dict or as text; json_object: any JSON object
    regex:       a regular expression that the whole text matches
    choice:      one of these texts, exactly
    grammar:     a context-free grammar in Lark's notation, whose start rule is `start`
    """

    json_schema: Mapping[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [f.name for f in fields(self) if getattr(self, f.name) not in (None, False)]
        _require(len(given) == 1, "structured", "exactly one of " + ", ".join(f.name for f in fields(self)), given)
        _require(isinstance(self.json_object, bool), "json_object", "True or False", self.json_object)
        _require(isinstance(self.json_schema, Mapping | str | None), "json_schema", "a dict or text", self.json_schema)
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            _require(text is None or (isinstance(text, str) and text != ""), name, "a text that is not empty", text)
        if self.choice is not None:
            texts = isinstance(self.choice, tuple | list) and all(isinstance(text, str) and text for text in self.choice)
            _require(texts and len(self.choice) > 0, "choice", "a tuple of texts that are not empty", self.choice)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to end. A bad value is a ValueError that names the field.

    max_tokens:     tokens to generate at most; None, or more than the model's length leaves room for, means up to that length
    temperature:    below 1e-6 is greedy; 1 samples from the model's own distribution
    top_p:          keep the most likely tokens whose probabilities first sum to at least top_p, in (0, 1]
    top_k:          keep the k most likely tokens; 0 keeps all
    min_p:          keep tokens at least min_p times as likely as the most likely one
    presence_penalty, frequency_penalty: subtracted from the logits of tokens in the answer, once or for each time
    repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or the answer; 1 is off
    logit_bias:     token id -> what is added to its logit; it and each list of ids have MAX_IDS at most
    allowed_token_ids: nothing but these is generated; bad_token_ids: none of these is
    min_tokens:     tokens before which no end token is generated and no stop string is looked for
    seed:           the same seed gives the same random numbers, alone or in any batch; None draws one
    stop:           strings that end the text; they may span tokens and are not part of it
    stop_token_ids: tokens that end the text, on top of the model's own end-of-sequence tokens
    ignore_eos:     generate past the model's end-of-sequence tokens (for benchmarks)
    skip_special_tokens: leave the tokenizer's special tokens out of the text
    logprobs:       report each token's log-probability under the model, and those of so many most likely ones
    prompt_logprobs: the same of each token of the prompt but the first, given what is before it
    structured:     what the whole answer must be: of a JSON schema, a grammar, a choice, ...
    n:              answers to the one prompt; their seeds are seed, seed + 1, ...
    best_of:        generate so many answers and give the n that are likeliest per token; None gives all n as they come

    The order: penalties and biases change the logits, temperature scales them, then top_k, top_p and min_p choose what is kept.
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
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured: StructuredOutput | None = None
    n: int = 1
    best_of: int | None = None

    def __post_init__(self) -> None:
        for name in _INTEGERS:
            value = getattr(self, name)
            if type(value) is not int:  # the usual case costs no calls: a server does this for each request
                _require(_is_integer(value) or (value is None and name in _OPTIONAL), name, "an integer", value)
        for name in _NUMBERS:
            if type(value := getattr(self, name)) is not float:
                _require(_is_number(value), name, "a number", value)
        for name in ("allowed_token_ids", "bad_token_ids", "stop_token_ids"):
            ids = getattr(self, name)
            integers = isinstance(ids, tuple | list) and all(map(_is_integer, ids))
            _require(integers or (ids is None and name == "allowed_token_ids"), name, "token ids, which are integers", ids)
            _require(len(ids or ()) <= MAX_IDS, name, f"at most {MAX_IDS} token ids", len(ids or ()))
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1 or None", self.max_tokens)
        _require(0.0 <= self.temperature <= 100.0, "temperature", "between 0 and 100", self.temperature)
        _require(0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1", self.top_p)
        _require(self.top_k >= 0, "top_k", "0 (all) or positive", self.top_k)
        _require(0.0 <= self.min_p <= 1.0, "min_p", "between 0 and 1", self.min_p)
        _require(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "between -2 and 2", self.presence_penalty)
        _require(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "between -2 and 2", self.frequency_penalty)
        _require(0.0 < self.repetition_penalty <= 10.0, "repetition_penalty", "above 0 and at most 10", self.repetition_penalty)
        bias = self.logit_bias or {}
        _require(isinstance(bias, Mapping) and len(bias) <= MAX_IDS, "logit_bias", f"a mapping of at most {MAX_IDS} ids", bias)
        numbers = all(_is_integer(t) and _is_number(b) and t >= 0 and abs(b) <= 100 for t, b in bias.items())
        _require(numbers, "logit_bias", "token ids >= 0 with -100 to 100 each", bias)
        allowed = self.allowed_token_ids
        _require(allowed is None or (len(allowed) > 0 and min(allowed) >= 0), "allowed_token_ids", "token ids >= 0", allowed)
        _require(all(t >= 0 for t in self.bad_token_ids), "bad_token_ids", "token ids >= 0", self.bad_token_ids)
        _require(0 <= self.min_tokens <= (self.max_tokens or self.min_tokens), "min_tokens", "0 to max_tokens", self.min_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _require(count is None or 0 <= count <= 20, name, "0 to 20 or None", count)
        _require(self.n >= 1, "n", "at least 1", self.n)
        _require(self.best_of is None or self.best_of >= self.n, "best_of", f"at least n = {self.n}, or None", self.best_of)
        _require(isinstance(self.structured, StructuredOutput | None), "structured", "a StructuredOutput", self.structured)
        _require(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer or None", self.seed)
        texts = isinstance(self.stop, tuple | list) and all(isinstance(text, str) and text for text in self.stop)
        _require(texts, "stop", "a tuple of non-empty strings", self.stop)
        _require(all(t >= 0 for t in self.stop_token_ids), "stop_token_ids", "token ids >= 0", self.stop_token_ids)

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-6  # below that a difference of one rounding decides, and float32 ends

    @property
    def penalised(self) -> bool:
        """Whether a token's logit depends on where it has been before."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def narrowed(self) -> bool:
        """Whether it may be by these parameters that no token is left."""
        return bool(self.structured or self.allowed_token_ids or self.bad_token_ids or self.logit_bias)

    def token_ids(self) -> Iterator[int]:
        """Every token id that these parameters name."""
        return chain(self.logit_bias or (), self.allowed_token_ids or (), self.bad_token_ids, self.stop_token_ids)


MAX_IDS = 1024  # each step goes through all of them
_OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs", "best_of")
_INTEGERS = (*_OPTIONAL, "top_k", "min_tokens", "n")
_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require(holds: bool, name: str, rule: str, value: object) -> None:
    if not holds:
        raise ParameterError(name, f"be {rule}", value)


@dataclass(slots=True)
class TokenLogprob:
    """A token with its log-probability, and the most likely tokens in its place, the likeliest first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(slots=True)
class RequestOutput:
    """What one request gained since its last output. `text` never ends inside a character; tokens may run ahead of it.

    finish_reason: "stop" (an end token or a stop string), "length", "abort", "error" (then `error` says what happened)
    index:         which of the n answers to the prompt this is; `finished` speaks of this one alone
    logprobs:      one for each of token_ids, if they were asked for
    prompt_logprobs: one for each token of the prompt, None for the first; in the first output, if they were asked for
    queue_time:    seconds from the request's arrival to its first step; in the last output, None if it never had one
    num_*:         totals so far; num_cached_tokens are prompt tokens whose keys and values came from the prefix cache
    """

    request_id: str
    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finished: bool = False
    finish_reason: FinishReason | None = None
    error: RequestError | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    index: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None
    queue_time: float | None = None

    def __reduce__(self) -> tuple[type[RequestOutput], tuple[object, ...]]:
        """Pickled as a call, in a third of the time: a step's outputs cross from process to process."""
        return RequestOutput, (
            self.request_id,
            self.prompt_token_ids,
            self.text,
            self.token_ids,
            self.logprobs,
            self.finished,
            self.finish_reason,
            self.error,
            self.num_prompt_tokens,
            self.num_output_tokens,
            self.num_cached_tokens,
            self.index,
            self.prompt_logprobs,
            self.queue_time,
        )

    def absorb(self, later: RequestOutput) -> None:
        """Become the one increment that spans this and a later output of the same request."""
        self.text += later.text
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.queue_time = later.queue_time
        self.finished = later.finished
        self.finish_reason = later.finish_reason
        self.error = later.error
        self.num_output_tokens = later.num_output_tokens
        self.num_cached_tokens = later.num_cached_tokens


@dataclass(slots=True)
class Completion:
    """A whole answer: the sum of a request's outputs of one index."""

    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprob] | None = None
    error: RequestError | None = None
    num_cached_tokens: int = 0
    index: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @classmethod
    def of(cls, output: RequestOutput) -> Completion:
        """output: all that one answer gave, absorbed into one."""
        assert output.finish_reason is not None
        return cls(
            output.prompt_token_ids,
            output.text,
            output.token_ids,
            output.finish_reason,
            output.logprobs,
            output.error,
            output.num_cached_tokens,
            output.index,
            output.prompt_logprobs,
        )


@dataclass(slots=True, eq=False)
class Request:
    """One sequence on its way through the engine; the scheduler is the only one to change it.

    tokens:       the prompt, then every sampled token that is known on the host
    num_pending:  sampled tokens that are still on the device (a step that has been launched and not yet read)
    num_computed: leading tokens whose keys and values are in the cache once all launched steps have run
    num_shared:   leading pages that were found in the prefix cache; num_offered: leading pages that are registered there
    num_released: leading pages that are behind the window of every layer, and not held any more
    rank:         position in the queue; smaller is served first and preempted last
    slot:         row of per-sequence state on the device while it runs, else -1
    arrival:      when it came, on the engine's clock; queue_time: seconds until its first step
    prompt_logprobs: those known so far, if they are wanted
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int = 0
    end_ids: frozenset[int] = frozenset()
    rank: tuple[float, int] = (0.0, 0)
    arrival: float = 0.0

    tokens: list[int] = field(init=False)
    num_pending: int = 0
    num_computed: int = 0
    num_cached_tokens: int = 0
    num_shared: int = 0
    num_offered: int = 0
    num_released: int = 0
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    page_hashes: list[bytes] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: RequestError | None = None
    queue_time: float | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # nothing is before the first

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
