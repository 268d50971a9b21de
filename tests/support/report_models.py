"""Write the pages about models from the outcomes of tests: docs/models.md, model-layers.md, mixtures.md,
quantised.md and model-tests.md.

    python tests/support/report_models.py             # runs the tests of the families, then writes the page (minutes)
    python tests/support/report_models.py --families llama,bert   # runs the tests of these again, then writes the page
    python tests/support/report_models.py --experts   # finds how models keep their experts again, then writes the page
    python tests/support/report_models.py --types     # serves tiny models of every type again, then writes the page (minutes)
    python tests/support/report_models.py --latent    # finds which models have latent attention again, then writes the page
    python tests/support/report_models.py --support   # finds what the engine does beyond text again, then writes (minutes)
    python tests/support/report_models.py --page      # writes the pages alone, from the files below

tests/results/families.json holds the outcomes of tests/hf/test_families.py and tests/hf/test_multimodal.py, the backends that
serve the layers of each architecture in its published sizes, whether fa_serve takes each model of transformers, and what
`report_experts.py`, `report_latent.py`, `report_hybrids.py`, `report_types.py`, `report_support.py`,
`report_fusion.py` and `report_limits.py` find.
tests/upstream/results.json holds the outcomes of transformers' own tests, which tests/upstream/run.py writes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import report_experts
import report_fusion
import report_hybrids
import report_latent
import report_limits
import report_support
import report_table
import report_types

HERE = Path(__file__).parents[1]
FAMILIES = HERE / "results" / "families.json"
UPSTREAM = HERE / "upstream" / "results.json"
LOADING = HERE / "results" / "load_memory.json"
DOCS = HERE.parent / "docs"
GPUS = {"H200": 90, "A100": 80}
# The tests of a family, by the name of their column on the page.
COLUMNS = {
    "forward": "padded",
    "seq2seq": "padded",
    "vision": "images",
    "packed": "packed",
    "decode": "decode",
    "chunked_prefill": "chunks",
    "static_cache": "static cache",
    "custom_mask": "own masks",
    "generate": "generate",
    "paged": "pages",
    "not_paged": "pages",
    "forward_and_generate": "generate",
    "text_on_a_paged_cache": "pages",
}


def outcomes(only: Collection[str] = ()) -> dict[str, dict[str, list[int]]]:
    """For each family and column: how many tests passed, and how many there are. only: families of hf_families, all if empty"""
    from hf_families import FAMILIES as known
    from hf_multimodal import MODELS

    names = sorted([f.name for f in known] + [f"{name} (multimodal)" for name in MODELS], key=len, reverse=True)
    found: dict[str, dict[str, list[int]]] = {name: {} for name in sorted(names) if not only or name in only}
    if missing := set(only) - set(found):
        raise SystemExit(f"hf_families has no {', '.join(sorted(missing))}")
    for module in ("families",) if only else ("families", "multimodal"):
        with tempfile.NamedTemporaryFile(suffix=".xml") as report:
            tests = str(HERE / "hf" / f"test_{module}.py")
            options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report.name}", "-k", " or ".join(only)]
            # a report is of all tests, also where it is made by a session that runs a sample of them
            whole = {**os.environ, "FA_SERVE_CASES": "all"}
            subprocess.run([sys.executable, "-m", "pytest", *options, tests], cwd=HERE.parent, env=whole, check=False)
            for case in ET.parse(report.name).iter("testcase"):
                test, _, parameters = str(case.get("name")).removesuffix("]").partition("[")
                column = COLUMNS.get(test.removeprefix("test_"))
                tail = " (multimodal)" if module == "multimodal" else ""
                matching = (n for n in names if n.endswith(tail) and _names(parameters, n.removesuffix(tail)))
                if column is not None and (name := next(matching, None)) in found:
                    count = found[name].setdefault(column, [0, 0])
                    count[0] += not any(case.findall(kind) for kind in ("failure", "error", "skipped"))
                    count[1] += 1
    return found


def _names(parameters: str, family: str) -> bool:
    return parameters == family or parameters.endswith(f"-{family}") or parameters.startswith(f"{family}-")


def layers() -> dict[str, list[dict[str, str]]]:
    """For each architecture in transformers' default sizes: what its layers ask for, and who serves them on an H200."""
    from hf_families import FAMILIES as known

    from fa_serve.backends import explain
    from fa_serve.hf.info import decoding, describe

    found: dict[str, list[dict[str, str]]] = {}
    for name, config_class in {f.model: f.model_class.config_class for f in known}.items():
        described = describe(config_class(dtype="bfloat16"), "cuda", 90)
        found[name] = []
        for part in described.parts:
            for layer, where in part.kinds():
                spec = layer.spec
                paged = described.engine is None
                prefill, decode = (
                    next((backend for backend, reason in explain(s).items() if reason is None), "none")
                    for s in (spec, decoding(layer))
                )
                asks = str(spec).partition("bfloat16, ")[2]
                if layer.latent is not None:
                    asks += f", latent keys of {layer.latent.rank} + {layer.latent.rope}"
                row = {"layers": where, "asks": asks, "prefill": prefill, "decode": decode if paged else "-"}
                found[name].append(row)
    return found


def census() -> dict[str, dict[str, str]]:
    """For each model type of transformers: "" if fa_serve takes its model, else the reason, without the model's name."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    from fa_serve.hf.adapter.models import check_class
    from fa_serve.spec import UnsupportedModelError

    found = {}
    for model_type, config_class in CONFIG_MAPPING.items():
        try:
            classes = MODEL_MAPPING.get(config_class, ())
        except ValueError:  # the mapping of 5.17 names two classes that do not exist
            continue
        for model_class in classes if isinstance(classes, tuple) else (classes,):
            if getattr(model_class, "is_dummy", False):  # it needs a package that is not installed
                continue
            try:
                check_class(model_class)
                found[model_type] = ""
            except UnsupportedModelError as error:
                found[model_type] = str(error).removeprefix(model_class.__name__ + " ").partition(", so fa_serve")[0]
    return found


def kept_weights() -> list[dict[str, str]]:
    """For each format that `examples/quantise.py` writes: how weights are kept, and the kernels of a weight of 4096 x 4096."""
    import torch

    sys.path.append(str(HERE.parent / "examples"))
    from quantise import formats

    from fa_serve.hf.surgery.quantised.linear import product_of
    from fa_serve.hf.weights.quantization_plan import read_config
    from fa_serve.ops.products.table import kernels_by_tokens

    found = []
    for name, (_, config) in formats(128).items():
        scheme = read_config(config).scheme_of("model.layers.0.mlp.up_proj", torch.nn.Linear(1, 1))
        assert scheme is not None
        gpus = {
            gpu: kernels_by_tokens(product_of(scheme, 4096, 4096, torch.bfloat16, "cuda", arch)) for gpu, arch in GPUS.items()
        }
        found.append({"format": name, "kept": scheme.description, **gpus})
    return found


def kept_experts() -> list[dict[str, str]]:
    """For each format of quantised experts: how they are kept, and which kernels compute them, or that they are refused.

    The experts are those of Qwen3-30B-A3B: 128 of 2048 -> 768 -> 2048, of which a token takes 8.
    """
    import torch

    from fa_serve.hf.surgery.quantised.linear import product_of
    from fa_serve.hf.weights.quantization_plan import read_config
    from fa_serve.ops.products.table import kernels_of_experts
    from fa_serve.spec import ParameterError

    float8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
    int4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
    configs = {
        "mxfp4": {"quant_method": "mxfp4"},
        "fp8, blocks": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "compressed-tensors, float8": _compressed("float-quantized", float8),
        "compressed-tensors, 4 bits": _compressed("pack-quantized", int4),
        "compressed-tensors, 4 bits, act-order": _compressed("pack-quantized", int4 | {"actorder": "group"}),
        "awq": {"quant_method": "awq", "bits": 4},
        "gptq": {"quant_method": "gptq", "bits": 4},
        "gptq, act-order": {"quant_method": "gptq", "bits": 4, "desc_act": True},
    }
    found = []
    for name, config in configs.items():
        row = {"format": name, "kept": "", **dict.fromkeys(GPUS, "refused")}
        with suppress(ParameterError):
            scheme = read_config(config).scheme_of_experts("model.layers.0.mlp.experts")
            assert scheme is not None
            row["kept"] = scheme.description
            for gpu, arch in GPUS.items():
                both = [product_of(scheme, n, k, torch.bfloat16, "cuda", arch) for n, k in ((1536, 2048), (2048, 768))]
                first, second = (replace(each, num_experts=128, top_k=8) for each in both)
                row[gpu] = kernels_of_experts((replace(first, gated=True), second))
        found.append(row)
    return found


def _compressed(layout: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


def formats_of_transformers() -> dict[str, str]:
    """For each format of quantised weights that transformers knows: who loads it."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    from fa_serve.hf.adapter.models import NAME
    from fa_serve.hf.weights.quantization_plan import is_ours
    from fa_serve.spec import ParameterError

    found = {}
    for method in sorted(
        {name.partition("_4bit")[0].partition("_8bit")[0] for name in AUTO_QUANTIZATION_CONFIG_MAPPING} - {NAME}
    ):
        try:
            found[method] = "fa_serve" if is_ours({"quant_method": method}) else "transformers"
        except ParameterError:
            found[method] = "refused"
    return found


def collect() -> dict[str, Any]:
    import torch
    import transformers

    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    found = {"versions": versions, "families": outcomes(), "layers": layers(), "census": census()}
    found["latent"] = latent(found["census"])
    found["hybrids"] = report_hybrids.rows()
    found["types"] = report_types.rows()
    found |= {"experts": experts()} | weights() | support(found)
    return found | {"engine": report_fusion.architectures(concerned(found))}


def concerned(results: dict[str, Any]) -> list[str]:
    """The architectures of transformers that have experts or latent attention."""
    return sorted({*results["experts"]["mixtures"], *results["latent"]["types"]})


def weights() -> dict[str, Any]:
    return {"kept_weights": kept_weights(), "kept_experts": kept_experts(), "formats": formats_of_transformers()}


def latent(census: dict[str, str]) -> dict[str, Any]:
    return {"tested": report_latent.tested(), "types": report_latent.structured(census)}


def experts() -> dict[str, Any]:
    return {"layouts": report_experts.layouts(), "mixtures": report_experts.mixtures()}


def compared_types() -> dict[str, list[str]]:
    """The types of transformers that tests compare with eager attention, and those whose vectors are compared."""
    from encoder_folders import FAMILIES as encoders
    from hf_families import FAMILIES as known
    from hf_multimodal import MODELS
    from hybrids import HYBRIDS

    eager = {family.model_class.config_class.model_type for family in (*known, *HYBRIDS)}
    eager |= {str(make()[1].get("model_type", "")) or _type_of(make()[0]) for make in MODELS.values()}
    return {"eager": sorted(eager), "vectors": sorted({kind for kind, _ in encoders.values()})}


def _type_of(model_class: str) -> str:
    import transformers

    return str(getattr(transformers, model_class).config_class.model_type)


def support(results: dict[str, Any]) -> dict[str, Any]:
    """What the engine does beyond the text of a type, for those whose text it serves."""
    served = [name for name, row in results["types"].items() if row["engine text"] == report_types.YES]
    return {
        "support": report_support.rows(served),
        "tested": compared_types(),
        "limits": report_limits.length_limits(served),
        "without attention": report_limits.without_attention(results["census"]),
    }


_HEAD = "<!-- written by tests/support/report_models.py; tests/test_report_models.py compares it with the results -->"


def pages(results: dict[str, Any], upstream: dict[str, Any]) -> dict[str, str]:
    """The text of each page, by the name of its file."""
    found = {
        "models.md": report_table.page(results),
        "model-layers.md": _layers_page(results),
        "mixtures.md": [
            "# Mixtures of experts",
            "",
            _HEAD,
            *report_experts.page(results["experts"]),
            *report_fusion.page(results["engine"]),
        ],
        "quantised.md": ["# Quantised weights", "", _HEAD, *_quantised(results), *_loading(json.loads(LOADING.read_text()))],
        "model-tests.md": [*_tests_page(results), *_upstream(upstream)],
    }
    return {name: "\n".join(lines) + "\n" for name, lines in found.items()}


def _layers_page(results: dict[str, Any]) -> list[str]:
    lines = [
        "# Layers of models",
        "",
        _HEAD,
        "",
        "Which kernels serve the layers of a model, and how the engine keeps latent keys and states. [Mixtures of",
        "experts](mixtures.md) have a separate page, and [Models and GPUs](models.md) says which types run at all.",
        "",
        "A mask that consists of causality, a window, chunks, padding or packed sequences is never formed. The kernels apply",
        "it and skip the keys that no query sees. Masks with image blocks or prefixes, and your own masks, are passed to the",
        "kernel as they are.",
        "",
        "## Which backend serves which layer",
        "",
        "For an H200 in bfloat16, with each architecture in transformers' default sizes: `hopper` is the Hopper kernel,",
        "`triton` the portable Triton kernels, and `sdpa` PyTorch's own attention. The last column is decoding in the engine.",
        "A dash stands there if the engine does not run the model.",
        "",
        "| model | layers | what they ask for | prefill | decoding |",
        "|---|---|---|---|---|",
    ]
    for name, kinds in results["layers"].items():
        for row in kinds:
            lines.append(f"| {name} | {row['layers']} | {row['asks']} | {row['prefill']} | {row['decode']} |")
    lines += report_latent.page(results["latent"])
    lines += report_hybrids.page(results["hybrids"])
    return lines


def _tests_page(results: dict[str, Any]) -> list[str]:
    columns = list(dict.fromkeys(COLUMNS.values()))
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    lines = [
        "# How models are tested",
        "",
        _HEAD,
        "",
        "fa_serve computes a model as transformers' eager attention computes it, or refuses it and says why. A model is",
        "refused when it is loaded if its attention does not go through transformers' attention interface, or if it passes its",
        "attention an argument that fa_serve does not know. A call is refused if it asks for attention weights or for dropout",
        "in attention, or if it passes a mask that does not have four dimensions.",
        "",
        "## Families",
        "",
        "Tiny models with random weights are compared with eager attention in every row and at every valid position, within a",
        f'few roundings of float32 ({versions}). A cell is the number of tests, all of which pass. "pages" is the engine\'s',
        "paged cache. Multimodal models have a vision or audio tower beside the text model. `make test` runs all of these",
        "tests, and `make test-newest` runs them on the newest release of transformers.",
        "",
        "| family | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for name, row in results["families"].items():
        cells = [str(row[column][0]) if column in row else "" for column in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _quantised(results: dict[str, Any]) -> list[str]:
    by_loader: dict[str, list[str]] = {}
    for method, loader in results["formats"].items():
        by_loader.setdefault(loader, []).append(method)
    lines = [
        "",
        "The engine reads quantised layers from the files of a checkpoint. It needs no other package and makes no copy of the",
        "weights in full precision, and it fuses quantised decoder layers like others. `examples/quantise.py` writes small",
        "copies of a model in each of these formats. For bfloat16, groups of 128 and a weight of 4096 x 4096, these rows of",
        "the [table of kernels](kernels/products.md#which-kernel-when) compute the products:",
        "",
        "| format | weights | " + " | ".join(GPUS) + " |",
        "|---|---|" + "---|" * len(GPUS),
    ]
    for row in results["kept_weights"]:
        lines.append(f"| {row['format']} | {row['kept']} | " + " | ".join(row[gpu] for gpu in GPUS) + " |")
    return [
        *lines,
        "",
        "A CPU dequantises the weights at each step. With float8 weights that have a scale for each row, a GPU rounds the",
        "activations of two or more tokens to float8 as well: each row with a scale that is measured, or all rows with the",
        "checkpoint's scale. The other products leave activations as they are. Dequantised weights are bit for bit those that",
        "the tools of their formats compute. In deterministic mode the weights of linear layers are dequantised, so that its",
        "guarantee holds. Loading a checkpoint needs memory for its bytes and for one layer in two forms. `--quantization fp8`",
        "rounds a checkpoint of floats: the linear layers and the experts inside of its decoder layers become float8 with a",
        "scale for each row. Routers keep their floats. [Kernels](kernels/products.md#quantised-weights)",
        "has times.",
        "",
        "All experts of a layer are one quantised weight. Their tensors are stacked where transformers stacks the weights of",
        "experts. Before they are loaded, the model's own code is compared with fa_serve's on random floats. An error names a",
        "tensor that is missing. The tests cover gpt-oss with mxfp4 and Qwen 3 MoE with the other formats. Products of experts",
        "leave activations as they are, in deterministic mode too. On a GPU, kernels unpack the weights. A CPU dequantises the",
        "experts that tokens have chosen. Act-order gives each expert another order of columns, and is refused.",
        "",
        "For the experts of Qwen3-30B-A3B in bfloat16, 128 of which a token takes 8, these kernels multiply:",
        "",
        "| format | weights of experts | " + " | ".join(GPUS) + " |",
        "|---|---|" + "---|" * len(GPUS),
        *[f"| {x['format']} | {x['kept']} | " + " | ".join(x[gpu] for gpu in GPUS) + " |" for x in results["kept_experts"]],
        "",
        f"Of transformers' formats, fa_serve loads {', '.join(by_loader['fa_serve'])}. It leaves",
        f"{', '.join(by_loader['transformers'])} to transformers, whose modules run in layers that are not fused.",
        "Options such as 3 bits are refused. So are checkpoints in these formats, with an error that names the format:",
        f"{', '.join(by_loader['refused'])}.",
    ]


def _loading(found: dict[str, Any]) -> list[str]:
    columns = ("model", "format", "floats", "file", "held", "peak")
    return [
        "",
        "## Memory while loading",
        "",
        f"`python -m benchmarks.engine.load_memory` on the {found['device']}, in MiB: about 130 million weights, dense or with",
        "eight experts in each layer. `floats` is what its weights take in bfloat16, `held` what the loaded model takes, and",
        "`peak` the most that loading needed at once beside the mapped file. Weights whose bytes stay as they are remain in",
        "the mapped file and need nothing else; experts are stacked, and 4-bit weights are packed again, layer by layer. With",
        "`--device cuda` the script measures the memory of a GPU. On one H200 (a23efe5; mixtures with 4 bits packed by",
        "compressed-tensors at 5c620d6) the peak was at most 18 MiB above `held` in every format that is loaded as it is.",
        "",
        "| " + " | ".join(columns) + " |",
        "|---" * len(columns) + "|",
        *["| " + " | ".join(str(row[column]) for column in columns) + " |" for row in found["rows"]],
    ]


def _upstream(upstream: dict[str, Any]) -> list[str]:
    versions = upstream["versions"]
    reasons = dict.fromkeys(reason for row in upstream["families"].values() for reason in row["failed"].values())
    letters = dict(zip(reasons, "ABCDEFGH", strict=False))
    lines = [
        "",
        "## transformers' own tests",
        "",
        "`python tests/upstream/run.py` fetches the source distribution of transformers. It runs the tests of attention in",
        "`test_modeling_common.py` (sdpa against eager attention in three dtypes, padded on either side; batching; training;",
        "gradient checkpointing; switching; offloading) with fa_serve in the place of sdpa. The distribution lacks",
        "transformers' tests of generation, of masks and of single models. fa_serve's tests of these are in `tests/hf/`.",
        "",
        f"transformers {versions['transformers']}, torch {versions['torch']}. Failures of three kinds are left:",
        "",
        *[f"- {letter}: {reason}" for reason, letter in letters.items()],
        "",
        "| family | passed | skipped | failed |",
        "|---|---|---|---|",
    ]
    for name, row in upstream["families"].items():
        failed = ", ".join(f"{n} {letters[reason]}" for reason, n in Counter(row["failed"].values()).items())
        lines.append(f"| {name} | {row['passed']} | {row['skipped']} | {failed or 0} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--page", action="store_true", help="write the page from the existing results")
    parser.add_argument("--families", help="find only what concerns these of hf_families.py, separated by commas")
    parser.add_argument("--experts", action="store_true", help="find only how models keep their experts, and quantised weights")
    parser.add_argument("--latent", action="store_true", help="find only which models have latent attention")
    parser.add_argument("--support", action="store_true", help="find only what the engine does beyond text")
    parser.add_argument("--types", action="store_true", help="find only which types are served")
    args = parser.parse_args()
    if not args.page:
        some = args.families or args.experts or args.latent or args.types or args.support
        results = json.loads(FAMILIES.read_text()) if some else collect()
        if args.families:
            families = results["families"] | outcomes(args.families.split(","))
            results |= {"families": dict(sorted(families.items())), "layers": layers(), "tested": compared_types()}
        if args.experts:
            results |= {"experts": experts()} | weights()
            results |= {"engine": report_fusion.architectures(concerned(results))}
        if args.latent:
            results |= {"latent": latent(results["census"]), "layers": layers()}
        if args.types:
            results |= {"types": report_types.rows()}
        if args.support or args.types:
            results |= support(results) | {"hybrids": report_hybrids.rows()}
        FAMILIES.parent.mkdir(exist_ok=True)
        FAMILIES.write_text(json.dumps(results, indent=1) + "\n")
    for name, text in pages(json.loads(FAMILIES.read_text()), json.loads(UPSTREAM.read_text())).items():
        (DOCS / name).write_text(text)


if __name__ == "__main__":
    main()
