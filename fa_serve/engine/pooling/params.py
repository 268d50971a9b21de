"""What a request to an encoder asks for, and what others need to know about a loaded encoder. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from fa_serve.spec import ParameterError

Activation = Literal["default", "none", "sigmoid", "softmax"]


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """What is to be computed for each input of a request.

    tokens:     vectors of all tokens instead of one vector; only for the tasks embed and token_embed
    dimensions: how many numbers of a vector are kept, from its beginning. If the model's vectors have length 1, the shortened
                ones have length 1 as well. None keeps all
    normalize:  whether vectors get length 1; None does what the model's folder says
    activation: what is applied to logits. "default" is the activation that the model's folder names, and without one the
                sigmoid for one label or independent labels, and the softmax for other models
    """

    tokens: bool = False
    dimensions: int | None = None
    normalize: bool | None = None
    activation: Activation = "default"

    def check(self, card: EncoderCard) -> None:
        """Raise ParameterError for what this encoder does not compute."""
        if self.tokens and card.task not in ("embed", "token_embed"):
            raise ParameterError("tokens", f"be False for a model of the task {card.task}", self.tokens, "unsupported")
        if self.dimensions is not None and not 1 <= self.dimensions <= card.size:
            rule = f"be from 1 to {card.size}, which is the size of this model's vectors"
            raise ParameterError("dimensions", rule, self.dimensions)
        if self.dimensions is not None and card.task not in ("embed", "token_embed"):
            raise ParameterError("dimensions", f"be None for a model of the task {card.task}", self.dimensions, "unsupported")
        if self.activation not in ("default", "none", "sigmoid", "softmax"):
            raise ParameterError("activation", "be default, none, sigmoid or softmax", self.activation)


@dataclass(frozen=True, slots=True)
class EncoderCard:
    """What others need to know about a loaded encoder.

    task:       as in fa_serve.hf.encoders.folder
    size:       how many numbers an answer has: the size of a vector, the vocabulary for weights of words, or the labels
    max_tokens: the most tokens of an input
    labels:     names of the classes, by index
    prompts:    texts that are written before an input, by name; default_prompt: the name of the prompt for requests that name
                none
    skips_prompt: whether pooling leaves out the tokens of a prompt
    takes_types:  whether the model tells the two texts of a pair apart by types of tokens
    lower_case: whether texts are converted to lower case first
    normalizes: whether vectors have length 1
    pooling:    how vectors are made from tokens, as text for people
    """

    task: str
    size: int
    max_tokens: int
    labels: tuple[str, ...] = ()
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    skips_prompt: bool = False
    takes_types: bool = False
    lower_case: bool = False
    normalizes: bool = False
    pooling: str = ""


@dataclass(slots=True)
class Pooled:
    """The result of an encoder for one input.

    values:  float32: (size,) for a vector, a score or classes; (tokens, size) for vectors of tokens; (n,) for weights of words
    indices: (n,) int32, the ids of the words that have these weights; None for all other tasks
    """

    values: np.ndarray[Any, np.dtype[np.float32]]
    indices: np.ndarray[Any, np.dtype[np.int32]] | None = None


@dataclass(slots=True, eq=False)
class PooledRows:
    """The results of an encoder for several inputs, in their order, as arrays. Indexing returns the `Pooled` of one input.

    values:  float32: (inputs, size) for vectors, scores or classes; for all inputs end to end, (total, size) for vectors of
             tokens and (total,) for weights of words
    ends:    (inputs + 1,) int64: where each input begins in `values`, and the end of the last one; None if each has one row
    indices: (total,) int32, the ids of the words; None for all other tasks
    """

    values: np.ndarray[Any, np.dtype[np.float32]]
    ends: np.ndarray[Any, np.dtype[np.int64]] | None = None
    indices: np.ndarray[Any, np.dtype[np.int32]] | None = None

    def __len__(self) -> int:
        return len(self.values) if self.ends is None else len(self.ends) - 1

    def __getitem__(self, index: int) -> Pooled:
        if not 0 <= index < len(self):
            raise IndexError(index)
        if self.ends is None:
            return Pooled(self.values[index])
        rows = slice(self.ends[index], self.ends[index + 1])
        return Pooled(self.values[rows], None if self.indices is None else self.indices[rows])

    def __iter__(self) -> Iterator[Pooled]:
        return (self[index] for index in range(len(self)))

    def part(self, begin: int, end: int) -> PooledRows:
        """The results for the inputs from `begin` up to but not including `end`."""
        if self.ends is None:
            return PooledRows(self.values[begin:end])
        first = self.ends[begin]
        rows = slice(first, self.ends[end])
        indices = None if self.indices is None else self.indices[rows]
        return PooledRows(self.values[rows], self.ends[begin : end + 1] - first, indices)
