"""The log on stderr, as plain text or as JSON lines. Each module decides what it logs; startup_report.py prints to stdout.

No request waits for the log. Records are queued, and a thread writes them. If nobody reads stderr, the queue fills and further
records are dropped and counted (`num_dropped`); the log says how many when it can be written again.
"""

from __future__ import annotations

import io
import json
import logging
import os
import queue
import sys
import threading
import time
from datetime import datetime, timezone
from typing import Any, Literal, TextIO

MAX_QUEUED = 4096
"""The most records that wait to be written."""
MAX_CHARS = 32_768
"""The most characters of one record; the rest is cut off."""
FLUSH_SECONDS = 0.5
"""How long the end of the process waits for a log that nobody reads."""


class JsonFormatter(logging.Formatter):
    """One JSON object for each record, with the record's `fields` if it has any."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        entry: dict[str, Any] = {"time": time, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


class QueuedHandler(logging.Handler):
    """Writes records to a stream from a thread, so that logging never blocks.

    A signal handler may log: the queue is reentrant, so the handler may interrupt a `put` and call it again.

    num_dropped: how many records were dropped because the queue was full, or because they could not be written
    """

    def __init__(self, stream: TextIO):
        super().__init__()
        self._stream = stream
        self._queue: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._writing = False
        self.num_dropped = 0
        self._num_reported = 0
        threading.Thread(target=self._write_all, name="fa_serve-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._queue.qsize() >= MAX_QUEUED:
            self.num_dropped += 1
            return
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        self._queue.put(line if len(line) <= MAX_CHARS else line[:MAX_CHARS] + " ... (cut off)")

    def flush(self) -> None:
        """Wait until everything is written, but not for long."""
        limit = time.monotonic() + FLUSH_SECONDS
        while (self._writing or not self._queue.empty()) and time.monotonic() < limit:
            time.sleep(0.001)

    def _write_all(self) -> None:
        while True:
            line = self._queue.get()
            self._writing = True
            if self.num_dropped > self._num_reported:
                dropped = self.num_dropped
                self._write(self._note(dropped - self._num_reported))
                self._num_reported = dropped
            self._write(line)
            self._writing = not self._queue.empty()

    def _note(self, count: int) -> str:
        text = "%d log records were dropped, because the log was not read in time"
        return self.format(logging.LogRecord("fa_serve.server", logging.WARNING, __file__, 0, text, (count,), None))

    def _write(self, line: str) -> None:
        """Write a line past Python's buffer: its lock would be held while nobody reads, and the interpreter could not exit."""
        try:
            try:
                number = self._stream.fileno()
            except io.UnsupportedOperation:  # a stream in memory
                self._stream.write(line + "\n")
                return
            left = (line + "\n").encode("utf-8", "backslashreplace")
            while left:
                left = left[os.write(number, left) :]
        except (OSError, ValueError):  # the reader is gone, or the stream was closed
            self.num_dropped += 1


def num_dropped() -> int:
    """How many log records were dropped since the start of the process."""
    return sum(handler.num_dropped for handler in logging.getLogger().handlers if isinstance(handler, QueuedHandler))


def exit_now(code: int) -> None:
    """End the process without its clean-up, but write the queued log records first."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, QueuedHandler):
            handler.flush()
    os._exit(code)


def log_to_stderr(level: str, log_format: Literal["plain", "json"]) -> None:
    """Set up logging. Call it before transformers is imported, so that its progress bars are not written into a file."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler = QueuedHandler(sys.stderr)
    handler.setLevel(level.upper())
    handler.setFormatter(JsonFormatter() if log_format == "json" else plain)
    logging.getLogger().addHandler(handler)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("fa_serve").setLevel(level.upper())
