"""Which models of transformers have latent attention (MLA), and whether the engine caches their latent keys.

tested()            # of the families that tests compute: rotary embedding, numbers a token, and the engine's answer
structured()        # every model type of transformers whose layers have the parts of latent attention
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

_INTRODUCTION = """\
For each token and layer, the engine caches one latent vector and one rotated key: in DeepSeek V3 512 + 64 numbers instead of
40,960. It does so if it can prove that the layer's own code computes the same ([engine](engine/layers.md#latent-keys)). A layer
that it cannot prove runs its own code and caches the keys and values of all heads, and the log says why. `fa-serve info MODEL`
says which layers have latent attention. Tests compare these families with `generate`, with chunks of prompts, preemption and
the prefix cache:
"""


def tested() -> dict[str, dict[str, str]]:
    """For each family of `latent_families`: how its parts are, and what the engine caches."""
    from latent_families import LATENT, SCALED_QUERIES

    from fa_serve.hf import patch
    from fa_serve.hf.surgery.fuse.fusion import fuse_layers
    from fa_serve.hf.surgery.fuse.latent import LatentAttention
    from fa_serve.hf.surgery.fuse.layer import FusedLayer

    class Reasons(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "not fused: " in record.getMessage():
                reasons.append(record.getMessage().partition("not fused: ")[2])

    found = {}
    log = logging.getLogger("fa_serve.hf")
    for family in (*LATENT, SCALED_QUERIES):
        reasons: list[str] = []
        handler = Reasons()
        log.addHandler(handler)
        model = family.build()
        patch(model)
        fuse_layers(model)
        log.removeHandler(handler)
        layer: Any = model.model.layers[0]
        row = {
            "type": model.config.model_type,
            "queries": "two projections" if getattr(layer.self_attn, "q_a_proj", None) is not None else "one projection",
            "rotary": "-",
            "cache": "heads: " + "; ".join(reasons),
        }
        if isinstance(layer.forward, FusedLayer) and isinstance(layer.forward.attention, LatentAttention):
            row |= {"rotary": layer.forward.attention.pairing, "cache": "latent keys"}
        found[family.name] = row
    return found


def structured(census: dict[str, str]) -> dict[str, str]:
    """For each model type with the parts of latent attention: "" or why fa_serve refuses it, as `census` says."""
    import transformers

    paths = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    names = sorted(path.parent.name for path in paths if "kv_a_proj_with_mqa" in path.read_text())
    return {name: census[name] for name in names if name in census}


def page(results: dict[str, Any]) -> list[str]:
    """The section of docs/model-layers.md."""
    lines = ["", "## Latent attention", "", *_INTRODUCTION.splitlines(), ""]
    lines += ["| family | type | queries | rotary pairs | engine caches |", "|---|---|---|---|---|"]
    for name, row in results["tested"].items():
        lines.append(f"| {name} | {row['type']} | {row['queries']} | {row['rotary']} | {row['cache']} |")
    known = {row["type"] for row in results["tested"].values()}
    others = [name for name, reason in results["types"].items() if not reason and name not in known]
    refused = [f"{name} ({reason})" for name, reason in results["types"].items() if reason]
    lines += [
        "",
        f"These model types have the same parts, but no test computes them: {', '.join(others)}. If the engine runs such a",
        "model, it tries to prove each layer while it loads the model."
        + (f" These are refused: {', '.join(refused)}." if refused else ""),
    ]
    return lines
