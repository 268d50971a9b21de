"""Where a model is: a folder, or a name of the hub. A model that cannot be found is refused at once, with reason and remedy.

    find_model("./my-model")           # a ParameterError or an OSError says what is wrong, before anything is loaded
    find_snapshot("org/model", "v1")   # the folder with the files of a revision, which are downloaded

transformers asks the hub several times for each file, and the hub's client tries each request five times, with pauses. So the
hub is asked once, without a retry, before transformers asks it. If the model's config has been downloaded, it is not asked.

A revision becomes one folder here, and everything else reads that folder, so weights, config, tokenizer and processor cannot be
of different revisions. Left out: whether the files can be read; loading shows this.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_url, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from fa_serve.named_files import CONFIG, find_wrong_model
from fa_serve.spec import ParameterError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.*",
    "*.model",
    "*.tiktoken",
    "tekken.json",
)
WEIGHT_FILES = ("*.safetensors", "*.bin")
_SECONDS = 10.0
"""The time limit for an answer of the hub."""
_TEXTS = {".json", ".txt", ".model", ".jinja", ".py", ".tiktoken", ".bpe", ".spm", ".vocab"}
"""Suffixes of a model's files other than weights."""
_FOREIGN = {"onnx", "openvino", "original", "metal", "coreml", "gguf"}
"""Folders in a model's repository that hold the same weights for other programs."""


def find_model(model: str) -> None:
    """Raise ParameterError for a name that is neither a folder with a config nor a hub name, and OSError if the hub has no such
    model, or if it cannot be reached and the model is not on this machine.
    """
    if wrong := find_wrong_model(model):
        raise ParameterError(*wrong)
    if Path(model).is_dir() or isinstance(try_to_load_from_cache(model, CONFIG), str):
        return
    try:
        get_hf_file_metadata(hf_hub_url(model, CONFIG), timeout=_SECONDS)
    except Exception as error:
        raise _refusal(error, model) from None


@lru_cache(maxsize=32)
def find_snapshot(model: str, revision: str, *, weights: bool = True) -> str:
    """The folder with the files of a hub model at a revision, named after the commit. Missing files are downloaded.

    revision: a commit, a tag or a branch. A process that asks again gets the same folder, even if a branch has moved
    weights:  False downloads only the other files

    If the hub cannot be asked, the revision must have been downloaded before. Raises ParameterError for a name that is no hub
    name, and OSError for a revision that cannot be obtained.
    """
    if wrong := find_wrong_model(model, revision):
        raise ParameterError(*wrong)
    try:
        siblings = HfApi().model_info(model, revision=revision, timeout=_SECONDS).siblings or ()
    except Exception as error:
        downloaded = _downloaded(model, revision)
        if downloaded is None:
            raise _refusal(error, model, revision) from None
        return downloaded
    try:
        files = _files_of_model((each.rfilename for each in siblings), weights=weights)
        return snapshot_download(model, revision=revision, allow_patterns=files)
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the disk
        raise _refusal(error, model, revision) from None


def _downloaded(model: str, revision: str) -> str | None:
    """The folder of a revision that has been downloaded; None if it has no config."""
    try:
        folder = snapshot_download(model, revision=revision, local_files_only=True)
    except Exception:  # the hub's client may raise anything for a missing folder
        return None
    return folder if (Path(folder) / CONFIG).is_file() else None


def _files_of_model(names: Iterable[str], *, weights: bool) -> list[str]:
    """The files that transformers reads. Pickles are left out in folders that have the weights as safetensors too."""
    paths = [PurePosixPath(name) for name in names]
    paths = [path for path in paths if _FOREIGN.isdisjoint(path.parts)]
    tensors = [path for path in paths if path.suffix == ".safetensors" and not path.name.startswith("consolidated")]
    pickles = [path for path in paths if path.suffix == ".bin" and path.parent not in {each.parent for each in tensors}]
    texts = [path for path in paths if path.suffix in _TEXTS]
    return [str(path) for path in (texts + tensors + pickles if weights else texts)]


def _refusal(error: Exception, model: str, revision: str | None = None) -> OSError:
    """An error that says in one sentence what is wrong. error: raised by the hub's client"""
    where = f"{constants.ENDPOINT}/{model}"
    named = model if revision is None else f"{model} at the revision {revision}"
    match error:
        case GatedRepoError():
            return OSError(f"the model {model} is gated: request access at {where}, and set HF_TOKEN")
        case RevisionNotFoundError():
            return OSError(f"the model {model} has no revision {revision} at {where}: name a commit, a tag or a branch")
        case RepositoryNotFoundError():
            reason = f"is neither a folder nor a model at {where}, or it is private: correct the name, or set HF_TOKEN"
            return OSError(f"the model {model} {reason}")
        case EntryNotFoundError() if not isinstance(error, LocalEntryNotFoundError):
            return OSError(f"the model {named} has no {CONFIG} at {where}: name a model in the format of transformers")
        case HfHubHTTPError():
            return OSError(f"the model {named} cannot be loaded: {where} answers with {error.response.status_code}")
    # an error of the HTTP client, whose errors share no class with those of the hub's client
    return OSError(
        f"the model {named} is not on this machine, and {constants.ENDPOINT} cannot be reached "
        f"({type(error).__name__}: {error}): check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or give a folder"
    )
