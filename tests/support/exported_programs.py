"""Exports a model, and runs the program in a fresh process, which knows the operators but not the model."""

from __future__ import annotations

from pathlib import Path

import torch

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
"""Prints "same" if the program of the first file gives the logits of the second."""


class Logits(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(ids, use_cache=False).logits
        return logits


@torch.no_grad()
def export(model: torch.nn.Module, ids: torch.Tensor, folder: Path) -> tuple[list[str], list[str]]:
    """Write the program, and ids with their logits; returns fa_serve's operators in the program, and both files."""
    logits = Logits(fa_serve.patch(model))
    program = torch.export.export(logits, (ids,))
    files = [str(folder / "program.pt2"), str(folder / "expected.pt")]
    torch.export.save(program, files[0])
    torch.save((ids, logits(ids)), files[1])
    return [str(node.target) for node in program.graph.nodes if "fa_serve" in str(node.target)], files
