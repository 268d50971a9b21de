"""Names the model file that cannot be read: the libraries that read files say how they failed, but not on which file.

    try: ...                                 # a library reads the files at `path`
    except Exception as error:
        name_bad_file(path, error)           # raises OSError for a file that cannot be read
        require_any_file(path, WEIGHT_FILES, "weights", error)
        name_bad_folder(path, error)
        raise

Left out: loading (loading.py), and whether there is such a model (fa_serve.hf.model_location).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open

from fa_serve.hf.weights.expert_files import check_experts_agree
from fa_serve.hf.weights.headers import headers
from fa_serve.named_files import ADAPTER_FILES
from fa_serve.spec import ParameterError

FEW_LAYERS = 256
"""With this many layers or fewer, the files are not opened to count their tensors."""
MAX_REASON = 200  # characters of another library's error


def find_model_folder(path: str) -> Path | None:
    """The folder of a model, from the name or path that transformers takes; None if the model is not on this machine."""
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(path, local_files_only=True))
    except Exception:
        return None


def name_bad_file(path: str, error: Exception, subfolder: str = "") -> None:
    """Raise OSError for the first file of the model that cannot be read, if there is one.

    subfolder: the part of the model's folder that has the files; "" for the folder itself
    """
    folder = find_model_folder(path)
    if folder is None or not (folder / subfolder).is_dir():
        return  # the error is about finding the model
    for file in sorted((folder / subfolder).iterdir()):
        if reason := _unreadable(file):
            raise OSError(f"the model's file {file} cannot be read: {reason}") from error


def name_bad_folder(path: str, error: Exception) -> None:
    """Raise OSError that names a local folder whose files can all be read, if the library's error is too general by itself."""
    # PyTorch has no separate error type for sizes that are negative or too large for any memory
    is_general = type(error) is RuntimeError or not isinstance(error, RuntimeError)
    if Path(path).is_dir() and is_general and not isinstance(error, (OSError, ValueError, ImportError, MemoryError)):
        reason = f"{type(error).__name__}: {str(error)[:MAX_REASON]}"
        message = f"the model's folder {path} cannot be loaded: its files can be read, but a value in them is unusable"
        raise OSError(f"{message} ({reason})") from error


def require_tensors_for_layers(path: str, known: Any) -> None:
    """Raise ParameterError if a config has more layers than the folder has tensors: making the layers would fill the memory."""
    layers = getattr(known.get_text_config(), "num_hidden_layers", None)
    folder = Path(path)
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files or not isinstance(layers, int) or layers <= FEW_LAYERS:
        return
    tensors = 0
    for file in files:
        with safe_open(file, framework="pt") as opened:
            tensors += len(opened.keys())
    if layers > tensors:
        rule = f"be at most the number of tensors in the files of {folder}, {tensors}"
        raise ParameterError("num_hidden_layers", rule, layers)


def require_readable_config(path: str, name: str) -> None:
    """Raise OSError for a file of a model that must hold a JSON object, if it exists and does not.

    transformers takes its own defaults in place of a generation_config.json that it cannot read.
    """
    folder = find_model_folder(path)
    file = None if folder is None else folder / name
    if file is None or not file.exists():
        return
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OSError(f"the model's file {file} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(found, dict):
        raise OSError(f"the model's file {file} must hold a JSON object, got {type(found).__name__}")


def name_bad_adapter(path: str, error: Exception) -> None:
    """Raise OSError for a model's folder with an adapter_config.json that describes no adapter.

    If peft is installed, transformers loads the adapter into the model, and the errors that follow name neither.
    """
    settings, weights = (Path(path) / name for name in ADAPTER_FILES)
    if not settings.is_file():
        return
    found = json.loads(settings.read_bytes())  # `name_bad_file` has named files that are not JSON
    if isinstance(found, dict) and "peft_type" in found and weights.is_file():
        return
    raise OSError(
        f"the model's folder {path} has the file {settings.name}, so transformers loads an adapter into the model, but the "
        f"file must be a JSON object with a peft_type, and {weights.name} must be beside it. Remove the file, or serve the "
        "adapter from another folder by --lora NAME=FOLDER"
    ) from error


def name_bad_experts(path: str, error: Exception) -> None:
    """Raise ParameterError for a tensor of an expert that a local folder lacks, or that differs from those of other experts.

    transformers, which stacks these tensors, says only that it could not.
    """
    try:
        check_experts_agree(headers(sorted(Path(path).glob("*.safetensors"))))
    except ParameterError as reason:
        raise reason from error


def require_any_file(path: str, patterns: tuple[str, ...], what: str, error: Exception) -> None:
    """Raise OSError for a local folder that has no file with one of these names."""
    folder = Path(path)
    if folder.is_dir() and not any(next(folder.glob(pattern), None) for pattern in patterns):
        names = ", ".join(patterns)
        message = f"the model's folder {folder} must hold {what} (one of {names}), got none: copy all files of the model"
        raise OSError(message) from error


def _unreadable(file: Path) -> str | None:
    """Why a model file cannot be read in the format that its name promises; None if it can."""
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt"):
                return None
        if file.suffix == ".json":
            found = json.loads(file.read_bytes())
            return _wrong_index(found) if file.name.endswith(".index.json") else None
        if file.match("pytorch_model*.bin") and not is_zipfile(file):
            torch.load(file, map_location="meta", weights_only=True)  # the format before 2020
    except Exception as error:
        return f"{type(error).__name__}: {error} ({file.stat().st_size if file.exists() else 0} bytes)"
    return None


def _wrong_index(found: Any) -> str | None:
    """Why an index of weights cannot be used by transformers; None if it can."""
    index = found if isinstance(found, dict) else {}
    names = index.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        return "it must hold a JSON object with a weight_map, which gives the name of the file of each weight"
    if not isinstance(index.get("metadata"), dict):
        return "it must hold a JSON object with metadata, as transformers writes it"
    return None
