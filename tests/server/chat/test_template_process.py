"""What the process of requests' chat templates sends back, and what it holds meanwhile."""

import weakref
from types import SimpleNamespace

import pytest
from fa_serve.server.chat import template_process
from fa_serve.server.chat.content_forms import STRINGS
from fa_serve.server.chat.template_process import first_showing
from fa_serve.server.chat.templates import Template
from tiny_models import make_tokenizer

from fa_serve.sandbox.trials import TrialLimits, Trials


class Text(str):
    """What a template has written, which can be watched."""

    __slots__ = ("__weakref__",)


def test_one_text_of_a_probe_is_held_at_a_time() -> None:
    """All of them were, and each may be as long as a prompt."""
    written: list[weakref.ref[Text]] = []

    def render(conversation: str) -> Text | None:
        assert [each for each in written if each() is not None] == []
        text = Text(conversation * 3)
        written.append(weakref.ref(text))
        return None if conversation == "refused" else text

    assert first_showing(render, [["a", "refused", "b", "c"], ["c"], ["b"]], ["bb", "BB"]) == [2, None, 0]
    assert len(written) == 5, "what follows the first is not written"


class WorkHere:
    """A trial without a process."""

    def __init__(self, max_chars: int) -> None:
        self._work = template_process.prepare({"max_chars": max_chars})
        self.replies: list[bytes] = []

    def run(self, request: bytes) -> bytes:
        self.replies.append(self._work(request))
        return self.replies[-1]


def test_nothing_that_a_probe_writes_comes_back() -> None:
    """18 texts of 500,000 characters came back, and two of them were kept with the template."""
    trial = WorkHere(1_000_000)
    template = Template(make_tokenizer(), "{{ messages[-1].role }}{{ 'x' * 500_000 }}", SimpleNamespace(max_chars=1_000_000))
    assert template.forms(trial) == STRINGS
    assert not template.writes_tool_images("<image>", trial)
    assert template.writes_tool_images("<image>", trial) is False
    assert len(trial.replies) == 2, "each is tried once"
    assert max(map(len, trial.replies)) < 100
    assert not any(isinstance(value, str) and len(value) > 1000 for value in vars(template).values())
    other = Template(make_tokenizer(), "{{ messages[-1].content | tojson }}<image>", SimpleNamespace(max_chars=1_000_000))
    assert other.writes_tool_images("<image>", trial)


@pytest.mark.slow
def test_a_template_that_renders_within_its_memory_passes_its_probes() -> None:
    """All texts of the probes were in memory at once, so that a long-winded template was refused for them."""
    limits = TrialLimits("end", 60.0, 96 << 20, "template")
    trials = Trials(template_process.__file__, {"max_chars": 1 << 23}, limits)
    try:
        text = "{{ messages | length }}{{ 'x' * 8_000_000 }}"
        template = Template(make_tokenizer(), text, SimpleNamespace(max_chars=1 << 23))
        trial = trials.trial()
        assert template.forms(trial) == STRINGS
        assert len(template.render([{"role": "user", "content": "Hi"}], None, {}, trial)) == 8_000_001
    finally:
        trials.close()
