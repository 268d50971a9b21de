"""The ways to the kernels beside the public functions, transformers and flash-attn's names: exported programs, the package that
Hugging Face's `kernels` loads, diffusers, and kernels that `fa-serve warm` has compiled."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from exported_programs import LOADED, export
from hf_families import BY_NAME, tokens

import fa_serve
from fa_serve.backends.reference import attention_reference
from fa_serve.testing import assert_matches_reference, eager_attention, make_qkv

ROOT = Path(__file__).parents[2]


def run(*command: str, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_CACHE_DIR"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, env=inherited | environment, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def imported(name: str, path: Path, **words: Any) -> ModuleType:
    spec = spec_from_file_location(name, path, **words)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_an_exported_program_runs_in_a_fresh_process(tmp_path: Path) -> None:
    operators, files = export(BY_NAME["mistral"].build().to("cuda", torch.bfloat16), tokens(2, 12).cuda(), tmp_path)
    assert operators == ["fa_serve.attention.default"] * 2
    assert run(sys.executable, "-c", LOADED, *files) == "same\n"


@torch.no_grad()
def test_the_kernel_package_computes_beside_fa_serve(tmp_path: Path) -> None:
    """As its loader imports it: the package of the built folder, under a name that nothing else has."""
    variant = imported("kernel_package", ROOT / "deploy" / "kernel_package.py").build(tmp_path) / "fa_serve"
    kernel = imported("_fa_serve_of_a_test", variant / "__init__.py", submodule_search_locations=[str(variant)])
    q, k, v = make_qkv(2, 130, 300, 6, 3, 64, dtype=torch.bfloat16, device="cuda")
    words = {"softmax_scale": 0.125, "window_size": (-1, 0)}
    exact, _ = attention_reference(q.double(), k.double(), v.double(), **words)
    found = kernel.flash_attn_func(q, k, v, causal=True)
    assert_matches_reference(found, exact, eager_attention(q, k, v, **words))
    assert torch.equal(found, fa_serve.attention(q, k, v, causal=True))


@torch.no_grad()
def test_a_model_of_diffusers_matches_its_native_backend() -> None:
    diffusers = pytest.importorskip("diffusers")
    import fa_serve.diffusers

    fa_serve.diffusers.register()
    torch.manual_seed(0)
    sizes = {"attention_head_dim": 64, "num_attention_heads": 4, "joint_attention_dim": 32, "pooled_projection_dim": 32}
    sizes |= {"patch_size": 1, "in_channels": 4, "num_layers": 2, "num_single_layers": 2, "axes_dims_rope": (16, 24, 24)}
    model = diffusers.FluxTransformer2DModel(**sizes).eval().cuda()
    inputs = {
        "hidden_states": torch.randn(2, 256, 4),
        "encoder_hidden_states": torch.randn(2, 77, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": torch.randn(256, 3),
        "txt_ids": torch.zeros(77, 3),
    }

    def sample(backend: str, dtype: torch.dtype) -> torch.Tensor:
        model.to(dtype).set_attention_backend(backend)
        found: torch.Tensor = model(**{name: value.to("cuda", dtype) for name, value in inputs.items()}).sample
        return found

    exact = sample("native", torch.float32).double()
    assert_matches_reference(sample("fa_serve", torch.bfloat16), exact, sample("native", torch.bfloat16))


def test_a_server_finds_what_warm_has_compiled(tmp_path: Path) -> None:
    """A second process takes every kernel from the folder, as a server of the image would."""
    pytest.importorskip("fa_serve.server", reason="a source tree on PYTHONPATH has no fa_serve.server, which `warm` needs")
    command = [sys.executable, "-m", "fa_serve", "warm", "--device", "cuda", "--max-model-len", "512", "--max-num-seqs", "4"]
    counts = []
    for _ in range(2):
        found = run(*command, XDG_CACHE_HOME=str(tmp_path))
        line = re.search(r"kernels +[\d.]+ s +(\d+) from the cache, (\d+) compiled", found)
        assert line is not None, found
        counts.append((int(line[1]), int(line[2])))
    assert counts[0][1] > 0
    assert counts[1] == (sum(counts[0]), 0)
