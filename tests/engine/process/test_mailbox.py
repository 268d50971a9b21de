"""Outputs wait for their consumer, one of each answer."""

from __future__ import annotations

import asyncio

import pytest

from fa_serve.engine import RequestError
from fa_serve.engine.process.mailbox import Mailbox
from fa_serve.engine.request.outputs import RequestOutput, TokenLogprob


def output(index: int, *tokens: int, finished: bool = False, logprobs: int = 0) -> RequestOutput:
    entries = [TokenLogprob(token, -1.0, [(1, -1.0)] * logprobs) for token in tokens] if logprobs else None
    return RequestOutput("name", [], token_ids=list(tokens), finished=finished, index=index, logprobs=entries)


def test_what_an_answer_gains_is_joined() -> None:
    async def main() -> None:
        mailbox = Mailbox(2)
        mailbox.put(output(1, 5, logprobs=3))
        mailbox.put(output(0, 6, finished=True))
        mailbox.put(output(1, 7, finished=True, logprobs=3))
        assert mailbox.unread == 2 * 4
        assert (await mailbox.get()).token_ids == [5, 7]
        assert mailbox.unread == 0
        assert not mailbox.drained()
        assert (await mailbox.get()).token_ids == [6]
        assert mailbox.drained()

    asyncio.run(main())


def test_a_consumer_that_waits_is_woken_and_an_error_is_raised() -> None:
    async def main() -> None:
        mailbox = Mailbox(1)
        waiting = asyncio.create_task(mailbox.get())
        await asyncio.sleep(0)
        mailbox.put(output(0, 5))
        assert (await waiting).token_ids == [5]
        mailbox.refuse(ValueError("no"))
        with pytest.raises(ValueError, match="no"):
            await mailbox.get()

    asyncio.run(main())


def test_a_mailbox_that_is_discarded_ends_every_answer() -> None:
    async def main() -> None:
        mailbox = Mailbox(2)
        mailbox.put(output(1, 5, logprobs=2))
        mailbox.discard("name", RequestError("unread", "too many"))
        ended = [await mailbox.get(), await mailbox.get()]
        assert [(x.index, x.token_ids, x.error and x.error.code) for x in ended] == [(0, [], "unread"), (1, [], "unread")]
        assert mailbox.drained()
        assert mailbox.unread == 0

    asyncio.run(main())
