"""Every setting of the service, once: its name, type, default and meaning.

    settings = load(flags={"port": 9000}, file=Path("fa-serve.toml"))

This table gives the flags of `fa-serve serve`, the `FA_SERVE_*` environment variables, the keys of the TOML or YAML file and,
through tests/test_cli.py, the reference in docs/settings.md. A flag wins over the environment, the environment over the file,
and the file over the default.

Secrets are an exception: keys come from the environment or a file and never from a flag, because every user of the machine can
read flags.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ByteSize, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict, TomlConfigSettingsSource, YamlConfigSettingsSource

from fa_serve.environment import PREFIX, refuse_unknown
from fa_serve.nearest import nearest_name

from .images.addresses import is_host
from .rules import rule_of
from .setting_files import check_key, keys_in
from .sizes import Size, is_size, shown_size

if TYPE_CHECKING:
    from fa_serve.engine import EngineConfig

SECRETS = ("api_keys", "admin_key")
# The engine learns that a client has left only when it reads the abort, so its queue has room for more than the service admits.
EXTRA_WAITING = 1024
DEFAULT_LORA_BYTES = 1 << 30
Items = Annotated[list[str], NoDecode]  # a comma-separated list in the environment


def _option(default: Any, help: str, group: str, **rules: Any) -> Any:
    return Field(default, description=help, json_schema_extra={"group": group}, **rules)


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, frozen=True, extra="forbid", protected_namespaces=()
    )

    model: str | None = _option(None, "Hub name or local folder; without it, the embedded model.", "Model")
    revision: str | None = _option(
        None, "Commit, tag or branch of a model of the hub, used for all its files; by default its main branch.", "Model"
    )
    task: Literal["generate", "embed", "token_embed", "sparse", "score", "classify"] | None = _option(
        None,
        "What the model does: generate text, or as an encoder embed, token_embed, sparse, score or classify. By default its "
        "files decide. With embed and no model, all-MiniLM-L6-v2 is served, from the embeddings extra.",
        "Model",
    )
    served_model_name: str | None = _option(None, "Name that clients ask for; by default the model's name.", "Model")
    dtype: Literal["auto", "float16", "bfloat16", "float32"] = _option(
        "auto", "Data type of the weights and the KV cache; auto takes the checkpoint's.", "Model"
    )
    quantization: Literal["fp8"] | None = _option(
        None, "fp8 rounds the weights of an unquantised checkpoint to 8 bits during loading; this may change tokens.", "Model"
    )
    generation_config: str = _option(
        "auto",
        "Source of the sampling parameters that a request leaves out: auto (the model's generation_config.json), none (neutral "
        "values), or a folder with a generation_config.json.",
        "Model",
    )
    device: str = _option("auto", "auto, cpu, cuda, cuda:1, ...; auto takes a GPU if there is one.", "Model")
    tensor_parallel: int = _option(
        1, "Number of GPUs, or of processes on a CPU, that each layer is divided between.", "Model", ge=1
    )
    max_model_len: int | None = _option(
        None, "Maximum number of tokens of prompt and answer together; by default the model's limit.", "Model", ge=1
    )
    chat_template: Path | None = _option(None, "Jinja file that replaces the model's chat template.", "Model")
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral"] = _option(
        "auto", "Format in which the model writes tool calls; auto detects it from the chat template.", "Model"
    )
    reasoning_parser: Literal["auto", "none", "think"] = _option(
        "auto", "Whether <think> is separated from answers; auto does so if the chat template has it.", "Model"
    )
    lenient: bool = _option(False, "Ignore unknown fields inside messages instead of refusing them.", "Model")
    trust_remote_code: bool = _option(False, "Run code that comes with the model.", "Model")

    max_num_seqs: int = _option(256, "Maximum number of sequences that run at once.", "Engine", ge=1)
    # less than the engine's default, which is for offline use: with shorter steps, the first of several prompts that arrive
    # together is answered sooner, and a step full of prompts that have waited for long holds up decoding for less time
    max_num_batched_tokens: int = _option(5120, "Maximum number of tokens in one step.", "Engine", ge=1)
    target_itl: float | None = _option(
        None,
        "Longest time between tokens (ms) of running answers while prompts are processed: prompts are split to keep it. The "
        "default is 4 times the measured decoding step (5 times for a step that completes a prompt), and at least 20. 0 is no "
        "limit, and the default on a CPU.",
        "Engine",
        ge=0,
        allow_inf_nan=False,
    )
    target_ttft: float | None = _option(
        None,
        "Longest time to the first token (ms). A prompt that is expected to take longer may lengthen steps beyond "
        "--target-itl, in the same proportion. The default is 200. If only --target-itl is set, nothing may lengthen steps.",
        "Engine",
        gt=0,
        allow_inf_nan=False,
    )
    page_size: int = _option(16, "Tokens in a page of the KV cache.", "Engine", ge=1)
    num_pages: int | None = _option(None, "Pages of the KV cache; by default as many as fit into memory.", "Engine", ge=1)
    num_states: int | None = _option(
        None, "States of linear attention to keep; by default as many as fit into memory along with the pages.", "Engine", ge=3
    )
    kv_cache_dtype: Literal["auto", "fp8"] = _option(
        "auto", "fp8 halves the memory of the KV cache, and may change tokens.", "Engine"
    )
    attention_precision: Literal["bf16", "qk8", "fp8"] = _option(
        "bf16",
        "Precision of attention in prompts, on Ada, Hopper and Blackwell GPUs: qk8 rounds queries and keys to 8 bits, fp8 "
        "also probabilities and values. Both may change tokens; bf16 computes in the model's data type.",
        "Engine",
    )
    logprobs_mode: str = _option(
        "raw_logprobs",
        "Log-probabilities to report: raw_logprobs are of the model's own distribution, processed_logprobs of the distribution "
        "from which tokens are drawn, after penalties, temperature and filters.",
        "Engine",
    )
    gpu_memory_utilization: float = _option(0.9, "Fraction of the GPU's memory to use in all.", "Engine", gt=0, le=1)
    prefix_caching: bool = _option(
        True, "Keep the pages of finished requests for prompts that begin with the same tokens.", "Engine"
    )
    kv_host_memory: Size = _option(
        0,
        "Host memory that keeps pages evicted from the KV cache until a prompt needs them again. 0 keeps none.",
        "Engine",
        ge=0,
    )
    kv_host_folder: Path | None = _option(
        None,
        "Folder that extends --kv-host-memory with files of pages: a restarted server finds them, for the same API keys and "
        "salts. The files are as private as what clients have written. Not with --prefix-sharing none.",
        "Engine",
    )
    kv_host_folder_bytes: Size = _option(64 * 2**30, "Maximum total size of the files in --kv-host-folder.", "Engine", ge=1)
    cascade_attention: bool = _option(
        True,
        "Read pages that many decoding sequences share (a system prompt, or the prompt of n answers) once for all of them, "
        "where that is faster. Not with --speculative or --deterministic.",
        "Engine",
    )
    eager: bool = _option(False, "Turn off CUDA graphs and, unless --deterministic, fused layers.", "Engine")
    fusion: bool = _option(True, "Use fused kernels for the layers that have them.", "Engine")
    speculative: str | None = _option(
        None,
        "Guess tokens ahead and verify several in one step: ngram copies what followed the last tokens earlier in the prompt "
        "or the answer, draft=MODEL asks a small model with the same vocabulary, eagle3=HEAD an EAGLE-3 head of the model. "
        "Answers do not change; by default off.",
        "Engine",
    )
    num_speculative_tokens: int = _option(
        7, "Maximum number of tokens to guess for a sequence in one step.", "Engine", ge=1, le=15
    )
    deterministic: bool = _option(
        False, "Generate the same tokens in any batch. Costs up to 6% in prompts and up to 38% in decoding.", "Engine"
    )
    process: bool | None = _option(None, "Run the engine in a separate process; by default on a GPU only.", "Engine")
    max_restarts: int = _option(
        0, "How many times a dead engine is replaced by a new one; /ready is 503 until that is loaded.", "Engine", ge=0
    )
    seed: int | None = _option(None, "Seed for requests that have none; by default a random one.", "Engine")

    lora: Items = _option(
        [], "Adapters to serve, comma-separated: NAME=FOLDER. Clients ask for them by NAME in model.", "Adapters"
    )
    lora_folder: Path | None = _option(
        None,
        "Folder with a subfolder for each adapter, named after the adapter. An adapter is loaded when a client first asks for "
        "it, and reloaded when its files have changed.",
        "Adapters",
    )
    lora_bytes: Size | None = _option(
        None,
        "Memory on the device for adapters; by default 1 GiB if --lora or --lora-folder is given, else 0, which serves none.",
        "Adapters",
        ge=0,
    )
    max_lora_rank: int = _option(64, "Largest rank of an adapter.", "Adapters", ge=1, le=4096)
    lora_host_bytes: Size = _option(4 * 2**30, "Host memory for adapters that are not on the device.", "Adapters", ge=1)

    host: str = _option("127.0.0.1", "Address to listen on.", "Network")
    port: int = _option(8000, "Port to listen on; 0 takes a free one.", "Network", ge=0, le=65535)
    allowed_hosts: Items = _option(
        [],
        "Host names that clients may ask for, comma-separated; by default every name, or only localhost if the server "
        "listens on a loopback address without API keys. Numeric IP addresses are always allowed.",
        "Network",
    )
    cors_origins: Items = _option([], "Origins from which browsers may call, comma-separated; by default none.", "Network")

    api_keys: Annotated[list[SecretStr], NoDecode] = _option([], "API keys, comma-separated (environment or file).", "Access")
    admin_key: SecretStr | None = _option(
        None,
        "Key of the administrator, who may load adapters, change weights and pause (environment or file).",
        "Access",
    )
    api_key_file: Path | None = _option(
        None, "File with one API key in each line; a line that begins with # is a comment.", "Access"
    )
    allow_request_chat_template: bool = _option(False, "Allow requests to carry chat templates.", "Access")
    prefix_sharing: Literal["all", "key", "none"] = _option(
        "key",
        "Who shares cached prompts: all clients, the requests of one API key (key), or no two requests (none). Clients that "
        "share can see from cached_tokens and from response times which prompts were sent before.",
        "Access",
    )
    priority_scope: Literal["key", "global"] = _option(
        "key",
        "key: priorities order the requests of one API key, and keys take turns. global: priorities order all requests, so one "
        "key can delay another.",
        "Access",
    )
    special_tokens_in_content: bool = _option(
        False,
        "Treat names of special tokens, such as <|im_end|>, in the texts of a conversation as these tokens, which lets a text "
        "forge the turn of another role. By default they are plain text.",
        "Access",
    )
    tokenizer_info: bool = _option(False, "Serve the tokenizer's configuration at /tokenizer_info.", "Access")
    public_metrics: bool = _option(False, "Serve /metrics without an API key.", "Access")
    image_hosts: Items = _option(
        [],
        "Hosts from which images may be fetched over https, comma-separated; by default none, so that images must come as data "
        "URIs.",
        "Access",
    )

    log_level: Literal["debug", "info", "warning", "error"] = _option(
        "info", "Lowest level to log; info includes the access log.", "Logs"
    )
    log_format: Literal["plain", "json"] = _option("plain", "Format of the log.", "Logs")

    log_slow: float | None = _option(
        None,
        "Time (ms) after which a request counts as slow: a line in the log says where its time went. By default off.",
        "Logs",
        ge=0,
    )
    otlp_traces_endpoint: str | None = _option(
        None,
        "OTLP/HTTP address to send OpenTelemetry traces to; /v1/traces is added if it has no path. Needs the otel extra.",
        "Logs",
    )

    max_waiting: int = _option(
        1024, "Maximum number of sequences that wait beyond the running ones; more get a 429.", "Limits", ge=0
    )
    max_per_key: int | None = _option(
        None,
        "Maximum number of sequences in flight for one API key; without keys, for all clients together. By default no limit.",
        "Limits",
        ge=1,
    )
    max_key_share: float = _option(
        0.9,
        "Largest share of the queue that one of several API keys may hold. The share shrinks as the queue fills, so that a "
        "place is left for other keys. 1 turns this off.",
        "Limits",
        gt=0,
        le=1,
    )
    max_n: int = _option(128, "Maximum number of sequences in one request.", "Limits", ge=1)
    max_inputs: int = _option(2048, "Maximum number of inputs in a request to an encoder.", "Limits", ge=1)
    max_body_bytes: Size = _option(16 * 2**20, "Maximum size of a request's body.", "Limits", ge=1)
    max_json_values: int = _option(
        500_000, "Maximum number of values in a body: token ids, strings, objects and so on; more get a 413.", "Limits", ge=1
    )
    max_json_fields: int = _option(
        50_000,
        "Maximum number of objects, lists and strings in a body, including names of fields; more get a 413.",
        "Limits",
        ge=1,
    )
    max_messages: int = _option(5_000, "Maximum number of messages in a conversation.", "Limits", ge=1)
    max_answer_bytes: Size = _option(
        32 * 2**20,
        "Maximum estimated size of one answer, by its tokens, n and log-probabilities; more get a 400.",
        "Limits",
        ge=1,
    )
    max_answer_bytes_in_flight: Size = _option(
        512 * 2**20, "Maximum estimated size of all large answers in flight; more get a 429.", "Limits", ge=1
    )
    max_connections: int | None = _option(
        None, "Maximum number of connections; by default three quarters of the limit of open files.", "Limits", ge=1
    )
    max_url_bytes: Size = _option(8192, "Maximum size of a URL; more get a 414.", "Limits", ge=1)
    max_header_bytes: Size = _option(32768, "Maximum size of the headers of a request; more get a 431.", "Limits", ge=1)
    max_body_bytes_in_flight: Size = _option(
        256 * 2**20,
        "Maximum total size of the bodies that are not parsed yet, half of it for one API key or address; more get a 429.",
        "Limits",
        ge=1,
    )
    header_timeout: float = _option(10.0, "Seconds in which the headers of a request must arrive.", "Limits", gt=0)
    body_timeout: float = _option(30.0, "Seconds in which the body of a request must arrive.", "Limits", gt=0)
    keep_alive_timeout: float = _option(60.0, "Seconds after which a connection without a request is closed.", "Limits", gt=0)
    max_stop_chars: int = _option(4096, "Maximum total number of characters in the stop strings of a request.", "Limits", ge=0)
    grammar_cache_bytes: Size = _option(
        256 * 2**20, "Memory for compiled structured outputs that are kept for later requests.", "Limits", ge=0
    )
    grammar_timeout: float = _option(
        10.0, "Seconds for compiling a structured output; one that takes longer gets a 400.", "Limits", gt=0
    )
    grammar_memory: Size = _option(
        256 * 2**20, "Memory for compiling a structured output; one that takes more gets a 400.", "Limits", ge=2**20
    )
    template_timeout: float = _option(
        5.0, "Seconds for applying a chat template; a conversation that takes longer gets a 400.", "Limits", gt=0
    )
    template_memory: Size = _option(
        256 * 2**20, "Memory for applying a request's chat template; one that takes more gets a 400.", "Limits", ge=2**20
    )
    max_images: int = _option(16, "Maximum number of images of one request; 0 refuses images.", "Limits", ge=0)
    image_cache_bytes: Size = _option(
        256 * 2**20, "Device memory for embeddings of images that are kept for later requests.", "Limits", ge=0
    )
    max_image_bytes: Size = _option(10 * 2**20, "Maximum size of an image file.", "Limits", ge=1)
    max_image_pixels: int = _option(16 * 2**20, "Maximum number of pixels of an image.", "Limits", ge=1)
    kept_image_bytes: Size = _option(
        512 * 2**20,
        "Host memory for processed images that are kept for later requests with the same files.",
        "Limits",
        ge=0,
    )
    image_processes: int | None = _option(
        None,
        "Maximum number of images that are decoded at the same time, each in a separate process; by default a quarter of the "
        "processors, from 1 to 8.",
        "Limits",
        ge=1,
    )
    image_timeout: float = _option(30.0, "Seconds for fetching an image, and for decoding and processing it.", "Limits", gt=0)
    image_memory: Size = _option(
        1536 * 2**20,
        "Memory for decoding an image and processing it for the model. The shared memory for the result is extra: up to "
        "max(4 x --max-image-pixels, --image-memory) bytes.",
        "Limits",
        ge=2**20,
    )
    request_timeout: float | None = _option(
        None, "Maximum number of seconds for a request; by default no limit.", "Limits", gt=0
    )
    send_timeout: float = _option(
        30.0, "Seconds after which a client that does not read its stream is cut off.", "Limits", gt=0
    )
    step_timeout: float = _option(
        60.0,
        "Seconds that a step of the engine may take, kernels that it compiles included, before /health and /ready are 503.",
        "Limits",
        gt=0,
    )
    drain_timeout: float = _option(
        60.0, "Seconds that running requests have after SIGTERM; the process ends at most 5 s later.", "Limits", ge=0
    )

    @field_validator("allowed_hosts", "cors_origins", "api_keys", "lora", "image_hosts", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        items = [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value
        if value and not items:
            raise ValueError("must hold at least one item between its commas")
        return items

    @field_validator("image_hosts")
    @classmethod
    def _image_hosts(cls, hosts: list[str]) -> list[str]:
        for host in hosts:
            if not is_host(host.lower()):
                raise ValueError("must name hosts such as images.example.org, without scheme, port, path or '*'")
        return hosts

    @field_validator("api_keys")
    @classmethod
    def _keys(cls, keys: list[SecretStr]) -> list[SecretStr]:
        for number, key in enumerate(keys, start=1):
            check_key(key.get_secret_value(), f"key {number}")
        return keys

    @field_validator("admin_key")
    @classmethod
    def _admin_key(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None:
            check_key(key.get_secret_value(), "admin_key")
        return key

    @cached_property
    def all_keys(self) -> tuple[str, ...]:
        """The API keys from the environment and the file. Raises ValueError for a bad key, for a file that cannot be read or
        has no key, and if the administrator's key is one of the API keys."""
        keys = [key.get_secret_value() for key in self.api_keys]
        keys += [] if self.api_key_file is None else keys_in(self.api_key_file)
        if self.admin_key is not None and self.admin_key.get_secret_value() in keys:
            raise ValueError(
                "admin_key must not be one of the API keys: their holders could then load adapters and change weights"
            )
        return tuple(keys)

    def engine_config(self) -> EngineConfig:
        """The settings of the engine."""
        from dataclasses import fields

        from fa_serve.engine import EngineConfig
        from fa_serve.spec import ParameterError

        if self.kv_host_folder is not None and self.prefix_sharing == "none":
            rule = "be None with prefix_sharing none, because no request could reuse a page"
            raise ParameterError("kv_host_folder", rule, str(self.kv_host_folder))
        given = {field.name: getattr(self, field.name) for field in fields(EngineConfig)}
        given |= {name: int(value) for name, value in given.items() if isinstance(value, ByteSize)}  # no type of pydantic
        if self.lora_folder is not None and self.lora_bytes is None:
            given["lora_bytes"] = DEFAULT_LORA_BYTES
        config = EngineConfig(**given | {"max_waiting": self.max_waiting + EXTRA_WAITING})
        name = self.served_model_name or config.model_name
        if any(each.split("=", 1)[0] == name for each in config.lora):
            raise ParameterError("lora", f"give no adapter the name of the model, {name!r}", config.lora)
        return config


def shown_default(name: str) -> str:
    """The default of a setting as a settings file writes it, with a unit for a size. Empty for None and for an empty list,
    because the description says what they mean."""
    field = Settings.model_fields[name]
    if field.default in (None, []):
        return ""
    if counts_bytes(name) and field.default:
        return shown_size(field.default)
    return str(field.default).lower()


def counts_bytes(name: str) -> bool:
    """Whether a setting is a number of bytes, which may have a unit."""
    return is_size(Settings.model_fields[name].annotation)


SETTING_VARIABLES = tuple(PREFIX + name.upper() for name in Settings.model_fields)


def load(flags: Mapping[str, Any], file: Path | None = None) -> Settings:
    """The settings from flags, environment and file. Raises ValueError, which names every bad setting, or FileNotFoundError."""
    refuse_unknown(os.environ, SETTING_VARIABLES, serves=True)
    _refuse_empty_keys(os.environ)
    if file is not None and not file.is_file():
        raise FileNotFoundError(f"config must be an existing TOML or YAML file, got {file}")
    kind = YamlConfigSettingsSource if file is not None and file.suffix in (".yaml", ".yml") else TomlConfigSettingsSource

    class Sourced(Settings):
        @classmethod
        def settings_customise_sources(cls, settings_cls: type[BaseSettings], **sources: Any) -> tuple[Any, ...]:  # type: ignore[override]
            return sources["init_settings"], sources["env_settings"], kind(settings_cls, file)

    try:
        settings = Sourced(**flags)
    except ValidationError as error:
        raise ValueError("; ".join(_described(each) for each in error.errors())) from None
    except Exception as error:  # the readers of TOML and YAML have many kinds of errors
        raise ValueError(f"{file} must be a table of settings: {error}") from None
    if "api_keys" in settings.model_fields_set and not settings.api_keys:
        raise ValueError("api_keys must hold at least one key, got none; leave the setting out to run without keys")
    return settings


def _refuse_empty_keys(environment: Mapping[str, str]) -> None:
    """Raise ValueError for an empty variable for keys: it would count as not set, and the keys would be missing silently."""
    for name, value in environment.items():
        if name.upper() in (f"{PREFIX}API_KEYS", f"{PREFIX}API_KEY_FILE", f"{PREFIX}ADMIN_KEY") and not value.strip():
            raise ValueError(f"{name} must not be empty; unset the variable to run without it")


def _described(error: Any) -> str:
    """One of pydantic's errors as a text such as "port must be ..., got 99999". The value of a secret is left out."""
    name = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        nearest = nearest_name(name, Settings.model_fields)
        return f"{name} is not a setting: " + (f"did you mean {nearest}?" if nearest else "fa-serve serve --help lists them")
    given = "" if error["loc"][0] in SECRETS else f", got {error['input']!r}"
    if name == "port" and "://" in given:
        given += ", as Kubernetes sets it for a service named fa-serve: set enableServiceLinks: false, or give --port"
    unit = " of seconds" if error["type"] == "float_parsing" and _counts_seconds(name) else ""
    return f"{name} {rule_of(error)}{unit}{given}"


def _counts_seconds(name: str) -> bool:
    field = Settings.model_fields.get(name)
    return field is not None and "seconds" in str(field.description).lower()
