"""The flags of the settings, and the plain help of every command.

    @app.command(cls=EngineCommand)
    @with_settings
    def serve(model: str | None = None, **flags): ...

    settings_in({"port": 9000, "no_eager": True})        # what flags give: {"port": 9000, "eager": False}

The flags are generated from the table of settings (server/settings.py), so a flag, its environment variable and its key in the
settings file cannot differ. The help has one section for each group of settings. A long flag stands on its own line, so that
no name is ever cut off, however narrow the terminal is. Left out: the commands (__main__.py).
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand

from fa_serve.environment import PREFIX
from fa_serve.server.settings import SECRETS, Settings, counts_bytes, load, shown_default

FLAG = re.compile(r"--[a-z][a-z0-9-]*")
HELD = "\ue000"
"""Stands for a hyphen at which a line must not be broken; a character of Unicode's private use area."""
METAVARS = {int: "INTEGER", float: "FLOAT"}
"""Placeholders for numbers. The settings read the numbers, so that errors name the setting and its unit."""
PLAIN_TYPES = (bool, float, int, str, Path)
"""Types that every release of typer reads. The other settings that typer reads are choices."""
SWITCH_WORDS = ("true", "false", "yes", "no", "on", "off", "1", "0")
"""Words that people write after a switch, which takes no value. They would be taken for the name of a model."""

FOREIGN_FLAGS = {
    "--allowed-origins": "--cors-origins",
    "--api-key": "FA_SERVE_API_KEYS in the environment, or --api-key-file: other users of the machine can read flags",
    "--block-size": "--page-size",
    "--code-revision": "--revision, which applies to all files of the model",
    "--cpu-offload-gb": "--quantization fp8, a quantised checkpoint or --tensor-parallel: all weights stay on the GPU",
    "--data-parallel-size": "fa-serve ray --replicas",
    "--disable-log-requests": "nothing: prompts and answers are never logged. --log-level warning turns the access log off",
    "--disable-log-stats": "nothing: statistics are not logged; /metrics has them",
    "--download-dir": "HF_HOME in the environment",
    "--enable-auto-tool-choice": "nothing: tools are always offered",
    "--enable-chunked-prefill": "nothing: long prompts are always split into chunks; --max-num-batched-tokens limits a step",
    "--enable-lora": "--lora NAME=FOLDER, or --lora-bytes for adapters that are loaded at run time",
    "--enable-prefix-caching": "--prefix-caching, which is the default",
    "--enforce-eager": "--eager",
    "--hf-overrides": "a folder with the model's files, whose config.json you have edited",
    "--limit-mm-per-prompt": "--max-images",
    "--load-format": "nothing: the format follows from the files, as in transformers",
    "--lora-modules": "--lora NAME=FOLDER",
    "--max-loras": "--lora-bytes: a batch may use any number of the adapters that are in memory",
    "--no-enable-prefix-caching": "--no-prefix-caching",
    "--num-gpu-blocks-override": "--num-pages",
    "--override-generation-config": "--generation-config FOLDER, with a generation_config.json in it",
    "--pipeline-parallel-size": "--tensor-parallel: there is no pipeline parallelism",
    "--rope-scaling": "a folder with the model's files, whose config.json names the rope_scaling",
    "--root-path": "a reverse proxy that strips the path (docs/deployment.md)",
    "--scheduling-policy": "nothing: the priority of a request always counts",
    "--speculative-config": "--speculative",
    "--ssl-certfile": "a reverse proxy that terminates TLS (docs/deployment.md)",
    "--ssl-keyfile": "a reverse proxy that terminates TLS (docs/deployment.md)",
    "--swap-space": "--kv-host-memory, which keeps evicted pages for later prompts: preempted requests are recomputed",
    "--tensor-parallel-size": "--tensor-parallel",
    "--tokenizer": "a folder with the model's files, in which you have replaced those of the tokenizer",
    "--tokenizer-revision": "--revision, which applies to all files of the model",
    "--uvicorn-log-level": "--log-level",
}
"""Flags of `vllm serve` that do not exist here, and what to use instead; docs/moving/vllm.md lists the same flags."""
OTHER_SPELLINGS = {
    "-tp": "--tensor-parallel",
    "-dp": FOREIGN_FLAGS["--data-parallel-size"],
    "-q": "--quantization",
    "--model": "the model as the first argument: fa-serve serve MODEL",
}
"""Other spellings of flags, which do not exist here, and what to use instead."""
FOREIGN_VALUES = {
    ("--dtype", "half"): "--dtype float16",
    ("--dtype", "float"): "--dtype float32",
    ("--generation-config", "vllm"): "--generation-config none",
    **{("--kv-cache-dtype", kind): "--kv-cache-dtype fp8, which is float8_e4m3fn" for kind in ("fp8_e4m3", "fp8_e5m2")},
    **{
        ("--kv-cache-dtype", kind): f"--dtype {kind}: without --kv-cache-dtype, the cache has the model's dtype"
        for kind in ("bfloat16", "float16")
    },
    **{
        ("--quantization", kind): "no --quantization: the format is read from the files of a quantised checkpoint"
        for kind in ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "bitsandbytes", "modelopt")
    },
}
"""Values of flags that exist in vLLM and not here, and what to use instead."""
NAMES = "--served-model-name"
"""A flag that takes several words in vLLM, and one here."""


class PlainHelp(TyperCommand):
    """A command whose help is plain text. It has a section for each panel of options, and no flag is broken across lines.

    click also breaks lines at hyphens, so another character replaces the hyphens of flags until the lines are broken.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help of the command."""
        written = self.help
        self.help = written and _undivided(written)
        try:
            super().format_help(ctx, formatter)
        finally:
            self.help = written
        formatter.buffer = [piece.replace(HELD, "-") for piece in formatter.buffer]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, and then the options by panel, in the order in which panels first appear."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            record = (_undivided(record[0]), _undivided(record[1]))
            fallback = "Arguments" if parameter.param_type_name == "argument" else "Options"
            sections.setdefault(getattr(parameter, "rich_help_panel", None) or fallback, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class EngineCommand(PlainHelp):
    """A command with the settings of an engine. The error for a flag of vLLM says what to use instead."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments. Ends the command with a usage error for a flag that it does not have."""
        for argument, following in pairwise([*args, ""]):
            flag, _, value = argument.partition("=")
            flag = flag.replace("_", "-")  # vLLM takes both spellings
            value = value or following
            remedy = {**FOREIGN_FLAGS, **OTHER_SPELLINGS}.get(flag, "")
            if remedy.startswith("nothing: "):
                ctx.fail(f"No such option: {flag}. Leave it out: {remedy.removeprefix('nothing: ')}")
            if remedy:
                ctx.fail(f"No such option: {flag}. Use {remedy}")
            if (flag, value) in FOREIGN_VALUES:
                ctx.fail(f"{flag} {value} is a value of vLLM. Use {FOREIGN_VALUES[flag, value]}")
        self._require_one_name(ctx, args)
        return super().parse_args(ctx, args)

    def _require_one_name(self, ctx: Any, args: list[str]) -> None:
        """End the command if NAMES is given several words. The second word may be MODEL, unless MODEL is given elsewhere.

        With a model in the environment or in the settings file, the second word may be meant as another name, as in vLLM. It
        would take the place of that model.
        """
        if NAMES not in args:
            return
        behind = args[args.index(NAMES) + 1 :]
        names = list(takewhile(lambda argument: not argument.startswith("-"), behind))
        if len(names) < 2:
            return
        options, superfluous, _ = self.make_parser(ctx).parse_args(args=[*args])
        if superfluous:
            given = " ".join(names)
            ctx.fail(f"{NAMES} takes one name, got {given}. Use {NAMES} {names[0]}, and let clients ask for that name")
        model, source = _model_elsewhere(options.get("config"))
        if model and names[1] != model:
            ctx.fail(
                f"{NAMES} takes one name, and {names[1]} behind it would take the place of {source}. Leave "
                f"{names[1]} out, or begin with it if it is the model: fa-serve {ctx.info_name} {names[1]} {NAMES} {names[0]}"
            )


def _model_elsewhere(file: str | None) -> tuple[str | None, str]:
    """The model that the environment or the settings file gives, and the words for where it is given.

    file: what --config gives, in place of FA_SERVE_CONFIG
    """
    file = file or os.environ.get(f"{PREFIX}CONFIG")
    model = os.environ.get(f"{PREFIX}MODEL")
    if model or not file:
        return model, f"{PREFIX}MODEL={model}"
    try:
        model = load({}, Path(file)).model
    except (ValueError, OSError):
        return None, ""  # the command reports them when it reads its settings
    return model, f"the model {model} of {file}"


def _undivided(text: str) -> str:
    return FLAG.sub(lambda flag: flag[0].replace("-", HELD), text)


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes `**flags` options for the settings, except for secrets and for its own parameters."""
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
    skipped = {*SECRETS, *(parameter.name for parameter in own)}
    parameters = list(own)
    for name in [name for name in Settings.model_fields if name not in skipped]:
        annotation = _option(name)
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _option(name: str) -> Any:
    """The annotation of a setting's option. An option that is not given is None: the environment or the file decides."""
    field = Settings.model_fields[name]
    extra: Any = field.json_schema_extra
    flag = name.replace("_", "-")
    kinds = [kind for kind in get_args(field.annotation) if kind is not type(None)]
    kind: Any = field.annotation if not kinds or get_origin(field.annotation) is Literal else kinds[0]
    metavar = "SIZE" if counts_bytes(name) else METAVARS.get(kind)
    if metavar or (kind not in PLAIN_TYPES and get_origin(kind) is not Literal):
        kind = str  # the settings read it
    names = f"--{flag}/--no-{flag}" if kind is bool else f"--{flag}"
    about = str(field.description) + _default_of(name)
    shown = typer.Option(names, help=about, rich_help_panel=extra["group"], metavar=metavar)
    return Annotated[kind | None, shown]


def _default_of(name: str) -> str:
    """The default, to follow the description. The description of a setting without a default says what happens then."""
    shown = shown_default(name)
    if not shown:
        return ""
    words = {"true": "on", "false": "off"}
    return f"  [default: {words.get(shown, shown)}]"


def settings_in(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that flags give. Raises ValueError for a word after a switch, which typer reads as the model."""
    model = flags.get("model")
    if isinstance(model, str) and model.lower() in SWITCH_WORDS:
        raise ValueError(
            f"MODEL must be a hub name or a folder, got {model}: a switch takes no value, as in --eager or --no-eager"
        )
    return {name: value for name, value in flags.items() if value is not None}
