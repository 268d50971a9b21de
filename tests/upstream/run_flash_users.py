"""Packages from the registry that import flash_attn, on `fa_serve.flash_attn`: each computes the same as without it.

    python tests/upstream/run_flash_users.py [--packages diffusers,esm]

Each package is fetched once, without its dependencies, into --cache, and runs in a separate process after install(). diffusers
computes a tiny Flux transformer with the attention backends "native" and "flash". esm (EvolutionaryScale) computes attention
with padding, once with PyTorch and once with flash-attn's packed function. The exit status is 1 if a result differs, or if
flash-attn's function was not called.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fa_serve.flash_attn

PACKAGES = {
    "diffusers": ["diffusers==0.42.1", "pillow==13.0.0", "importlib_metadata==10.2.0", "zipp==4.1.2", "httpx==0.28.1"],
    "esm": ["esm==3.2.1.post1", "einops==0.8.2"],
}
FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_qkvpacked_func")

calls: Counter[str] = Counter()


def install() -> None:
    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **words: Any) -> Any:
            calls[name] += 1
            return function(*args, **words)

        return counted

    for name in FUNCTIONS:
        fa_serve.flash_attn.__dict__[name] = counting(name, getattr(fa_serve.flash_attn, name))
    fa_serve.flash_attn.install()


def diffusers() -> tuple[torch.Tensor, torch.Tensor]:
    sizes = {"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32}
    sizes |= {"patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "axes_dims_rope": (4, 4, 8)}
    model = importlib.import_module("diffusers").FluxTransformer2DModel(**sizes).eval()
    inputs = {
        "hidden_states": torch.randn(2, 16, 4),
        "encoder_hidden_states": torch.randn(2, 5, 32),
        "pooled_projections": torch.randn(2, 32),
        "img_ids": torch.rand(16, 3),
        "txt_ids": torch.rand(5, 3),
        "timestep": torch.tensor([1.0, 0.5]),
    }
    expected = model(**inputs).sample
    model.set_attention_backend("flash")
    return model(**inputs).sample, expected


def esm() -> tuple[torch.Tensor, torch.Tensor]:
    attention = importlib.import_module("esm.layers.attention")
    padding = importlib.import_module("flash_attn.bert_padding")
    plain = attention.MultiHeadAttention(64, 4).eval()
    flash = attention.FlashMultiHeadAttention(64, 4).eval()
    flash.load_state_dict(plain.state_dict())
    x = torch.randn(3, 12, 64)
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[0, 7:] = False
    mask[2, 3:] = False
    rows, indices, *_ = padding.unpad_input(x, mask)
    return padding.pad_input(flash(rows, mask), indices, 3, 12)[mask], plain(x, mask)[mask]


RUNS = {"diffusers": diffusers, "esm": esm}


def run(package: str, folder: Path) -> None:
    """Compute, compare and print, in the process of one package."""
    install()
    sys.path.append(str(folder))
    torch.manual_seed(0)
    with torch.no_grad():
        found, expected = RUNS[package]()
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    used = ", ".join(f"{name} {count}" for name, count in sorted(calls.items()))
    print(f"{package:12} error {error:.1e}  calls: {used or 'none'}")
    sys.exit(error > 1e-5 or not calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--packages", default=",".join(PACKAGES))
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "fa_serve" / "upstream")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run(arguments.run, arguments.cache / f"user-{arguments.run}")
    failed = False
    for package in arguments.packages.split(","):
        folder = arguments.cache / f"user-{package}"
        if not folder.exists():
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
            subprocess.run([*pip, "--target", str(folder), *PACKAGES[package]], check=True)
        command = [sys.executable, __file__, "--cache", str(arguments.cache), "--run", package]
        failed |= subprocess.run(command, check=False).returncode != 0
    sys.exit(failed)


if __name__ == "__main__":
    main()
