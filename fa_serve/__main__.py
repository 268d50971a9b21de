"""The command line: `fa-serve serve | ray | warm | chat | bench | info | doctor`, also as `python -m fa_serve`.

This file declares the commands; the flags of `serve`, `ray` and `warm` are those of the settings (flags.py). The work is done
elsewhere: by `fa_serve.server` for serve and ray, by `fa_serve.engine` for warm, by `fa_serve.client` for chat and bench, by
info_tables.py for info, and by doctor.py for doctor. torch and transformers are imported only by commands that need them.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NoReturn

try:
    import typer

    from fa_serve.environment import refuse_unknown
    from fa_serve.flags import EngineCommand, PlainHelp, settings_in, with_settings
    from fa_serve.server.observe.logs import log_to_stderr
    from fa_serve.server.observe.startup_report import StartupReport
    from fa_serve.server.setting_files import require_setting_files
    from fa_serve.server.settings import SETTING_VARIABLES, Settings, load
except ImportError as error:
    sys.exit(f"fa-serve: the command line needs the server extra (in a clone: pip install '.[server]'): {error}")

DEFAULT_CONCURRENCY = 32  # concurrent requests in `bench` without --rate
GPU_FILES = ("/dev/nvidiactl", "/dev/kfd")  # device files of the drivers of NVIDIA and AMD

app = typer.Typer(
    name="fa-serve",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Serve Hugging Face models over the APIs of OpenAI and Anthropic, with the attention kernels of fa_serve.",
    epilog="`fa-serve COMMAND --help` describes a command. Begin with `fa-serve doctor`, then `fa-serve serve`.",
)


def main() -> None:
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fa-serve {version('fa-serve')}")
        raise typer.Exit


@app.callback()
def _options_of_all(
    _: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit.")
    ] = False,
) -> None: ...


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"fa-serve: {message}", err=True)
    raise typer.Exit(code)


ModelToServe = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="Hub name or local folder; by default, the embedded model.")
]
SettingsFile = Annotated[Path | None, typer.Option(envvar="FA_SERVE_CONFIG", help="TOML or YAML file of settings.")]


@app.command(cls=EngineCommand)
@with_settings
def serve(
    model: ModelToServe = None,
    config: SettingsFile = None,
    **flags: Any,
) -> None:
    """Serve a model over HTTP.

    Clients speak the APIs of OpenAI and Anthropic; a browser finds a playground at the address. Each
    option is also FA_SERVE_<NAME> in the environment and <name> in the settings file. A flag wins over
    the environment, and the environment over the file. A SIZE is a number of bytes, or has a unit, such
    as 16MiB. API keys come from FA_SERVE_API_KEYS or --api-key-file. The administrator's key comes from
    FA_SERVE_ADMIN_KEY. Under torchrun, rank 0 serves and the others follow it.
    """
    _run_server({"model": model, **flags}, config)


@app.command(cls=EngineCommand)
@with_settings
def ray(
    model: ModelToServe = None,
    config: SettingsFile = None,
    replicas: Annotated[int, typer.Option(min=1, help="Number of engines.", rich_help_panel="Replicas")] = 1,
    max_replicas: Annotated[
        int | None,
        typer.Option(min=1, help="Add engines up to this number while the queue grows.", rich_help_panel="Replicas"),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="Ray cluster to join, or auto; by default a new one on this machine.", rich_help_panel="Replicas"),
    ] = None,
    replica_cpus: Annotated[
        float, typer.Option(min=0, help="CPUs that Ray reserves for each engine.", rich_help_panel="Replicas")
    ] = 1.0,
    **flags: Any,
) -> None:
    """Serve a model with several engines, which Ray runs.

    Needs the extra ray.

    One endpoint, with the options of `serve`. With --address, the engines are on the machines of a
    Ray cluster, each with the GPUs that --tensor-parallel asks for. A second `fa-serve ray` with
    the same options in the same cluster uses the same engines.
    """
    try:
        from fa_serve.server.ray.cluster import Cluster, ReplicaOptions
        from fa_serve.server.ray.replicated_engine import ReplicatedEngine
    except ImportError as error:
        _fail(f"the command ray needs the ray extra (in a clone: pip install '.[server,ray]'): {error}", code=2)

    def prepare(settings: Settings) -> Callable[..., ReplicatedEngine]:
        options = ReplicaOptions(
            replicas, max_replicas, address, replica_cpus, settings.step_timeout, drain_timeout=settings.drain_timeout
        )
        cluster = Cluster(options)
        cluster.connect()
        return partial(ReplicatedEngine, cluster=cluster)

    _run_server({"model": model, **flags}, config, prepare)


def _run_server(
    flags: dict[str, Any], config: Path | None, prepare: Callable[[Settings], Callable[..., Any]] | None = None
) -> None:
    """Serve until a signal arrives. prepare: returns the function that makes the engine; without it, `AsyncEngine` does"""
    from fa_serve.engine.process.engine_process import drop_process, start_ahead

    def end(number: int, _: object) -> None:
        drop_process()
        os._exit(128 + number)

    # the first process of a container has no default action for signals: this handler acts until the server handles them
    signal.signal(signal.SIGTERM, end)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # neither a closed terminal nor `kill -HUP` ends the service
    report = StartupReport()
    try:
        settings = load(settings_in(flags), config)
        require_setting_files(settings, with_engine=prepare is None)  # before anything is imported
    except (ValueError, OSError) as error:
        _fail(str(error), code=2)
    log_to_stderr(settings.log_level, settings.log_format)
    if prepare is None and _has_process(settings):
        start_ahead()
    from fa_serve.engine.process.host_memory import importing, limit_host_memory

    with importing(freeze=True):
        from fa_serve.engine.errors import EngineDeadError
        from fa_serve.engine.parallel.follower_main import follow_if_not_rank_0
        from fa_serve.server.process import build_server
    limit_host_memory()
    try:
        if prepare is None:
            engine_config = settings.engine_config()
            engine_config.require_device()
            follow_if_not_rank_0(engine_config)
        server = build_server(settings, report) if prepare is None else build_server(settings, report, prepare(settings))
    except (ValueError, OSError) as error:
        _fail(str(error), code=2)
    except EngineDeadError as error:
        _fail(str(error), code=1)
    try:
        server.run()
    except OSError as error:
        reason = f"cannot listen on {settings.host}, port {settings.port}: {error.strerror or error}"
        _fail(f"{reason}; choose another --port (0 takes a free one) or --host", code=1)
    if server.failure is not None:
        _fail(f"the model could not be loaded: {server.failure}", code=1)


def _has_process(settings: Settings) -> bool:
    """Whether the engine will run in a separate process, as far as that can be told before PyTorch is imported."""
    if os.environ.get("RANK", "0") != "0":  # set by torchrun, which starts the processes of the other ranks itself
        return False
    if settings.process is not None:
        return bool(settings.process)
    return bool(settings.device.startswith("cuda") or (settings.device == "auto" and any(map(os.path.exists, GPU_FILES))))


@app.command(cls=EngineCommand)
@with_settings
def warm(
    model: ModelToServe = None,
    config: SettingsFile = None,
    **flags: Any,
) -> None:
    """Compile a model's kernels before the server starts.

    They are kept on disk. A later start of `serve` with the same options, the same release and the same kind of GPU loads
    them from ~/.cache/fa_serve, or from the folder that TRITON_CACHE_DIR names. Needs the GPU.
    """
    try:
        settings = load(settings_in({"model": model, **flags}), config)
        require_setting_files(settings, with_engine=True)
        engine_config = settings.engine_config()
        device = engine_config.resolve_device()
    except (ValueError, OSError) as error:
        _fail(str(error), code=2)
    if settings.tensor_parallel > 1:
        _fail("warm supports only --tensor-parallel 1: several ranks compile their kernels when they start", code=2)
    if not device.startswith("cuda"):
        _fail(f"nothing is compiled for the device {device}: run this on a machine with the GPU that will serve", code=2)
    try:
        engine_config.require_device()
    except ValueError as error:
        _fail(str(error), code=2)
    log_to_stderr(settings.log_level, settings.log_format)
    from fa_serve import __version__
    from fa_serve.engine import Engine
    from fa_serve.launching.compilations import use_kernel_cache

    use_kernel_cache(device, __version__)
    try:
        engine = Engine(engine_config, ahead=True, on_phase=StartupReport().add)
    except (ValueError, OSError) as error:
        _fail(f"the model could not be loaded: {error}", code=1)
    engine.close()


def _check_client(url: str) -> None:
    """End the command if the address is not a URL, or if an environment variable FA_SERVE_* is unknown."""
    _check_environment()
    if not url.startswith(("http://", "https://")):
        _fail(f"--url must begin with http:// or https://, got {url}", code=2)


def _check_environment() -> None:
    try:
        refuse_unknown(os.environ, SETTING_VARIABLES)
    except ValueError as error:
        _fail(str(error), code=2)


Url = Annotated[str, typer.Option(help="Address of the server.")]
Key = Annotated[str | None, typer.Option(envvar="FA_SERVE_API_KEY", help="API key, if the server needs one.")]
ModelName = Annotated[str | None, typer.Option(help="Name of the model; by default the first that the server lists.")]


@app.command(cls=PlainHelp)
def chat(
    question: Annotated[
        str | None, typer.Argument(metavar="QUESTION", help="Ask this one question and exit; without it, start a conversation.")
    ] = None,
    url: Url = "http://127.0.0.1:8000",
    key: Key = None,
    model: ModelName = None,
    system: Annotated[str | None, typer.Option(help="System message at the beginning of the conversation.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; by default the server's default.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Maximum number of tokens in an answer.")] = None,
) -> None:
    """Talk to a server in the terminal.

    Ctrl-C stops an answer, Ctrl-D exits, /reset forgets the conversation, /help shows this. Without a
    terminal, each line of the input is a question.
    """
    from fa_serve.client.chat import ChatError, Conversation, answer_once, talk

    _check_client(url)
    options = {"temperature": temperature, "max_completion_tokens": max_tokens}
    with Conversation(url, key=key, model=model, system=system, **options) as conversation:
        if question is None:
            talk(conversation)
            return
        try:
            answer_once(conversation, question)
        except ChatError as error:
            _fail(str(error), code=1)


@app.command(cls=PlainHelp)
def bench(
    url: Url = "http://127.0.0.1:8000",
    key: Key = None,
    model: ModelName = None,
    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 200,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Maximum number of concurrent requests.")] = None,
    rate: Annotated[float | None, typer.Option(min=1e-6, help="Requests per second, arriving as a Poisson process.")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Number of tokens per prompt; they are random.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=2, help="Number of tokens per answer.")] = 128,
    spread: Annotated[
        float, typer.Option(min=0, max=0.99, help="Draw lengths uniformly from 1 - SPREAD to 1 + SPREAD times these.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the prompts and the arrivals.")] = 0,
    processes: Annotated[int, typer.Option(min=1, help="Number of client processes; a fast server needs several.")] = 1,
    out: Annotated[Path | None, typer.Option("--json", help="File to which the report is appended as one JSON line.")] = None,
) -> None:
    """Measure the latencies and the throughput of a server.

    Without --rate, 32 requests run at once. With --rate, --concurrency has no limit by default.
    """
    import asyncio

    from rich.console import Console
    from rich.progress import Progress

    from fa_serve.client.bench import Load, LoadError, run
    from fa_serve.client.bench_report import print_report

    _check_client(url)
    if out is not None and not out.parent.is_dir():
        _fail(f"--json must name a file in an existing folder, got {out}", code=2)
    load = Load(
        url=url,
        key=key,
        model=model,
        requests=requests,
        rate=rate,
        prompt_tokens=prompt_tokens,
        seed=seed,
        output_tokens=output_tokens,
        spread=spread,
        concurrency=concurrency or (DEFAULT_CONCURRENCY if rate is None else None),
        processes=processes,
    )
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=requests)
        try:
            report = asyncio.run(run(load, lambda count: bar.advance(task, count)))
        except (LoadError, OSError) as error:
            _fail(str(error), code=1)
    print_report(report, Console())
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(report) + "\n")
    if report["failed"]:
        _fail(f"{report['failed']} requests failed: {'; '.join(report['errors'])}", code=1)


@app.command(cls=PlainHelp)
def info(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Hub name, local folder or config.json; only the config is read."),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(envvar="FA_SERVE_REVISION", help="Commit, tag or branch of a model on the hub.")
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(metavar="GPU", help="Answer for this GPU, in any spelling: 9.0, 90, sm_90, H100 or hopper."),
    ] = None,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Show which part of MODEL each of this many ranks holds.")] = 1,
) -> None:
    """Show which attention kernels serve a GPU or a model.

    Without MODEL: which backend serves each kind of call on this machine, and why the others do not.
    With MODEL: show each kind of attention layer of this model instead, whether the engine runs the
    model and takes images, and what an encoder computes. The exit code is 1 if fa_serve refuses a part
    of the model, its quantised weights or an encoder's folder, or cannot divide the model.
    """
    _check_environment()
    import torch

    from fa_serve.gpu_names import find_arch
    from fa_serve.info_tables import make_console, show_cases, show_machine, show_model
    from fa_serve.spec import arch_of

    device = "cuda" if torch.cuda.is_available() or arch is not None else "cpu"
    if arch is not None:
        try:
            number = find_arch(arch)
        except ValueError as error:
            _fail(str(error), code=2)
        name = f"compute capability {number / 10}" if number else "an AMD GPU, gfx942"
    else:
        number = arch_of(torch.device(device))
        name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    console = make_console()
    show_machine(device, name, number, console)
    if model is None:
        show_cases(device, number, console)
        return
    from fa_serve.hf.info import describe

    try:
        described = describe(model, device, number, tensor_parallel, revision)
    except (ValueError, OSError, ImportError) as error:
        _fail(str(error), code=2)
    show_model(described, console)
    refused = any(isinstance(each, str) for each in (described.weights, described.share, described.encoder))
    if refused or (described.encoder is None and any(part.refused for part in described.parts)):
        raise typer.Exit(code=1)


@app.command(cls=PlainHelp)
def doctor(
    host: Annotated[str, typer.Option(envvar="FA_SERVE_HOST", help="Address that a server would listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(envvar="FA_SERVE_PORT", min=0, max=65535, help="Port that it would listen on.")] = 8000,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check whether this machine has what the server needs.

    Each check is one line; if something is wrong, a remedy follows below it. The last lines are for an
    issue. The exit code is 1 if a check failed. A warning names something that is slower, or that will
    be missing later.
    """
    from dataclasses import asdict

    from fa_serve.doctor import examine, issue_block

    findings = examine(host, port)
    failed = any(each.state == "failed" for each in findings)
    if as_json:
        typer.echo(json.dumps({"ok": not failed, "version": version("fa-serve"), "checks": [asdict(x) for x in findings]}))
    else:
        for each in findings:
            typer.echo(f"{each.state:<8} {each.name:<13} {each.found}")
            if each.remedy:
                typer.echo(f"{'':<8} {'':<13} -> {each.remedy}")
        typer.echo(f"\n{'Attach this to an issue:' if failed else 'For an issue:'}\n\n{issue_block(findings)}")
    if failed:
        raise typer.Exit(code=1)


if __name__ == "__main__":
    main()
