"""The log on stderr, as plain text or as JSON lines. Each module decides what it logs; startup_report.py prints on stdout."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import datetime, timezone
from typing import Any, Literal


class JsonFormatter(logging.Formatter):
    """One JSON object for each record, with the record's `fields` if it has any."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        entry: dict[str, Any] = {"time": time, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def log_to_stderr(level: str, log_format: Literal["plain", "json"]) -> None:
    """Set up logging. Call it before transformers is imported, whose progress bars must not be written into a file."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(level.upper())
    handler.setFormatter(JsonFormatter() if log_format == "json" else plain)
    logging.getLogger().addHandler(handler)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("fa_serve").setLevel(level.upper())
