"""An exported program runs in a fresh process, which knows the operators but not the model."""

from __future__ import annotations

from pathlib import Path

import torch
from hf_families import BY_NAME, tokens
from torch_processes import after_torch

import fa_serve

# the operators are known once the adapter is imported
LOADED = """
import sys
import torch
import fa_serve.hf
from transformers import AttentionInterface, AttentionMaskInterface
assert 'fa_serve' in AttentionInterface() and 'fa_serve' in AttentionMaskInterface()
program = torch.export.load(sys.argv[1])
ids, expected = torch.load(sys.argv[2])
with torch.no_grad():
    torch.testing.assert_close(program.module()(ids), expected)
print("same")
"""


class Logits(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(ids, use_cache=False).logits
        return logits


@torch.no_grad()
def test_an_exported_program_runs_in_a_fresh_process(tmp_path: Path) -> None:
    model = Logits(fa_serve.patch(BY_NAME["mistral"].build()))
    ids = tokens(2, 12)
    program = torch.export.export(model, (ids,))
    operators = [str(node.target) for node in program.graph.nodes if "fa_serve" in str(node.target)]
    assert operators == ["fa_serve.attention.default"] * 2
    torch.export.save(program, tmp_path / "program.pt2")
    torch.save((ids, model(ids)), tmp_path / "expected.pt")
    files = [str(tmp_path / "program.pt2"), str(tmp_path / "expected.pt")]
    ended = after_torch(f"import sys\nsys.argv[1:] = {files}\n{LOADED}")
    assert ended.stdout.strip() == "same", ended.stderr
