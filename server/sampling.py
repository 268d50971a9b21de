"""A request's fields as the engine's `SamplingParams`. The engine checks the values; its complaint becomes a 400."""

from __future__ import annotations

from typing import Any

from fa_serve.engine import SamplingParams

from .errors import BadRequest
from .schemas import SamplingRequest

SAME = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
)


def sampling_params(body: SamplingRequest, max_tokens: int, logprobs: int | None, sample: int) -> SamplingParams:
    """For the `sample`-th answer to the same prompt. What the request leaves open is the engine's default."""
    given: dict[str, Any] = {name: getattr(body, name) for name in SAME}
    given |= {
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "top_k": None if body.top_k is None else max(body.top_k, 0),
        "logit_bias": _token_ids(body.logit_bias) if body.logit_bias else None,
        "allowed_token_ids": None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        "seed": None if body.seed is None else (body.seed + sample + 2**63) % 2**64 - 2**63,
        "stop": (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        "stop_token_ids": tuple(body.stop_token_ids or ()),
    }
    try:
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})
    except ValueError as error:
        raise BadRequest(f"{error}.", param=str(error).split()[0], code="invalid_value") from None


def _token_ids(bias: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        raise BadRequest("logit_bias must have token ids as its keys.", param="logit_bias", code="invalid_value") from None
