"""The report of the start on stdout: one line for each phase with its time, then the address and a curl line to paste.

report = StartupReport()
report.mark("import", "torch 2.10")              # a phase of the command itself, timed since the phase before
AsyncEngine(config, on_phase=report.add)         # the phases of the engine, which times them
report.ready(url, SampleRequest("fa-serve-demo", chat=True, needs_key=False))
"""

from __future__ import annotations

import json
import time
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
"""A path and the fields of a body for each task of an encoder."""


class StartupReport:
    def __init__(self) -> None:
        self._begin = self._last = time.perf_counter()
        self._ready = False

    def mark(self, name: str, detail: str) -> None:
        """A phase that began when the phase before ended, and ends now."""
        now = time.perf_counter()
        _print_phase(name, now - self._last, detail)
        self._last = now

    def add(self, phase: Phase) -> None:
        """A phase of the engine. An engine that is restarted later also reports phases; they are not part of the start."""
        if not self._ready:
            _print_phase(phase.name, phase.seconds, phase.detail)
            self._last = time.perf_counter()

    def ready(self, url: str, request: SampleRequest) -> None:
        self.mark("ready", f"after {time.perf_counter() - self._begin:.2f} s in all")
        self._ready = True
        print(f"\n{url}\n\n{request.curl(url)}\n", flush=True)


def _print_phase(name: str, seconds: float, detail: str) -> None:
    print(f"{name:<10}{seconds:7.2f} s   {detail}", flush=True)


@dataclass(frozen=True)
class SampleRequest:
    """A request that the operator can paste to try the server.

    model: the name to ask for; chat: the model has a chat template; needs_key: the server wants an API key
    task: what the model is for
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
