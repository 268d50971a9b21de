"""The replies of an encoder's routes, as typed dictionaries like those in server/replies.py."""

from __future__ import annotations

from typing import Literal

from typing_extensions import NotRequired, TypedDict


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class Embedding(TypedDict):
    """embedding: a list of floating point numbers or integers, or the base64 of floating point numbers"""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class RankedText(TypedDict):
    text: str


class RerankResult(TypedDict):
    index: int
    relevance_score: float
    document: NotRequired[RankedText]


class ApiVersion(TypedDict):
    version: str


class RerankMeta(TypedDict):
    api_version: ApiVersion


class RerankReply(TypedDict):
    """results: the best one first"""

    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage
    meta: RerankMeta


class Score(TypedDict):
    index: int
    object: Literal["score"]
    score: float


class ScoreList(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class Classification(TypedDict):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationList(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classification]
    usage: EmbeddingUsage


class TeiRank(TypedDict):
    index: int
    score: float
    text: NotRequired[str]


class TeiPrediction(TypedDict):
    label: str
    score: float


class TeiWeight(TypedDict):
    index: int
    value: float
