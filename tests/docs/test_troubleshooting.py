"""docs/messages.md has every message of the source, and the problems of docs/troubleshooting.md quote some of them.

To write the list again: FA_SERVE_WRITE_DOCS=1 pytest tests/docs/test_troubleshooting.py
"""

from __future__ import annotations

import re

import pytest
from documentation import ROOT, check_generated
from report_messages import HTTP, LOG, REASONS, Message, lists, messages, messages_of

PAGE = ROOT / "docs" / "troubleshooting.md"


def quotes() -> list[str]:
    """The messages of the hand-written table."""
    table = PAGE.read_text().split("## The fifteen")[1].split("\n## ")[0]
    rows = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) == 15
    return [quote for row in rows for quote in re.findall(r"`([^`]+)`", row)]


@pytest.mark.parametrize("quote", quotes())
def test_a_quoted_message_is_one_of_the_list(quote: str) -> None:
    wanted = re.compile(".*".join(re.escape(part.strip()) for part in quote.split("...")))
    assert any(wanted.search(message.shown) for message in messages())


def test_the_list_is_that_of_the_source() -> None:
    check_generated(ROOT / "docs" / "messages.md", "messages", lists())


LISTEN = "..., port ...: ...; choose another --port (0 takes a free one) or --host"


def test_the_list_has_messages_of_every_kind() -> None:
    found = messages()
    assert len(found) > 400
    for message in (
        Message("Attention functions", "softcap must be finite and >= 0 (0 is off), got ...", "ValueError"),
        Message("Models and masks", "layer ... (...) attends more than once", "UnsupportedModelError"),
        Message("Engine", "top_p must be above 0 and at most 1", "ParameterError"),
        Message("Engine", "the model's logits are not finite", "RequestError"),
        Message(
            "Server and commands",
            "cannot listen on ..., port ...: ...; choose another --port (0 takes a free one) or --host",
            "exit",
        ),
        Message(HTTP, "The model ... does not exist. This server serves ...", "404"),
        Message(HTTP, "tool_choice is only allowed with tools", "400"),
        Message(REASONS, "does not support ..., which the call uses", ""),
        Message(LOG, "out of memory in a step of ... tokens: from now on steps have at most half as many", ""),
    ):
        assert message in found


SOURCE = '''
LIMIT = 3
WORDS = "words of a constant"

def check(x, name):
    """A function."""
    if x is None:
        raise ValueError(f"{name} must be given, got {x}")
    rule = "be first"
    _require(x > 0, "x", rule, x)
    if x > LIMIT:
        rule = f"be at most {LIMIT}"
    elif x < 0:
        raise ParameterError("x", "be positive" if name else "be above " + WORDS, x)
    raise ParameterError("x", rule, x)
    log.warning("%s is %.3f, which is large", name, x)
    log.info("not shown to anybody")
    raise BadRequest(f"{name} {x}: {WORDS}.")
    raise NotFusedError("is caught by others")
    raise KeyError(name)
'''


def test_how_a_message_is_read() -> None:
    """A name stands for what was assigned before it, a value for `...`; texts without words and other levels are left out."""
    found = [(message.section, message.shown, message.kind) for message in messages_of("fa_serve/engine/x.py", SOURCE)]
    assert found == [
        ("Engine", "... must be given, got ...", "ValueError"),
        ("Engine", "x must be first", "ParameterError"),
        ("Engine", "x must be positive", "ParameterError"),
        ("Engine", "x must be above words of a constant", "ParameterError"),
        ("Engine", "x must be first", "ParameterError"),
        ("Engine", "x must be at most ...", "ParameterError"),
        (LOG, "... is ..., which is large", ""),
        (HTTP, "... ...: words of a constant.", "400"),
    ]


def test_what_is_a_reason_of_a_backend() -> None:
    source = (
        'def supports(spec) -> str | None:\n    return "runs on Hopper only"\ndef name() -> str:\n    return "no reason at all"'
    )
    assert [m.shown for m in messages_of("fa_serve/backends/x.py", source) if m.section == REASONS] == ["runs on Hopper only"]
    assert list(messages_of("fa_serve/hf/x.py", source)) == []
