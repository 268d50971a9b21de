"""The command line: `fa-serve serve | chat | bench | info`, also as `python -m fa_serve`.

Flags are generated from the table of settings, so that a flag, its environment variable and its key in the TOML file cannot
drift apart. torch and transformers are imported when a command needs them. Left out: what the commands do, which lives in
`fa_serve.server` and `fa_serve.backends`.
"""

from __future__ import annotations

import inspect
import itertools
import json
import logging
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, get_args, get_origin

try:
    import typer
    from rich.console import Console
    from rich.table import Table

    from fa_serve.server.logs import StartUp, log_to_stderr
    from fa_serve.server.settings import SECRETS, Settings, load
except ImportError as error:
    sys.exit(f"fa-serve: the command line needs the server extra, pip install '.[server]' in a clone: {error}")

if TYPE_CHECKING:
    from fa_serve.spec import AttentionSpec

app = typer.Typer(
    name="fa-serve",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Serve Hugging Face models over OpenAI's API, on fa_serve's own attention kernels.",
)


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
    config: Annotated[Path | None, typer.Option(envvar="FA_SERVE_CONFIG", help="TOML or YAML file of settings.")] = None,
    **flags: Any,
) -> None:
    """Serve MODEL over OpenAI's API.

    Every option is also FA_SERVE_<NAME> in the environment and <name> in the file; a flag wins over the environment, the
    environment over the file. API keys: FA_SERVE_API_KEYS, or --api-key-file.
    """
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))  # in a container it would be ignored until we serve
    report = StartUp()
    given = {name: value for name, value in {"model": model, **flags}.items() if value is not None}
    try:
        settings = load(given, config)
        keys = settings.all_keys
    except (ValueError, OSError) as error:
        _fail(str(error), code=2)
    log_to_stderr(settings.log_level, settings.log_format, report)
    import torch

    from fa_serve.engine import AsyncEngine
    from fa_serve.server.app import create_app
    from fa_serve.server.process import Server

    report.mark("import", f"torch {torch.__version__}, transformers {version('transformers')}")
    try:
        engine_config = settings.engine_config()
        engine = AsyncEngine(engine_config)
        service = create_app(engine, settings)
    except (ValueError, OSError) as error:
        _fail(str(error), code=2)
    report.mark("config", f"{engine_config.model_name}, dtype {engine_config.dtype}, device {engine_config.device}")

    def ready(url: str) -> None:
        report.mark("ready", f"after {time.perf_counter() - report.begin:.2f} s in all")
        name = settings.served_model_name or engine.model_name
        if engine.tokenizer.chat_template or settings.chat_template:
            path = "chat/completions"
            body = {"model": name, "messages": [{"role": "user", "content": "What is 17 + 25?"}]}
        else:
            path = "completions"
            body = {"model": name, "prompt": "def fibonacci(n):", "max_tokens": 64}
        key = " -H 'Authorization: Bearer KEY'" if keys else ""
        typer.echo(f"\n{url}\n\ncurl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d '{json.dumps(body)}'\n")

    server = Server(service, settings.host, settings.port, settings.drain_timeout, ready)
    logging.getLogger("fa_serve.engine").addHandler(report)
    try:
        server.run()
    except OSError as error:
        _fail(f"cannot listen on {settings.host}:{settings.port}: {error}", code=1)
    if server.failure is not None:
        _fail(f"the model could not be loaded: {server.failure}", code=1)


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"fa-serve: {message}", err=True)
    raise typer.Exit(code)


URL = Annotated[str, typer.Option(help="Where the server listens.")]
KEY = Annotated[str | None, typer.Option(envvar="FA_SERVE_API_KEY", help="API key, if the server wants one.")]
MODEL = Annotated[str | None, typer.Option(help="Name of the model; none is the first that the server lists.")]


@app.command()
def chat(
    question: Annotated[str | None, typer.Argument(help="Ask this and leave; none begins a conversation.")] = None,
    url: URL = "http://127.0.0.1:8000",
    key: KEY = None,
    model: MODEL = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; none is the server's default.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of an answer at most.")] = None,
) -> None:
    """Talk to a server. Ctrl-C stops an answer, Ctrl-D leaves, /reset forgets what was said."""
    from fa_serve.server.chat import ChatError, Conversation

    options = {"temperature": temperature, "max_completion_tokens": max_tokens}
    with Conversation(url, key=key, model=model, system=system, **options) as conversation:
        while True:
            try:
                asked = input("> ") if question is None else question
            except (EOFError, KeyboardInterrupt):
                typer.echo()
                return
            if asked == "/reset":
                conversation.reset()
                continue
            try:
                for text in conversation.ask(asked):
                    typer.echo(text, nl=False)
                    sys.stdout.flush()
            except KeyboardInterrupt:
                typer.echo(" (stopped)", nl=False)
            except ChatError as error:
                if question is not None:
                    _fail(str(error), code=1)
                typer.echo(f"fa-serve: {error}", err=True, nl=False)
            typer.echo()
            if question is not None:
                return


@app.command()
def bench(
    url: URL = "http://127.0.0.1:8000",
    key: KEY = None,
    model: MODEL = None,
    requests: Annotated[int, typer.Option(min=1, help="How many requests in all.")] = 200,
    concurrency: Annotated[int | None, typer.Option(min=1, help="How many at once; with --rate none is no bound.")] = None,
    rate: Annotated[float | None, typer.Option(min=1e-6, help="Requests per second, as a Poisson process.")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Random tokens of each prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 128,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    processes: Annotated[int, typer.Option(min=1, help="Of this client, which a fast server keeps busy.")] = 1,
    out: Annotated[Path | None, typer.Option("--json", help="File to append the report to, as one JSON line.")] = None,
) -> None:
    """Put a load on a server and report latencies and throughput. Without --rate, 32 requests run at once."""
    import asyncio

    from rich.progress import Progress

    from fa_serve.server.bench import Load, run

    load_ = Load(
        url=url,
        key=key,
        model=model,
        requests=requests,
        rate=rate,
        prompt_tokens=prompt_tokens,
        seed=seed,
        output_tokens=output_tokens,
        concurrency=concurrency or (32 if rate is None else None),
        processes=processes,
    )
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=requests)
        try:
            report = asyncio.run(run(load_, lambda n: bar.advance(task, n)))
        except (RuntimeError, OSError) as error:
            _fail(str(error), code=1)
    columns = ["", *report["e2e_ms"]]
    table = Table(*columns, title=f"{report['model']}: {requests - report['failed']} of {requests} in {report['seconds']} s")
    for name, row in {"first token": "ttft_ms", "between tokens": "itl_ms", "whole request": "e2e_ms"}.items():
        table.add_row(f"{name}, ms", *(f"{value:.2f}" for value in report[row].values()))
    console = Console()
    console.print(table)
    console.print(f"{report['output_tokens_per_s']:.0f} tokens/s, {report['requests_per_s']:.2f} requests/s", highlight=False)
    if report["client_busy"] > 0.8:
        console.print("This client was busy all the time: the server may be faster than it; try --processes.", highlight=False)
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(report) + "\n")
    if report["failed"]:
        _fail(f"{report['failed']} requests failed: {'; '.join(report['errors'])}", code=1)


@app.command()
def info(
    model: Annotated[str | None, typer.Argument(help="Hub name or local folder; only its config is read.")] = None,
    arch: Annotated[int | None, typer.Option(help="Answer for a GPU of this compute capability, 90 for 9.0.")] = None,
) -> None:
    """Show which attention backend each kind of call gets on this machine, and why the others were refused.

    With MODEL: each kind of layer that its config asks for instead, who serves it in a prefill and in the engine's decoding,
    and whether the engine runs the model. Ends with 1 if a part of the model is refused.
    """
    import torch

    from fa_serve import __version__
    from fa_serve.backends import explain

    device = "cuda" if torch.cuda.is_available() or arch is not None else "cpu"
    name = platform.processor() or platform.machine()
    if device == "cuda":
        name = torch.cuda.get_device_name() if arch is None else f"compute capability {arch / 10}"
    console = Console(width=None if sys.stdout.isatty() else 160)
    versions = {
        "fa_serve": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }
    console.print(", ".join(f"{package} {number}" for package, number in versions.items()), highlight=False)
    console.print(f"{device}: {name}\n", highlight=False)
    if model is not None:
        _info_of_model(model, device, arch, console)
        return
    table = Table("call", "spec", "backend", "why not the ones before", show_lines=True)
    for title, spec in _cases(device, arch):
        table.add_row(title, str(spec), *_choice(explain(spec)))
    console.print(table)


def _choice(reasons: dict[str, str | None]) -> tuple[str, str]:
    """The first backend without a reason, and the reasons of those before it."""
    before = list(itertools.takewhile(lambda item: item[1] is not None, reasons.items()))
    chosen = "none" if len(before) == len(reasons) else list(reasons)[len(before)]
    return chosen, "\n".join(f"{backend}: {reason}" for backend, reason in before)


def _info_of_model(model: str, device: str, arch: int | None, console: Console) -> None:
    import torch

    from fa_serve.backends import explain
    from fa_serve.hf.info import decoding, describe
    from fa_serve.spec import arch_of

    try:
        described = describe(model, device, arch_of(torch.device(device)) if arch is None else arch)
    except (ValueError, OSError, ImportError) as error:
        _fail(str(error), code=2)
    table = Table("part", "layers", "what each asks for", "prefill", "decoding", "why not the ones before", show_lines=True)
    for part in described.parts:
        for layer, where in part.kinds():
            (prefill, why), (decode, _) = _choice(explain(layer.spec)), _choice(explain(decoding(layer.spec)))
            decode = decode if layer.spec.window_size[1] == 0 and layer.spec.mask is None else "-"
            title = f"{part.name}\n{part.model}"
            table.add_row(title, f"{where}\n{layer.module}", str(layer.spec).partition(", ")[2], prefill, decode, why)
    console.print(table)
    for part in described.parts:
        if part.refused or part.untried:
            console.print(f"{part.name}: {'refused' if part.refused else 'not tried out'}: {part.refused or part.untried}")
    console.print("engine: runs it" if described.engine is None else f"engine: {described.engine}", highlight=False)
    if any(part.refused for part in described.parts):
        raise typer.Exit(code=1)


def _cases(device: str, arch: int | None) -> list[tuple[str, AttentionSpec]]:
    """What people run, named by where it occurs."""
    import torch

    from fa_serve.spec import AttentionSpec, arch_of

    def spec(**changes: Any) -> AttentionSpec:
        dtype = changes.pop("dtype", torch.bfloat16)
        here = arch_of(torch.device(device)) if arch is None else arch
        base = {
            "layout": "varlen",
            "device": device,
            "arch": here,
            "dtype": dtype,
            "kv_dtype": dtype,
            "head_dim": 128,
            "head_dim_v": 128,
            "num_heads": 32,
            "num_kv_heads": 8,
            "window_size": (-1, 0),
        }
        return AttentionSpec(**{**base, **changes})

    dense = {"layout": "dense"}
    paged = {"layout": "paged", "page_size": 16}
    return [
        ("prefill, Llama-3 8B", spec()),
        ("the same in float16", spec(dtype=torch.float16)),
        ("the same in float32", spec(dtype=torch.float32)),
        ("serving, Llama-3 8B", spec(**paged)),
        ("the same, decoding", spec(**paged, op="decode")),
        ("serving, Mistral 7B", spec(**paged, window_size=(4095, 0))),
        ("serving, Gemma 2 9B", spec(**paged, head_dim=256, head_dim_v=256, num_heads=16, softcap=True)),
        ("serving, gpt-oss", spec(**paged, head_dim=64, head_dim_v=64, num_heads=64, sinks=True, window_size=(127, 0))),
        ("prefill, DeepSeek", spec(head_dim=192, head_dim_v=128, num_heads=128, num_kv_heads=128)),
        ("dense, BERT", spec(**dense, head_dim=64, head_dim_v=64, num_heads=12, num_kv_heads=12, window_size=(-1, -1))),
        ("dense, a mask of one's own", spec(**dense, window_size=(-1, -1), mask="bool")),
        ("dense, training", spec(**dense, needs_grad=True)),
    ]


if __name__ == "__main__":
    main()
