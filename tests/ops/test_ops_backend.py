"""Both backends of ops implement the Protocol, with the same names of arguments in the same order."""

from __future__ import annotations

import inspect

import pytest

from fa_serve.ops import OpsBackend
from fa_serve.ops.torch_ops import TorchOps
from fa_serve.ops.triton_ops import TritonOps

OPS = [name for name, member in vars(OpsBackend).items() if inspect.isfunction(member) and not name.startswith("_")]


@pytest.mark.parametrize("backend", [TorchOps, TritonOps])
def test_the_protocol_has_every_op(backend: type[OpsBackend]) -> None:
    assert {name for name in vars(backend) if not name.startswith("_")} == {*OPS, "name"}


@pytest.mark.parametrize("op", OPS)
def test_both_backends_take_the_arguments_of_the_protocol(op: str) -> None:
    """mypy does not check the launchers, whose modules it reads without types."""
    expected = [name for name in inspect.signature(getattr(OpsBackend, op)).parameters if name != "self"]
    for backend in (TorchOps(), TritonOps()):
        assert list(inspect.signature(getattr(backend, op)).parameters) == expected
