"""Loading takes the bytes of a checkpoint and the numbers of one layer, and never its weights as floats."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.engine.load_memory import MODELS, all_formats, measure, write

SMALL = {"hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 256, "num_attention_heads": 4}


@pytest.mark.slow
def test_the_peak_of_loading_is_below_the_floats(tmp_path: Path) -> None:
    floats = write("mixture", "awq", tmp_path, 8, **SMALL, num_key_value_heads=4)
    found = measure(tmp_path, "cpu", None)
    assert floats > 60e6
    assert found["held"] < 0.35 * floats
    assert found["held"] * 0.9 < found["peak"] < 0.8 * floats


def test_every_format_of_a_linear_layer_is_measured() -> None:
    assert set(MODELS) == {"dense", "mixture"}
    assert set(all_formats("dense")) - set(all_formats("mixture")) == {"gptq-act-order"}
