"""The sum of a tensor over the ranks of tensor parallelism, and what a layer does with it.

    store, port = listen(size=2)                        # rank 0; the others call join(port, size=2)
    all_reduce = AllReduce(store, rank=0, size=2, device=device)
    x = all_reduce(x)                                   # every rank calls it with its part, and gets the sum
    x, h = all_reduce.add(x, y, before=norm)            # x + the sum of y; h is this result normalised
    all_reduce.close()

Between GPUs that can access each other's memory, one kernel computes a sum, and also adds and normalises (peer_memory.py). It
takes rows of up to 16,384 numbers: sums of any size over two ranks, and small sums over more. All other sums go through
torch.distributed: gloo on CPUs, NCCL on GPUs. The result has the same bits on every rank: in our kernels each rank adds the
parts in the same order, otherwise one rank computes each element and sends it to the others. Ranks of one machine listen on the
loopback address only. Left out: who starts the ranks, and what they tell each other (fa_serve.engine.parallel.ranks).
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from fa_serve import ops
from fa_serve.ops.collectives.peer_memory import PeerSums, environment
from fa_serve.spec import FaServeError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

log = logging.getLogger("fa_serve.ops")

LOOPBACK = "127.0.0.1"
CLOSE_SECONDS = 20.0
"""How long `AllReduce.close` waits for NCCL."""
_ON_LOOPBACK = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo0" if sys.platform == "darwin" else "lo")
"""Restricts gloo and NCCL to the loopback interface. Otherwise they listen on addresses that may be reachable from outside."""


def listen(size: int, host: str = LOOPBACK, port: int = 0) -> tuple[Store, int]:
    """The store at which `size` ranks meet, and its port. Rank 0 calls it. host: an address of this machine; port: 0 for a free
    one"""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.create_server(address, family=family) as listener:
        port = int(listener.getsockname()[1])
        # without this listener, the store would listen on every address of the machine
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
        )
    return store, port


def join(port: int, size: int, host: str = LOOPBACK, timeout: timedelta = timedelta(seconds=300)) -> Store:
    """The store of rank 0. The other ranks call it. timeout: for the connection, and for each call of the store"""
    return dist.TCPStore(host, port, size, is_master=False, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]


class AllReduceError(FaServeError, RuntimeError):
    """The sum could not be computed, because another rank has ended or failed."""


class AllReduce:
    """Adds a tensor up over all ranks, which call it the same number of times with the same shapes and dtypes.

    host:    where the ranks meet. If it is a loopback address, gloo and NCCL use only the loopback interface
    ordered: add the parts in the order of ranks and in float32, as our kernels do. Otherwise NCCL and gloo may add in an order
             that depends on the place of an element in the tensor, which changes results with three or more ranks

    Raises RuntimeError if this process belongs to a process group of torch.distributed already.
    """

    def __init__(
        self, store: Store, rank: int, size: int, device: torch.device, *, host: str = LOOPBACK, ordered: bool = False
    ) -> None:
        if dist.is_initialized():
            raise RuntimeError("this process already belongs to a process group of torch.distributed; destroy that one first")
        self._size = size
        self._ordered = ordered
        self._paused = False
        self._paused_threads: set[int] = set()
        on_gpu = device.type == "cuda"
        with interfaces_for(host):
            dist.init_process_group(
                "nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=size, device_id=device if on_gpu else None
            )
        self._peer_sums: PeerSums | None = None
        try:
            self._peer_sums = PeerSums.connect(store, rank, size, device)
        except BaseException:  # another rank has ended
            self.close()
            raise

    def __call__(self, x: Tensor) -> Tensor:
        """The sum of the parts of all ranks. x: this rank's part, contiguous; may be overwritten.

        Raises AllReduceError.
        """
        if self._is_paused:
            return x
        try:
            return self._sum(x)
        except RuntimeError as error:
            raise AllReduceError(str(error)) from error

    def add(
        self, x: Tensor, y: Tensor, *, alpha: float = 1.0, after: ops.Norm | None = None, before: ops.Norm | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Add the sum of y to the residual stream x, and normalise the result.

        -> (x + alpha * sum, or x + the sum normalised with `after`; this result normalised with `before`, or None without
        `before`)

        x, y: (total, hidden), both may be overwritten; y is this rank's part, contiguous

        Raises AllReduceError.
        """
        peer_sums = self._peer_sums
        if peer_sums is None or self._is_paused or not peer_sums.takes(y) or x.dtype != y.dtype or x.stride(-1) != 1:
            return add_and_norm(x, self(y), alpha, after, before)
        return x, peer_sums.add(x, y, alpha, after, before)

    def _sum(self, x: Tensor) -> Tensor:
        if self._peer_sums is not None and self._peer_sums.takes(x):
            return self._peer_sums.sum(x)
        if not self._ordered:
            dist.all_reduce(x)
            return x
        total, *others = (part.float() if x.dtype.itemsize < 4 else part for part in self._parts(x))
        for part in others:
            total += part
        return total.to(x.dtype)

    def kernel_of(self, x: Tensor) -> str:
        """How a sum of parts like x is computed: "one shot", "pushed", "nccl" or "gloo"."""
        if self._peer_sums is not None and self._peer_sums.takes(x):
            return self._peer_sums.kernel_of(x)
        return str(dist.get_backend())

    def gather(self, x: Tensor) -> Tensor:
        """The columns of all ranks, in the order of ranks. x: this rank's columns, (n, columns) -> (n, size * columns).

        Raises AllReduceError.
        """
        if self._is_paused:
            return x.repeat(1, self._size)
        try:
            return torch.cat(self._parts(x.contiguous()), dim=1)
        except RuntimeError as error:
            raise AllReduceError(str(error)) from error

    def _parts(self, x: Tensor) -> list[Tensor]:
        """The tensors of all ranks."""
        parts = [torch.empty_like(x) for _ in range(self._size)]
        dist.all_gather(parts, x)
        return parts

    def __deepcopy__(self, memo: object) -> AllReduce:
        """A copied layer communicates through the same group."""
        return self

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, a call returns this rank's part and does not wait for the others."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    @contextmanager
    def paused_in_thread(self) -> Iterator[None]:
        """Like `paused`, but only for calls of this thread; calls of other threads still wait for the other ranks. It is for a
        forward that only this rank computes."""
        thread = threading.get_ident()
        self._paused_threads.add(thread)
        try:
            yield
        finally:
            self._paused_threads.discard(thread)

    @property
    def _is_paused(self) -> bool:
        return self._paused or (bool(self._paused_threads) and threading.get_ident() in self._paused_threads)

    def abort(self) -> None:
        """Make pending sums of GPUs return, because a rank is lost. Their values are undefined. With gloo this does nothing,
        because the pending call raises by itself. May be called from any thread."""
        if self._peer_sums is not None:
            self._peer_sums.abort()
        if dist.is_initialized() and dist.get_backend() == "nccl":
            dist.distributed_c10d._abort_process_group()

    def close(self) -> None:
        """Leave the group. Other ranks that wait in a call of gloo or NCCL get an error.

        CUDA graphs with sums of NCCL must have been freed: NCCL waits for them, here for at most CLOSE_SECONDS.
        """
        self._peer_sums = None
        if not dist.is_initialized():
            return
        closing = threading.Thread(target=dist.destroy_process_group, name="fa_serve-leave-group", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            log.warning("the process group of the ranks did not end within %g s; it will end with this process", CLOSE_SECONDS)


def add_and_norm(
    x: Tensor, total: Tensor, alpha: float, after: ops.Norm | None, before: ops.Norm | None
) -> tuple[Tensor, Tensor | None]:
    """What `AllReduce.add` does with the sum."""
    x = x.add_(total, alpha=alpha) if after is None else ops.rms_norm(total, after, residual=x)
    return x, None if before is None else ops.rms_norm(x, before)


def interfaces_for(host: str) -> AbstractContextManager[None]:
    """Inside, gloo and NCCL use only the loopback interface if the ranks meet at a loopback address."""
    return environment(_ON_LOOPBACK) if is_loopback(host) else nullcontext()


def is_loopback(host: str) -> bool:
    """Whether a name or an address is a loopback address."""
    return ip_address(socket.getaddrinfo(host, 0)[0][4][0]).is_loopback
