"""Which models of transformers keep their experts in modules that fa_serve computes, and how they keep them.

    mixtures()          # {"mixtral": "", "nemotron_h": "has experts without a gate", ...}
    layouts()           # of the families that tests compute: weights, gate, and whether the engine runs them

For `mixtures`, each module of experts is made from the default config of its model on the meta device, and its gate is read.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

OWN = "computes its experts itself instead of through transformers' experts interface"
_INTRODUCTION = """\
`experts_implementation="fa_serve"` computes the experts of a model with fa_serve's kernels, in `generate` and in every other
forward without gradients. `model.set_experts_implementation("fa_serve")` switches a loaded model. The engine switches by
itself if two experts of each kind, computed in float32, give the same as the model's own code. It also fuses routers whose
choice it can describe, and shared experts, which every token takes, if two products compute the same. Gradients are computed by
transformers' `grouped_mm`. [Kernels](kernels/experts.md) explains the computation.

Tests compare these families with their own code in `generate`. Where the engine runs them, they are also compared in the
engine, with chunks, preemption and prefix cache, and in deterministic mode. `g` and `u` are the products with the gate and up
weights.
"""
_CLASS = re.compile(r"^class \w*(?:Experts|MoE|NaiveMoe)\w*\(nn\.Module", re.MULTILINE)
# for configs whose defaults have no experts, or leave their number open
_NUMBERS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
_SIZES = {**_NUMBERS, "moe_intermediate_size": 32, "hidden_size": 64}


UNREAD = "not read"


def mixtures(only: Collection[str] | None = None) -> dict[str, str]:
    """For each model of transformers that has experts: "" if fa_serve computes them, else the reason.

    only: the models whose modules are imported, which takes most of the time. Others of them are UNREAD
    """
    import transformers

    found = {}
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        text = path.read_text()
        if "@use_experts_implementation" in text and only is not None and path.parent.name not in only:
            found.setdefault(path.parent.name, UNREAD)
        elif "@use_experts_implementation" in text:
            reasons = _reasons(path.parent.name, importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}"))
            found[path.parent.name] = "; ".join(reasons)
        elif _CLASS.search(text):
            found[path.parent.name] = OWN
    return found


def layouts() -> dict[str, dict[str, str]]:
    """How each family of `moe_families` keeps its experts, and why the engine does not run it ("": it does)."""
    from moe_families import MIXTURES

    import fa_serve
    from fa_serve.hf import check_model
    from fa_serve.hf.surgery.experts.mixtures import gate_of
    from fa_serve.spec import UnsupportedModelError

    found = {}
    for family in MIXTURES:
        model = fa_serve.patch(family.build())
        module: Any = next(m for m in model.modules() if hasattr(m, "_apply_gate"))
        gate = gate_of(module)
        weights = ["transposed" if module.is_transposed else "rows", "interleaved" if gate.interleaved else "concatenated"]
        weights += ["biases"] * module.has_bias
        formula = f"{gate.activation}(g) * u"
        if gate.slope != 1.0:
            formula = f"g * sigmoid({gate.slope:g} g) * (u + {gate.offset:g})"
        if gate.limit != float("inf"):
            formula += f", clamped at {gate.limit:g}"
        try:
            check_model(model)
            engine = ""
        except UnsupportedModelError as error:
            engine = str(error).partition(": ")[2]
        found[family.name] = {"weights": ", ".join(weights), "gate": formula, "engine": engine}
    return found


def page(results: dict[str, Any]) -> list[str]:
    """The first part of docs/mixtures.md."""
    mixtures = results["mixtures"]
    counts = Counter(mixtures.values())
    lines = [
        "",
        *_INTRODUCTION.splitlines(),
        "",
        "| family | weights of an expert | gate | engine |",
        "|---|---|---|---|",
    ]
    for name, row in results["layouts"].items():
        lines.append(f"| {name} | {row['weights']} | {row['gate']} | {row['engine'] or 'yes'} |")
    lines += [
        "",
        f"fa_serve can compute the experts of {counts.pop('')} of the {len(mixtures)} architectures of transformers that have",
        "experts. This was decided from their modules of experts alone:",
        ", ".join(name for name, reason in mixtures.items() if not reason) + ".",
        "The other architectures compute their experts with transformers' code, and are refused if the experts are quantised:",
        "",
        "| reason | architectures |",
        "|---|---|",
    ]
    for reason, _ in counts.most_common():
        lines.append(f"| {reason} | {', '.join(name for name, why in mixtures.items() if why == reason)} |")
    return lines


def _reasons(name: str, module: Any) -> list[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from fa_serve.hf.surgery.experts.mixtures import _read_gate
    from fa_serve.spec import UnsupportedModelError

    package = f"transformers.models.{name}."
    configs = [config for config in CONFIG_MAPPING.values() if config.__module__.startswith(package)]
    kinds = [c for c in vars(module).values() if inspect.isclass(c) and hasattr(c, "_apply_gate")]
    reasons = []
    for kind in (c for c in kinds if c.__module__ == module.__name__):
        try:
            _read_gate(_made(kind, configs))
        except UnsupportedModelError as error:
            reasons.append(str(error).removeprefix(f"{kind.__name__} ").partition(", which fa_serve")[0])
    return reasons


def _made(kind: Any, configs: list[Any]) -> Any:
    """A module of experts on the meta device, from the first config that has what it needs."""
    for sizes in ({}, _SIZES):
        for config in configs:
            try:
                with torch.device("meta"):
                    return kind(config(**sizes))
            except Exception:  # other configs of the same model have no experts
                continue
    raise AssertionError(f"no config of {configs} makes a {kind.__name__}")
