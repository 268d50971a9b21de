"""The log as JSON lines."""

import io
import json
import logging
import os
import re
import sys
import time

import pytest
from fa_serve.server.observe import logs
from fa_serve.server.observe.logs import QueuedHandler, log_to_stderr

TEXT = {"model": "fake", "prompt": "a secret"}


pytestmark = pytest.mark.anyio


async def test_json_logs_have_fields(serving, monkeypatch, capsys):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    log_to_stderr("info", "json")
    async with serving() as client:
        await client.post("/v1/completions", json=TEXT | {"user": "me"}, headers={"x-request-id": "mine-1"})
        logging.getLogger("fa_serve.server").warning("a line\nof two")
    root.handlers[0].flush()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    [access] = [line for line in lines if line["logger"] == "fa_serve.access"]
    assert {name: access[name] for name in ("level", "method", "path", "status", "request_id", "user")} == {
        "level": "INFO",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "request_id": "mine-1",
        "user": "me",
    }
    assert access["seconds"] >= 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00", access["time"])
    assert lines[-1]["message"] == "a line\nof two"
    assert "secret" not in json.dumps(lines)


async def test_a_pipe_that_nobody_reads_loses_records_and_says_so(monkeypatch):
    monkeypatch.setattr(logs, "MAX_QUEUED", 10)
    monkeypatch.setattr(logs, "FLUSH_SECONDS", 0.1)
    reading, writing = os.pipe()
    with os.fdopen(reading) as reader, os.fdopen(writing, "w") as stream:
        handler = QueuedHandler(stream)
        begin = time.monotonic()
        for number in range(1000):
            handler.handle(logging.LogRecord("x", logging.INFO, "", 0, "%d " + "x" * 5000, (number,), None))
            time.sleep(0.0002)
        handler.flush()
        assert time.monotonic() - begin < 5
        dropped = handler.num_dropped
        assert 900 < dropped < 1000, "a pipe holds 64 KB"
        noted = records = 0
        while noted + records < 1000:  # each record was written, or a note counts it as soon as the log can be written again
            line = reader.readline()
            if note := re.fullmatch(r"(\d+) log records were dropped, because the log was not read in time\n", line):
                noted += int(note[1])
            else:
                assert len(line.split()[1]) == 5000
                records += 1
        assert noted == dropped
        handler.handle(logging.LogRecord("x", logging.INFO, "", 0, "last", (), None))
        assert reader.readline() == "last\n"


async def test_a_record_has_an_end(capfd):
    handler = QueuedHandler(sys.stderr)
    handler.handle(logging.LogRecord("x", logging.INFO, "", 0, "y" * 100_000, (), None))
    handler.flush()
    assert len(capfd.readouterr().err) < logs.MAX_CHARS + 20


@pytest.mark.parametrize("stream", ["memory", "file"])
async def test_a_closed_stream_drops_records_and_keeps_the_writer(stream, tmp_path):
    target = io.StringIO() if stream == "memory" else (tmp_path / "log").open("w")
    handler = QueuedHandler(target)
    target.close()
    for dropped in (1, 2):
        handler.handle(logging.LogRecord("x", logging.INFO, "", 0, "late", (), None))
        handler.flush()
        assert handler.num_dropped >= dropped
