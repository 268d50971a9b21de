"""Which model types the newest release of transformers adds to those of docs/models.md, and which of them are served.

    PYTHONPATH=.venv/newest:tests/support python tests/support/report_newer.py

Writes tests/results/newer_types.json. `page` is the section of docs/models.md.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "newer_types.json"
_UNTRIED = "not tried"
_FAMILIES = RESULTS.with_name("families.json")


def added() -> list[str]:
    """The types of the installed release that write text and that docs/models.md does not have."""
    from every_type import CAUSAL, IMAGE_TEXT

    return sorted({*CAUSAL, *IMAGE_TEXT} - set(json.loads(_FAMILIES.read_text())["types"]))


def collect() -> dict[str, Any]:
    import transformers
    from report_types import row_of

    logging.disable(logging.WARNING)
    return {"transformers": transformers.__version__, "types": {name: _with_refusal(name, row_of(name)) for name in added()}}


def _with_refusal(name: str, row: dict[str, str]) -> dict[str, str]:
    """A type that transformers' own code cannot generate with in tiny sizes may be refused before that."""
    from every_type import tiny_config
    from report_types import reason_of

    from fa_serve import hf

    if not row["engine text"].startswith(_UNTRIED):
        return row
    refusal = reason_of(lambda: hf.check_model(tiny_config(name)))
    if refusal == "yes" or refusal.startswith(_UNTRIED):
        return row
    return {column: refusal if answer.startswith(_UNTRIED) else answer for column, answer in row.items()}


def rows(results: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """For each type: plugin, engine, images, in the codes of docs/models.md."""
    from report_table import cell

    columns = ("plugin text", "engine text", "engine image")
    return {name: tuple(cell(row[column]) for column in columns) for name, row in results["types"].items()}


def page(results: dict[str, Any]) -> list[str]:
    version = results["transformers"]
    lines = [
        "### Types of later releases",
        "",
        f"`make test-newest` runs the tests of the adapter with transformers {version}, which adds these types:",
        "",
        "| type | plugin | engine | images |",
        "|---|---|---|---|",
    ]
    return [*lines, *(f"| `{name}` | {' | '.join(row)} |" for name, row in rows(results).items()), ""]


if __name__ == "__main__":
    RESULTS.write_text(json.dumps(collect(), indent=1) + "\n")
