"""A real server process, for tests that talk to it over HTTP: `start` with the embedded model, or `start_warm` in less time.

Without a model, `start_warm` serves the embedded model with one of its six layers under the same name: a start takes a tenth of
the time, and a step less than half. Tests of what the embedded model answers ask for the whole model.
"""

import atexit
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import httpx
import pytest
from warm_processes import WarmProcess, fa_serve

START_SECONDS = 240
for package in ("httpx", "httpx2"):  # the second one is that of openai
    with suppress(ImportError):
        # each `httpx.get` and each client of an SDK would read all certificates again, in 60 ms of a processor
        transports = importlib.import_module(f"{package}._transports.default")
        transports.create_ssl_context = cache(transports.create_ssl_context)


@dataclass
class ServerProcess:
    """process; its address; the lines that it has printed until it was ready"""

    process: subprocess.Popen | WarmProcess
    url: str
    lines: list[str]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def metric(self, name: str, labels: str = "") -> float:
        text = httpx.get(f"{self.url}/metrics").text
        found = re.search(rf"^fa_serve:{name}{{{labels}.*}} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def aborted(self) -> float:
        return self.metric("request_success_total", 'finished_reason="abort"')


def children_of(process: int) -> list[int]:
    """Process ids of children that this process's threads have started."""
    tasks = Path(f"/proc/{process}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def command_of(process: int) -> str:
    """The command line of a process; empty if there is none."""
    file = Path(f"/proc/{process}/cmdline")
    return file.read_text() if file.exists() else ""


def engine_of(server: int) -> int:
    """The id of the process of a server's engine: its child, or the child of the copy that forks engines."""
    children = children_of(server)
    copies = [child for child in children if command_of(child) == command_of(server)]
    [engine] = [child for child in children if "spawn_main" in command_of(child)] or children_of(copies[0])
    return engine


def start(*arguments: str, verb: str = "serve", log: Path | None = None, **environment: str) -> ServerProcess:
    """A server in a fresh interpreter."""
    program = [os.environ["FA_SERVE_TEST_PROGRAM"]] if "FA_SERVE_TEST_PROGRAM" in os.environ else ["-m", "fa_serve"]
    command = [sys.executable, *program, verb, *_flags(arguments)]
    with ExitStack() as files:
        stderr = files.enter_context(log.open("w")) if log else None
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=os.environ | environment)
    return _when_ready(process)


def start_warm(
    *arguments: str, whole: bool = False, log: Path | None = None, call: Callable[[], None] = fa_serve, **environment: str
) -> ServerProcess:
    """A server in a process that finds everything imported. It starts in half a second. `call` may change it before.

    whole: what is served without a model has all of its layers
    """
    if not whole and (not arguments or arguments[0].startswith("--")):
        arguments = (one_layer(), "--served-model-name", "fa-serve-demo", *arguments)
    if "FA_SERVE_TEST_PROGRAM" in os.environ:
        return start(*arguments, log=log, **environment)
    return _when_ready(WarmProcess(call, ["serve", *_flags(arguments)], log=log, environment=os.environ | environment))


def one_layer() -> str:
    """A folder with the embedded model that has one of its layers."""
    return few_layers(1)


@cache
def few_layers(count: int) -> str:
    """A folder with the embedded model that has so many of its layers."""
    from transformers import AutoModelForCausalLM

    from fa_serve.demo import model_path

    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    shutil.copytree(model_path(), folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    AutoModelForCausalLM.from_pretrained(model_path(), num_hidden_layers=count).save_pretrained(folder)
    return folder


def _flags(arguments: tuple[str, ...]) -> list[str]:
    return ["--port", "0", "--device", "cpu", "--num-pages", "1024", *arguments]


def _when_ready(process: subprocess.Popen | WarmProcess) -> ServerProcess:
    watchdog = threading.Timer(START_SECONDS, process.kill)
    watchdog.start()
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip())
        if line.startswith("curl"):
            break
    watchdog.cancel()
    served = ServerProcess(process, next((line for line in lines if line.startswith("http://")), ""), lines)
    if not served.url:
        served.end()
        pytest.fail(f"the server did not start: {lines}")
    return served
