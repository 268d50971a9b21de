"""What clients send: OpenAI's fields with OpenAI's names, and additional fields with vLLM's names.

The models check types and ranges. The engine's `SamplingParams` have the defaults of sampling. Requests with messages are in
chat/conversation.py, replies in replies.py.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from .strict import NOTHING, StrictModel, Unsupported, field_error, one_error

MAX_IDS = 1024  # the engine's bound for token ids in one field
MAX_CHOICES = 10_000
MAX_BEAMS = 10  # each step of a search needs the log-probabilities of twice as many tokens, and the engine returns at most 20
MAX_SCHEMA = 1 << 18  # characters of a schema in a string: the bound on the values of a body does not count what is in a string
NonEmpty = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
Choices = Annotated[list[NonEmpty], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
FewIds = Annotated[TokenIds, Field(max_length=MAX_IDS)]
Stop = Annotated[
    NonEmpty | Annotated[list[NonEmpty], Field(max_length=16, fail_fast=True)],
    one_error("a non-empty string or a list of up to 16 non-empty strings"),
]
Prompt = Annotated[
    # pydantic takes the first member that fits. Prompts are long, so a member that does not fit must fail at its first item
    Annotated[str | Annotated[list[str], Field(fail_fast=True)] | TokenIds | list[TokenIds], Field(union_mode="left_to_right")],
    one_error("a string, a list of strings, a list of token ids, or a list of such lists"),
]


def _few_entries(value: Any) -> Any:
    """Refuse a dict with too many entries. pydantic would check the entries first, and make an error for each of them."""
    if isinstance(value, dict) and len(value) > MAX_IDS:
        raise PydanticCustomError("entries", "must have at most {limit} entries", {"limit": MAX_IDS})
    return value


# the time to parse an integer is quadratic in its digits, so a key may only be as long as a token id can be
TokenName = Annotated[str, Field(max_length=16)]
Bias = Annotated[
    dict[TokenName, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_IDS), BeforeValidator(_few_entries)
]
JsonSchema = Annotated[
    dict[str, Any] | Annotated[str, Field(max_length=MAX_SCHEMA)],
    one_error(f"a JSON schema, as an object or as a string of at most {MAX_SCHEMA} characters"),
]


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="With include_usage: each chunk has the usage so far.")

    UNSUPPORTED: ClassVar[Unsupported] = {"include_obfuscation": (False,)}


class StructuredOutputs(StrictModel):
    json_: JsonSchema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: NonEmpty | None = None
    choice: Choices | None = None
    grammar: NonEmpty | None = Field(None, description="A context-free grammar in Lark's notation.")


class LoadAdapterRequest(StrictModel):
    """The body of /v1/load_lora_adapter, with vLLM's fields."""

    lora_name: str = Field(min_length=1, max_length=128)
    lora_path: str = Field(min_length=1, max_length=4096, description="A folder on the server, as peft writes it.")


class UnloadAdapterRequest(StrictModel):
    """The body of /v1/unload_lora_adapter."""

    lora_name: str = Field(min_length=1, max_length=128)


class SamplingRequest(StrictModel):
    """The fields that /v1/completions and /v1/chat/completions share. Null is the same as absent."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1)
    stop: Stop | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Bias | None = Field(None, description="By token id.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=512, description="Written to the access log.")

    top_k: int | None = Field(None, ge=-1, description="0 and -1 keep every token.")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    min_tokens: int | None = Field(None, ge=0)
    stop_token_ids: FewIds | None = None
    allowed_token_ids: Annotated[FewIds, Field(min_length=1)] | None = None
    ignore_eos: bool | None = None
    speculative: bool | None = Field(
        None, description="Whether to use speculative decoding if the server is set up for it; the answer is the same."
    )
    priority: int | None = Field(
        None, ge=-1000, le=1000, description="Among one API key's requests, those with a lower value are served sooner."
    )
    cache_salt: str | None = Field(
        None, min_length=1, max_length=512, description="Cached prefixes are shared only between requests with the same salt."
    )
    return_token_ids: bool | None = Field(None, description="Adds prompt_token_ids and token_ids to each choice.")
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=20, description="Not allowed with stream.")
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: NonEmpty | None = None
    guided_choice: Choices | None = None
    guided_grammar: NonEmpty | None = None
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="Keep at most this many tokens of each prompt; -1 keeps as many as leave room for max_tokens."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="The side on which tokens are cut off. Default: left."
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Log-probabilities name a token by its id, as token_id:7."
    )

    use_beam_search: bool | None = Field(
        None,
        description=f"Search with n beams, at most {MAX_BEAMS}, and return n answers. Not allowed with stream or sampling.",
    )
    length_penalty: float | None = Field(
        None, ge=-10, le=10, description="The log-probability of a beam is divided by its number of tokens to this power."
    )

    NOT_FOR_BEAMS: ClassVar[Unsupported] = {
        "stream": (False,),
        "stop": ("", []),
        "temperature": (0, 0.0, 1, 1.0),
        "top_p": (1, 1.0),
        "top_k": (0, -1),
        "min_p": (0, 0.0),
        "presence_penalty": (0, 0.0),
        "frequency_penalty": (0, 0.0),
        "repetition_penalty": (1, 1.0),
        "min_tokens": (0,),
        "logit_bias": ({},),
        "allowed_token_ids": NOTHING,
        "prompt_logprobs": NOTHING,
    }

    @model_validator(mode="after")
    def _check_beams(self) -> SamplingRequest:
        if not self.use_beam_search:
            if self.length_penalty not in (None, 1.0):
                raise field_error("length_penalty", "is only allowed with use_beam_search")
            return self
        for name, neutral in self.NOT_FOR_BEAMS.items():
            value = getattr(self, name)
            if value is not None and value not in neutral:
                numbers = [choice for choice in neutral if isinstance(choice, int | float)]
                allowed = dict.fromkeys("false" if choice is False else f"{choice:g}" for choice in numbers)
                raise field_error(name, f"must be {' or '.join(allowed) or 'absent'} with use_beam_search")
        if self.n is not None and self.n > MAX_BEAMS:
            raise field_error("n", f"must be at most {MAX_BEAMS} with use_beam_search, got {self.n}")
        return self

    @model_validator(mode="after")
    def _check_truncation(self) -> SamplingRequest:
        if self.truncate_prompt_tokens == 0:
            raise field_error("truncate_prompt_tokens", "must be -1 or at least 1")
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise field_error("truncation_side", "is only allowed with truncate_prompt_tokens")
        return self

    @model_validator(mode="after")
    def _check_stream(self) -> SamplingRequest:
        if self.stream_options is not None and not self.stream:
            raise field_error("stream_options", "is only allowed when stream is true")
        if self.prompt_logprobs is not None and self.stream:
            raise field_error("prompt_logprobs", "is only allowed when stream is not true")
        return self


class CompletionRequest(SamplingRequest):
    max_tokens: int | None = Field(
        None, ge=0, description="0 is allowed with echo, to get only the prompt and its log-probabilities."
    )
    prompt: Prompt
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)

    best_of: int | None = Field(None, ge=1, description="Must not be above n with stream.")

    NOT_FOR_BEAMS: ClassVar[Unsupported] = {**SamplingRequest.NOT_FOR_BEAMS, "best_of": NOTHING, "echo": (False,)}
    UNSUPPORTED: ClassVar[Unsupported] = {"suffix": NOTHING}

    @model_validator(mode="after")
    def _check_max_tokens(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise field_error("max_tokens", "must be at least 1 unless echo is true")
        if self.max_tokens == 0 and self.min_tokens:
            raise field_error("min_tokens", "must be 0 when max_tokens is 0")
        return self

    @model_validator(mode="after")
    def _check_best_of(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise field_error("best_of", "must be at least n")
        if self.best_of is not None and self.best_of > (self.n or 1) and self.stream:
            raise field_error("best_of", "above n is only allowed when stream is not true")
        return self

    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list, in whichever of the four forms the client wrote them."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]


class DetokenizeRequest(StrictModel):
    model: str | None = None
    tokens: TokenIds
