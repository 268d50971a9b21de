"""`import fa_serve` takes little time and offers its public names; `tests/hf/test_register.py` tests the registration."""

import subprocess
import sys

import pytest

import fa_serve


def run(program: str) -> str:
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_loads_nothing_by_itself():
    assert run("import sys, fa_serve; print(sorted({'torch', 'transformers', 'triton'} & sys.modules.keys()))") == "[]"


def test_public_names():
    for name in fa_serve.__all__:
        assert getattr(fa_serve, name).__name__ == name
        assert name in dir(fa_serve)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        fa_serve.nonsense  # noqa: B018
