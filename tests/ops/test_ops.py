"""Which backend computes the ops of a device, and that a GPU without Triton is not slow in silence."""

from __future__ import annotations

import logging
import pkgutil

import pytest
import torch

from fa_serve import ops, spec
from fa_serve.backends import BackendTable
from fa_serve.ops import select
from fa_serve.spec import OpSpec


def test_no_room_takes_the_place_of_a_function_of_its_name() -> None:
    """Importing a module of a room binds the room in `fa_serve.ops`."""
    rooms = {module.name for module in pkgutil.iter_modules(ops.__path__)}
    assert {"moe", "products", "sampling"} <= rooms
    assert [name for name in sorted(rooms) if callable(getattr(ops, name, None))] == []


def test_pytorch_computes_the_ops_of_a_cpu() -> None:
    assert ops.select_ops(torch.device("cpu")).name == "torch"


def test_kernels_compute_the_ops_of_a_gpu() -> None:
    wanted = OpSpec("cuda", 90)
    assert ops.TABLE.select(wanted).name == "triton"
    assert ops.TABLE.explain(wanted) == {"triton": None, "torch": None}


def test_the_reason_against_triton_names_the_device() -> None:
    reason = ops.TABLE.explain(OpSpec("cpu", 0))["triton"]
    assert reason == "runs on CUDA and ROCm devices only, got 'cpu'"


def test_a_gpu_without_triton_is_served_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    modules = {"triton": "fa_serve.ops.no_such_module:TritonOps", "torch": ops.TABLE.modules["torch"]}
    monkeypatch.setattr(select, "TABLE", BackendTable(modules, auto=("triton", "torch")))
    monkeypatch.setattr(spec, "arch_of", lambda device: 90)
    ops.select_ops.cache_clear()
    device = torch.device("cuda", 0)
    try:
        with caplog.at_level(logging.WARNING, logger="fa_serve.ops"):
            assert ops.select_ops(device).name == "torch"
            assert ops.select_ops(device).name == "torch"
    finally:
        ops.select_ops.cache_clear()
    [record] = caplog.records
    assert record.getMessage() == (
        "ops on cuda:0 are computed by PyTorch instead of Triton kernels, which is slower: "
        "triton cannot be imported: No module named 'fa_serve.ops.no_such_module'"
    )
