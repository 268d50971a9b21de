"""The process group through which a trainer broadcasts weights to engines. Each end makes a `WeightGroup`.

    group = WeightGroup("10.0.0.7", 29500, rank=1, world_size=2, backend="nccl", device=device, timeout=30.0)
    group.broadcast(tensor)                  # rank 0, the trainer, sends it; the others receive it into theirs
    group.close()

The ranks meet at a store of the trainer, which listens at a port (`listen` of fa_serve.ops). When the constructor returns, all
ranks are connected and do not need the store any more. The group is not the default group of torch.distributed, which a trainer
may use for itself. It uses gloo on CPUs and NCCL between GPUs. Neither authenticates or encrypts. Every wait ends after
`timeout` seconds. Left out: what the tensors are, which the trainer announces over HTTP (weight_sender.py), and where they go
(fa_serve.engine.start.new_weights).
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fa_serve.engine.errors import WeightTransferError
from fa_serve.ops.collectives.all_reduce import interfaces_for, join
from fa_serve.ops.collectives.peer_memory import environment
from fa_serve.spec import ParameterError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

TransferBackend = Literal["gloo", "nccl"]


class WeightGroup:
    """One end of the group.

    host, port: of the trainer's store; rank: 0 is the trainer
    device:     of this rank's tensors: a GPU for nccl. With gloo, tensors are on the CPU whatever this is
    timeout:    seconds to meet, and for each broadcast

    Raises ParameterError for nccl without a GPU, and WeightTransferError if the ranks do not meet in time.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        rank: int,
        world_size: int,
        backend: TransferBackend,
        device: torch.device,
        timeout: float,
    ) -> None:
        if backend == "nccl" and device.type != "cuda":
            raise ParameterError("backend", "be gloo for weights that are not on a GPU", backend)
        self.device = device if backend == "nccl" else torch.device("cpu")
        self._group: Any = None
        limit = timedelta(seconds=timeout)
        try:
            # if nobody listens, the store's client would try for two timeouts
            socket.create_connection((host, port), timeout).close()
            store = join(port, world_size, host, limit)
            store.set(_arrival(rank), "")
            # without blocking waits, a thread of NCCL's group would end this process when another rank is late
            with interfaces_for(host), environment({"TORCH_NCCL_BLOCKING_WAIT": "1"} if backend == "nccl" else {}):
                make = getattr(dist, {"gloo": "ProcessGroupGloo", "nccl": "ProcessGroupNCCL"}[backend])
                self._group = make(store, rank, world_size, limit)
            self.broadcast(torch.zeros(1, device=self.device))  # NCCL connects with its first call
        except (RuntimeError, OSError, UnicodeError) as error:  # UnicodeError for a host that is not a valid name
            self.close()
            where = f"the {world_size} ranks did not connect to each other at {host}, port {port}, within {timeout:g} s"
            raise WeightTransferError(f"{where}: {error}") from error

    def broadcast(self, x: Tensor) -> None:
        """Send a tensor, or receive it into this one. x: contiguous, on `device`, of the same size on all ranks.

        Raises WeightTransferError if another rank has ended or is late. The group cannot be used afterwards.
        """
        if self._group is None:
            raise WeightTransferError("the group of trainer and engines is closed. Make another one")
        try:
            # bytes: not every release of gloo knows every dtype
            self._group.broadcast(x.detach().reshape(-1).view(torch.uint8), 0).wait()
        except RuntimeError as error:
            raise WeightTransferError(
                f"a rank has left the group of trainer and engines, or did not respond in time: {error}"
            ) from error

    def close(self) -> None:
        """Leave the group. Ranks that wait for this one get an error."""
        if self._group is not None:
            self._group.abort()
            self._group = None


def has_arrived(store: Store, rank: int) -> bool:
    """Whether a rank has reached the trainer's store. There it waits for the others until its timeout."""
    return bool(store.check([_arrival(rank)]))


def _arrival(rank: int) -> str:
    return f"fa_serve/{rank}"
