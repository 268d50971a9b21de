"""The lines that the start prints on stdout."""

import json
import shlex

import pytest
from fa_serve.server.observe.startup_report import SampleRequest, StartupReport

from fa_serve.engine import Phase


def test_phases_are_printed_until_the_server_is_ready(capsys):
    report = StartupReport()
    report.mark("import", "torch")
    report.add(Phase("weights", "a model: on cpu", 1.25))
    report.ready("http://host:1", SampleRequest("m", chat=True, needs_key=False))
    report.add(Phase("weights", "after a restart", 1.0))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["import", "weights", "ready"]
    assert lines[1] == "weights      1.25 s   a model: on cpu"
    assert "http://host:1" in lines
    assert "after a restart" not in "\n".join(lines)


@pytest.mark.parametrize(("chat", "path"), [(True, "chat/completions"), (False, "completions")])
@pytest.mark.parametrize("needs_key", [False, True])
def test_the_sample_request_can_be_pasted(chat, path, needs_key):
    words = shlex.split(SampleRequest("m", chat, needs_key).curl("http://host:1"))
    assert words[1] == f"http://host:1/v1/{path}"
    assert ("Authorization: Bearer KEY" in words) == needs_key
    body = json.loads(words[-1])
    assert body["model"] == "m"
    assert ("messages" in body) == chat
