"""transformers' `attn_implementation="flash_attention_2"` on `fa_serve.flash_attn`, for tiny models of many families.

    python tests/upstream/run_flash_families.py [--families llama,bert]

install() comes first, then transformers is imported and used unchanged. Each model computes a batch without padding and batches
with padding on the left and on the right, is compared with `attn_implementation="eager"` in float32, and decoders also generate
tokens. A family whose class does not support flash attention is left out. On a machine without a GPU, torch says that there is
one, because transformers offers flash attention on GPUs only; the tensors stay on the CPU. The exit status is 1 if a family
differs.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fa_serve.flash_attn

HERE = Path(__file__).parent
REASONS = {
    "phimoe": "its window is in its mask alone, and transformers drops masks for flash attention",
    "qwen2-moe-window": "its window is in its mask alone, and transformers drops masks for flash attention",
}
"""Families that differ with flash-attn too, and why."""

LEFT_OUT = {
    "gpt-oss": "transformers loads FlashAttention-3 from its hub instead, because of the sinks",
    "gpt2": "transformers reads the dtype from a linear layer, which gpt2 lacks, and fails in float32",
}

calls: Counter[str] = Counter()


def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*args: Any, **words: Any) -> Any:
        calls[name] += 1
        return function(*args, **words)

    counted.__dict__["__signature__"] = inspect.signature(function)  # transformers reads which arguments there are
    return counted


def install() -> None:
    if not torch.cuda.is_available():
        torch.cuda.__dict__["is_available"] = lambda: True
    for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"):
        fa_serve.flash_attn.__dict__[name] = counting(name, getattr(fa_serve.flash_attn, name))
    fa_serve.flash_attn.install()


def difference(family: Any, device: torch.device) -> tuple[float, str]:
    """The greatest error relative to the largest logit, and what generated differently."""
    from hf_families import padding_mask, positions, tokens

    eager = family.build().to(device)
    flash = copy.deepcopy(eager)
    flash.set_attn_implementation("flash_attention_2")
    worst = 0.0
    # with flash attention transformers takes the encoder's padding for that of the decoder's queries
    for kind in ("none",) if family.kind == "seq2seq" else ("none", "left", "right"):
        mask = padding_mask(kind).to(device)
        inputs = {"input_ids": tokens(*mask.shape).to(device)}
        if kind != "none":
            inputs["attention_mask"] = mask
        if family.kind == "decoder":
            inputs["position_ids"] = positions(mask)
        if family.kind == "vision":
            inputs = {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)).to(device)}
        if family.kind == "seq2seq":
            inputs["decoder_input_ids"] = inputs["input_ids"][:, :-3]
        expected, found = (model(**inputs)[0].float() for model in (eager, flash))
        valid = mask.bool() if expected.shape[:2] == mask.shape and family.kind != "seq2seq" else ...
        worst = max(worst, ((found - expected)[valid].abs().max() / expected.abs().max()).item())
    if family.kind == "decoder":
        ids = tokens(2, 6).to(device)
        words = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        if not torch.equal(eager.generate(ids, **words), flash.generate(ids, **words)):
            return worst, "generates other tokens"
    return worst, ""


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--families", help="names of tests/support/hf_families.py, separated by commas; default: all")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    install()
    sys.path.insert(0, str(HERE.parent))
    from hf_families import BY_NAME

    failed = passed = 0
    torch.set_grad_enabled(False)
    for name in arguments.families.split(",") if arguments.families else BY_NAME:
        family = BY_NAME[name]
        if name in LEFT_OUT:
            print(f"{name:20} {LEFT_OUT[name]}")
            continue
        if not family.model_class._supports_flash_attn:
            print(f"{name:20} not supported by transformers with flash attention")
            continue
        calls.clear()
        error, other = difference(family, device)
        used = " ".join(f"{key.removeprefix('flash_attn_')} {count}" for key, count in sorted(calls.items()))
        bad = error > 1e-5 or bool(other) or not calls
        note = REASONS.get(name, "") if bad else ""
        passed += not bad
        failed += bad and not note
        print(f"{name:20} {'differs' if bad else 'ok':8} error {error:.1e}  {used}  {other}  {note}", flush=True)
    print(f"{passed} families agree with eager attention, {failed} differ without a known reason")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
