"""Reads what an encoder's folder asks for from its small files alone: the task, the modules, the prompts.

    folder = read_folder("BAAI/bge-small-en-v1.5", task=None)
    folder.task                # "embed"

The format is that of sentence-transformers (`modules.json` and the configs that it names). A folder without `modules.json` is
judged by the architecture in its config. Left out: weights (load.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

from huggingface_hub import _CACHED_NO_EXIST, try_to_load_from_cache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES
from transformers.utils.hub import cached_file

from fa_serve.hf.model_location import find_model
from fa_serve.named_files import MODULES
from fa_serve.spec import ParameterError

EncoderTask = Literal["embed", "token_embed", "sparse", "score", "classify"]
"""What an encoder answers with: one vector, a vector for each token, word weights, the score of a pair, or classes."""
TASKS: tuple[str, ...] = ("generate", *get_args(EncoderTask))
_TRANSFORMERS = ("Transformer", "MLMTransformer")
_SKIPPED = ("Dropout",)
_KNOWN = ("Pooling", "Dense", "LayerNorm", "Normalize", "SpladePooling", "MultiVectorMask")
_TOKENS = "token_embeddings"
_TEXT = "sentence_embedding"
_GENERAL = "config_sentence_transformers.json"
_COLBERT_SETTINGS = (
    "query_expansion",
    "do_query_expansion",
    "attend_to_expansion_tokens",
    "attend_to_mask_tokens",
    "query_length",
    "document_length",
    "query_prefix",
    "document_prefix",
    "skiplist_words",
)
"""Fields of the general config (_GENERAL). If a folder has any of them, sentence-transformers expands queries unless the folder
says otherwise."""
_TRANSFORMER_CONFIGS = tuple(
    f"sentence_{name}_config.json" for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_TRANSFORMER_TASKS: dict[str, tuple[EncoderTask, ...]] = {
    "feature-extraction": ("embed", "token_embed"),
    "fill-mask": ("sparse",),
    "sequence-classification": ("score", "classify"),
}


@dataclass(frozen=True, slots=True)
class EncoderModule:
    """A module after the transformer. kind: the name of its class; path: its folder; config: its settings"""

    kind: str
    path: str
    config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class EncoderFolder:
    """What a folder asks for.

    path:        hub name or folder
    subfolder:   the part of the folder that has the transformer and its tokenizer; "" for the folder itself
    modules:     the modules that follow the transformer, in order
    prompts:     texts that are put before an input, by name
    default_prompt: the name of the prompt for inputs that name none; None: no prompt
    max_tokens:  the largest number of tokens of an input, as the folder says; None leaves it to the tokenizer and the model
    lower_case:  whether texts are converted to lower case before they are tokenized
    activation:  the name of the class that is applied to the logits of a score or of classes; None for the usual activation
    """

    path: str
    task: EncoderTask
    subfolder: str = ""
    modules: tuple[EncoderModule, ...] = ()
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_tokens: int | None = None
    lower_case: bool = False
    activation: str | None = None


def recognise_task(path: str, given: str | None = None) -> str:
    """The task of a model, given by its folder or hub name: one of TASKS. given: overrides what the files say

    Raises ParameterError for an unknown task.
    """
    if given is not None and given not in TASKS:
        raise ParameterError("task", f"be None or one of {', '.join(TASKS)}", given)
    if given is not None:
        return given
    find_model(path)
    listed = read_json(path, MODULES)
    if listed is not None:
        return _task_of_modules(path, _modules(path, listed))
    config = read_json(path, "config.json") or {}
    return _task_of_architecture(config)


def transformer_subfolder(path: str) -> str:
    """The subfolder that has the transformer: `0_Transformer` in folders of early sentence-transformers, else ""."""
    for module in _modules(path, read_json(path, MODULES) or []):
        if module.kind in _TRANSFORMERS:
            return module.path
    return ""


def read_folder(path: str, task: EncoderTask) -> EncoderFolder:
    """What the folder asks for if it is used for this task.

    Raises ParameterError for a module that fa_serve does not compute, that does not fit the task, or that the task would leave
    out.
    """
    listed = read_json(path, MODULES)
    general = _read_object(path, _GENERAL) or {}
    if listed is None:
        config = read_json(path, "config.json") or {}
        activation = _activation_of(general, config)
        return EncoderFolder(path, task, modules=_default_modules(task, config), activation=activation, **_prompts(general))
    modules = _modules(path, listed)
    subfolder = transformer_subfolder(path)
    settings = _transformer_config(path, subfolder)
    found = tuple(module for module in modules if module.kind not in (*_TRANSFORMERS, *_SKIPPED))
    for module in found:
        if module.kind not in _KNOWN:
            rule = f"have only these modules after a Transformer: {', '.join(_KNOWN)}; {module.kind} is not supported"
            raise ParameterError("model", rule, path)
    limits = [_limit(settings, "max_seq_length")]
    match task:
        case "embed":
            _check_order(path, found)
        case "token_embed":
            _check_late_interaction(path, general, settings)
            found = _modules_of_tokens(path, found, str(general.get("model_type")))
            limits.append(_limit(settings, "document_length") or _limit(general, "document_length"))
        case _:
            found = _only(path, found, task, ("SpladePooling",) if task == "sparse" else ()) or _default_modules(task, {})
    config = read_json(path, f"{subfolder}/config.json" if subfolder else "config.json") or {}
    return EncoderFolder(
        path,
        task,
        subfolder,
        found,
        max_tokens=min((limit for limit in limits if limit), default=None),
        lower_case=bool(settings.get("do_lower_case")),
        activation=_activation_of(general, config),
        **_prompts(general),
    )


def read_json(path: str, name: str) -> Any:
    """The contents of a JSON file in a folder or at a hub name; None if there is no such file.

    Raises OSError for a file that is not valid JSON.
    """
    if not Path(path).is_dir():
        known = try_to_load_from_cache(path, name)
        if known is _CACHED_NO_EXIST:
            return None
    file = cached_file(
        path,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if file is None:
        return None
    try:
        return json.loads(Path(file).read_bytes())
    except ValueError as error:
        raise OSError(f"the model's file {file} cannot be read: {error}") from None


def _read_object(path: str, name: str) -> dict[str, Any] | None:
    """As `read_json`. Raises OSError for a file that holds no JSON object."""
    found = read_json(path, name)
    if found is not None and not isinstance(found, dict):
        raise OSError(f"the model's file {path}/{name} must hold a JSON object, got {type(found).__name__}")
    return found


def _check_late_interaction(path: str, general: dict[str, Any], settings: dict[str, Any]) -> None:
    """Raise ParameterError if a model of late interaction (ColBERT) does more with its tokens than to encode them.

    Settings that a PyLate folder lacks have PyLate's defaults: queries are expanded, and punctuation is skipped.
    """
    expands = settings.get("query_expansion") or general.get("query_expansion") or general.get("do_query_expansion")
    if "query_expansion" not in general and general.get("do_query_expansion") is None:
        expands = expands or any(name in general for name in _COLBERT_SETTINGS)
    skips = general.get("skiplist_words")
    if skips is None:
        skips = general.get("model_type") == "ColBERT"
    prefix = general.get("query_prefix") or general.get("document_prefix")
    for name, off, told in (
        ("do_query_expansion", "false", expands),
        ("skiplist_words", "[]", skips),
        ("query_prefix and document_prefix", '""', prefix),
    ):
        if told:
            rule = f"set {name} to {off} in {_GENERAL}, because fa_serve encodes the tokens as they are"
            raise ParameterError("model", rule, path)


def _only(path: str, found: tuple[EncoderModule, ...], task: str, kinds: tuple[str, ...]) -> tuple[EncoderModule, ...]:
    """Return the modules. Raises ParameterError for a module of any other kind, because the task would leave it out."""
    for module in found:
        if module.kind not in kinds:
            allowed = f"only {', '.join(kinds)}" if kinds else "no modules"
            rule = f"have {allowed} after its Transformer for the task {task}, and not {module.kind}, which would be left out"
            raise ParameterError("model", rule, path)
    return found


def _check_order(path: str, found: tuple[EncoderModule, ...]) -> None:
    """Raise ParameterError unless each module of an embedder reads what the module before it has written."""
    if not any(module.kind == "Pooling" for module in found):
        raise ParameterError("task", "not be embed for a folder without a Pooling module", "embed")
    _only(path, found, "embed", ("Pooling", "Dense", "LayerNorm", "Normalize"))
    has = _TOKENS
    for module in found:
        is_pooling = module.kind == "Pooling"
        reads = _TOKENS if is_pooling else module.config.get("module_input_name", _TEXT)
        writes = _TEXT if is_pooling else module.config.get("module_output_name") or reads
        if (reads, writes) != (has, _TEXT if is_pooling else has):
            rule = (
                f"have modules that each read what the previous module has written, here {has}, but "
                f"{module.path or module.kind} reads {reads} and writes {writes}"
            )
            raise ParameterError("model", rule, path)
        has = writes


def _modules_of_tokens(path: str, found: tuple[EncoderModule, ...], model_type: str) -> tuple[EncoderModule, ...]:
    """The modules that are applied to each token, as `MultiVectorEncoder` of sentence-transformers reads a folder.

    A Dense that names no input is for tokens. In folders of other types than `MultiVectorEncoder`, such as PyLate's, vectors
    get length 1 if there is a Dense or a Normalize. Raises ParameterError for a module that is not for tokens.
    """
    _only(path, found, "token_embed", ("Dense", "Normalize", "MultiVectorMask"))
    is_converted = model_type not in ("MultiVectorEncoder", "ColBERT")  # then a Dense for whole texts is applied to tokens
    kept = []
    for module in found:
        reads = module.config.get("module_input_name", _TEXT if module.kind == "Normalize" else _TOKENS)
        writes = module.config.get("module_output_name") or reads
        if module.kind == "MultiVectorMask":
            for name in ("skiplist_words", "keep_only_token_ids"):
                if module.config.get(name):
                    rule = f"have no {name} in its MultiVectorMask, because fa_serve returns the vectors of all tokens"
                    raise ParameterError("model", rule, path)
        elif module.kind == "Normalize" and reads == _TEXT:
            continue  # it has nothing to normalise, because no module computes one vector for a text
        elif reads == writes and reads in ((_TOKENS, _TEXT) if is_converted else (_TOKENS,)):
            kept.append(module)
        else:
            rule = (
                f"have modules after its Transformer that read and write {_TOKENS}, but {module.path or module.kind} "
                f"reads {reads} and writes {writes}"
            )
            raise ParameterError("model", rule, path)
    if model_type != "MultiVectorEncoder" and any(module.kind in ("Dense", "Normalize") for module in found):
        kept.append(EncoderModule("Normalize", "", {}))
    return tuple(kept)


def _activation_of(general: dict[str, Any], config: dict[str, Any]) -> str | None:
    """The name of the class that sentence-transformers applies to logits, from the newest of three places that names one."""
    own = config.get("sentence_transformers") or {}
    found: str | None = (
        general.get("activation_fn") or own.get("activation_fn") or config.get("sbert_ce_default_activation_function")
    )
    return found


def _prompts(general: dict[str, Any]) -> dict[str, Any]:
    """The prompts and the name of the default one. Raises ParameterError for values that are no texts, and an unknown name."""
    prompts = general.get("prompts") or {}
    default = general.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise ParameterError("model", f"have an object of texts as prompts in {_GENERAL}", prompts)
    texts = {name: text or "" for name, text in prompts.items()}  # sentence-transformers writes null for no prompt
    if default is not None and default not in texts:
        known = ", ".join(texts) or "none"
        raise ParameterError("model", f"name one of its prompts ({known}) as default_prompt_name in {_GENERAL}", default)
    return {"prompts": texts, "default_prompt": default}


def _limit(settings: dict[str, Any], name: str) -> int | None:
    """A number of tokens in a folder's settings; None if they do not say it, or say 0."""
    value = settings.get(name)
    if not value:
        return None
    if type(value) is not int or value < 0:
        raise ParameterError("model", f"have a positive integer or null as {name} in its settings", value)
    return value


def _kind(module: dict[str, Any]) -> str:
    return str(module.get("type", "")).rpartition(".")[2]


def _modules(path: str, listed: Any) -> list[EncoderModule]:
    """The modules that `modules.json` lists. Raises ParameterError for another form."""
    if not isinstance(listed, list) or not all(isinstance(module, dict) for module in listed):
        raise ParameterError("model", f"be a folder whose {MODULES} is a list of objects with a type and a path", path)
    found = []
    for module in listed:
        kind = _kind(module)
        place = _place(module)
        if kind in _TRANSFORMERS:
            found.append(EncoderModule(kind, place, _transformer_config(path, place)))
            continue
        config = _read_object(path, f"{place}/config.json" if place else "config.json")
        found.append(EncoderModule(kind, place, config or {}))
    return found


def _place(module: dict[str, Any]) -> str:
    return str(module.get("path") or "").strip("/")


def _transformer_config(path: str, subfolder: str) -> dict[str, Any]:
    """The settings that sentence-transformers keeps next to the transformer."""
    for name in _TRANSFORMER_CONFIGS:
        config = _read_object(path, f"{subfolder}/{name}" if subfolder else name)
        if config is not None:
            return config
    return {}


def _task_of_modules(path: str, modules: list[EncoderModule]) -> EncoderTask:
    kinds = [module.kind for module in modules]
    if "SpladePooling" in kinds:
        return "sparse"
    if "Pooling" in kinds:
        return "embed"
    if not modules or modules[0].kind not in _TRANSFORMERS:
        raise ParameterError("model", f"be a folder whose {MODULES} begins with a Transformer", path)
    told = modules[0].config.get("transformer_task", "feature-extraction")
    if told not in _TRANSFORMER_TASKS or "LogitScore" in kinds:
        rule = f"be a folder whose Transformer is for {', '.join(_TRANSFORMER_TASKS)}; {told} is not supported"
        raise ParameterError("model", rule, path)
    if told == "sequence-classification":
        return cast(EncoderTask, _task_of_architecture(read_json(path, "config.json") or {}))
    return "token_embed" if told == "feature-extraction" else "sparse"


def _task_of_architecture(config: dict[str, Any]) -> str:
    """The task by the name of the class that wrote the weights: the end of the name says which head they have."""
    architecture = next(iter(config.get("architectures") or ()), "")
    if architecture.endswith("ForSequenceClassification"):
        labels = config.get("id2label") or {}
        return "score" if len(labels) == 1 or config.get("num_labels") == 1 else "classify"
    encodes = architecture.endswith(("Model", "ForMaskedLM", "ForPreTraining")) and not architecture.endswith("LMHeadModel")
    return "embed" if encodes else "generate"


def _default_modules(task: EncoderTask, config: dict[str, Any]) -> tuple[EncoderModule, ...]:
    """The modules after a transformer whose folder does not name any.

    An encoder's tokens are averaged, as in sentence-transformers. In a causal model the last token is taken, because only this
    token has seen all others.
    """
    if task == "sparse":
        return (EncoderModule("SpladePooling", "", {"pooling_strategy": "max", "activation_function": "relu"}),)
    if task != "embed":
        return ()
    is_causal = _reads_left_to_right(config)
    return (EncoderModule("Pooling", "", {"pooling_mode": "lasttoken" if is_causal else "mean"}),)


def _reads_left_to_right(config: dict[str, Any]) -> bool:
    """Whether the model is a decoder: transformers has a class of its type for the next token, and none for masked words."""
    if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
        return False
    kind = config.get("model_type")
    return bool(config.get("is_decoder")) or (
        kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    )
