"""Where a model is: a folder, or a name of the hub. What cannot be found is refused at once, with the reason and the remedy.

    find_model("./my-model")           # a ParameterError or an OSError says what is wrong, before anything is loaded

transformers asks the hub several times for each file, and the hub's client tries five times each, with pauses. So the hub is
asked once, without a second try, before transformers is. A model of which a config has been downloaded is not asked for.
Left out: whether the files can be read, which loading finds out.
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from fa_serve.spec import ParameterError

CONFIG = "config.json"
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
"""Which the hub has for an answer."""


def find_model(model: str) -> None:
    """Raise ParameterError for a name that is neither a folder with a config nor a hub name, and OSError if the hub has no such
    model, or if it cannot be reached and the model is not on this machine.
    """
    folder = Path(model)
    if folder.is_dir():
        if not (folder / CONFIG).is_file():
            raise ParameterError("model", f"be a folder with a {CONFIG}, as transformers saves a model", model)
        return
    if not is_hub_name(model):
        raise ParameterError("model", "be a hub name, such as Qwen/Qwen3-0.6B, or an existing folder", model)
    if isinstance(try_to_load_from_cache(model, CONFIG), str):
        return
    where = f"{constants.ENDPOINT}/{model}"
    try:
        get_hf_file_metadata(hf_hub_url(model, CONFIG), timeout=_SECONDS)
    except GatedRepoError:
        raise OSError(f"the model {model} needs a permission: ask for it at {where}, and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise OSError(
            f"the model {model} is neither a folder nor a model at {where}, or it is private: correct the name, or set HF_TOKEN"
        ) from None
    except EntryNotFoundError:
        raise OSError(f"the model {model} has no {CONFIG} at {where}: name a model in the format of transformers") from None
    except HfHubHTTPError as error:
        raise OSError(f"the model {model} cannot be loaded: {where} answers with {error.response.status_code}") from None
    except Exception as error:  # of the HTTP client, whose errors share no class with the hub's
        raise OSError(
            f"the model {model} is not on this machine, and {constants.ENDPOINT} cannot be reached "
            f"({type(error).__name__}: {error}): check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or give a folder"
        ) from None


def is_hub_name(model: str) -> bool:
    """Whether this may be the name of a model of the hub, which has at most one slash."""
    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    return True
