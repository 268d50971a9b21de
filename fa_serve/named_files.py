"""Checks of the models, folders and files that settings name. A start reports errors at once: no import here is slow.

    wrong = find_wrong_file(settings)        # Wrong("lora", "name an existing folder ...", "french=./nope"), or None

The server's settings and the engine's config are both checked before weights are loaded: by the command line before it imports
PyTorch, and by an engine before it loads. Left out: what is in the files, and whether the hub has a model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

CONFIG = "config.json"
MODULES = "modules.json"
"""In a folder of sentence-transformers. Its Transformer may be in a subfolder, which then has the config."""
GENERATION_CONFIG = "generation_config.json"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
ADAPTER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@+-]{0,127}")
ADAPTER_NAME_RULE = (
    "have at most 128 characters, only letters, digits and . : @ + - _ (no slashes), and begin with a letter, a digit or _"
)
_HUB_NAME = re.compile(r"(\b[\w\-.]{1,96}\b/)?\b[\w\-.]{1,96}\b", re.ASCII)
DRAFTERS = ("draft=", "eagle3=")


class Wrong(NamedTuple):
    """The arguments of a ParameterError: `rule` completes the sentence "<field> must ..."."""

    field: str
    rule: str
    value: object


class NamedFiles(Protocol):
    """The settings that name files, with the same meaning as in `EngineConfig`."""

    @property
    def model(self) -> str | Path | None: ...
    @property
    def revision(self) -> str | None: ...
    @property
    def generation_config(self) -> str | Path: ...
    @property
    def speculative(self) -> str | None: ...
    @property
    def lora(self) -> Sequence[str]: ...
    @property
    def kv_host_folder(self) -> str | Path | None: ...


def find_wrong_file(settings: NamedFiles) -> Wrong | None:
    """The first setting that names something that does not exist or is of the wrong kind; None if all are right."""
    if wrong := find_wrong_model(settings.model, settings.revision):
        return wrong
    for find in (_wrong_generation_config, _wrong_drafter, _wrong_lora, _wrong_tier):
        if wrong := find(settings):
            return wrong
    return None


def find_wrong_model(model: str | Path | None, revision: str | None = None) -> Wrong | None:
    """Why this is no model: neither a folder with a config nor a hub name, or a revision of a model that is not on the hub.

    model: None is the embedded model
    """
    folder = model is not None and Path(model).is_dir()
    if model is not None and folder and not any((Path(model) / name).is_file() for name in (CONFIG, MODULES)):
        return Wrong("model", f"be a folder with a {CONFIG}, as transformers saves a model", str(model))
    if model is not None and not folder and not is_hub_name(str(model)):
        return Wrong("model", "be a hub name, such as Qwen/Qwen3-0.6B, or an existing folder", str(model))
    if revision is None:
        return None
    if model is None or folder:
        what = "the embedded model" if model is None else "a folder"
        rule = f"be left out for {what}, which has only one revision: only models on the hub have several"
        return Wrong("revision", rule, revision)
    return None if revision.strip() else Wrong("revision", "be a commit, a tag or a branch of the model on the hub", revision)


def is_hub_name(model: str) -> bool:
    """Whether this may be the name of a model of the hub, which has at most one slash."""
    doubled = "--" in model or ".." in model
    return not doubled and not model.endswith(".git") and _HUB_NAME.fullmatch(model) is not None


def _wrong_generation_config(settings: NamedFiles) -> Wrong | None:
    given = settings.generation_config
    if given in ("auto", "none") or (Path(given) / GENERATION_CONFIG).is_file():
        return None
    missing = f"there is no {GENERATION_CONFIG} in it" if Path(given).is_dir() else "there is no such folder"
    rule = f"be auto, none, or a folder with a {GENERATION_CONFIG} that can be read ({missing})"
    return Wrong("generation_config", rule, str(given))


def _wrong_drafter(settings: NamedFiles) -> Wrong | None:
    told = settings.speculative
    kind = next((each for each in DRAFTERS if isinstance(told, str) and told.startswith(each)), None)
    if told is None or kind is None or not (name := told.removeprefix(kind)):
        return None  # the engine's config checks other values
    wrong = find_wrong_model(name)
    what = "a draft model" if kind == "draft=" else "an EAGLE-3 head"
    return wrong and Wrong("speculative", f"name {what}: model must {wrong.rule}, got {wrong.value!r}", told)


def _wrong_lora(settings: NamedFiles) -> Wrong | None:
    names = []
    for each in settings.lora:
        name, equals, folder = each.partition("=")
        if not equals or ADAPTER_NAME.fullmatch(name) is None:
            return Wrong("lora", f"be NAME=FOLDER, where NAME must {ADAPTER_NAME_RULE}", each)
        if name in names:
            return Wrong("lora", "give each adapter a different name", each)
        names.append(name)
        if not Path(folder).is_dir():
            return Wrong("lora", "be NAME=FOLDER with an existing folder", each)
        missing = [file for file in ADAPTER_FILES if not (Path(folder) / file).is_file()]
        if missing:
            return Wrong("lora", f"be NAME=FOLDER with {' and '.join(ADAPTER_FILES)} in it: {missing[0]} is missing", each)
    return None


def _wrong_tier(settings: NamedFiles) -> Wrong | None:
    if settings.kv_host_folder is None:
        return None
    folder = Path(settings.kv_host_folder).absolute()
    there = next((each for each in (folder, *folder.parents) if each.exists()), folder)  # folders below it will be made
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return None
    reason = f"{there} is not writable" if there.is_dir() else f"{there} is not a folder"
    return Wrong("kv_host_folder", f"be a folder that can be read and written ({reason})", str(settings.kv_host_folder))
