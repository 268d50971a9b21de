"""The fuzzer over all routes, for some seconds, after everything that it once found.

`make fuzz` runs it for FA_SERVE_FUZZ_SECONDS (600) with a seed of FA_SERVE_FUZZ_SEED, which it prints.
"""

import json
import os
from pathlib import Path

import pytest
from security.fuzz import fuzz, replay

SEEDS = sorted((Path(__file__).parent / "seeds").glob("*.json"))
SECONDS = float(os.environ.get("FA_SERVE_FUZZ_SECONDS", "8"))
SEED = int(os.environ.get("FA_SERVE_FUZZ_SEED", "18"))


@pytest.mark.parametrize("path", SEEDS, ids=lambda path: path.stem)
def test_what_was_found_before(fortress, path):
    replay(fortress, json.loads(path.read_text()))


@pytest.mark.timeout(max(300, 3 * SECONDS))
def test_fuzz(fortress):
    with fortress.under_attack(f"fuzzer, seed {SEED}"):
        rounds = fuzz(fortress, SECONDS, SEED)
    print(f"{rounds} rounds in {SECONDS:g} s")
