"""Every setting of the service, once: its name, type, default and meaning.

From this table come the flags of `fa-serve serve`, the `FA_SERVE_*` environment variables, the keys of the TOML or YAML file
and, by tests/test_cli.py, the reference in docs/serving.md. A flag wins over the environment, the environment over the file,
the file over all else.

    settings = load(flags={"port": 9000}, file=Path("fa-serve.toml"))

Secrets are the exception: API keys come from the environment or a file and never from a flag, which every user of the
machine could read. Left out: what the settings do.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict, TomlConfigSettingsSource, YamlConfigSettingsSource

if TYPE_CHECKING:
    from fa_serve.engine import EngineConfig

PREFIX = "FA_SERVE_"
SECRETS = ("api_keys",)
Items = Annotated[list[str], NoDecode]  # a comma-separated list in the environment


def _option(default: Any, help: str, group: str, **rules: Any) -> Any:
    return Field(default, description=help, json_schema_extra={"group": group}, **rules)


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, frozen=True, extra="forbid", protected_namespaces=()
    )

    model: str | None = _option(None, "Hub name or local folder; none means the embedded model.", "Model")
    served_model_name: str | None = _option(None, "Name that clients ask for; none means the model's own.", "Model")
    dtype: Literal["auto", "float16", "bfloat16", "float32"] = _option("auto", "Data type of weights and cache.", "Model")
    device: str = _option("auto", "auto, cpu, cuda, cuda:1, ...", "Model")
    max_model_len: int | None = _option(None, "Tokens of prompt and answer together.", "Model", ge=1)
    chat_template: Path | None = _option(None, "Jinja file to use instead of the model's chat template.", "Model")
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral"] = _option(
        "auto", "How the model writes tool calls; auto tells it from the chat template.", "Model"
    )
    reasoning_parser: Literal["auto", "none", "think"] = _option(
        "auto", "Whether <think> is split from answers; auto: if the chat template has it.", "Model"
    )
    trust_remote_code: bool = _option(False, "Run code that comes with a model.", "Model")

    max_num_seqs: int = _option(256, "Sequences that run at once.", "Engine", ge=1)
    # half of what the engine has offline: of prompts that come together, the first are answered after half a step
    max_num_batched_tokens: int = _option(4096, "Tokens in one step.", "Engine", ge=1)
    page_size: int = _option(16, "Tokens in a page of the KV cache.", "Engine", ge=1)
    num_pages: int | None = _option(None, "Pages of the KV cache; none sizes it by memory.", "Engine", ge=1)
    kv_cache_dtype: Literal["auto", "fp8"] = _option("auto", "fp8 halves the KV cache's memory; tokens may differ.", "Engine")
    gpu_memory_utilization: float = _option(0.9, "Share of the GPU's memory to use in all.", "Engine", gt=0, le=1)
    prefix_caching: bool = _option(True, "Keep finished prompts' pages for prompts that begin alike.", "Engine")
    eager: bool = _option(False, "No CUDA graphs and no fusion: every step launches the model's own kernels.", "Engine")
    fusion: bool = _option(True, "Fused kernels for layers of the Llama kind.", "Engine")
    deterministic: bool = _option(False, "The same tokens whatever else is in the batch; slower.", "Engine")
    process: bool | None = _option(None, "Run the engine in a process of its own; none means if it is on a GPU.", "Engine")
    max_restarts: int = _option(0, "New engines after one that has died; until one is loaded /ready is 503.", "Engine", ge=0)
    seed: int | None = _option(None, "Seed for requests that bring none; none draws one at start.", "Engine")

    host: str = _option("127.0.0.1", "Address to listen on.", "Network")
    port: int = _option(8000, "Port to listen on; 0 takes a free one.", "Network", ge=0, le=65535)
    cors_origins: Items = _option([], "Origins that browsers may call from, comma-separated; none by default.", "Network")

    api_keys: Annotated[list[SecretStr], NoDecode] = _option([], "API keys, comma-separated (environment only).", "Access")
    api_key_file: Path | None = _option(None, "File with one API key per line; # starts a comment.", "Access")
    allow_request_chat_template: bool = _option(False, "Let requests bring chat templates of their own.", "Access")
    public_metrics: bool = _option(False, "Serve /metrics without an API key.", "Access")

    log_level: Literal["debug", "info", "warning", "error"] = _option("info", "What to log; info has the access log.", "Logs")
    log_format: Literal["plain", "json"] = _option("plain", "How to log.", "Logs")

    otlp_traces_endpoint: str | None = _option(
        None, "OTLP/HTTP address for OpenTelemetry traces, which need the otel extra; none sends no traces.", "Logs"
    )

    max_waiting: int = _option(1024, "Sequences that may wait beyond the running ones; more get 429.", "Limits", ge=0)
    max_per_key: int | None = _option(None, "Sequences that one API key may have in flight.", "Limits", ge=1)
    max_n: int = _option(128, "Sequences that one request may ask for.", "Limits", ge=1)
    max_body_bytes: int = _option(16 * 2**20, "Size of a request body.", "Limits", ge=1)
    request_timeout: float | None = _option(None, "Seconds that a request may take in all.", "Limits", gt=0)
    send_timeout: float = _option(30.0, "Seconds that a client may leave what it is sent unread.", "Limits", gt=0)
    drain_timeout: float = _option(60.0, "Seconds that running requests have after SIGTERM.", "Limits", ge=0)

    @field_validator("cors_origins", "api_keys", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        items = [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value
        if value and not items:
            raise ValueError("must hold at least one item between its commas")
        return items

    @cached_property
    def all_keys(self) -> tuple[str, ...]:
        """The keys of the environment and of the file together."""
        keys = [key.get_secret_value() for key in self.api_keys]
        if self.api_key_file is not None:
            lines = (line.partition("#")[0].strip() for line in self.api_key_file.read_text().splitlines())
            keys += [line for line in lines if line]
            if not keys:
                raise ValueError(f"api_key_file must hold at least one key, got none in {self.api_key_file}")
        return tuple(keys)

    def engine_config(self) -> EngineConfig:
        """The part that is the engine's. The queue is bounded before the engine, where keys are known, so the engine's bound
        is wider: it learns of clients that have left only when it takes in their aborts."""
        from dataclasses import fields

        from fa_serve.engine import EngineConfig

        given = {field.name: getattr(self, field.name) for field in fields(EngineConfig)}
        return EngineConfig(**given | {"max_waiting": self.max_waiting + 1024})


def load(flags: Mapping[str, Any], file: Path | None = None) -> Settings:
    """Flags that were given, then the environment, then the file. Raises ValueError with one line for each bad setting."""
    if file is not None and not file.is_file():
        raise FileNotFoundError(f"config must be an existing TOML or YAML file, got {file}")
    kind = YamlConfigSettingsSource if file is not None and file.suffix in (".yaml", ".yml") else TomlConfigSettingsSource

    class Sourced(Settings):
        @classmethod
        def settings_customise_sources(cls, settings_cls: type[BaseSettings], **sources: Any) -> tuple[Any, ...]:  # type: ignore[override]
            return sources["init_settings"], sources["env_settings"], kind(settings_cls, file)

    try:
        return Sourced(**flags)
    except ValidationError as error:
        bad = [
            f"{'.'.join(map(str, e['loc']))}: {e['msg']}" + ("" if e["loc"][0] in SECRETS else f", got {e['input']!r}")
            for e in error.errors()
        ]
        raise ValueError("; ".join(bad)) from None
    except Exception as error:  # whatever the readers of TOML and YAML raise
        raise ValueError(f"{file} must be a table of settings: {error}") from None
