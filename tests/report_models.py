"""docs/models.md from what the tests themselves reported.

    python tests/report_models.py             # runs the tests of the families, then writes the page (minutes)
    python tests/report_models.py --page      # writes the page alone, from tests/results/*.json

tests/results/families.json holds the outcomes of test_hf_models.py and test_hf_multimodal.py, who serves the layers of each
architecture as it is published, and what became of every model of transformers; tests/upstream/results.json those of
transformers' own tests (tests/upstream/run.py writes it).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FAMILIES = HERE / "results" / "families.json"
UPSTREAM = HERE / "upstream" / "results.json"
PAGE = HERE.parent / "docs" / "models.md"
# the tests of a family, and how the page calls them
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


def outcomes() -> dict[str, dict[str, list[int]]]:
    """By family and column: how many tests passed, and how many there were."""
    from hf_families import FAMILIES as known
    from test_hf_multimodal import MODELS

    names = sorted([f.name for f in known] + [f"{name} (multimodal)" for name in MODELS], key=len, reverse=True)
    found: dict[str, dict[str, list[int]]] = {name: {} for name in sorted(names)}
    for module in ("models", "multimodal"):
        with tempfile.NamedTemporaryFile(suffix=".xml") as report:
            tests = str(HERE / f"test_hf_{module}.py")
            options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report.name}"]
            subprocess.run([sys.executable, "-m", "pytest", *options, tests], cwd=HERE.parent, check=False)
            for case in ET.parse(report.name).iter("testcase"):
                test, _, parameters = str(case.get("name")).removesuffix("]").partition("[")
                column = COLUMNS.get(test.removeprefix("test_"))
                tail = " (multimodal)" if module == "multimodal" else ""
                matching = (n for n in names if n.endswith(tail) and _names(parameters, n.removesuffix(tail)))
                if column is not None and (name := next(matching, None)) is not None:
                    count = found[name].setdefault(column, [0, 0])
                    count[0] += not any(case.findall(kind) for kind in ("failure", "error", "skipped"))
                    count[1] += 1
    return found


def _names(parameters: str, family: str) -> bool:
    return parameters == family or parameters.endswith(f"-{family}") or parameters.startswith(f"{family}-")


def layers() -> dict[str, list[dict[str, str]]]:
    """Of each architecture in the sizes that transformers gives it: what its layers ask for, and who serves them on an H200."""
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
                    for s in (spec, decoding(spec))
                )
                asks = str(spec).partition("bfloat16, ")[2]
                row = {"layers": where, "asks": asks, "prefill": prefill, "decode": decode if paged else "-"}
                found[name].append(row)
    return found


def census() -> dict[str, dict[str, str]]:
    """Every model type of transformers: "" if fa_serve takes its model, else the reason, without the model's name."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    from fa_serve.hf.models import check_class
    from fa_serve.spec import UnsupportedModelError

    found = {}
    for model_type, config_class in CONFIG_MAPPING.items():
        try:
            classes = MODEL_MAPPING.get(config_class, ())
        except ValueError:  # the mapping of 5.17 names two classes that are not there
            continue
        for model_class in classes if isinstance(classes, tuple) else (classes,):
            if getattr(model_class, "is_dummy", False):  # it wants a package that is not here
                continue
            try:
                check_class(model_class)
                found[model_type] = ""
            except UnsupportedModelError as error:
                found[model_type] = str(error).removeprefix(model_class.__name__ + " ").partition(", so fa_serve")[0]
    return found


def collect() -> dict[str, Any]:
    import torch
    import transformers

    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    return {"versions": versions, "families": outcomes(), "layers": layers(), "census": census()}


def page(results: dict[str, Any], upstream: dict[str, Any]) -> str:
    columns = list(dict.fromkeys(COLUMNS.values()))
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    lines = [
        "# Models",
        "",
        "<!-- written by tests/report_models.py; tests/test_models_page.py holds it to the results -->",
        "",
        "A model is computed as transformers' eager attention computes it, or refused with a sentence: when it is loaded, if",
        "its attention cannot reach us or is told something that we do not know; when it is called, if it asks for attention",
        "weights, for dropout in attention, or passes a mask of a shape that is none of transformers'.",
        "`fa-serve info MODEL` tells it for a hub name or a folder from the config alone, `--arch 90` for a GPU elsewhere.",
        "",
        "Masks that are causality, a window, padding or packed sequences are never formed: the kernels know them and skip what",
        "nobody sees. Chunks, image blocks, prefixes and masks of your own are passed as they are.",
        "",
        "## What is tested",
        "",
        "Tiny models with random weights against eager attention: every row, every valid position, to a few roundings of",
        f'float32 ({versions}). A cell: tests passed of all. "pages": in the',
        "engine's paged cache, or refused there as it should be. Multimodal models have a vision or audio tower beside the",
        "text. `make test` runs them all, `make test-newest` on the newest release.",
        "",
        "| family | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for name, row in results["families"].items():
        cells = ["{} of {}".format(*row[column]) if column in row else "" for column in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "## Who serves which layer",
        "",
        "On an H200 in bfloat16, each architecture in the sizes that transformers gives it by default: the Hopper kernel, the",
        "portable Triton kernels, or PyTorch's own (sdpa). Decoding is the engine's; - where the engine does not run it.",
        "",
        "| model | layers | what they ask for | prefill | decoding |",
        "|---|---|---|---|---|",
    ]
    for name, kinds in results["layers"].items():
        for row in kinds:
            lines.append(f"| {name} | {row['layers']} | {row['asks']} | {row['prefill']} | {row['decode']} |")
    counts = Counter(results["census"].values())
    lines += [
        "",
        "## Every model of transformers",
        "",
        f"Of {len(results['census'])} model types {counts.pop('')} are taken: their attention reaches us and tells us",
        "nothing that we do not know. Only the families above are computed in tests. The others are refused at load,",
        "and so is a model with a part that is refused, unless it is told to leave that part to another implementation:",
        "",
        "| why | model types |",
        "|---|---|",
    ]
    for reason, _ in counts.most_common():
        types = [name for name, why in results["census"].items() if why == reason]
        lines.append(f"| {reason} | {', '.join(types)} |")
    lines += _upstream(upstream)
    return "\n".join(lines) + "\n"


def _upstream(upstream: dict[str, Any]) -> list[str]:
    versions = upstream["versions"]
    lines = [
        "",
        "## transformers' own tests",
        "",
        "`python tests/upstream/run.py` fetches the source distribution of transformers and runs the tests of attention in its",
        "`test_modeling_common.py` (sdpa against eager in three dtypes, padded on either side; batching; training; gradient",
        "checkpointing; switching; offloading) with fa_serve in the place of sdpa. The distribution has neither the tests of",
        "generation and of masks nor those of single models: ours are in `tests/test_hf_*.py`.",
        "",
        f"transformers {versions['transformers']}, torch {versions['torch']}:",
        "",
        "| family | passed | failed | skipped | why those failed |",
        "|---|---|---|---|---|",
    ]
    for name, row in upstream["families"].items():
        why = "; ".join(f"{n}: {reason}" for reason, n in Counter(row["failed"].values()).items())
        lines.append(f"| {name} | {row['passed']} | {len(row['failed'])} | {row['skipped']} | {why} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--page", action="store_true", help="write the page from the results that are there")
    if not parser.parse_args().page:
        FAMILIES.parent.mkdir(exist_ok=True)
        FAMILIES.write_text(json.dumps(collect(), indent=1) + "\n")
    PAGE.write_text(page(json.loads(FAMILIES.read_text()), json.loads(UPSTREAM.read_text())))


if __name__ == "__main__":
    main()
