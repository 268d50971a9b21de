"""Loads the tokenizer and the model from disk, and decides how large the KV cache and the sequences may be.

    loaded = load(config, ranks, clock)
    loaded.runner, loaded.scheduler, loaded.tokenizer, loaded.config         # the config holds no "auto" any more

Left out: which models can be served at all (fa_serve.hf).
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedModel

from fa_serve.api import MAX_KEYS_PER_TILE
from fa_serve.engine.cache.pages import PageTable, new_salt
from fa_serve.engine.cache.states import StateTable
from fa_serve.engine.cache.tensors import check_num_pages, check_num_states
from fa_serve.engine.config import EngineConfig
from fa_serve.engine.events import PhaseClock
from fa_serve.engine.images.encoder import ImageEncoder
from fa_serve.engine.lora.store import AdapterStore
from fa_serve.engine.parallel.ranks import Alone, Ranks
from fa_serve.engine.request.params import SamplingParams
from fa_serve.engine.runner.attention_kinds import least_group_keys
from fa_serve.engine.runner.cuda_graphs import OnError
from fa_serve.engine.runner.model_runner import ModelRunner
from fa_serve.engine.runner.room import find_room
from fa_serve.engine.scheduler.adapter_seats import AdapterSeats
from fa_serve.engine.scheduler.prefix_groups import PrefixGroups
from fa_serve.engine.scheduler.scheduler import Scheduler
from fa_serve.engine.scheduler.tower_queue import TowerQueue
from fa_serve.engine.speculation.draft_head import load_head_runner
from fa_serve.engine.speculation.draft_model import DraftModel
from fa_serve.engine.speculation.drafts import Drafter, NgramDrafter, Speculation
from fa_serve.engine.start.bad_files import (
    find_model_folder,
    name_bad_adapter,
    name_bad_experts,
    name_bad_file,
    name_bad_folder,
    require_any_file,
    require_readable_config,
    require_tensors_for_layers,
)
from fa_serve.engine.start.generation_config import Defaults, find_defaults, find_ends
from fa_serve.engine.start.host_tier import open_folder_files, open_host_tier
from fa_serve.engine.start.named import settle_names
from fa_serve.engine.start.read_ahead import reading_ahead
from fa_serve.engine.summary import EngineSummary
from fa_serve.hf import (
    attention_backends,
    auto_class,
    check_attention_precision,
    divide_model,
    length_limit,
    make_served,
    patch_parts,
    plan_division,
    text_model,
    vocab_size,
)
from fa_serve.hf.encoders.folder import transformer_subfolder
from fa_serve.hf.model_location import TOKENIZER_FILES, WEIGHT_FILES, find_model
from fa_serve.hf.surgery.quantised.linear import check_report, finish_weights, quantized_elsewhere, with_quantized_linears
from fa_serve.hf.weights.expert_files import require_enough_experts
from fa_serve.hf.weights.float_files import check_float_files
from fa_serve.hf.weights.progress import weights_counted
from fa_serve.named_files import GENERATION_CONFIG
from fa_serve.spec import ParameterError, UnsupportedModelError

log = logging.getLogger("fa_serve.engine")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What an engine runs with.

    runner:    has the model and the KV cache
    scheduler: has the pages of this cache, and no requests
    config:    the settings; every "auto" and every None that the engine decides has been replaced
    max_model_len: maximum number of tokens of a sequence
    eos_ids: the tokens that end an answer
    default_params: parameters of requests that give none
    summary: other decisions, for people to read
    """

    runner: ModelRunner
    scheduler: Scheduler
    tokenizer: Any
    config: EngineConfig
    max_model_len: int
    eos_ids: frozenset[int]
    default_params: SamplingParams
    summary: EngineSummary


def load(
    config: EngineConfig, ranks: Ranks, clock: PhaseClock, model: PreTrainedModel | None = None, tokenizer: Any = None
) -> Loaded:
    """Load the model, unless it is given, fuse its layers, allocate the KV cache and capture the first graph.

    clock: reports each phase. Raises what `Engine` raises
    """
    if model is None:
        config = settle_names(config, ranks)
        find_model(config.model_path())
        tokenizer = load_tokenizer(config)
        _require_length(config)
    given_generation_config = load_generation_config(config.generation_config)
    check_drafter(config, tokenizer)
    if model is None:
        with weights_counted(partial(clock.progress, "weights", unit="tensors")) if clock.shows_progress else nullcontext():
            model = load_model(config, ranks)
        commit = "" if config.revision is None else f" at {config.revision}"
        clock.end("weights", f"{config.model_name}{commit} on {model.device}")
    else:
        patch_parts(model)
    model = text_model(model)
    check_embeddings(model, ranks.size)
    generation_config = given_generation_config or model.generation_config
    draft = load_draft(config, model, clock, ranks.escalate)
    runner = ModelRunner(model, config, on_graph_error=ranks.escalate, draft=draft)
    if isinstance(runner.images, ImageEncoder):
        runner.images.join(ranks)
    check_attention_precision(runner.layers.values(), config.page_size, config.attention_precision)
    if runner.fuses:
        clock.end("fusion", f"{runner.fuse()} of {len(runner.layers)} layers are fused")
    if config.lora_budget:
        runner.adapters = AdapterStore.make(model, config, ranks)
        clock.end("adapters", str(runner.adapters))
    num_pages, max_model_len, num_states = sizes(config, runner, ranks)
    runner.allocate(num_pages, max_model_len, num_states or 0)
    states = f", {num_states} states of {runner.state_memory.bytes_per_state / 2**20:.4g} MiB" if num_states else ""
    clock.end("kv cache", f"{num_pages} pages of {config.page_size} tokens{states}, max_model_len {max_model_len}")
    captured = not runner.eager and runner.make_graphs()
    if not runner.eager:
        clock.end("graphs", "the largest decoding step is captured" if captured else "this model cannot be captured")
    resolved = replace(
        config,
        dtype=str(model.dtype)[6:],
        device=str(model.device),
        num_pages=num_pages,
        num_states=num_states,
        max_model_len=max_model_len,
    )
    ends = find_ends(generation_config, model.config, tokenizer, runner.vocab_size)
    defaults = Defaults() if config.generation_config == "none" else find_defaults(generation_config)
    if defaults.given:
        clock.end("sampling", f"{defaults} by default, from generation_config.json (--generation-config)")
    for warning in (ends.warning, *defaults.refused):
        if warning is not None and ranks.rank == 0:
            log.warning(warning)
    scheduler = make_scheduler(resolved, runner, ranks.broadcast("salt", new_salt))
    summary = summarise(runner, resolved, graphs=captured)
    return Loaded(runner, scheduler, tokenizer, resolved, max_model_len, ends.ids, defaults.params, summary)


def summarise(runner: ModelRunner, config: EngineConfig, *, graphs: bool) -> EngineSummary:
    """Decisions that the config does not hold. config: must have num_pages; graphs: whether steps replay CUDA graphs"""
    assert config.num_pages is not None
    states = 0 if config.num_states is None else config.num_states * runner.state_memory.bytes_per_state
    return EngineSummary(
        device_name(runner.device),
        attention_backends(runner.layers.values(), config.page_size, config.attention_precision),
        config.num_pages * runner.bytes_per_page + states,
        graphs,
        runner.fuses,
        runner.images if isinstance(runner.images, str) else None,
    )


def device_name(device: torch.device) -> str:
    """The driver's name of a GPU; for a CPU, how many threads compute."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} threads"


def check_drafter(config: EngineConfig, tokenizer: Any) -> None:
    """Raise ParameterError for a draft model or head that does not exist, and for a draft model with another vocabulary.

    tokenizer: the model's tokenizer, or None
    """
    name = config.draft_model or config.draft_head
    if name is None:
        return
    own = _config_of_draft(config, name)
    try:
        find_model(own.model_path())
    except (ParameterError, OSError) as error:
        what = "a draft model" if config.draft_model else f"an EAGLE-3 head of {config.model_name}"
        raise ParameterError("speculative", f"name {what}: {error}", config.speculative) from None
    if config.draft_model and tokenizer is not None and load_tokenizer(own).get_vocab() != tokenizer.get_vocab():
        rule = f"name a draft model with the same vocabulary: its tokenizer's differs from that of {config.model_name}"
        raise ParameterError("speculative", rule, config.speculative)


def _config_of_draft(config: EngineConfig, name: str) -> EngineConfig:
    return replace(config.for_drafts(name), quantization=None)


def load_draft(config: EngineConfig, model: PreTrainedModel, clock: PhaseClock, on_graph_error: OnError) -> ModelRunner | None:
    """The runner of the draft model or head that the settings name; None if they name none. on_graph_error: as in `ModelRunner`

    Raises ParameterError for a draft model with another number of logits, and what loading a model raises.
    """
    if config.draft_head is not None:
        head = load_head_runner(config, model, on_graph_error)
        clock.end("draft", f"{config.speculative} on {head.device}")
        return head
    if config.draft_model is None:
        return None
    own = _config_of_draft(config, config.draft_model)
    drafting = load_model(own)
    check_embeddings(drafting)
    draft = ModelRunner(drafting, own, drafting=True, on_graph_error=on_graph_error)
    num_tokens = vocab_size(model)
    if draft.vocab_size != num_tokens:
        sizes = f"it computes logits for {draft.vocab_size} tokens, but {config.model_name} for {num_tokens}"
        rule = f"name a draft model with the same vocabulary: {sizes}"
        raise ParameterError("speculative", rule, config.speculative)
    if draft.fuses:
        draft.fuse()
    clock.end("draft", f"{own.model_name} on {draft.device}")
    return draft


def check_embeddings(model: PreTrainedModel, num_ranks: int = 1) -> None:
    """Raise UnsupportedModelError for a model that could generate a token for which it has no input embedding.

    num_ranks: ranks that the vocabulary may be divided among; it is divided only if there are as many embeddings as logits
    """
    rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    logits = vocab_size(model)
    if rows is not None and rows < logits and rows * num_ranks != logits:
        raise UnsupportedModelError(
            f"{type(model).__name__} has {rows} input embeddings and {logits} logits, so it could generate tokens that it has "
            f"no embedding for: add embeddings, or remove the rows of its output head from {rows} on"
        )


def make_scheduler(config: EngineConfig, runner: ModelRunner, salt: bytes) -> Scheduler:
    """A scheduler for the pages and states of a runner.

    config: must have num_pages, and num_states for a model with states; salt: of the prefix cache, the same on all ranks
    """
    assert config.num_pages is not None
    drafter: Drafter = NgramDrafter()
    if runner.draft is not None:
        limit = None if config.draft_head is not None else position_limit(runner.draft.model)
        drafter = DraftModel(runner.draft, config.max_num_batched_tokens, limit)
    files = open_folder_files(config, runner)
    if files is not None:
        salt = files.secret
    pages = PageTable(config.num_pages, config.page_size, prefix_caching=config.prefix_caching, salt=salt)
    states = None if config.num_states is None else StateTable(config.num_states, pages)
    return Scheduler(
        pages,
        states,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        keys_per_tile=MAX_KEYS_PER_TILE,
        window=runner.window,
        speculation=Speculation(config.max_drafts, drafter),
        prompt_share=config.prompt_share(),
        seats=None if runner.adapters is None else AdapterSeats(runner.adapters.pool),
        tier=open_host_tier(config, runner, pages, states, files),
        towers=TowerQueue(None if isinstance(runner.images, str) else runner.images),
        groups=PrefixGroups(config.page_size, least_group_keys(runner.model, runner.layers.values(), wanted=runner.cascades)),
    )


def load_generation_config(setting: str | Path) -> GenerationConfig | None:
    """The generation_config.json in the folder that the setting names; None if it names none.

    setting: `EngineConfig.generation_config`. Raises ParameterError if the file does not exist or cannot be read.
    """
    if setting in ("auto", "none"):
        return None
    try:
        if not Path(setting).is_dir():
            raise FileNotFoundError("there is no such folder")
        return GenerationConfig.from_pretrained(str(setting))
    except (OSError, ValueError, TypeError) as error:
        rule = f"be auto, none, or a folder with a generation_config.json that can be read ({error})"
        raise ParameterError("generation_config", rule, str(setting)) from None


def _name_bad_generation_config(path: str, error: Exception) -> None:
    """Raise OSError for a generation_config.json with a value that transformers refuses: its error does not name the file."""
    folder = find_model_folder(path)
    if folder is None or not (folder / GENERATION_CONFIG).is_file():
        return
    try:
        GenerationConfig.from_pretrained(str(folder))
    except Exception as reason:  # whatever a value can cause
        message = f"the model's file {folder / GENERATION_CONFIG} has a value that transformers refuses: {reason}"
        raise OSError(message) from error


def _require_length(config: EngineConfig) -> None:
    """Raise ParameterError for a length that the model's config does not allow. Errors in the config are left to loading."""
    if config.max_model_len is None:
        return
    try:
        known = AutoConfig.from_pretrained(config.model_path(), trust_remote_code=config.trust_remote_code)
    except Exception:  # whatever a file of the model can cause
        return
    limit = getattr(known.get_text_config(), "max_position_embeddings", None)
    if isinstance(limit, int) and config.max_model_len > limit:
        raise _too_long(limit, config.max_model_len)


def _too_long(limit: int, length: int, why: str = "the model's max_position_embeddings") -> ParameterError:
    return ParameterError("max_model_len", f"be at most {limit}, {why}", length)


def load_tokenizer(config: EngineConfig) -> Any:
    """The model's tokenizer. Raises what transformers raises, or OSError that names a file that cannot be read."""
    path = config.model_path()
    subfolder = transformer_subfolder(path)
    try:
        return AutoTokenizer.from_pretrained(path, subfolder=subfolder, trust_remote_code=config.trust_remote_code)
    except Exception as error:
        name_bad_file(path, error, subfolder)
        require_any_file(str(Path(path, subfolder)), TOKENIZER_FILES, "a tokenizer", error)
        name_bad_folder(path, error)
        raise


def load_model(config: EngineConfig, ranks: Ranks | None = None) -> PreTrainedModel:
    """The model on its device, with fa_serve as its attention; with several ranks, this rank's part of the model.

    ranks: None for a model that is not divided

    Raises what transformers raises, ParameterError for a format of weights that fa_serve does not know or for a tensor that is
    missing or has a wrong shape, or OSError that names a file that cannot be read, because libraries that read weights do not
    name the file. Raises UnsupportedModelError for a model that cannot be divided.
    """
    path = config.model_path()
    ranks = ranks or Alone(torch.device(config.resolve_device()))
    device = _device_while_loading(config, ranks)
    with _reading_ahead(path, ranks):
        try:
            known = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
            require_tensors_for_layers(path, known)
            require_enough_experts(known)
            require_readable_config(path, GENERATION_CONFIG)
            auto = _auto_class_of(known)
            loaded: Any = make_served(
                with_quantized_linears(known, config.quantization),
                lambda own, parts: auto.from_pretrained(
                    path,
                    config=own,
                    dtype=config.dtype,
                    attn_implementation=parts,
                    use_kernels=False,  # transformers 5.25 would download kernels for norms, which fused layers replace
                    device_map=None if device is None else {"": device},
                    trust_remote_code=config.trust_remote_code,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # `check_report` refuses them with a clear message
                ),
            )
        except ParameterError:
            raise  # the files can be read but not used
        except Exception as error:
            name_bad_file(path, error)
            if isinstance(error, OSError):
                require_any_file(path, WEIGHT_FILES, "weights", error)
            _name_bad_generation_config(path, error)
            name_bad_adapter(path, error)
            name_bad_experts(path, error)
            name_bad_folder(path, error)
            raise
        model, report = loaded
        check_report(report)
        folder = find_model_folder(path)
        if folder is not None and not quantized_elsewhere(known):
            check_float_files(folder, model)
        if ranks.all_reduce is not None:
            divide_model(model, plan_division(model, ranks.size), ranks.rank, ranks.all_reduce, ranks.device)
        finish_weights(model.to(ranks.device))
    if passed_on := quantized_elsewhere(known):
        log.info("weights in the format %s are computed by transformers' own modules, in layers that are not fused", passed_on)
    return cast(PreTrainedModel, model)


def _auto_class_of(known: PreTrainedConfig) -> Any:
    """The class that loads a model with this config. A model unknown to transformers must bring its code, or is refused."""
    try:
        return auto_class(known)
    except UnsupportedModelError:
        if getattr(known, "auto_map", None):
            return AutoModelForCausalLM
        raise


def _device_while_loading(config: EngineConfig, ranks: Ranks) -> torch.device | None:
    """The device that weights are read to. None for the CPU, on which models are divided and floats are rounded to float8.

    Most checkpoints keep the matrices of experts separately, and loading stacks them on this device. On the CPU that writes to
    memory which is touched for the first time, and is several times slower than copying the weights to the GPU.
    """
    made_smaller = config.quantization is not None or ranks.all_reduce is not None
    return None if made_smaller or ranks.device.type == "cpu" else ranks.device


def _reading_ahead(path: str, ranks: Ranks) -> AbstractContextManager[None]:
    """Only the first rank of a machine reads ahead, for all ranks of the machine, and only files that have been downloaded."""
    folder = find_model_folder(path)
    return nullcontext() if folder is None or ranks.local_rank else reading_ahead(folder)


class Sizes(NamedTuple):
    """What the engine has room for. num_states: None for a model that keeps no states"""

    num_pages: int
    max_model_len: int
    num_states: int | None


def sizes(config: EngineConfig, runner: ModelRunner, ranks: Ranks) -> Sizes:
    """The sizes that the settings, the model and the memory allow. All ranks use the smallest values of any rank.

    Raises ParameterError if the settings ask for more than the model or the cache can hold.
    """
    model_limit = position_limit(runner.model)
    length = config.max_model_len or model_limit
    if length is None:
        rule = "be given, because the model's config has no max_position_embeddings"
        raise ParameterError("max_model_len", rule, config.max_model_len)
    if model_limit is not None and length > model_limit:
        if model_limit == length_limit(runner.model):
            why = "because in longer sequences its queries select keys in a way that the engine does not implement"
            raise _too_long(model_limit, length, why)
        raise _too_long(model_limit, length)
    if config.num_pages is not None:
        check_num_pages(config.num_pages, runner.bytes_per_page, config.page_size, len(runner.layers), runner.device)
    if config.num_states is not None:
        check_num_states(config.num_states, runner.state_memory, runner.device)
    fitting = (0, 0)
    if config.num_pages is None or (config.num_states is None and runner.state_memory):
        fitting = find_room(runner, config, length)
    num_pages = min(ranks.gather(config.num_pages or fitting[0]))
    num_states = config.num_states
    if num_states is None and runner.state_memory:
        # if only a few pages were asked for, the device has room for more states than these pages can use
        num_states = min(ranks.gather(min(fitting[1], runner.state_memory.enough_states(num_pages))))
    capacity = num_pages * config.page_size
    if config.max_model_len is not None and length > capacity:
        rule = f"be at most {capacity}, which is what {num_pages} pages of {config.page_size} tokens hold"
        raise ParameterError("max_model_len", rule, length)
    return Sizes(num_pages, min(length, capacity), num_states)


def position_limit(model: PreTrainedModel) -> int | None:
    """Up to how many positions the model was made for and is computed correctly; None if neither limit is known."""
    limits = (getattr(model.config.get_text_config(), "max_position_embeddings", None), length_limit(model))
    return min((limit for limit in limits if limit is not None), default=None)
