"""What an exchange makes of the events of its stream. Real connections are in test_bench.py."""

import pytest

from fa_serve.client.http_connection import Exchange

USAGE = b'{"usage":{"completion_tokens":3}}'


@pytest.mark.parametrize(
    ("status", "events", "tokens", "error"),
    [
        (200, [b"{}", USAGE, b"[DONE]"], 3, None),
        (200, [b"{}", USAGE], 0, "the stream ended without [DONE]"),
        (200, [], 0, "the stream ended without [DONE]"),
        (429, [b"full"], 0, "status 429: full"),
        (500, [b"x" * 1000], 0, "status 500: " + "x" * 200),
    ],
    ids=["complete", "no end", "empty", "refused", "long refusal"],
)
def test_parse(status, events, tokens, error):
    exchange = Exchange(status=status, events=events)
    exchange.parse()
    assert (exchange.tokens, exchange.error, exchange.events) == (tokens, error, [])


def test_the_usage_and_the_end_are_no_tokens():
    assert Exchange(arrivals=[1.0, 2.0, 3.0, 4.0]).token_arrivals == [1.0, 2.0]
