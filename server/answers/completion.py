"""The answer to /v1/completions: text that continues one or several prompts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fa_serve.engine import RequestOutput, SamplingParams, TokenLogprob

from ..errors import BadRequest
from ..replies import CompletionLogprobs, PromptLogprobs
from ..schemas import CompletionRequest
from .answer import Answer
from .generation import Job
from .logprobs import TextOffsets, for_completion
from .size import COMPLETION_LOGPROB, PROMPT_LOGPROB, TEXT, AnswerSize

DEFAULT_TOKENS = 16  # OpenAI's default of max_tokens for /v1/completions


class CompletionAnswer(Answer):
    kind = chunk_kind = "text_completion"
    prefix = "cmpl-"
    _prompt_field = "prompt"
    _body: CompletionRequest

    def _num_prompts(self) -> int:
        count = len(self._body.prompts())
        if not count:
            raise BadRequest("prompt must hold at least one prompt.", param="prompt")
        return count

    async def _encode(self) -> list[list[int]]:
        self._offsets: dict[int, TextOffsets] = {}  # by index
        return await self._tokenization.encode(self._body.prompts(), self._key)

    async def _prepare(self) -> None:
        if self._body.echo:
            given = self._body.prompts() if self._body.truncate_prompt_tokens is None else self._prompts
            echo = self._tokenization.echo
            self._echo = [prompt if isinstance(prompt, str) else await echo(prompt, self._key) for prompt in given]
            # a token of the prompt may stand for more characters than was estimated
            more = sum(max(len(text) - TEXT * len(prompt), 0) for text, prompt in zip(self._echo, self._prompts, strict=True))
            self._estimate(self._size_estimate + self._n * more)

    def _size(self) -> AnswerSize:
        body = self._body
        ids = TEXT if body.return_token_ids else 0
        scored = 0 if body.logprobs is None else COMPLETION_LOGPROB * (body.logprobs + 2)
        echoed = TEXT + scored if body.echo else 0
        prompt_scores = 0 if body.prompt_logprobs is None else PROMPT_LOGPROB * (body.prompt_logprobs + 1)
        return AnswerSize(per_prompt_token=ids + echoed + prompt_scores, once=0, per_token=ids + scored)

    def _max_tokens(self) -> int | None:
        """1 instead of 0, because the engine computes at least one token; `_sequences` removes this token again."""
        return 1 if self._body.max_tokens == 0 else self._body.max_tokens

    def _sequences(
        self, job: Job, number: int, prompt: list[int], params: SamplingParams
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        sequences = super()._sequences(job, number, prompt, params)
        return _without_answers(sequences) if self._body.max_tokens == 0 else sequences

    def _default_max_tokens(self, room: int) -> int:
        return min(DEFAULT_TOKENS, room)

    def _prompt_logprobs(self) -> int | None:
        """As many as `logprobs` asks for if the prompt is echoed, or as `prompt_logprobs` asks for, whichever is more."""
        wanted = (self._body.logprobs if self._body.echo else None, self._body.prompt_logprobs)
        return max((count for count in wanted if count is not None), default=None)

    def _logprobs(self) -> int | None:
        return self._body.logprobs

    def _choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        opening = self._opening(index, output) if self._body.echo else []
        choice = self._increment(index, output)
        return choice | {"text": self._before(index) + output.text, "logprobs": _joined(*opening, choice)}

    def _opening(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        if not (self._body.echo or self._body.return_token_ids):
            return []
        logprobs = self._scores(index, output.prompt_token_ids, output.prompt_logprobs) if self._body.echo else None
        return [self._common(index) | {"text": self._before(index), "logprobs": logprobs}]

    def _increment(self, index: int, output: RequestOutput) -> dict[str, Any]:
        logprobs = self._scores(index, output.token_ids, output.logprobs)
        return self._common(index, output) | {"text": output.text, "logprobs": logprobs}

    def _scores(
        self, index: int, token_ids: list[int], entries: Sequence[TokenLogprob | None] | None
    ) -> CompletionLogprobs | None:
        if self._body.logprobs is None or not entries:
            return None
        texts = self._tokenization.token_texts
        offsets = self._offsets.setdefault(index, TextOffsets())
        as_ids = bool(self._body.return_tokens_as_token_ids)
        return for_completion(texts, token_ids, entries, offsets, self._body.logprobs, as_ids)

    def _with_prompt_logprobs(self, reply: dict[str, Any], sums: dict[int, RequestOutput]) -> dict[str, Any]:
        by_prompt: dict[int, PromptLogprobs] = {}  # all sequences of a prompt have the same log-probabilities for it
        for choice in reply["choices"]:
            number = choice["index"] // self._n
            if number not in by_prompt:
                by_prompt[number] = self._prompt_scores(sums[choice["index"]])
            choice["prompt_logprobs"] = by_prompt[number]
        return reply

    def _before(self, index: int) -> str:
        """The text that comes before the generated text: the prompt, if it is echoed."""
        return self._echo[index // self._n] if self._body.echo else ""


async def _without_answers(
    sequences: AsyncGenerator[tuple[int, RequestOutput], None],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The same outputs without their tokens, as if the limit were 0 tokens."""
    async with aclosing(sequences) as outputs:
        async for index, output in outputs:
            output.text = ""
            output.token_ids = []
            output.logprobs = output.stop_string = None
            output.num_output_tokens = 0
            if output.finished:
                output.finish_reason = "length"
            yield index, output


def _joined(*choices: dict[str, Any]) -> dict[str, Any] | None:
    """The log-probabilities of all choices, one after the other."""
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    if not parts:
        return None
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}
