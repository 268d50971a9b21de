"""The lines that the start prints on stdout."""

import json
import shlex
from types import SimpleNamespace

import pytest
from fa_serve.server.observe import startup_report
from fa_serve.server.observe.startup_report import ERASE, LINE_SECONDS, SampleRequest, StartupReport

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


def test_what_was_decided_stands_between_the_phases_and_the_address(capsys):
    StartupReport().ready(
        "http://host:1", SampleRequest("m", chat=True, needs_key=False), [("device", "cpu"), ("kv cache", "1")]
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:6] == [
        "device     cpu",
        "kv cache   1",
        "browser    http://host:1/ is a playground, http://host:1/docs the API reference",
        "",
    ]
    assert lines[6] == "http://host:1"


def test_without_a_terminal_a_long_phase_has_a_line_at_intervals(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(startup_report, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    report = StartupReport()
    for seconds in (1.0, LINE_SECONDS, LINE_SECONDS + 1):
        now[0] = seconds
        report.add(Phase("weights", "30 of 40 tensors", seconds, 0.75))
    assert capsys.readouterr().out == "weights     10.00 s   75%, 30 of 40 tensors\n"


def test_on_a_terminal_it_has_a_bar_that_its_end_replaces(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    report = StartupReport()
    report.add(Phase("weights", "30 of 40 tensors", 1.0, 0.75))
    report.add(Phase("weights", "a model", 2.0))
    bar, end = capsys.readouterr().out.split(ERASE)[1:]
    assert bar == f"weights      1.00 s   {'#' * 18}{'.' * 6}  75%  30 of 40 tensors"
    assert end == "weights      2.00 s   a model\n"


@pytest.mark.parametrize(("chat", "path"), [(True, "chat/completions"), (False, "completions")])
@pytest.mark.parametrize("needs_key", [False, True])
def test_the_sample_request_can_be_pasted(chat, path, needs_key):
    words = shlex.split(SampleRequest("m", chat, needs_key).curl("http://host:1"))
    assert words[1] == f"http://host:1/v1/{path}"
    assert ("Authorization: Bearer KEY" in words) == needs_key
    body = json.loads(words[-1])
    assert body["model"] == "m"
    assert ("messages" in body) == chat
