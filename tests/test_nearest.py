"""The name that was meant by one that is not known."""

import time

import pytest

from fa_serve.nearest import nearest_name

FIELDS = [
    "max_tokens",
    "max_completion_tokens",
    "messages",
    "model",
    "n",
    "stop",
    "stream",
    "temperature",
    "tool_choice",
    "top_p",
]


@pytest.mark.parametrize(
    ("given", "known", "expected"),
    [
        ("max_token", FIELDS, "max_tokens"),
        ("maxTokens", FIELDS, "max_tokens"),
        ("MAX-TOKENS", FIELDS, "max_tokens"),
        ("max_new_tokens", FIELDS, "max_tokens"),
        ("message", FIELDS, "messages"),
        ("temprature", FIELDS, "temperature"),
        ("temp", FIELDS, "temperature"),
        ("top-p", FIELDS, "top_p"),
        ("toolchoice", FIELDS, "tool_choice"),
        ("stop_sequences", FIELDS, "stop"),
        ("stop", ["stop_sequences", "stream", "top_p"], "stop_sequences"),
        ("stop", ["stream", "top_p"], None),
        ("max_", FIELDS, None),
        ("xyzzy", FIELDS, None),
        ("", FIELDS, None),
        ("x", [], None),
    ],
)
def test_the_nearest_name(given, known, expected):
    assert nearest_name(given, known) == expected


def test_a_long_name_takes_no_time():
    begin = time.thread_time()
    assert nearest_name("max_tokens" * 1_000_000, FIELDS) == "max_tokens"
    assert time.thread_time() - begin < 0.1
