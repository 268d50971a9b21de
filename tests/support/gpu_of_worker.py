"""A plugin of pytest that spreads the workers of pytest-xdist over the GPUs of a machine, one GPU for each worker.

    PYTHONPATH=.:tests python -m pytest tests/gpu -p gpu_of_worker -n 30

It is loaded by name, before any test file is imported, because torch reads CUDA_VISIBLE_DEVICES once. Tests that need two GPUs
are skipped then; run them without the plugin.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

import torch


def choose_gpu(environment: MutableMapping[str, str], count: int) -> None:
    """Let a worker see one of `count` GPUs, by turns. The process that started the workers keeps all of them."""
    worker = environment.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if worker.isdigit() and count > 1:
        given = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
        names = [name for name in given if name] or [str(number) for number in range(count)]
        environment["CUDA_VISIBLE_DEVICES"] = names[int(worker) % len(names)]


def pytest_load_initial_conftests() -> None:
    choose_gpu(os.environ, torch.cuda.device_count())
