"""The log as JSON lines."""

import json
import logging
import re

import pytest
from fa_serve.server.logs import log_to_stderr

TEXT = {"model": "fake", "prompt": "a secret"}


pytestmark = pytest.mark.anyio


async def test_json_logs_have_fields(serving, monkeypatch, capsys):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    log_to_stderr("info", "json")
    async with serving() as client:
        await client.post("/v1/completions", json=TEXT | {"user": "me"}, headers={"x-request-id": "mine-1"})
        logging.getLogger("fa_serve.server").warning("a line\nof two")
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
