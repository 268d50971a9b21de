"""An exported program runs in a fresh process, which knows the operators but not the model."""

from __future__ import annotations

from pathlib import Path

import pytest
from exported_programs import LOADED, export
from hf_families import BY_NAME, tokens
from torch_processes import after_transformers


@pytest.mark.slow
def test_an_exported_program_runs_in_a_fresh_process(tmp_path: Path) -> None:
    operators, files = export(BY_NAME["mistral"].build(num_hidden_layers=1), tokens(2, 12), tmp_path)
    assert operators == ["fa_serve.attention.default"]
    ended = after_transformers(f"import sys\nsys.argv[1:] = {files}\n{LOADED}")
    assert ended.stdout.strip() == "same", ended.stderr
