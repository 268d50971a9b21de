"""Which models with recurrent or convolution states run where: in the plugin, in the engine, with its prefix cache and so on.

rows()              # for each model type of transformers that keeps states
"""

from __future__ import annotations

from collections.abc import Sequence

_INTRODUCTION = """\
Layers with linear attention, state space models and short convolutions keep a state of constant size beside or instead of keys
and values. `fa_serve.patch(model)` and the engine compute them by `fa_serve.ops` if they can prove that a module's own code
computes the same. Where that code calls its recurrence as a function, the function is exchanged; MiniMax and RecurrentGemma
hold it inline, and have a forward of fa_serve instead. "plugin" is `patch`, with `generate`, padding on either side, packed
sequences and gradients; a model that is loaded with `attn_implementation="fa_serve"` and not patched keeps transformers'
recurrences, and refuses packed sequences. The engine starts prompts from cached states, and computes at most a page of a known
prompt again ([engine](engine/cache.md#states-beside-pages)). Ranks of tensor parallelism have the heads or channels of a state
each ([engine](engine/ranks.md)). Of models with a bias in the projection before a convolution, transformers' own code lets
padding on the left reach the first tokens, because the bias is added to zeros; `patch` computes what that code does, and the
engine, which has no padding, what a sequence alone gives. So it is for RecurrentGemma, whose blocks read no mask, and for a
MiniMax whose first layer has linear attention: its cache then counts no tokens, and `generate` masks no padding after the first
step. A reason stands where something is refused or not built yet. Tests compare the models that are marked with `generate` in
float32, with transformers 5.17 and with the newest release, and those of `tests/gpu/test_hybrids_gpu.py` on an H200:
"""
TYPES = (
    "bamba",
    "falcon_h1",
    "falcon_mamba",
    "granitemoehybrid",
    "inkling_text",
    "jamba",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "mamba",
    "mamba2",
    "minimax",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "qwen4_exp",
    "recurrent_gemma",
    "rwkv",
    "xlstm",
    "zamba",
    "zamba2",
    "zaya",
)
"""The types of causal language models in transformers 5.17 that keep states."""
COMPOSITES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""Types whose language model is of another type."""
_WITHOUT_ATTENTION = {"rwkv": "refused", "xlstm": "no layer"}
"""What the plugin does with types that do not use transformers' attention interface."""


def rows(names: Sequence[str] = TYPES) -> dict[str, dict[str, str]]:
    """For each type: whether a test computes it, and "y" or a reason in each column."""
    from hybrids import HYBRIDS
    from report_support import YES, divided
    from transformers import AutoConfig

    from fa_serve import hf
    from fa_serve.spec import UnsupportedModelError

    tested = {family.make_config().model_type for family in HYBRIDS}
    found = {}
    for name in names:
        row = {"tested": "y" if COMPOSITES.get(name, name) in tested else "", "engine": "y"}
        if not row["tested"]:
            try:
                hf.check_model(AutoConfig.for_model(name))
            except UnsupportedModelError as error:
                row["engine"] = str(error).split("cannot run on a paged cache: ")[-1].partition(", so fa_serve")[0]
            except Exception:  # a default config of which no model can be made
                row["engine"] = "its n-gram states and sparse attention are not built"
        runs = row["engine"] == "y"
        row["plugin"] = "y" if runs else _WITHOUT_ATTENTION.get(name, "attention alone")
        row["prefix"] = "y" if runs else "-"
        row["graphs"] = ("y" if row["tested"] else "not tried") if runs else "-"
        parallel = divided(name) if runs else "-"
        row["parallel"] = "y" if parallel == YES else parallel.split(" ranks: ")[-1]
        found[name] = row
    return found


def page(results: dict[str, dict[str, str]]) -> list[str]:
    """The section of docs/model-layers.md."""
    lines = ["", "## Recurrent and convolution states", "", *_INTRODUCTION.splitlines(), ""]
    lines += [
        "| type | tested | plugin | engine | prefix cache | CUDA graphs | tensor parallel |",
        "|---|---|---|---|---|---|---|",
    ]
    columns: tuple[str, ...] = ("tested", "plugin", "engine", "prefix", "graphs", "parallel")
    lines += [f"| {name} | {' | '.join(row[column] for column in columns)} |" for name, row in results.items()]
    return lines
