"""`import fa_serve` takes little time and offers its public names; `tests/hf/adapter/test_register.py` tests registration."""

import subprocess
import sys

import pytest

import fa_serve
import fa_serve.engine


def run(program: str) -> str:
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_loads_nothing_by_itself():
    assert run("import sys, fa_serve; print(sorted({'torch', 'transformers', 'triton'} & sys.modules.keys()))") == "[]"


ADAPTERS = """
import sys
for host in ("flash_attn", "vllm", "diffusers", "transformers", "triton"):
    sys.modules[host] = None            # importing it raises ImportError, as if it were not installed
import fa_serve
adapters = ["fa_serve.diffusers", "fa_serve.flash_attn", "fa_serve.hf", "fa_serve.vllm"]
print(sorted({*adapters} & sys.modules.keys()))
import fa_serve.diffusers, fa_serve.flash_attn, fa_serve.vllm
fa_serve.vllm.register()
print(sorted({*adapters} & sys.modules.keys()))
"""


@pytest.mark.slow
def test_adapters_are_imported_by_name_only_and_need_no_host():
    """The adapter to transformers is imported when transformers is, which `tests/hf/adapter/test_register.py` tests."""
    assert run(ADAPTERS).splitlines() == ["[]", "['fa_serve.diffusers', 'fa_serve.flash_attn', 'fa_serve.vllm']"]


def test_public_names():
    for name in fa_serve.__all__:
        assert getattr(fa_serve, name).__name__ == name
        assert name in dir(fa_serve)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        fa_serve.nonsense  # noqa: B018


@pytest.mark.slow
def test_the_engine_is_imported_when_it_is_used():
    """A server whose engine runs in another process starts that process before either has imported transformers' models."""
    program = """
import sys
import fa_serve.engine, fa_serve.server.process
from fa_serve.engine import AsyncEngine, EngineConfig, RequestOutput, SamplingParams
print(sorted({"transformers", "triton", "safetensors", "fa_serve.hf", "fa_serve.engine.engine"} & sys.modules.keys()))
"""
    assert run(program) == "[]"


def test_public_names_of_the_engine():
    for name in fa_serve.engine.__all__:
        assert getattr(fa_serve.engine, name).__name__ == name
        assert name in dir(fa_serve.engine)
    assert sorted(fa_serve.engine._HOMES) == fa_serve.engine.__all__
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        fa_serve.engine.nonsense  # noqa: B018
