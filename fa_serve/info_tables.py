"""The output of `fa-serve info`: which attention backend serves each kind of call, and why the other backends do not.

    show_machine(device, name, console)
    show_cases(device, arch, console)          # common kinds of calls
    show_model(described, console)             # the layers of one model

A reason that holds for every call is printed once, above the calls. The output fits `WIDTH` columns.
"""

from __future__ import annotations

import platform
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from fa_serve.hf.encoders.facts import EncoderFacts
    from fa_serve.hf.info import Description, RankShare
    from fa_serve.ops import StateSpec
    from fa_serve.spec import AttentionSpec

WIDTH = 100
Reasons = Mapping[str, str | None]  # for each backend, fastest first: why it is refused, or None


def make_console() -> Console:
    """Writes to stdout, in lines of at most WIDTH columns."""
    terminal = Console()
    return Console(width=min(terminal.width, WIDTH) if sys.stdout.isatty() else WIDTH, highlight=False, markup=False)


def show_machine(device: str, name: str, arch: int, console: Console) -> None:
    import torch

    import fa_serve

    console.print(
        f"fa_serve {fa_serve.__version__}, python {platform.python_version()}, torch {torch.__version__}, "
        f"{f'triton {release}, ' if (release := _triton_release()) else ''}transformers {version('transformers')}"
    )
    console.print(f"{device}: {name}")
    if device == "cuda" and arch == 90 and release.startswith("3.8."):
        console.print(SLOWER_WITH_TRITON_3_8)
    console.print()


SLOWER_WITH_TRITON_3_8 = (
    "Triton 3.8 makes calls at head_dim 64 slower on this GPU than 3.6 does: prompts by up to 7%, and decoding over a float8 "
    "cache by up to 10%. torch 2.11 has Triton 3.6, torch 2.12 has 3.7."
)


ENCODER_ROUTES = {
    "embed": "/v1/embeddings, /embed, /embed_all; by cosine similarity /v1/rerank, /v2/rerank, /rerank, /score, /v1/score",
    "token_embed": "/embed_all",
    "sparse": "/embed_sparse",
    "score": "/v1/rerank, /v2/rerank, /rerank, /score, /v1/score, /classify, /predict",
    "classify": "/classify, /predict",
}
"""The routes that a server has for each task of an encoder."""
COMPUTED_BY = "computed by"
KERNEL_NAMES = (
    "  Kernels are rows of the table in docs/kernels/products.md, chosen for each layer by itself. The engine merges "
    "layers with the same input into one product, which has the rows of all of them."
)


def _triton_release() -> str:
    """The release of Triton, which decides whether the Hopper kernel runs; empty if Triton is not installed."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def show_cases(device: str, arch: int, console: Console) -> None:
    """One row for each kind of call that people run."""
    from fa_serve.backends import explain

    cases = [(title, spec, explain(spec)) for title, spec in common_cases(device, arch)]
    shared = shared_reasons([reasons for _, _, reasons in cases])
    _show_shared(shared, console)
    own = [_own_reasons(reasons, shared) for _, _, reasons in cases]
    with_reasons = any(own)
    table = Table("call", "spec", "backend", *(["refused"] if with_reasons else []), show_lines=with_reasons)
    for (title, spec, reasons), text in zip(cases, own, strict=True):
        table.add_row(title, str(spec), chosen(reasons), *([text] if with_reasons else []))
    console.print(table)


def _show_states(states: Sequence[StateSpec], console: Console) -> None:
    """What a model keeps of a sequence in addition to its keys and values."""
    total = sum(spec.bytes_per_state for spec in states)
    console.print(f"states: {total / 2**20:.4g} MiB per sequence; prompts with a cached prefix start from them")
    for (kind, page, dtype), count in Counter((spec.kind, spec.page, spec.page_dtype) for spec in states).items():
        console.print(f"  {count} x {kind} {page} {str(dtype).removeprefix('torch.')}")


def show_model(described: Description, console: Console) -> None:
    """Each kind of layer that a model has, with its backends in a prefill and in the engine's decoding."""
    from fa_serve.backends import explain
    from fa_serve.hf.info import decoding

    prefills = {layer.spec: explain(layer.spec) for part in described.parts for layer, _ in part.kinds()}
    shared = shared_reasons(list(prefills.values()))
    _show_shared(shared, console)
    for part in described.parts:
        console.print(f"{part.name}: {part.model}")
        for layer, where in part.kinds():
            reasons = prefills[layer.spec]
            decodes = layer.spec.window_size[1] == 0 and layer.spec.mask is None and described.encoder is None
            decode = f", decoding: {chosen(explain(decoding(layer)))}" if decodes else ""
            console.print(f"  layers {where}: {layer.module}")
            console.print(f"    {layer.spec}")
            console.print(f"    prefill: {chosen(reasons)}{decode}")
            if layer.latent is not None:
                rank, rope, _, _ = layer.latent
                heads = layer.spec.num_kv_heads * (layer.spec.head_dim + layer.spec.head_dim_v)
                console.print(
                    f"    latent: the engine caches {rank} + {rope} numbers per token, or {heads} if it cannot prove the layer"
                )
            for line in _own_reasons(reasons, shared).splitlines():
                console.print(f"    refused: {line}")
        for name, who in part.experts.items():
            console.print(f"  experts: {name}\n    {who}")
        if part.refused:
            console.print(f"  refused: {part.refused}")
        elif part.untried:
            console.print(f"  not tried: {part.untried}")
    console.print()
    if described.encoder is not None:
        _show_encoder(described.encoder, console)
        if described.share is not None:
            console.print(f"tensor parallel: {described.share}")
        return
    if isinstance(described.weights, str):
        console.print(f"weights: refused: {described.weights}")
    else:
        for kept, layers in described.weights.items():
            console.print(f"weights: {kept}")
            console.print(f"  {layers}")
        if any(COMPUTED_BY in kept for kept in described.weights):
            console.print(KERNEL_NAMES)
    limit = described.limit
    within = "" if limit is None else f" for sequences of up to {limit:,} tokens, where its sparse attention selects all keys"
    console.print(f"engine: {described.engine or f'runs it{within}'}")
    if described.states:
        _show_states(described.states, console)
    if described.engine is None:
        console.print(f"images: {'accepted' if described.images is None else f'not accepted, because {described.images}'}")
    if isinstance(described.share, str):
        console.print(f"tensor parallel: {described.share}")
    elif described.share is not None:
        _show_share(described.share, console)


def _show_encoder(facts: EncoderFacts | str, console: Console) -> None:
    """What an encoder computes, and which routes serve it."""
    if isinstance(facts, str):
        console.print(f"encoder: refused: {facts}")
        return
    sizes = {"sparse": "weights of words", "score": "label", "classify": "labels"}
    made = f"{facts.size} {sizes.get(facts.task, 'numbers in a vector')}"
    names = f": {', '.join(facts.labels)}" if facts.task == "classify" else ""
    length = ", of length 1" if facts.normalizes else ""
    console.print(f"encoder: runs it (fa-serve serve, Encoder), for the task {facts.task}")
    console.print(f"  gives: {made}{length}{names}")
    if facts.pooling:
        console.print(f"  pooling: {', '.join(facts.pooling)}")
    if facts.activation is not None:
        console.print(f"  activation: {facts.activation}")
    batches = {
        True: "packed (tested on a layer with random weights)",
        False: "padded or one by one, because its code does not support packed sequences",
        None: "packed if its code supports packed sequences, which is tested at the start",
    }
    console.print(f"  batches: {batches[facts.packs]}")
    if facts.max_tokens is not None:
        console.print(f"  tokens per input: at most {facts.max_tokens} (from the model's folder)")
    if facts.prompts:
        console.print(f"  prompts: {', '.join(facts.prompts)}")
    console.print(f"  routes: {ENCODER_ROUTES[facts.task]}")


def _show_share(share: RankShare, console: Console) -> None:
    """What each rank of tensor parallelism holds."""
    held = share.divided + share.whole
    first = share.layers[0]
    console.print(f"tensor parallel: each of {share.size} ranks holds {_gib(held)} of the {_gib(share.total)} of weights")
    console.print(f"  divided: {_gib(share.divided)}, parts of projections, experts and vocabulary")
    console.print(f"  whole:   {_gib(share.whole)}, the same on every rank: norms, routers and what cannot be divided")
    console.print(
        f"  heads in layer 0: {first.num_heads} for queries, {first.num_kv_heads} for keys and values; "
        f"{share.cache_bytes / 2**10:.4g} KiB of KV cache per token"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"


def chosen(reasons: Reasons) -> str:
    """The first backend that is not refused."""
    return next((name for name, reason in reasons.items() if reason is None), "none")


def shared_reasons(calls: Sequence[Reasons]) -> dict[str, str]:
    """The reasons that hold for every call, by backend."""
    if not calls:
        return {}
    shared = {}
    for name, reason in calls[0].items():
        if reason is not None and all(call[name] == reason for call in calls):
            shared[name] = reason
    return shared


def _show_shared(shared: Mapping[str, str], console: Console) -> None:
    if not shared:
        return
    console.print("Refused for every call below:")
    for name, reason in shared.items():
        console.print(f"  {name}: {reason}")
    console.print()


def _own_reasons(reasons: Reasons, shared: Mapping[str, str]) -> str:
    """The reasons of the backends before the chosen one, one in each line, without those that hold for every call."""
    refused: Iterable[tuple[str, str | None]] = takewhile(lambda item: item[1] is not None, reasons.items())
    return "\n".join(f"{name}: {reason}" for name, reason in refused if name not in shared)


def common_cases(device: str, arch: int) -> list[tuple[str, AttentionSpec]]:
    """Kinds of calls that people run, with the names of models that make them."""
    import torch

    from fa_serve.spec import AttentionSpec

    def spec(**changes: Any) -> AttentionSpec:
        dtype = changes.pop("dtype", torch.bfloat16)
        llama = {
            "layout": "varlen",
            "device": device,
            "arch": arch,
            "dtype": dtype,
            "kv_dtype": dtype,
            "head_dim": 128,
            "head_dim_v": 128,
            "num_heads": 32,
            "num_kv_heads": 8,
            "window_size": (-1, 0),
        }
        return AttentionSpec(**{**llama, **changes})

    dense = {"layout": "dense"}
    paged = {"layout": "paged", "page_size": 16}
    bert = {**dense, "head_dim": 64, "head_dim_v": 64, "num_heads": 12, "num_kv_heads": 12, "window_size": (-1, -1)}
    gemma = {**paged, "head_dim": 256, "head_dim_v": 256, "num_heads": 16, "softcap": True}
    gpt_oss = {**paged, "head_dim": 64, "head_dim_v": 64, "num_heads": 64, "sinks": True, "window_size": (127, 0)}
    latent = {**paged, "head_dim": 576, "head_dim_v": 512, "num_heads": 128, "num_kv_heads": 1, "values_in_keys": True}
    deepseek = {"head_dim": 192, "head_dim_v": 128, "num_heads": 128, "num_kv_heads": 128}
    float8 = []  # refused on other devices
    if arch >= 89:
        float8 = [
            ("prefill, float8 products", spec(precision="fp8")),
            ("serving, float8 products", spec(**paged, precision="fp8")),
            ("... and a float8 cache", spec(**paged, precision="fp8", kv_dtype=torch.float8_e4m3fn)),
        ]
    return [
        ("prefill, Llama-3 8B", spec()),
        ("prefill in float16", spec(dtype=torch.float16)),
        ("prefill in float32", spec(dtype=torch.float32)),
        ("serving, Llama-3 8B", spec(**paged)),
        ("decoding, Llama-3 8B", spec(**paged, op="decode")),
        ("serving, Mistral 7B", spec(**paged, window_size=(4095, 0))),
        ("serving, Gemma 2 9B", spec(**gemma)),
        ("serving, gpt-oss", spec(**gpt_oss)),
        ("prefill, DeepSeek", spec(**deepseek)),
        ("decoding, DeepSeek", spec(**latent, op="decode")),
        ("dense, BERT", spec(**bert)),
        ("dense, explicit mask", spec(**dense, window_size=(-1, -1), mask="bool", sizes=(1, 4096, 4096))),
        ("dense, block-sparse", spec(**dense, block_mask=True)),
        ("dense, training", spec(**dense, needs_grad=True)),
        ("dense, gradients", spec(**dense, op="backward")),
        *float8,
    ]
