"""Buffers in torch's symmetric memory, which every GPU of a machine can access, and sums over ranks that take one kernel.

    peer_sums = PeerSums.connect(store, rank, size, device)       # None: the log says why sums go through NCCL
    if peer_sums is not None and peer_sums.takes(x):
        peer_sums.sum(x)

All ranks connect or none does: each rank tells the others what it has, and every rank draws the same conclusion from that. A
message of up to MAX_BYTES takes one shot (one_shot.py). Two ranks add larger messages by pushing (pushed_sum.py). The kernels
use no NVLink multicast, which is switched off while the buffers are made. Left out: the kernels, and sums that they do not take
(all_reduce.py).
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fa_serve.ops.collectives.peer_buffers import (
    FLAG_BYTES,
    MAX_BYTES,
    MAX_PROGRAMS,
    MAX_RANKS,
    MAX_WIDTH,
    PUSHED_RANKS,
    Peers,
    buffer_bytes,
)
from fa_serve.ops.ops_backend import Norm

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

log = logging.getLogger("fa_serve.ops")

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PASSED = torch.iinfo(torch.int64).max
"""The value of a program's word that ends all its waits."""


class Facts(NamedTuple):
    """What a rank tells the others before they connect.

    obstacle:   why this rank cannot take part, "" if it can
    host:       its machine
    device:     the number of its GPU
    reached:    the GPUs whose memory its GPU can access
    processors: multiprocessors of its GPU
    """

    obstacle: str
    host: str
    device: int
    reached: list[int]
    processors: int


def peer_refusal(ranks: Sequence[Facts]) -> str | None:
    """Why these ranks must sum through NCCL, or None if they can access each other's memory."""
    if len(ranks) > MAX_RANKS:
        return f"there are {len(ranks)} ranks, but at most {MAX_RANKS} can access each other's memory"
    for rank, facts in enumerate(ranks):
        if facts.obstacle:
            return f"rank {rank}: {facts.obstacle}"
    if len({facts.host for facts in ranks}) > 1:
        return "the ranks are on several machines"
    if len({facts.device for facts in ranks}) < len(ranks):
        return "several ranks report the same GPU number"
    for rank, facts in enumerate(ranks):
        missing = {other.device for other in ranks} - {facts.device, *facts.reached}
        if missing:
            return f"cuda:{facts.device} of rank {rank} has no access to the memory of cuda:{min(missing)}"
    return None


class PeerSums:
    """Owns the buffers, and launches the sums on them. `connect` makes it.

    memory: this rank's buffer, `buffer_bytes` of uint8 whose flags are 0
    kept:   what must live as long as the addresses of `peers` are used
    """

    def __init__(self, peers: Peers, memory: Tensor, kept: object = None) -> None:
        from fa_serve.ops.collectives.one_shot import launch_all_reduce  # Triton may be missing where there is no GPU

        self._launch = launch_all_reduce
        self._peers = peers
        self._kept = memory, kept
        # made now, because `abort` runs while a kernel is waiting on the device
        on_gpu = memory.is_cuda
        self._passed = torch.full((MAX_PROGRAMS,), _PASSED, dtype=torch.int64, pin_memory=on_gpu)
        stream: Any = torch.cuda.Stream
        self._stream = stream(memory.device) if on_gpu else None

    @staticmethod
    def connect(store: Store, rank: int, size: int, device: torch.device) -> PeerSums | None:
        """Connect all ranks, which must be members of torch.distributed's default group, or none. All of them call it.

        store: where the ranks tell each other what they have
        """
        if size == 1 or device.type != "cuda":
            return None
        ranks = [Facts(*facts) for facts in _tell(store, "facts", rank, size, _facts_of(device))]
        reason = peer_refusal(ranks)
        if reason is None:
            found = None
            obstacle = ""
            try:
                found = _rendezvous(rank, size, device, min(facts.processors for facts in ranks))
            except Exception as error:  # of several types, by torch, the driver and the store
                obstacle = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            # this is also a barrier: after it, the flags of all ranks are 0
            obstacles = _tell(store, "obstacle", rank, size, obstacle)
            reason = next((f"rank {n} got no symmetric memory: {text}" for n, text in enumerate(obstacles) if text), None)
            if reason is None:
                if size == PUSHED_RANKS:
                    log.info("sums of any size over %d ranks use one kernel", size)
                else:
                    log.info("sums over %d ranks use one shot up to %d KB and NCCL above", size, MAX_BYTES >> 10)
                return found
        log.info("sums over %d ranks use NCCL: %s", size, reason)
        return None

    def takes(self, x: Tensor) -> bool:
        """Whether a kernel adds up parts like x."""
        return (
            x.is_contiguous()
            and x.numel() > 0
            and (self._peers.size == PUSHED_RANKS or not _is_large(x))
            and x.shape[-1] <= MAX_WIDTH
            and x.dtype in _DTYPES
        )

    @staticmethod
    def kernel_of(x: Tensor) -> str:
        """Which kernel adds up parts like x, if `takes` accepts them: "one shot" or "pushed"."""
        return "pushed" if _is_large(x) else "one shot"

    def sum(self, x: Tensor) -> Tensor:
        """Replace x by the sum of all ranks' x, and return it."""
        rows = x.view(-1, x.shape[-1])
        self._launch(rows, self._peers, rows, pushed=_is_large(x))
        return x

    def add(self, x: Tensor, y: Tensor, alpha: float, after: Norm | None, before: Norm | None) -> Tensor | None:
        """As `AllReduce.add`, in one launch. Returns x normalised with `before`."""
        return self._launch(y, self._peers, x, residual=x, after=after, before=before, alpha=alpha, pushed=_is_large(y))

    def abort(self) -> None:
        """Release kernels that wait for other ranks, now or later. May be called from any thread. It uses its own stream,
        which waits for nothing."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._peers.calls[1:].copy_(self._passed, non_blocking=True)


def _is_large(x: Tensor) -> bool:
    """Whether a part like x is larger than half of the one-shot buffer."""
    return x.numel() * x.element_size() > MAX_BYTES


def _facts_of(device: torch.device) -> Facts:
    from torch.distributed import _symmetric_memory

    from fa_serve.ops.collectives.exchange_group import can_exchange

    obstacle = ""
    if torch.version.hip is not None:
        obstacle = "these kernels are compiled for NVIDIA GPUs only"
    elif not hasattr(_symmetric_memory, "rendezvous"):
        obstacle = f"torch {torch.__version__} has no symmetric memory"
    elif not can_exchange():
        obstacle = f"torch {torch.__version__} can connect GPUs only once per process, and this process already has"
    number = torch.cuda.current_device() if device.index is None else device.index
    others = (other for other in range(torch.cuda.device_count()) if other != number)
    reached = [other for other in others if torch.cuda.can_device_access_peer(number, other)]
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return Facts(obstacle, f"{socket.gethostname()} {boot}", number, reached, processors)


def _tell(store: Store, what: str, rank: int, size: int, value: object) -> list[Any]:
    """Publish this rank's value under a name, and return the values of all ranks."""
    store.set(f"peer_sums_{what}_{rank}", json.dumps(value))
    return [json.loads(store.get(f"peer_sums_{what}_{other}")) for other in range(size)]


def _rendezvous(rank: int, size: int, device: torch.device, processors: int) -> PeerSums:
    """Make this rank's buffer and map the buffers of the others. All ranks call it."""
    from torch.distributed import _symmetric_memory

    from fa_serve.ops.collectives.exchange_group import exchange_group

    num_bytes = buffer_bytes(size)
    with environment(NO_MULTICAST):
        memory = _symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
        memory[:FLAG_BYTES].zero_()
        torch.cuda.synchronize(device)
        with exchange_group(rank, size) as group_name:
            handle = _symmetric_memory.rendezvous(memory, group_name)  # type: ignore[arg-type]
    buffers = [handle.get_buffer(other, (num_bytes,), torch.uint8) for other in range(size)]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64, device=device)
    calls = torch.zeros(1 + MAX_PROGRAMS, dtype=torch.int64, device=device)
    torch.cuda.synchronize(device)
    return PeerSums(Peers(rank, size, addresses, calls, processors), memory, (handle, buffers))


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Inside, the environment has these variables too."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
