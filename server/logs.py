"""What the process says: one line for each phase of its start on stdout, then a log on stderr, plain or as JSON lines.

The engine tells its phases by logging "phase: detail" at level INFO while it loads; each becomes a line with the time since the
one before. Left out: what is worth logging, which each module decides.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from datetime import datetime, timezone
from typing import Any


class StartUp(logging.Handler):
    """Prints the phases; to be added to the engine's logger while it loads."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.begin = self._last = time.perf_counter()
        self._done = False

    def mark(self, phase: str, detail: str) -> None:
        now = time.perf_counter()
        print(f"{phase.lower():<10}{now - self._last:7.2f} s   {detail}", flush=True)
        self._last = now
        self._done = phase == "ready"

    def tells(self, record: logging.LogRecord) -> bool:
        """Whether a record is a phase, which needs no second line in the log."""
        if self._done or record.name != "fa_serve.engine" or record.levelno != logging.INFO:
            return False
        return ": " in record.getMessage()

    def emit(self, record: logging.LogRecord) -> None:
        if self.tells(record):
            phase, _, detail = record.getMessage().partition(": ")
            self.mark(phase, detail)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        entry: dict[str, Any] = {"time": when, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def log_to_stderr(level: str, form: str, start_up: StartUp) -> None:
    """To be called before transformers is imported, whose progress bars have no place in a file."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(level.upper())
    handler.setFormatter(_Json() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.addFilter(lambda record: not start_up.tells(record))
    logging.getLogger().addHandler(handler)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("fa_serve").setLevel(logging.DEBUG if level == "debug" else logging.INFO)  # the phases are at INFO
