"""Triton's kernels in its interpreter: every test here runs them on CPU tensors, program by program, in NumPy."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("tests/interpreter needs TRITON_INTERPRET=1 in the environment, set before Triton is imported")
