"""What holds for every test: no network, one thread per worker, and fresh memory that is poisoned.

`tests/interpreter` runs Triton's kernels on a CPU and is collected only under TRITON_INTERPRET=1, which Triton reads when it
is imported: hence a process of its own. `tests/gpu` is collected only where there is a GPU.
"""

import contextlib
import os
from collections.abc import Iterator

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start
    torch.set_num_threads(1)

with contextlib.suppress(ImportError):  # the GPU suite runs where only pytest is installed
    import hypothesis

    # a busy machine is slow, not wrong; CI tries the same examples each time
    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("house", deadline=None, suppress_health_check=slow, derandomize="CI" in os.environ)
    hypothesis.settings.load_profile("house")

collect_ignore = []
if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore.append("interpreter")
if not torch.cuda.is_available():
    collect_ignore.append("gpu")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty returns NaN (the largest integer for integers), so that reading what nobody wrote is seen."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = fill
