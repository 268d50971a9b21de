"""The choice of the backend of ops, by the device of their input.

    select_ops(x.device).rms_norm(x, norm, None, None)

Left out: which kernel of a backend computes an op. Each room of ops decides that.
"""

from __future__ import annotations

import logging
from functools import lru_cache

import torch

from fa_serve import spec
from fa_serve.backends import BackendTable
from fa_serve.ops.ops_backend import OpsBackend
from fa_serve.spec import OpSpec

log = logging.getLogger(__name__)

TABLE: BackendTable[OpsBackend] = BackendTable(
    {"triton": "fa_serve.ops.triton_ops:TritonOps", "torch": "fa_serve.ops.torch_ops:TorchOps"}, auto=("triton", "torch")
)


@lru_cache(maxsize=64)
def select_ops(device: torch.device) -> OpsBackend:
    """The backend of ops for a device, which serves every op in every floating dtype.

    Logs a warning if PyTorch computes the ops of a GPU, because that is several times slower.
    """
    wanted = OpSpec(device.type, spec.arch_of(device))
    backend = TABLE.select(wanted)
    if device.type == "cuda" and backend.name != "triton":
        reason = TABLE.explain(wanted)["triton"]
        log.warning("ops on %s are computed by PyTorch instead of Triton kernels, which is slower: triton %s", device, reason)
    return backend
