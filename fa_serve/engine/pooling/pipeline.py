"""Computes the results of a batch of inputs: the transformer, the modules after it, and what a request asks for.

    pipeline = Pipeline.load(config, clock)
    results = pipeline.compute(inputs, params)           # on the device
    rows = pipeline.rows(results.cpu(), inputs, params)
    answers, finite = pipeline.finish(rows, params)

Left out: queues and steps (encoder.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from fa_serve.engine.config import EngineConfig
from fa_serve.engine.events import PhaseClock
from fa_serve.engine.pooling.graphs import EncoderGraphs
from fa_serve.engine.pooling.inputs import EncoderInputs
from fa_serve.engine.pooling.params import EncoderCard, PooledRows, PoolingParams
from fa_serve.engine.start.bad_files import name_bad_file, name_bad_folder, require_any_file
from fa_serve.engine.start.loading import load_tokenizer
from fa_serve.hf.encoders.folder import EncoderFolder, EncoderTask, read_folder
from fa_serve.hf.encoders.load import LoadedEncoder, load_encoder
from fa_serve.hf.encoders.modules import TokenPooling, is_unit_length, output_size, pool, splade_weights
from fa_serve.hf.encoders.packed import Batches, PackedInputs, PackedModel
from fa_serve.hf.model_location import WEIGHT_FILES, find_model
from fa_serve.spec import ParameterError

Rows = np.ndarray[Any, np.dtype[np.float32]]
Finite = np.ndarray[Any, np.dtype[np.bool_]]
MIN_LENGTH = 1e-12
"""Least length that a vector is divided by, as in PyTorch's `normalize`."""
FUSES_ON_GPU = True
"""The switch: whether layers are fused on a GPU as well. tests/gpu/test_encoders_gpu.py has compared them on an H200."""
MAX_TOKENS = 1 << 17
"""The most tokens of an input, even if the model names a higher limit or none; `max_model_len` overrides it."""
_BATCHES: dict[Batches, str] = {"packed": "packed batches", "padded": "padded batches", "single": "inputs one by one"}


@dataclass(frozen=True, slots=True)
class Pipeline:
    """modules: the modules after the transformer. A final normalisation is left out: `finish` does it if a request wants it"""

    model: PackedModel
    modules: list[nn.Module]
    tokenizer: Any
    vocab_size: int
    card: EncoderCard
    splade: dict[str, Any] = field(default_factory=dict)
    activation: str = "identity"
    graphs: EncoderGraphs | None = None

    @property
    def reads_hidden(self) -> bool:
        """Whether results are computed from hidden states, and not by the whole model."""
        return self.model.reads_rows or self.card.task not in ("score", "classify")

    @classmethod
    def load(cls, config: EngineConfig, clock: PhaseClock) -> Pipeline:
        """Load the model that the config names. Raises ParameterError, what transformers raises, and OSError that names a file
        that cannot be read."""
        path = config.model_path()
        find_model(path)
        task = config.resolve_task()
        if task == "generate":
            rule = "be an encoder task (embed, token_embed, sparse, score or classify)"
            raise ParameterError("task", f"{rule}: {path} is used as a generative model", task)
        folder = read_folder(path, cast(EncoderTask, task))
        tokenizer = load_tokenizer(config)
        device = torch.device(config.resolve_device())
        loaded = _load_encoder(folder, config, device)
        fuses = config.fuses and (device.type == "cpu" or FUSES_ON_GPU)
        fused = loaded.model.fuse() if fuses else 0
        facts = f"task {task}, {_BATCHES[loaded.model.batches]}, {fused} fused layers"
        clock.end("weights", f"{config.model_name} on {loaded.model.device}, {facts}")
        limit = _max_tokens(config, folder.max_tokens, tokenizer, loaded.max_positions)
        splade = next((each.config for each in folder.modules if each.kind == "SpladePooling"), {})
        poolings = [each for each in loaded.modules if isinstance(each, TokenPooling)]
        normalizes = is_unit_length(loaded.modules)
        modules = loaded.modules[:-1] if normalizes else loaded.modules
        card = EncoderCard(
            task=task,
            size=_size(task, loaded, modules),
            max_tokens=limit,
            labels=loaded.labels,
            prompts=folder.prompts,
            default_prompt=folder.default_prompt,
            skips_prompt=any(not each.include_prompt for each in poolings),
            takes_types="token_type_ids" in tokenizer.model_input_names,
            lower_case=folder.lower_case,
            normalizes=normalizes,
            pooling=", ".join(mode for each in poolings for mode in each.modes) or task,
        )
        activation = _activation(folder.activation, loaded)
        found = cls(loaded.model, modules, tokenizer, loaded.model.num_ids, card, splade, activation)
        if device.type == "cuda" and not config.eager and loaded.model.packs and found.reads_hidden:
            return replace(found, graphs=EncoderGraphs(loaded.model, limit, max(config.max_num_batched_tokens, limit)))
        return found

    def compute(self, inputs: EncoderInputs, params: PoolingParams) -> Tensor:
        """The results of a batch, on the device: (inputs, size) float32; (total, size) for vectors of tokens.

        params: of any request of the batch, because either all of them ask for vectors of tokens, or none does
        """
        captured = self.graphs.run(inputs) if self.graphs is not None else None
        if captured is not None:
            packed, hidden = captured
        else:
            packed = PackedInputs.of(inputs.ids, inputs.types, inputs.ends, self.model.device)
            hidden = self.model.hidden(packed) if self.reads_hidden else torch.empty(0)
        if self.card.task in ("score", "classify"):
            return self.model.label_logits(hidden, packed).float()
        if self.card.task == "sparse":
            return splade_weights(self.model, hidden, packed, self.splade)
        if params.tokens:
            return pool(list(takewhile(lambda each: not isinstance(each, TokenPooling), self.modules)), hidden, packed).float()
        return pool(self.modules, hidden, packed, inputs.skipped).float()

    def rows(self, results: Tensor, inputs: EncoderInputs, params: PoolingParams) -> PooledRows:
        """The results on the host, with the borders between the rows of inputs."""
        of_tokens = params.tokens or self.card.task == "token_embed"
        return PooledRows(results.numpy(), inputs.ends if of_tokens else None)

    def finish(self, rows: PooledRows, params: PoolingParams) -> tuple[PooledRows, Finite]:
        """The answer to a request from its rows, in separate memory, and (inputs,) bool: whether all numbers are finite."""
        values = rows.values
        finite = np.isfinite(values).all(axis=1)
        if rows.ends is not None:
            finite = np.logical_and.reduceat(finite, rows.ends[:-1])
        match self.card.task:
            case "sparse":
                where, indices = np.nonzero(values)
                ends = np.searchsorted(where, np.arange(len(values) + 1))
                return PooledRows(values[where, indices], ends, indices.astype(np.int32)), finite
            case "score" | "classify":
                name = self.activation if params.activation == "default" else params.activation
                return PooledRows(_activate(values, name)), finite
        kept = values if params.dimensions is None else values[:, : params.dimensions]
        normalize = self.card.normalizes if params.normalize is None else params.normalize
        if normalize:
            # not `norm`, which copies the numbers to take their absolute values
            lengths = np.sqrt(np.einsum("ij,ij->i", kept, kept))[:, None]
            kept = kept / np.maximum(lengths, MIN_LENGTH)
        else:
            kept = kept.copy()
        return PooledRows(kept, rows.ends), finite


def _load_encoder(folder: EncoderFolder, config: EngineConfig, device: torch.device) -> LoadedEncoder:
    """Raises as `load_encoder`, and OSError that names a file that cannot be read, because libraries do not name it."""
    try:
        return load_encoder(folder, dtype=config.dtype, device=device, trust_remote_code=config.trust_remote_code)
    except ParameterError:
        raise  # the files can be read but not used
    except Exception as error:
        name_bad_file(folder.path, error, folder.subfolder)
        if isinstance(error, OSError):
            require_any_file(str(Path(folder.path, folder.subfolder)), WEIGHT_FILES, "weights", error)
        name_bad_folder(folder.path, error)
        raise


def _size(task: str, loaded: LoadedEncoder, modules: Sequence[nn.Module]) -> int:
    config = loaded.model.base.config
    if task == "sparse":
        return int(config.vocab_size)
    return len(loaded.labels) or output_size(modules, config.hidden_size)


def _max_tokens(config: EngineConfig, told: int | None, tokenizer: Any, positions: int | None) -> int:
    """The most tokens of an input. Raises ParameterError for a `max_model_len` above what the model was made for."""
    limits = [limit for limit in (positions, told or tokenizer.model_max_length) if limit is not None]
    limit = int(min(*limits, MAX_TOKENS))
    wanted = config.max_model_len
    if wanted is not None and positions is not None and wanted > positions:
        raise ParameterError("max_model_len", f"be at most {positions}, the model's max_position_embeddings", wanted)
    return limit if wanted is None else wanted


def _activation(told: str | None, loaded: LoadedEncoder) -> str:
    """The default activation of logits: the one that the folder names; else the sigmoid for one label or for independent
    labels (multi_label_classification); else the softmax.

    An identity that the folder names is kept, also for several labels, as in `CrossEncoder` of sentence-transformers.
    """
    names = {"Sigmoid": "sigmoid", "Identity": "none", "Softmax": "softmax"}
    last = None if told is None else told.rpartition(".")[2]
    if last is not None and last not in names:
        raise ParameterError("model", f"have one of these activations for its logits: {', '.join(names)}", told)
    if last is not None:
        return names[last]
    if len(loaded.labels) == 1 or loaded.model.model.config.problem_type == "multi_label_classification":
        return "sigmoid"
    return "softmax"


def _activate(rows: Rows, name: str) -> Rows:
    if name == "sigmoid":
        return cast(Rows, (1 / (1 + np.exp(-rows.astype(np.float64)))).astype(np.float32))
    if name == "softmax":
        powers = np.exp((rows - rows.max(axis=1, keepdims=True)).astype(np.float64))
        return cast(Rows, (powers / powers.sum(axis=1, keepdims=True)).astype(np.float32))
    return rows.copy()
