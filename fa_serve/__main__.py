"""The command line: `fa-serve serve | info`, also as `python -m fa_serve`.

Flags are generated from the table of settings, so that a flag, its environment variable and its key in the TOML file cannot
drift apart. torch and transformers are imported when a command needs them. Left out: what the commands do, which lives in
`fa_serve.server` and `fa_serve.backends`.
"""

from __future__ import annotations

import inspect
import json
import logging
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, get_args, get_origin

import typer
from rich.console import Console
from rich.table import Table

from fa_serve.server.settings import SECRETS, Settings, load

if TYPE_CHECKING:
    from fa_serve.spec import AttentionSpec

app = typer.Typer(name="fa-serve", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="Serve Hugging Face models over OpenAI's API, on fa_serve's own attention kernels.")  # fmt: skip


def main() -> None:
    app()


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command that takes `**flags` one typer option for each setting that is not a secret and that it does not name."""
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
    flags = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_option(name))
        for name in Settings.model_fields
        if name not in SECRETS and name not in {parameter.name for parameter in own}
    ]
    command.__signature__ = inspect.Signature([*own, *flags])  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *flags]}
    return command


def _option(name: str) -> Any:
    field = Settings.model_fields[name]
    flag = f"--{name.replace('_', '-')}"
    kinds = [kind for kind in get_args(field.annotation) if kind is not type(None)]
    kind: Any = field.annotation if not kinds or get_origin(field.annotation) is Literal else kinds[0]
    if get_origin(field.annotation) is list:
        kind = str
    default = False if field.default in (None, []) else str(field.default).lower()
    names = (f"{flag}/--no-{flag[2:]}",) if kind is bool else (flag,)
    panel = str(field.json_schema_extra["group"])
    return Annotated[kind | None, typer.Option(*names, help=field.description, show_default=default, rich_help_panel=panel)]


@app.command()
@_with_settings
def serve(
    model: Annotated[str | None, typer.Argument(help="Hub name or local folder; none is the embedded model.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings by their names.")] = None,
    **flags: Any,
) -> None:
    """Serve MODEL over OpenAI's API.

    Every option is also FA_SERVE_<NAME> in the environment and <name> in the TOML file; a flag wins over the environment, the
    environment over the file. API keys: FA_SERVE_API_KEYS, or --api-key-file.
    """
    report = _StartUp()
    given = {name: value for name, value in {"model": model, **flags}.items() if value is not None}
    try:
        settings = load(given, config)
        keys = settings.all_keys
    except (ValueError, OSError) as error:
        _fail(str(error), code=2)
    _log_to_stderr(settings.log_level, settings.log_format, report)
    import torch

    from fa_serve.engine import AsyncEngine
    from fa_serve.server.app import create_app
    from fa_serve.server.process import Server

    report.mark("import", f"torch {torch.__version__}, transformers {version('transformers')}")
    try:
        engine_config = settings.engine_config()
    except (ValueError, OSError) as error:
        _fail(str(error), code=2)
    report.mark("config", f"{engine_config.model_name}, dtype {engine_config.dtype}, device {engine_config.device}")
    engine = AsyncEngine(engine_config)

    def ready(url: str) -> None:
        report.mark("ready", f"after {time.perf_counter() - report.begin:.2f} s in all")
        name = settings.served_model_name or engine.model_name
        if engine.tokenizer.chat_template or settings.chat_template:
            path, body = "chat/completions", {"model": name, "messages": [{"role": "user", "content": "What is 17 + 25?"}]}
        else:
            path, body = "completions", {"model": name, "prompt": "def fibonacci(n):", "max_tokens": 64}
        key = " -H 'Authorization: Bearer KEY'" if keys else ""
        typer.echo(f"\n{url}\n\ncurl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d '{json.dumps(body)}'\n")

    server = Server(create_app(engine, settings), settings.host, settings.port, settings.drain_timeout, ready)
    logging.getLogger("fa_serve.engine").addHandler(report)
    server.run()
    if server.failure is not None:
        _fail(f"the model could not be loaded: {server.failure}", code=1)


class _StartUp(logging.Handler):
    """One line for each phase of the start, with the time since the one before; the engine logs its own as "phase: detail"."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.begin = self._last = time.perf_counter()
        self._done = False

    def mark(self, phase: str, detail: str) -> None:
        now = time.perf_counter()
        typer.echo(f"{phase.lower():<10}{now - self._last:7.2f} s   {detail}")
        sys.stdout.flush()
        self._last = now
        self._done = phase == "ready"

    def tells(self, record: logging.LogRecord) -> bool:
        """Whether a record is a phase, which needs no second line in the log."""
        started = self._done or record.name != "fa_serve.engine" or record.levelno != logging.INFO
        return not started and ": " in record.getMessage()

    def emit(self, record: logging.LogRecord) -> None:
        if self.tells(record):
            phase, _, detail = record.getMessage().partition(": ")
            self.mark(phase, detail)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def _log_to_stderr(level: str, form: str, report: _StartUp) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.addFilter(lambda record: not report.tells(record))
    logging.getLogger().addHandler(handler)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("fa_serve").setLevel(level.upper())


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"fa-serve: {message}", err=True)
    raise typer.Exit(code)


@app.command()
def info() -> None:
    """Show which attention backend each kind of call gets on this machine, and why the others were refused."""
    import torch

    from fa_serve import __version__
    from fa_serve.backends import explain

    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    console = Console(width=None if sys.stdout.isatty() else 160)
    versions = {"fa_serve": __version__, "python": platform.python_version(), "torch": torch.__version__,
                "transformers": version("transformers")}  # fmt: skip
    console.print(", ".join(f"{package} {number}" for package, number in versions.items()), highlight=False)
    console.print(f"{device}: {name}\n", highlight=False)
    table = Table("call", "spec", "backend", "why not the ones before", show_lines=True)
    for title, spec in _cases(device):
        reasons = explain(spec)
        chosen = next((backend for backend, reason in reasons.items() if reason is None), None)
        before = list(reasons) if chosen is None else list(reasons)[: list(reasons).index(chosen)]
        why = "\n".join(f"{backend}: {reasons[backend]}" for backend in before)
        table.add_row(title, str(spec), chosen or "none", why)
    console.print(table)


def _cases(device: str) -> list[tuple[str, AttentionSpec]]:
    """What people run, named by where it occurs."""
    import torch

    from fa_serve.spec import AttentionSpec, arch_of

    def spec(**changes: Any) -> AttentionSpec:
        dtype = changes.pop("dtype", torch.bfloat16)
        base = {"layout": "varlen", "device": device, "arch": arch_of(torch.device(device)), "dtype": dtype, "kv_dtype": dtype,
                "head_dim": 128, "head_dim_v": 128, "num_heads": 32, "num_kv_heads": 8, "window_size": (-1, 0)}  # fmt: skip
        return AttentionSpec(**{**base, **changes})

    dense, paged = {"layout": "dense"}, {"layout": "paged", "page_size": 16}
    return [
        ("prefill, Llama-3 8B", spec()),
        ("the same in float16", spec(dtype=torch.float16)),
        ("the same in float32", spec(dtype=torch.float32)),
        ("serving, Llama-3 8B", spec(**paged)),
        ("serving, Mistral 7B", spec(**paged, window_size=(4095, 0))),
        ("serving, Gemma 2 9B", spec(**paged, head_dim=256, head_dim_v=256, num_heads=16, softcap=True)),
        ("serving, gpt-oss", spec(**paged, head_dim=64, head_dim_v=64, num_heads=64, sinks=True, window_size=(127, 0))),
        ("prefill, DeepSeek", spec(head_dim=192, head_dim_v=128, num_heads=128, num_kv_heads=128)),
        ("dense, BERT", spec(**dense, head_dim=64, head_dim_v=64, num_heads=12, num_kv_heads=12, window_size=(-1, -1))),
        ("dense, a mask of one's own", spec(**dense, window_size=(-1, -1), mask="bool")),
        ("dense, training", spec(**dense, needs_grad=True)),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
