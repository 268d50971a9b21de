"""The embedded model: a Llama of three million parameters that adds two numbers below 100 and writes Python.

    model = AutoModelForCausalLM.from_pretrained(fa_serve.demo.model_path())

`fa-serve serve` without a model serves it, and the tests and examples run on it, with nothing to download. Its card
(`model/README.md`) tells how it was made and what it scores; `examples/train_demo_model.py` makes it. Left out: anything
that imports transformers or torch.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["model_path"]


def model_path() -> Path:
    """The folder with config.json, model.safetensors, tokenizer.json, tokenizer_config.json and generation_config.json."""
    path = Path(__file__).parent / "model"
    if not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"the embedded model is missing from {path}: reinstall fa-serve, "
            f"or make it with `python examples/train_demo_model.py --out {path}`"
        )
    return path
