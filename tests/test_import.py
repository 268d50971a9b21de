"""`import fa_serve` costs little, registers with transformers in either order of imports, and does without transformers."""

import subprocess
import sys

import pytest

import fa_serve


def run(program: str) -> str:
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


KNOWN = """
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
assert "fa_serve" in ALL_ATTENTION_FUNCTIONS.valid_keys()
assert "fa_serve" in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()
"""


@pytest.mark.parametrize("first", ["import fa_serve", "import transformers.modeling_utils, fa_serve"])
def test_registers_whoever_comes_first(first):
    run(first + KNOWN)


def test_loads_nothing_by_itself():
    assert run("import sys, fa_serve; print(sorted({'torch', 'transformers', 'triton'} & sys.modules.keys()))") == "[]"


def test_without_transformers():
    program = (
        "import sys; sys.modules['transformers'] = None; import fa_serve; print(fa_serve.attention.__name__)\nfa_serve.patch"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.stdout.strip() == "attention"
    assert "needs transformers >= 5.17" in ended.stderr.splitlines()[-1]


def test_public_names():
    for name in fa_serve.__all__:
        assert getattr(fa_serve, name).__name__ == name
        assert name in dir(fa_serve)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        fa_serve.nonsense  # noqa: B018
