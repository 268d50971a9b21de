"""A request's fields as the engine's `SamplingParams`. The engine checks the values, and a value that it refuses is a 400."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fa_serve.engine import SamplingParams, StructuredOutput
from fa_serve.spec import ParameterError

from ..errors import BadRequest, parameter_refused
from ..schemas import SamplingRequest

SAME_NAME = (
    "n",
    "seed",
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "speculative",
)


@dataclass(frozen=True)
class AnswerParams:
    """The parameters that completions and chats derive in different ways. None takes the engine's default."""

    max_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None
    structured: StructuredOutput | None
    skip_special_tokens: bool | None
    stop_token_ids: tuple[int, ...]


def sampling_params(body: SamplingRequest, answer: AnswerParams, default: SamplingParams) -> SamplingParams:
    """A field that the request leaves out gets the engine's default. Raises BadRequest, which names the field."""
    values = vars(body)
    given: dict[str, Any] = {name: values[name] for name in SAME_NAME} | vars(answer)
    given["top_k"] = None if body.top_k is None else max(body.top_k, 0)
    given["logit_bias"] = _token_ids(body.logit_bias) if body.logit_bias else None
    given["allowed_token_ids"] = None if body.allowed_token_ids is None else tuple(body.allowed_token_ids)
    given["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    given["best_of"] = values.get("best_of")
    try:
        return replace(default, **{name: value for name, value in given.items() if value is not None})
    except ParameterError as error:
        raise parameter_refused(error, error.field) from None


def _token_ids(bias: dict[str, float]) -> dict[int, float]:
    try:
        ids = {int(token): value for token, value in bias.items()}
    except ValueError:
        ids = {}
    # int() also accepts "1_0", "+1" and the digits of other scripts, which no client means
    if [str(token) for token in ids] != list(bias):
        raise BadRequest("logit_bias must have token ids as its keys.", param="logit_bias", code="invalid_value")
    return ids
