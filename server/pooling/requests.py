"""What clients send to an encoder. The names of the fields are those of the API that a route belongs to.

An input that is longer than the model's limit gets a 400, unless `truncate` is true (or `truncate_prompt_tokens` is -1, vLLM's
name for the same).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, cast

from pydantic import Field, model_validator

from ..schemas import NonEmpty, Prompt
from ..strict import StrictModel, Unsupported, field_error, one_error
from .vectors import VectorFormat

Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[str], Field(min_length=1, fail_fast=True)]
OneOrMore = Annotated[str | Texts, one_error("a string or a list of at least one string")]
Priority = Annotated[int, Field(ge=-1000, le=1000)]


class PoolingRequest(StrictModel):
    """The fields that all routes of an encoder share."""

    MESSAGE_LISTS: ClassVar[tuple[str, ...]] = ()

    truncate: bool | None = Field(
        None, description="Cut inputs that are longer than the model's limit, instead of refusing them with a 400."
    )
    user: str | None = Field(None, max_length=512, description="Written to the access log.")
    priority: Priority | None = Field(
        None, description="Among one API key's requests, those with a lower value are served sooner."
    )


class VllmRequest(PoolingRequest):
    """The fields that vLLM's routes share, including the routes that vLLM has adopted from other APIs."""

    model: str | None = None
    truncate_prompt_tokens: Literal[-1] | None = Field(None, description="-1 is the same as truncate.")

    @model_validator(mode="after")
    def _check_truncation(self) -> VllmRequest:
        if self.truncate is False and self.truncate_prompt_tokens is not None:
            raise field_error("truncate_prompt_tokens", "must be absent when truncate is false, got -1")
        return self

    @property
    def cuts(self) -> bool:
        return bool(self.truncate) or self.truncate_prompt_tokens is not None


class EmbeddingRequest(VllmRequest):
    model: str
    input: Prompt = Field(description="Texts, or token ids, which are used unchanged.")
    dimensions: int | None = Field(
        None,
        ge=1,
        description="Keep only this many values from the start of each vector. Normalised vectors are normalised again.",
    )
    encoding_format: VectorFormat | None = Field(
        None,
        description=(
            "base64, float16 and bfloat16 are base64 of little-endian numbers: float32, float16, bfloat16. int8 and uint8 "
            "divide the range from minus to plus the largest absolute value of a vector into 255 steps. binary and ubinary "
            "pack 8 signs into an integer."
        ),
    )
    prompt_name: str | None = Field(
        None, max_length=256, description="Name of one of the model's prompts, which is put before each text."
    )
    normalize: bool | None = Field(
        None, description="Whether vectors are normalised to length 1; by default as the model's files say."
    )

    def inputs(self) -> list[str | list[int]]:
        """The inputs as a list, in whichever of the four forms the client wrote them."""
        if isinstance(self.input, str) or (self.input and isinstance(self.input[0], int)):
            return [self.input]
        return list(self.input)  # type: ignore[arg-type]


class RerankDocument(StrictModel):
    text: str


Documents = Annotated[
    Annotated[list[str | RerankDocument], Field(min_length=1, fail_fast=True)],
    one_error("a list of at least one string, or of objects with a text"),
]


class RerankRequest(VllmRequest):
    """The body of /v1/rerank (Jina, Cohere v1) and /v2/rerank (Cohere v2)."""

    query: NonEmpty
    documents: Documents
    top_n: int | None = Field(None, ge=1, description="Return only this many documents, the best ones.")
    return_documents: bool | None = Field(
        None,
        description="Return the text of each document. Default: true on /v1/rerank, as in Jina's API, and false on /v2/rerank.",
    )

    UNSUPPORTED: ClassVar[Unsupported] = {
        "max_tokens_per_doc": (4096,),
        "max_chunks_per_doc": (),
        "rank_fields": (["text"],),
    }

    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


class ScoreRequest(VllmRequest):
    """The body of /score and /v1/score. One text_1 is paired with each text_2; several are paired with text_2 one by one."""

    text_1: OneOrMore
    text_2: OneOrMore

    def pairs(self) -> list[tuple[str, str]]:
        first = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        second = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        if len(first) == 1:
            first = first * len(second)
        return list(zip(first, second, strict=True))

    @model_validator(mode="after")
    def _check_lengths(self) -> ScoreRequest:
        first = 1 if isinstance(self.text_1, str) else len(self.text_1)
        second = 1 if isinstance(self.text_2, str) else len(self.text_2)
        if first not in (1, second):
            raise field_error("text_1", f"must be one text, or as many texts as text_2, got {first} and {second}")
        return self


class ClassifyRequest(VllmRequest):
    """The body of /classify."""

    input: OneOrMore

    def texts(self) -> list[str]:
        return [self.input] if isinstance(self.input, str) else self.input


class TeiRequest(PoolingRequest):
    """The fields that TEI's routes share. Inputs can be cut only on the right."""

    model: str | None = None

    UNSUPPORTED: ClassVar[Unsupported] = {"truncation_direction": ("Right", "right")}


class TeiInputs(TeiRequest):
    inputs: Prompt = Field(description="Texts, or token ids, which are used unchanged.")
    prompt_name: str | None = Field(
        None, max_length=256, description="Name of one of the model's prompts, which is put before each text."
    )

    def items(self) -> list[str | list[int]]:
        if isinstance(self.inputs, str) or (self.inputs and isinstance(self.inputs[0], int)):
            return [self.inputs]
        return list(self.inputs)  # type: ignore[arg-type]


class TeiEmbedRequest(TeiInputs):
    """The body of /embed."""

    normalize: bool | None = Field(None, description="Whether vectors are normalised to length 1. Default: true.")
    dimensions: int | None = Field(None, ge=1, description="Keep only this many values from the start of each vector.")


class TeiRerankRequest(TeiRequest):
    """The body of /rerank."""

    query: NonEmpty
    texts: Texts
    raw_scores: bool | None = Field(None, description="Return logits, without applying the model's activation function.")
    return_text: bool | None = Field(None, description="Return the text with each score.")


PredictInput = Annotated[list[str], Field(min_length=1, max_length=2, fail_fast=True)]


class TeiPredictRequest(TeiRequest):
    """The body of /predict: a text, a list of one or two texts, or a list of such lists. Two texts are a pair."""

    inputs: Annotated[
        Annotated[
            str | PredictInput | Annotated[list[PredictInput], Field(min_length=1, fail_fast=True)],
            Field(union_mode="left_to_right"),
        ],
        one_error("a string, a list of one or two strings, or a list of such lists"),
    ]
    raw_scores: bool | None = Field(None, description="Return logits instead of probabilities.")

    @property
    def is_batch(self) -> bool:
        return isinstance(self.inputs, list) and isinstance(self.inputs[0], list)

    def items(self) -> list[str | tuple[str, str]]:
        if isinstance(self.inputs, str):
            return [self.inputs]
        found = cast("list[list[str]]", self.inputs if self.is_batch else [self.inputs])
        return [each[0] if len(each) == 1 else (each[0], each[1]) for each in found]
