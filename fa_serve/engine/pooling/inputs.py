"""Turns texts, pairs of texts and token ids into checked inputs of an encoder. A process without an engine may do this work.

    reader = InputReader(tokenizer, card, vocab_size=30522)
    [first, second] = reader.read(["a text", ("a question", "a text")])

An input that is too long is refused, or is cut if the caller asks for it. All texts of a call are tokenized together, which the
tokenizer does in parallel. Left out: threads and turns (fa_serve.server.tokenization).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any

import numpy as np
from tokenizers import Tokenizer, normalizers

from fa_serve.engine.pooling.params import EncoderCard
from fa_serve.engine.request.prompts import PromptReader
from fa_serve.spec import ParameterError

Ids = np.ndarray[Any, np.dtype[np.int32]]
Ends = np.ndarray[Any, np.dtype[np.int64]]
InputText = str | tuple[str, str] | Sequence[int]
"""A text, two texts that belong together, or token ids as they are."""
ITEM = "a text, a tuple of two texts or a list of token ids"
MAX_TOKENS = 1 << 20
"""The most tokens of all inputs of a call together."""
MAX_PROMPTS = 64
"""Prompts whose lengths are remembered."""
PLACE = re.compile(r"input\[(\d+)\](?:\[([01])\])?")
PIECE = 1 << 18
"""Characters that are tokenized at once: their offsets take a hundred times as many bytes."""


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """ids: (tokens,) int32; types: (tokens,) int32, the types of tokens, or None; skipped: how many tokens the prompt has"""

    ids: Ids
    types: Ids | None = None
    skipped: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class EncoderInputs:
    """Inputs end to end, in arrays. An object for each input would take longer than the tokens of a short text.

    ids:     (total,) int32
    ends:    (inputs + 1,) int64: where each input begins, and the end of the last one
    types:   (total,) int32, the types of tokens, or None
    skipped: (inputs,) int32, how many tokens the prompt of each input has; None if there are no prompts to skip
    """

    ids: Ids
    ends: Ends
    types: Ids | None = None
    skipped: Ids | None = None

    @classmethod
    def of(cls, inputs: Sequence[EncoderInput]) -> EncoderInputs:
        """The inputs end to end. Either all of them have types, or none has."""
        types = [each.types for each in inputs if each.types is not None]
        skipped = np.array([each.skipped for each in inputs], dtype=np.int32)
        return cls(
            np.concatenate([np.zeros(0, dtype=np.int32), *(each.ids for each in inputs)]),
            ends_of([len(each.ids) for each in inputs]),
            np.concatenate(types) if types else None,
            skipped if skipped.any() else None,
        )

    @classmethod
    def joined(cls, parts: Sequence[EncoderInputs]) -> EncoderInputs:
        """The inputs of several objects as one."""
        if len(parts) == 1:
            return parts[0]
        types = [each.types for each in parts if each.types is not None]
        skipped = None
        if any(each.skipped is not None for each in parts):
            none = [np.zeros(len(each), dtype=np.int32) if each.skipped is None else each.skipped for each in parts]
            skipped = np.concatenate(none)
        return cls(
            np.concatenate([each.ids for each in parts]),
            ends_of(np.concatenate([each.lengths for each in parts])),
            np.concatenate(types) if types else None,
            skipped,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as bytes, in a third of the time that arrays take: each request crosses the pipe to the engine's process."""
        more = [None if each is None else each.tobytes() for each in (self.types, self.skipped)]
        return _unpickled, (self.ids.tobytes(), self.ends.tobytes(), *more)

    @property
    def lengths(self) -> Ends:
        """(inputs,) int64: the tokens of each"""
        return np.diff(self.ends)

    def part(self, begin: int, end: int) -> EncoderInputs:
        """The inputs from `begin` up to but not including `end`."""
        first = self.ends[begin]
        rows = slice(first, self.ends[end])
        return EncoderInputs(
            self.ids[rows],
            self.ends[begin : end + 1] - first,
            None if self.types is None else self.types[rows],
            None if self.skipped is None else self.skipped[begin:end],
        )

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> EncoderInput:
        if not 0 <= index < len(self):
            raise IndexError(index)
        one = self.part(index, index + 1)
        return EncoderInput(one.ids, one.types, 0 if one.skipped is None else int(one.skipped[0]))

    def __iter__(self) -> Iterator[EncoderInput]:
        return (self[index] for index in range(len(self)))


def _unpickled(ids: bytes, ends: bytes, types: bytes | None, skipped: bytes | None) -> EncoderInputs:
    """What `__reduce__` took apart. The arrays are copies, because PyTorch warns of memory that it must not write."""
    more = [None if each is None else np.frombuffer(each, dtype=np.int32).copy() for each in (types, skipped)]
    return EncoderInputs(np.frombuffer(ids, dtype=np.int32).copy(), np.frombuffer(ends, dtype=np.int64).copy(), *more)


def ends_of(lengths: Iterable[int]) -> Ends:
    """(inputs + 1,) int64: where each of inputs of these lengths begins, and the end of the last one"""
    counts = np.fromiter(lengths, dtype=np.int64)
    ends = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=ends[1:])
    return ends


class InputReader:
    """Reads inputs for one encoder. Safe to use from any thread. vocab_size: of the model"""

    def __init__(self, tokenizer: Any, card: EncoderCard, vocab_size: int) -> None:
        self._card = card
        self._prompts = PromptReader(tokenizer, vocab_size, card.max_tokens)
        self._special = frozenset(tokenizer.all_special_ids)
        self._cuts_left = getattr(tokenizer, "truncation_side", "right") == "left"
        self._whole = _copy(tokenizer.backend_tokenizer, card.lower_case)
        self._cut = _copy(tokenizer.backend_tokenizer, card.lower_case)
        self._cut.enable_truncation(card.max_tokens, strategy="longest_first", direction="left" if self._cuts_left else "right")
        self._singles_have_zeros = not any(self._whole.encode("a").type_ids)
        self._prompt_length = lru_cache(MAX_PROMPTS)(self._count_prompt)

    def prompt(self, name: str | None) -> str:
        """The text of a prompt by its name; None is the model's default. Raises ParameterError for an unknown name."""
        name = self._card.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in self._card.prompts:
            known = ", ".join(self._card.prompts) or "none"
            raise ParameterError("prompt_name", f"be the name of a prompt of this model ({known})", name)
        return self._card.prompts[name]

    def read(
        self,
        inputs: Sequence[InputText],
        *,
        prompt: str = "",
        truncate: bool = False,
        special_tokens: bool = True,
        first: int = 0,
    ) -> EncoderInputs:
        """The inputs as token ids, in their order.

        prompt:         written before each text
        truncate:       cut inputs that are too long instead of refusing them; of a pair, the longer text is cut
        special_tokens: add the special tokens that the tokenizer adds to every text
        first:          number of the first input in errors

        Raises ParameterError for an input that is empty, too long, not of this vocabulary or no text, with `place_of` its
        number as the field, also with which text of a pair is wrong if one of them is wrong alone, and with the field "input"
        for too many tokens of all inputs together.
        """
        found: list[EncoderInputs] = []
        count = 0
        number = first
        for piece in pieces_of(inputs, PIECE):
            found.append(self._read_piece(piece, number, prompt, truncate, special_tokens))
            number += len(piece)
            count += len(found[-1].ids)
            if count > MAX_TOKENS:
                raise ParameterError("input", f"have at most {MAX_TOKENS} tokens in all inputs together", count)
        return EncoderInputs.joined(found) if found else EncoderInputs.of([])

    def read_each(
        self, calls: Sequence[Sequence[InputText]], *, prompt: str = "", truncate: bool = False
    ) -> list[EncoderInputs | ParameterError]:
        """What `read` returns for the inputs of each call, or the error that it raises. All of them are tokenized together."""
        try:
            together = self.read([*chain.from_iterable(calls)], prompt=prompt, truncate=truncate)
        except ParameterError:  # of one of them, or of all together
            return [self._result_or_error(inputs, prompt, truncate) for inputs in calls]
        return [together.part(begin, end) for begin, end in pairwise(ends_of(map(len, calls)).tolist())]

    def _result_or_error(self, inputs: Sequence[InputText], prompt: str, truncate: bool) -> EncoderInputs | ParameterError:
        try:
            return self.read(inputs, prompt=prompt, truncate=truncate)
        except ParameterError as error:
            return error.with_traceback(None)  # whose frames would keep the texts of all calls alive

    def _read_piece(
        self, piece: Sequence[InputText], first: int, prompt: str, truncate: bool, special_tokens: bool
    ) -> EncoderInputs:
        """Inputs that are tokenized together. first: the number of the first one"""
        is_text = [isinstance(each, str | tuple) for each in piece]
        texts = [
            self._checked_text(each, number, prompt, truncate)  # type: ignore[arg-type]
            for number, (each, known) in enumerate(zip(piece, is_text, strict=True), first)
            if known
        ]
        tokenizer = self._cut if truncate else self._whole
        encodings = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=special_tokens))
        found = [next(encodings) if known else None for known in is_text]
        rows = [
            self._checked_ids(each, number, truncate) if encoding is None else encoding.ids  # type: ignore[arg-type]
            for number, (each, encoding) in enumerate(zip(piece, found, strict=True), first)
        ]
        types = None
        if self._card.takes_types:
            types = self._types(piece, found, rows)
        skipped = self._prompt_length(prompt) if prompt and self._card.skips_prompt else 0
        skips = skipped * np.array(is_text, dtype=np.int32) if skipped else None
        inputs = EncoderInputs(_flat(rows), ends_of(map(len, rows)), types, skips)
        self._check(inputs, first, piece)
        return inputs

    def _types(self, piece: Sequence[InputText], found: Sequence[Any], rows: Sequence[Sequence[int]]) -> Ids:
        """(total,) int32: which text of its pair each token is from. found: the encodings; None for an input of token ids"""
        if self._singles_have_zeros and not any(isinstance(each, tuple) for each in piece):
            return np.zeros(sum(map(len, rows)), dtype=np.int32)  # not read from the encodings, which takes as long as the ids
        both = zip(found, rows, strict=True)
        return _flat([[0] * len(row) if encoding is None else encoding.type_ids for encoding, row in both])

    def _checked_text(self, text: str | tuple[str, str], number: int, prompt: str, truncate: bool) -> Any:
        """The text with its prompt. A text that cannot fit is refused or cut before tokenization, because that takes long."""
        parts = [prompt + text] if isinstance(text, str) else list(text)
        is_pair = len(parts) > 1
        limit = self._prompts.max_chars
        for index, part in enumerate(parts):
            if len(part) > limit:
                if not truncate:
                    raise self._too_long(place_of(number, index if is_pair else None), f"{len(part)} characters")
                part = parts[index] = part[-limit:] if self._cuts_left else part[:limit]
            try:
                part.encode()
            except UnicodeEncodeError as error:
                rule = f"be a text that UTF-8 can encode, without half of a surrogate pair at character {error.start}"
                place = place_of(number, index if is_pair else None)
                raise ParameterError(place, rule, part[error.start : error.end]) from None
        return tuple(parts) if is_pair else parts[0]

    def _checked_ids(self, ids: Sequence[int], number: int, truncate: bool) -> Sequence[int]:
        """The ids of one input. An error names its number."""
        try:
            tokens = self._prompts.checked(ids)
        except ParameterError as error:
            raise ParameterError(place_of(number), error.rule, error.value, error.code) from None
        limit = self._card.max_tokens
        if not truncate:
            return tokens
        return tokens[-limit:] if self._cuts_left else tokens[:limit]

    def _check(self, inputs: EncoderInputs, first: int, piece: Sequence[InputText]) -> None:
        """Raise ParameterError for an input without tokens, with too many, or with some that the model does not know."""
        lengths = inputs.lengths
        if not lengths.all():
            number = first + int(np.argmin(lengths))
            raise ParameterError(place_of(number), "have at least one token", [])
        if lengths.max() > self._card.max_tokens:
            index = int(np.argmax(lengths > self._card.max_tokens))
            given = piece[index]
            if isinstance(given, tuple):
                raise self._too_long_pair(first + index, given, int(lengths[index]))
            raise self._too_long(place_of(first + index), int(lengths[index]))
        if inputs.ids.max() >= self._prompts.vocab_size:
            number = int(np.searchsorted(inputs.ends, int(np.argmax(inputs.ids)), side="right")) - 1
            self._checked_ids(inputs[number].ids.tolist(), first + number, False)  # raises an error that says more

    def _too_long(self, place: str, length: object, beside: str = "") -> ParameterError:
        """beside: what else counts"""
        rule = f"have at most {self._card.max_tokens} tokens{beside}, this model's limit, unless truncate is true"
        return ParameterError(place, rule, length, "context_length_exceeded")

    def _too_long_pair(self, number: int, pair: tuple[str, str], length: int) -> ParameterError:
        """The error of a pair. It names the text that is too long alone, if one of them is. length: of the pair"""
        for side, text in enumerate(pair):
            alone = len(self._whole.encode(text).ids)
            if alone > self._card.max_tokens:
                return self._too_long(place_of(number, side), alone)
        return self._too_long(place_of(number), length, " with the other text of its pair")

    def _count_prompt(self, prompt: str) -> int:
        """The tokens of a prompt, without a special token at its end."""
        ids = self._whole.encode(prompt).ids
        return len(ids) - (bool(ids) and ids[-1] in self._special)


def place_of(number: int, side: int | None = None) -> str:
    """The name of one of several inputs, as the field of an error. side: which text of a pair it is about, 0 or 1"""
    return f"input[{number}]" if side is None else f"input[{number}][{side}]"


Place = str | tuple[str, str]
"""Where an input is in a request, or where the two texts of a pair are."""


def named_in_request(
    error: ParameterError, field: str, count: int, places: Sequence[Place] | None
) -> tuple[ParameterError, str]:
    """An error of `InputReader.read` with the name that the refused input has in a request, and the request's field.

    field:  holds the `count` inputs, as a list if there are several
    places: where each input is, if they are not such a list; an error of a pair as a whole has the place of its second text
    """
    found = PLACE.fullmatch(error.field)
    if found is None:
        return error, field
    number = int(found[1])
    side = None if found[2] is None else int(found[2])
    place: Place = field if count == 1 else f"{field}[{number}]"
    if places is not None:
        place = places[number]
    if isinstance(place, tuple):
        place = place[1 if side is None else side]
    elif side is not None:
        place = f"{place}[{side}]"
    return ParameterError(place, error.rule, error.value, error.code), place


def _copy(tokenizer: Tokenizer, lower_case: bool) -> Tokenizer:
    """A tokenizer whose settings nobody else changes, without padding and truncation."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.no_padding()
    copy.no_truncation()
    if lower_case:
        own = [] if copy.normalizer is None else [copy.normalizer]
        copy.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
    return copy


def _flat(rows: Sequence[Sequence[int]]) -> Ids:
    """The numbers of all rows, end to end."""
    return np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=sum(map(len, rows)))


def pieces_of(inputs: Sequence[InputText], num_characters: int, num_inputs: int = 1) -> Iterator[Sequence[InputText]]:
    """The inputs in groups of about `num_characters` characters. Token ids count as characters.

    num_inputs: the fewest inputs of a group, unless they have PIECE characters
    """
    begin = 0
    length = 0
    for index, each in enumerate(inputs):
        try:
            length += sum(map(len, each)) if isinstance(each, tuple) else len(each)
        except TypeError:
            raise ParameterError("input", f"be a list in which each item is {ITEM} (item {index} is not)", each) from None
        if length >= num_characters and (index + 1 - begin >= num_inputs or length >= PIECE):
            yield inputs[begin : index + 1]
            begin = index + 1
            length = 0
    if begin < len(inputs):
        yield inputs[begin:]
