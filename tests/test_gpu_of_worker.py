"""Workers of pytest-xdist take the GPUs of a machine by turns."""

from __future__ import annotations

import pytest
from gpu_of_worker import choose_gpu


@pytest.mark.parametrize(
    ("worker", "count", "expected"), [("gw0", 2, "0"), ("gw5", 2, "1"), ("gw5", 1, None), ("master", 2, None), (None, 2, None)]
)
def test_each_worker_sees_one_gpu(worker: str | None, count: int, expected: str | None) -> None:
    environment = {} if worker is None else {"PYTEST_XDIST_WORKER": worker}
    choose_gpu(environment, count)
    assert environment.get("CUDA_VISIBLE_DEVICES") == expected


def test_workers_take_the_gpus_that_were_given() -> None:
    environment = {"PYTEST_XDIST_WORKER": "gw1", "CUDA_VISIBLE_DEVICES": "2,3"}
    choose_gpu(environment, 2)
    assert environment["CUDA_VISIBLE_DEVICES"] == "3"
