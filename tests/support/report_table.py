"""The first page about models: which type runs where, and on which hardware, with a code and a legend for each refusal.

    lines = page(results)          # docs/models.md, from tests/results/families.json

A cell is "yes", "some", "nothing" (the model is taken, and nothing of it is replaced), "-" (there is nothing to serve) or the
code of a reason. The codes come from the sentences with which fa_serve refuses, so a sentence that has no code stops the page
from being written. Left out: the tables of the other pages.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import report_newer
from image_inputs import ONE_IMAGE

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
YES = "yes"
SOME = "some"
NOTHING = "-"
UNTOUCHED = "nothing"
LENGTH = "length"
SOURCE = "source"


class Reason(NamedTuple):
    """A code of the table, the parts of sentences that it stands for, and what the legend says."""

    code: str
    parts: tuple[str, ...]
    legend: str


REASONS = (
    Reason(
        "processor",
        ("its processor",),
        "Its images are refused, because its processor does not write the prompt that it is given; its text is served.",
    ),
    Reason(
        "own",
        ("computes its attention itself", "layers use the attention interface", "no layer", "refused"),
        "The model's code computes its attention itself, in some or all layers, and has no place for another one.",
    ),
    Reason(
        "argument",
        ("which fa_serve does not know",),
        "The model passes its attention an argument that fa_serve does not know, such as the indices of sparse attention.",
    ),
    Reason(
        "mask",
        ("works on its masks in the form",),
        "The model's code changes its masks in the form that only its eager attention takes.",
    ),
    Reason(
        "two-way",
        ("needs a mask beyond causality",),
        "Its layers attend in both directions, or with a mask beyond causality and a window, by its default config. The engine "
        "generates with causal layers only; as an encoder such a model may serve [embeddings](embeddings.md).",
    ),
    Reason("cross", ("encoder-decoder",), "It is an encoder-decoder, and the cache of pages has no place for cross-attention."),
    Reason(
        "positions",
        ("takes no ['position_ids']", "pass position_ids on"),
        "Its forward takes no `position_ids`, which packed prompts need.",
    ),
    Reason("twice", ("attends more than once",), "A layer attends more than once, and the cache has one place for a layer."),
    Reason("bias", ("position_bias",), "It adds a bias to its scores, which attention over pages cannot do."),
    Reason(
        "state",
        ("keeps a state with code", "keeps more than keys and values", "n-gram states", "sparse and linear attention"),
        "It keeps something of a sequence other than keys and values, with code that fa_serve cannot replace.",
    ),
    Reason("keys", ("chooses keys with code",), "Its queries choose keys with code that fa_serve cannot replace."),
    Reason(
        "images",
        ("not proven against generate", "have not been compared"),
        "Its images are refused, because they have not been compared with `generate`; its text is served.",
    ),
    Reason(
        "text",
        ("actions of a robot", "by diffusion"),
        "It does not write text token by token after a prompt of text.",
    ),
    Reason("plan", ("no tensor-parallel plan",), "transformers has no tensor-parallel plan for its layers."),
    Reason(
        "rule",
        ("cannot be divided between", "linear layer that adapters", "is not supported"),
        "A layer is built otherwise than the rules of the division, or of adapters, allow; the refusal names it.",
    ),
    Reason("gate", ("experts without a gate",), "Its experts have no gate, and keep their floats: quantised ones are refused."),
    Reason(
        "untried",
        ("not tried", "is not the config of", "differs: "),
        "No tiny model of its default config could be made or run in the tests, so nothing is known beyond its source.",
    ),
)

_GPUS = (
    # target of the compile tests, names of GPUs, the part of their names in results
    ("sm80", "A100, A30", "A100"),
    ("sm86", "A10, A40, RTX 30", "A10"),
    ("sm89", "L4, L40S, RTX 40", "L4"),
    ("sm90", "H100, H200", "H100 H200"),
    ("sm100", "B200, GB200", "B200"),
    ("sm120", "RTX 50, RTX PRO Blackwell", "RTX"),
    ("gfx942", "MI300", "MI300"),
)


def code_of(reason: str) -> str:
    """The code of a sentence. Raises LookupError for one that no code stands for."""
    for known in REASONS:
        if any(part in reason for part in known.parts):
            return known.code
    raise LookupError(f"report_table.REASONS must have a code for {reason!r}")


def cell(answer: str) -> str:
    """What the table shows of an answer."""
    if answer in (YES, SOME, NOTHING, "no"):
        return answer
    return YES if answer in ("", "y") else code_of(answer)


def rows(results: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """For each type, in alphabetical order: plugin, engine, images, fused, parallel, quantised, lora, tested."""
    names = sorted({*results["census"], *results["types"]}, key=lambda name: name.lower().replace("-", "_"))
    return {name: _row(name, results) for name in names}


def _row(name: str, results: dict[str, Any]) -> tuple[str, ...]:
    source = results["census"].get(name, "")
    known = results["types"].get(name, {})
    built = known.get("plugin text", "")
    # where no tiny model could be made, the source of its classes decides, as it does when a model is loaded
    plugin = cell(source) if not built or code_or_none(built) == "untried" else cell(built)
    if plugin == YES and name in results["without attention"]:
        plugin = UNTOUCHED
    vectors = name in results["tested"]["vectors"]
    engine = cell(known["engine text"]) if known else NOTHING
    if vectors and engine != YES:
        engine = "vectors"
    elif vectors:
        engine = "yes, vectors"
    if name in results["limits"]:
        engine += f", {LENGTH}"
    images = cell(known["engine image"]) if known else NOTHING
    if images == YES and name in ONE_IMAGE:
        images = "one"
    support = results["support"].get(name, {})
    more = [cell(support[column]) if support else NOTHING for column in ("fused", "parallel", "quantised", "lora")]
    tested = []
    if known and known["engine text"] == YES:
        tested.append("generate")
    if name in results["tested"]["eager"]:
        tested.append("eager")
    if vectors:
        tested.append("vectors")
    if not tested:
        tested.append("built" if built == YES else SOURCE)
    return (plugin, engine, images, *more, ", ".join(tested))


def code_or_none(reason: str) -> str | None:
    return None if reason in (YES, "") else code_of(reason)


def measured() -> set[str]:
    """The GPUs of benchmarks/results, by the word of their name."""
    lines = [json.loads(line) for path in sorted(RESULTS.glob("*.jsonl")) for line in path.read_text().splitlines()]
    names = {str(line.get("gpu", "")) for line in lines}
    return {name.split()[1] for name in names if name.startswith("NVIDIA ")}


def hardware() -> list[str]:
    """A row for each target of the compile tests, and for CPUs."""
    from cross_compile import TARGETS, UNLIKE

    found = measured()
    lines = ["| hardware | target | kernels | status |", "|---|---|---|---|"]
    for target, names, words in _GPUS:
        ran = sorted(found & set(words.split()))
        kernels = "`hopper` and `triton`" if target == "sm90" else "`triton`"
        how = "every kernel" if target in UNLIKE else "a few kernels"
        status = (
            f"**measured** and tested ({', '.join(ran)})" if ran else f"**compiled only**, {how} in the tests; none has run"
        )
        lines.append(f"| {names} | {target} | {kernels} | {status} |")
    assert {row[0] for row in _GPUS} == set(TARGETS)
    return [
        *lines,
        "| older NVIDIA GPUs | below sm80 | PyTorch's own (`sdpa`) | **not tried** |",
        "| x86-64 CPUs, Linux | | PyTorch's own (`sdpa`) | **tested**: every test that needs no GPU |",
        "| ARM CPUs; macOS | | PyTorch's own (`sdpa`), on the CPU | **not tried** in the tests |",
        "| Windows | | | **not tried** |",
    ]


def _introduction(results: dict[str, Any], found: dict[str, tuple[str, ...]]) -> list[str]:
    """How many types are served, and how much of that was run."""
    types = results["types"]
    text = sum(row["engine text"] == YES for row in types.values())
    images = sum(row["engine image"] == YES for row in types.values())
    taken = {name: row for name, row in found.items() if row[0] in (YES, UNTOUCHED)}
    only_read = sum(row[-1] == SOURCE for row in taken.values())
    nothing = sum(row[0] == UNTOUCHED for row in taken.values())
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    return [
        "Does it run my model, on my GPU? `fa-serve info MODEL --arch 90` answers for a hub name or a folder, from its config",
        "alone; a part that it reports as [not tried](cli.md#info) needs the loaded model. This page answers for every type of",
        f"transformers ({versions}):",
        "",
        f"- The plugin takes {len(taken)} of {len(found)} types. For {only_read} of these {len(taken)} the code has been read",
        f"  and nothing was run (`source` in the last column). {nothing} of the {len(taken)}, such as ConvNeXt and FNet, have",
        f"  no attention that could be replaced (`{UNTOUCHED}` in the column `plugin`).",
        f"- The engine writes text with {text} types, each of which was run. {images} of them see images.",
        "",
        "The type of a model is `model_type` in its `config.json`. `yes` is served, a dash is a question that does not arise,",
        "and any other word is a limit or a reason that [the tables below](#what-a-cell-says) spell out. GPUs are",
        "[at the end](#gpus-and-other-hardware). Another release of transformers may have other code for a type:",
        "`fa-serve info` asks the one that is installed.",
        "",
    ]


def page(results: dict[str, Any]) -> list[str]:
    """The lines of docs/models.md."""
    found = rows(results)
    [limit] = {*results["limits"].values()}
    used = {part for row in found.values() for column in row[:7] for part in column.split(", ")}
    newer = json.loads(report_newer.RESULTS.read_text())
    used |= {part for row in report_newer.rows(newer).values() for part in row}
    lines = [
        "# Models and GPUs",
        "",
        "<!-- written by tests/support/report_models.py; tests/test_report_models.py compares it with the results -->",
        "",
        *_introduction(results, found),
        "## Models",
        "",
        '<div class="filter" data-label="Find a type:" data-hint="qwen3 moe"></div>',
        "",
        "| type | plugin | engine | images | fused | tensor parallel | quantised | LoRA | tested |",
        "|---|---|---|---|---|---|---|---|---|",
        *[f"| `{name}` | {' | '.join(row)} |" for name, row in found.items()],
        "",
        "### What a cell says",
        "",
        "| column | yes | otherwise |",
        "|---|---|---|",
        '| plugin | `attn_implementation="fa_serve"` takes every part of the model; '
        f"`{UNTOUCHED}`: it takes the model, which has no attention that it could replace, so that the model's own code "
        "computes all of it | refused when it is loaded |",
        "| engine | it generates text, with or without a server; `vectors`: an encoder serves embeddings or scores; "
        f"`length`: sequences of up to {limit:,} tokens only, by the published config: up to there "
        "[its queries choose all keys](engine/layers.md#keys-that-queries-choose), and a larger `max_model_len` is refused | "
        "refused when it is loaded; `-`: it writes no text |",
        "| images | requests may have images; `one`: one each, as its processor wants | refused in the request |",
        "| fused | all layers are computed by [few kernels](engine/layers.md#fused-layers); `some`: a part of them | "
        "the model's own code around fa_serve's attention: right, and slower |",
        "| tensor parallel | there is a plan for [several GPUs](scale.md#tensor-parallelism), proven when it is loaded | "
        "refused |",
        "| quantised | linear layers and experts may be [quantised](quantised.md); `some`: experts keep floats | refused |",
        "| LoRA | [adapters](lora.md) of linear layers | refused |",
        "",
        "| tested | how |",
        "|---|---|",
        "| `generate` | a tiny model in the engine gave the tokens of transformers' `generate` in float32: several prompts "
        "in one batch, with images in chunks and from the prefix cache. Texts of `gemma3n` and `perception_lm` were tried "
        "without their tower, which needs timm |",
        "| `eager` | a tiny model was compared with eager attention in every row ([tests](model-tests.md)) |",
        "| `vectors` | a tiny encoder was compared with sentence-transformers ([embeddings](embeddings.md#which-models)) |",
        "| `built` | every part of a tiny model took fa_serve's attention; nothing was computed |",
        "| `source` | the code of its classes has been read, as it is when a model is loaded |",
        "",
        "These tests run on CPUs; the families of `eager` and the hybrids are also tested on an H200. Of models with trained",
        "weights, only the embedded one and all-MiniLM-L6-v2 are tested.",
        "",
        "| code | reason |",
        "|---|---|",
        *[f"| `{known.code}` | {known.legend} |" for known in REASONS if known.code in used],
        "",
        *report_newer.page(newer),
        "A model that contains a part of a refused type is refused as well, unless that part is loaded with another attention.",
        "More about [layers and hybrids](model-layers.md), [mixtures](mixtures.md), [quantised weights](quantised.md) and",
        "[the tests](model-tests.md).",
        "",
        "## GPUs and other hardware",
        "",
        *hardware(),
        "",
        "`hopper` is the kernel for compute capability 9.0, under Triton 3.6 to 3.9; `triton` are the portable kernels.",
        "Measured are Triton 3.6, and in prefill and decoding 3.7 and 3.8. [Performance](performance.md) has the figures.",
        "Hardware that is compiled only may fail or be slow: `fa-serve info` shows what would serve it, and a report of a run",
        "is welcome.",
    ]
    assert Counter(known.code for known in REASONS).most_common(1)[0][1] == 1
    return lines
