"""The trainer's end of a weight transfer: it announces weights to servers over HTTP, and broadcasts them in a process group.

    sender = WeightSender("http://127.0.0.1:8000", admin_key)
    sender.init_weight_transfer()            # once; again if a server has restarted
    sender.send_weights(model.named_parameters())
    sender.destroy()

The methods are those that AsyncGRPOTrainer of trl calls on its `weight_transfer`. The servers check names, dtypes and shapes
before the first tensor is sent. Left out: weights that are divided between ranks (FSDP), which the trainer must gather first.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from fa_serve.engine.errors import WeightTransferError
from fa_serve.engine.process.controls import TRANSFER_SECONDS
from fa_serve.engine.rollout.weight_group import TransferBackend, WeightGroup, has_arrived
from fa_serve.ops.collectives.all_reduce import LOOPBACK, listen
from fa_serve.spec import ParameterError

REQUEST_SECONDS = 300.0
"""How long a server may take to answer, not counting the time in which it receives weights."""
SLOWEST_RATE = 10e6
"""Bytes per second of the slowest transfer whose end is still waited for."""
LOOK_SECONDS = 0.01


class WeightSender:
    """Sends weights to one or several servers, each with one engine.

    urls:      addresses of the servers, such as "http://127.0.0.1:8000"
    admin_key: their FA_SERVE_ADMIN_KEY
    host:      the address of this machine at which the servers meet this process; the loopback address serves only servers on
               this machine
    port:      where they meet; 0 picks a free port. It is closed as soon as all have met
    device:    a GPU sends through NCCL, and each engine needs another GPU; a CPU sends through gloo
    dtype:     in which floating-point weights are sent; must be the engines' dtype. None sends each tensor in its own dtype
    timeout:   seconds to meet, and for each tensor

    Raises ParameterError for urls that are not valid. Methods raise WeightTransferError, with the server's answer if a server
    has refused.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        admin_key: str,
        *,
        host: str = LOOPBACK,
        port: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        timeout: float = TRANSFER_SECONDS,
    ) -> None:
        self._urls = [urls] if isinstance(urls, str) else list(urls)
        if not self._urls or not all(map(_is_address, self._urls)):
            raise ParameterError("urls", "be one address or several, such as http://127.0.0.1:8000", urls)
        self._admin_key = admin_key
        self._place = (host, port)
        self._device = torch.device(device)
        self._dtype = dtype
        self._timeout = timeout
        self._group: WeightGroup | None = None

    def init_weight_transfer(self) -> None:
        """Meet the servers in a new group, which replaces any earlier group."""
        self.destroy()
        size = 1 + len(self._urls)
        host, port = self._place
        backend: TransferBackend = "nccl" if self._device.type == "cuda" else "gloo"
        try:
            store, port = listen(size, host, port)
        except (RuntimeError, OSError, UnicodeError) as error:
            raise WeightTransferError(f"this process cannot listen at {host}, port {port}: {error}") from error
        told = {"master_address": host, "master_port": port, "world_size": size, "backend": backend, "timeout": self._timeout}
        ranks = range(1, size)
        bodies = [{"init_info": {**told, "rank_offset": rank}} for rank in ranks]
        try:
            with self._asked("/init_weight_transfer_engine", bodies) as answers:
                limit = time.monotonic() + self._timeout
                while not all(has_arrived(store, rank) for rank in ranks):
                    if time.monotonic() > limit or any(answer.done() for answer in answers):
                        raise WeightTransferError(
                            f"not all servers connected to {host}, port {port}, within {self._timeout:g} s"
                        )
                    time.sleep(LOOK_SECONDS)
                self._group = WeightGroup(
                    host, port, rank=0, world_size=size, backend=backend, device=self._device, timeout=self._timeout
                )
        finally:
            del store  # which closes the port

    def send_weights(self, weights: Iterable[tuple[str, Tensor]], *, keep_pages: bool = False) -> int:
        """Send new weights to the engines. Returns their new version, as the first server reports it.

        weights:    (name, whole tensor), by the names of the engine's model, as `named_parameters()` has them. All tensors are
                    held in memory at once, because all are announced before the first is sent
        keep_pages: as in `Engine.update_weights`

        A server that refuses does so before the first tensor is sent, and keeps its weights. If the transfer fails later, the
        group is closed, and the engine computes nothing until it has received these weights: call `init_weight_transfer` and
        then this method again.
        """
        if self._group is None:
            raise WeightTransferError("there is no group of trainer and engines: call init_weight_transfer first")
        group = self._group
        listed = [*weights]
        divided = [name for name, x in listed if hasattr(x, "full_tensor")]
        if divided:
            raise ParameterError(
                "weights", "be whole tensors: call full_tensor() on every rank of the trainer first", divided[0]
            )
        if self._dtype is not None:
            listed = [(name, x.detach().to(self._dtype) if x.is_floating_point() else x) for name, x in listed]
        info = {
            "names": [name for name, _ in listed],
            "dtype_names": [str(x.dtype).removeprefix("torch.") for _, x in listed],
            "shapes": [[*x.shape] for _, x in listed],
        }
        told: dict[str, Any] = {"update_info": info, "keep_pages": keep_pages}
        self._ask_all("/update_weights", {**told, "dry_run": True})
        seconds = REQUEST_SECONDS + sum(x.nbytes for _, x in listed) / SLOWEST_RATE
        with self._asked("/update_weights", [told] * len(self._urls), seconds) as answers:
            for _, x in listed:
                group.broadcast(x.detach().to(group.device).contiguous())
        return int(answers[0].result()["weight_version"])

    def pause(self, mode: str = "keep") -> None:
        """Let the engines compute nothing until `resume`."""
        self._ask_all("/pause", {"mode": mode})

    def resume(self) -> None:
        """End a pause."""
        self._ask_all("/resume", {})

    def destroy(self) -> None:
        """Leave the group. Engines that wait for this process get an error; others drop the group when they join a new one."""
        if self._group is not None:
            self._group.close()
            self._group = None

    @contextmanager
    def _asked(self, path: str, bodies: Sequence[object], seconds: float = REQUEST_SECONDS) -> Iterator[list[Future[Any]]]:
        """Send one body to each server. They may answer while the context runs; at its end, all of them have answered.

        After an error in the context the group is closed. If a server reports an error as well, that one is raised instead of a
        WeightTransferError, because it tells more about the cause.
        """
        with ThreadPoolExecutor(len(self._urls)) as pool:
            answers = [pool.submit(self._ask, url, path, body, seconds) for url, body in zip(self._urls, bodies, strict=True)]
            try:
                yield answers
            except BaseException as error:
                self.destroy()
                if isinstance(error, WeightTransferError):
                    _results(answers)
                raise
            _results(answers)

    def _ask_all(self, path: str, body: object) -> None:
        with self._asked(path, [body] * len(self._urls)):
            pass

    def _ask(self, url: str, path: str, body: object, seconds: float) -> Any:
        parts = urlsplit(url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        headers = {"authorization": f"Bearer {self._admin_key}", "content-type": "application/json"}
        connection = kind(parts.netloc, timeout=seconds)
        try:
            connection.request("POST", parts.path.rstrip("/") + path, json.dumps(body), headers)
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
            if response.status != 200:
                raise WeightTransferError(f"{url}{path} has answered {response.status}: {text[:1024]}")
            return json.loads(text)
        except (OSError, HTTPException, ValueError) as error:
            raise WeightTransferError(f"{url}{path} has not answered: {type(error).__name__}: {error}") from error
        finally:
            connection.close()


def _results(answers: Sequence[Future[Any]]) -> None:
    """Wait for the answers. Raises the error of the first one that fails: the others fail because of it."""
    for answer in as_completed(answers):
        answer.result()


def _is_address(url: str) -> bool:
    """Whether this is a valid address for HTTP requests."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # for an invalid port or IPv6 address
        return False
