"""What the engine does with each architecture of transformers that has experts or latent attention: fused, unfused or refused.

    architectures(["mixtral", "deepseek_v3"])         # {"mixtral": {"layers": "fused", "cache": "heads", ...}, ...}

A model of two or four layers is made from the default config of each architecture in tiny sizes, with random weights, and given
to the engine's own checks and proofs. An architecture without a causal language model is named as such, and one whose config
cannot be made small by the usual names of sizes is "not tried".
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers

_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 160),
    **dict.fromkeys(("hidden_size", "n_embd"), 64),
    **dict.fromkeys(("intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "prefix_dense_intermediate_size"), 32),
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("ffn_hidden_size", "expert_ffn_hidden_size"), 48),
    "max_position_embeddings": 512,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
NONE = "has no causal language model"
_MOST_WEIGHTS = 50_000_000
_RAISED = ("object has no attribute", "size of tensor", "shapes cannot", "must match", "object is not", "Error")
"""Parts of messages that Python and PyTorch write, not fa_serve."""


def architectures(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """For each folder of transformers: whether its layers are fused, what they cache, who computes its experts, and why."""
    return {name: _of_engine(name) for name in names}


def page(results: dict[str, dict[str, str]]) -> list[str]:
    """The table of docs/mixtures.md."""
    without = [name for name, row in results.items() if row["reason"] == NONE]
    lines = [
        "",
        "## What the engine does with each architecture",
        "",
        "Every architecture of transformers that has experts or latent attention, as a random model in tiny sizes that is made",
        "from its default config. A layer that is not fused runs the model's own code around the attention and the experts of",
        "fa_serve. [Quantised](quantised.md) linear layers and experts change nothing of this.",
        "",
        "| architecture | layers | caches | experts by | why |",
        "|---|---|---|---|---|",
    ]
    untried = [name for name, row in results.items() if row["reason"].startswith("not tried: ")]
    for name, row in results.items():
        if name not in without and name not in untried:
            lines.append(f"| {name} | {row['layers']} | {row['cache']} | {row['experts']} | {_plain(row['reason'])} |")
    return [
        *lines,
        "",
        f"These have no causal language model in transformers: {', '.join(without)}. No tiny model of this kind can be",
        f"made of the default configs of {', '.join(untried)}; [Models and GPUs](models.md) has rows for them.",
    ]


def _plain(reason: str) -> str:
    """A sentence for what the code of transformers or PyTorch raised, which says nothing to a reader of the page."""
    if any(part in reason for part in _RAISED):
        return "its code has other parts, or other sizes of them, than layers that can be fused"
    return reason


def _of_engine(name: str) -> dict[str, str]:
    from fa_serve.hf import model_layers, patch, patch_indexers, take_scaled_experts
    from fa_serve.hf.surgery.experts.mixtures import expert_modules, take_experts
    from fa_serve.hf.surgery.fuse.fusion import fuse_layers
    from fa_serve.hf.surgery.fuse.latent import LatentAttention
    from fa_serve.hf.surgery.fuse.layer import FusedLayer
    from fa_serve.hf.surgery.fuse.mixers import find_mixer
    from fa_serve.spec import UnsupportedModelError

    row = {"layers": "-", "cache": "-", "experts": "-", "reason": ""}
    model = _tiny(name)
    if isinstance(model, str):
        return row | {"reason": model}
    try:
        patch(model)
        indexers = model_layers(model).indexers
        if indexers:
            patch_indexers(model)
        with _reasons() as reasons:
            found = expert_modules(model)
            taken = take_experts(model)
            scaled = take_scaled_experts(model)
            count = fuse_layers(model)
    except UnsupportedModelError as error:
        return row | {"layers": "refused", "reason": _short(str(error).removeprefix(f"{type(model).__name__} "))}
    except Exception as error:  # the code of a model that has no sense in these sizes
        return row | {"reason": f"not tried: {type(error).__name__}: {_short(str(error))}"}
    layers = [m for m in model.modules() if isinstance(getattr(m, "self_attn", None), torch.nn.Module) or find_mixer(m)]
    latent = [m for m in layers if isinstance(m.forward, FusedLayer) and isinstance(m.forward.attention, LatentAttention)]
    row["layers"] = "unfused" if not count else "fused" if count == len(layers) else f"{count} of {len(layers)} fused"
    row["cache"] = "latent keys" if latent or indexers else "heads"
    if found:
        row["experts"] = "fa_serve" if taken == len(found) else "transformers"
    elif scaled:
        row["experts"] = "fa_serve"
    if not layers:
        reasons = ["its layers have no self_attn, and no mixer that can be fused"]
    return row | {"reason": "; ".join(dict.fromkeys(_short(reason) for reason in reasons))}


@contextmanager
def _reasons() -> Iterator[list[str]]:
    """What the log says about layers and experts that stay the model's own."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            found.extend(text.partition(": ")[2:] if record.levelno >= logging.WARNING else [])

    found: list[str] = []
    handler = Handler()
    log = logging.getLogger("fa_serve.hf")
    log.addHandler(handler)
    try:
        yield found
    finally:
        log.removeHandler(handler)


def _short(reason: str) -> str:
    text = " ".join(reason.replace("|", "/").replace("`", "").split())
    return text.partition(", so fa_serve")[0].partition("; with")[0][:160]


def _tiny(name: str) -> Any:
    """A causal model of an architecture, or why there is none."""
    folder = Path(transformers.__file__).parent / "models" / name
    modules = [import_module(f"transformers.models.{name}.{path.stem}") for path in sorted(folder.glob("modeling_*.py"))]
    classes = [kind for module in modules for key, kind in vars(module).items() if key.endswith("ForCausalLM")]
    causal = [kind for kind in classes if kind.__module__ in {module.__name__ for module in modules}]
    if not causal:
        return NONE
    error = ""
    for kind in causal:
        for count in (2, 4):
            try:
                known = vars(kind.config_class())
                layers = dict.fromkeys({"num_hidden_layers", "n_layer", "num_layers"} & known.keys(), count)
                config = kind.config_class(**{key: value for key, value in _SIZES.items() if key in known} | layers)
                config._experts_implementation = "batched_mm"
                config._attn_implementation = "eager"
                with torch.device("meta"):
                    weights = sum(p.numel() for p in kind(config).parameters())
                if weights > _MOST_WEIGHTS:
                    error = "its sizes have other names"
                    continue
                torch.manual_seed(0)
                return kind(config).eval()
            except Exception as raised:  # a config may refuse any size
                error = f"{type(raised).__name__}: {_short(str(raised))[:100]}"
    return f"not tried: {error}"
