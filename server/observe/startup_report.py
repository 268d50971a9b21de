"""The startup report on stdout: one line for each phase with its time, what was decided, the address, and a curl command.

report = StartupReport()
report.mark("import", "torch 2.10")              # a phase of the command itself, timed from the end of the previous phase
AsyncEngine(config, on_phase=report.add)         # the phases of the engine, which times them
report.ready(url, SampleRequest("fa-serve-demo", chat=True, needs_key=False), decisions(settings, engine))
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fa_serve.engine import Phase

SAMPLES: dict[str, tuple[str, dict[str, object]]] = {
    "embed": ("v1/embeddings", {"input": ["a text", "another text"]}),
    "score": ("v1/rerank", {"query": "a question", "documents": ["a text", "another text"]}),
    "classify": ("classify", {"input": ["a text", "another text"]}),
    "sparse": ("embed_sparse", {"inputs": ["a text", "another text"]}),
    "token_embed": ("embed_all", {"inputs": ["a text", "another text"]}),
}
"""For each task of an encoder, the path of a sample request and the fields of its body."""


BAR_COLUMNS = 24
LINE_SECONDS = 10.0
"""The time between two lines about one phase, if stdout is not a terminal."""
ERASE = "\r\x1b[K"
"""Clears the current line of a terminal, so that it is written again."""


class StartupReport:
    """Writes to stdout. A phase in progress has a progress bar on a terminal, and elsewhere a line every LINE_SECONDS."""

    def __init__(self) -> None:
        self._begin = self._last = self._told = time.perf_counter()
        self._ready = False
        self._bar = sys.stdout.isatty()

    def mark(self, name: str, detail: str) -> None:
        """Report a phase that began when the previous phase ended, and ends now."""
        now = time.perf_counter()
        self._print(name, now - self._last, detail)
        self._last = self._told = now

    def add(self, phase: Phase) -> None:
        """Report a phase of the engine. An engine that is restarted later also reports phases; they are ignored."""
        if self._ready:
            return
        now = time.perf_counter()
        if phase.done == 1.0:
            self._print(phase.name, phase.seconds, phase.detail)
            self._last = self._told = now
        elif self._bar:
            filled = int(phase.done * BAR_COLUMNS)
            bar = "#" * filled + "." * (BAR_COLUMNS - filled)
            print(f"{ERASE}{_line(phase.name, phase.seconds, f'{bar} {phase.done:4.0%}  {phase.detail}')}", end="", flush=True)
        elif now - self._told >= LINE_SECONDS:
            self._print(phase.name, phase.seconds, f"{phase.done:.0%}, {phase.detail}")
            self._told = now

    def ready(self, url: str, request: SampleRequest, decided: Sequence[tuple[str, str]] = ()) -> None:
        """Report that the server is ready. decided: the result of `decisions`"""
        self.mark("ready", f"after {time.perf_counter() - self._begin:.2f} s in all")
        self._ready = True
        rows = [*decided, ("browser", f"{url}/ is a playground, {url}/docs the API reference")]
        print("\n" + "\n".join(f"{name:<11}{text}" for name, text in rows))
        print(f"\n{url}\n\n{request.curl(url)}\n", flush=True)

    def _print(self, name: str, seconds: float, detail: str) -> None:
        print(f"{ERASE if self._bar else ''}{_line(name, seconds, detail)}", flush=True)


def _line(name: str, seconds: float, detail: str) -> str:
    return f"{name:<10}{seconds:7.2f} s   {detail}"


@dataclass(frozen=True)
class SampleRequest:
    """A request that the operator can paste to try the server.

    model:     the name that the request asks for
    chat:      whether the model has a chat template
    needs_key: whether the server requires an API key
    task:      what the model is for
    """

    model: str
    chat: bool
    needs_key: bool
    task: str = "generate"

    def curl(self, url: str) -> str:
        body: dict[str, object] = {"model": self.model}
        if self.task != "generate":
            path, fields = SAMPLES[self.task]
            body |= fields
        elif self.chat:
            path = "v1/chat/completions"
            body["messages"] = [{"role": "user", "content": "What is 17 + 25?"}]
        else:
            path = "v1/completions"
            body |= {"prompt": "def fibonacci(n):", "max_tokens": 64}
        key = " -H 'Authorization: Bearer KEY'" if self.needs_key else ""
        return f"curl {url}/{path}{key} -H 'Content-Type: application/json' -d '{json.dumps(body)}'"
