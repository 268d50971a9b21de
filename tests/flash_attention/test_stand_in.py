"""install(): what others import and ask for, each in a fresh interpreter."""

from __future__ import annotations

import pytest
from torch_processes import after_torch


def run(program: str) -> str:
    ended = after_torch(program)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


IMPORTED = """
import sys, fa_serve
names = {"flash_attn", "flash_attn_interface", "fa_serve.flash_attn", "transformers", "triton"}
fa_serve.attention
assert not names & sys.modules.keys()
import fa_serve.flash_attn
assert names & sys.modules.keys() == {"fa_serve.flash_attn"}
"""
REFUSED = """
import types
for name in ("flash_attn", "flash_attn_interface"):
    sys.modules[name] = types.ModuleType(name)
    try:
        fa_serve.flash_attn.install()
    except fa_serve.FaServeError as error:
        assert f"install() must be called before another flash-attn is imported, but {name} was" in str(error), error
    else:
        raise AssertionError(f"{name} was imported before")
    assert "flash_attn.layers" not in sys.modules
    del sys.modules[name]
"""
INSTALLED = """
import importlib.metadata as metadata, importlib.util
fa_serve.flash_attn.install()
fa_serve.flash_attn.install()
import flash_attn, flash_attn_interface, flash_attn.bert_padding as padding
from flash_attn import flash_attn_func
from flash_attn.bert_padding import unpad_input
from flash_attn.flash_attn_interface import flash_attn_varlen_func
from flash_attn.layers.rotary import apply_rotary_emb
from flash_attn.ops.triton.rotary import apply_rotary
from flash_attn.cute import flash_attn_func as cute_func
from flash_attn.cute.interface import flash_attn_varlen_func as cute_varlen_func
import flash_attn.cute
assert flash_attn.cute is fa_serve.flash_attn.cute and cute_func is flash_attn.cute.flash_attn_func
assert cute_varlen_func is flash_attn.cute.flash_attn_varlen_func
assert metadata.version("flash-attn-4") == flash_attn.cute.__version__ == "4.0.0b36"
import flash_attn.ops.triton.rotary as rotary
assert rotary is flash_attn.layers.rotary and rotary.apply_rotary is apply_rotary
assert flash_attn is fa_serve.flash_attn and flash_attn_interface is fa_serve.flash_attn.interface
assert padding.unpad_input is unpad_input
assert importlib.util.find_spec("flash_attn") is not None
for name in ("flash_attn", "flash-attn", "Flash.Attn"):
    assert metadata.version(name) == flash_attn.__version__ == "2.8.3", name
names = metadata.packages_distributions()
assert sorted(names["flash_attn"]) == ["flash-attn", "flash-attn-4"] and names["flash_attn_interface"] == ["flash-attn-3"]
assert metadata.metadata("flash_attn")["Name"] == "flash-attn"
assert metadata.version("fa-serve")
try:
    import flash_attn.ops.triton.layer_norm
except ModuleNotFoundError as error:
    print(error.name)
"""


@pytest.mark.slow
def test_what_importing_refuses_and_installs() -> None:
    """In one interpreter: the import alone changes nothing for others, and a refused install() leaves no part behind."""
    assert run(IMPORTED + REFUSED + INSTALLED) == "flash_attn.ops.triton.layer_norm"


@pytest.mark.slow
def test_a_warning_when_transformers_was_first() -> None:
    program = "import logging, transformers, fa_serve.flash_attn; logging.basicConfig(); fa_serve.flash_attn.install()"
    ended = after_torch(program)
    assert "transformers was imported before install()" in ended.stderr


# transformers offers FlashAttention-2 on GPUs only: this machine says that it has one, and tensors stay on the CPU.
MODEL = """
import torch
torch.cuda.is_available = lambda: True
import fa_serve.flash_attn
fa_serve.flash_attn.install()
calls = []
for name in ("flash_attn_func", "flash_attn_varlen_func"):
    def counted(*args, name=name, function=getattr(fa_serve.flash_attn, name), **words):
        calls.append(name)
        return function(*args, **words)
    counted.__signature__ = __import__("inspect").signature(getattr(fa_serve.flash_attn, name))
    setattr(fa_serve.flash_attn, name, counted)
from transformers import MistralConfig, MistralForCausalLM
from transformers.utils import is_flash_attn_2_available, is_flash_attn_greater_or_equal
assert is_flash_attn_2_available() and is_flash_attn_greater_or_equal("2.7.0")
config = MistralConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64,
    sliding_window=5,
)
torch.manual_seed(0)
model = MistralForCausalLM(config).eval()
ids = torch.randint(0, 64, (2, 12))
mask = torch.ones_like(ids)
mask[0, :4] = 0
with torch.no_grad():
    model.set_attn_implementation("eager")
    expected = model(ids, attention_mask=mask).logits, model(ids).logits
    model.set_attn_implementation("flash_attention_2")
    found = model(ids, attention_mask=mask).logits, model(ids).logits
torch.testing.assert_close(found[0][mask.bool()], expected[0][mask.bool()], rtol=1e-4, atol=1e-5)
torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-5)
print(sorted(set(calls)))
"""


@pytest.mark.slow
def test_transformers_finds_it_and_runs_on_it() -> None:
    assert run(MODEL) == "['flash_attn_func', 'flash_attn_varlen_func']"
